"""What `posttrain kto` does once its options are read."""

from posttrain_cli import mistakes
from posttrain_data import DataError, DatasetOptions, load_datasets
from posttrain_models import LoadOptions, LoraOptions
from posttrain_trainer.commands import run_app

from posttrain_kto.config import KTOConfig
from posttrain_kto.demo import run
from posttrain_kto.trainer import KTOTrainer


def main(config: KTOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions) -> int:
    """Train, save, and say where; without model and data, the demonstration: see `run_app`."""
    how = {"load": load_datasets, "data_error": DataError, "mistakes": mistakes}
    return run_app(KTOTrainer, config, model, lora, data, demonstrate=run, **how)
