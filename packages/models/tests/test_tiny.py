"""The built-in tiny models."""

import pytest
import torch
from posttrain_models import tiny_model


@pytest.mark.parametrize(
    "architecture",
    ["llama", "smollm2", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "cohere", "granite", "gpt2", "mixtral"]
    + ["qwen3_moe", "gpt_oss", "qwen3_5"],
)
def test_models_are_small_and_reproducible(architecture):
    state = torch.get_rng_state()
    model = tiny_model(architecture, vocab_size=64)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in model.parameters()) < 100_000 and not model.training
    assert model.get_output_embeddings().weight.shape[0] == 64
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
    again, other = tiny_model(architecture, vocab_size=64), tiny_model(architecture, vocab_size=64, seed=1)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, again(input_ids=ids).logits)
        assert (model(input_ids=ids).logits - other(input_ids=ids).logits).abs().max() > 1e-3


def test_overrides_and_errors():
    assert tiny_model("llama", num_hidden_layers=1).config.num_hidden_layers == 1
    with pytest.raises(ValueError, match="architecture='bert' is not one of llama"):
        tiny_model("bert")
