"""What the command of an app does: train, plan, and show itself."""

import json
from importlib.util import find_spec

import posttrain_app
import pytest
from posttrain_app import app_command, plan_app, run_app
from posttrain_app.command import REPLACED
from posttrain_app.demo import demonstration
from posttrain_app.run import train_and_save
from posttrain_cli import CommandError
from posttrain_data import DataError, DatasetOptions
from posttrain_models import LoadOptions, LoraOptions
from toy_app import DEMONSTRATION, ROWS, ToyConfig, ToyTrainer, config, saved, trainer


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


def test_a_command_trains_saves_and_says_where(tmp_path, capsys):
    stand = Stand()
    assert train_and_save(config(tmp_path, resume_from_checkpoint="yes"), lambda: stand) == 0
    assert stand.calls == [True, "save_model", "save_state"]
    assert f"saved to {tmp_path}" in capsys.readouterr().out

    def refuse():
        raise ValueError("rows are missing")

    with pytest.raises(CommandError, match="^rows are missing$"):
        train_and_save(config(tmp_path), refuse)
    with pytest.raises(ValueError, match="^a bug$") as bug:
        train_and_save(config(tmp_path), lambda: Stand(ValueError("a bug")))
    assert not isinstance(bug.value, CommandError)
    with pytest.raises(CommandError, match="a row"):
        train_and_save(config(tmp_path), lambda: Stand(DataError("a row")))
    with pytest.raises(CommandError, match="no such folder"):
        train_and_save(config(tmp_path, resume_from_checkpoint="nowhere"), lambda: stand)


def given(tmp_path, **options):
    """A config, a model, no adapter, and rows, as a command line gives them."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = DatasetOptions(dataset_name=str(tmp_path / "rows.jsonl"))
    return config(tmp_path / "out", **options), LoadOptions(saved(tmp_path / "model")), LoraOptions(), data


def test_a_plan_says_what_training_does(tmp_path, capsys):
    options = given(tmp_path, max_steps=1, max_shapes=2)
    assert plan_app(ToyTrainer, DEMONSTRATION, *options, world_size=2) == 0
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    made = trainer(tmp_path / "other", max_shapes=2)
    assert f"\n{made.shape_plan}\n" in said and "padded layout" in said
    assert "train: 8 rows" in said and "x 2 devices" in said and "reference" not in said
    assert said.count("\nrow ") == 3 and said.endswith(made.show_row(3, made.train_dataset[2]) + "\n")
    assert run_app(ToyTrainer, DEMONSTRATION, *options) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("do", [run_app, lambda *options: plan_app(*options, world_size=1)])
def test_half_of_model_and_rows_is_a_mistake(tmp_path, do):
    args, model, lora, data = given(tmp_path)
    with pytest.raises(CommandError, match="^model_name_or_path is missing"):
        do(ToyTrainer, DEMONSTRATION, args, LoadOptions(), lora, data)
    with pytest.raises(CommandError, match="^dataset_name is missing"):
        do(ToyTrainer, DEMONSTRATION, args, model, lora, DatasetOptions())


def test_without_model_and_rows_it_shows_itself(tmp_path, capsys):
    nothing = ToyConfig(), LoadOptions(), LoraOptions(), DatasetOptions()
    assert run_app(ToyTrainer, DEMONSTRATION, *nothing) == 0
    loss, held_out = capsys.readouterr().out.splitlines()[-2:]
    assert loss.startswith("loss      ") and loss.count("->") == 1 and held_out == "held out  changed"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert plan_app(ToyTrainer, DEMONSTRATION, *nothing, world_size=1) == 0
    assert "8 rows" in capsys.readouterr().out


def test_a_demonstration_changes_what_was_left_alone():
    with demonstration(ToyConfig(max_steps=3, use_cpu=True), {"max_steps": 9, "learning_rate": 1.0}) as args:
        assert (args.max_steps, args.learning_rate) == (3, 1.0)
        assert "posttrain-" in args.output_dir
    with demonstration(ToyConfig("mine", use_cpu=True), {"max_steps": 9}) as args:
        assert (args.output_dir, args.max_steps) == ("mine", 9)


def test_a_command_finds_the_modules_of_its_app_by_name():
    command = app_command("app", "MethodConfig", "Show it.", {"use_liger_kernel": "there is none"})
    assert command.package == "posttrain_app" and list(command.groups) == ["app", "model", "lora", "data", "launcher"]
    assert find_spec(command.configs["app"].partition(":")[0]) is not None
    assert command.replaced == {**REPLACED, "use_liger_kernel": "there is none"}
    assert command.table.parent == type(command.table)(posttrain_app.__file__).parent
