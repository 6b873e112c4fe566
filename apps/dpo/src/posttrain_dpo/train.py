"""What `posttrain dpo` does once its options are read."""

from posttrain_cli import mistakes
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer.commands import run_app

from posttrain_dpo.config import DPOConfig
from posttrain_dpo.demo import run
from posttrain_dpo.trainer import DPOTrainer


def main(config: DPOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> int:
    """Train, save, and say where; without model and data, the demonstration: see `run_app`."""
    how = {"load": load_datasets, "data_error": DataError, "mistakes": mistakes}
    return run_app(DPOTrainer, config, model, lora, data, demonstrate=run, **how)
