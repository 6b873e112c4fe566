"""From names, folders, adapters and objects to models, and what is said when that fails."""

import json
import logging

import pytest
import torch
from posttrain_models import (
    LoadOptions,
    LoraOptions,
    apply_lora,
    choose_layout,
    fit_tokens,
    load_model,
    load_tokenizer,
    sketch_model,
    tiny_model,
)
from posttrain_models.loading import parse_dtype
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture
def adapter(tmp_path, folder):
    path = tmp_path / "adapter"
    model = apply_lora(load_model(folder), LoraOptions(lora_r=4, lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    return path, model


def test_a_folder_loads_in_float32_and_says_what_bfloat16_would_save(folder, caplog):
    tiny_model("llama").bfloat16().save_pretrained(folder)
    model = load_model(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and model.training
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert "dtype='bfloat16' would save" in caplog.text
    caplog.clear()
    assert next(load_model(folder, LoadOptions(dtype="bfloat16")).parameters()).dtype == torch.bfloat16
    assert next(load_model(folder, LoadOptions(dtype="auto")).parameters()).dtype == torch.bfloat16
    assert next(load_model(folder, model_init_kwargs='{"dtype": "float16"}').parameters()).dtype == torch.float16
    assert not caplog.text


def test_attention_implementation_and_init_kwargs(folder):
    assert load_model(folder, LoadOptions(attn_implementation="eager")).config._attn_implementation == "eager"
    model = load_model(folder, model_init_kwargs={"attn_implementation": "eager", "attention_dropout": 0.25})
    assert model.config._attn_implementation == "eager" and model.config.attention_dropout == 0.25


def test_the_layout_is_not_saved_with_the_model(folder, tmp_path):
    model = load_model(folder)
    choose_layout(model, "packed")
    model.save_pretrained(tmp_path / "again")
    assert "posttrain" not in (tmp_path / "again" / "config.json").read_text()
    assert load_model(tmp_path / "again").config._attn_implementation == "sdpa"


def test_an_object_is_returned_as_it_is():
    model = tiny_model("llama")
    assert load_model(model) is model
    with pytest.raises(ValueError, match="not an object"):
        load_model(model, model_init_kwargs={"dtype": "float32"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": LoadOptions(dtype="float33")}, "dtype='float33' is unknown"),
        ({"options": LoadOptions(load_in_4bit=True, load_in_8bit=True)}, "exclude each other"),
        ({"model_init_kwargs": "{"}, "not JSON"),
        ({"model_init_kwargs": "[1]"}, "must be a JSON object"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "device_map='auto'"),
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "torch_dtype='bfloat16', which is called dtype"),
        ({"options": LoadOptions(attn_implementation="nonsense")}, "nonsense"),
    ],
)
def test_bad_options(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_model(folder, **arguments)


def test_quantisation_without_bitsandbytes(folder, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else find(name, *a)
    )
    with pytest.raises(ValueError, match=r"load_in_4bit needs bitsandbytes.*\[quantization\]"):
        load_model(folder, LoadOptions(load_in_4bit=True))


def test_quantised_weights_compute_in_the_dtype_that_is_chosen(monkeypatch):
    from posttrain_models import loading

    monkeypatch.setattr(loading, "_bitsandbytes", lambda options, dtype: dtype)
    for extra, wanted in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        arguments = loading._arguments(LoadOptions(load_in_4bit=True), extra, None, None)
        assert arguments["quantization_config"] == arguments["dtype"] == wanted


def test_damaged_folders(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere/at/all does not exist"):
        load_model(tmp_path / "nowhere/at/all")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        load_model(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"config\.json is a file"):
        load_model(folder / "config.json")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"{folder} cannot be loaded: .*afetensor"):
        load_model(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=f"{folder} cannot be loaded"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"{folder} cannot be loaded"):
        load_model(folder)


def test_weights_of_another_model(folder, tmp_path):
    other = tmp_path / "other"
    tiny_model("qwen3", tie_word_embeddings=False).save_pretrained(other)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    config = json.loads((other / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks \d+ weights of Qwen3ForCausalLM, such as model\.layers\.2"):
        load_model(other)


def test_an_adapter_folder_is_continued(adapter):
    path, model = adapter
    again = load_model(path)
    trained = {name: p for name, p in again.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(dict(again.named_parameters())[name], parameter)
    with pytest.raises(ValueError, match="has an adapter already"):
        apply_lora(again, LoraOptions(use_peft=True))


def test_damaged_adapters(adapter):
    path, _ = adapter
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(path / "gone")}))
    with pytest.raises(ValueError, match=f"{path} is an adapter of .*gone.*does not exist"):
        load_model(path)
    (path / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base model"):
        load_model(path)
    with pytest.raises(ValueError, match="names no base model"):
        sketch_model(LoadOptions(str(path)))
    (path / "adapter_config.json").write_text(json.dumps(config))
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"adapter {path} cannot be loaded"):
        load_model(path)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
        load_model(path)


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32}


def gemma3():
    tower = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(text_config=text, vision_config=tower, image_token_index=120, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config)


def qwen3_5():
    delta = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    text = {**TEXT, **delta, "layer_types": ["linear_attention", "full_attention"]}
    tower = {**TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16}
    tokens = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=tower, **tokens))


@pytest.mark.parametrize(("make", "layout"), [(gemma3, "packed"), (qwen3_5, "padded")])
def test_text_training_of_a_vision_language_checkpoint(make, layout, tmp_path):
    from posttrain_collators import Padding, TokenCollator
    from posttrain_models import weighted_logp_sum

    original = make()
    original.save_pretrained(tmp_path / "one")
    model = load_model(tmp_path / "one")
    assert type(model) is type(original)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all("language_model" not in name and "lm_head" not in name for name in frozen)
    assert choose_layout(model).name == layout
    sketched = {name for name, p in sketch_model(LoadOptions(str(tmp_path / "one")))[0].named_parameters()
                if not p.requires_grad}  # fmt: skip
    assert sketched == frozen, "a plan counts what will be trained"
    batch = TokenCollator(Padding(0))([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}])
    weighted_logp_sum(model, batch, torch.ones(2, 4)).total.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name in frozen), name
    model.save_pretrained(tmp_path / "two")
    again = load_model(tmp_path / "two")
    assert again.state_dict().keys() == original.state_dict().keys()
    for name in frozen:
        assert torch.equal(again.state_dict()[name], original.state_dict()[name])


def tokenizer(path, **special):
    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "<pad>": 3, "[UNK]": 4}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(path)
    return path


def test_tokenizers_have_a_padding_token(tmp_path):
    assert load_tokenizer(tokenizer(tmp_path / "a", eos_token="<end>")).pad_token == "<end>"
    assert load_tokenizer(tokenizer(tmp_path / "b", eos_token="<end>", pad_token="<pad>")).pad_token == "<pad>"
    assert load_tokenizer(tmp_path / "a", eos_token="b").eos_token_id == 1
    with pytest.raises(ValueError, match="eos_token='<none>' is not in the vocabulary"):
        load_tokenizer(tmp_path / "a", eos_token="<none>")
    with pytest.raises(ValueError, match="neither a padding nor an end token"):
        load_tokenizer(tokenizer(tmp_path / "c"))
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path / "missing")


def test_models_are_fitted_to_the_tokens(tmp_path):
    model = tiny_model("llama", vocab_size=3)
    tokens = load_tokenizer(tokenizer(tmp_path / "a", eos_token="<end>", pad_token="<pad>"))
    fit_tokens(model, tokens)
    assert model.get_input_embeddings().weight.shape[0] == 64
    assert (model.config.pad_token_id, model.config.eos_token_id) == (3, 2)
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (3, 2)
    model.generation_config.eos_token_id = [7, 8]
    fit_tokens(model, tokens, ends=[1])
    assert model.generation_config.eos_token_id == [1, 2, 7, 8]


def test_dtypes():
    assert parse_dtype("bfloat16") is torch.bfloat16 and parse_dtype(torch.float16) is torch.float16
    assert parse_dtype("auto") == "auto" and parse_dtype(None) == "auto"
    with pytest.raises(ValueError, match="int8"):
        parse_dtype("int8")


def test_the_rank_decides_the_device(monkeypatch):
    from posttrain_models import loading

    class Spec:
        name, device_map, static_shapes = "cuda", "cuda", False

    monkeypatch.setattr(loading, "device_spec", lambda: Spec)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert loading._placement("auto") == "cuda:3" and loading._placement(None) is None
    monkeypatch.delenv("LOCAL_RANK")
    assert loading._placement("auto") == "cuda"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert loading._placement("auto") is None


def test_loading_is_quiet(folder, caplog):
    caplog.set_level(logging.INFO, "posttrain")
    load_model(folder, LoadOptions(dtype="bfloat16"))
    assert not [r for r in caplog.records if r.name == "posttrain"]
