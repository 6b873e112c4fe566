"""Check what uv does not: one version for all, sibling pins equal to it, declared siblings equal to imported ones.

    uv run python tools/versions.py

A further look at each member: README.md, py.typed, tests, and the license are there.
"""

from __future__ import annotations

import ast
import re

from workspace import ROOT, Member, members


def imported(member: Member) -> set[str]:
    """Top-level modules that the member's source imports, in functions and as strings `package.module:name` too."""
    found: set[str] = set()
    for file in member.source.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
            if isinstance(node, ast.Import):
                found.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"^(posttrain_\w+)(?:\.\w+)*(?::\w+)?$", node.value))
    return found


def requirement_name(requirement: str) -> str:
    """Distribution that a requirement names."""
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def sibling_problems(member: Member, everyone: dict[str, Member]) -> list[str]:
    """Pins that are not exact, siblings declared and not imported, and the reverse."""
    problems = []
    for requirement in member.requirements:
        name = requirement_name(requirement)
        if name in everyone and not requirement.endswith(f"=={everyone[name].version}"):
            problems.append(f"{member.name}: {requirement!r} must pin =={everyone[name].version}")
    declared = {requirement_name(r) for r in member.project.get("dependencies", [])} & everyone.keys()
    modules = {m.module: name for name, m in everyone.items()}
    used = {modules[module] for module in imported(member) & modules.keys()} - {member.name}
    optional = {requirement_name(r) for r in member.requirements} & everyone.keys()
    problems += [f"{member.name}: declares {name} and never imports it" for name in sorted(declared - used)]
    problems += [f"{member.name}: imports {name} and does not declare it" for name in sorted(used - optional)]
    return problems


def file_problems(member: Member) -> list[str]:
    """What every member must carry."""
    where = member.folder.relative_to(ROOT)
    problems = [
        f"{member.name}: {where / path} is missing or empty"
        for path in ("README.md", f"src/{member.module}/__init__.py")
        if not (member.folder / path).exists() or not (member.folder / path).stat().st_size
    ]
    if not (member.source / "py.typed").exists():
        problems.append(f"{member.name}: src/{member.module}/py.typed is missing")
    if not list((member.folder / "tests").glob("test_*.py")):
        problems.append(f"{member.name}: {where / 'tests'} holds no test")
    if member.project.get("license") != "Apache-2.0":
        problems.append(f"{member.name}: license must be Apache-2.0")
    return problems


def problems() -> list[str]:
    """Everything that is wrong, one line each."""
    everyone = {member.name: member for member in members()}
    versions = {member.version for member in everyone.values()}
    found = [] if len(versions) == 1 else [f"members have different versions: {', '.join(sorted(versions))}"]
    for member in everyone.values():
        found += sibling_problems(member, everyone) + file_problems(member)
    return found


if __name__ == "__main__":
    found = problems()
    if found:
        raise SystemExit("\n".join(found))
    print(f"{len(members())} members at {members()[0].version}, pins and imports agree")
