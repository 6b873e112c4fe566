"""What `posttrain plan METHOD` prints: the resolved run, without running it."""

from itertools import islice
from typing import Any

from posttrain_cli import mistakes
from posttrain_data import DatasetOptions, load_datasets, tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, apply_lora, sketch_model

from posttrain_app.arguments import evaluates, show_messages
from posttrain_app.demo import Demonstration
from posttrain_app.describe import GIB, describe_run, dtype_bytes
from posttrain_app.loading import resolve_tokenizer, saved_adapter
from posttrain_app.trainer import AppTrainer


def plan_app(
    trainer_class: type[AppTrainer],
    demonstration: Demonstration,
    config: Any,
    model: LoadOptions,
    lora: LoraOptions,
    data: DatasetOptions,
    *,
    world_size: int,
) -> int:
    """Print the batch arithmetic, the shapes, the memory, and three rows; all but the memory as the trainer says it.

    Args:
        trainer_class: The app's trainer.
        demonstration: The app's demonstration, which is planned without model and data.
        config: Options of the method and of training.
        model: The model; only its configuration and tokenizer are read.
        lora: The adapter, if one is trained.
        data: The rows, which are prepared as for training.
        world_size: Processes of the run.

    Returns:
        The exit code.

    Raises:
        CommandError: For a mistake in the options or the rows.

    Example:
        In the module that an app's command names, for a trainer and a demonstration of its own:

        >>> from functools import partial
        >>> from posttrain_app import AppTrainer, Demonstration, plan_app
        >>> plan = partial(plan_app, AppTrainer, Demonstration(rows=[], settings={}))
    """
    show_messages()
    with mistakes(ValueError):
        if model.model_name_or_path is None and not data.given:
            tokenizer, rows, held_out = tiny_tokenizer(), demonstration.rows, None
            whole = cut = demonstration.tiny(tokenizer)
            adapter = None
            trainer = trainer_class.unloaded(config, tokenizer)
        else:
            trainer = trainer_class.unloaded(config, resolve_tokenizer(model, config)[0])
            rows, held_out = load_datasets(data, evaluate=evaluates(config), seed=config.seed)
            trainer.check_all(model, rows, held_out, peft_config=lora)
            whole, cut = sketch_model(model)
            trainer.balancing(cut)
            whole = trainer.sketch(whole)
            adapter = saved_adapter(model)
        prepared, report = trainer.prepare(rows, "train", "train")
        copied = sum(p.numel() for p in whole.parameters())
        adapter = lora if lora.use_peft else adapter
        if adapter is not None:
            whole = apply_lora(whole, adapter)
        first = list(islice(iter(prepared), 3))  # a stream's report is of what was read of it
        shapes = trainer.plan_shapes(cut, prepared, trainer.prepare_eval(held_out))
        width = dtype_bytes(model.dtype)
        print(describe_run(report, config, world_size, prepared, shapes, whole, width))
        if trainer.needs_copy(shapes, adapter is not None):
            print(f"reference: a second copy of the model, {copied * width / GIB:.1f} GiB")
        for number, row in enumerate(first, 1):
            print(f"\n{trainer.show_row(number, row)}")
    return 0
