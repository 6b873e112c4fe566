"""What a trainer refuses, and what it says when the hub refuses."""

import pytest
import transformers
from posttrain_trainer import RunError
from toy_runs import trainer
from transformers import TrainerCallback
from transformers.utils import hub


class Here(TrainerCallback):
    pass


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Here, 5], r"callbacks\[1\]=5: pass an object of a class made from TrainerCallback"),
        ([dict], r"callbacks\[0\]"),
        (Here(), "callbacks=.*: pass a list of callbacks"),
    ],
)
def test_callbacks_that_are_none(tmp_path, callbacks, message):
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, callbacks=callbacks)


def test_callbacks_may_be_classes(tmp_path):
    made = trainer(tmp_path, callbacks=[Here, Here()])
    assert sum(isinstance(one, Here) for one in made.callback_handler.callbacks) >= 1


def test_a_processing_class_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="processing_class='x': pass a tokenizer or processor that is loaded"):
        trainer(tmp_path, processing_class="x")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_checkpointing_key_of_plain_arguments(tmp_path):
    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", gradient_checkpointing_kwargs={"use_reentrnt": True}
    )
    with pytest.raises(ValueError, match="unknown key 'use_reentrnt'"):
        trainer(tmp_path, args=args)


def unreachable(*args, **kwargs):
    raise OSError("Name or service\nnot known")


@pytest.fixture
def online(monkeypatch):
    """The hub has a token and makes repositories."""
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)

    def make(self, token=None, private=None):
        self.hub_model_id, self.push_in_progress = "me/out", None

    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", make)


def test_a_hub_that_cannot_be_reached_ends_a_run_before_it_begins(tmp_path, online, monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", unreachable)
    with pytest.raises(
        ValueError, match="repository 'out' cannot be made on the hub .Name or service not known.*"
    ) as on:
        trainer(tmp_path / "out", push_to_hub=True, hub_token="secret")
    assert "push_to_hub=False" in str(on.value) and "\n" not in str(on.value)


def test_a_model_that_cannot_be_pushed_is_saved_all_the_same(tmp_path, online, monkeypatch):
    made = trainer(tmp_path / "out", push_to_hub=True, hub_token="secret", max_steps=1)
    monkeypatch.setattr(transformers.trainer.hf_api(), "upload_folder", unreachable)
    with pytest.raises(RunError, match="the model is saved in .*out, but cannot be pushed to me/out .Name or service"):
        made.save_model()
    assert (tmp_path / "out" / "model.safetensors").exists()
