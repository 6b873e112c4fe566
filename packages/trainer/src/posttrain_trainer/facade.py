"""What the trainers of the apps share: settling arguments, tokenizer and model before there is a trainer."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any

import torch
from posttrain_devices import device_spec
from posttrain_losses import Mean
from posttrain_models import (
    LoadOptions,
    LoraOptions,
    apply_lora,
    choose_layout,
    complete_tokenizer,
    load_model,
    load_tokenizer,
    sketch_model,
)
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from posttrain_trainer.checks import check_objects
from posttrain_trainer.config import TrainingConfig, checkpointing
from posttrain_trainer.plan import ShapePlan, resolve_completion_shapes
from posttrain_trainer.sources import completion_lengths

logger = logging.getLogger("posttrain")


@dataclass
class MethodConfig(TrainingConfig):
    """Options that the configs of all apps share, and every option of `transformers.TrainingArguments`."""

    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Arguments of `from_pretrained` (a mapping or its JSON), for a model given by name."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run model or tokenizer code that a repository brings along."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that prepare the rows."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest row in tokens."})
    padding_free: bool | None = field(
        default=None,
        metadata={"help": "Compute no padding token; none does so wherever the model honours sequence boundaries."},
    )
    pad_token: str | None = field(default=None, metadata={"help": "Refused: set `pad_token` on the tokenizer instead."})

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before anything is loaded."""
        super().__post_init__()
        self.model_init_kwargs = mapping_option("model_init_kwargs", self.model_init_kwargs)
        if self.pad_token is not None:
            raise ValueError("pad_token is not an option: set `tokenizer.pad_token` and pass it as processing_class.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2 tokens, or none for no limit; got {self.max_length}.")


def resolve_args(args: TrainingArguments | None, config_class: type, model: Any, suffix: str) -> Any:
    """The method's own config, whatever was passed.

    Args:
        args: An instance of `config_class`, plain `TrainingArguments`, or None for the defaults.
        config_class: The config of the method, a subclass of `TrainingConfig`.
        model: What the trainer was given as its model; names the default output folder.
        suffix: What the default output folder ends with, such as "SFT".

    Raises:
        ValueError: `args` is something else.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> from posttrain_trainer.facade import resolve_args
        >>> resolve_args(None, TrainingConfig, "Qwen/Qwen3-0.6B", "SFT").output_dir
        'Qwen3-0.6B-SFT'
    """
    show_messages()
    if isinstance(args, config_class):
        return args
    if args is None:
        return config_class(output_dir=f"{model_name(model)}-{suffix}")
    if not isinstance(args, TrainingArguments):
        raise ValueError(f"args must be a {config_class.__name__}; got {type(args).__name__}.")
    known = {item.name for item in fields(config_class) if item.init}
    given = {item.name: getattr(args, item.name) for item in fields(args) if item.init and item.name in known}
    return config_class(**given)


def check_run(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse, before anything is read or loaded, a run that cannot begin or end.

    Args:
        args: The method's config.
        train_dataset: Rows, or None.
        eval_dataset: Rows, several sets of them by name, or None.

    Raises:
        ValueError: Naming the option or argument and what to write instead.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> from posttrain_trainer.facade import check_run
        >>> check_run(TrainingConfig(str(getfixture("tmp_path")), use_cpu=True), [{"text": "a b"}], None)
    """
    folder = Path(args.output_dir).absolute()
    there = next(part for part in (folder, *folder.parents) if part.exists())
    if not there.is_dir():
        raise ValueError(f"output_dir={args.output_dir!r}: {there} is a file, not a folder: name another one.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir={args.output_dir!r}: {there} cannot be written to: name another folder.")
    if train_dataset is None:
        raise ValueError("train_dataset is missing: pass a data set or a list of rows.")
    if evaluates(args) and eval_dataset is None:
        raise ValueError(f"eval_strategy={_strategy(args)!r} needs rows: pass eval_dataset (or set test_split_size).")
    if not hasattr(train_dataset, "__len__") and args.max_steps <= 0:
        raise ValueError(f"max_steps={args.max_steps}: a stream has no length, so write how many steps to train.")


def evaluates(args: Any) -> bool:
    """Whether a run evaluates while it trains."""
    return _strategy(args) != "no"


def _strategy(args: Any) -> str:
    return str(getattr(args.eval_strategy, "value", args.eval_strategy))


def mapping_option(name: str, value: Any) -> dict[str, Any] | None:
    """An option that is a mapping, or the JSON of one.

    Raises:
        ValueError: Naming the option.

    Example:
        >>> from posttrain_trainer.facade import mapping_option
        >>> mapping_option("model_init_kwargs", '{"revision": "main"}')
        {'revision': 'main'}
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r} is not JSON: {error}. Write a mapping in braces.") from None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} must be a mapping; got {value!r}.")
    return value


def show_messages() -> None:
    """Let the packages' one-line messages appear on stderr, on the first rank, unless logging is set up already.

    Example:
        >>> from posttrain_trainer.facade import show_messages
        >>> show_messages()
    """
    if logging.root.handlers or int(os.environ.get("RANK", "0")):
        return
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def model_name(model: Any) -> str:
    """The last part of a model's name: of a path, of `LoadOptions`, or of the folder a model was loaded from."""
    if isinstance(model, LoadOptions):
        model = model.model_name_or_path
    if isinstance(model, nn.Module):
        model = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    return PurePath(os.fspath(model)).name or "model"


def load_options(model: Any, args: Any) -> LoadOptions | None:
    """How to load `model`; None when it is a model already.

    Raises:
        ValueError: The model is neither a name, nor `LoadOptions` that give one, nor a module.

    Example:
        >>> from posttrain_trainer import TrainingConfig
        >>> from posttrain_trainer.facade import load_options
        >>> args = TrainingConfig("out", use_cpu=True)
        >>> args.model_init_kwargs, args.trust_remote_code = None, False
        >>> load_options("Qwen/Qwen3-0.6B", args).model_name_or_path
        'Qwen/Qwen3-0.6B'
    """
    if isinstance(model, nn.Module):
        if args.model_init_kwargs:
            raise ValueError("model_init_kwargs are for a model given by name; this one is loaded already.")
        return None
    if isinstance(model, LoadOptions):
        if not model.model_name_or_path:
            raise ValueError("model_name_or_path is missing: name the model to train, a folder or a name on the hub.")
        return model
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model must be a name, a path, LoadOptions or a model; got {type(model).__name__}.")
    return LoadOptions(model_name_or_path=os.fspath(model), trust_remote_code=args.trust_remote_code)


def resolve_tokenizer(model: Any, args: Any, processing_class: Any) -> Any:
    """The tokenizer (or processor) to prepare rows with, from what was passed or from beside the model.

    Args:
        model: As the trainer was given it.
        args: The method's config.
        processing_class: A tokenizer or processor; None loads the model's.

    Raises:
        ValueError: It cannot be found, or lacks a padding and an end token.
    """
    if processing_class is None:
        options = load_options(model, args)
        extra = args.model_init_kwargs if isinstance(args.model_init_kwargs, dict) else {}
        name = options.model_name_or_path if options else getattr(model.config, "_name_or_path", "")
        if not name:
            raise ValueError("processing_class is missing, and the model does not say where it came from: pass one.")
        processing_class = load_tokenizer(
            _tokenizer_source(name),
            revision=extra.get("revision", options.model_revision if options else "main"),
            trust_remote_code=args.trust_remote_code,
        )
    check_objects(processing_class, None)
    complete_tokenizer(inner_tokenizer(processing_class), eos_token=getattr(args, "eos_token", None))
    return processing_class


def inner_tokenizer(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processing_class, "tokenizer", processing_class)


def resolve_model(
    model: Any,
    args: Any,
    *,
    quantization_config: Any = None,
    peft_config: Any = None,
    fit: Callable[[nn.Module], Any] | None = None,
    load: Callable[..., nn.Module] = load_model,
) -> nn.Module:
    """The model to train: loaded where it should be, with its adapter.

    Args:
        model: A name, a path, `LoadOptions`, or a model.
        args: The method's config.
        quantization_config: A quantisation configuration of transformers.
        peft_config: A configuration of peft, or `LoraOptions`; None adds no adapter.
        fit: Called with the loaded model before it gets its adapter, to make room for tokens.
        load: `posttrain_models.load_model`, or another one with its arguments.

    Raises:
        ValueError: The model cannot be loaded, or has an adapter and would get another.
    """
    options = load_options(model, args)
    source = model if options is None else options.model_name_or_path
    adapt = peft_config is not None and not (isinstance(peft_config, LoraOptions) and not peft_config.use_peft)
    if adapt and options is not None and _is_adapter(options.model_name_or_path):
        raise ValueError(
            f"{source} is an adapter, which is continued as it is: leave out use_peft and peft_config, or name its "
            "base model to begin another one."
        )
    if isinstance(peft_config, LoraOptions) and not peft_config.use_peft and peft_config != LoraOptions():
        logger.warning("options of an adapter have no effect without use_peft=True: no new adapter is made")
    set_seed(args.seed)  # before an adapter or a new head draws its weights
    with _progress_bars(not args.disable_tqdm):
        loaded = load(
            source,
            options,
            model_init_kwargs=args.model_init_kwargs,
            quantization_config=quantization_config,
            **({"device": None} if args.use_cpu else {}),
        )
    if fit is not None:
        fit(loaded)
    if adapt:
        return apply_lora(loaded, peft_config, gradient_checkpointing=checkpointing(args))
    if checkpointing(args) and hasattr(loaded, "peft_config"):
        loaded.enable_input_require_grads()
    return loaded


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Whether transformers shows how far it is, within the block."""
    before = transformers_logging.is_progress_bar_enabled()
    if not shown:
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            transformers_logging.enable_progress_bar()


def sketch(model: LoadOptions, args: Any) -> nn.Module | None:
    """A cut of the model without its weights, to try on it what not every model can do before weights are loaded.

    None where the attention was chosen by name: kernels of an accelerator cannot be tried on a cut on the CPU.
    """
    chosen = model.attn_implementation or (args.model_init_kwargs or {}).get("attn_implementation")
    return None if chosen else sketch_model(model)[1]


def disable_dropout(model: nn.Module) -> None:
    """Take dropout out of a model, its adapters included.

    Example:
        >>> from torch import nn
        >>> from posttrain_trainer.facade import disable_dropout
        >>> model = nn.Sequential(nn.Dropout(0.1))
        >>> disable_dropout(model)
        >>> model[0].p
        0.0
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Attention drops out inside its kernel, at a rate that the layer holds as a number.
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def plan_completions(
    model: nn.Module, args: Any, num_completions: int, *datasets: Any, share: bool = True
) -> ShapePlan:
    """The layout and widths of a run on prompts with completions, remembered on the model.

    Args:
        model: The model; its layout is probed.
        args: The method's config, with `max_length` and `padding_free`.
        num_completions: Completions of a prompt, G.
        datasets: Prepared rows, sets of them by name, or None; their lengths decide the widths.
        share: Compute a prompt once for its completions, where the model can.

    Raises:
        ValueError: Options contradict each other, or the model cannot do what they ask.
    """
    spec = device_spec(args.device)
    padded = args.padding_free is False or (args.max_shapes is not None and args.padding_free is None)
    wanted = "padded" if padded and not spec.static_shapes else "auto"
    # Probed in the precision of training, which decides the attention kernel.
    half = torch.bfloat16 if args.bf16 else torch.float16
    with torch.autocast(args.device.type, half, enabled=bool(args.bf16 or args.fp16)):
        layout = choose_layout(model, wanted, static_shapes=spec.static_shapes, completions=share)
    return resolve_completion_shapes(
        max_length=args.max_length,
        batch_size=args.per_device_train_batch_size,
        num_completions=num_completions,
        padding_free=bool(args.padding_free),
        pad_to_multiple_of=args.pad_to_multiple_of,
        max_shapes=args.max_shapes,
        layout=layout,
        spec=spec,
        lengths=_completion_lengths(datasets),
    )


def _completion_lengths(datasets: tuple[Any, ...]) -> Iterator[tuple[int, ...]] | None:
    """Lengths of prompts and completions, read when they are needed; None where a stream has not told them."""
    sets = [rows for data in datasets for rows in (data.values() if isinstance(data, dict) else [data])]
    sets = [rows for rows in sets if rows is not None]
    if not all(hasattr(rows, "__len__") for rows in sets):
        return None
    return (completion_lengths(row) for rows in sets for row in rows)


def prepared_sets(dataset: Any, prepare: Callable[[Any, str], Any]) -> Any:
    """Evaluation rows, prepared: None, one data set, or several by name.

    Args:
        dataset: The rows.
        prepare: `prepare(rows, name) -> rows`.

    Example:
        >>> from posttrain_trainer.facade import prepared_sets
        >>> prepared_sets({"a": [1], "b": [2]}, lambda rows, name: (name, rows))
        {'a': ('eval a', [1]), 'b': ('eval b', [2])}
    """
    if dataset is None:
        return None
    if isinstance(dataset, dict):
        return {name: prepare(rows, f"eval {name}") for name, rows in dataset.items()}
    return prepare(dataset, "eval")


def balancing_coefficient(model: nn.Module, wanted: float | None) -> float:
    """The weight of a mixture of experts' load-balancing loss, and whether the model computes that loss.

    Args:
        model: The model; its configuration is set.
        wanted: The weight; None takes the model's own.

    Raises:
        ValueError: A weight is wanted, and the model is no mixture of experts.
    """
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    if own is None:
        if wanted:
            raise ValueError(f"router_aux_loss_coef is for mixtures of experts; {type(model).__name__} is none.")
        return 0.0
    coefficient = own if wanted is None else wanted
    config.output_router_logits = coefficient > 0
    return coefficient


def balancing_term(
    coefficient: float, aux_loss: torch.Tensor | None
) -> tuple[dict[str, torch.Tensor], dict[str, Mean]]:
    """The load-balancing loss of a micro-batch, as sums and metrics of a method; nothing at a coefficient of 0.

    Args:
        coefficient: Its weight.
        aux_loss: What the model computed.

    Raises:
        ValueError: The model computes none.
    """
    if not coefficient:
        return {}, {}
    if aux_loss is None:
        raise ValueError("this model computes no load-balancing loss: set router_aux_loss_coef=0.")
    return {"aux_loss": coefficient * aux_loss}, {"aux_loss": Mean.of(aux_loss)}


def _tokenizer_source(name: str) -> str:
    """The model's own name; for the folder of an adapter that was saved without a tokenizer, its base model's."""
    if not _is_adapter(name) or (Path(name) / "tokenizer_config.json").is_file():
        return name
    try:
        saved = json.loads((Path(name) / "adapter_config.json").read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}/adapter_config.json is damaged: {error}") from None
    return saved.get("base_model_name_or_path") or name


def _is_adapter(name: Any) -> bool:
    folder = Path(name)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
