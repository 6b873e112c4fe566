"""What `posttrain plan kto ...` prints: the resolved run, without running it."""

from itertools import islice

from posttrain_cli import mistakes
from posttrain_data import DatasetOptions, load_datasets, prepare_feedback, tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, apply_lora, sketch_model, tiny_model
from posttrain_trainer.describe import GIB, describe_run, dtype_bytes, shortened
from posttrain_trainer.facade import inner_tokenizer, plan_completions, resolve_tokenizer, show_messages

from posttrain_kto.config import KTOConfig
from posttrain_kto.demo import rows as demo_rows
from posttrain_kto.trainer import data_options


def main(config: KTOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, *, world_size: int) -> int:
    """Print the batch arithmetic, the shapes, the memory, and three rows.

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


def _plan(config: KTOConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, world_size: int) -> int:
    if model.model_name_or_path is None and not data.given:
        tokenizer, rows = tiny_tokenizer(), demo_rows()
        whole = cut = tiny_model("llama", vocab_size=len(tokenizer))
    else:
        tokenizer = inner_tokenizer(resolve_tokenizer(model, config, None))
        rows, _ = load_datasets(data, evaluate=False, seed=config.seed)
        whole, cut = sketch_model(model)
    prepared, report = prepare_feedback(rows, tokenizer, data_options(config))
    size = sum(p.numel() for p in whole.parameters())
    if lora.use_peft:
        whole = apply_lora(whole, lora)
    width = dtype_bytes(model.dtype)
    shapes = plan_completions(cut, config, 1, prepared)
    print(describe_run(report, config, world_size, prepared, shapes, whole, width))
    if not lora.use_peft and not (config.precompute_ref_log_probs and config.loss_type != "kto"):
        print(f"reference: a second copy of the model, {size * width / GIB:.1f} GiB")
    for number, row in enumerate(islice(iter(prepared), 3), 1):
        print(f"\nrow {number}, labelled {'good' if row['label'] else 'bad'}:")
        for name in ("prompt", "completion"):
            ids = row[f"{name}_ids"] if f"{name}_ids" in row else []
            print(f"{name + ',':<11} {len(ids)} tokens: {shortened(tokenizer.decode(ids))}")
    return 0
