"""`posttrain plan reward`: the resolved run, without running it."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from posttrain_cli import mistakes
from posttrain_data import DatasetOptions, load_datasets, prepare_preferences, tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, apply_lora, sketch_model
from posttrain_models.rewards import tiny_reward_model
from posttrain_trainer.describe import describe_run, dtype_bytes, mark_targets
from posttrain_trainer.facade import inner_tokenizer, plan_completions, show_messages
from torch import nn
from transformers import AutoModelForSequenceClassification

from posttrain_reward.config import RewardConfig
from posttrain_reward.demo import rows as demo_rows
from posttrain_reward.trainer import data_options, make_tokenizer


def main(config: RewardConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, *, world_size: int) -> int:
    """Print the batch arithmetic, the shapes, the memory, and three pairs as the model sees them.

    Args:
        config: Options of the method and of training.
        model: The model; only its configuration and tokenizer are read.
        lora: The adapter, if one is trained.
        data: The rows, which are prepared as for training.
        world_size: Processes of the run.

    Returns:
        The exit code.
    """
    show_messages()
    with mistakes(ValueError):
        return _plan(config, model, lora, data, world_size)


def _plan(config: RewardConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, world_size: int) -> int:
    if model.model_name_or_path is None and not data.given:
        tokenizer, rows = tiny_tokenizer(), demo_rows()
        whole = cut = tiny_reward_model("llama", vocab_size=len(tokenizer))
    else:
        tokenizer = inner_tokenizer(make_tokenizer(model, config)[0])
        rows, _ = load_datasets(data, evaluate=False, seed=config.seed)
        whole, cut = _sketches(model)
    prepared, report = prepare_preferences(rows, tokenizer, data_options(config))
    if lora.use_peft:
        whole = apply_lora(whole, lora)
    first = list(islice(iter(prepared), 3))
    shapes = plan_completions(cut, config, 2, prepared)
    print(describe_run(report, config, world_size, prepared, shapes, whole, dtype_bytes(model.dtype)))
    for number, row in enumerate(first, 1):
        print(f"\npair {number}: completions between guillemets")
        for side in ("chosen", "rejected"):
            print(f"{side + ':':<9} {mark_targets(tokenizer, _completion(row, side))}")
    return 0


def _sketches(model: LoadOptions) -> tuple[nn.Module, nn.Module]:
    """The reward model without weights on the meta device, and a cut of the language model it is made of."""
    whole, cut = sketch_model(model)
    config = whole.config
    config.num_labels = 1
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config), cut


def _completion(row: Mapping[str, Any], side: str) -> dict[str, list]:
    """A side of a pair as a row whose targets are the completion."""
    prompt, found = list(row.get("prompt_ids") or []), list(row[f"{side}_ids"])
    return {"input_ids": prompt + found, "loss_mask": [False] * len(prompt) + [True] * len(found)}
