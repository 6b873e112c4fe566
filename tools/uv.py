#!/usr/bin/env python3
"""Run uv with the given arguments, installing it first where it is missing.

    python3 tools/uv.py run posttrain sft
    python3 tools/uv.py run pytest

Needs Python 3.11 and either its `venv` or `pip`, nothing else. A uv on PATH that is new enough is used as it is;
otherwise one is installed into the folder `.uv` of this repository, and nowhere else.
"""

# Plain enough that an old Python gets as far as its error message.
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PRIVATE = os.path.join(ROOT, ".uv")
REQUIREMENT = "uv>=0.13,<0.14"
OLDEST = (0, 13)


def usable(path):
    """Whether `path` is a uv that runs and is new enough (a pyenv shim, for one, may be there and not run)."""
    try:
        done = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    found = re.match(r"uv (\d+)\.(\d+)", done.stdout)
    return done.returncode == 0 and found is not None and (int(found[1]), int(found[2])) >= OLDEST


def attempt(command):
    """Run `command`; return what it said when it failed, None when it worked."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return None if done.returncode == 0 else "$ {}\n{}".format(" ".join(command), done.stdout.strip())


def install():
    """Put uv into the private folder: by a virtual environment, or by pip alone where `venv` lacks its pip (Debian)."""
    sys.stderr.write("installing {} into {}\n".format(REQUIREMENT, PRIVATE))
    scratch = "{}.{}".format(PRIVATE, os.getpid())
    venv_python = os.path.join(scratch, "bin", "python")
    said = attempt([sys.executable, "-m", "venv", scratch])
    if said is None:
        said = attempt([venv_python, "-m", "pip", "install", "--quiet", REQUIREMENT])
    if said is not None:
        shutil.rmtree(scratch, ignore_errors=True)
        pip_said = attempt([sys.executable, "-m", "pip", "install", "--quiet", "--target", scratch, REQUIREMENT])
        said = None if pip_said is None else said + "\n" + pip_said
    if said is not None:
        shutil.rmtree(scratch, ignore_errors=True)
        sys.exit(
            "{}\n\ntools/uv.py: could not install {}. Either of these helps: a Python with venv and pip (Debian and "
            "Ubuntu: apt install python3-venv), or uv itself (https://docs.astral.sh/uv) on PATH.".format(
                said, REQUIREMENT
            )
        )
    # The move is last, so that a killed or concurrent run never leaves half a folder in place.
    if usable(os.path.join(PRIVATE, "bin", "uv")):
        shutil.rmtree(scratch, ignore_errors=True)
        return
    shutil.rmtree(PRIVATE, ignore_errors=True)
    os.rename(scratch, PRIVATE)


def main():
    """Find or install uv, then become it."""
    if sys.version_info < (3, 11):
        sys.exit("tools/uv.py: Python 3.11 or newer is needed, this is {}".format(sys.version.split()[0]))
    if os.name == "nt":
        sys.exit("tools/uv.py: on Windows, run this inside WSL (docs/install.md)")
    private = os.path.join(PRIVATE, "bin", "uv")
    candidates = [os.environ.get("UV"), shutil.which("uv"), private]
    uv = next((path for path in candidates if path and usable(path)), None)
    if uv is None:
        install()
        uv = private
    os.execv(uv, ["uv", *sys.argv[1:]])


if __name__ == "__main__":
    main()
