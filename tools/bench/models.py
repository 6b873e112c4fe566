"""Make the model folders of the benchmarks once and cache them: `python models.py NAME`; prints the folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import smollm2  # noqa: E402


def cache() -> Path:
    """The user's cache folder for benchmark models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "posttrain", "bench")


def smollm2_cut(folder: Path, layers: int = 8) -> None:
    """The first `layers` layers of SmolLM2-135M-Instruct."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = smollm2.make(cache() / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(whole, dtype="float32")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)


def qwen3_shape(folder: Path) -> None:
    """Random weights in the shape of Qwen3-0.6B, with SmolLM2's tokenizer: values do not change speed or memory."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2.make(cache() / "smollm2")).save_pretrained(folder)


MODELS = {"smollm2-8-layers": smollm2_cut, "qwen3-0.6b-shape": qwen3_shape}


def main() -> None:
    """Make the model called by the first argument unless it is cached; print its folder."""
    name = sys.argv[1]
    folder = cache() / name
    if not folder.exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache()) as scratch:
            MODELS[name](Path(scratch, "model"))
            Path(scratch, "model").rename(folder)
    print(folder)


if __name__ == "__main__":
    main()
