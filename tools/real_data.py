"""Train a real chat model on real rows with any method, and check what comes out.

    uv run python tools/real_data.py MODEL FILE [FILE ...] [--method sft] [--steps 24]

For each file the command `posttrain METHOD` trains on it as it is, with a part held out, and the figure that the method
is about must improve on that part: for `sft` the loss (once with LoRA and once in full), for `dpo` the share of pairs
whose chosen side has the higher reward, for `kto` the share of completions whose log-ratio is on their label's side of
the KL term, for `reward` the share of pairs that the model ranks right, which must beat chance clearly. Then
transformers alone loads what was saved: a generated answer must end with a token that `generation_config` lists, and a
saved adapter must change the logits, and give the same ones merged. One line a run, exit code 1 if anything does not
hold. `tools/smollm2.py` makes a model folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

QUESTION = "What is the capital of France?"


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        method: The method.
        adapter: With LoRA, or in full.
        figure: The name under which the log has what must improve on the rows held out.
        rises: Whether it improves by rising.
        least: What it must reach besides.
        options: Options of the command.
    """

    method: str
    adapter: bool
    figure: str
    rises: bool
    least: float
    options: dict[str, Any]

    def improves(self, first: float, last: float) -> bool:
        """Whether the held-out figure did what it must."""
        return (last > first and last >= self.least) if self.rises else last < first


COMMON = {"max_length": 512, "test_split_size": 32, "gradient_checkpointing": "false"}
PAIRS = {**COMMON, "test_split_size": 64, "lora_target_modules": "all-linear"}
RUNS = {
    "sft": (
        Run("sft", True, "eval_loss", False, 0, {**COMMON, "learning_rate": 5e-4}),
        Run("sft", False, "eval_loss", False, 0, {**COMMON, "learning_rate": 2e-5}),
    ),
    "dpo": (Run("dpo", True, "eval_rewards/accuracies", True, 0.5, {**PAIRS, "learning_rate": 2e-5}),),
    "kto": (Run("kto", True, "eval_rewards/accuracies", True, 0.5, {**PAIRS, "learning_rate": 1e-4}),),
    # Pairs with a side that is too long are left out whole: with less room few would be left.
    "reward": (Run("reward", True, "eval_accuracy", True, 0.6, {**PAIRS, "learning_rate": 3e-4, "max_length": 1024}),),
}


def train(run: Run, model: str, file: str, output: Path, steps: int) -> list[float]:
    """Run the command; return the figure on the held-out rows, the first from before training."""
    options = {
        "model_name_or_path": model,
        "dataset_name": file,
        "output_dir": output,
        "eval_strategy": "steps",
        "eval_steps": steps,
        "eval_on_start": "true",
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "use_peft": str(run.adapter).lower(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
        **run.options,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", f"posttrain_{run.method}", *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry[run.figure] for entry in history if run.figure in entry]


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


def merge_gap(folder: Path, method: str) -> float:
    """The largest difference of logits between an adapter and its merged model; infinite if the adapter does nothing.

    In float64: there a right merge is equal to ten digits, whereas float32 rounds each of 30 layers twice.
    """
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

    reward = method == "reward"
    with_adapter = AutoPeftModelForSequenceClassification if reward else AutoPeftModelForCausalLM
    alone = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    more = {"num_labels": 1} if reward else {}
    model = with_adapter.from_pretrained(folder, dtype=torch.float64, **more).eval()
    ids = torch.arange(3, 67)[None]
    with torch.no_grad(), tempfile.TemporaryDirectory() as merged:
        before = model(ids).logits
        with model.disable_adapter():
            if torch.equal(model(ids).logits, before):
                return float("inf")
        model.merge_and_unload().save_pretrained(merged)
        after = alone.from_pretrained(merged, dtype=torch.float64).eval()(ids).logits
    return float((before - after).abs().max())


def check(run: Run, model: str, file: str, steps: int) -> bool:
    """Run, print one line, and return whether everything holds."""
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        output, start = Path(folder), time.perf_counter()
        figures = train(run, model, file, output, steps)
        seconds = time.perf_counter() - start
        text, stopped = ("", True) if run.method == "reward" else answer(output)
        gap = merge_gap(output, run.method) if run.adapter else 0.0
    holds = run.improves(figures[0], figures[-1]) and stopped and gap < 1e-6
    print(
        f"{run.method:6} {Path(file).name:32} {'LoRA' if run.adapter else 'full'}"
        f"  held-out {run.figure.removeprefix('eval_')} {figures[0]:.3f} -> {figures[-1]:.3f}"
        f"  {'stops' if stopped else 'RUNS ON'}  merged differs by {gap:.1e}  {seconds:.0f} s"
        f"  {'ok' if holds else 'WRONG'}  {text[:60]!r}",
        flush=True,
    )
    return holds


def main() -> int:
    """Run every file in every way of the method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--method", choices=RUNS, default="sft")
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    runs = [(run, file) for file in arguments.files for run in RUNS[arguments.method]]
    return 0 if all([check(run, arguments.model, file, arguments.steps) for run, file in runs]) else 1


if __name__ == "__main__":
    sys.exit(main())
