"""Mixed precision in float16, with its scaler, for every method, on the CPU.

Float16 is for accelerators: accelerate gives a CPU no scaler, and a config refuses it there. Both are overruled here;
the autocast, the scaler and the arithmetic in float16 are PyTorch's own. The command on a GPU is in the resume tests.
"""

import math
from pathlib import Path

import accelerate
import pytest
import torch
from preference_runs import METHODS, config, model, outcome, tiny_tokenizer

STEPS, CUT = 9, 5
FIRST = {"dpo": math.log(2), "kto": 0.5}


@pytest.fixture(autouse=True)
def _half(monkeypatch, tmp_path):
    """Accelerators that do on the CPU what they do on a GPU; the scale begins too high and grows every third step."""
    begin = accelerate.Accelerator.__init__

    def with_scaler(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)

    monkeypatch.setattr(accelerate.Accelerator, "__init__", with_scaler)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def trainer(method: str, folder: Path, half: bool = True, **changes):
    """A trainer whose arguments say fp16, written past the refusal."""
    args = config(method, folder, **{"max_steps": STEPS, "max_grad_norm": 1.0, **changes})
    if half:
        args.fp16, args.mixed_precision = True, "fp16"
    made = METHODS[method]
    return made.trainer(model(method), args=args, train_dataset=made.rows(), processing_class=tiny_tokenizer())


def losses(found) -> list[float]:
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method, tmp_path, monkeypatch):
    seen = []
    plain, made = trainer(method, tmp_path, half=False), trainer(method, tmp_path)
    scaler = made.accelerator.scaler
    made.model.base_model.layers[0].mlp.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    plain.train()
    made.train()
    assert set(seen) == {torch.float16} and all(p.dtype == torch.float32 for p in made.model.parameters())
    assert scaler.get_scale() < 2.0**24  # steps whose gradients left float16's range were skipped
    assert losses(made)[0] == pytest.approx(losses(plain)[0], abs=5e-3) and all(map(math.isfinite, losses(made)))
    if method in FIRST:  # policy and reference agree, which log-probabilities in float16 would not to this precision
        assert losses(made)[0] == pytest.approx(FIRST[method], abs=1e-6)
    weights, before = outcome(made).weights, outcome(trainer(method, tmp_path)).weights
    assert any(not torch.equal(weights[name], value) for name, value in before.items())


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_with_the_scale(method, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": CUT}
    whole = trainer(method, tmp_path / "whole", **saving)
    whole.train()
    first = trainer(method, tmp_path / "cut", **saving, max_steps=CUT)
    first.train()
    again = trainer(method, tmp_path / "cut", **saving)
    fresh = again.accelerator.scaler.state_dict()
    again.train(resume_from_checkpoint=True)
    ends = [one.accelerator.scaler.state_dict() for one in (whole, again)]
    assert ends[0] == ends[1] and ends[0] != fresh and first.accelerator.scaler.state_dict() != fresh
    one, other = outcome(whole), outcome(again)
    assert all(torch.equal(other.weights[name], value) for name, value in one.weights.items())
    assert losses(whole) == losses(again)
