"""What is trained: the numbers, the rows, the masks, the saved model."""

import json
from pathlib import Path

import pytest
import torch
from app_runs import assert_same, logged, losses, parameters, step_gradient
from datasets import Dataset
from posttrain_models import tiny_model
from sft_runs import Reference, chats, pairs, prepared, targets, texts, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

RATE = 0.5


def check_against_reference(made, tolerance=2e-5):
    """One step over all rows: loss, metrics and gradient against float64."""
    before = parameters(made)
    reference = Reference(made.model, prepared(made), dft=made.args.loss_type == "dft")
    made.train()
    (loss,) = losses(made)
    assert loss == pytest.approx(reference.loss, abs=tolerance)
    assert logged(made, "entropy") == [pytest.approx(reference.entropy, abs=tolerance)]
    assert logged(made, "mean_token_accuracy") == [pytest.approx(reference.accuracy, abs=1e-6)]
    assert logged(made, "num_tokens") == [reference.tokens]
    assert_same(reference.gradient, step_gradient(before, parameters(made), RATE), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 3},
        {"loss_type": "dft"},
        {"loss_type": "dft", "gradient_accumulation_steps": 3},
        {"padding_free": True},
        {"padding_free": False},
        {"padding_free": False, "pad_to_multiple_of": 16},
        {"max_shapes": 2},
        {"packing": True},
        {"packing": True, "padding_free": True, "max_length": 20},
        {"packing": True, "packing_strategy": "bfd_split", "max_length": 12},
        {"packing": True, "packing_strategy": "wrapped", "max_length": 24},
        {"gradient_checkpointing": True},
    ],
    ids=lambda options: ",".join(f"{key}={value}" for key, value in options.items()) or "default",
)
def test_loss_metrics_and_gradient_equal_a_float64_reference(options, tokenizer):
    check_against_reference(trainer(texts(), tokenizer, **{"per_device_train_batch_size": 64, **options}))


@pytest.mark.parametrize("rows", [chats(), pairs()], ids=["chats", "pairs"])
def test_masked_targets_equal_a_float64_reference(rows, tokenizer):
    assistant = "messages" in rows[0]
    made = trainer(rows, tokenizer, assistant_only_loss=assistant, per_device_train_batch_size=8)
    assert any(False in mask[1:] for _, mask in prepared(made))
    check_against_reference(made)


def test_evaluation_equals_a_float64_reference(tokenizer):
    rows = pairs(10)
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "learning_rate": 0.0}
    made = trainer(texts(4), tokenizer, extras={"eval_dataset": rows}, **options)
    held_out = [(row["input_ids"], row["loss_mask"]) for row in made.eval_dataset]
    reference = Reference(made.model, held_out)
    made.train()
    assert logged(made, "eval_loss") == [pytest.approx(reference.loss, abs=2e-5)]
    assert logged(made, "eval_entropy") == [pytest.approx(reference.entropy, abs=2e-5)]
    assert logged(made, "eval_mean_token_accuracy") == [pytest.approx(reference.accuracy, abs=1e-6)]
    # Raw rows after training are prepared in the same way.
    assert made.evaluate(rows)["eval_loss"] == pytest.approx(reference.loss, abs=2e-5)


def test_a_run_in_one_layout_is_that_of_another(tokenizer):
    def run(**options):
        made = trainer(texts(24), tokenizer, max_steps=4, learning_rate=0.1, per_device_train_batch_size=24, **options)
        made.train()
        return losses(made), parameters(made)

    first, weights = run(padding_free=False)
    assert first[-1] < first[0]
    for options in ({"padding_free": True}, {}, {"packing": True}, {"packing": True, "max_length": 36}):
        other, found = run(**options)
        assert other == pytest.approx(first, abs=1e-5), options
        assert_same(weights, found, 5e-6)


@pytest.mark.parametrize("packing", [False, True], ids=["rows", "packed"])
def test_a_step_does_not_depend_on_how_it_is_split(packing, tokenizer):
    def run(size, accumulation):
        made = trainer(
            texts(80),
            tokenizer,
            max_steps=4,
            learning_rate=0.1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            packing=packing,
            max_length=18,
            train_sampling_strategy="random",
        )
        made.train()
        return losses(made), parameters(made)

    first, weights = run(32, 1)
    assert len(first) == 4
    for size, accumulation in ((8, 4), (4, 8)):
        other, found = run(size, accumulation)
        assert other == pytest.approx(first, abs=1e-5)
        assert_same(weights, found, 5e-6)


# ---- Rows ----

TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "seven"},
]
SHOP = {
    "type": "function",
    "function": {"name": "shop", "description": "Buys.", "parameters": {"type": "object", "properties": {}}},
}
CALL = [
    {"role": "user", "content": "buy"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "shop", "arguments": {"n": 1}}}]},
    {"role": "tool", "content": "done"},
    {"role": "assistant", "content": "bought"},
]


EVERYTHING = None  # every token but the first


@pytest.mark.parametrize(
    ("row", "options", "wanted"),
    [
        ({"text": "one two"}, {}, EVERYTHING),
        ({"body": "one two"}, {"dataset_text_field": "body"}, EVERYTHING),
        ({"messages": TURNS}, {}, EVERYTHING),
        ({"prompt": "2+2 is", "completion": " four"}, {"completion_only_loss": False}, EVERYTHING),
        ({"messages": TURNS}, {"assistant_only_loss": True}, "four<|im_end|>seven<|im_end|>"),
        ({"messages": TURNS}, {"assistant_only_loss": True, "train_on": "last"}, "seven<|im_end|>"),
        (
            {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "four"}]},
            {"assistant_only_loss": True},
            "four<|im_end|>",
        ),
        ({"instruction": "Add.", "input": "2 2", "output": "four"}, {}, "four<|im_end|>"),
        ({"prompt": "2+2 is", "completion": " four"}, {}, " four<|im_end|>"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:2]}, {}, "four<|im_end|>"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {}, "four<|im_end|>seven<|im_end|>"),
        ({"prompt": TURNS[:2], "completion": TURNS[2:]}, {"assistant_only_loss": True}, "seven<|im_end|>"),
        (
            {"messages": CALL, "tools": [SHOP]},
            {"assistant_only_loss": True, "max_length": None},
            '<tool_call>\n{"name": "shop", "arguments": {"n": 1}}\n</tool_call><|im_end|>bought<|im_end|>',
        ),
        (
            {"messages": CALL, "tools": json.dumps([SHOP])},
            {"assistant_only_loss": True, "max_length": None},
            '<tool_call>\n{"name": "shop", "arguments": {"n": 1}}\n</tool_call><|im_end|>bought<|im_end|>',
        ),
    ],
)
def test_formats_and_their_targets(row, options, wanted, tokenizer):
    made = trainer([row, row], tokenizer, **options)
    first = made.train_dataset[0]
    if wanted is EVERYTHING:
        assert first["loss_mask"] == [False] + [True] * (len(first["input_ids"]) - 1)
        assert tokenizer.decode(first["input_ids"]).rstrip().endswith("<|im_end|>")
    else:
        assert targets(tokenizer, first) == wanted
    made.train()
    assert 3 < losses(made)[0] < 12


@pytest.mark.parametrize("skip", [False, True], ids=["prepared", "as they are"])
@pytest.mark.parametrize("kind", ["list", "dataset", "stream"])
def test_rows_that_are_tokens_already(kind, skip, tokenizer):
    rows = [{"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100]}, {"input_ids": [9, 8], "labels": [9, 8]}]
    held = {"list": rows, "dataset": Dataset.from_list(rows)}.get(kind)
    if held is None:
        held = Dataset.from_list(rows).to_iterable_dataset()
    made = trainer(held, tokenizer, dataset_kwargs={"skip_prepare_dataset": True} if skip else None)
    sequences = [([5, 6, 7, 8, 9], [False, False, True, True, False]), ([9, 8], [False, True])]
    if kind == "stream":
        sequences *= 2  # a stream begins again, so a step of four rows is full
    reference = Reference(made.model, sequences)
    made.train()
    assert losses(made) == [pytest.approx(reference.loss, abs=2e-5)]


@pytest.mark.parametrize("column", ["completion_mask", "assistant_masks"])
def test_masks_of_rows_that_are_tokens_already(column, tokenizer):
    rows = [{"input_ids": [5, 6, 7, 8], column: [0, 0, 1, 1]}]
    made = trainer(rows, tokenizer, assistant_only_loss=column == "assistant_masks")
    assert made.train_dataset[0]["loss_mask"] == [False, False, True, True]


def test_a_formatting_function_makes_text_or_messages(tokenizer):
    rows = [{"question": "2+2?", "answer": "four"}]
    made = trainer(rows, tokenizer, extras={"formatting_func": lambda row: f"{row['question']} {row['answer']}"})
    assert tokenizer.decode(made.train_dataset[0]["input_ids"]) == "2+2? four<|im_end|>"

    def messages(row):
        return [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]

    made = trainer(rows, tokenizer, extras={"formatting_func": messages}, assistant_only_loss=True)
    assert targets(tokenizer, made.train_dataset[0]) == "four<|im_end|>"


@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_trains_like_the_list_that_it_is(packing, tokenizer):
    # Full steps alone: a list ends an epoch with a short one, a stream begins again.
    options = {"max_steps": 2, "packing": packing, "max_length": 36, "learning_rate": 0.1}
    options["per_device_train_batch_size"] = 2
    one = trainer(texts(12), tokenizer, **options)
    one.train()
    other = trainer(Dataset.from_list(texts(12)).to_iterable_dataset(), tokenizer, **options)
    other.train()
    assert len(losses(other)) == 2
    assert prepared(one) == prepared(other)  # a stream is packed a block at a time, here all of it
    assert losses(other) == pytest.approx(losses(one), abs=1e-5)
    assert_same(parameters(one), parameters(other), 5e-6)


def test_rows_are_cut_where_truncation_mode_says(tokenizer):
    rows = [{"text": "one two three four five six"}]
    whole = trainer(rows, tokenizer).train_dataset[0]["input_ids"]
    start = trainer(rows, tokenizer, max_length=5).train_dataset[0]["input_ids"]
    end = trainer(rows, tokenizer, max_length=5, truncation_mode="keep_end").train_dataset[0]["input_ids"]
    assert (start, end) == (whole[:5], whole[-5:])


# ---- The saved model ----


@pytest.fixture(scope="module")
def answer(tmp_path_factory, tied_folder):
    """A model that learned one answer by heart, saved."""
    folder = tmp_path_factory.mktemp("answer")
    row = {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is four."}]}
    made = trainer(
        [row],
        None,
        str(tied_folder),
        output_dir=str(folder),
        max_steps=60,
        optim="adamw_torch",
        learning_rate=1e-2,
        assistant_only_loss=True,
    )
    made.train()
    made.save_model()
    return folder


def test_the_saved_model_answers_and_stops_by_itself(answer):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(answer), AutoTokenizer.from_pretrained(answer)
    assert model.dtype == torch.float32
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=50, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "It is four.<|im_end|>"


def test_the_saved_folder_has_what_generation_needs(answer, tokenizer):
    generation = json.loads((answer / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["pad_token_id"] == tokenizer.pad_token_id
    assert AutoTokenizer.from_pretrained(answer).chat_template == tokenizer.chat_template
    assert "sft" in (answer / "README.md").read_text().lower()


def test_every_token_that_ends_a_turn_is_a_terminator(fresh_tokenizer):
    fresh_tokenizer.eos_token = "<|endoftext|>"  # plain text ends with it, turns end with <|im_end|>
    model = tiny_model("llama", vocab_size=len(fresh_tokenizer))
    model.generation_config.eos_token_id = 7
    made = trainer(chats(), fresh_tokenizer, model)
    made.save_model()
    ends = json.loads(Path("out/generation_config.json").read_text())["eos_token_id"]
    assert {*ends} == {7, *fresh_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])}


# ---- Adapters ----

LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def lora(**changes):
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(**{**LORA, **changes})


@pytest.mark.parametrize("base", ["model_folder", "tied_folder"])
def test_an_adapter_is_saved_alone_and_merges_to_the_same_logits(base, request, tokenizer):
    peft = pytest.importorskip("peft")
    folder = request.getfixturevalue(base)
    made = trainer(
        chats(), None, str(folder), extras={"peft_config": lora()}, max_steps=5, optim="adamw_torch", learning_rate=0.02
    )
    original = AutoModelForCausalLM.from_pretrained(folder)
    made.train()
    assert losses(made)[-1] < losses(made)[0]
    now = {name.replace(".base_layer", ""): value for name, value in parameters(made).items()}
    for name, value in original.named_parameters():
        assert torch.equal(value, now[f"base_model.model.{name}"]), f"{name} changed"

    made.save_model()
    assert not list(Path("out").glob("model*.safetensors"))
    ids = torch.tensor([[5, 6, 7, 8]])
    made.model.eval()
    with torch.no_grad():
        wanted = made.model(ids).logits
        alone = peft.PeftModel.from_pretrained(original, "out")
        torch.testing.assert_close(alone(ids).logits, wanted, rtol=0, atol=1e-5)
        merged = alone.merge_and_unload()
        merged.save_pretrained("merged")
        found = AutoModelForCausalLM.from_pretrained("merged")(ids).logits
    assert not torch.allclose(wanted, AutoModelForCausalLM.from_pretrained(folder)(ids).logits, atol=1e-3)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_an_adapter_folder_goes_on(model_folder, tokenizer):
    pytest.importorskip("peft")
    made = trainer(chats(), None, str(model_folder), extras={"peft_config": lora(lora_dropout=0.0)}, max_steps=3)
    made.train()
    made.save_model("first")
    half = {name: value for name, value in parameters(made).items() if "lora" in name}
    again = trainer(chats(), None, "first", max_steps=3)
    assert_same(half, {name: value for name, value in parameters(again).items() if "lora" in name}, 0)
    again.train()
    whole = trainer(chats(), None, str(model_folder), extras={"peft_config": lora(lora_dropout=0.0)}, max_steps=6)
    whole.train()
    # Eight rows, four a step: three steps end in the middle of the second epoch, the next run begins a first one.
    assert losses(whole)[:3] == losses(made)
    assert losses(again)[0] < losses(made)[0]
    again.save_model("second")
    assert sorted(path.name for path in Path("second").glob("*.safetensors")) == ["adapter_model.safetensors"]


def test_an_adapter_that_peft_saved_has_the_tokenizer_of_its_base(model_folder, tokenizer):
    pytest.importorskip("peft")
    made = trainer(chats(), None, str(model_folder), extras={"peft_config": lora()})
    made.model.save_pretrained("bare")
    again = trainer(chats(), None, "bare")
    assert again.processing_class.chat_template == tokenizer.chat_template
    again.train()
    assert losses(again)[0] > 0


def test_a_peft_model_trains_the_adapter_it_has(tokenizer):
    peft = pytest.importorskip("peft")
    base = tiny_model("llama", vocab_size=len(tokenizer))
    made = trainer(chats(), tokenizer, peft.get_peft_model(base, lora()), max_steps=2, gradient_checkpointing=True)
    before = parameters(made)
    made.train()
    changed = {name for name, value in parameters(made).items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)


@pytest.mark.parametrize("reentrant", [True, False])
def test_adapters_train_under_gradient_checkpointing(reentrant, tokenizer):
    def run(**options):
        model = tiny_model("llama", vocab_size=len(tokenizer))
        made = trainer(chats(), tokenizer, model, extras={"peft_config": lora()}, max_steps=3, **options)
        made.train()
        return parameters(made)

    plain = run()
    kwargs = {"use_reentrant": reentrant}
    assert_same(plain, run(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs), 1e-6)
