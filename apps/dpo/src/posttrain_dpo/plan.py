"""What `posttrain plan dpo ...` prints: the resolved run, without running it."""

from itertools import islice

from posttrain_cli import mistakes
from posttrain_data import DatasetOptions, load_datasets, prepare_preferences, tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, apply_lora, sketch_model, tiny_model
from posttrain_trainer.describe import GIB, describe_run, dtype_bytes, shortened
from posttrain_trainer.facade import inner_tokenizer, plan_completions, resolve_tokenizer, show_messages

from posttrain_dpo.config import DPOConfig
from posttrain_dpo.demo import rows as demo_rows
from posttrain_dpo.trainer import data_options, make_method


def main(config: DPOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, *, world_size: int) -> int:
    """Print the batch arithmetic, the shapes, the memory, and three pairs.

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


def _plan(config: DPOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, world_size: int) -> int:
    if model.model_name_or_path is None and not data.given:
        tokenizer, rows = tiny_tokenizer(), demo_rows()
        whole = cut = tiny_model("llama", vocab_size=len(tokenizer))
    else:
        tokenizer = inner_tokenizer(resolve_tokenizer(model, config, None))
        rows, _ = load_datasets(data, evaluate=False, seed=config.seed)
        whole, cut = sketch_model(model)
    prepared, report = prepare_preferences(rows, tokenizer, data_options(config))
    size = sum(p.numel() for p in whole.parameters())
    if lora.use_peft:
        whole = apply_lora(whole, lora)
    width = dtype_bytes(model.dtype)
    shapes = plan_completions(cut, config, 2, prepared)
    print(describe_run(report, config, world_size, prepared, shapes, whole, width))
    if not lora.use_peft and not config.precompute_ref_log_probs and make_method(config).needs_reference:
        print(f"reference: a second copy of the model, {size * width / GIB:.1f} GiB")
    for number, row in enumerate(islice(iter(prepared), 3), 1):
        print(f"\nrow {number}:")
        for name in ("prompt", "chosen", "rejected"):
            ids = row[f"{name}_ids"] if f"{name}_ids" in row else []
            print(f"{name + ',':<9} {len(ids)} tokens: {shortened(tokenizer.decode(ids))}")
    return 0
