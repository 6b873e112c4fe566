"""Fine-tune a real chat model on real rows, in full and with an adapter, and check what comes out.

    uv run python tools/real_data.py MODEL FILE [FILE ...] [--steps 40]

For each file the command `posttrain sft` trains on it as it is, with a part held out, once with LoRA and once in full.
Then transformers alone loads what was saved. What must hold: the held-out loss falls; a generated answer ends with a
token that `generation_config` lists; the merged adapter gives the adapter's logits. One line a run, exit code 1 if
anything does not hold. `tools/smollm2.py` makes a model folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = "What is the capital of France?"


def train(model: str, file: str, output: Path, steps: int, adapter: bool) -> list[float]:
    """Run the command; return the held-out losses, the first from before training."""
    options = {
        "model_name_or_path": model,
        "dataset_name": file,
        "output_dir": output,
        "test_split_size": 32,
        "eval_strategy": "steps",
        "eval_steps": steps,
        "eval_on_start": "true",
        "max_steps": steps,
        "max_length": 512,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 5e-4 if adapter else 2e-5,
        "use_peft": str(adapter).lower(),
        "gradient_checkpointing": "false",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-m", "posttrain_sft", *words], check=True, stdout=sys.stderr, env=environment)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["eval_loss"] for entry in history if "eval_loss" in entry]


def answer(folder: Path) -> tuple[str, bool]:
    """What the saved model says, and whether it stopped by itself."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=200)[0]
    ends = model.generation_config.eos_token_id
    text = tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text, int(ids[-1]) in (ends if isinstance(ends, list) else [ends])


def merge_gap(folder: Path) -> float:
    """The largest difference of logits between the adapter and its merged model, saved and loaded.

    In float64: there a right merge is equal to ten digits, whereas float32 rounds each of 30 layers twice.
    """
    from peft import AutoPeftModelForCausalLM

    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad(), tempfile.TemporaryDirectory() as merged:
        before = model(ids).logits
        model.merge_and_unload().save_pretrained(merged)
        after = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float64).eval()(ids).logits
    return float((before - after).abs().max())


def main() -> int:
    """Run every file both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    wrong = 0
    for file in arguments.files:
        for adapter in (True, False):
            with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
                output, start = Path(folder), time.perf_counter()
                losses = train(arguments.model, file, output, arguments.steps, adapter)
                seconds = time.perf_counter() - start
                text, stopped = answer(output)
                gap = merge_gap(output) if adapter else 0.0
            holds = losses[-1] < losses[0] and stopped and gap < 1e-6
            wrong += not holds
            print(
                f"{Path(file).name:32} {'LoRA' if adapter else 'full'}"
                f"  held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}"
                f"  {'stops' if stopped else 'RUNS ON'}  merged differs by {gap:.1e}  {seconds:.0f} s"
                f"  {'ok' if holds else 'WRONG'}  {text[:60]!r}",
                flush=True,
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
