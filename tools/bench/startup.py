"""How long the command takes to answer, and what `import posttrain_losses` costs beyond `import torch`.

    uv run python tools/bench/startup.py [--json]

Seconds, the fastest of several fresh processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "posttrain")
CASES = {"help": (["sft", "--help"], 0), "mistyped flag": (["sft", "--learning_rat", "1"], 2)}
# In one process, so that the seconds that torch itself takes add no noise.
IMPORTS = "import time, torch; start = time.perf_counter(); import posttrain_losses; print(time.perf_counter() - start)"
BARS = {"help": 0.5, "mistyped flag": 1.0, "losses beyond torch": 0.1}


def seconds(command: list[str], code: int) -> float:
    """Wall time of one run of `command`, which must end with `code`."""
    start = time.perf_counter()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    spent = time.perf_counter() - start
    if done.returncode != code:
        raise SystemExit(
            f"startup: {' '.join(command)} ended with {done.returncode}, not {code}:\n{done.stdout[-2000:]}"
        )
    return spent


def import_cost() -> float:
    """Seconds that `import posttrain_losses` takes after `import torch`."""
    command = [sys.executable, "-c", IMPORTS]
    return float(subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as JSON on the last line")
    parser.add_argument("--runs", type=int, default=5, help="processes of each command")
    arguments = parser.parse_args()
    best = {}
    for name, (words, code) in CASES.items():
        best[name] = min(seconds([COMMAND, *words], code) for _ in range(arguments.runs))
    best["losses beyond torch"] = min(import_cost() for _ in range(2))
    for name, value in best.items():
        print(f"{name:<22}{value:7.3f} s   bar {BARS[name]} s")
    if arguments.json:
        print(json.dumps({name.replace(" ", "_"): value for name, value in best.items()}))
    slow = [name for name, bar in BARS.items() if best[name] > bar]
    if slow:
        raise SystemExit(f"startup: above the bar: {', '.join(slow)}")


if __name__ == "__main__":
    main()
