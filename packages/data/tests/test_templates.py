"""Taking chat templates over, and the tokenizer for demonstrations."""

from types import SimpleNamespace

import pytest
import torch
from posttrain_data import DataError, clone_chat_template, render, terminators, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ASK = [{"role": "user", "content": "Hi"}]


class Model:
    """As much of a model as cloning needs."""

    def __init__(self, rows):
        self.embedding = torch.nn.Embedding(rows, 2)
        self.config = SimpleNamespace(eos_token_id=None)
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def get_input_embeddings(self):
        return self.embedding

    def resize_token_embeddings(self, rows):
        self.embedding = torch.nn.Embedding(rows, 2)


def plain_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend.model = models.BPE(vocab=alphabet, merges=[])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_cloning_from_a_folder(tmp_path):
    source = tiny_tokenizer()
    source.save_pretrained(tmp_path)
    tokenizer, model = plain_tokenizer(), Model(256)
    added = clone_chat_template(model, tokenizer, tmp_path)
    assert tokenizer.convert_ids_to_tokens(added) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == source.chat_template
    assert model.embedding.weight.shape[0] == 320
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(render(tokenizer, ASK)) == "<|im_start|>user\nHi<|im_end|>\n"
    model = Model(512)
    assert clone_chat_template(model, tokenizer, tmp_path, resize_to_multiple_of=None) == []
    assert model.embedding.weight.shape[0] == 512


def test_cloning_a_template_alone(tmp_path):
    text = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    for source in (tmp_path, tmp_path / "chat_template.jinja", str(tmp_path)):
        tokenizer, model = tiny_tokenizer(), Model(512)
        assert clone_chat_template(model, tokenizer, source) == []
        assert tokenizer.chat_template == text and model.embedding.weight.shape[0] == 512


def test_bad_template_sources(tmp_path):
    (tmp_path / "bad.jinja").write_text("{% for %}")
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    (tmp_path / "empty").mkdir()
    plain_tokenizer().save_pretrained(tmp_path / "plain")
    for source, message in (
        ("bad.jinja", "not valid Jinja"),
        ("latin.jinja", "not valid UTF-8 at byte 0"),
        ("none.jinja", "does not exist"),
        ("empty", "no tokenizer and no chat_template.jinja"),
        ("plain", "has no chat template"),
    ):
        with pytest.raises(DataError, match=message):
            clone_chat_template(None, tiny_tokenizer(), tmp_path / source)


def test_the_tiny_tokenizer_is_complete(tmp_path):
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size <= 512 and tiny_tokenizer(259).vocab_size == 259
    for text in ("", " a  b\n", "Grüße 👋🏽 日本語", "\x00\x7f"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (None, tools):
        assert render(loaded, ASK, tools=given) == render(tokenizer, ASK, tools=given)
    assert terminators(loaded) == terminators(tokenizer) == [tokenizer.eos_token_id]
    assert render(tiny_tokenizer(), ASK) == render(tokenizer, ASK)
    with pytest.raises(ValueError, match="vocab_size=100"):
        tiny_tokenizer(100)


def test_no_terminator_is_an_error():
    tokenizer = plain_tokenizer()
    with pytest.raises(DataError, match="set tokenizer.eos_token"):
        terminators(tokenizer)
