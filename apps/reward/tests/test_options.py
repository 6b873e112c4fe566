"""What each option changes, and what it must not change."""

import pytest
import torch
from app_runs import assert_same, losses, parameters
from posttrain_models import unwrap
from posttrain_models.rewards import tiny_reward_model
from posttrain_reward import RewardConfig, RewardTrainer
from reward_runs import chats, config, texts, trainer
from transformers import TrainingArguments


def run(tokenizer, model=None, **options):
    made = trainer(texts(8), tokenizer, model, **{"max_steps": 2, "learning_rate": 0.1, **options})
    made.train()
    return made


def test_defaults_are_those_that_are_documented():
    args = RewardConfig("out", use_cpu=True)
    assert (args.learning_rate, args.max_length, args.center_rewards_coefficient) == (1e-4, 1024, None)
    assert (args.logging_steps, args.gradient_checkpointing, args.bf16, args.disable_dropout) == (10, True, False, True)
    assert (args.padding_free, args.pad_to_multiple_of, args.activation_offloading) == (None, "auto", False)
    assert config().max_length == 64


def test_plain_training_arguments(tokenizer):
    args = TrainingArguments("plain", max_steps=1, use_cpu=True, report_to="none", save_strategy="no")
    model = tiny_reward_model("llama", vocab_size=len(tokenizer))
    made = RewardTrainer(model=model, args=args, train_dataset=texts(), processing_class=tokenizer)
    assert isinstance(made.args, RewardConfig) and made.args.output_dir == "plain"


def test_args_none_names_the_output_folder_after_the_model(model_folder):
    made = RewardTrainer(str(model_folder), train_dataset=texts())
    assert made.args.output_dir == "llama-Reward" and made.args.learning_rate == 1e-4


@pytest.mark.parametrize("disabled", [True, False])
def test_disable_dropout(disabled, tokenizer):
    model = tiny_reward_model("llama", vocab_size=len(tokenizer), attention_dropout=0.5)
    made = run(tokenizer, model, disable_dropout=disabled)
    same = losses(made) == pytest.approx(losses(run(tokenizer)), abs=1e-6)
    assert same == disabled


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"activation_offloading": True},
        {"torch_compile": True, "torch_compile_backend": "eager", "padding_free": False, "pad_to_multiple_of": 64},
    ],
    ids=["reentrant", "non-reentrant", "offloading", "compile"],
)
def test_what_saves_memory_or_time_changes_no_number(options, tokenizer):
    plain, other = run(tokenizer), run(tokenizer, **options)
    assert losses(other) == pytest.approx(losses(plain), abs=1e-5)
    assert_same(parameters(plain), parameters(other), 5e-6)


def test_bf16_on_a_cpu_that_is_asked_for_it(tokenizer):
    plain, other = run(tokenizer), run(tokenizer, bf16=True)
    assert all(value.dtype == torch.float32 for value in parameters(other).values())
    assert losses(other) == pytest.approx(losses(plain), abs=0.05)


def test_a_kernel_of_the_hub_keeps_its_name_and_the_layout_is_said(tokenizer, caplog):
    from posttrain_models import attention
    from transformers import AttentionInterface, AttentionMaskInterface

    name = "stub/reward-kernel"
    AttentionInterface.register(name, attention.posttrain_attention)
    AttentionMaskInterface.register(name, attention.posttrain_mask)
    model = tiny_reward_model("llama", vocab_size=len(tokenizer))
    model.config._attn_implementation_internal = name
    caplog.set_level("INFO", "posttrain")
    made = run(tokenizer, model)
    assert model.config._attn_implementation == name
    assert "shapes on cpu: prompts with 2 completions, packed layout" in caplog.text and name in caplog.text
    assert losses(made) == pytest.approx(losses(run(tokenizer)), abs=1e-5)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "mistral", "qwen3_moe"])
def test_other_architectures_score_the_same_in_every_layout(architecture, tokenizer):
    found = []
    for padding_free in (None, False):
        made = trainer(
            chats(4),
            tokenizer,
            tiny_reward_model(architecture, vocab_size=len(tokenizer)),
            padding_free=padding_free,
            learning_rate=0.01,
            max_steps=2,
        )
        made.train()
        found.append(losses(made))
    assert found[0] == pytest.approx(found[1], abs=2e-5)


def test_max_shapes_leaves_few_widths(tokenizer):
    made = trainer(texts(24), tokenizer, max_shapes=2, pad_to_multiple_of=4, max_steps=6)
    widths = set()

    def note(module, args, kwargs):
        if module.training:  # and not a probe at the start
            widths.add(kwargs["input_ids"].shape[1])

    unwrap(made.model).register_forward_pre_hook(note, with_kwargs=True)
    made.train()
    assert len(widths) <= 2 and all(width % 4 == 0 for width in widths)


PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"


def test_a_chat_template_from_a_file(fresh_tokenizer, tmp_path):
    (tmp_path / "plain.jinja").write_text(PLAIN)
    made = trainer(chats(2), fresh_tokenizer, chat_template_path=str(tmp_path / "plain.jinja"))
    row = made.train_dataset[0]
    text = fresh_tokenizer.decode([*row["prompt_ids"], *row["chosen_ids"]])
    assert text == "user: What comes after river?<|im_end|>assistant: mountain<|im_end|>"
    made.save_model()


def test_eos_token_ends_texts(fresh_tokenizer):
    made = trainer(texts(1), fresh_tokenizer, eos_token="<|endoftext|>")
    end = fresh_tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert made.train_dataset[0]["chosen_ids"][-1] == made.train_dataset[0]["rejected_ids"][-1] == end
