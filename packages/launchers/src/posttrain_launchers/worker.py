"""One of several processes: `python -m posttrain_launchers.worker MODULE ARGUMENT ...` runs a module like `python -m`.

It differs in three ways: a traceback goes to the launcher, which shows that of the first process to fail; a process
that cannot end after a failure is ended; and one whose launcher is gone ends too.
"""

import os
import runpy
import signal
import sys
import threading
import time
import traceback

from posttrain_launchers.failure import tell_launcher, tells_launcher

GRACE = 10.0  # seconds for threads and exit handlers to finish before the process is ended anyway


def main() -> None:
    """Run the module named on the command line."""
    module, *arguments = sys.argv[1:]
    os.environ["POSTTRAIN_WORKER"] = "1"
    sys.argv = [module, *arguments]
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        _end_after(GRACE)
        raise SystemExit(1) from None


def _report(error: BaseException) -> None:
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if tells_launcher():
        tell_launcher(text)
    # The launcher shows the last attempt alone; what made it start again is told here.
    last = os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    if not tells_launcher() or not last:
        print(f"rank {os.environ.get('RANK', '0')} failed:\n{text}", file=sys.stderr, flush=True)


def _end_after(seconds: float) -> None:
    def end() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _end_with(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
