"""Norms, rotary embeddings and tied weights computed in fewer passes, against plain float64."""

import copy
import sys

import pytest
import torch
from posttrain_collators import Padding, TokenCollator
from posttrain_models import choose_layout, norm, rotary, score_tokens, tiny_model, weighted_logp_sum
from posttrain_models.head import TiedEmbedding
from torch import nn

NORMED = {
    "llama": 5,
    "qwen2": 5,
    "qwen3": 9,
    "gemma2": 9,
    "gemma3": 13,
    "mixtral": 5,
    "gpt_oss": 5,
    "cohere": 0,
    "gpt2": 0,
    "qwen3_5": 7,
}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_norm(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 37, 16), (2, 3, 5, 8), (0, 4), (1, 1)])
@pytest.mark.parametrize("strided", [False, True])
def test_the_norm_and_its_gradients(shape, strided):
    x = drawn(*shape, 2)[..., 0] if strided else drawn(*shape)
    weight, arriving = 1 + 0.3 * drawn(shape[-1], seed=1), drawn(*shape, seed=2)
    x.requires_grad_(), weight.requires_grad_()
    got = norm.RmsNorm.apply(x, weight, 1e-5)
    grads = torch.autograd.grad(got, (x, weight), arriving)
    want = plain_norm(x, weight, 1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    for one, other in zip(grads, torch.autograd.grad(want, (x, weight), arriving.double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    frozen = weight.detach()
    torch.testing.assert_close(
        torch.autograd.grad(norm.RmsNorm.apply(x, frozen, 1e-5), x, arriving)[0], grads[0], rtol=0, atol=0
    )


@pytest.mark.parametrize("architecture", NORMED)
def test_a_models_norms_answer_as_they_did(architecture):
    model = tiny_model(architecture)
    for parameter in model.parameters():
        parameter.data.add_(0.2 * drawn(*parameter.shape))
    before = copy.deepcopy(model)
    norm.fuse_norms(model)
    norm.fuse_norms(model)
    fused = [name for name, module in model.named_modules() if isinstance(module, norm.FusedNorm)]
    assert len(fused) == NORMED[architecture]
    for name in fused:
        mine, theirs = copy.deepcopy(model.get_submodule(name)), before.get_submodule(name)
        assert type(mine).__name__ == type(theirs).__name__ and mine.state_dict().keys() == theirs.state_dict().keys()
        x = 1e-2 * drawn(3, len(mine.weight))
        torch.testing.assert_close(mine(x), theirs(x), rtol=1e-5, atol=1e-6)
        assert mine(x).grad_fn.name() != theirs(x).grad_fn.name()
        assert torch.equal(mine(x.bfloat16()), theirs(x.bfloat16()))
        assert torch.equal(mine.bfloat16()(x.bfloat16()), theirs.bfloat16()(x.bfloat16()))


class OddRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-2

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class GatedRMSNorm(OddRMSNorm):
    def forward(self, x, gate):
        return x * gate


class InputRMSNorm(OddRMSNorm):
    """As its weight begins, one that adds one to it."""

    def __init__(self):
        super().__init__()
        self.weight.data.zero_()

    def forward(self, x):
        x = x * (1 + self.weight)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class ExpRMSNorm(InputRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.exp()


class ShardedRMSNorm(OddRMSNorm):
    """As a wrapper leaves it that shards parameters."""

    def __init__(self):
        super().__init__()
        self.weight.data = self.weight.data[:0]


@pytest.mark.parametrize("kind", [OddRMSNorm, GatedRMSNorm, InputRMSNorm, ExpRMSNorm, ShardedRMSNorm])
def test_another_formula_is_kept(kind):
    model = nn.Sequential(kind())
    norm.fuse_norms(model)
    assert type(model[0]) is kind


def test_a_norm_with_a_computed_weight_is_kept():
    model = tiny_model("llama")
    nn.utils.parametrize.register_parametrization(model.model.norm, "weight", nn.Identity())
    norm.fuse_norms(model)
    assert not isinstance(model.model.norm, norm.FusedNorm)


def test_norms_of_a_kind_share_a_class_and_travel(tmp_path):
    model = tiny_model("gemma2")
    choose_layout(model)
    norms = [module for module in model.modules() if isinstance(module, norm.FusedNorm)]
    assert len({type(module) for module in norms}) == 1
    torch.save(model, tmp_path / "model")
    found = torch.load(tmp_path / "model", weights_only=False)
    ids = torch.tensor([[5, 6, 7]])
    for other in (found, copy.deepcopy(model)):
        assert isinstance(other.model.norm, norm.FusedNorm) and other.model.norm.offset == 1.0
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert torch.equal(
        model.model.norm(x=drawn(2, 32)), model.model.norm.__class__.__mro__[2].forward(norms[-1], drawn(2, 32))
    )


def test_the_norms_gradient_is_float32_under_autocast():
    x, weight, arriving = drawn(3, 16).requires_grad_(), drawn(16, seed=1), drawn(3, 16, seed=2)
    want = torch.autograd.grad(norm.RmsNorm.apply(x, weight, 1e-5), x, arriving)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(norm.RmsNorm.apply(x, weight, 1e-5), x, arriving)
    assert torch.equal(got[0], want[0])


def own_rotary(model):
    return getattr(sys.modules[type(model).__module__], rotary.NAME)


def test_turning_and_its_gradient():
    model = tiny_model("llama")
    choose_layout(model)
    turn = own_rotary(model)
    choose_layout(tiny_model("llama"))
    assert own_rotary(model) is turn and turn.__wrapped__.__module__ == type(model).__module__
    angles = drawn(2, 5, 8)
    cos, sin = angles.cos(), (angles + 0.1).sin()
    for strided in (False, True):
        q, k = (drawn(2, 5, h, 8, seed=h).transpose(1, 2) for h in (4, 2))
        q, k = (x.requires_grad_() if strided else x.contiguous().requires_grad_() for x in (q, k))
        got = turn(q, k, cos, sin)
        want = turn.__wrapped__(q.double(), k.double(), cos.double(), sin.double())
        arriving = [drawn(*x.shape, seed=7) for x in got]
        grads = torch.autograd.grad(got, (q, k), arriving)
        exact = torch.autograd.grad(want, (q, k), [x.double() for x in arriving])
        for one, other in zip((*got, *grads), (*want, *exact), strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)
        assert [x.stride() for x in got] == [q.stride(), k.stride()]
    turned = torch.func.vmap(lambda states: turn(states[None], states[None], cos[:1], sin[:1])[0])(q)
    torch.testing.assert_close(turned[0], turn(q[:1], q[:1], cos[:1], sin[:1])[0])
    (first,) = torch.autograd.grad(turn(q, k, cos, sin)[0].square().sum(), q, create_graph=True)
    assert torch.autograd.grad(first.sum(), q)[0].any()  # a second derivative
    low = turn(q.bfloat16(), k.bfloat16(), cos, sin)
    assert torch.equal(low[0], turn.__wrapped__(q.bfloat16(), k.bfloat16(), cos, sin)[0])


def test_what_turns_otherwise_is_kept():
    cohere = tiny_model("cohere")
    before = own_rotary(cohere)
    choose_layout(cohere)
    assert own_rotary(cohere) is before  # neighbours are turned
    hybrid = tiny_model("qwen3_5")  # a quarter of each head is turned
    choose_layout(hybrid)
    q, k, angles = drawn(1, 2, 3, 8), drawn(1, 1, 3, 8), drawn(1, 3, 2)
    turn = own_rotary(hybrid)
    for got, want in zip(
        turn(q, k, angles.cos(), angles.sin()), turn.__wrapped__(q, k, angles.cos(), angles.sin()), strict=True
    ):
        assert torch.equal(got, want)


def batch():
    rows = [{"input_ids": [5, 6, 5, 7, 9]}, {"input_ids": [9, 5, 3]}]
    return TokenCollator(Padding(pad_id=0))(rows)


def total(model, given, linear):
    if linear:
        return weighted_logp_sum(model, given, -torch.ones(given.input_ids.shape)).total
    return score_tokens(model, given, entropy=True).logps.square().sum()


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("pad", [None, 5])
def test_a_tied_weight_has_both_gradients(linear, pad):
    tied = tiny_model("smollm2", pad_token_id=pad)
    apart = copy.deepcopy(tied)
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach().clone())
    loss = total(tied, batch(), linear)
    loss.backward(retain_graph=True)
    total(apart, batch(), linear).backward()
    looked_up, head = apart.model.embed_tokens.weight.grad, apart.lm_head.weight.grad
    assert isinstance(tied.model.embed_tokens, TiedEmbedding) and type(apart.model.embed_tokens) is nn.Embedding
    assert looked_up[9].any() and looked_up[5].any() == (pad is None)
    torch.testing.assert_close(tied.lm_head.weight.grad, looked_up + head, rtol=1e-5, atol=1e-5)
    once = tied.lm_head.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(tied.lm_head.weight.grad, 2 * once, rtol=1e-6, atol=1e-6)
    # Outside of a scored call it is the plain lookup, and a copy of the model has its own weight.
    copied = copy.deepcopy(tied)
    total(copied, batch(), linear).backward()
    torch.testing.assert_close(copied.lm_head.weight.grad, once, rtol=1e-5, atol=1e-5)
    tied.zero_grad()
    tied(torch.tensor([[9, 6]])).logits.sum().backward()
    assert tied.lm_head.weight.grad.any()


def test_a_tied_weight_that_is_looked_up_without_gradient():
    model = tiny_model("smollm2")
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: torch.set_grad_enabled(False) and None)
    model.model.embed_tokens.register_forward_hook(lambda *_: torch.set_grad_enabled(True) and None)
    score_tokens(model, batch()).logps.sum().backward()
    assert model.lm_head.weight.grad[4].any()


def test_a_tied_weight_when_the_head_has_no_part_in_the_loss():
    model = tiny_model("smollm2")
    seen = {}
    hook = model.model.embed_tokens.register_forward_hook(lambda _, __, out: seen.update(rows=out))
    score_tokens(model, batch())
    hook.remove()
    seen["rows"].sum().backward()
    grad = model.lm_head.weight.grad
    assert grad[5].eq(3).all() and grad[4].eq(0).all()
