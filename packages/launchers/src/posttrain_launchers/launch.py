"""From one command line to one process an accelerator."""

import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from posttrain_cli import Command, CommandError, Parsed, guarded

from posttrain_launchers.failure import tell_launcher, tells_launcher
from posttrain_launchers.options import LaunchOptions

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def run_command(command: Command, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run a command on as many processes as its launcher flags say: the `main` of an app.

    Args:
        command: The command; its `launcher` is `"posttrain_launchers:LaunchOptions"`.
        argv: The words after the command; those of this process by default.
        prog: What messages call the command; by default what was typed.

    Returns:
        The exit code: 0, 2 for a mistake in the command line, that of the first process to fail, or 128 and the signal
        that ended the run.

    Example:
        >>> from posttrain_cli import Command
        >>> from posttrain_launchers import run_command
        >>> command = Command(
        ...     "demo",
        ...     "Show it.",
        ...     {"demo": "posttrain_cli.examples:DemoConfig"},
        ...     run="builtins:print",
        ...     launcher="posttrain_launchers:LaunchOptions",
        ... )
        >>> run_command(command, ["--layers", "q", "--nproc_per_node", "1"])
        DemoConfig(learning_rate=0.0001, layers=['q'], shuffle=True)
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    called = prog or _program(command)

    def action() -> int:
        parsed = command.parse(words, called)
        os.environ.update(parsed.env)
        options = launch_options(parsed)
        set_here = parsed.values["launcher"]
        if set_here and _started_elsewhere() and not tells_launcher():
            flag = next(iter(set_here))
            raise CommandError(f"--{flag}: this process is one of several that another launcher started; drop the flag")
        if runs_here(options):
            return parsed.run()
        return launch(command.package, words, options)

    if not tells_launcher():
        return guarded(action, called)
    try:
        return action()
    except CommandError as error:
        tell_launcher(f"{called}: error: {error}")
        return 2


def launch_options(parsed: Parsed) -> LaunchOptions:
    """The launcher's options of a parsed command line; with `--use_cpu`, one process is the default.

    Raises:
        CommandError: If they contradict each other.

    Example:
        >>> from posttrain_cli import Command
        >>> from posttrain_launchers import launch_options
        >>> command = Command(
        ...     "demo",
        ...     "Show it.",
        ...     {"demo": "posttrain_cli.examples:DemoConfig"},
        ...     run="builtins:print",
        ...     launcher="posttrain_launchers:LaunchOptions",
        ... )
        >>> launch_options(command.parse(["--nproc_per_node", "4"])).nproc_per_node
        4
    """
    options = parsed.launch_options()
    if options.nproc_per_node is None and any(group.get("use_cpu") is True for group in parsed.values.values()):
        options.nproc_per_node = 1
    return options


def _program(command: Command) -> str:
    name = os.path.basename(sys.argv[0])
    if name == "__main__.py" and not tells_launcher():
        return f"python -m {command.package}"
    return name if name.startswith("posttrain-") else f"posttrain {command.name}"


def _started_elsewhere() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def local_processes(options: LaunchOptions) -> int:
    """How many processes the options start on this machine.

    Raises:
        CommandError: If the variable that selects devices (`NEURON_RT_VISIBLE_CORES`) has a value that cannot work.
    """
    if options.nproc_per_node is not None:
        return options.nproc_per_node
    from posttrain_devices import local_devices

    try:
        return max(1, local_devices())
    except ValueError as error:
        raise CommandError(str(error)) from error


def world_size(options: LaunchOptions) -> int:
    """How many processes train together; of an elastic run, the fewest.

    Example:
        >>> from posttrain_launchers import LaunchOptions, world_size
        >>> world_size(LaunchOptions(nnodes="2", nproc_per_node=8, rdzv_endpoint="host:29500"))
        16
    """
    if _started_elsewhere():
        return int(os.environ["WORLD_SIZE"])
    return options.nodes[0] * local_processes(options)


def runs_here(options: LaunchOptions) -> bool:
    """Whether this very process does the work: it is one of several already, or the only one."""
    if _started_elsewhere():
        return True
    return options.nodes[1] == 1 and not options.max_restarts and local_processes(options) == 1


def launch(module: str, argv: Sequence[str], options: LaunchOptions) -> int:
    """Run `python -m module argv...` on as many processes as the options say, and wait for them.

    One process is this one. Several are started through torch's elastic agent, each with torchrun's environment
    (`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...). Signals are passed on; a process that fails ends the
    others, and its traceback is printed.

    Args:
        module: A module, or a package with a `__main__`.
        argv: Its arguments.
        options: How many processes, and where the other machines are.

    Returns:
        The exit code: 0, that of the first process to fail, or 128 and the number of the signal.

    Raises:
        CommandError: If the machines do not find each other.

    Example:
        >>> from posttrain_launchers import LaunchOptions, launch
        >>> launch("this_module_prints", [], LaunchOptions(nproc_per_node=2))  # doctest: +SKIP
        0
    """
    if runs_here(options):
        return _run_here(module, argv)
    processes = local_processes(options)
    # Two processes that each take every core slow each other down many times over; torchrun's own answer is one thread.
    threads = max(1, _cores() // processes)
    with tempfile.TemporaryDirectory(prefix="posttrain-launch-") as folder, _environment(OMP_NUM_THREADS=str(threads)):
        return _run_agent(module, argv, options, processes, folder)


def _run_here(module: str, argv: Sequence[str]) -> int:
    before, sys.argv = sys.argv, [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(**defaults: str) -> Generator[None]:
    """Variables for the processes to come, where they are not set."""
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def _handlers_kept() -> Generator[None]:
    """The agent installs its own signal handlers and leaves them."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)


def _run_agent(module: str, argv: Sequence[str], options: LaunchOptions, processes: int, folder: str) -> int:
    import logging

    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    # What failed, and why, is said below, once.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = _agent_config(options, processes, DefaultLogsSpecs(log_dir=folder))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with _handlers_kept():
            elastic_launch(config, sys.executable)("-m", "posttrain_launchers.worker", module, *argv)
    except ChildFailedError as error:
        return _explain(error.failures, world=options.nodes[0] * processes)
    except SignalException as error:
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    except (RendezvousError, dist.DistError) as error:
        where = f"at {options.rdzv_endpoint}" if options.rdzv_endpoint else "on this machine"
        cause = " ".join(str(error.__cause__ or error).split())
        raise CommandError(
            f"{options.nnodes} machines could not meet {where}: {cause}; start the same command on each, where "
            "rdzv_endpoint must name a machine and port that all of them reach"
        ) from error
    return 0


def _agent_config(options: LaunchOptions, processes: int, logs: Any) -> Any:
    from uuid import uuid4

    from torch.distributed.launcher.api import LaunchConfig

    alone = options.nodes[1] == 1
    return LaunchConfig(
        min_nodes=options.nodes[0],
        max_nodes=options.nodes[1],
        nproc_per_node=processes,
        run_id=uuid4().hex if alone else "posttrain",
        # A free port of this machine, by a name that resolves everywhere.
        rdzv_backend="c10d" if alone else options.rdzv_backend,
        rdzv_endpoint="localhost:0" if alone else options.rdzv_endpoint or "",
        rdzv_configs={"rank": options.node_rank} if options.rdzv_backend == "static" and not alone else {},
        local_addr="localhost" if alone else None,
        max_restarts=options.max_restarts,
        logs_specs=logs,
    )


def _explain(failures: dict[int, Any], world: int) -> int:
    """Print why the first process failed, then who else did; return its exit code."""

    def when(failure: Any) -> float:
        return _told(failure).get("time", float(failure.timestamp))

    ended = {-signal.SIGTERM, -signal.SIGKILL}  # by the agent, unless nobody failed in another way
    order = sorted(failures.items(), key=lambda item: (item[1].exitcode in ended, when(item[1])))
    rank, first = order[0]
    told = _told(first).get("text", "").rstrip()
    if told and first.exitcode == 2:  # a mistake in the command line, which every process reports
        print(told, file=sys.stderr)
        return 2
    reason = f"\n{told}" if told else f" {_exit_reason(first.exitcode)}"
    print(f"rank {rank} of {world} failed:{reason}", file=sys.stderr)
    others = [f"rank {rank} {_summary(failure)}" for rank, failure in order[1:]]
    if others:
        print("after it: " + "; ".join(others), file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def _summary(failure: Any) -> str:
    told = _told(failure).get("text", "").rstrip()
    return told.splitlines()[-1] if told else _exit_reason(failure.exitcode)


def _told(failure: Any) -> dict[str, Any]:
    """What the process left by `tell_launcher`."""
    return failure.error_file_data.get("posttrain", {})


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    reason = f"it was ended by {signal.Signals(-code).name}"
    return reason + ", as the system does when memory runs out" if code == -signal.SIGKILL else reason
