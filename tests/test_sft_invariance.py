"""How the rows of a step are dealt to processes, micro-batches and layouts changes nothing but the rounding."""

import pytest
from app_command import finish, log, rows, run_here, save_model, start, weights

STEPS = 3


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return {
        "model_name_or_path": save_model(folder / "model", "qwen3"),
        # Eighty: the third step of 32 is short, so that ranks and micro-batches get unequal shares.
        "dataset_name": rows(folder / "rows.jsonl", 80),
        "max_steps": STEPS,
        "save_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0,
        "assistant_only_loss": True,
    }


def run(folder, job, **changes):
    """The log and the weights."""
    finish(start(folder, **{**job, **changes}), folder)
    return log(folder, STEPS), weights(folder)


def assert_same(one, other):
    for wanted, entry in zip(one[0], other[0], strict=True):
        assert entry == {name: pytest.approx(value, abs=2e-5) for name, value in wanted.items()}
    assert len({entry["loss"] for entry in one[0]}) == STEPS
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        assert float((other[1][name] - value).abs().max()) < 5e-6, name


def split(processes, size, accumulation):
    return {
        "nproc_per_node": processes,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": accumulation,
    }


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """One process, one batch of 32 a step."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    run_here(folder, **job, **split(1, 32, 1))
    return log(folder, STEPS), weights(folder)


def test_two_processes_are_one(whole, job, tmp_path):
    assert_same(whole, run(tmp_path / "out", job, **split(2, 4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        split(2, 16, 1),
        split(2, 2, 8),
        {**split(1, 8, 4), "padding_free": False},
        {**split(1, 4, 8), "max_shapes": 2},
        {**split(2, 8, 2), "train_sampling_strategy": "group_by_length"},
    ],
    ids=lambda changes: ",".join(map(str, changes.values())),
)
def test_other_ways_to_deal_a_step(changes, whole, job, tmp_path):
    assert_same(whole, run(tmp_path / "out", job, **changes))


@pytest.mark.slow
def test_packed_rows_on_two_processes(job, tmp_path):
    packed = {**job, "packing": True, "max_length": 48}
    one = run(tmp_path / "one", packed, **split(1, 8, 1))
    assert_same(one, run(tmp_path / "two", packed, **split(2, 2, 2)))
