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


class StepEnds(transformers.TrainerCallback):
    """When each optimiser step ended: two neighbours enclose a whole step, its data and logging included."""

    def __init__(self, cuda: bool):
        self.cuda = cuda
        self.moments: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time."""
        if self.cuda:
            torch.cuda.synchronize()
        self.moments.append(time.perf_counter())


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

    Needed are the prompt's tokens once and those of its completions, scored those of the completions alone. Where
    pairs are counted, all but `work` is read off the prepared rows of each step, and the log has to agree with it: it
    counts a prompt once a row, or once a completion.
    """
    if not workload.pairs:
        return {"work": logged, "sequences": logged, "needed": logged, "scored": logged}
    found: dict[str, list[int]] = {"work": [], "sequences": [], "needed": [], "scored": []}
    for step in range(len(logged)):
        held = [rows[i % len(rows)] for i in range(step * workload.batch, (step + 1) * workload.batch)]
        prompts = [len(row.get("prompt_ids") or ()) for row in held]
        ends = [[len(row[name]) for name in COMPLETIONS if name in row] for row in held]
        found["work"].append(workload.pairs)
        found["scored"].append(sum(map(sum, ends)))
        found["needed"].append(found["scored"][-1] + sum(prompts))
        found["sequences"].append(found["scored"][-1] + sum(p * len(e) for p, e in zip(prompts, ends, strict=True)))
        if logged[step] not in (found["needed"][-1], found["sequences"][-1]):
            raise SystemExit(f"step {step + 1} logged {logged[step]} tokens, its rows hold {found['sequences'][-1]}")
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
    ends = StepEnds(cuda)
    with tempfile.TemporaryDirectory(prefix="bench-") as output:
        trainer = getattr(library, workload.trainer)(
            model=load_model(),
            args=getattr(library, workload.config)(output_dir=output, **spec["settings"]),
            train_dataset=Dataset.from_list(read_rows(spec["method"], spec["rows"])),
            processing_class=tokenizer,
            callbacks=[ends],
            **workload.arguments(spec["library"], load_model),
        )
        trainer.train()
    history = trainer.state.log_history
    model = trainer.accelerator.unwrap_model(trainer.model)
    work = step_work(workload, trainer.train_dataset, step_tokens(history, len(ends.moments)))
    print(
        json.dumps(
            {
                "seconds": [b - a for a, b in zip(ends.moments, ends.moments[1:], strict=False)],
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
