"""2N steps are N steps, a kill -9, a resumption, and N steps: bit for bit, through the command."""

import pytest
from app_command import SLOW_MODEL, assert_resumes, rows, save_model

STEPS, KILLED = 14, 5  # the data is five and a half steps an epoch, and a log comes every third


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Flags of a run whose every source of chance matters: row order, the adapter's weights, dropout."""
    folder = tmp_path_factory.mktemp("job")
    return {
        "model_name_or_path": save_model(folder / "model", "llama", **SLOW_MODEL),
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
    assert_resumes(tmp_path, options, killed=KILLED)
