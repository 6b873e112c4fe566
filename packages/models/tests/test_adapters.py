"""LoRA: what trains, what is out of reach, and that the adapter merges to the same logits."""

import logging

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig
from posttrain_collators import Padding, TokenCollator
from posttrain_models import LoraOptions, apply_lora, choose_layout, score_tokens, tiny_model, weighted_logp_sum
from posttrain_models.unwrap import base_model, state_of

IDS = torch.randint(1, 128, (2, 11), generator=torch.Generator().manual_seed(0))


def adapted(architecture, gradient_checkpointing=False, **options):
    torch.manual_seed(0)
    model = apply_lora(
        tiny_model(architecture),
        LoraOptions(**{"lora_r": 4, "lora_dropout": 0.0, **options}),
        gradient_checkpointing=gradient_checkpointing,
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    return model


@pytest.mark.parametrize("saved", [None, ["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("architecture", ["llama", "smollm2", "mixtral", "qwen3_5"])
def test_gradients_agree_and_the_adapter_merges(architecture, saved):
    batch = TokenCollator(Padding(0))([{"input_ids": row.tolist()[:n]} for row, n in zip(IDS, (11, 5), strict=True)])
    weights = torch.ones(batch.input_ids.shape)
    model = adapted(architecture, lora_modules_to_save=saved)
    outcomes = []
    for layout in ("padded", "auto"):
        choose_layout(model, layout)
        model.zero_grad()
        result = weighted_logp_sum(model, batch, weights)
        result.total.backward()
        outcomes.append((result.total.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        assert state_of(base_model(model)).head.fused
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert outcomes[0][1].keys() == outcomes[1][1].keys() == trained
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0])
    for name, grad in outcomes[0][1].items():
        torch.testing.assert_close(outcomes[1][1][name], grad, rtol=1e-4, atol=1e-5)
    if saved:
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "modules_to_save" in n).add_(0.1)
    model.eval()
    with torch.no_grad():
        want = model(input_ids=IDS).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=IDS).logits, want, rtol=0, atol=1e-4)
    tied = architecture == "smollm2"
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) == tied
    torch.testing.assert_close(score_tokens(merged, batch).logps, score_tokens(merged, batch).logps)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_adapters_get_gradients(reentrant):
    batch = TokenCollator(Padding(0))([{"input_ids": row.tolist()} for row in IDS])
    grads = []
    for checkpointing in (False, True):
        model = adapted("llama", gradient_checkpointing=checkpointing).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        choose_layout(model, "packed")
        weighted_logp_sum(model, batch, torch.ones(2, 11)).total.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, grad in grads[0].items():
        assert grad.any()
        torch.testing.assert_close(grads[1][name], grad)


def test_an_adapter_on_the_head_uses_full_logits_and_a_tied_one_is_refused(caplog):
    batch = TokenCollator(Padding(0))([{"input_ids": row.tolist()} for row in IDS])
    model = adapted("llama", lora_target_modules=["q_proj", "lm_head"])
    with torch.no_grad():
        want = model(input_ids=IDS).logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(score_tokens(model, batch).logps[:, 1:], want, rtol=0, atol=1e-5)
    assert "an adapter sits on the LM head" in caplog.text
    with pytest.raises(ValueError, match=r"LM head, whose weight is shared.*lora_modules_to_save"):
        adapted("smollm2", lora_target_modules=["q_proj", "lm_head"])


def test_an_adapter_added_after_scoring_is_scored():
    batch = TokenCollator(Padding(0))([{"input_ids": row.tolist()} for row in IDS])
    base = tiny_model("llama")
    before = score_tokens(base, batch).logps
    model = apply_lora(base, LoraOptions(lora_r=4, lora_modules_to_save=["lm_head"])).eval()
    torch.testing.assert_close(score_tokens(model, batch).logps, before)
    with torch.no_grad():
        base.lm_head.modules_to_save["default"].weight.mul_(2)
    assert (score_tokens(model, batch).logps - before).abs().max() > 0.1
    with model.disable_adapter():
        torch.testing.assert_close(score_tokens(model, batch).logps, before)


def test_the_share_and_what_is_out_of_reach_are_stated(caplog):
    caplog.set_level(logging.INFO, "posttrain")
    adapted("llama")
    assert "parameters train (" in caplog.text and "out of reach" not in caplog.text
    caplog.clear()
    adapted("mixtral")
    assert "experts.gate_up_proj" in caplog.text and "lora_target_parameters" in caplog.text
    caplog.clear()
    model = adapted("mixtral", lora_target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    assert "lora_target_parameters" not in caplog.text
    assert any("experts" in name for name, p in model.named_parameters() if p.requires_grad)


def test_options_reach_peft():
    model = apply_lora(
        tiny_model("llama"),
        LoraOptions(lora_r=8, lora_alpha=4, use_rslora=True, use_dora=True, lora_target_modules=["all-linear"]),
    )
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora, config.use_dora) == (8, 4, True, True)
    targets = {name.rpartition(".")[2] for name in config.target_modules}
    assert {"q_proj", "down_proj"} <= targets and "lm_head" not in targets
    given = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert apply_lora(tiny_model("llama"), given).peft_config["default"].r == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoraOptions(lora_target_modules=["nothing"]), "does not fit LlamaForCausalLM"),
        (LoraOptions(lora_r=0), "r"),
        (PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "virtual tokens"),
        ({"r": 4}, "LoraOptions or a PeftConfig, not dict"),
    ],
)
def test_bad_adapters(options, message):
    with pytest.raises(ValueError, match=message):
        apply_lora(tiny_model("llama"), options)


def test_prompt_learning_cannot_be_scored():
    from peft import get_peft_model

    batch = TokenCollator(Padding(0))([{"input_ids": row.tolist()} for row in IDS])
    model = get_peft_model(tiny_model("llama"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="virtual tokens"):
        score_tokens(model, batch)
