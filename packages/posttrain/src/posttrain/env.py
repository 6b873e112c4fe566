"""What `posttrain env` prints: versions, devices, and what is wrong."""

import platform
import sys
from collections.abc import Iterable
from importlib import metadata

COMPANIONS = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "peft",
    "kernels",
    "flash-attn",
    "bitsandbytes",
    "deepspeed",
    "vllm",
    "torch-neuronx",
    "trl",
)


def report() -> tuple[str, list[str]]:
    """The text, and the problems it lists.

    Example:
        >>> text, problems = report()
        >>> "torch" in text
        True
    """
    own = _own_versions()
    versions = {**own, **{name: found for name in COMPANIONS if (found := _version(name)) is not None}}
    devices, wrong = _devices()
    problems = [*_unmet(own), *wrong]
    lines = [f"python    {platform.python_version()} ({sys.executable})", f"platform  {platform.platform()}", ""]
    width = max(map(len, versions), default=0)
    lines += [f"{name.ljust(width)}  {version}" for name, version in versions.items()]
    lines += ["", *devices, "", *(f"wrong: {problem}" for problem in problems)]
    if not problems:
        lines.append("nothing is wrong")
    return "\n".join(lines) + "\n", problems


def _own_versions() -> dict[str, str]:
    names = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {name: names[name] for name in sorted(names, key=str) if name and name.partition("-")[0] == "posttrain"}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _unmet(names: Iterable[str]) -> list[str]:
    """What the installed posttrain packages require and do not find, or find in an unsupported version."""
    from packaging.requirements import Requirement

    problems: dict[str, None] = {}
    for name in names:
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = _version(requirement.name)
            if found is None:
                problems[f"{requirement.name} is missing; {name} needs {requirement}"] = None
            elif not requirement.specifier.contains(found, prereleases=True):
                problems[f"{requirement.name} {found} is not supported; {name} needs {requirement}"] = None
    return list(problems)


def _devices() -> tuple[list[str], list[str]]:
    from posttrain_devices import diagnose

    try:
        facts = diagnose()
    except (ImportError, OSError) as error:  # a torch that does not load, such as one without its CUDA libraries
        return [], [f"torch cannot be imported: {' '.join(str(error).split())}"]
    lines = [f"{'note: ' if fact.level == 'warning' else ''}{fact.message}" for fact in facts if fact.level != "error"]
    return lines, [fact.message for fact in facts if fact.level == "error"]
