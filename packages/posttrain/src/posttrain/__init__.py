"""Post-training of language models on CPU, CUDA and AWS Trainium, from parts that are useful alone."""

from importlib.metadata import version

from posttrain_cli import lazy_exports

__version__ = version("posttrain")
__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "DPOConfig": "posttrain_dpo",
        "DPOTrainer": "posttrain_dpo",
        "KTOConfig": "posttrain_kto",
        "KTOTrainer": "posttrain_kto",
        "RewardConfig": "posttrain_reward",
        "RewardTrainer": "posttrain_reward",
        "SFTConfig": "posttrain_sft",
        "SFTTrainer": "posttrain_sft",
        "Trainer": "posttrain_trainer",
        "TrainingConfig": "posttrain_trainer",
        "LoadOptions": "posttrain_models",
        "LoraOptions": "posttrain_models",
        "load_model": "posttrain_models",
        "device_spec": "posttrain_devices",
    },
)
