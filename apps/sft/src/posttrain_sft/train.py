"""What `posttrain sft` does once its options are read."""

from posttrain_cli import mistakes
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer.commands import run_app

from posttrain_sft.config import SFTConfig
from posttrain_sft.demo import run
from posttrain_sft.trainer import SFTTrainer


def main(config: SFTConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> int:
    """Train, save, and say where; without model and data, the demonstration: see `run_app`."""
    how = {"load": load_datasets, "data_error": DataError, "mistakes": mistakes}
    return run_app(SFTTrainer, config, model, lora, data, demonstrate=run, **how)
