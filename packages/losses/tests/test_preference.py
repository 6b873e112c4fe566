"""Losses of pairs, labels and rewards against their plain formulas in float64, and the values of the papers."""

import ast
import doctest
import importlib
import inspect
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from posttrain_losses import preference
from posttrain_losses.preference import Pairs
from torch._subclasses.fake_tensor import FakeTensorMode

DIVERGENCES = {
    "reverse_kl": (preference.reverse_kl, lambda t: math.log(t)),
    "forward_kl": (preference.forward_kl, lambda t: 1 - 1 / t),
    "js": (preference.js_divergence, lambda t: math.log(2 * t / (t + 1))),
    "alpha": (preference.alpha_divergence, lambda t: (t**-0.5 - 1) / -0.5),
    "alpha 1.7": (partial(preference.alpha_divergence, alpha=1.7), lambda t: (t**0.7 - 1) / 0.7),
}


def sig(x):
    return 1 / (1 + math.exp(-x))


def logsig(x):
    return math.log(sig(x))


# The plain formulas, one pair at a time: b beta, e label smoothing, lc and lr log-ratios, D and A differences of scores
# and of their averages per token, mc and mr average log-probabilities.
def smooth(z, e):
    return -(1 - e) * logsig(z) - e * logsig(-z)


def exo(z, e):
    q = sig(z)
    return q * (math.log(q) - math.log(1 - e)) + (1 - q) * (math.log(1 - q) - math.log(e))


def disco(z, tau):
    m = sig(z / tau)
    return (1 - m) * -logsig(z) + m * math.exp(-z)


CONTRASTS = {
    "sigmoid": (preference.sigmoid, lambda v: -logsig(v.b * v.D)),
    "sigmoid smoothed": (partial(preference.sigmoid, label_smoothing=0.2), lambda v: smooth(v.b * v.D, 0.2)),
    "sigmoid_norm": (preference.sigmoid_norm, lambda v: -logsig(v.b * v.A)),
    "sigmoid_norm smoothed": (partial(preference.sigmoid_norm, label_smoothing=0.2), lambda v: smooth(v.b * v.A, 0.2)),
    "hinge": (preference.hinge, lambda v: max(0.0, 1 - v.b * v.D)),
    "ipo": (preference.ipo, lambda v: (v.A - 1 / (2 * v.b)) ** 2),
    "exo_pair": (partial(preference.exo_pair, label_smoothing=0.1), lambda v: exo(v.b * v.D, 0.1)),
    "robust": (
        partial(preference.robust, label_smoothing=0.2),
        lambda v: (-0.8 * logsig(v.b * v.D) + 0.2 * logsig(-v.b * v.D)) / 0.6,
    ),
    "discopop": (partial(preference.discopop, tau=0.4), lambda v: disco(v.b * v.D, 0.4)),
}
SINGLES = {
    "nca_pair": (
        preference.nca_pair,
        lambda v: -logsig(v.b * v.lc) - 0.5 * logsig(-v.b * v.lc) - 0.5 * logsig(-v.b * v.lr),
    ),
    "bco_pair": (preference.bco_pair, lambda v: -logsig(v.b * v.lc) - logsig(-v.b * v.lr)),
    "sppo_hard": (preference.sppo_hard, lambda v: (v.lc - 0.5 / v.b) ** 2 + (v.lr + 0.5 / v.b) ** 2),
    "apo_zero": (preference.apo_zero, lambda v: 1 - sig(v.b * v.lc) + sig(v.b * v.lr)),
    "apo_down": (preference.apo_down, lambda v: sig(v.b * v.lc) + 1 - sig(v.b * (v.lc - v.lr))),
    "sft": (preference.sft, lambda v: -v.pc),
    "simpo": (partial(preference.simpo, gamma=0.3), lambda v: -logsig(v.b * (v.mc - v.mr) - 0.3)),
}
SORTED = {
    "aot": (preference.aot, 0.0),
    "aot smoothed": (partial(preference.aot, label_smoothing=0.2), 0.2),
    "aot_unpaired": (preference.aot_unpaired, 0.0),
    "aot_unpaired smoothed": (partial(preference.aot_unpaired, label_smoothing=0.2), 0.2),
}
EVERY = {name: loss for name, (loss, _) in {**CONTRASTS, **SINGLES, **SORTED}.items()}


class Values:
    """The letters of the formulas for one row of pairs."""

    def __init__(self, pairs, row, b, score=math.log):
        self.b = b
        self.pc, self.pr, rc, rr, nc, nr = (float(field[row]) for field in pairs)
        self.lc, self.lr = self.pc - rc, self.pr - rr
        sc, sr = score(math.exp(self.lc)), score(math.exp(self.lr))
        self.D, self.A = sc - sr, sc / nc - sr / nr
        self.mc, self.mr = self.pc / nc, self.pr / nr


def some_pairs(rows=7, dtype=torch.float32, spread=3.0):
    generator = torch.Generator().manual_seed(0)
    reference = -20 - 10 * torch.rand(2, rows, generator=generator)
    policy = reference + spread * torch.randn(2, rows, generator=generator)
    return Pairs(*policy.to(dtype), *reference.to(dtype), *torch.randint(1, 9, (2, rows), generator=generator))


def check(loss, formula, b, score=math.log):
    pairs = some_pairs()
    expected = torch.tensor([formula(Values(pairs, row, b, score)) for row in range(7)], dtype=torch.float64)
    actual = loss(pairs, b)
    assert actual.dtype == torch.float32 and actual.shape == (7,)
    torch.testing.assert_close(actual.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(loss(pairs, beta=b), actual, rtol=0, atol=0)
    wide = loss(Pairs(*(field.double() for field in pairs)), b)
    torch.testing.assert_close(wide, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("b", [0.1, 0.7])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", CONTRASTS)
def test_contrasts_under_every_divergence(name, divergence, b):
    loss, formula = CONTRASTS[name]
    function, score = DIVERGENCES[divergence]
    check(partial(loss, divergence=function), formula, b, score)


@pytest.mark.parametrize("b", [0.1, 0.7])
@pytest.mark.parametrize("name", [*CONTRASTS, *SINGLES])
def test_losses_equal_their_formulas(name, b):
    check(*{**CONTRASTS, **SINGLES}[name], b)


def test_every_loss_of_pairs_is_called_alike():
    """An app passes pairs and beta to whatever the flag names; what else there is has a default."""
    for loss in EVERY.values():
        names = list(inspect.signature(loss).parameters.values())
        assert [p.name for p in names[:2]] == ["pairs", "beta"]
        assert all(p.default is not inspect.Parameter.empty for p in names[1:])


@pytest.mark.parametrize("name", EVERY)
def test_gradients(name):
    fixed = some_pairs(dtype=torch.float64)

    def loss(chosen, rejected):
        return EVERY[name](fixed._replace(chosen_logps=chosen, rejected_logps=rejected), 0.3)

    inputs = [x.clone().requires_grad_() for x in fixed[:2]]
    assert torch.autograd.gradcheck(loss, inputs)


@pytest.mark.parametrize("name", EVERY)
def test_reference_has_no_gradient(name):
    leaves = [x.clone().requires_grad_() for x in some_pairs()[:4]]
    EVERY[name](Pairs(*leaves, *some_pairs()[4:])).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[2].grad is None and leaves[3].grad is None


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_raised_before_it_is_subtracted(name, dtype):
    pairs = some_pairs(dtype=dtype)
    actual = EVERY[name](pairs)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, EVERY[name](Pairs(*(x.float() for x in pairs))), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_far_from_the_reference_values_and_gradients_are_finite(name, size):
    signs = torch.tensor([[1.0, 1, -1, -1], [1, -1, 1, -1]]) * size
    leaves = [x.clone().requires_grad_() for x in signs]
    pairs = Pairs(*leaves, *torch.zeros(2, 4), *torch.ones(2, 4))
    loss = EVERY[name](pairs, 1.0)
    grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    assert loss.isfinite().all()
    assert all(g is None or g.isfinite().all() for g in grads)
    wide = EVERY[name](Pairs(*(x.double() for x in pairs)), 1.0)
    torch.testing.assert_close(loss.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("name", ["sigmoid", "sigmoid smoothed", "hinge", "exo_pair", "robust", "discopop"])
def test_far_from_the_reference_under_every_divergence(name, divergence):
    leaves = [x.clone().requires_grad_() for x in torch.tensor([[300.0, 300, -300, -300], [300, -300, 300, -300]])]
    pairs = Pairs(*leaves, *torch.zeros(2, 4))
    loss = partial(EVERY[name], divergence=DIVERGENCES[divergence][0])(pairs)
    assert loss.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss.sum(), leaves))


def test_small_tails_keep_their_digits():
    """One minus a sigmoid near 1 would be 0 in float32."""
    far = Pairs(*torch.tensor([[40.0, -40.0, 0.0, 0.0]]).T)
    tail = math.exp(-40)
    assert preference.sigmoid(far, 1.0).item() == pytest.approx(math.exp(-80), rel=1e-5)
    assert preference.apo_zero(far, 1.0).item() == pytest.approx(2 * tail, rel=1e-5)
    assert preference.apo_down(far, 1.0).item() == pytest.approx(1.0)
    kto = preference.kto_loss(torch.tensor([40.0, -40.0]), torch.tensor([True, False]), 0.0, beta=1.0)
    assert kto.tolist() == pytest.approx([tail, tail], rel=1e-5)
    assert preference.forward_kl(torch.tensor(1e-6)).item() == pytest.approx(1e-6, rel=1e-5)


SAME = {
    "sigmoid": math.log(2),
    "sigmoid smoothed": math.log(2),
    "sigmoid_norm": math.log(2),
    "hinge": 1.0,
    "ipo": 25.0,
    "robust": math.log(2),
    "discopop": (math.log(2) + 1) / 2,
    "nca_pair": 2 * math.log(2),
    "bco_pair": 2 * math.log(2),
    "sppo_hard": 50.0,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "aot": math.log(2),
    "aot_unpaired": math.log(2),
}


@pytest.mark.parametrize("name", SAME)
def test_value_where_policy_and_reference_are_the_same(name):
    pairs = some_pairs(rows=5, spread=0.0)
    torch.testing.assert_close(EVERY[name](pairs), torch.full((5,), SAME[name]), rtol=1e-6, atol=1e-6)


def slopes(loss, chosen, rejected):
    """Gradient of the loss of one pair, of 4 tokens a side, in its two log-ratios."""
    x = torch.tensor([[chosen], [rejected]], dtype=torch.float64, requires_grad=True)
    loss(Pairs(*x, *torch.zeros(2, 1), *torch.full((2, 1), 4))).sum().backward()
    return pytest.approx(x.grad.flatten().tolist(), abs=1e-12)


def test_optima_and_gradients_of_the_papers():
    even = [0.0, 0.0]
    # arXiv 2310.12036: the margin is 1 / (2 tau), here of averages over 4 tokens.
    assert even == slopes(partial(preference.ipo, beta=0.5), 3.0, -1.0)
    # arXiv 2405.00675: the log-ratios are eta (P - 1/2) with P of 1 and 0.
    assert even == slopes(partial(preference.sppo_hard, beta=0.5), 1.0, -1.0)
    # arXiv 2402.00856 and Mitchell 2023: the policy's preference is the smoothed label.
    assert even == slopes(partial(preference.exo_pair, beta=1.0, label_smoothing=0.1), math.log(9), 0.0)
    assert even == slopes(partial(preference.sigmoid, beta=1.0, label_smoothing=0.1), math.log(9), 0.0)
    # arXiv 2305.18290, section 4: beta times the probability of the wrong order.
    assert [-0.3 * sig(-0.6), 0.3 * sig(-0.6)] == slopes(partial(preference.sigmoid, beta=0.3), 1.0, -1.0)
    # arXiv 2402.05369, figure of gradients: chosen rises until sigma = 2/3 and falls above.
    assert [0.0, 1 / 6] == slopes(partial(preference.nca_pair, beta=1.0), math.log(2), -math.log(2))


def test_robust_is_unbiased_under_flipped_labels():
    """arXiv 2403.00409: the mean over labels that are wrong at the rate is the loss of right labels."""
    pairs = some_pairs(dtype=torch.float64)
    flipped = Pairs(*(pairs[i] for i in (1, 0, 3, 2, 5, 4)))
    mean = sum(w * preference.robust(p, label_smoothing=0.3) for w, p in ((0.7, pairs), (0.3, flipped)))
    torch.testing.assert_close(mean, preference.sigmoid(pairs))


def test_divergences_agree_where_they_meet():
    l = torch.linspace(-3, 3, 9, dtype=torch.float64)  # noqa: E741
    alpha = preference.alpha_divergence
    torch.testing.assert_close(alpha(l, alpha=0.0), preference.forward_kl(l))
    torch.testing.assert_close(alpha(l, alpha=1.0), l)
    torch.testing.assert_close(alpha(l, alpha=1 + 1e-5), l, rtol=1e-4, atol=1e-4)
    for function, score in DIVERGENCES.values():
        torch.testing.assert_close(function(l), torch.tensor([score(math.exp(x)) for x in l], dtype=torch.float64))
        assert torch.autograd.gradcheck(function, l.clone().requires_grad_())
        assert function(torch.zeros(1)).item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", SORTED)
def test_sorted_losses(name):
    loss, e = SORTED[name]
    pairs = some_pairs(dtype=torch.float64)
    pc, pr, rc, rr = (x.tolist() for x in pairs[:4])
    if name.startswith("aot_unpaired"):
        first, second = ([p - r for p, r in zip(*x, strict=True)] for x in ((pc, rc), (pr, rr)))
    else:
        first, second = ([c - r for c, r in zip(*x, strict=True)] for x in ((pc, pr), (rc, rr)))
    expected = [smooth(0.5 * (a - b), e) for a, b in zip(sorted(first), sorted(second), strict=True)]
    actual = loss(pairs, 0.5)
    assert sorted(actual.tolist()) == pytest.approx(sorted(expected))
    ranks = [sorted(first).index(x) for x in first]
    assert actual.tolist() == pytest.approx([expected[k] for k in ranks])
    # One pair alone has nothing to sort.
    alone = loss(Pairs(*(x[:1] for x in pairs)), 0.5)
    torch.testing.assert_close(alone, preference.sigmoid(Pairs(*(x[:1] for x in pairs)), 0.5, label_smoothing=e))
    # Filler, wherever it stands, takes no rank from a real pair.
    filler = torch.tensor([1, 4])
    places = torch.tensor([i for i in range(9) if i not in filler])
    padded = Pairs(*(torch.zeros(9, dtype=x.dtype).index_copy(0, places, x) for x in pairs))
    torch.testing.assert_close(loss(padded, 0.5)[places], actual)
    assert loss(padded, 0.5)[filler].isfinite().all()


def test_length_desensitised_sum():
    logps = -torch.rand(3, 2, 6)
    lengths = torch.tensor([[6, 2], [0, 4], [3, 3]])
    mask = torch.arange(6) < lengths[..., None]
    logps[~mask] = float("nan")
    logps.requires_grad_()
    shared = lengths.amin(-1, keepdim=True)
    actual = preference.length_desensitised_sum(logps, mask, shared, 0.3)
    for p in range(3):
        for g in range(2):
            row, s, n = logps[p, g].double(), int(shared[p]), int(lengths[p, g])
            expected = row[:s].sum() + 0.3 * row[s:n].sum()
            torch.testing.assert_close(actual[p, g].double(), expected, rtol=1e-5, atol=1e-6)
    (grad,) = torch.autograd.grad(actual.sum(), logps)
    assert grad[0, 0].tolist() == pytest.approx([1, 1, 0.3, 0.3, 0.3, 0.3])
    assert grad[2, 1].tolist() == [1, 1, 1, 0, 0, 0]
    plain = torch.where(mask, logps, 0).sum(-1)
    torch.testing.assert_close(preference.length_desensitised_sum(logps, mask, shared, 1.0), plain)
    assert preference.length_desensitised_sum(logps.bfloat16(), mask, shared, 0.0).dtype == torch.float32
    with pytest.raises(ValueError, match=r"alpha is 1.5; give a weight from 0"):
        preference.length_desensitised_sum(logps, mask, shared, 1.5)
    with pytest.raises(ValueError, match=r"mask has shape \(3, 6\)"):
        preference.length_desensitised_sum(logps, mask[:, 0], shared, 0.5)


def test_wpo_weights():
    logits = torch.randn(3, 2, 5, 11, dtype=torch.float64)
    p = logits.softmax(-1)
    targets = torch.randint(0, 11, (3, 2, 5))
    logps = p.log().gather(-1, targets[..., None])[..., 0].requires_grad_()
    mask = torch.arange(5) < torch.tensor([[5, 2], [1, 4], [0, 3]])[..., None]
    actual = preference.wpo_weights(logps, -p.square().sum(-1).log(), mask)
    assert not actual.requires_grad
    for row in range(3):
        expected = 1.0
        for side in range(2):
            n = int(mask[row, side].sum())
            aligned = [
                math.log(p[row, side, t, targets[row, side, t]] / p[row, side, t].square().sum()) for t in range(n)
            ]
            expected *= math.exp(sum(aligned) / n) if n else 1.0
        assert actual[row].item() == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"collision has shape \(3, 5\)"):
        preference.wpo_weights(logps, p[:, 0, :, 0], mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kl", [0.0, 2.5, torch.tensor(2.5, requires_grad=True)])
def test_kto(dtype, kl):
    ratios = torch.tensor([3.0, -2.0, 0.5, -7.0, 0.0], dtype=dtype, requires_grad=True)
    labels = torch.tensor([True, True, False, False, True])
    loss = preference.kto_loss(ratios, labels, kl, beta=0.4, desirable_weight=1.5, undesirable_weight=0.7)
    z = float(kl.detach() if isinstance(kl, torch.Tensor) else kl)
    expected = [
        1.5 * (1 - sig(0.4 * (l - z))) if good else 0.7 * (1 - sig(0.4 * (z - l)))
        for l, good in zip(ratios.tolist(), labels.tolist(), strict=True)  # noqa: E741
    ]
    assert loss.tolist() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: preference.kto_loss(x, labels, kl), ratios)
    loss.sum().backward()
    assert not isinstance(kl, torch.Tensor) or kl.grad is None
    options = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.7}
    unpaired = preference.apo_zero_unpaired(ratios, labels, kl, **options)
    anchored = [
        1.5 * (1 - sig(0.4 * l)) if good else 0.7 * sig(0.4 * l)
        for l, good in zip(ratios.tolist(), labels.tolist(), strict=True)  # noqa: E741
    ]
    assert unpaired.tolist() == pytest.approx(anchored, rel=1e-5)
    pair = Pairs(*torch.tensor([[3.0, -2.0, 0.0, 0.0]]).T)
    halves = preference.apo_zero_unpaired(torch.tensor([3.0, -2.0]), torch.tensor([True, False]))
    torch.testing.assert_close(halves.sum(), preference.apo_zero(pair).sum())
    with pytest.raises(ValueError, match=r"labels has shape \(5, 1\); give one per completion, \(5,\)"):
        preference.kto_loss(ratios, labels[:, None], kl)


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_kto_and_rewards_far_out(size):
    x = torch.tensor([size, -size], requires_grad=True)
    for value in (
        preference.kto_loss(x, torch.tensor([True, False]), 1.0),
        preference.bradley_terry_loss(x, -x),
        preference.reward_centering(x, x / 2),
    ):
        assert value.isfinite().all() and torch.autograd.grad(value.sum(), x)[0].isfinite().all()
    assert preference.bradley_terry_loss(x, -x).tolist() == pytest.approx([0.0, 2 * size])


def test_rewards():
    chosen, rejected, margins = torch.randn(3, 6, dtype=torch.float64)
    plain = [-logsig(c - r) for c, r in zip(chosen, rejected, strict=True)]
    assert preference.bradley_terry_loss(chosen, rejected).tolist() == pytest.approx(plain)
    shifted = [-logsig(c - r - m) for c, r, m in zip(chosen, rejected, margins, strict=True)]
    assert preference.bradley_terry_loss(chosen, rejected, margins).tolist() == pytest.approx(shifted)
    centred = [(c + r) ** 2 for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)]
    assert preference.reward_centering(chosen, rejected).tolist() == pytest.approx(centred)
    leaves = [x.clone().requires_grad_() for x in (chosen, rejected)]
    assert torch.autograd.gradcheck(lambda c, r: preference.bradley_terry_loss(c, r, margins), leaves)
    assert torch.autograd.gradcheck(preference.reward_centering, leaves)
    assert preference.bradley_terry_loss(chosen.bfloat16(), rejected.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"rejected has shape \(6, 1\); give that of chosen, \(6,\)"):
        preference.bradley_terry_loss(chosen, rejected[:, None])
    with pytest.raises(ValueError, match=r"margins has shape \(1,\)"):
        preference.bradley_terry_loss(chosen, rejected, margins[:1])


def test_what_is_missing_or_out_of_range_is_named():
    pairs = some_pairs()
    with pytest.raises(ValueError, match="reference_rejected_logps is None.*simpo, sft"):
        preference.sigmoid(Pairs(pairs.chosen_logps, pairs.rejected_logps))
    for loss in (preference.ipo, preference.sigmoid_norm, preference.simpo):
        with pytest.raises(ValueError, match=r"chosen_lengths or rejected_lengths is None.*mask.sum\(-1\)"):
            loss(Pairs(*pairs[:4]))
    with pytest.raises(ValueError, match=r"rejected_logps has shape \(7, 1\); give that of chosen_logps, \(7,\)"):
        preference.sigmoid(pairs._replace(rejected_logps=pairs.rejected_logps[:, None]))
    with pytest.raises(ValueError, match=r"reference_chosen_logps has shape \(1,\)"):
        preference.aot(pairs._replace(reference_chosen_logps=torch.zeros(1)))
    for loss in (preference.sigmoid, preference.sigmoid_norm, preference.aot, preference.aot_unpaired):
        with pytest.raises(ValueError, match=r"label_smoothing is 0.6"):
            loss(pairs, label_smoothing=0.6)
    for value in (0.0, 0.6):
        with pytest.raises(ValueError, match=f"label_smoothing is {value}; exo_pair needs one above 0"):
            preference.exo_pair(pairs, label_smoothing=value)
    for value in (-0.1, 0.5):
        with pytest.raises(ValueError, match=f"label_smoothing is {value}; robust needs"):
            preference.robust(pairs, label_smoothing=value)


@pytest.mark.parametrize("name", EVERY)
def test_no_pairs(name):
    assert EVERY[name](Pairs(*torch.zeros(6, 0))).shape == (0,)


def everything(pairs, labels):
    ratios, _ = pairs.ratios()
    values = [loss(pairs) for loss in EVERY.values()]
    values += [
        loss(pairs, divergence=f) for loss in (preference.sigmoid, preference.ipo) for f, _ in DIVERGENCES.values()
    ]
    values += [preference.kto_loss(ratios, labels, ratios.mean()), preference.apo_zero_unpaired(ratios, labels)]
    values += [preference.bradley_terry_loss(*pairs[:2]), preference.reward_centering(*pairs[:2])]
    logps, mask = ratios[:, None, None].expand(-1, 2, 3), labels[:, None, None].expand(-1, 2, 3)
    values.append(preference.length_desensitised_sum(logps, mask, mask.sum(-1).amin(-1, keepdim=True), 0.5).sum(-1))
    values.append(preference.wpo_weights(logps, -logps, mask))
    return torch.stack(values).sum()


def test_no_shape_depends_on_data():
    with FakeTensorMode():
        x = torch.empty(2, 7, requires_grad=True)
        everything(Pairs(*x, *torch.empty(2, 7), *torch.empty(2, 7)), torch.ones(7, dtype=torch.bool)).backward()
        assert x.grad.shape == (2, 7)


@pytest.mark.slow
def test_compiles_to_one_graph():
    labels = torch.tensor([True, False, True, True, False, False, True])
    leaves = [x.clone().requires_grad_() for x in some_pairs()[:2]]
    pairs = some_pairs()._replace(chosen_logps=leaves[0], rejected_logps=leaves[1])
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True, dynamic=False)
    expected, actual = (torch.autograd.grad(f(pairs, labels), leaves) for f in (everything, compiled))
    torch.testing.assert_close(actual, expected)


def test_public_names_are_documented_with_an_example_and_a_source():
    folder = Path(preference.__file__).parent
    assert preference.__all__ == sorted(preference.__all__)
    tree = ast.parse((folder / "__init__.py").read_text())
    assert {type(node) for node in tree.body[1:]} == {ast.ImportFrom, ast.Assign}
    for name in preference.__all__:
        own = getattr(preference, name).__doc__
        assert ">>>" in own and (name == "Pairs" or "Source: " in own), name
    for module in sorted(file.stem for file in folder.glob("*.py") if file.stem != "__init__"):
        result = doctest.testmod(importlib.import_module(f"posttrain_losses.preference.{module}"))
        assert result.failed == 0 and result.attempted > 0
