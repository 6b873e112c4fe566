"""Install every member alone, in a fresh environment, and run its tests from another directory.

    uv run python tools/alone.py [MEMBER ...] [--lowest] [--python 3.13]

Only the member, the siblings that it declares, and its `test` group are installed, so an undeclared import fails here.
As many members are tested at once as there are cores, each on one thread. `--lowest` takes the oldest version of each
direct requirement. Without `--lowest`, extras stay out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workspace import Member, outer_environment, output, select, uv

INI = """[pytest]
addopts = --import-mode=importlib --strict-markers -m "not slow" -p no:cacheprovider
markers =
    slow
    cuda
    neuron
"""


def check(member: Member, scratch: Path, options: argparse.Namespace) -> str | None:
    """Install and test one member in `scratch`; return what went wrong, None when all is well."""
    python = scratch / "venv" / "bin" / "python"
    elsewhere = scratch / "elsewhere"
    # A copy, so that neither the workspace's configuration nor its own conftest.py takes part.
    shutil.copytree(member.folder / "tests", elsewhere / "tests")
    shutil.copy(member.folder / "README.md", elsewhere)
    for shared in member.folder.parent.glob("*.py"):  # what the tests of all apps share
        shutil.copy(shared, elsewhere)
    (elsewhere / "pytest.ini").write_text(INI)
    resolution = ["--resolution", "lowest-direct"] if options.lowest else []
    # A wheel, not an editable install: what users get is what is tested.
    install = [uv(), "pip", "install", "--quiet", "--python", str(python), *resolution, str(member.folder)]
    steps = {
        "environment": [uv(), "venv", "--quiet", "--no-project", "--python", options.python, str(scratch / "venv")],
        "install": install,
        "import": [str(python), "-c", f"import {member.module} as m; [getattr(m, name) for name in m.__all__]"],
        "test group": [*install, "--group", f"{member.folder / 'pyproject.toml'}:test"],
        "tests": [str(python), "-m", "pytest", "-q", "tests"],
    }
    environment = {**outer_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name, command in steps.items():
        code, said = output(command, cwd=elsewhere, env=environment)
        if code:
            return f"{name}: {' '.join(command)}\n{said[-6000:]}"
    return None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="*", metavar="MEMBER", help="losses, or posttrain-losses; all by default")
    parser.add_argument("--lowest", action="store_true", help="install the oldest direct requirements")
    parser.add_argument("--python", default=sys.executable, metavar="PYTHON", help="Python to use, such as 3.13")
    options = parser.parse_args()
    failed = []

    def timed(member: Member) -> tuple[str | None, float]:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"alone-{member.folder.name}-") as scratch:
            return check(member, Path(scratch), options), time.monotonic() - start

    members = select(options.members)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for member, (wrong, seconds) in zip(members, pool.map(timed, members), strict=True):
            print(f"{'FAILED' if wrong else 'ok':<8}{member.name:<24}{seconds:6.1f} s", flush=True)
            if wrong:
                print(wrong, flush=True)
                failed.append(member.name)
    if failed:
        raise SystemExit(f"alone: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
