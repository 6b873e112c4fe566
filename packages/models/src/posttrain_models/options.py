"""Options of loading and of adapters, named as users of this field already type them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help: str) -> Any:
    if isinstance(default, list | dict):
        raise TypeError("give a mutable default through default_factory")
    return field(default=default, metadata={"help": help})


@dataclass
class LoadOptions:
    """How a model named by a string is loaded.

    Example:
        >>> from posttrain_models import LoadOptions
        >>> LoadOptions(dtype="bfloat16").dtype
        'bfloat16'
    """

    model_name_or_path: str | None = _option(
        None, "Model to train: a folder, a name on the hub, or the folder of an adapter to continue."
    )
    model_revision: str = _option("main", "Branch, tag or commit of the model on the hub.")
    dtype: str | None = _option(
        "float32", "Weights are loaded in it: float32, bfloat16, float16, or auto for that of the checkpoint."
    )
    attn_implementation: str | None = _option(
        None,
        "Attention: sdpa, eager, flash_attention_2, flash_attention_3, or a kernel of the hub such as "
        "kernels-community/flash-attn2. Default: chosen with the layout.",
    )
    trust_remote_code: bool = _option(False, "Run the model code that comes with the checkpoint.")
    load_in_8bit: bool = _option(False, "Quantise the frozen weights to 8 bits; needs bitsandbytes and use_peft.")
    load_in_4bit: bool = _option(False, "Quantise the frozen weights to 4 bits; needs bitsandbytes and use_peft.")
    bnb_4bit_quant_type: str = _option("nf4", "4-bit data type: nf4 or fp4.")
    use_bnb_nested_quant: bool = _option(False, "Quantise the constants of 4-bit quantisation too.")
    bnb_4bit_quant_storage: str | None = _option(None, "Data type in which 4-bit weights are stored, for FSDP.")


@dataclass
class LoraOptions:
    """A LoRA adapter (Hu et al., arXiv 2106.09685).

    Example:
        >>> from posttrain_models import LoraOptions
        >>> LoraOptions(use_peft=True, lora_r=8).lora_alpha
        32
    """

    use_peft: bool = _option(False, "Train an adapter and leave the model's own weights as they are.")
    lora_r: int = _option(16, "Rank of the adapter.")
    lora_alpha: int = _option(32, "The adapter's output is scaled by lora_alpha / lora_r.")
    lora_dropout: float = _option(0.05, "Dropout before the adapter.")
    lora_target_modules: list[str] | None = _option(
        None, "Names of the linear layers to adapt, or all-linear. Default: those customary for the architecture."
    )
    lora_target_parameters: list[str] | None = _option(
        None, "Names of parameters to adapt that are not linear layers, such as mlp.experts.gate_up_proj."
    )
    lora_modules_to_save: list[str] | None = _option(None, "Modules to train in full and save with the adapter.")
    lora_task_type: str = _option("CAUSAL_LM", "Task that the adapter is saved for.")
    use_rslora: bool = _option(False, "Scale by lora_alpha / sqrt(lora_r) (arXiv 2312.03732).")
    use_dora: bool = _option(False, "Adapt direction and magnitude apart (arXiv 2402.09353).")
