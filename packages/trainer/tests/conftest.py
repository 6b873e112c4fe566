import gc
import sys
from pathlib import Path

import posttrain_trainer  # noqa: F401 (imported before the heap is frozen)
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _fast():
    """Every train() collects garbage, which takes long over all that transformers imports; toys need one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch, tmp_path):
    """Nothing is written outside tmp_path, and nothing runs on an accelerator."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
