"""What `posttrain reward` does once its options are read."""

from posttrain_cli import mistakes
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer.facade import evaluates, run_training, show_messages

from posttrain_reward.config import RewardConfig
from posttrain_reward.trainer import RewardTrainer


def main(config: RewardConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> int:
    """Train, save, and say where; without model and data, the demonstration of `posttrain_reward.demo`.

    Args:
        config: Options of the method and of training.
        model: The model and how to load it.
        lora: The adapter, if one is trained.
        data: The rows.

    Returns:
        The exit code.
    """
    show_messages()
    if model.model_name_or_path is None and not data.given:
        from posttrain_reward.demo import run

        return run(config)
    return run_training(config, lambda: make_trainer(config, model, lora, data), mistakes, DataError)


def make_trainer(config: RewardConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> RewardTrainer:
    """The trainer that the options describe."""
    if model.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
    rows, held_out = load_datasets(data, evaluate=evaluates(config), seed=config.seed)
    return RewardTrainer(model=model, args=config, train_dataset=rows, eval_dataset=held_out, peft_config=lora)
