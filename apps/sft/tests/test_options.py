"""What each option changes, and what it must not change."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo
from app_runs import assert_same, logged, losses, parameters, step_gradient
from datasets import Dataset, DatasetDict
from posttrain_data import tiny_tokenizer
from posttrain_models import LoadOptions, LoraOptions, tiny_model, unwrap
from posttrain_sft import SFTConfig, SFTTrainer
from sft_runs import Reference, chats, config, pairs, prepared, targets, texts, trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

# ---- Evaluation ----


def test_several_evaluation_sets(tokenizer):
    held_out = {"short": texts(2), "pairs": pairs(3)}
    made = trainer(texts(4), tokenizer, extras={"eval_dataset": held_out}, eval_strategy="steps", eval_steps=1)
    made.train()
    alone = [made.evaluate(rows)["eval_loss"] for rows in held_out.values()]
    assert [logged(made, "eval_short_loss"), logged(made, "eval_pairs_loss")] == [[alone[0]], [alone[1]]]
    made = trainer(texts(4), tokenizer, extras={"eval_dataset": DatasetDict(a=Dataset.from_list(texts(2)))})
    assert made.evaluate()["eval_a_loss"] > 0


@pytest.mark.parametrize(("packing", "eval_packing"), [(True, None), (True, False), (False, True), (False, None)])
def test_evaluation_rows_are_packed_as_eval_packing_says(packing, eval_packing, tokenizer):
    rows = texts(6)
    extras = {"eval_dataset": rows}
    made = trainer(rows, tokenizer, extras=extras, packing=packing, eval_packing=eval_packing, max_length=36)
    packed = packing if eval_packing is None else eval_packing
    assert len(made.train_dataset) == (6 if not packing else len(made.train_dataset)) and packing == (
        "seq_lengths" in made.train_dataset[0]
    )
    assert packed == ("seq_lengths" in made.eval_dataset[0]) == (len(made.eval_dataset) < 6)
    plain = trainer(rows, tokenizer, extras=extras)
    assert made.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)


def test_compute_metrics_sees_logits_and_labels(tokenizer):
    seen = {}

    def metrics(prediction):
        seen["logits"], seen["labels"] = prediction.predictions, prediction.label_ids
        right = (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:])[
            prediction.label_ids[:, 1:] >= 0
        ]
        return {"right": float(right.mean())}

    rows = pairs(6)
    extras = {"eval_dataset": rows, "compute_metrics": metrics}
    made = trainer(texts(4), tokenizer, extras=extras, per_device_eval_batch_size=4)
    found = made.evaluate()
    assert found["eval_right"] == pytest.approx(found["eval_mean_token_accuracy"])
    assert seen["logits"].shape == (*seen["labels"].shape, len(tokenizer))
    ids = torch.tensor([made.eval_dataset[0]["input_ids"]])
    with torch.no_grad():
        wanted = unwrap(made.model)(ids).logits[0].numpy()
    np.testing.assert_allclose(seen["logits"][0, : len(wanted)], wanted, atol=1e-4)
    kept = [token if mask else -100 for token, mask in zip(*list(made.eval_dataset[0].values())[:2], strict=True)]
    assert seen["labels"][0, : len(kept)].tolist() == kept

    extras["preprocess_logits_for_metrics"] = lambda logits, labels: logits.argmax(-1)
    extras["compute_metrics"] = lambda prediction: {"shape": prediction.predictions.ndim}
    assert trainer(texts(4), tokenizer, extras=extras).evaluate()["eval_shape"] == 2


def test_predictions_are_of_rows_as_they_are_although_training_packs(tokenizer):
    rows = pairs(3)
    made = trainer(texts(8), tokenizer, packing=True, max_length=64)
    found = made.predict(rows)
    alone = trainer(texts(8), tokenizer)
    alone.model.load_state_dict(made.model.state_dict())
    wanted = alone.predict(rows)
    assert found.label_ids.shape[0] == len(rows)
    np.testing.assert_array_equal(found.label_ids, wanted.label_ids)
    np.testing.assert_allclose(found.predictions, wanted.predictions, atol=1e-4)
    with pytest.raises(ValueError, match="one sequence a row"):
        made.method.predict(made.model, made.data_collator([made.train_dataset[0]]))


# ---- Templates and tokens ----

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def test_a_chat_template_from_a_file(fresh_tokenizer, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text(PLAIN)
    made = trainer(chats(2), fresh_tokenizer, chat_template_path=str(file))
    text = fresh_tokenizer.decode(made.train_dataset[0]["input_ids"])
    assert text == "user: What comes after river?<|im_end|>assistant: river<|im_end|>"
    made.save_model()
    assert AutoTokenizer.from_pretrained("out").chat_template == PLAIN


@pytest.mark.parametrize("adapter", [None, [], ["embed_tokens", "lm_head"]], ids=["full", "lora", "lora and tokens"])
def test_a_chat_template_that_brings_tokens(adapter, tmp_path, model_folder, caplog):
    source = tiny_tokenizer()
    source.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|stop|>"]})
    source.eos_token = "<|stop|>"
    source.chat_template = "{% for m in messages %}<|turn|>{{ m['role'] }} {{ m['content'] }}<|stop|>{% endfor %}"
    source.save_pretrained(tmp_path / "source")
    extras = {}
    if adapter is not None:
        pytest.importorskip("peft")
        extras = {"peft_config": LoraOptions(use_peft=True, lora_r=4, lora_modules_to_save=adapter or None)}
    made = trainer(chats(2), None, str(model_folder), extras=extras, chat_template_path=str(tmp_path / "source"))
    tokenizer = made.processing_class
    new = tokenizer.convert_tokens_to_ids(["<|turn|>", "<|stop|>"])
    assert min(new) >= len(tiny_tokenizer())
    rows = unwrap(made.model).get_input_embeddings().weight.shape[0]
    assert rows > max(new) and rows % 64 == 0
    assert made.train_dataset[0]["input_ids"][0] == new[0] and made.train_dataset[0]["input_ids"][-1] == new[1]
    made.train()
    made.save_model()
    if adapter is not None:
        again = trainer(chats(2), None, "out")
        assert unwrap(again.model).get_input_embeddings().weight.shape[0] == rows
        assert_same(parameters(made), parameters(again), 0)
        assert ("2 tokens" in caplog.text and "lora_modules_to_save" in caplog.text) == (not adapter)
        return
    again = AutoModelForCausalLM.from_pretrained("out")
    assert again.get_input_embeddings().weight.shape[0] == rows and again.config.eos_token_id == new[1]
    ends = again.generation_config.eos_token_id
    assert new[1] in (ends if isinstance(ends, list) else [ends])


def test_eos_token_ends_texts(fresh_tokenizer):
    made = trainer([{"text": "one two"}], fresh_tokenizer, eos_token="<|endoftext|>")
    assert fresh_tokenizer.decode(made.train_dataset[0]["input_ids"]) == "one two<|endoftext|>"
    assert made.train_dataset[0]["loss_mask"][-1] is True  # although it is the padding token too


def test_shuffle_dataset_orders_rows_by_the_seed(tokenizer):
    def order(**options):
        return [row["input_ids"] for row in trainer(texts(12), tokenizer, **options).train_dataset]

    plain = order()
    assert order(shuffle_dataset=True) == order(shuffle_dataset=True) != plain
    assert sorted(order(shuffle_dataset=True)) == sorted(plain)
    assert order(shuffle_dataset=True, seed=7) != order(shuffle_dataset=True)
    as_set = trainer(Dataset.from_list(texts(12)), tokenizer, shuffle_dataset=True).train_dataset
    assert sorted(row["input_ids"] for row in as_set) == sorted(plain) != [row["input_ids"] for row in as_set]


def test_grouping_by_length_keeps_each_step(tokenizer):
    def run(**options):
        made = trainer(
            texts(16), tokenizer, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, **options
        )
        made.train()
        return losses(made), parameters(made)

    plain, grouped = run(train_sampling_strategy="random"), run(train_sampling_strategy="group_by_length")
    assert grouped[0] == pytest.approx(plain[0], abs=1e-5)
    assert_same(plain[1], grouped[1], 5e-6)


# ---- Precision, memory, compilation ----


def run(tokenizer, rows=None, model=None, **options):
    made = trainer(rows or texts(8), tokenizer, model, **{"max_steps": 2, "learning_rate": 0.1, **options})
    made.train()
    return made


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}},
        {"activation_offloading": True},
        {"torch_compile": True, "torch_compile_backend": "eager", "padding_free": False, "pad_to_multiple_of": 64},
        pytest.param({"torch_compile": True, "torch_compile_backend": "eager"}, marks=pytest.mark.slow),
        pytest.param({"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow),
    ],
    ids=["reentrant", "non-reentrant", "selective", "offloading", "compile padded", "compile", "compile aot_eager"],
)
def test_what_saves_memory_or_time_changes_no_number(options, tokenizer):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, other = run(tokenizer), run(tokenizer, **options)
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == bool(options.get("torch_compile"))
    assert losses(other) == pytest.approx(losses(plain), abs=1e-5)
    assert_same(parameters(plain), parameters(other), 5e-6)


def test_bf16_on_a_cpu_that_is_asked_for_it(tokenizer):
    plain, other = run(tokenizer), run(tokenizer, bf16=True)
    assert all(value.dtype == torch.float32 for value in parameters(other).values())
    assert losses(other) == pytest.approx(losses(plain), abs=0.05)
    assert losses(other) != losses(plain)


def test_weights_load_in_the_dtype_that_is_named(model_folder):
    made = trainer(texts(), None, str(model_folder))
    assert made.model.dtype == torch.float32
    made = trainer(texts(), None, str(model_folder), model_init_kwargs={"dtype": "bfloat16"})
    assert made.model.dtype == torch.bfloat16
    made.train()
    assert 4 < losses(made)[0] < 8
    made = trainer(texts(), None, LoadOptions(str(model_folder), dtype="bfloat16"))
    assert made.model.dtype == torch.bfloat16


def test_attention_named_in_model_init_kwargs(model_folder):
    kwargs = '{"attn_implementation": "eager"}'
    made = trainer(texts(), None, str(model_folder), model_init_kwargs=kwargs, padding_free=False)
    assert unwrap(made.model).config._attn_implementation == "eager"


def test_neftune_adds_noise_and_leaves_no_trace(tokenizer):
    plain, other = run(tokenizer), run(tokenizer, neftune_noise_alpha=20)
    assert losses(other) != pytest.approx(losses(plain), abs=1e-4)
    assert losses(other)[0] == pytest.approx(losses(plain)[0], abs=1)
    other.save_model()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        saved = AutoModelForCausalLM.from_pretrained("out")(ids).logits
        assert torch.allclose(unwrap(other.model).eval()(ids).logits, saved, atol=1e-5)


# ---- Architectures ----


def test_the_balance_loss_of_a_mixture_of_experts(tokenizer):
    def step(**options):
        made = trainer(texts(4), tokenizer, tiny_model("qwen3_moe", vocab_size=len(tokenizer)), **options)
        made.train()
        return made

    without = step(router_aux_loss_coef=0.0)
    assert logged(without, "aux_loss") == []
    with_ = step(router_aux_loss_coef=0.5)
    (balance,) = logged(with_, "aux_loss")
    assert balance > 0
    assert losses(with_)[0] == pytest.approx(losses(without)[0] + 0.5 * balance, abs=1e-4)
    own = step()
    coefficient = tiny_model("qwen3_moe").config.router_aux_loss_coef
    assert losses(own)[0] == pytest.approx(losses(without)[0] + coefficient * balance, abs=1e-4)


def test_the_balance_loss_is_averaged_over_micro_batches(tokenizer):
    model = tiny_model("qwen3_moe", vocab_size=len(tokenizer))
    parts = [trainer(rows, tokenizer, model, learning_rate=0.0) for rows in (texts(8)[:4], texts(8)[4:])]
    for part in parts:
        part.train()
    made = trainer(texts(8), tokenizer, model, learning_rate=0.0, gradient_accumulation_steps=2)
    made.train()
    wanted = sum(logged(part, "aux_loss")[0] for part in parts) / 2
    assert logged(made, "aux_loss") == [pytest.approx(wanted, abs=1e-5)]


def test_a_hybrid_model_trains_padded(tokenizer):
    made = trainer(texts(6), tokenizer, tiny_model("qwen3_5", vocab_size=len(tokenizer)), per_device_train_batch_size=6)
    before, reference = parameters(made), Reference(made.model, prepared(made))
    assert made.shape_plan.layout == "padded" and "linear_attention" in str(made.shape_plan)
    made.train()
    assert losses(made) == [pytest.approx(reference.loss, abs=5e-5)]
    assert_same(reference.gradient, step_gradient(before, parameters(made), 0.5), 1e-4)


@pytest.mark.parametrize("architecture", ["smollm2", "gemma2", "mistral", "gpt_oss", "cohere", "granite"])
def test_other_architectures_equal_a_float64_reference(architecture, tokenizer):
    model = tiny_model(architecture, vocab_size=len(tokenizer))
    made = trainer(texts(6), tokenizer, model, per_device_train_batch_size=6, router_aux_loss_coef=None)
    reference = Reference(made.model, prepared(made))
    made.train()
    (loss,) = losses(made)
    aux = logged(made, "aux_loss")
    if aux:
        loss -= aux[0] * model.config.router_aux_loss_coef
    assert loss == pytest.approx(reference.loss, abs=1e-4)


def test_max_shapes_leaves_few_widths(tokenizer):
    made = trainer(texts(32), tokenizer, max_shapes=2, pad_to_multiple_of=8, max_steps=8)
    widths = set()

    def note(module, args, kwargs):
        if module.training:  # and not a probe at the start
            widths.add(kwargs["input_ids"].shape[1])

    unwrap(made.model).register_forward_pre_hook(note, with_kwargs=True)
    made.train()
    assert len(widths) == 2 and all(width % 8 == 0 for width in widths)


# ---- What the constructor takes ----


def test_plain_training_arguments(tokenizer):
    args = TrainingArguments(
        "plain",
        learning_rate=0.3,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        gradient_checkpointing=False,
    )
    model = tiny_model("llama", vocab_size=len(tokenizer))
    made = SFTTrainer(model=model, args=args, train_dataset=texts(), processing_class=tokenizer)
    made.train()
    assert isinstance(made.args, SFTConfig) and made.args.max_length == 1024
    assert (made.args.learning_rate, made.args.output_dir, len(losses(made))) == (0.3, "plain", 2)


def test_args_none_names_the_output_folder_after_the_model(model_folder, tmp_path):
    made = SFTTrainer(str(model_folder), train_dataset=texts())
    assert made.args.output_dir == "llama-SFT"
    assert made.args.learning_rate == 2e-5 and made.args.gradient_checkpointing


def test_optimizers_and_callbacks_are_used(tokenizer):
    class Count(TrainerCallback):
        steps = 0

        def on_step_end(self, *args, **kwargs):
            Count.steps += 1

    model = tiny_model("llama", vocab_size=len(tokenizer))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    extras = {"optimizers": (optimizer, schedule), "callbacks": [Count()]}
    made = trainer(texts(8), tokenizer, model, extras=extras, max_steps=2)
    before = parameters(made)
    made.train()
    assert Count.steps == 2 and logged(made, "learning_rate") == [0.25, 0.25]
    extras = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.25})}
    other = trainer(texts(8), tokenizer, extras=extras, max_steps=2)
    other.train()
    assert_same(parameters(made), parameters(other), 0)
    assert not torch.equal(before["lm_head.weight"], parameters(other)["lm_head.weight"])


def test_a_data_collator_of_ones_own(tokenizer):
    from posttrain_collators import Padding, TokenCollator

    inner = TokenCollator(Padding(tokenizer.pad_token_id))

    def only_last(rows):
        batch = inner(rows)
        last = torch.zeros_like(batch.loss_mask)
        last[torch.arange(len(rows)), (batch.segment_ids > 0).sum(1) - 1] = True
        return batch._replace(loss_mask=last)

    made = trainer(texts(4), tokenizer, extras={"data_collator": only_last})
    sequences = [(ids, [False] * (len(ids) - 1) + [True]) for ids, _ in prepared(made)]
    reference = Reference(made.model, sequences)
    made.train()
    assert losses(made) == [pytest.approx(reference.loss, abs=2e-5)]


def test_reports_to_tensorboard(tokenizer):
    pytest.importorskip("tensorboard")
    run(tokenizer, report_to="tensorboard")
    assert [file for file in Path().rglob("events.out.tfevents*") if file.stat().st_size > 500]


def test_every_checkpoint_is_whole(tokenizer):
    run(tokenizer, save_strategy="steps", save_steps=1, save_total_limit=1)
    (checkpoint,) = Path("out").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    names = {file.name for file in checkpoint.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md", "trainer_state.json"} <= names
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == tokenizer.chat_template


def test_the_best_model_is_loaded_by_the_metric_of_one_set(tokenizer):
    made = trainer(
        texts(8),
        tokenizer,
        extras={"eval_dataset": {"a": texts(3), "b": pairs(3)}},
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_b_loss",
        learning_rate=1e-2,
    )
    made.train()
    found = logged(made, "eval_b_loss")
    assert made.state.best_metric == min(found)
    assert made.evaluate()["eval_b_loss"] == pytest.approx(min(found), abs=1e-6)


def test_defaults_are_those_that_are_documented():
    args = SFTConfig("out", use_cpu=True)
    assert (args.learning_rate, args.max_length, args.packing, args.loss_type) == (2e-5, 1024, False, "nll")
    assert (args.logging_steps, args.gradient_checkpointing, args.bf16) == (10, True, False)
    assert (args.completion_only_loss, args.assistant_only_loss, args.padding_free) == (None, False, None)
    assert config().max_length == 64


def test_tools_arguments_as_text_or_dict_are_the_same_tokens(tokenizer):
    def row(arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]}

    made = trainer([row({"a": 1}), row('{"a": 1}')], tokenizer, assistant_only_loss=True)
    first, second = made.train_dataset[0], made.train_dataset[1]
    assert first == second and '"a": 1' in targets(tokenizer, first)
