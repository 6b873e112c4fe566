import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from app_runs import saved


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory, tokenizer):
    """A saved qwen3, whose head is its embedding, with its tokenizer."""
    return saved(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", tokenizer)
