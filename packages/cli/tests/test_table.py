import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from posttrain_cli import Command, CommandError, make_table
from posttrain_cli.schema import describe

HEAVY = ("heavylib", "demo_app.config", "torch", "transformers", "datasets", "argparse", "subprocess")
CHECK = """
import sys
from pathlib import Path
from posttrain_cli import Command
command = Command({name!r}, "Train a demo.", {configs!r}, run={run!r}, table=Path({table!r}))
code = command.main({words!r})
print("modules:", len(sys.modules), *[name for name in {heavy!r} if name in sys.modules])
"""


def modules_after(command, words, *more):
    """The heavy modules that answering a command line imported, and its whole output."""
    code = CHECK.format(
        name=command.name,
        configs=dict(command.configs),
        run=command.run,
        table=str(command.table),
        words=words,
        heavy=(*HEAVY, *more),
    )
    code = code.replace("code = ", "try:\n    code = ").replace("print(", "except SystemExit:\n    pass\nprint(", 1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    *output, last = done.stdout.splitlines()
    return last.split()[2:], "\n".join(output) + done.stderr, int(last.split()[1])


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--help-all"], ["--lerning_rate", "1"], ["--max_steps", "x"]])
def test_help_and_mistakes_import_nothing_heavy(command, words):
    heavy, output, count = modules_after(command, words, "yaml")
    assert heavy == []
    assert "Traceback" not in output
    assert count < 250


def test_a_file_costs_yaml_and_nothing_else(command, tmp_path):
    (tmp_path / "run.yaml").write_text("lerning_rate: 1")
    heavy, output, _ = modules_after(command, ["--config", str(tmp_path / "run.yaml")], "yaml")
    assert heavy == ["yaml"]
    assert "did you mean learning_rate?" in output


def test_help_shows_the_methods_own_options_first(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        command.parse(["--learning_rate", "1", "--help"], prog="posttrain demo")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: posttrain demo [--config FILE]")
    for before, after in (("\ndemo:", "\nmodel:"), ("\nmodel:", "\ndata:"), ("\ndata:", "\ntraining:")):
        assert text.index(before) < text.index(after)
    assert "--max_length INT|none" in text and "(default: 1024)" in text
    assert "Longest row in tokens; longer ones are cut (default" in text, "the docstring is the help, in short"
    assert "--strategy bfd|bfd_split|wrapped" in text
    assert "--[no_]packing" in text and "Put several rows into one" in text
    assert "Step size of this method (default: 2e-05)" in text
    assert "Where the run is written (default: none)" in text
    assert "extra_7" not in text and "--device" not in text
    assert "more training options: posttrain demo --help-all" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_help_all_shows_everything_in_full(command, capsys):
    with pytest.raises(SystemExit):
        command.parse(["--help_all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--extra_119 INT" in text
    assert "Packed rows have exactly this length." in text
    assert "--extra_9 " not in text, "an option that is replaced is not offered"


def test_version(app, capsys):
    command = Command("demo", "Demo.", {"demo": "demo_app.config:Source"}, run="heavylib:main")
    with pytest.raises(SystemExit) as stop:
        command.parse(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == "heavylib 1.0\n"


def test_the_shipped_table_is_used_while_versions_agree(command, capsys):
    table = json.loads(command.table.read_text())
    assert table["versions"]["heavylib"] == "1.0"
    assert table == make_table(command.groups)
    assert len(command.options) > 130
    assert capsys.readouterr().err == ""


def test_other_versions_rebuild_once_into_the_cache(command, app, tmp_path, capsys):
    set_version = app / "heavylib-0.dist-info" / "METADATA"
    set_version.write_text(set_version.read_text().replace("1.0", "2.0"))
    heavy = app / "heavylib.py"
    heavy.write_text(heavy.read_text().replace("seed: int = 42", "seed: int = 42\n    brand_new: int = 1"))
    shipped = command.table.read_text()
    assert "brand_new" in command.options
    assert capsys.readouterr().err.startswith("demo: reading its options from the installed packages")
    again = Command(command.name, command.summary, command.configs, command.run, table=command.table)
    assert "brand_new" in again.options
    assert capsys.readouterr().err == ""
    assert command.table.read_text() == shipped
    assert [path.name for path in (tmp_path / "cache" / "posttrain").iterdir()] != []


def test_a_broken_cache_is_rebuilt_and_an_unwritable_one_is_said(command, tmp_path, monkeypatch, capsys):
    command.table.unlink()
    assert "learning_rate" in command.options
    (cached,) = (tmp_path / "cache" / "posttrain").iterdir()
    cached.write_text('{"format": 1, "conf')
    command.table.unlink(missing_ok=True)
    again = Command(command.name, command.summary, command.configs, command.run)
    cached.write_text("{")
    assert "learning_rate" in again.options
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    third = Command(command.name, command.summary, command.configs, command.run)
    assert "learning_rate" in third.options
    assert "could not be kept" in capsys.readouterr().err


def test_configs_that_cannot_be_imported(app):
    (app / "demo_app" / "config.py").write_text("raise ImportError('no demo library')")
    command = Command("demo", "Demo.", {"demo": "demo_app.config:DemoConfig"}, run="demo_app.train:main")
    with pytest.raises(CommandError, match="the options of demo cannot be read: ImportError: no demo library"):
        command.parse([])


def test_configs_that_are_never_done_importing(app, monkeypatch):
    (app / "demo_app" / "config.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr("posttrain_cli.table.PATIENCE", 0.5)
    command = Command("demo", "Demo.", {"demo": "demo_app.config:DemoConfig"}, run="demo_app.train:main")
    with pytest.raises(CommandError, match=r"importing demo_app.config took more than 0.5 s"):
        command.parse([])


def test_the_generator_writes_the_shipped_table(command, app):
    (app / "demo_app" / "command.py").write_text(
        "from pathlib import Path\nfrom posttrain_cli import Command\n"
        f"COMMAND = Command('demo', 'Demo.', {dict(command.configs)!r}, run='demo_app.train:main',\n"
        "                  table=Path(__file__).with_name('options.json'))\n"
    )
    before = command.table.read_text()
    command.table.unlink()
    words = [sys.executable, "-m", "posttrain_cli", "demo_app.command:COMMAND"]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert command.table.read_text() == before
    assert subprocess.run([*words[:3]], env=environment(), capture_output=True).returncode != 0


def test_two_meanings_of_one_name_are_refused(app):
    (app / "demo_app" / "clash.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int = 1\n"
        "@dataclass\nclass B:\n    x: int = 2\n"
        "@dataclass\nclass C:\n    config: int = 1\n"
    )
    with pytest.raises(ValueError, match=r"demo_app.clash:B.x: differs in type or default"):
        make_table({"a": "demo_app.clash:A", "b": "demo_app.clash:B"})
    with pytest.raises(ValueError, match=r"demo_app.clash:C.config: a field cannot have this name"):
        make_table({"c": "demo_app.clash:C"})


def test_describe_reads_types_defaults_and_help(app):
    config = import_module("demo_app.config")
    options = {option["name"]: option for option in describe(config.DemoConfig)}
    assert options["learning_rate"]["default"] == 2e-5
    assert options["pad"]["type"]["kind"] == "union"
    assert options["device"]["type"]["kind"] == "unsupported"
    assert "_hidden" not in options
    assert describe(config.Source)[0] == {
        "name": "path",
        "type": {"kind": "str"},
        "package": "demo_app",
        "required": True,
        "help": "Name or folder.",
    }
