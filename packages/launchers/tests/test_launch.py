import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from posttrain_launchers import LaunchOptions, launch, world_size
from posttrain_launchers.launch import local_processes, runs_here

LAUNCH = """
import sys
from posttrain_launchers import LaunchOptions, launch
sys.exit(launch(sys.argv[1], sys.argv[3:], LaunchOptions(**eval(sys.argv[2]))))
"""


@pytest.fixture(autouse=True)
def no_outer_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "POSTTRAIN_WORKER", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def write(folder, source):
    folder.joinpath("script_of_test.py").write_text(textwrap.dedent(source), encoding="utf-8")


def start(folder, source, options, *arguments):
    """A launcher as a process of its own."""
    write(folder, source)
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "script_of_test", repr(options), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """The launcher in this process, which pays for importing torch once."""

    def launched(source, options, *arguments):
        write(tmp_path, source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        code = launch("script_of_test", arguments, LaunchOptions(**options))
        return code, *capfd.readouterr()

    return launched


def pids(folder, number, seconds=60):
    """The process ids that the ranks of a script left in files named after them."""
    end = time.monotonic() + seconds
    while len(found := list(folder.glob("pid-*"))) < number:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.05)
    return [int(path.name.removeprefix("pid-")) for path in found]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # a zombie in a container without a reaper has ended all the same
        return file.read().rpartition(")")[2].split()[0] != "Z"


def wait_until_gone(numbers, seconds):
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in numbers):
        assert time.monotonic() < end, "orphans"
        time.sleep(0.1)


def test_two_ranks_reduce_over_gloo(run, tmp_path):
    code, out, err = run(
        """
        import os, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(value)
        threads = os.environ["OMP_NUM_THREADS"]
        open(f"sum-{dist.get_rank()}", "w").write(f"{value.item()} {sys.argv[1:]} {__name__} {threads}")
        dist.destroy_process_group()
        """,
        {"nproc_per_node": 2},
        "--text",
        "zwei Wörter",
    )
    assert (code, err) == (0, "")
    for rank in range(2):
        assert (tmp_path / f"sum-{rank}").read_text() == "3.0 ['--text', 'zwei Wörter'] __main__ 1"
    assert not list(tmp_path.glob("posttrain-launch-*"))


def test_a_failing_rank_ends_the_others_and_is_shown_first(run, tmp_path):
    began = time.monotonic()
    code, _, err = run(
        """
        import os, pathlib, time
        pathlib.Path(f"pid-{os.getpid()}").touch()
        if os.environ["RANK"] == "1":
            while len(list(pathlib.Path().glob("pid-*"))) < 2:
                time.sleep(0.01)
            raise KeyError("the reward of row 7")
        time.sleep(300)
        """,
        {"nproc_per_node": 2},
    )
    assert code == 1
    assert err.startswith("rank 1 of 2 failed:\nTraceback (most recent call last):\n  File ")
    assert 'script_of_test.py", line 7' in err.splitlines()[2]
    assert "KeyError: 'the reward of row 7'" in err
    assert "runpy" not in err and "elastic" not in err
    assert time.monotonic() - began < 60
    wait_until_gone(pids(tmp_path, 2), 1)


def test_the_first_of_two_failures_is_shown_whole_and_the_other_as_a_line(run):
    code, _, err = run(
        """
        import os, pathlib, time
        rank = os.environ["RANK"]
        if rank == "0":
            while not pathlib.Path("first").exists():
                time.sleep(0.01)
            time.sleep(1)  # a busy machine may leave the other between the file and its error
            raise ConnectionError("peer closed")
        pathlib.Path("first").touch()
        raise ValueError("cause")
        """,
        {"nproc_per_node": 2},
    )
    assert code == 1
    assert "rank 1 of 2 failed" in err.splitlines()[0]
    assert err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("statement", "code", "text"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL, as the system does when memory runs out"),
        ("os.kill(os.getpid(), 11)", 139, "SIGSEGV"),
    ],
)
def test_exit_codes_and_signals_of_a_rank(run, statement, code, text):
    source = f"import os, time\nif os.environ['RANK'] == '0':\n    {statement}\ntime.sleep(300)\n"
    returned, _, err = run(source, {"nproc_per_node": 2})
    assert returned == code
    assert err.startswith("rank 0 of 2 failed: ") and text in err


def test_a_signal_reaches_every_rank(tmp_path):
    source = """
    import os, pathlib, signal, sys, time
    def end(number, frame):
        pathlib.Path(f"got-{os.environ['RANK']}-{number}").touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(300)
    """
    with start(tmp_path, source, {"nproc_per_node": 2}) as process:
        ranks = pids(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "ended by SIGTERM\n"
    assert {path.name for path in tmp_path.glob("got-*")} == {"got-0-15", "got-1-15"}
    wait_until_gone(ranks, 1)


def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    source = """
    import os, pathlib, time
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(300)
    """
    with start(tmp_path, source, {"nproc_per_node": 2}) as process:
        ranks = pids(tmp_path, 2)
        process.kill()
        wait_until_gone(ranks, 15)


def test_a_failed_attempt_is_started_again(run):
    code, _, err = run(
        """
        import os
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", "first attempt"
        """,
        {"nproc_per_node": 1, "max_restarts": 1},
    )
    assert code == 0
    assert "rank 0 failed" in err and "AssertionError: first attempt" in err


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_two_machines_meet_at_the_endpoint(tmp_path, backend):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = """
    import os
    open(f"rank-{os.environ['RANK']}", "w").write(os.environ["WORLD_SIZE"])
    """
    options = {"nproc_per_node": 1, "nnodes": "2", "rdzv_backend": backend, "rdzv_endpoint": f"127.0.0.1:{port}"}
    nodes = [start(tmp_path, source, {**options, "node_rank": rank}) for rank in range(2)]
    outcomes = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outcomes
    assert (tmp_path / "rank-0").read_text() == (tmp_path / "rank-1").read_text() == "2"


def test_one_process_is_this_one(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    script = tmp_path / "script_run_here.py"
    script.write_text("import os, sys\nprint(os.getpid(), sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    assert launch("script_run_here", ["5"], LaunchOptions(nproc_per_node=1)) == 5
    assert capsys.readouterr().out == f"{os.getpid()} ['5']\n"


def test_under_torchrun_the_process_does_the_work_itself(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert runs_here(LaunchOptions(nproc_per_node=4))
    assert world_size(LaunchOptions()) == 8


@pytest.mark.parametrize(("devices", "processes"), [(0, 1), (1, 1), (8, 8)])
def test_one_process_for_each_accelerator(monkeypatch, devices, processes):
    monkeypatch.setattr("posttrain_devices.local_devices", lambda: devices, raising=False)
    options = LaunchOptions()
    assert local_processes(options) == world_size(options) == processes
    assert runs_here(options) == (processes == 1)
    assert world_size(LaunchOptions(nnodes="2:4", rdzv_endpoint="host:1")) == 2 * processes


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node=0"),
        ({"nnodes": "0"}, "nnodes=0"),
        ({"nnodes": "4:2"}, "nnodes=4:2"),
        ({"nnodes": "two"}, "nnodes=two"),
        ({"nnodes": "2"}, "needs rdzv_endpoint"),
        ({"nnodes": "2", "node_rank": 2, "rdzv_endpoint": "host:1"}, "write 0 to 1"),
        ({"max_restarts": -1}, "max_restarts=-1"),
    ],
)
def test_impossible_options_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        LaunchOptions(**options)


def test_importing_the_package_imports_no_torch():
    code = "import sys, posttrain_launchers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
