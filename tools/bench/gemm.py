"""Measure this machine's matrix-multiply rate in a process of its own: `python gemm.py DTYPE THREADS DEVICE`."""

from __future__ import annotations

import json
import sys
import time

import torch

SECONDS = 2.0


def rate(dtype: torch.dtype, device: str, size: int) -> float:
    """Operations a second of square products of `size`, over about two seconds."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def burst(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    burst(3)
    count = max(3, int(SECONDS / (burst(2) / 2)))
    return 2 * size**3 * count / burst(count)


def main() -> None:
    """Print the rate as JSON."""
    dtype, threads, device = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    print(json.dumps({"rate": rate(dtype, device, 8192 if device == "cuda" else 2048)}))


if __name__ == "__main__":
    main()
