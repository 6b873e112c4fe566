import subprocess
import sys
from importlib import import_module

import pytest

INIT = """
from posttrain_cli import lazy_exports

__version__ = "7"
__getattr__, __dir__, __all__ = lazy_exports(__name__, {"Trainer": "lazy_demo.train", "Config": "lazy_demo.config"})
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "lazy_demo"
    folder.mkdir()
    (folder / "__init__.py").write_text(INIT)
    (folder / "train.py").write_text("class Trainer: pass")
    (folder / "config.py").write_text("class Config: pass")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("lazy_demo", "lazy_demo.train", "lazy_demo.config"):
        sys.modules.pop(name, None)


def test_a_name_is_imported_when_it_is_used(package):
    lazy_demo = import_module("lazy_demo")

    assert "lazy_demo.train" not in sys.modules
    assert lazy_demo.__all__ == ["Config", "Trainer"]
    assert {"Config", "Trainer", "__version__"} <= set(dir(lazy_demo))
    assert lazy_demo.Trainer.__name__ == "Trainer"
    assert "lazy_demo.config" not in sys.modules
    assert lazy_demo.Config is vars(lazy_demo)["Config"], "the second time costs nothing"


def test_an_unknown_name_is_an_attribute_error_with_the_nearest(package):
    lazy_demo = import_module("lazy_demo")

    with pytest.raises(AttributeError, match=r"'lazy_demo' has no attribute 'Trainr'; did you mean 'Trainer'\?"):
        lazy_demo.Trainr  # noqa: B018
    assert not hasattr(lazy_demo, "__wrapped__")
    with pytest.raises(ImportError):
        exec("from lazy_demo import Nothing")


def test_star_import(package):
    scope = {}
    exec("from lazy_demo import *", scope)
    assert {"Trainer", "Config"} <= set(scope)


def test_the_package_itself_is_light():
    code = "import sys, posttrain_cli; print([n for n in ('torch', 'yaml', 'argparse') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
