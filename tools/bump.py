"""Give every member the version X.Y.Z, pin siblings to it, and lock again.

uv run python tools/bump.py X.Y.Z
"""

from __future__ import annotations

import argparse
import re

from workspace import ROOT, members, run, uv


def rewritten(text: str, names: list[str], version: str) -> str:
    """The pyproject.toml `text` with its own version and every sibling pin set to `version`."""
    text, count = re.subn(r'^version = "[^"]+"$', f'version = "{version}"', text, count=1, flags=re.MULTILINE)
    if count != 1:
        raise SystemExit("bump: a pyproject.toml has no line `version = ...`")
    siblings = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(rf'"({siblings})(\[[\w,-]+\])?==[^";]+', rf'"\1\2=={version}', text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", metavar="X.Y.Z")
    version = parser.parse_args().version
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"bump: {version!r} is no version; write X.Y.Z, or X.Y.Zrc1")
    everyone = members()
    for member in everyone:
        file = member.folder / "pyproject.toml"
        file.write_text(rewritten(file.read_text(), [m.name for m in everyone], version))
    run([uv(), "lock"], cwd=ROOT)
    print(f"{len(everyone)} members are at {version} now")


if __name__ == "__main__":
    main()
