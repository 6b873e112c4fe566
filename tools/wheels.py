"""Build every member's wheel and sdist, install the wheels alone into a fresh environment, and import each.

uv run python tools/wheels.py [--out dist]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from workspace import ROOT, members, outer_environment, output, run, uv

IMPORT = """
from importlib import import_module
for name in {modules}:
    module = import_module(name)
    assert module.__file__.startswith({scratch!r}), module.__file__
    assert all(hasattr(module, public) for public in module.__all__), name
"""


def contents_problems(wheel: Path) -> list[str]:
    """What a wheel lacks."""
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    module = wheel.name.split("-")[0]
    wanted = {f"{module}/__init__.py", f"{module}/py.typed"}
    return [f"{wheel.name} lacks {name}" for name in sorted(wanted - set(names))]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the built files in this folder")
    options = parser.parse_args()
    environment = outer_environment()
    with tempfile.TemporaryDirectory(prefix="wheels-") as scratch:
        out = (options.out or Path(scratch, "dist")).absolute()
        run([uv(), "build", "--quiet", "--all-packages", "--out-dir", str(out)], cwd=ROOT, env=environment)
        everyone = members()
        version = everyone[0].version
        wheels = [out / f"{member.module}-{version}-py3-none-any.whl" for member in everyone]
        sdists = [out / f"{member.module}-{version}.tar.gz" for member in everyone]
        lacking = [f"{file.name} was not built" for file in (*wheels, *sdists) if not file.exists()]
        lacking += [problem for wheel in wheels if wheel.exists() for problem in contents_problems(wheel)]
        if lacking:
            raise SystemExit("\n".join(lacking))
        python = Path(scratch, "venv", "bin", "python")
        run([uv(), "venv", "--quiet", "--no-project", str(python.parent.parent)], cwd=scratch, env=environment)
        install = [uv(), "pip", "install", "--quiet", "--python", str(python), *map(str, wheels)]
        run(install, cwd=scratch, env=environment)
        code = IMPORT.format(modules=[member.module for member in everyone], scratch=scratch)
        failed, said = output([str(python), "-c", code], cwd=Path(scratch), env=environment)
        if failed:
            raise SystemExit(f"wheels: a member does not import from its wheel:\n{said}")
        run([uv(), "pip", "check", "--quiet", "--python", str(python)], cwd=scratch, env=environment)
    print(f"{len(everyone)} wheels and sdists built at {version}, installed alone, imported")


if __name__ == "__main__":
    main()
