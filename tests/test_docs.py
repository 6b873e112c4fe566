"""The documentation is right: its Python runs as it stands, its commands parse, its links lead somewhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "packages/*/README.md", "apps/*/README.md")
    for page in ROOT.glob(pattern)
)
NOT_RUN = re.compile(r"<!-- not run: .+ -->")

# Runs every block of a page in a namespace of its own, in one process, so that torch is imported once.
RUNNER = """
import json, sys
for line, code in json.load(sys.stdin):
    namespace = {"__name__": "__main__"}
    exec(compile("\\n" * line + code, sys.argv[1], "exec"), namespace)
"""


class Block(NamedTuple):
    """A fenced block: its language, the line of its fence, its text, and whether a comment says that it is not run."""

    language: str
    line: int
    text: str
    skipped: bool


def blocks(page: Path) -> list[Block]:
    found, opened, above = [], None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if opened is None and (fence := re.match(r"```+(\w*)", line)):
            opened = (fence[1], number, [], bool(NOT_RUN.search(above)))
        elif opened is not None and re.match(r"```+\s*$", line):
            found.append(Block(opened[0], opened[1], "\n".join(opened[2]), opened[3]))
            opened = None
        elif opened is not None:
            opened[2].append(line)
        if line.strip():
            above = line
    assert opened is None, f"{page}:{opened[1]}: the block is never closed"
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[tuple[int, list[str]]]:
    """The posttrain command lines of a page's shell blocks, as words; continued lines are joined."""
    found = []
    for block in blocks(page):
        if block.language not in ("bash", "sh", "console") or block.skipped:
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words[:3] == ["python3", "tools/uv.py", "run"]:
                words = words[3:]
            if words[:2] == ["uv", "run"]:
                words = words[2:]
            if words and re.fullmatch(r"posttrain(-\w+)*", words[0]):
                found.append((block.line, words))
    return found


PYTHON_PAGES = [page for page in PAGES if any(b.language == "python" and not b.skipped for b in blocks(page))]
COMMANDS = [pytest.param(words, id=f"{name(page)}:{line}") for page in PAGES for line, words in commands(page)]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_python_blocks_run_as_they_stand(page, workplace, tmp_path):
    code = [(block.line, block.text) for block in blocks(page) if block.language == "python" and not block.skipped]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "agg",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, name(page)],
        input=json.dumps(code),
        cwd=workplace,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_parse(words, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    if words[:2] == ["posttrain", "plan"]:  # its options are those of the method
        words = ["posttrain", *words[2:]]
    if words[0] == "posttrain" and len(words) > 1 and words[1] in APPS:
        words = [f"posttrain-{words[1]}", *words[2:]]
    if words[0].removeprefix("posttrain-") in APPS and "--help" not in words:
        module = words[0].replace("-", "_")
        import_module(f"{module}.command").COMMAND.parse(words[1:])
    else:
        done = subprocess.run([Path(sys.executable).with_name(words[0]), *words[1:], "--help"], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()


APPS = {folder.name for folder in (ROOT / "apps").iterdir() if (folder / "pyproject.toml").exists()}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    relative = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in relative if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_names_its_language(page):
    assert [block.line for block in blocks(page) if block.language not in LANGUAGES] == []


LANGUAGES = {"python", "bash", "console", "yaml", "json", "toml", "text"}


def test_the_readme_begins_with_the_two_commands():
    first, second = blocks(ROOT / "README.md")[:2]
    assert len(first.text.splitlines()) == len(second.text.splitlines()) == 1
    assert first.text.startswith("python3 tools/uv.py run posttrain ")
    assert second.text.startswith("python3 tools/uv.py run pytest")
