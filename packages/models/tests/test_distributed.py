"""Two processes on gloo: the side effects of hooks reach every parameter."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from posttrain_collators import CompletionBatch, Padding, TokenBatch, TokenCollator
from posttrain_models import LoraOptions, apply_lora, choose_layout, completion_logps, tiny_model, weighted_logp_sum
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def make_batch():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 128, (n,), generator=generator).tolist() for n in (5, 23, 9, 17)]
    return TokenCollator(Padding(0))([{"input_ids": row} for row in ids])


def backward(model, batch):
    model.zero_grad()
    weighted_logp_sum(model, batch, torch.ones(batch.input_ids.shape)).total.backward()


def compare(model, want, world):
    for name, parameter in model.named_parameters():
        if name in want:
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            torch.testing.assert_close(grad * world, want[name], rtol=1e-4, atol=2e-5)
        else:
            assert parameter.grad is None


def build(architecture, layout):
    lora = architecture.endswith("+lora")
    model = tiny_model(architecture.removesuffix("+lora")).train()
    if lora:
        torch.manual_seed(0)
        model = apply_lora(model, LoraOptions(lora_r=4, lora_dropout=0.0), gradient_checkpointing=True)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    choose_layout(model, layout)
    return model


@contextmanager
def joined(rank, world, init):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def alone(architecture, layout, run):
    """The gradients of one process."""
    single = build(architecture, layout)
    run(single)
    return {name: p.grad for name, p in single.named_parameters() if p.grad is not None}


def shard(model, world):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def check(rank, world, init, architectures):
    whole = make_batch()
    part = TokenBatch(*(x[rank::world] for x in whole))
    with joined(rank, world, init):
        for architecture in architectures:
            want = alone(architecture, "padded", lambda model: backward(model, whole))
            for layout in ("padded", "packed"):
                for options in ({}, {"find_unused_parameters": True}):
                    model = build(architecture, layout)
                    parallel = DistributedDataParallel(model, **options)
                    backward(parallel, part)
                    backward(parallel, part)
                    compare(model, want, world)
                if not architecture.endswith("+lora"):
                    model = shard(build(architecture, layout), world)
                    backward(model, part)
                    backward(model, part)
                    compare(model, want, world)


def check_completions(rank, world, init, architectures):
    """Every rank has other completions, one of them fillers alone in its second batch."""
    steps = torch.arange(9)
    ids = torch.randint(1, 128, (4, 27), generator=torch.Generator().manual_seed(0))
    mask = steps < torch.tensor([[3, 9], [1, 4], [7, 2], [0, 0]])[..., None]
    prompt_mask = steps > torch.tensor([4, 0, 7, 7])[:, None]
    whole = CompletionBatch(ids[:, :9], prompt_mask, ids[:, 9:].view(4, 2, 9), mask)

    def backward(model, rows=slice(None)):
        completion_logps(model, CompletionBatch(*(x[rows] for x in whole[:4]))).square().sum().backward()

    with joined(rank, world, init):
        for architecture in architectures:
            want = alone(architecture, "padded", backward)
            for sharded in (False, True)[: 1 if architecture.endswith("+lora") else 2]:
                model = build(architecture, "shared")
                parallel = shard(model, world) if sharded else DistributedDataParallel(model)
                for start in (0, 2):
                    backward(parallel, slice(start + rank, start + rank + 1))
                compare(model, want, world)


def check_flat(rank, world, init, architectures):
    """FSDP1, which leaves every rank pieces of the parameters, some of them empty, while the model is prepared."""
    whole = make_batch()
    part = TokenBatch(*(x[rank::world] for x in whole))
    with joined(rank, world, init):
        for architecture in architectures:
            want = alone(architecture, "packed", lambda model: backward(model, whole))
            flat = FullyShardedDataParallel(
                tiny_model(architecture).train(), use_orig_params=True, device_id=torch.device("cpu")
            )
            backward(flat, part)
            with FullyShardedDataParallel.summon_full_params(flat, with_grads=True):
                compare(flat.module, want, world)


def spawn(tmp_path, architectures, job=check):
    init = f"file://{tmp_path / 'rendezvous'}"
    torch.multiprocessing.spawn(job, (2, init, architectures), nprocs=2)


@pytest.mark.slow
def test_completions_under_ddp_and_fsdp2(tmp_path):
    spawn(tmp_path, ("smollm2", "gemma2", "llama+lora"), check_completions)


@pytest.mark.slow
def test_ddp_and_fsdp2(tmp_path):
    spawn(tmp_path, ("smollm2", "gemma2", "llama+lora"))


@pytest.mark.slow
def test_fsdp1(tmp_path):
    spawn(tmp_path, ("llama", "smollm2", "gemma2"), check_flat)
