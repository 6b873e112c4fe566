"""A preference method of one's own through the loop: SimPO, https://arxiv.org/abs/2405.14734."""

from dataclasses import dataclass

import pytest
import torch
from posttrain_collators import PreferenceCollator
from posttrain_devices import device_spec
from posttrain_losses import Mean, masked_mean
from posttrain_models import choose_layout, completion_logps, tiny_model
from posttrain_trainer import Trainer, TrainingConfig, resolve_completion_shapes
from posttrain_trainer.sources import completion_lengths
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class SimPO:
    beta: float = 2.0
    gamma: float = 0.5

    def count(self, batch):
        return batch.completion_mask.any(-1).all(-1).sum()

    def loss(self, model, batch):
        mean = masked_mean(completion_logps(model, batch), batch.completion_mask)  # (P, 2)
        there = batch.completion_mask.any(-1).all(-1)  # (P,)
        margin = self.beta * (mean[:, 0] - mean[:, 1]) - self.gamma
        return -(logsigmoid(margin) * there).sum(), {"accuracy": Mean.of(margin > 0, there)}


def pairs(count):
    generator = torch.Generator().manual_seed(0)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(1, 60, (length,), generator=generator).tolist()

    return [{"prompt_ids": ids(2, 20), "chosen_ids": ids(1, 8), "rejected_ids": ids(1, 30)} for _ in range(count)]


def train(folder, layout, batch_size, accumulation, static=False):
    torch.manual_seed(0)
    model, rows = tiny_model("llama"), pairs(10)
    plan = resolve_completion_shapes(
        max_length=64,
        batch_size=batch_size,
        num_completions=2,
        layout=choose_layout(model, layout, static_shapes=static, completions=True),
        spec=device_spec("neuron" if static else "cpu"),
        pad_to_multiple_of=8 if static else "auto",
        lengths=map(completion_lengths, rows),
    )
    args = TrainingConfig(
        folder,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        train_sampling_strategy="group_by_length",
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    collate = PreferenceCollator(plan.prompt_padding(0), plan.padding(0))
    trainer = Trainer(model, SimPO(), args, collate, rows, shape_plan=plan)
    trainer.train()
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), "padded", 10, 1)


@pytest.mark.parametrize(("layout", "batch_size", "accumulation"), [("shared", 4, 3), ("packed", 5, 2)])
def test_splits_and_layouts_train_the_same_model(whole, tmp_path, layout, batch_size, accumulation):
    other = train(tmp_path, layout, batch_size, accumulation)
    assert logged(other, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert logged(other, "accuracy") == logged(whole, "accuracy")
    assert logged(whole, "loss")[-1] < 0.2 * logged(whole, "loss")[0]
    tokens = sum(sum(completion_lengths(row)) for row in pairs(10))
    assert logged(whole, "num_tokens") == logged(other, "num_tokens") == [tokens, 2 * tokens, 3 * tokens]


@pytest.mark.parametrize("layout", ["padded", "shared"])
def test_static_shapes_are_those_of_the_plan(whole, tmp_path, layout):
    static = train(tmp_path, layout, 4, 3, static=True)
    assert logged(static, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-5)
    assert logged(static, "num_tokens") == logged(whole, "num_tokens")  # what fills batches up is not counted
    probe = {shape for shape in static.shape_watch.unplanned if shape[0] == 2}  # of the head, on a CPU alone
    assert static.shape_watch.unplanned == probe and static.shape_watch.seen.keys() - probe
