"""What holds for the tests of every app. `tools/alone.py` takes it along when it tests one by itself."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from app_runs import saved


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory):
    """Prepared rows go to a temporary folder, here and in the commands that tests start."""
    import datasets

    folder = tmp_path_factory.mktemp("cache")
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder
    names = ("HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME")
    kept = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(folder)))
    datasets.disable_progress_bars()
    yield
    datasets.config.HF_DATASETS_CACHE = before
    for name, value in kept.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """Nothing is written outside tmp_path, not even a default output folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def tokenizer():
    """To be read; what changes it takes `fresh_tokenizer`."""
    from posttrain_data import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture
def fresh_tokenizer():
    """A tokenizer that a test may change."""
    from posttrain_data import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory, tokenizer):
    """A saved llama with its tokenizer."""
    return saved(tmp_path_factory.mktemp("models") / "llama", "llama", tokenizer)


@pytest.fixture(scope="session")
def no_weights(tmp_path_factory, tokenizer):
    """A model folder without weights: what is raised with it is raised before any are loaded."""
    folder = saved(tmp_path_factory.mktemp("models") / "empty", "llama", tokenizer)
    (folder / "model.safetensors").unlink()
    return folder
