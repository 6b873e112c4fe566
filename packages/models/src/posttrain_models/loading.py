"""From a name, a folder, an adapter's folder or an object to a model that is where it should be."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from posttrain_devices import device_spec
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from posttrain_models.options import LoadOptions
from posttrain_models.unwrap import base_model

logger = logging.getLogger("posttrain")


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    options: LoadOptions | None = None,
    *,
    model_init_kwargs: dict[str, Any] | str | None = None,
    quantization_config: Any = None,
    device: str | torch.device | None = "auto",
) -> Any:
    """Load a causal language model for training.

    The class is the one the checkpoint names, so that text-only training of a vision-language checkpoint keeps its
    class and weight names; what such a checkpoint has besides its language model is frozen. Weights load straight onto
    this process's device: the accelerator of its local rank if the machine has one, never another. Under
    FSDP and DeepSpeed, which place weights themselves, they stay on the CPU.

    Args:
        model: A folder, a name on the hub, or the folder of an adapter, whose base is loaded and which trains on. A
            `PreTrainedModel` or `PeftModel` is returned as it is.
        options: Options; the defaults if None. Its `model_name_or_path` is not read.
        model_init_kwargs: More arguments of `from_pretrained`, as a dict or a JSON string; they win over `options`.
        quantization_config: A quantisation configuration of transformers, instead of the `load_in_*` options.
        device: Where to load; "auto" as described, None for the CPU.

    Returns:
        The model, in training mode for a loaded one.

    Raises:
        ValueError: The folder does not exist, holds no configuration, or is damaged; weights are missing; options
            contradict each other. The message names the path or the option.

    Example:
        >>> import tempfile
        >>> from posttrain_models import load_model, tiny_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tiny_model("llama").save_pretrained(folder)
        ...     model = load_model(folder, device=None)
        >>> type(model).__name__
        'LlamaForCausalLM'
    """
    return load_with(_load_base, model, options, model_init_kwargs, quantization_config, device)


def load_with(
    load_base: Callable[[str, dict[str, Any], bool], PreTrainedModel],
    model: str | os.PathLike[str] | nn.Module,
    options: LoadOptions | None,
    model_init_kwargs: dict[str, Any] | str | None,
    quantization_config: Any,
    device: str | torch.device | None,
) -> Any:
    """What `load_model` does, with another way from a name to a model without adapter."""
    extra = _init_kwargs(model_init_kwargs)
    if isinstance(model, nn.Module):
        if extra or quantization_config is not None:
            raise ValueError(
                "model_init_kwargs and quantization_config need the model as a name or path, not an object"
            )
        return model
    options = options or LoadOptions()
    name = os.fspath(model)
    adapter = adapter_config(name)
    arguments = _arguments(options, extra, quantization_config, device)
    if adapter is None:
        return load_base(name, arguments, "dtype" in extra)
    base_name = base_of(name, adapter)
    try:
        base = load_base(base_name, arguments, "dtype" in extra)
    except ValueError as error:
        raise ValueError(f"{name} is an adapter of {base_name}: {error}") from error
    return _continue_adapter(base, name)


def _init_kwargs(given: dict[str, Any] | str | None) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"model_init_kwargs={given!r} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"model_init_kwargs must be a JSON object, not {given!r}")
    given = dict(given or {})
    if "torch_dtype" in given:  # `from_pretrained` would drop it beside the dtype that it is always given here
        raise ValueError(f"model_init_kwargs has torch_dtype={given['torch_dtype']!r}, which is called dtype now")
    return given


def _arguments(
    options: LoadOptions, extra: dict[str, Any], quantization: Any, device: str | torch.device | None
) -> dict[str, Any]:
    """What `from_pretrained` is given."""
    arguments: dict[str, Any] = {
        "dtype": parse_dtype(options.dtype),
        "revision": options.model_revision,
        "trust_remote_code": options.trust_remote_code,
    }
    if options.attn_implementation is not None:
        arguments["attn_implementation"] = options.attn_implementation
    where = _placement(device)
    if where is not None:
        arguments["device_map"] = {"": where}
    arguments.update(extra)
    if isinstance(arguments["dtype"], str):
        arguments["dtype"] = parse_dtype(arguments["dtype"])
    asked = quantization or _bitsandbytes(options, arguments["dtype"])
    if asked is not None and "quantization_config" in extra:
        raise ValueError(
            "quantization_config is given twice: once as an argument or load_in_*, once in model_init_kwargs"
        )
    if asked is not None:
        arguments["quantization_config"] = asked
    if arguments.get("device_map") == "auto":
        raise ValueError("device_map='auto' may land on the CPU or split the model; leave it out")
    return arguments


def parse_dtype(name: str | torch.dtype | None) -> Any:
    """A dtype by its name; "auto" and None stay."""
    if name is None or name == "auto" or isinstance(name, torch.dtype):
        return name or "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r} is unknown; write float32, bfloat16, float16 or auto")
    return dtype


def _bitsandbytes(options: LoadOptions, dtype: Any) -> Any:
    if not (options.load_in_4bit or options.load_in_8bit):
        return None
    if options.load_in_4bit and options.load_in_8bit:
        raise ValueError("load_in_4bit and load_in_8bit exclude each other; choose one")
    if importlib.util.find_spec("bitsandbytes") is None:
        flag = "load_in_4bit" if options.load_in_4bit else "load_in_8bit"
        raise ValueError(f"{flag} needs bitsandbytes; install posttrain-models[quantization]")
    if options.load_in_8bit:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_compute_dtype=torch.bfloat16 if dtype == "auto" else dtype,
        bnb_4bit_use_double_quant=options.use_bnb_nested_quant,
        bnb_4bit_quant_storage=options.bnb_4bit_quant_storage,
    )


def _placement(device: str | torch.device | None) -> str | torch.device | None:
    if device != "auto":
        return device
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") or _deepspeed_places():
        return None
    spec = device_spec()
    if spec.name == "cpu":
        return None
    rank = os.environ.get("LOCAL_RANK")
    # On Trainium a process owns one core, which the runtime picked.
    return spec.device_map if rank is None or spec.static_shapes else f"{spec.device_map}:{rank}"


def _deepspeed_places() -> bool:
    if importlib.util.find_spec("deepspeed") is None:
        return False
    from transformers.integrations import is_deepspeed_zero3_enabled

    return is_deepspeed_zero3_enabled()


def looks_like_folder(name: str) -> bool:
    """Whether a name can only be meant as a path."""
    return name.startswith((".", "/", "~")) or os.path.isabs(name) or name.count("/") > 1 or os.path.exists(name)


def adapter_config(name: str) -> dict[str, Any] | None:
    """The configuration of a local adapter; a folder that also holds a whole model is that model."""
    if looks_like_folder(name) and not os.path.isdir(name):
        what = "is a file, not a model folder" if os.path.exists(name) else "does not exist"
        raise ValueError(f"model folder {name} {what}; name a folder with a model, or a model of the hub")
    path = Path(name, "adapter_config.json")
    if not path.is_file() or Path(name, "config.json").is_file():
        return None
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def base_of(name: str, adapter: dict[str, Any]) -> str:
    """The base model that the configuration of the adapter `name` names."""
    base = adapter.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{name} is an adapter whose adapter_config.json names no base model")
    return base


def _load_base(name: str, arguments: dict[str, Any], dtype_chosen: bool) -> PreTrainedModel:
    config = read_config(name, arguments)
    model, info = read_weights(model_class(config), name, arguments)
    complain_missing(name, model, info["missing_keys"])
    return ready(model, arguments, dtype_chosen)


def read_config(name: str, arguments: dict[str, Any]) -> Any:
    """The configuration of a model; `config` among the arguments wins."""
    if looks_like_folder(name):
        adapter_config(name)
        if not Path(name, "config.json").is_file():
            raise ValueError(f"model folder {name} has no config.json, so it is not a saved model")
    chosen = {key: arguments[key] for key in ("revision", "trust_remote_code")}
    try:
        return arguments.get("config") or AutoConfig.from_pretrained(name, **chosen)
    except Exception as error:  # JSON and hub errors of many kinds, none of which names the folder
        raise ValueError(f"model {name} cannot be loaded: {type(error).__name__}: {error}") from error


def read_weights(loader: Any, name: str, arguments: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model by its class, and what transformers says about its weights.

    The configuration that was read is not passed on: given one, `from_pretrained` would not apply overrides of its
    fields.
    """
    try:
        return loader.from_pretrained(name, output_loading_info=True, **arguments)
    except Exception as error:  # as above, and of safetensors
        raise ValueError(f"model {name} cannot be loaded: {type(error).__name__}: {error}") from error


def complain_missing(name: str, model: nn.Module, missing: Iterable[str]) -> None:
    """Refuse a checkpoint that lacks weights."""
    missing = sorted(missing)
    if missing:
        raise ValueError(
            f"model {name} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}; save "
            "it whole, or name another checkpoint"
        )


def ready(model: PreTrainedModel, arguments: dict[str, Any], dtype_chosen: bool) -> PreTrainedModel:
    """A loaded model for training, with a line about its memory."""
    freeze_towers(model)
    if arguments["dtype"] == torch.float32 and not dtype_chosen:
        _say_memory(model)
    return model.train()


def model_class(config: Any) -> Any:
    """The class named in the checkpoint, when it is one of transformers' with a language-model head."""
    named = (getattr(config, "architectures", None) or [None])[0]
    cls = getattr(transformers, named, None) if named else None
    if cls is None or not named.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
        return AutoModelForCausalLM
    return cls


def freeze_towers(model: PreTrainedModel) -> None:
    """Freeze what a multimodal checkpoint has besides its language model: text alone never reaches it."""
    if model.config.get_text_config() is model.config:
        return
    parts = [model.get_decoder(), model.get_output_embeddings(), getattr(model, "score", None)]
    kept = {id(p) for part in parts if part is not None for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)


def _say_memory(model: nn.Module) -> None:
    if int(os.environ.get("RANK", "0")):
        return
    mib = sum(p.numel() for p in model.parameters()) * 4 / 2**20
    logger.warning(
        "%s loads in float32: weights take %.0f MiB; dtype='bfloat16' would save %.0f MiB, and as much in gradients",
        type(model).__name__, mib, mib / 2,
    )  # fmt: skip


def _continue_adapter(base: PreTrainedModel, folder: str) -> Any:
    peft = require_peft(f"{folder} is an adapter")
    try:
        _make_room(base, Path(folder, "adapter_model.safetensors"))
        model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    except Exception as error:  # as above: no error of safetensors or peft names the folder
        raise ValueError(f"adapter {folder} cannot be loaded: {type(error).__name__}: {error}") from error
    logger.info("continuing the adapter in %s", folder)
    return model


def _make_room(base: PreTrainedModel, weights: Path) -> None:
    """An adapter that was trained with added tokens brings its embeddings along, which have more rows."""
    if not weights.is_file():
        return
    embedding = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    with safetensors.safe_open(weights, framework="pt") as file:
        key = f"base_model.model.{name}.weight"
        rows = file.get_slice(key).get_shape()[0] if key in file.keys() else 0  # noqa: SIM118 (not a dict)
    if rows > embedding.weight.shape[0]:
        base.resize_token_embeddings(rows)


def require_peft(why: str) -> Any:
    """The peft module, or an error that says what needs it."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError(f"{why}, which needs peft; install posttrain-models[peft]")
    import peft

    return peft


def load_tokenizer(
    name: str | os.PathLike[str],
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    eos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has a padding token: see `complete_tokenizer`.

    Args:
        name: A folder or a name on the hub.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run the code that comes with the tokenizer.
        eos_token: The end token; default: the tokenizer's own.

    Returns:
        The tokenizer.

    Raises:
        ValueError: It cannot be loaded, or a token is not in the vocabulary.

    Example:
        >>> import tempfile
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
        ...     load_tokenizer(folder).pad_token
        '<end>'
    """
    path = os.fspath(name)
    if looks_like_folder(path) and not os.path.isdir(path):
        raise ValueError(f"tokenizer folder {path} does not exist; name a folder, or a model of the hub")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # many kinds, none of which names the folder
        raise ValueError(f"tokenizer {path} cannot be loaded: {type(error).__name__}: {error}") from error
    complete_tokenizer(tokenizer, eos_token=eos_token)
    return tokenizer


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, *, eos_token: str | None = None) -> None:
    """Give a tokenizer, in place, the end token that is asked for, and a padding token if it has none.

    The end token pads then, which is safe because masks go by length and never by id.

    Args:
        tokenizer: The tokenizer.
        eos_token: The end token; default: the tokenizer's own.

    Raises:
        ValueError: The end token is not in the vocabulary, or there is nothing to pad with.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> complete_tokenizer(tokenizer, eos_token="<end>")
        >>> tokenizer.pad_token
        '<end>'
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(f"eos_token={eos_token!r} is not in the vocabulary of tokenizer {name}")
        tokenizer.eos_token = eos_token
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(f"tokenizer {name} has neither a padding nor an end token: set `pad_token` on it")
        tokenizer.pad_token = tokenizer.eos_token


def fit_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> None:
    """Give a model room for every token of a tokenizer, and its padding and end tokens.

    Args:
        model: The model; embeddings grow to a multiple of 64 rows if they are too few.
        tokenizer: Has a padding token.
        ends: Ids that `generate` is to stop at, in front of those that the generation configuration lists already.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from posttrain_models import fit_tokens, tiny_model
        >>> words = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
        >>> model = tiny_model("llama")
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="a")
        >>> fit_tokens(model, tokenizer)
        >>> model.config.pad_token_id, model.generation_config.eos_token_id
        (1, 0)
    """
    base = base_model(model)
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(needed, pad_to_multiple_of=64)
    eos = tokenizer.eos_token_id
    if eos is not None and eos == tokenizer.pad_token_id and base.get_output_embeddings() is None:
        logger.warning(
            "%s both ends and pads: transformers' own pooling of this reward model takes trailing padding tokens away "
            "and scores texts that end with it one token early; a padding token of its own avoids that",
            tokenizer.pad_token,
        )
    ends = [*ends, *([] if eos is None else [eos])]
    for config in {id(part): part for part in (base.config, base.config.get_text_config())}.values():
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = eos if eos is not None else next(iter(ends), config.eos_token_id)
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        before = generation.eos_token_id
        known = before if isinstance(before, list) else [] if before is None else [before]
        every = list(dict.fromkeys([*ends, *known]))
        generation.pad_token_id = tokenizer.pad_token_id
        generation.eos_token_id = every if len(every) > 1 else next(iter(every), None)
