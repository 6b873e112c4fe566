"""What `posttrain plan sft ...` prints: the resolved run, without running it."""

from itertools import islice

from posttrain_cli import mistakes
from posttrain_data import DatasetOptions, load_datasets, prepare_sft, tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, apply_lora, sketch_model, tiny_model
from posttrain_trainer.describe import describe_run, dtype_bytes, mark_targets
from posttrain_trainer.facade import inner_tokenizer, show_messages

from posttrain_sft.config import SFTConfig
from posttrain_sft.demo import rows as demo_rows
from posttrain_sft.trainer import data_options, make_tokenizer, plan_shapes


def main(config: SFTConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, *, world_size: int) -> int:
    """Print the batch arithmetic, the shapes, the memory, and three rows with their targets marked.

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


def _plan(config: SFTConfig, model: LoadOptions, lora: LoraOptions, data: DatasetOptions, world_size: int) -> int:
    if model.model_name_or_path is None and not data.given:
        tokenizer, rows = tiny_tokenizer(), demo_rows()
        whole = cut = tiny_model("llama", vocab_size=len(tokenizer))
    else:
        tokenizer = inner_tokenizer(make_tokenizer(model, config)[0])
        rows, _ = load_datasets(data, evaluate=False, seed=config.seed)
        whole, cut = sketch_model(model)
    prepared, report = prepare_sft(rows, tokenizer, data_options(config))
    if lora.use_peft:
        whole = apply_lora(whole, lora)
    first = list(islice(iter(prepared), 3))
    shapes = plan_shapes(cut, config, prepared)
    print(describe_run(report, config, world_size, prepared, shapes, whole, dtype_bytes(model.dtype)))
    for number, row in enumerate(first, 1):
        print(f"\nrow {number}: {len(row['input_ids'])} tokens, targets between guillemets")
        print(mark_targets(tokenizer, row))
    return 0
