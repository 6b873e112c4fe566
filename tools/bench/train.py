"""Train one workload with one library in this process and print what it cost: `python train.py SPEC`, SPEC in JSON.

The libraries share the names of their trainers and configs, so one file runs both: what differs is the import.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import tempfile
import time

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", WANDB_DISABLED="true")

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from workloads import WORKLOADS, Workload, read_rows  # noqa: E402

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "datasets")


class StepTimes(transformers.TrainerCallback):
    """Time of each whole optimiser step but the first, from the end of one to that of the next.

    The machine's matrix-multiply rate is measured between steps, outside their time: what others do on the machine
    then weighs on a step and on the rates before and after it alike.

    Attributes:
        seconds: of each step timed.
        rates: operations a second, the mean of those before and after each step timed.
    """

    def __init__(self, dtype: torch.dtype, device: str):
        self.dtype, self.device = dtype, device
        self.seconds: list[float] = []
        self.rates: list[float] = []
        self.start: float | None = None
        self.before = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time and the rate."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        after = matmul_rate(self.dtype, self.device)
        if self.start is not None:
            self.seconds.append(end - self.start)
            self.rates.append((self.before + after) / 2)
        self.before, self.start = after, time.perf_counter()


def matmul_rate(dtype: torch.dtype, device: str) -> float:
    """Operations a second of square matrix products, over about a quarter of a second on two cores."""
    size, count = (8192, 40) if device == "cuda" else (2048, 4)
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = left @ right

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    for _ in range(count):
        torch.mm(left, right, out=out)
    return 2 * size**3 * count / (now() - start)


def matmul_parameters(model: torch.nn.Module) -> int:
    """Weights that multiply a token's vector: every linear layer and the head, without the embedding table."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def head_parameters(model: torch.nn.Module) -> int:
    """Those of the head, which only tokens that are scored need."""
    head = model.get_output_embeddings()
    return 0 if head is None else head.weight.numel()


def step_tokens(history: list[dict], steps: int) -> list[int]:
    """Real tokens of each step, from the running total that both libraries log."""
    totals = [int(entry["num_tokens"]) for entry in history if "num_tokens" in entry and "loss" in entry]
    if len(totals) != steps:
        raise SystemExit(f"expected num_tokens of {steps} steps in the log, found {len(totals)}")
    return [b - a for a, b in zip([0, *totals], totals, strict=False)]


COMPLETIONS = ("chosen_ids", "rejected_ids", "completion_ids")


def step_work(workload: Workload, rows: Dataset, logged: list[int]) -> dict[str, list[int]]:
    """What each step had to do: `work` in the workload's unit, tokens of whole `sequences`, `needed` and `scored`.

    Needed are the tokens of each prompt once, whatever rows have it, and those of the completions, scored those of the
    completions alone. Where pairs are counted, all but `work` is read off the prepared rows of each step, and the log
    has to agree with it: it counts a prompt once a row, or once a completion.
    """
    if not workload.pairs:
        return {"work": logged, "sequences": logged, "needed": logged, "scored": logged}
    found: dict[str, list[int]] = {"work": [], "sequences": [], "needed": [], "scored": []}
    for step in range(len(logged)):
        held = [rows[i % len(rows)] for i in range(step * workload.batch, (step + 1) * workload.batch)]
        prompts = [tuple(row.get("prompt_ids") or ()) for row in held]
        ends = [[len(row[name]) for name in COMPLETIONS if name in row] for row in held]
        scored = sum(map(sum, ends))
        sequences = scored + sum(len(p) * len(e) for p, e in zip(prompts, ends, strict=True))
        found["work"].append(workload.pairs)
        found["scored"].append(scored)
        found["needed"].append(scored + sum(map(len, set(prompts))))
        found["sequences"].append(sequences)
        if logged[step] not in (scored + sum(map(len, prompts)), sequences):
            raise SystemExit(f"step {step + 1} logged {logged[step]} tokens, its rows hold {sequences}")
    return found


def versions(library: str) -> dict[str, str]:
    """Versions of what ran."""
    from importlib.metadata import version

    return {name: version(name) for name in (library, *DISTRIBUTIONS)}


def main() -> None:
    """Run, then print one line of JSON."""
    spec = json.loads(sys.argv[1])
    workload, cuda = WORKLOADS[spec["method"]], spec["device"] == "cuda"
    torch.set_num_threads(spec["threads"])
    library = importlib.import_module(spec["library"])

    def load_model() -> torch.nn.Module:
        options = {"attn_implementation": spec["attention"]} if spec["attention"] else {}
        torch.manual_seed(0)  # a new head draws its weights
        loader = getattr(transformers, workload.model)
        return loader.from_pretrained(spec["model"], dtype=torch.float32, **workload.load, **options)

    tokenizer = transformers.AutoTokenizer.from_pretrained(spec["model"])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if workload.own_padding and tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = next(t for t in tokenizer.all_special_tokens if t != tokenizer.eos_token)
    times = StepTimes(torch.bfloat16 if cuda else torch.float32, spec["device"])
    with tempfile.TemporaryDirectory(prefix="bench-") as output:
        trainer = getattr(library, workload.trainer)(
            model=load_model(),
            args=getattr(library, workload.config)(output_dir=output, **spec["settings"]),
            train_dataset=Dataset.from_list(read_rows(spec["method"], spec["rows"])),
            processing_class=tokenizer,
            callbacks=[times],
            **workload.arguments(spec["library"], load_model),
        )
        trainer.train()
    history = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model)
    work = step_work(workload, trainer.train_dataset, step_tokens(history, len(times.seconds) + 1))
    print(
        json.dumps(
            {
                "seconds": times.seconds,
                "rates": times.rates,
                **work,
                "losses": [entry["loss"] for entry in history if "loss" in entry],
                "peak_bytes": torch.cuda.max_memory_allocated() if cuda else peak_resident(),
                "matmul_parameters": matmul_parameters(model),
                "head_parameters": head_parameters(model),
                "versions": versions(spec["library"]),
            }
        )
    )


def peak_resident() -> int:
    """The most memory this process ever held, in bytes (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
