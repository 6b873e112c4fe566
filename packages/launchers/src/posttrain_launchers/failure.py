"""How a process that fails tells its launcher why, in the file that torch's elastic agent reads."""

import json
import os
import time


def tells_launcher() -> bool:
    """Whether this process was started by this package's launcher."""
    return bool(os.environ.get("POSTTRAIN_WORKER")) and bool(os.environ.get("TORCHELASTIC_ERROR_FILE"))


def tell_launcher(text: str) -> None:
    """Leave the text that the launcher prints for this process; the first to fail is shown first."""
    now = time.time()
    # torch reads "message" and "timestamp"; its stamp is in whole seconds, too coarse to say who was first.
    report = {"message": text, "timestamp": int(now), "posttrain": {"text": text, "time": now}}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w", encoding="utf-8") as file:
        json.dump(report, file)
