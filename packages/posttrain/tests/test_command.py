import os
import subprocess
import sys
from importlib import import_module, metadata

import posttrain
import pytest
from posttrain.command import METHODS, main, method
from posttrain.env import report

HEAVY = ("torch", "transformers", "datasets", "accelerate", "peft", "yaml")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """An option table that must be rebuilt for the versions here goes to a folder of the tests, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def imported(words):
    """Which heavy packages answering a command line imported, its exit code, and what it printed."""
    code = (
        "import sys\nfrom posttrain.command import main\n"
        f"code = main({words!r})\nprint(code, *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *output, last = done.stdout.splitlines()
    first, *heavy = last.split()
    return heavy, int(first), "\n".join(output), done.stderr


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["plan", "--help"], ["env", "--help"]])
def test_answers_without_importing_torch(words):
    heavy, code, output, errors = imported(words)
    assert (heavy, code, errors) == ([], 0, "")
    assert "posttrain" in output


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_help_and_mistakes_import_no_torch(name):
    heavy, code, output, _ = imported([name, "--help"])
    assert (heavy, code) == ([], 0)
    assert output.startswith(f"usage: posttrain {name} [--config FILE]")
    assert f"\n{name}:\n" in output and "\nlauncher:\n" in output
    heavy, code, _, errors = imported([name, "--output_dri", "x"])
    assert (heavy, code) == ([], 2)
    assert errors.splitlines()[-1] == (
        f"posttrain {name}: error: unknown flag --output_dri; did you mean --output_dir?"
    )


def test_help_lists_the_methods(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in METHODS:
        assert f"  {name} " in text and method(name).summary in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stf"], "there is no command 'stf'; did you mean sft? (commands: sft, dpo, kto, reward, plan, env)"),
        (["--hlep"], "there is no command '--hlep'"),
        (["plan", "sff"], "there is no method 'sff'; did you mean sft? (methods: sft, dpo, kto, reward)"),
        (["env", "now"], "env takes no arguments, got 'now'"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("posttrain: error: ") and message in err and err.count("\n") == 1


def test_plan_gets_the_configs_and_the_number_of_processes(tmp_path, monkeypatch, capsys):
    (tmp_path / "planned_app.py").write_text(
        "from dataclasses import dataclass\n"
        "from posttrain_cli import Command\n"
        "@dataclass\nclass Config:\n    x: int = 1\n"
        "def run(config):\n    return 0\n"
        "def plan(config, world_size):\n    print(config.x, world_size)\n"
        "def make(plan):\n"
        "    return Command('app', 'App.', {'app': 'planned_app:Config'}, run='planned_app:run', plan=plan,\n"
        "                   launcher='posttrain_launchers:LaunchOptions')\n"
        "COMMAND, UNPLANNED = make('planned_app:plan'), make(None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(METHODS, "app", "planned_app:COMMAND")
    assert main(["plan", "app", "--x", "3", "--nproc_per_node", "4"]) == 0
    assert capsys.readouterr().out == "3 4\n"
    monkeypatch.setitem(METHODS, "app", "planned_app:UNPLANNED")
    assert main(["plan", "app"]) == 2
    assert "app has no plan" in capsys.readouterr().err
    sys.modules.pop("planned_app")


def test_env_reports_versions_and_what_is_wrong(monkeypatch):
    text, problems = report()
    for name in ("posttrain ", "torch ", "transformers "):
        assert f"\n{name}" in text
    assert problems == [] and "nothing is wrong" in text
    real = metadata.version
    monkeypatch.setattr(
        "posttrain.env.metadata.version", lambda name: "5.18.1" if name == "transformers" else real(name)
    )
    text, problems = report()
    assert any(problem.startswith("transformers 5.18.1 is not supported; posttrain-") for problem in problems)
    assert "wrong: transformers 5.18.1" in text


def test_a_torch_that_does_not_load_is_a_problem(monkeypatch):
    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("posttrain_devices.diagnose", broken)
    text, problems = report()
    assert problems[-1].startswith("torch cannot be imported: libcudart")


def test_names_are_imported_when_used():
    assert posttrain.__version__ == metadata.version("posttrain")
    code = "import sys, posttrain; print(*[n for n in ('torch', 'posttrain_sft') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"
    for name in posttrain.__all__:
        assert name in dir(posttrain)
        assert getattr(posttrain, name) is not None
    assert posttrain.SFTTrainer is import_module("posttrain_sft").SFTTrainer
    with pytest.raises(ImportError):
        exec("from posttrain import SFTTrainr")


def test_it_runs_as_a_module_and_as_a_command(tmp_path):
    for command in ([sys.executable, "-m", "posttrain"], [os.path.join(os.path.dirname(sys.executable), "posttrain")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"posttrain {posttrain.__version__}\n")
        assert subprocess.run([*command, "stf"], capture_output=True).returncode == 2
