"""What no member can say by itself: arrows, versions, public names and what the files may hold."""

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import pytest
import versions
from bump import rewritten
from workspace import ROOT, Member, members

MODULES = [member.module for member in members()]


def public_names(member: Member) -> list[str]:
    """The `__all__` of a member, from its source where it stands there: collecting tests imports little."""
    for node in ast.parse((member.source / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    return list(getattr(import_module(member.module), "__all__", ()))


PUBLIC = [(member.module, name) for member in members() for name in public_names(member)]


def test_versions_pins_and_declared_siblings_agree():
    assert versions.problems() == []


def test_arrows(tmp_path):
    command = [Path(sys.executable).with_name("lint-imports"), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_member_is_under_the_arrows():
    import tomllib

    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = {module.strip() for layer in linter["contracts"][0]["layers"] for module in layer.split("|")}
    assert sorted(linter["root_packages"]) == sorted(MODULES)
    assert sorted(layers) == sorted(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_package_lists_its_public_names(module):
    package = import_module(module)
    assert package.__doc__
    assert package.__all__ == sorted(package.__all__, key=str.lower) or package.__all__ == sorted(package.__all__)
    assert len(package.__all__) <= 16
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


@pytest.mark.parametrize("module", MODULES)
def test_package_init_is_a_flat_list(module):
    tree = ast.parse(Path(import_module(module).__file__).read_text())
    allowed = (ast.Import, ast.ImportFrom, ast.Assign)
    defined = [type(node).__name__ for node in tree.body[1:] if not isinstance(node, allowed)]
    assert defined == []


def documented(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


def is_record(thing: object) -> bool:
    """Whether it only carries what some function makes or takes: that function's example shows it."""
    record = inspect.isclass(thing) and (issubclass(thing, tuple | BaseException) or is_dataclass(thing))
    return record or bool(getattr(thing, "_is_protocol", False))


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=[f"{module}.{name}" for module, name in PUBLIC])
def test_public_name_has_a_docstring_whose_example_runs(module, name, tmp_path, monkeypatch, request):
    thing = getattr(import_module(module), name)
    if not documented(thing):
        pytest.skip("a constant")
    if thing.__module__.split(".")[0] != module:
        pytest.skip(f"re-exported from {thing.__module__}")
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert own and not own.startswith(f"{name}("), f"{module}.{name} has no docstring"
    assert ">>>" in own or is_record(thing), f"{module}.{name} has no example"
    monkeypatch.chdir(tmp_path)
    where = sys.modules[thing.__module__]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    names = {**vars(where), "getfixture": request.getfixturevalue}
    for test in doctest.DocTestFinder(recurse=False).find(thing, name, module=where, globs=names):
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def tracked() -> list[Path]:
    """Files of the repository that are text."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [
        file for file in files if file.is_file() and file.suffix != ".lock" and b"\0" not in file.read_bytes()[:4096]
    ]


def test_files_name_no_machine_and_no_unfinished_work():
    unfinished = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    machine = r"(?<![\w.$}])/(?:root|work|home/\w+|opt/wheels)/"
    bad = re.compile(rf"{machine}|\b(?:{unfinished})\b")
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in tracked()
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if bad.search(line)
    ]
    assert found == []


def test_modules_and_functions_stay_short():
    long = []
    for file in (file for member in members() for file in member.source.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if len(text.splitlines()) > 500:
            long.append(f"{file.relative_to(ROOT)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                if body[-1].end_lineno - body[0].lineno + 1 > 80:
                    long.append(f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert long == []


def test_bump_rewrites_the_version_and_every_sibling_pin():
    text = '[project]\nversion = "0.1.0"\ndependencies = ["a==0.1.0", "a-b[peft]==0.1.0", "torch>=2.13", "c==0.1.0"]\n'
    expected = text.replace('version = "0.1.0"', 'version = "0.2.0"').replace('"a==0.1.0"', '"a==0.2.0"')
    assert rewritten(text, ["a", "a-b"], "0.2.0") == expected.replace('"a-b[peft]==0.1.0"', '"a-b[peft]==0.2.0"')


def test_uv_bootstrap_says_what_is_missing(tmp_path):
    """Without uv, venv and pip the message names all three ways out."""
    blocked = tmp_path / "tools"
    blocked.mkdir()
    script = (ROOT / "tools" / "uv.py").read_text().replace('"-m", "venv"', '"-c", "raise SystemExit(1)", "venv"')
    (blocked / "uv.py").write_text(script.replace('"-m", "pip"', '"-c", "raise SystemExit(1)", "pip"'))
    environment = {key: value for key, value in os.environ.items() if key != "UV"} | {"PATH": str(tmp_path)}
    command = [sys.executable, str(blocked / "uv.py"), "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "python3-venv" in done.stderr and "uv itself" in done.stderr
    assert list(tmp_path.iterdir()) == [blocked]
