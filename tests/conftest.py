"""A working directory in which the documentation runs as it is written, without a network."""

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

QUESTIONS = ["What is the capital of France?", "Say hello.", "What do bees make?", "How many legs has a spider?"]
ANSWERS = ["Paris.", "Hello! How can I help?", "Bees make honey.", "A spider has eight legs."]
CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in zip(QUESTIONS * 8, ANSWERS * 8, strict=True)
]

PAIRS = [
    {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": "I would rather not say."}]}
    for chat in CHATS
]


def write_jsonl(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def documented(tmp_path_factory) -> Path:
    """A folder with the models and data that the documentation names.

    `datasets` and `transformers` take a folder of the working directory before a hub name.
    """
    from posttrain_data import tiny_tokenizer
    from posttrain_models import tiny_model

    folder = tmp_path_factory.mktemp("documented")
    tokenizer = tiny_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer)).save_pretrained(folder / "Qwen/Qwen3-0.6B")
    tokenizer.save_pretrained(folder / "Qwen/Qwen3-0.6B")
    write_jsonl(folder / "trl-lib/Capybara/train.jsonl", [{"messages": chat, "source": "made"} for chat in CHATS])
    # In the form that it has on the hub: two conversations, whose common beginning is the prompt.
    write_jsonl(
        folder / "trl-lib/ultrafeedback_binarized/train.jsonl",
        [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in PAIRS],
    )
    write_jsonl(folder / "pairs.jsonl", PAIRS)
    write_jsonl(folder / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    (folder / "run.yaml").write_text("model_name_or_path: Qwen/Qwen3-0.6B\ndataset_name: chats.jsonl\n")
    return folder


@pytest.fixture
def workplace(documented, tmp_path) -> Path:
    """A fresh copy of that folder."""
    return Path(shutil.copytree(documented, tmp_path / "work"))
