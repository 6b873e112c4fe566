"""The head on devices of static shapes, under the compiler, and within its memory bound."""

import subprocess
import sys

import pytest
import torch
from posttrain_losses import Max, Mean, Min, Std, dft, masked_mean, nll, tiles, token_logps, token_scores
from posttrain_losses import weighted_logp_sum as weighted_sum
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

MB = 1_000_000


def scores_loss(hidden, weight, bias, targets, weights):
    scores = token_scores(hidden, weight, targets, bias=bias, softcap=5.0, entropy=True, collision=True)
    return (scores.logps * weights).sum() + scores.entropy.sum() - scores.collision.sum()


def sum_loss(hidden, weight, bias, targets, weights):
    return weighted_sum(
        hidden, weight, targets, weights, bias=bias, softcap=5.0, reweight=torch.exp, entropy=True
    ).total


def everything_else(hidden, weight, targets, weights):
    logps = token_logps(hidden @ weight.T, targets)
    mask = weights > 0
    loss = (nll(logps) + dft(logps)).sum() + masked_mean(logps, mask)
    states = [(kind.of(logps, mask) + kind.of(logps)).state for kind in (Mean, Min, Max, Std)]
    return loss, states


def example(n=70, v=90, h=8, dtype=torch.float32):
    leaves = [torch.randn(s, dtype=dtype, requires_grad=True) for s in ((n, h), (v, h), (v,))]
    return *leaves, torch.randint(0, v, (n,)), torch.rand(n)


class StaticShapes(TorchDispatchMode):
    """Refuses what a static-shape device cannot run."""

    refused = {"nonzero", "item", "_local_scalar_dense", "unique", "_unique2", "unique_dim", "masked_select", "equal"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.refused, name
        if name.startswith(("index", "_index")):
            for index in args[1] if isinstance(args[1], list | tuple) else ():
                assert index is None or index.dtype not in (torch.bool, torch.uint8), f"{name} with a boolean mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", [scores_loss, sum_loss])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_shape_depends_on_data(loss, dtype):
    with StaticShapes():
        loss(*example(dtype=dtype)).backward()
        hidden, weight, _, targets, weights = example()
        everything_else(hidden, weight, targets, weights)[0].backward()
    with FakeTensorMode():
        given = example(dtype=dtype)
        loss(*given).backward()
        assert [x.grad.shape for x in given[:3]] == [x.shape for x in given[:3]]
        hidden, weight, _, targets, weights = example()
        everything_else(hidden, weight, targets, weights)[0].backward()


@pytest.mark.parametrize("loss", [scores_loss, sum_loss])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(loss, backend):
    torch._dynamo.reset()
    given = example()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    expected, actual = (torch.autograd.grad(f(*given), given[:3]) for f in (loss, compiled))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("loss", [scores_loss, sum_loss])
def test_functional_gradients(loss):
    given = example()
    expected = torch.autograd.grad(loss(*given), given[:3])
    for a, e in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*given), expected, strict=True):
        torch.testing.assert_close(a, e)


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations have made and that are alive, at their highest."""

    def __init__(self, *known):
        super().__init__()
        self.live = {}
        self.known = {x.untyped_storage()._cdata for x in known}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in self.known:
                    self.live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {k: (ref, size) for k, (ref, size) in self.live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize("v, dtype", [(151_936, torch.float32), (151_936, torch.bfloat16), (32_000, torch.float32)])
@pytest.mark.parametrize("call", ["scores", "scores with entropy and collision", "sum"])
def test_peak_is_a_twentieth_of_the_logits(v, dtype, call, monkeypatch):
    """Shapes of the bound, with fake tensors: their storages have sizes and no memory."""
    n, h = 8192, 1024
    whole = tiles.block_rows
    # Blocks of 32 MB in place of 2: as many fewer operations to simulate, and a little more memory.
    monkeypatch.setattr(tiles, "block_rows", lambda tile, temporaries: min(16 * whole(tile, temporaries), len(tile)))
    with FakeTensorMode():
        hidden, weight = (torch.empty(x, h, dtype=dtype, requires_grad=True) for x in (n, v))
        targets, weights = torch.zeros(n, dtype=torch.long), torch.ones(n)
        with Peak(hidden, weight, targets, weights) as memory:
            if call == "sum":
                loss = weighted_sum(hidden, weight, targets, weights).total
            else:
                scores = token_scores(hidden, weight, targets, entropy="entropy" in call, collision="collision" in call)
                loss = scores.logps.sum() + (scores.entropy.sum() if scores.entropy is not None else 0)
            loss.backward()
    gradients = (n + v) * h * dtype.itemsize
    print(f"{call} {v} {dtype}: {(memory.peak - gradients) / MB:.0f} MB")
    assert memory.peak - gradients <= n * v * 4 / 20 + 32 * MB * (
        v < 100_000
    )  # the hidden states times their factors do not shrink with V


RSS = """
import re, sys, torch
from posttrain_losses import token_scores, weighted_logp_sum
n, v, h = map(int, sys.argv[2:])
def resident(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
def run(n, v, h):
    hidden, weight = torch.randn(n, h, requires_grad=True), (torch.randn(v, h) * 0.02).requires_grad_()
    targets, weights = torch.randint(0, v, (n,)), torch.full((n,), 1 / n)
    open("/proc/self/clear_refs", "w").write("5")  # restarts VmHWM
    before = resident("VmRSS")
    if sys.argv[1] == "sum":
        loss = weighted_logp_sum(hidden, weight, targets, weights).total
    else:
        loss = token_scores(hidden, weight, targets).logps.sum()
    loss.backward()
    return resident("VmHWM") - before - (n + v) * h * 4
run(256, 2048, h)
print(run(n, v, h))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("call", ["scores", "sum"])
@pytest.mark.parametrize(
    "shape", [(2048, 37_984, 128), pytest.param((8192, 151_936, 1024), marks=pytest.mark.slow)], ids=["small", "full"]
)
def test_resident_memory(call, shape):
    """The process itself, library workspaces included. The small shape's bound is the floor of the tile sizes."""
    done = subprocess.run(
        [sys.executable, "-c", RSS, call, *map(str, shape)], capture_output=True, text=True, check=True
    )
    n, v, _ = shape
    used = int(done.stdout)
    print(f"{call} {shape}: {used / MB:.0f} MB beyond inputs and gradients, logits {n * v * 4 / MB:.0f} MB")
    assert used <= max(n * v * 4 / 20, (90 if call == "scores" else 125) * MB)


def test_import_pulls_nothing_but_torch():
    code = """
import sys, time
import torch
before, start = set(sys.modules), time.process_time()
import posttrain_losses
seconds = time.process_time() - start
tops = {name.split(".")[0] for name in set(sys.modules) - before}
assert tops <= {"posttrain_losses", "torch", *sys.stdlib_module_names}, tops
assert seconds < 0.1, seconds
"""
    subprocess.run([sys.executable, "-c", code], check=True)
