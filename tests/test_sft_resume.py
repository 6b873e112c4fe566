"""2N steps are N steps, a kill -9, a resumption, and N steps: bit for bit, through the command."""

import pytest
import torch
from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model
from sft_command import finish, kill_after, log, optimizer, rows, start, weights

STEPS, KILLED = 14, 5  # the data is five and a half steps an epoch, and a log comes every third


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Flags of a run whose every source of chance matters: row order, the adapter's weights, dropout."""
    folder = tmp_path_factory.mktemp("job")
    tokenizer = tiny_tokenizer()
    # Large enough that a step outlasts the time in which the kill follows the checkpoint.
    model = tiny_model("llama", vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {
        "model_name_or_path": folder / "model",
        "dataset_name": rows(folder / "rows.jsonl", 44),
        "max_steps": STEPS,
        "save_steps": KILLED,
        "logging_steps": 3,
        "learning_rate": 1e-2,
        "assistant_only_loss": True,
        "use_peft": True,
        "lora_r": 4,
        "lora_dropout": 0.2,
        "gradient_accumulation_steps": 2,
    }


@pytest.mark.parametrize(
    ("processes", "changes"),
    [
        (1, {"max_length": 128}),
        pytest.param(1, {"packing": True, "max_length": 40}, marks=pytest.mark.slow),
        pytest.param(2, {"max_length": 128}, marks=pytest.mark.slow),
    ],
)
def test_a_killed_and_resumed_run_is_the_run_that_was_not(processes, changes, job, tmp_path):
    options = {**job, "nproc_per_node": processes, "per_device_train_batch_size": 4 // processes, **changes}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = start(whole, **options)
    kill_after(start(cut, **options), cut / f"checkpoint-{KILLED}")
    assert not (cut / f"checkpoint-{STEPS}").exists()
    finish(start(cut, **options, resume_from_checkpoint=True), cut)
    finish(undisturbed, whole)

    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    pairs = list(zip(*(optimizer(folder / f"checkpoint-{STEPS}") for folder in (whole, cut)), strict=True))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    assert log(whole, STEPS) == log(cut, STEPS)
    assert len({entry["loss"] for entry in log(whole, STEPS)}) == len(log(whole, STEPS)) >= 4
