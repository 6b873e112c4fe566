"""Which models run packed, and what happens to those that cannot."""

import logging

import pytest
import torch
from posttrain_models import attention, choose_layout, score_tokens, tiny_model, unwrap
from posttrain_models.layout import honours_boundaries
from posttrain_models.unwrap import state_of
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM


class Deaf(LlamaForCausalLM):
    """Drops what it does not know."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        return super().forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
        )


def test_packed_by_default_and_remembered_through_wrappers():
    model = tiny_model("llama")
    layout = choose_layout(torch.nn.DataParallel(model))
    assert layout.name == "packed" and "SDPA" in layout.reason
    assert state_of(unwrap(model)).layout == layout
    assert model.config._attn_implementation == attention.NAME


def test_requests():
    model = tiny_model("llama")
    assert choose_layout(model, "padded").reason == "as requested"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="requested='flash' is not a layout"):
        choose_layout(model, "flash")
    assert choose_layout(model, static_shapes=True) == ("padded", "shapes are static on this device", True)
    with pytest.raises(ValueError, match="static"):
        choose_layout(model, "packed", static_shapes=True)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("qwen3_5", "linear_attention layers carry state"), ("deaf", "did not receive the sequence boundaries")],
)
def test_what_cannot_run_packed_runs_padded_and_says_why(architecture, reason):
    model = tiny_model("llama" if architecture == "deaf" else architecture)
    if architecture == "deaf":
        model.__class__ = Deaf
    before = model.config._attn_implementation
    layout = choose_layout(model)
    assert layout.name == "padded" and reason in layout.reason and "\n" not in layout.reason
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match=f"'packed' is not possible.*{reason}"):
        choose_layout(model, "packed")


def test_a_model_that_mixes_neighbours_is_caught_by_the_probe():
    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 0.5 * out.roll(1, 1))
    assert "score differently" in choose_layout(model).reason


def test_a_model_that_ignores_the_registered_attention_is_caught():
    model = tiny_model("llama")
    attention_layer = model.model.layers[0].self_attn
    attention_layer.config = type(model.config)(**model.config.to_dict())
    attention_layer.config._attn_implementation = "sdpa"
    layout = choose_layout(model)
    assert layout.name == "padded" and "1 of 2 layers" in layout.reason


def test_a_window_that_attention_is_not_told_is_caught():
    model = tiny_model("gemma3")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert "sliding window" in choose_layout(model).reason


def test_convolutions_and_bidirectional_attention_rule_packing_out():
    model = tiny_model("llama")
    model.model.short = torch.nn.Conv1d(32, 32, 3)
    assert "convolutions" in choose_layout(model).reason
    model = tiny_model("gemma3")
    model.config.use_bidirectional_attention = True
    assert "not causal" in choose_layout(model).reason


@pytest.mark.parametrize("kind", ["mamba", "falcon_h1", "llama4_text", "recurrent_gemma"])
def test_other_families_do_not_run_packed(kind):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    more = {
        "mamba": {"state_size": 4},
        "falcon_h1": {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
        },
        "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
        "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8},
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more[kind]))
    assert choose_layout(model).name == "padded"


def test_the_probe_leaves_modes_gradients_and_random_state_alone():
    model = tiny_model("llama").train()
    model.model.norm.eval()
    before = torch.get_rng_state()
    choose_layout(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and model.model.layers[0].training and not model.model.norm.training
    assert all(p.grad is None for p in model.parameters())


def test_kernels_that_read_boundaries_keep_their_name():
    assert honours_boundaries("flash_attention_2") and honours_boundaries("kernels-community/flash-attn2")
    assert not honours_boundaries("sdpa") and not honours_boundaries(None)


def test_a_stub_kernel_of_the_hub_is_kept(monkeypatch):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = "stub/kernel"
    seen = []

    def kernel(module, query, key, value, mask, **kwargs):
        seen.append(kwargs.get("cu_seq_lens_q") is not None)
        return attention.posttrain_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, lambda **kw: None if attention.PACKED.active else sdpa_mask(**kw))
    model = tiny_model("llama")
    model.config._attn_implementation_internal = name
    layout = choose_layout(model)
    assert layout.name == "packed" and name in layout.reason
    assert model.config._attn_implementation == name and any(seen)


def test_scoring_chooses_by_itself(caplog):
    from posttrain_models.layout import probe_batch

    caplog.set_level(logging.INFO)
    model = tiny_model("llama")
    score_tokens(model, probe_batch(model))
    assert state_of(model).layout.name == "packed"
    assert "layout packed" in caplog.text


def test_weights_that_are_not_there_are_not_probed():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    assert "not loaded" in choose_layout(model).reason


def test_static_shapes_on_a_device_are_probed_by_a_small_copy_on_the_cpu():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("gemma3").config)
    assert choose_layout(model, static_shapes=True).static_shapes


def test_a_block_mask_that_is_not_honoured_is_refused():
    model = tiny_model("llama")
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + 0.5 * out.roll(1, 1))
    with pytest.raises(ValueError, match="does not keep packed rows apart"):
        choose_layout(model, static_shapes=True)


def test_soft_caps_survive_a_transformers_that_loads_them_with_sdpa():
    model = tiny_model("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    choose_layout(model, "padded")
    assert model.config._attn_implementation == "eager"
