"""What the trainer of every app does around its method."""

import logging

import pytest
from posttrain_data import tiny_tokenizer
from posttrain_models import LoraOptions, tiny_model
from toy_app import ROWS, ToyTrainer, config, saved, trainer


def test_rows_are_prepared_for_what_they_are_used_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ToyTrainer, "asked", [])
    made = trainer(tmp_path / "out", extras={"eval_dataset": {"a": ROWS[:2], "b": ROWS[:3]}})
    assert ToyTrainer.asked == [(8, "train", "train"), (2, "eval a", "evaluate"), (3, "eval b", "evaluate")]
    assert {"eval_a_loss", "eval_b_loss"} <= made.evaluate().keys() and len(ToyTrainer.asked) == 3
    made.evaluate(ROWS[:4])
    made.predict(ROWS[:5])
    assert ToyTrainer.asked[3:] == [(4, "eval", "evaluate"), (5, "test", "predict")]


def test_the_plan_of_the_shapes_and_the_weight_of_balance_come_with_the_method(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "posttrain"):
        logging.getLogger("posttrain").propagate = True
        made = trainer(tmp_path / "out", model=saved(tmp_path / "mixtral", "mixtral"), router_aux_loss_coef=0.25)
    assert made.method.coefficient == 0.25 and made.model.config.output_router_logits
    assert str(made.shape_plan) in caplog.messages and "train: 8 rows" in caplog.text
    assert made.data_collator(list(made.train_dataset)).extras.labels.tolist() == [row["label"] for row in ROWS]


def test_what_the_model_cannot_do_is_said_before_its_weights_are_loaded(tmp_path):
    folder = tmp_path / "model"
    saved(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="mixtures of experts"):
        trainer(tmp_path / "out", model=str(folder), router_aux_loss_coef=0.25)


def test_dropout_is_off_and_tokens_end_turns(tmp_path):
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()), attention_dropout=0.5)
    made = trainer(tmp_path / "out", model=saved(tmp_path / "model"))
    assert made.model.generation_config.eos_token_id == made.processing_class.eos_token_id
    assert trainer(tmp_path / "out", model=model).model.model.layers[0].self_attn.attention_dropout == 0
    kept = trainer(tmp_path / "out", model=tiny_model("llama", attention_dropout=0.5), disable_dropout=False)
    assert kept.model.model.layers[0].self_attn.attention_dropout == 0.5


def test_tokens_that_an_adapter_leaves_untrained_are_named(tmp_path, caplog):
    pytest.importorskip("peft")
    other = tiny_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    other.save_pretrained(tmp_path / "chat")
    logging.getLogger("posttrain").propagate = True
    extras = {"peft_config": LoraOptions(use_peft=True, lora_r=4)}
    trainer(tmp_path / "out", extras=extras, chat_template_path=str(tmp_path / "chat"))
    assert "brought 1 tokens" in caplog.text and "embed_tokens lm_head" in caplog.text


def test_a_trainer_that_hooks_read_has_no_model():
    made = ToyTrainer.unloaded(config("out"), tiny_tokenizer())
    rows, report = made.prepare(ROWS, "train", "train")
    assert report.rows_kept == 8 and not hasattr(made, "model")
    assert made.show_row(1, rows[1]).splitlines()[0] == "row 1, labelled good:"


def test_a_hook_that_is_not_defined_is_named(tmp_path):
    from posttrain_app import AppTrainer, LanguageConfig

    class Unfinished(AppTrainer):
        config_class = LanguageConfig

    args = LanguageConfig(str(tmp_path / "out"), use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match="Unfinished.*prepare"):
        Unfinished(tiny_model("llama"), args, train_dataset=ROWS, processing_class=tiny_tokenizer())
