"""What every tool asks about the workspace: its root, its members, and where uv is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace."""

    folder: Path
    project: dict

    @property
    def name(self) -> str:
        """Distribution name, `posttrain-losses`."""
        return self.project["name"]

    @property
    def module(self) -> str:
        """Top-level module, `posttrain_losses`."""
        return self.name.replace("-", "_")

    @property
    def version(self) -> str:
        """Version as written in its pyproject.toml."""
        return self.project["version"]

    @property
    def source(self) -> Path:
        """Folder of its top-level module."""
        return self.folder / "src" / self.module

    @property
    def requirements(self) -> list[str]:
        """Every requirement of the distribution, those of its extras included."""
        extras = self.project.get("optional-dependencies", {})
        return [*self.project.get("dependencies", []), *(r for group in extras.values() for r in group)]


def members(root: Path = ROOT) -> list[Member]:
    """Every member of the workspace, by name."""
    workspace = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]
    folders = sorted(folder for pattern in workspace["members"] for folder in root.glob(pattern))
    files = [folder / "pyproject.toml" for folder in folders if (folder / "pyproject.toml").exists()]
    return sorted((Member(f.parent, tomllib.loads(f.read_text())["project"]) for f in files), key=lambda m: m.name)


def select(names: list[str]) -> list[Member]:
    """The members called `names` (`losses` or `posttrain-losses`), all of them when empty."""
    everyone = members()
    if not names:
        return everyone
    known = {key: m for m in everyone for key in (m.name, m.folder.name)}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise SystemExit(f"no such member: {', '.join(wrong)}; there are {', '.join(m.folder.name for m in everyone)}")
    return [known[name] for name in names]


def uv() -> str:
    """Path of the uv that runs us, of the one on PATH, or of the one that tools/uv.py installed."""
    here = [os.environ.get("UV"), shutil.which("uv"), str(ROOT / ".uv" / "bin" / "uv")]
    for path in here:
        if path and os.access(path, os.X_OK):
            return path
    raise SystemExit("uv is not here; start this tool with: python3 tools/uv.py run python " + " ".join(sys.argv))


def outer_environment() -> dict[str, str]:
    """The environment without what ties a child to the workspace's own virtual environment."""
    tied = ("VIRTUAL_ENV", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "UV_RUN_RECURSION_DEPTH")
    return {key: value for key, value in os.environ.items() if key not in tied}


def run(command: list[str], **options) -> None:
    """Run `command` without standard input; leave with its name when it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, **options)
    if done.returncode:
        raise SystemExit(f"failed ({done.returncode}): {' '.join(command)}")


def output(command: list[str], cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Run `command` without standard input; return its exit code and all that it printed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout
