"""Configs, and what is refused of what a trainer was given."""

import pytest
from posttrain_app import LanguageConfig, MethodConfig
from posttrain_app.arguments import check_run, resolve_args
from posttrain_app.config import mapping_option
from posttrain_app.preference import PreferenceConfig
from posttrain_models import tiny_model
from posttrain_trainer import TrainingConfig


def config(folder, **options):
    return MethodConfig(str(folder), use_cpu=True, report_to="none", **options)


def test_a_run_that_cannot_begin_or_end(tmp_path):
    (tmp_path / "file").write_text("")
    rows = [{"text": "a"}]
    check_run(config(tmp_path / "new" / "below"), rows, None)
    for args, data, evaluation, wanted in (
        (config(tmp_path / "file" / "below"), rows, None, "is a file"),
        (config(tmp_path), None, None, "train_dataset is missing"),
        (config(tmp_path, eval_strategy="epoch"), rows, None, "eval_strategy='epoch'"),
        (config(tmp_path), iter(rows), None, "max_steps=-1"),
    ):
        with pytest.raises(ValueError, match=wanted):
            check_run(args, data, evaluation)


def test_the_config_of_the_method_whatever_was_passed():
    own = PreferenceConfig("mine", use_cpu=True)
    assert resolve_args(own, PreferenceConfig, "model") is own
    assert resolve_args(None, PreferenceConfig, "folder/model").output_dir == "model-Preference"
    assert resolve_args(None, PreferenceConfig, tiny_model("llama")).output_dir == "LlamaForCausalLM-Preference"
    plain = resolve_args(TrainingConfig("out", learning_rate=0.5, use_cpu=True), PreferenceConfig, "model")
    assert (type(plain), plain.learning_rate, plain.beta) == (PreferenceConfig, 0.5, 0.1)
    with pytest.raises(ValueError, match="args must be a PreferenceConfig; got dict"):
        resolve_args({}, PreferenceConfig, "model")


def test_mappings():
    assert mapping_option("x", None) is None and mapping_option("x", '{"a": 1}') == {"a": 1} == mapping_option(
        "x", {"a": 1}
    )
    for value in ("{", "[1]", 5):
        with pytest.raises(ValueError, match="x"):
            mapping_option("x", value)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"max_length": 1}, "max_length"),
        ({"pad_token": "<pad>"}, "tokenizer.pad_token"),
        ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef"),
        ({"label_smoothing_factor": 0.1}, "full logits"),
    ],
)
def test_options_that_cannot_be_meant(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        LanguageConfig("out", use_cpu=True, report_to="none", **options)


def test_defaults_of_preference_methods():
    args = PreferenceConfig("out", use_cpu=True)
    assert (args.learning_rate, args.beta, args.disable_dropout, args.max_length) == (1e-6, 0.1, True, 1024)
    assert (args.ref_model_mixup_alpha, args.ref_model_sync_steps) == (0.6, 512)
    assert PreferenceConfig("out", use_cpu=True, model_init_kwargs='{"revision": "x"}').model_init_kwargs == {
        "revision": "x"
    }
