"""What the apps share around a trainer."""

from contextlib import contextmanager

import pytest
import torch
from posttrain_models import tiny_model
from posttrain_trainer import TrainingConfig
from posttrain_trainer.commands import demonstration, run_training
from posttrain_trainer.facade import (
    balancing_coefficient,
    check_run,
    disable_dropout,
    mapping_option,
    resolve_model,
    resolve_tokenizer,
)
from posttrain_trainer.preference import PreferenceConfig
from torch import nn
from transformers.utils import logging as transformers_logging


def config(folder, **options):
    return TrainingConfig(str(folder), use_cpu=True, report_to="none", **options)


def test_a_run_that_cannot_begin_or_end(tmp_path):
    (tmp_path / "file").write_text("")
    rows = [{"text": "a"}]
    check_run(config(tmp_path / "new" / "below"), rows, None)
    for args, data, evaluation, wanted in (
        (config(tmp_path / "file" / "below"), rows, None, "is a file"),
        (config(tmp_path), None, None, "train_dataset is missing"),
        (config(tmp_path, eval_strategy="epoch"), rows, None, "eval_strategy='epoch'"),
        (config(tmp_path), iter(rows), None, "max_steps=-1"),
    ):
        with pytest.raises(ValueError, match=wanted):
            check_run(args, data, evaluation)


def test_a_tokenizer_is_an_object(tmp_path):
    with pytest.raises(ValueError, match="processing_class"):
        resolve_tokenizer("nowhere", config(tmp_path), "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("quiet", [True, False])
def test_loading_shows_progress_as_training_does(tmp_path, quiet):
    shown = []

    def load(*_args, **_options):
        shown.append(transformers_logging.is_progress_bar_enabled())
        return tiny_model("llama")

    args = PreferenceConfig(str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=quiet)
    resolve_model("somewhere", args, load=load)
    assert shown == [not quiet] and transformers_logging.is_progress_bar_enabled()


def test_mappings():
    assert mapping_option("x", None) is None and mapping_option("x", '{"a": 1}') == {"a": 1} == mapping_option(
        "x", {"a": 1}
    )
    for value in ("{", "[1]", 5):
        with pytest.raises(ValueError, match="x"):
            mapping_option("x", value)


def test_a_demonstration_changes_what_was_left_alone():
    with demonstration(TrainingConfig(max_steps=3, use_cpu=True), {"max_steps": 9, "learning_rate": 1.0}) as args:
        assert (args.max_steps, args.learning_rate) == (3, 1.0)
        assert "posttrain-" in args.output_dir
    with demonstration(TrainingConfig("mine", use_cpu=True), {"max_steps": 9}) as args:
        assert (args.output_dir, args.max_steps) == ("mine", 9)


def test_dropout_is_gone_everywhere():
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.extra = nn.Sequential(nn.Dropout(0.3))
    disable_dropout(model)
    assert model.extra[0].p == 0
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_the_balancing_loss():
    plain, mixture = tiny_model("llama"), tiny_model("mixtral")
    assert balancing_coefficient(plain, None) == balancing_coefficient(plain, 0.0) == 0
    with pytest.raises(ValueError, match="mixtures of experts"):
        balancing_coefficient(plain, 0.1)
    assert balancing_coefficient(mixture, 0.25) == 0.25 and mixture.config.output_router_logits
    assert balancing_coefficient(mixture, 0.0) == 0 and not mixture.config.output_router_logits


class Stand:
    """As much of a trainer as a command needs."""

    def __init__(self, fails=None):
        self.calls, self.fails = [], fails

    def checkpoint_to_resume(self, wanted):
        self.calls.append(wanted)
        return wanted

    def train(self, resume_from_checkpoint):
        if self.fails:
            raise self.fails

    def is_world_process_zero(self):
        return True

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


class OneLineError(Exception):
    """What a command answers with a line."""


@contextmanager
def mistakes(*kinds):
    try:
        yield
    except kinds as error:
        raise OneLineError(str(error)) from error


def test_a_command_trains_saves_and_says_where(tmp_path, capsys):
    stand = Stand()
    assert run_training(config(tmp_path, resume_from_checkpoint="yes"), lambda: stand, mistakes) == 0
    assert stand.calls == [True, "save_model", "save_state"]
    assert f"saved to {tmp_path}" in capsys.readouterr().out

    def refuse():
        raise ValueError("rows are missing")

    with pytest.raises(OneLineError, match="^rows are missing$"):
        run_training(config(tmp_path), refuse, mistakes)
    with pytest.raises(ValueError, match="^a bug$"):
        run_training(config(tmp_path), lambda: Stand(ValueError("a bug")), mistakes)
    with pytest.raises(OneLineError, match="a row"):
        run_training(config(tmp_path), lambda: Stand(KeyError("a row")), mistakes, KeyError)
    with pytest.raises(OneLineError, match="no such folder"):
        run_training(config(tmp_path, resume_from_checkpoint="nowhere"), lambda: stand, mistakes)


def test_defaults_of_preference_methods():
    args = PreferenceConfig("out", use_cpu=True)
    assert (args.learning_rate, args.beta, args.disable_dropout, args.max_length) == (1e-6, 0.1, True, 1024)
    assert (args.ref_model_mixup_alpha, args.ref_model_sync_steps) == (0.6, 512)
    assert PreferenceConfig("out", use_cpu=True, model_init_kwargs='{"revision": "x"}').model_init_kwargs == {
        "revision": "x"
    }
