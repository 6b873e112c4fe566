"""Real architectures, small: checkpointing, shapes, conversion of weights, adapters."""

import json
from dataclasses import dataclass
from typing import Any

import posttrain_trainer.memory as memory
import pytest
import torch
import toy_runs
from posttrain_collators import Padding, TokenCollator
from posttrain_devices import device_spec
from posttrain_losses import Mean
from posttrain_models import choose_layout, tiny_model, weighted_logp_sum
from posttrain_trainer import ShapePlan, Trainer, resolve_shapes
from torch.utils._python_dispatch import TorchDispatchMode
from toy_jobs import StopAt
from toy_runs import config, logs, parameters


@dataclass(frozen=True)
class NextToken:
    def count(self, batch):
        return batch.loss_mask.sum()

    def loss(self, model, batch):
        found = weighted_logp_sum(model, batch, batch.loss_mask.float())
        return -found.total, {"top1": Mean.of(found.scores.top1, batch.loss_mask)}


def sentences(count=16):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 32, (n,), generator=generator).tolist()} for n in lengths]


def language(folder, model: Any = None, callbacks: Any = None, shape_plan: ShapePlan | None = None, **settings: Any):
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 1e-3, **settings}
    padding = shape_plan.padding(0) if shape_plan else Padding(0)
    return Trainer(
        model or tiny_model("llama", vocab_size=32),
        NextToken(),
        config(folder, **settings),
        TokenCollator(padding),
        sentences(),
        eval_dataset=sentences(6),
        callbacks=callbacks,
        shape_plan=shape_plan,
    )


def close(left, right):
    for a, b in zip(parameters(left), parameters(right), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    found = language(tmp_path_factory.mktemp("plain"))
    found.train()
    return found


def test_tokens_are_counted_and_the_card_is_tagged(plain):
    assert logs(plain)[3]["num_tokens"] == sum(len(row["input_ids"]) for row in sentences())
    assert plain.model.model_tags == ["posttrain", "nexttoken"]
    assert plain.state.total_flos > 0
    assert plain.evaluate()["eval_loss"] > 0


def test_splits_and_gradient_checkpointing_change_nothing(plain, tmp_path):
    for settings in (
        {"gradient_checkpointing": True},
        {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
            "train_sampling_strategy": "group_by_length",
        },
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    ):
        other = language(tmp_path, **settings)
        other.train()
        close(plain, other)


def probed(model):
    """Has the scorer look at the model before anything is counted."""
    batch = TokenCollator(Padding(0))(sentences(2))
    weighted_logp_sum(model, batch, batch.loss_mask.float())


class Attentions(TorchDispatchMode):
    """Counts how often attention is computed."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in memory.attention_operators()
        return function(*args, **(kwargs or {}))


def test_selective_checkpointing_keeps_attention_and_recomputes_the_rest(plain, tmp_path):
    counts = []
    for options in (None, {"selective": True}):
        found = language(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options, max_steps=1)
        probed(found.model)
        with Attentions() as counter:
            found.train()
        counts.append(counter.count)
    assert counts[0] == 2 * counts[1] > 0  # computed again, or kept
    found = language(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True})
    found.train()
    close(plain, found)
    options = {"selective": True, "use_reentrant": True}
    with pytest.raises(ValueError, match="'selective' needs non-reentrant"):
        language(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=options).train()


def test_offloading_keeps_numbers_and_leaves_parameters_alone(plain, tmp_path):
    found = language(tmp_path, activation_offloading=True)
    found.train()
    close(plain, found)
    packed = []
    model = torch.nn.Linear(64, 64)
    real = torch.autograd.graph.saved_tensors_hooks

    def spy(pack, unpack):
        return real(lambda tensor: (packed.append(pack(tensor)), packed[-1])[1], unpack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph, "saved_tensors_hooks", spy)
        with memory.offloaded_activations(model):
            loss = model(torch.ones(8, 64)).square().sum()
    loss.backward()
    assert packed and all(isinstance(one, torch.Tensor) for one in packed)  # on the CPU there is nowhere to go


def test_shapes_of_a_static_device_are_those_of_the_plan(tmp_path):
    plan = resolve_shapes(max_length=12, batch_size=4, pad_to_multiple_of=4, spec=device_spec("neuron"))
    model = tiny_model("llama", vocab_size=32)
    choose_layout(model, "auto", static_shapes=True)
    probed(model)
    found = language(tmp_path, model, shape_plan=plan, per_device_train_batch_size=3, per_device_eval_batch_size=5)
    found.train()
    found.evaluate()
    assert found.shape_watch.unplanned == set()
    assert set(found.shape_watch.seen) <= {(3, 8), (3, 12), (5, 8), (5, 12)}
    other = language(tmp_path, per_device_train_batch_size=3)
    other.train()
    close(found, other)


@pytest.mark.parametrize("architecture", ["smollm2", "mixtral"])
def test_models_resume_whatever_names_their_weights_are_saved_under(tmp_path, architecture):
    settings = {"save_strategy": "steps", "save_steps": 2}

    def start(name, callbacks=None, seed=0):
        return language(
            tmp_path / name, tiny_model(architecture, vocab_size=32, seed=seed), callbacks=callbacks, **settings
        )

    whole = start("whole")
    whole.train()
    start("cut", [StopAt(2)]).train()
    resumed = start("cut", seed=9)
    resumed.train(resume_from_checkpoint=True)
    for left, right in zip(parameters(whole), parameters(resumed), strict=True):
        assert torch.equal(left, right)


def test_adapters_resume(tmp_path):
    peft = pytest.importorskip("peft")
    settings = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}

    def start(name, callbacks=None, seed=1):
        torch.manual_seed(seed)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1)
        model = peft.get_peft_model(tiny_model("llama", vocab_size=32), lora)
        return language(tmp_path / name, model, callbacks=callbacks, **settings)

    whole = start("whole")
    whole.train()
    start("cut", [StopAt(2)]).train()
    resumed = start("cut", seed=8)
    resumed.train(resume_from_checkpoint=True)
    for left, right in zip(parameters(whole), parameters(resumed), strict=True):
        assert torch.equal(left, right)
    card = (tmp_path / "cut" / "checkpoint-4" / "README.md").read_text()
    assert 'library_name: "peft"' in card and "AutoPeftModelForCausalLM" in card
    assert json.loads((tmp_path / "cut" / "checkpoint-4" / "adapter_config.json").read_text())["r"] == 4


def test_bfloat16_trains(tmp_path):
    found = language(tmp_path, bf16=True)
    found.train()
    assert all(torch.isfinite(parameter).all() for parameter in parameters(found))


@pytest.mark.slow
def test_a_model_sharded_with_fsdp2_trains_as_a_whole_one(tmp_path):
    both = toy_runs.run(2, "sharded", tmp_path)
    one = language(tmp_path / "one", per_device_train_batch_size=8, max_grad_norm=1.0)
    one.train()
    for left, right in zip(both["logs"], logs(one), strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    assert both["eval"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-5)
