"""The method of docs/dpo.md, written from the public parts, is short and is SimPO."""

import re
from pathlib import Path

import pytest
from posttrain_data import tiny_tokenizer
from posttrain_models import tiny_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "dpo.md"


def test_simpo_of_the_documentation_is_that_of_the_app(tmp_path, monkeypatch):
    from posttrain_dpo import DPOConfig, DPOTrainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (block,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class SimPO" in code
    ]
    assert len([line for line in block.splitlines() if line.strip()]) <= 30
    names = {"__name__": "documentation"}
    exec(block, names)

    tokenizer = tiny_tokenizer()
    rows = [
        {"prompt": "2+2=", "chosen": "4 of course", "rejected": "5"},
        {"prompt": "a", "chosen": "b", "rejected": "c d"},
    ]
    args = DPOConfig("out", loss_type="simpo", beta=2.0, use_cpu=True, report_to="none")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    made = DPOTrainer(model, args=args, train_dataset=rows, processing_class=tokenizer)
    batch = made.data_collator(list(made.train_dataset), size=3)
    mine, metrics = names["SimPO"](beta=2.0, gamma=0.5).loss(model, batch)
    theirs, _ = made.method.loss(model, batch)
    assert float(mine.detach()) == pytest.approx(float(theirs["loss"].detach()), abs=1e-6)
    assert int(names["SimPO"]().count(batch)) == int(made.method.count(batch)["loss"]) == 2
    assert 0 <= metrics["accuracy"].compute() <= 1
