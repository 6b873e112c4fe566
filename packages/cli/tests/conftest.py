"""A stand-in for an app: `demo_app`, whose config inherits 130 fields from a slow, foreign `heavylib`."""

import sys

import pytest

HEAVY = '''
"""A library that is slow to import and has options of its own."""

import enum
from dataclasses import dataclass, field, make_dataclass
from typing import Any


class Schedule(str, enum.Enum):
    LINEAR = "linear"
    COSINE = "cosine"


class Device:
    pass


@dataclass
class Named:
    output_dir: str | None = field(default=None, metadata={"help": "Where the run is written. Made if missing."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Step size, 100%% yours."})
    max_steps: int = field(default=-1, metadata={"help": "Steps."})
    schedule: Schedule | str = field(default="linear", metadata={"help": "Shape."})
    report_to: None | str | list[str] = field(default="none", metadata={"help": "Trackers."})
    eval_strategy: str = "no"
    bf16: bool = False
    tf32: bool | None = None
    eval_steps: float | None = None
    seed: int = 42
    options: dict[str, Any] | str | None = None
    count_tokens: str | bool = "no"
    device: Device | None = None
    _hidden: int = field(init=False, default=1)


Arguments = make_dataclass("Arguments", [(f"extra_{i}", int, i) for i in range(120)], bases=(Named,))
Arguments.__module__ = __name__
'''

CONFIG = '''
import enum
import pathlib
from dataclasses import dataclass, field
from typing import Any, Literal

import heavylib


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@dataclass
class Source:
    """One data set.

    Args:
        path: Name or folder.
    """

    path: str
    fraction: float = 1.0
    columns: list[str] | None = None


@dataclass
class DemoConfig(heavylib.Arguments):
    """The method.

    Attributes:
        max_length: Longest row in tokens; longer ones are cut.
            Packed rows have exactly this length.
        packing (bool): Put several rows into one.
    """

    learning_rate: float = field(default=2e-5, metadata={"help": "Step size of this method."})
    max_length: int | None = 1024
    packing: bool = False
    strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd"
    pad: int | Literal["auto"] | None = "auto"

    def __post_init__(self):
        if self.max_length == 1:
            raise ValueError("max_length=1: write 2 or more")


@dataclass
class ModelOptions:
    model: str = "tiny"
    trust_remote_code: bool = False
    target_modules: list[str] | str | None = None
    widths: tuple[int, ...] = (1, 2)
    colour: Colour = Colour.RED
    cache: pathlib.Path | None = None
    anything: Any = None


@dataclass
class DataOptions:
    datasets: list[Source] = field(default_factory=list)
    trust_remote_code: bool = False
    ratios: dict[str, float] | None = None
'''

TRAIN = """
def main(demo, model, data):
    print(demo.learning_rate, model.model, data.datasets)
    return 0 if demo.max_steps != 7 else 7
"""


TABLE = {}


@pytest.fixture
def app(tmp_path, monkeypatch):
    """The folder of the app, on the path of this process and of those it starts, with a cache folder of its own."""
    folder = tmp_path / "site"
    package = folder / "demo_app"
    package.mkdir(parents=True)
    (folder / "heavylib.py").write_text(HEAVY)
    (package / "__init__.py").write_text("")
    (package / "config.py").write_text(CONFIG)
    (package / "train.py").write_text(TRAIN)
    set_version(folder, "1.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("heavylib", "demo_app", "demo_app.config", "demo_app.train"):
        sys.modules.pop(name, None)


@pytest.fixture
def command(app):
    """The command of the app, its table shipped."""
    from posttrain_cli import Command, make_table, write_table

    made = Command(
        name="demo",
        summary="Train a demo.",
        configs={
            "demo": "demo_app.config:DemoConfig",
            "model": "demo_app.config:ModelOptions",
            "data": "demo_app.config:DataOptions",
        },
        run="demo_app.train:main",
        table=app / "demo_app" / "options.json",
        replaced={"max_seq_length": "is called --max_length here", "extra_9": "leave it out"},
    )
    if not TABLE:  # the live classes are the same for every test
        TABLE.update(make_table(made.groups))
    write_table(TABLE, app / "demo_app" / "options.json")
    return made


def set_version(folder, version):
    info = folder / "heavylib-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: heavylib\nVersion: {version}\n")
    (info / "top_level.txt").write_text("heavylib\n")
