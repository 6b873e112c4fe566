"""What training frees is kept for the next step, and given back at the end."""

import platform
import sys
from pathlib import Path

import pytest
import torch
from posttrain_trainer.memory import freed_memory_kept

MB = 1_000_000
glibc = pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="this C library manages memory differently"
)


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def touch_and_free(size: int) -> None:
    block = torch.ones(size, dtype=torch.uint8)
    del block


@glibc
def test_a_freed_block_stays_while_training_and_goes_afterwards(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    before = resident()
    with freed_memory_kept(torch.device("cpu")):
        touch_and_free(200 * MB)
        assert resident() - before > 150 * MB
    assert resident() - before < 50 * MB
    touch_and_free(200 * MB)
    assert resident() - before < 50 * MB


@glibc
def test_settings_of_the_environment_win(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    before = resident()
    with freed_memory_kept(torch.device("cpu")):
        touch_and_free(200 * MB)
        assert resident() - before < 50 * MB


@glibc
def test_another_device_changes_nothing():
    before = resident()
    with freed_memory_kept(torch.device("meta")):
        touch_and_free(200 * MB)
        assert resident() - before < 50 * MB
