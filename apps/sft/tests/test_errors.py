"""What cannot be trained is refused before weights are loaded: the model folders here have none."""

import errno
import json
from pathlib import Path

import pytest
import torch
from app_runs import check_refused, parameters, saved
from datasets import Dataset, DatasetDict
from posttrain_models import LoraOptions, tiny_model
from posttrain_sft import SFTConfig, SFTTrainer
from posttrain_sft.command import main
from sft_runs import chats, config, pairs, texts, trainer

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}
STRICT = """{% for m in messages %}{% if loop.index0 % 2 != (m['role'] == 'assistant') | int %}
{{ raise_exception('turns must alternate') }}{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"""


def refused(no_weights, *wanted, rows=None, extras=None, **options):
    rows = texts(2) if rows is None else rows
    check_refused(lambda: trainer(rows, None, str(no_weights), extras=extras, **options), *wanted)


def test_without_a_mistake_the_weights_are_what_is_missing(no_weights):
    with pytest.raises(ValueError, match=r"cannot be loaded.*model\.safetensors"):
        trainer(texts(2), None, str(no_weights))


def test_an_output_folder_that_cannot_be(no_weights, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        with pytest.raises(ValueError, match=r"output_dir=.*file is a file"):
            SFTTrainer(str(no_weights), SFTConfig(str(tmp_path / name), report_to="none", use_cpu=True), None, texts(2))


# ---- Rows ----


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([{"text": "a b"}, {"txt": "a"}], ["train: row 1", "'txt'", "'text'"]),
        ([{"prompt": "a", "complete": "b"}], ["row 0", "'completion'", "'complete'"]),
        ([{"instruction": "a", "ouput": "b"}], ["row 0", "'output'", "'ouput'"]),
        ([{"text": 5}], ["row 0", "'text'", "5 (int)"]),
        ([{"text": None}], ["row 0", "'text'", "None"]),
        ([{"messages": 5}], ["row 0", "'messages'", "5 (int)"]),
        ([{"messages": [USER, {"role": "assistant", "content": 5}]}], ["row 0", "messages[1]['content']", "5 (int)"]),
        ([{"messages": [USER, REPLY]}, {"messages": []}], ["row 1", "'messages'", "empty"]),
        (
            [{"messages": [{"role": "assisstant", "content": "a"}]}],
            ["row 0", "'assisstant'", "did you mean 'assistant'"],
        ),
        ([{"messages": [{"rol": "user", "content": "a"}]}], ["row 0", "messages[0]", "'rol'"]),
        ([{"prompt": [USER], "completion": "b"}], ["row 0", "'prompt'", "'completion'"]),
        ([{"messages": [USER, REPLY], "tools": "{"}], ["row 0", "'tools'", "JSON"]),
        ([{"input_ids": [1, "2"]}], ["row 0", "'input_ids'"]),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 99999]}], ["row 1", "'input_ids'", "99999"]),
        ([{"input_ids": [1, 2], "labels": [1]}], ["row 0", "'labels'", "1 entries"]),
        ([{"input_ids": [1, 2], "labels": [1, 3]}], ["row 0", "labels[1]", "3"]),
        ([{"input_ids": [5, 6], "labels": [-100, -100]}], ["train", "no row has a target"]),
        ([{"prompt": "x " * 99, "completion": "y"}], ["train", "max_length", "no row has a target"]),
        ([], ["train", "empty"]),
        ([USER["content"]], ["row 0", "str"]),
        ("rows.jsonl", ["train", "str"]),
    ],
)
def test_rows(rows, wanted, no_weights):
    refused(no_weights, *wanted, rows=rows)


def test_data_sets(no_weights):
    whole = Dataset.from_list(texts(3))
    refused(no_weights, "empty", rows=whole.select([]))
    refused(no_weights, "'train'", "dataset['train']", rows=DatasetDict(train=whole))
    refused(no_weights, "with_transform", rows=whole.with_transform(lambda row: row))
    refused(no_weights, "max_steps", rows=whole.to_iterable_dataset(), max_steps=-1)
    refused(no_weights, "row 0", "'txt'", rows=whole.rename_column("text", "txt").to_iterable_dataset())
    refused(no_weights, "eval", "row 1", "'txt'", extras={"eval_dataset": [{"text": "a b"}, {"txt": "b"}]})
    refused(no_weights, "eval b", "row 0", extras={"eval_dataset": {"a": texts(1), "b": [{"txt": "b"}]}})
    refused(no_weights, "eval_strategy='steps'", "eval_dataset", eval_strategy="steps")
    with pytest.raises(ValueError, match="train_dataset"):
        SFTTrainer(str(no_weights), args=config())


def test_two_assistants_in_a_row_where_the_template_refuses(no_weights, fresh_tokenizer):
    fresh_tokenizer.chat_template = STRICT
    rows = [{"messages": [USER, REPLY]}, {"messages": [USER, REPLY, REPLY]}]
    with pytest.raises(ValueError) as caught:
        trainer(rows, fresh_tokenizer, str(no_weights))
    message = str(caught.value)
    assert all(words in message for words in ("row 1", "turns must alternate", "messages[1] and messages[2]"))


def test_masks_that_do_not_fit_the_rows(no_weights):
    refused(no_weights, "row 0", "assistant_only", "plain text", assistant_only_loss=True)
    refused(no_weights, "row 0", "'prompt' and 'completion'", completion_only_loss=True)
    formatting = {"formatting_func": lambda row: row["text"]}
    refused(no_weights, "formatting_func", "completion_only", extras=formatting, completion_only_loss=True)
    refused(no_weights, "formatting_func", "int", extras={"formatting_func": lambda row: 5})


def test_tokenised_rows_that_cannot_be_taken_as_they_are(no_weights):
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    refused(no_weights, "train", "'input_ids'", "'text'", **skip)
    rows = [{"input_ids": [1, 2], "completion_mask": [0, 1]}]
    refused(no_weights, "'completion_mask'", "'labels'", rows=rows, **skip)
    refused(no_weights, "empty", rows=[], **skip)


# ---- Options ----


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"max_length": 1}, "max_length"),
        ({"loss_type": "mse"}, "loss_type"),
        ({"loss_type": "chunked_nll"}, "'nll'"),
        ({"packing_strategy": "ffd"}, "packing_strategy"),
        ({"truncation_mode": "middle"}, "truncation_mode"),
        ({"train_on": "first"}, "train_on"),
        ({"train_on": "last"}, "assistant_only_loss"),
        ({"packing": True, "max_length": None}, "max_length"),
        ({"eval_packing": True, "max_length": None}, "max_length"),
        ({"dataset_kwargs": {"skip": True}}, "skip_prepare_dataset"),
        ({"model_init_kwargs": "{"}, "model_init_kwargs"),
        ({"model_init_kwargs": "[1]"}, "model_init_kwargs"),
        ({"router_aux_loss_coef": -1.0}, "router_aux_loss_coef"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"pad_token": "<pad>"}, "processing_class"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"max_shapes": 0}, "max_shapes"),
        ({"pad_to_multiple_of": "some"}, "pad_to_multiple_of"),
    ],
    ids=str,
)
def test_the_config_refuses(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        SFTConfig("out", use_cpu=True, **options)


def test_bf16_on_a_device_without_it(monkeypatch):
    monkeypatch.setattr("posttrain_trainer.config.supports_bf16", lambda spec: False)
    with pytest.raises(ValueError, match="bf16=True.*bf16=False"):
        SFTConfig("out", bf16=True)


def test_options_that_contradict_each_other(no_weights):
    refused(no_weights, "padding_free=False", packing=True, padding_free=False)
    refused(no_weights, "max_shapes=2", "packing", packing=True, max_shapes=2)
    refused(no_weights, "max_shapes=2", "padding_free", padding_free=True, max_shapes=2)
    refused(no_weights, "max_shapes=2", "pad_to_multiple_of", pad_to_multiple_of=None, max_shapes=2)
    metrics = {"compute_metrics": lambda prediction: {}, "eval_dataset": texts(2)}
    refused(no_weights, "compute_metrics", "eval_packing=False", extras=metrics, packing=True)
    refused(no_weights, "compute_loss_func", extras={"compute_loss_func": lambda *_: 0})
    refused(no_weights, "eos_token='<no>'", eos_token="<no>")
    refused(no_weights, "none.jinja", chat_template_path="none.jinja")
    refused(no_weights, "router_aux_loss_coef", "Llama", router_aux_loss_coef=0.1)


def test_a_template_that_does_not_parse(no_weights, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    refused(no_weights, "template", chat_template_path=str(tmp_path / "broken.jinja"))


def test_packing_on_a_model_that_cannot_honour_it(tmp_path, tokenizer):
    folder = saved(tmp_path / "hybrid", "qwen3_5", tokenizer)
    (folder / "model.safetensors").unlink()
    refused(folder, "packing=True", "linear_attention", packing=True)
    refused(folder, "packed", "linear_attention", padding_free=True)
    with pytest.raises(ValueError, match="linear_attention"):
        trainer(texts(2), tokenizer, tiny_model("qwen3_5", vocab_size=len(tokenizer)), packing=True)


# ---- The model ----


def test_models_that_are_none(tokenizer, no_weights, tmp_path):
    for model, wanted in ((None, "model"), (5, "int"), (str(tmp_path / "none"), "none"), ("./none", "none")):
        with pytest.raises(ValueError, match=wanted):
            SFTTrainer(model, args=config(), train_dataset=texts(2), processing_class=tokenizer)
    with pytest.raises(ValueError, match="args must be a SFTConfig"):
        SFTTrainer(str(no_weights), args={"max_length": 5}, train_dataset=texts(2))
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with pytest.raises(ValueError, match="processing_class"):
        trainer(texts(2), None, model)
    with pytest.raises(ValueError, match="model_init_kwargs"):
        trainer(texts(2), tokenizer, model, model_init_kwargs={"dtype": "float32"})


def test_a_damaged_model_names_its_folder(tmp_path, tokenizer):
    folder = saved(tmp_path / "cut", "llama", tokenizer)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut.*cannot be loaded"):
        trainer(texts(2), None, str(folder))


def test_adapters_that_would_be_two(tmp_path, tokenizer, model_folder):
    peft = pytest.importorskip("peft")
    lora = LoraOptions(use_peft=True, lora_r=2)
    trainer(texts(2), None, str(model_folder), extras={"peft_config": lora}).save_model("adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    refused("adapter", "adapter", "use_peft", extras={"peft_config": lora})
    refused("adapter", "adapter", "peft_config", extras={"peft_config": peft.LoraConfig(task_type="CAUSAL_LM")})
    base = peft.get_peft_model(tiny_model("llama", vocab_size=len(tokenizer)), peft.LoraConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="has an adapter already"):
        trainer(texts(2), tokenizer, base, extras={"peft_config": lora})
    refused(model_folder, "options", "dict", extras={"peft_config": {"r": 2}})


# ---- Checkpoints ----


@pytest.fixture
def run(tokenizer):
    def make(**options):
        settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        return trainer(texts(8), tokenizer, **{**settings, **options})

    return make


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"cut"), "model.safetensors"),
        (lambda folder: (folder / "optimizer.pt").unlink(), "optimizer.pt"),
        (lambda folder: (folder / "trainer_state.json").write_text("{"), "trainer_state.json"),
        (lambda folder: folder.rename("elsewhere"), "checkpoint-1"),
    ],
    ids=["cut", "missing", "not JSON", "no folder"],
)
def test_a_damaged_checkpoint_changes_no_weight(damage, wanted, run):
    run().train()
    damage(Path("out/checkpoint-1"))
    made = run()
    before = parameters(made)
    with pytest.raises(ValueError, match=wanted) as caught:
        made.train(resume_from_checkpoint="out/checkpoint-1")
    assert "checkpoint-1" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())


def test_a_checkpoint_of_another_model(run, tokenizer):
    run().train()
    model = tiny_model("llama", vocab_size=len(tokenizer), hidden_size=64)
    other = trainer(texts(8), tokenizer, model, max_steps=2)
    with pytest.raises(ValueError, match=r"checkpoint-1.*hidden_size is 32, this model has 64"):
        other.train(resume_from_checkpoint="out/checkpoint-1")


def test_a_full_disk_leaves_the_previous_checkpoint(run, monkeypatch):
    import posttrain_trainer.exact as exact

    save, calls = exact.save_state, []

    def full(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*args)

    with monkeypatch.context() as patch:
        patch.setattr(exact, "save_state", full)
        with pytest.raises(OSError, match="checkpoint-2.*no space left"):
            run().train()
    assert [path.name for path in Path("out").glob("*checkpoint*")] == ["checkpoint-1"]
    again = run(max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


# ---- The command ----


def command(capsys, *argv):
    """Exit code 2, and the last line of what it says."""
    code = main([*map(str, argv)])
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    line = said.strip().splitlines()[-1]
    assert line.startswith(("posttrain", "python")) and ": error: " in line
    return line


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("cut.jsonl", lines(texts(3))[:-8], ["cut.jsonl", "line 3", "cut off"]),
        ("bytes.jsonl", b'{"text": "one"}\n{"text": "caf\xe9"}\n', ["bytes.jsonl", "line 2", "UTF-8"]),
        ("cut.json", json.dumps(texts(3))[:-8], ["cut.json", "JSON"]),
        ("list.jsonl", '{"text": "a"}\n[1]\n', ["list.jsonl", "line 2"]),
        ("columns.jsonl", lines([{"txt": "a"}]), ["row 0", "'txt'"]),
        ("type.jsonl", lines([{"text": "a b"}, {"text": 5}]), ["row 1", "'text'"]),
        ("role.jsonl", lines([{"messages": [{"role": "sytem", "content": "a"}]}]), ["row 0", "'sytem'", "'system'"]),
        ("none.jsonl", lines([{"messages": []}]), ["row 0", "'messages'"]),
        ("empty.jsonl", "", ["empty.jsonl"]),
        ("long.jsonl", lines([{"prompt": "x " * 2000, "completion": "y"}]), ["max_length"]),
        ("ragged.csv", "text,more\na,b\nc\n", ["ragged.csv", "line 3", "1 fields"]),
        ("cut.parquet", b"PAR1 and no more", ["cut.parquet", "Parquet"]),
        ("kind.xml", "<text/>", ["kind.xml"]),
        ("missing.jsonl", None, ["missing.jsonl", "no such file"]),
    ],
)
def test_files(name, content, wanted, capsys, no_weights, tmp_path):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    line = command(capsys, "--model_name_or_path", no_weights, "--dataset_name", file, "--use_cpu")
    assert all(words in line for words in wanted), line
    assert "cannot be loaded" not in line


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--max_lenght", "5"], ["--max_lenght", "--max_length"]),
        (["--max_length", "five"], ["--max_length", "five"]),
        (["--packing", "maybe"], ["--packing", "maybe"]),
        (["--loss_type", "mse"], ["--loss_type", "mse"]),
        (["--max_seq_length", "5"], ["--max_seq_length", "max_length"]),
        (["--use_liger_kernel"], ["--use_liger_kernel"]),
        (["--max_length", "1", "--use_cpu"], ["max_length"]),
        (["--config", "missing.yaml"], ["missing.yaml"]),
        (["--dataset_name", "rows.jsonl"], ["model_name_or_path"]),
        (["--model_name_or_path", "EMPTY"], ["dataset_name"]),
        (["--model_name_or_path", "./nothing", "--dataset_name", "rows.jsonl"], ["nothing", "does not exist"]),
        (
            ["--model_name_or_path", "EMPTY", "--dataset_name", "rows.jsonl", "--test_split_size", "9"],
            ["test_split_size"],
        ),
        (
            ["--model_name_or_path", "EMPTY", "--dataset_name", "rows.jsonl", "--eval_strategy", "steps"],
            ["test_split_size"],
        ),
        (["--model_name_or_path", "EMPTY", "--dataset_name", "rows.jsonl", "--resume_from_checkpoint", "c-1"], ["c-1"]),
        (["--model_name_or_path", "EMPTY", "--dataset_name", "rows.jsonl", "--dataset_streaming"], ["max_steps"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_flags(argv, wanted, capsys, no_weights):
    Path("rows.jsonl").write_text(lines(texts(4)))
    argv = [str(no_weights) if word == "EMPTY" else word for word in argv]
    line = command(capsys, *argv)
    assert all(words in line for words in wanted), line


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("max_lenght: 5\n", ["run.yaml:1", "max_lenght", "max_length"]),
        ("packing: false\nmax_length: five\n", ["run.yaml:2", "max_length", "five"]),
        ("learning_rate: [1]\n", ["run.yaml:1", "learning_rate"]),
        ("packing: [\n", ["run.yaml"]),
        ("datasets:\n- path: rows.jsonl\n  wieght: 1\n", ["datasets[0]", "wieght", "weight"]),
        ("datasets:\n- path: rows.jsonl\n  weight: 1\n- path: rows.jsonl\n", ["rows.jsonl", "weight"]),
        ("dataset_name: rows.jsonl\ndatasets:\n- path: rows.jsonl\n", ["dataset_name", "datasets"]),
    ],
)
def test_yaml(content, wanted, capsys, no_weights):
    Path("rows.jsonl").write_text(lines(texts(4)))
    Path("run.yaml").write_text(content)
    line = command(capsys, "--config", "run.yaml", "--model_name_or_path", no_weights, "--use_cpu")
    assert all(words in line for words in wanted), line


def test_a_damaged_checkpoint_is_found_before_weights_load(capsys, no_weights, run):
    run().train()
    Path("out/checkpoint-1/optimizer.pt").unlink()
    Path("rows.jsonl").write_text(lines(texts(4)))
    argv = ["--model_name_or_path", no_weights, "--dataset_name", "rows.jsonl", "--use_cpu"]
    line = command(capsys, *argv, "--resume_from_checkpoint", "out/checkpoint-1")
    assert "checkpoint-1" in line and "optimizer.pt" in line


def test_a_checkpoint_of_another_model_on_the_command_line(capsys, run, tied_folder):
    run().train()
    Path("rows.jsonl").write_text(lines(texts(8)))
    argv = ["--model_name_or_path", tied_folder, "--dataset_name", "rows.jsonl", "--use_cpu", "--report_to", "none"]
    line = command(capsys, *argv, "--resume_from_checkpoint", "out/checkpoint-1")
    assert "checkpoint-1" in line and "model_type is 'llama', this model has 'qwen3'" in line


def test_a_checkpoint_of_other_rows_on_the_command_line(capsys, run):
    run().train()
    Path("rows.jsonl").write_text('{"text": "a b"}\n' * 7)
    argv = ["--model_name_or_path", "out/checkpoint-1", "--dataset_name", "rows.jsonl", "--max_steps", "9", "--use_cpu"]
    line = command(capsys, *argv, "--report_to", "none", "--resume_from_checkpoint", "out/checkpoint-1")
    assert "rows=7" in line, line


def test_a_damaged_row_of_a_stream_is_one_line_too(capsys, model_folder):
    rows = [*texts(40), {"txt": "a"}]
    Path("rows.jsonl").write_text(lines(rows))
    argv = ["--model_name_or_path", model_folder, "--dataset_name", "rows.jsonl", "--use_cpu", "--report_to", "none"]
    line = command(capsys, *argv, "--dataset_streaming", "--max_steps", "9", "--save_strategy", "no")
    assert "row 40" in line and "'txt'" in line


def test_unused_rows_of_the_other_formats_are_no_mistake(no_weights):
    rows = [*texts(1), *chats(1), *pairs(1)]
    with pytest.raises(ValueError, match="cannot be loaded"):
        trainer(rows, None, str(no_weights))
