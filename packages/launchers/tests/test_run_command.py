import os
import subprocess
import sys
import textwrap

import pytest

FILES = {
    "__init__.py": "",
    "__main__.py": """
        from launched_app.command import main

        raise SystemExit(main())
        """,
    "config.py": """
        from dataclasses import dataclass

        @dataclass
        class Config:
            text: str = "plain"
            use_cpu: bool = False

            def __post_init__(self):
                if self.text == "refused":
                    raise ValueError("text='refused': write something else")
        """,
    "command.py": """
        from posttrain_cli import Command
        from posttrain_launchers import run_command

        COMMAND = Command(
            name="app",
            summary="Write down what each process was given.",
            configs={"app": "launched_app.config:Config"},
            run="launched_app.train:main",
            launcher="posttrain_launchers:LaunchOptions",
        )

        def main():
            return run_command(COMMAND)
        """,
    "train.py": """
        import os
        import pathlib
        import sys

        def main(config):
            rank = os.environ.get("RANK", "alone")
            pathlib.Path(f"rank-{rank}").write_text(f"{config.text} {os.environ.get('APP_VARIABLE')}", encoding="utf-8")
            print("torch" in sys.modules)
        """,
}


@pytest.fixture
def app(tmp_path, monkeypatch):
    package = tmp_path / "launched_app"
    package.mkdir()
    for name, source in FILES.items():
        package.joinpath(name).write_text(textwrap.dedent(source))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "POSTTRAIN_WORKER", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*words, **variables):
        command = [sys.executable, "-m", "launched_app", *words]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr.partition(" ...\n")[2] or done.stderr

    return run


def written(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("rank-*")}


def test_flags_and_file_reach_every_process(app, tmp_path):
    (tmp_path / "run.yaml").write_text("env: {APP_VARIABLE: on}\nnproc_per_node: 3\ntext: file\n")
    code, _, err = app("--config", "run.yaml", "--nproc_per_node", "2", "--text", "Zwei Wörter 🤖")
    assert (code, err.count("error")) == (0, 0), err
    assert written(tmp_path) == {f"rank-{rank}": "Zwei Wörter 🤖 on" for rank in range(2)}


def test_one_process_needs_no_torch_of_the_launcher(app, tmp_path):
    code, out, _ = app("--nproc_per_node", "1", "--text", "one")
    assert (code, out) == (0, "False\n")
    assert written(tmp_path) == {"rank-alone": "one None"}
    assert app("--use_cpu")[:2] == (0, "False\n"), "a run on the CPU asks for no devices"


def test_a_mistake_is_said_once_before_anything_starts(app, tmp_path):
    code, out, err = app("--nproc_per_node", "2", "--txt", "x")
    assert (code, out) == (2, "")
    assert err == "python -m launched_app: error: unknown flag --txt; did you mean --text?\n"
    code, _, err = app("--nnodes", "2")
    assert code == 2 and err.count("\n") == 1 and "needs rdzv_endpoint" in err
    assert written(tmp_path) == {}


def test_a_config_that_refuses_its_values_is_said_once_by_all_processes_together(app):
    code, _, err = app("--nproc_per_node", "2", "--text", "refused")
    assert code == 2
    assert err == "posttrain app: error: text='refused': write something else\n"


def test_under_torchrun_launcher_flags_are_refused_and_the_rest_runs_in_place(app, tmp_path):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert app("--text", "in place", **torchrun)[0] == 0
    assert written(tmp_path) == {"rank-1": "in place None"}
    code, _, err = app("--nproc_per_node", "2", **torchrun)
    assert code == 2
    assert "--nproc_per_node: this process is one of several that another launcher started" in err


def test_help_lists_the_launcher_last_and_imports_no_torch(app, tmp_path):
    code, out, _ = app("--help")
    assert code == 0
    assert out.index("\napp:") < out.index("\nlauncher:") < out.index("--nproc_per_node INT|none")
    assert "Processes on this machine (default: none)" in " ".join(out.split())
    assert written(tmp_path) == {}
