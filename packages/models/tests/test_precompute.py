"""Reference log-probabilities computed beforehand: the same values, kept by content, shared by processes."""

import logging
import os
import sys

import pytest
import torch
import torch.distributed as dist
from posttrain_collators import FeedbackCollator, PreferenceCollator
from posttrain_models import LoraOptions, apply_lora, choose_layout, completion_logps, tiny_model
from posttrain_models.references import FrozenModel, make_reference, precompute_reference

COLUMNS = ("chosen_reference_logps", "rejected_reference_logps")


def make_rows(count=11, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def some(least, most):
        length = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(1, 128, (length,), generator=generator).tolist()

    return [
        {"prompt_ids": some(1, 9), "chosen_ids": some(1, 7), "rejected_ids": some(1, 7), "margin": float(n)}
        for n in range(count)
    ]


def want(model, row):
    batch = PreferenceCollator(0)([row])
    with torch.no_grad():
        logps = completion_logps(model, batch)
    return [logps[0, at][batch.completion_mask[0, at]] for at in (0, 1)]


def check(model, rows, done):
    assert len(done) == len(rows)
    for index, row in enumerate(rows):
        got = done[index]
        assert {key: got[key] for key in row} == row
        for expected, column in zip(want(model, row), COLUMNS, strict=True):
            torch.testing.assert_close(torch.tensor(got[column]), expected, rtol=0, atol=1e-5)


class Counting:
    def __init__(self, collator):
        self.collator, self.seen = collator, 0

    def __call__(self, rows):
        self.seen += len(rows)
        return self.collator(rows)


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_values_order_and_random_state(layout, tmp_path):
    model = tiny_model("llama", attention_dropout=0.5).train()
    choose_layout(model, layout)
    rows = make_rows()
    before = [dict(row) for row in rows]
    state = torch.get_rng_state()
    reference = make_reference(model)
    done = precompute_reference(reference, model, rows, PreferenceCollator(0), batch_size=4, cache_dir=tmp_path)
    assert torch.equal(torch.get_rng_state(), state) and model.training and rows == before
    check(model.eval(), rows, done)
    batch = PreferenceCollator(0)(done)
    torch.testing.assert_close(
        reference.logps(model, batch), reference.compute(model, PreferenceCollator(0)(rows)), rtol=0, atol=1e-5
    )


def test_kept_by_content(tmp_path, caplog):
    caplog.set_level(logging.INFO, "posttrain")
    model, rows = tiny_model("llama"), make_rows()
    collator = Counting(PreferenceCollator(0))

    def run(reference, model, rows, **options):
        collator.seen = 0
        options = {"batch_size": 4, "cache_dir": tmp_path, **options}
        return precompute_reference(reference, model, rows, collator, **options), collator.seen

    first, seen = run(make_reference(model), model, rows)
    assert seen == 11 and [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]
    choose_layout(model, "padded")
    again, seen = run(make_reference(model), model, rows, batch_size=3)
    assert seen == 0 and again == first and "found in" in caplog.text
    assert run(make_reference(model), model, rows, cache_dir=False)[1] == 11
    assert run(make_reference(model), model, rows[::-1])[1] == 11
    assert run(make_reference(model), model, rows[:-1])[1] == 10
    assert run(make_reference(tiny_model("llama", rope_theta=5.0)), model, rows)[1] == 11
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.norm.weight[0] += 1e-3
    assert run(FrozenModel(other), model, rows)[1] == 11
    with torch.autocast("cpu", torch.bfloat16):
        assert run(make_reference(model), model, rows)[1] == 11
    # Two adapters switched off leave the same model; a trained one does not.
    adapters = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        adapters.append(apply_lora(tiny_model("llama"), LoraOptions(lora_r=2)))
    assert [run(make_reference(one), one, rows)[1] for one in adapters] == [11, 0]
    for name, weight in adapters[0].named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.1)
    assert run(make_reference(adapters[0]), adapters[0], rows)[1] == 11


def test_where_values_are_kept(tmp_path, monkeypatch):
    model, rows = tiny_model("llama"), make_rows(2)
    monkeypatch.setattr("posttrain_models.precompute.HF_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    precompute_reference(make_reference(model), model, rows, PreferenceCollator(0), batch_size=2)
    assert len(list((tmp_path / "datasets" / "posttrain").glob("reference-*.safetensors"))) == 1


def test_damaged_and_unwritable_files(tmp_path, caplog):
    model, rows = tiny_model("llama"), make_rows(3)
    reference, collator = make_reference(model), Counting(PreferenceCollator(0))
    first = precompute_reference(reference, model, rows, collator, batch_size=4, cache_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    again = precompute_reference(reference, model, rows, collator, batch_size=4, cache_dir=tmp_path)
    assert again == first and collator.seen == 6 and "are damaged: they are computed again" in caplog.text
    assert precompute_reference(reference, model, rows, collator, batch_size=4, cache_dir=tmp_path) == first
    assert collator.seen == 6
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "folder"
    assert precompute_reference(reference, model, rows, collator, batch_size=4, cache_dir=blocked) == first
    assert "could not be kept in" in caplog.text


def test_rows_that_have_values_keep_them():
    model, rows = tiny_model("llama"), make_rows(4)
    reference, collator = make_reference(model), Counting(PreferenceCollator(0))
    done = precompute_reference(reference, model, rows, collator, batch_size=4, cache_dir=False)
    mine = {column: [-1.0] * len(done[2][column]) for column in COLUMNS}
    mixed = [*rows[:2], {**rows[2], **mine}, rows[3]]
    collator.seen = 0
    result = precompute_reference(reference, model, mixed, collator, batch_size=4, cache_dir=False)
    assert collator.seen == 3 and result[2] == mixed[2]
    check(model, rows[:2], result[:2])
    collator.seen = 0
    assert precompute_reference(reference, model, result, collator, batch_size=4, cache_dir=False) is result
    assert collator.seen == 0


def test_data_sets_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    model, rows = tiny_model("llama"), make_rows(7)
    reference, collator = make_reference(model), PreferenceCollator(0)
    data = datasets.Dataset.from_list(rows)
    done = precompute_reference(reference, model, data, collator, batch_size=2, cache_dir=tmp_path)
    assert isinstance(done, datasets.Dataset) and done.features[COLUMNS[0]].feature.dtype == "float32"
    check(model, rows, list(done))
    chosen = precompute_reference(reference, model, data.select([5, 1, 1]), collator, batch_size=2, cache_dir=False)
    check(model, [rows[5], rows[1], rows[1]], list(chosen))
    empty = datasets.Dataset.from_list([])
    assert len(precompute_reference(reference, model, empty, collator, batch_size=2, cache_dir=False)) == 0
    with pytest.raises(ValueError, match="a stream cannot be computed beforehand"):
        precompute_reference(reference, model, data.to_iterable_dataset(), collator, batch_size=2, cache_dir=False)


def test_feedback_and_errors():
    model = tiny_model("llama")
    reference = make_reference(model)
    rows = [{"prompt_ids": [5], "completion_ids": [6, 7], "label": True}, {"completion_ids": [8, 9], "label": False}]
    done = precompute_reference(reference, model, rows, FeedbackCollator(0), batch_size=1, cache_dir=False)
    batch = FeedbackCollator(0)(done)
    torch.testing.assert_close(batch.extras.reference_logps, completion_logps(model, batch).detach(), rtol=0, atol=1e-5)
    assert done[1]["reference_logps"][0] == 0.0
    with pytest.raises(ValueError, match=r"rows\[1\] has no rejected_ids"):
        bad = [*make_rows(1), {"chosen_ids": [1]}]
        precompute_reference(reference, model, bad, PreferenceCollator(0), batch_size=1, cache_dir=False)
    with pytest.raises(ValueError, match="batch_size=0"):
        precompute_reference(reference, model, rows, FeedbackCollator(0), batch_size=0, cache_dir=False)


def test_weights_that_one_process_alone_holds_are_refused(tmp_path, monkeypatch):
    model, rows = tiny_model("llama"), make_rows(2)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    with pytest.raises(ValueError, match="only the first process holds the weights: set cpu_ram_efficient_loading"):
        precompute_reference(make_reference(model), model, rows, PreferenceCollator(0), batch_size=2)


def job(rank, world, init, folder):
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world)
    try:
        model, rows = tiny_model("llama"), make_rows(9)
        collator = Counting(PreferenceCollator(0))
        reference = make_reference(model)
        done = precompute_reference(reference, model, rows, collator, batch_size=2, cache_dir=folder)
        assert collator.seen <= 6
        check(model, rows, done)
        dist.barrier()
        found = precompute_reference(reference, model, rows, collator, batch_size=2, cache_dir=folder)
        assert found == done and collator.seen <= 6
        # One rank that finds nothing makes all compute.
        where = folder if rank else folder / "elsewhere"
        assert precompute_reference(reference, model, rows, collator, batch_size=2, cache_dir=where) == done
        sharded(rank, world, rows)
    finally:
        dist.destroy_process_group()


def sharded(rank, world, rows):
    """Under FSDP2 the reference is sharded as the policy is, and follows it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    batch = PreferenceCollator(0)(rows[rank::world])
    model = tiny_model("llama")
    want = completion_logps(model, batch).detach()
    reference = make_reference(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.testing.assert_close(reference.logps(model, batch), want, rtol=0, atol=1e-5)
    completion_logps(model, batch).sum().backward()
    assert any(isinstance(p, DTensor) for p in reference.model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(reference.logps(model, batch), want, rtol=0, atol=1e-5)
    now = completion_logps(model, batch).detach()
    reference.sync(model, 1.0)
    torch.testing.assert_close(reference.logps(model, batch), now, rtol=0, atol=1e-5)
    done = precompute_reference(reference, model, rows, PreferenceCollator(0), batch_size=2, cache_dir=False)
    check(reference.model, rows[:1], done[:1])


@pytest.mark.slow
def test_two_processes(tmp_path):
    init = f"file://{tmp_path / 'rendezvous'}"
    torch.multiprocessing.spawn(job, (2, init, tmp_path / "kept"), nprocs=2)
