"""Tokenizers and models, ready to train."""

import pytest
import torch
from posttrain_app import MethodConfig
from posttrain_app.loading import cut_of, disable_dropout, resolve_model, resolve_tokenizer
from posttrain_app.methods import balancing_coefficient
from posttrain_models import LoadOptions, tiny_model
from torch import nn
from toy_app import saved
from transformers.utils import logging as transformers_logging


def config(folder, **options):
    return MethodConfig(str(folder), use_cpu=True, report_to="none", **options)


def test_a_tokenizer_is_an_object(tmp_path):
    with pytest.raises(ValueError, match="processing_class"):
        resolve_tokenizer("nowhere", config(tmp_path), "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize("quiet", [True, False])
def test_loading_shows_progress_as_training_does(tmp_path, quiet):
    shown = []

    def load(*_args, **_options):
        shown.append(transformers_logging.is_progress_bar_enabled())
        return tiny_model("llama")

    resolve_model("somewhere", config(tmp_path, disable_tqdm=quiet), load=load)
    assert shown == [not quiet] and transformers_logging.is_progress_bar_enabled()


def test_a_cut_is_of_a_model_by_name_whose_attention_can_be_tried_anywhere(tmp_path):
    folder = saved(tmp_path / "model")
    assert cut_of(folder, config("out")).config.num_hidden_layers == 1
    assert cut_of(tiny_model("llama"), config("out")) is None
    assert cut_of(LoadOptions(folder, attn_implementation="eager"), config("out")) is None
    assert cut_of(folder, config("out", model_init_kwargs={"attn_implementation": "eager"})) is None


def test_dropout_is_gone_everywhere():
    model = tiny_model("llama", attention_dropout=0.5).train()
    model.extra = nn.Sequential(nn.Dropout(0.3))
    disable_dropout(model)
    assert model.extra[0].p == 0
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_the_balancing_loss():
    plain, mixture = tiny_model("llama"), tiny_model("mixtral")
    assert balancing_coefficient(plain, None) == balancing_coefficient(plain, 0.0) == 0
    with pytest.raises(ValueError, match="mixtures of experts"):
        balancing_coefficient(plain, 0.1)
    assert balancing_coefficient(mixture, 0.25) == 0.25 and mixture.config.output_router_logits
    assert balancing_coefficient(mixture, 0.0) == 0 and not mixture.config.output_router_logits
