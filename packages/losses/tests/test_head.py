import itertools

import pytest
import torch
from posttrain_losses import tiles, token_scores, weighted_logp_sum

PLAIN = {"softcap": None, "scale": 1.0, "temperature": 1.0}
BENT = {"softcap": 5.0, "scale": 0.7, "temperature": 1.3}


def reference(hidden, weight, targets, bias=None, softcap=None, scale=1.0, temperature=1.0):
    """Log-probabilities and entropies from full logits in float64."""
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logps = (z / temperature).log_softmax(-1)
    return logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1), logps.argmax(-1) == targets


def inputs(n, v, h, bias=False, dtype=torch.float32, seed=0):
    make = torch.Generator().manual_seed(seed)
    shapes = [(n, h), (v, h)] + ([(v,)] if bias else [])
    leaves = [torch.randn(s, generator=make).to(dtype).requires_grad_() for s in shapes]
    targets = torch.randint(0, v, (n,), generator=make)
    return leaves, targets, torch.randn(n, generator=make), torch.randn(n, generator=make)


def close(actual, expected, tolerance=2e-5):
    for a, e in zip(actual, expected, strict=True):
        scale = max(1.0, e.abs().max().item()) if e.numel() else 1.0
        assert (a.double() - e.double()).abs().max().item() <= tolerance * scale if e.numel() else a.shape == e.shape


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles and blocks so small that little inputs have many of each, the last ones ragged."""
    monkeypatch.setattr(tiles, "token_rows", lambda n, v, size: min(n, 7))
    monkeypatch.setattr(tiles, "vocab_tile", lambda n, v, size: (min(n, 16), min(v, 24)))
    monkeypatch.setattr(tiles, "block_rows", lambda tile, temporaries: min(3, tile.shape[0]))


@pytest.mark.parametrize("n, v", [(37, 101), (1, 7), (48, 96), (5, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [PLAIN, BENT])
@pytest.mark.parametrize("tiled", [False, True])
def test_scores_and_gradients_equal_the_full_logits(n, v, bias, options, tiled, request):
    if tiled:
        request.getfixturevalue("small_tiles")
    leaves, targets, g, e = inputs(n, v, 16, bias)
    scores = token_scores(*leaves[:2], targets, bias=leaves[2] if bias else None, entropy=True, **options)
    logps, entropy, top1 = reference(*leaves[:2], targets, leaves[2] if bias else None, **options)
    close([scores.logps, scores.entropy], [logps, entropy])
    assert scores.logps.dtype == scores.entropy.dtype == torch.float32 and torch.equal(scores.top1, top1)
    assert not scores.top1.requires_grad
    for mix in itertools.product((0, 1), repeat=2):
        if not any(mix):
            continue
        ours = sum(m * (x * w).sum() for m, x, w in zip(mix, scores, (g, e), strict=False) if m)
        theirs = sum(m * (x * w).sum() for m, x, w in zip(mix, (logps, entropy), (g, e), strict=True) if m)
        close(*(torch.autograd.grad(x, leaves, retain_graph=True) for x in (ours, theirs)))


@pytest.mark.parametrize("reweight", [None, torch.exp])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [PLAIN, BENT])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_weighted_sum_equals_the_full_logits(reweight, bias, options, entropy, tiled, request):
    if tiled:
        request.getfixturevalue("small_tiles")
    leaves, targets, weights, _ = inputs(37, 101, 16, bias)
    shift = leaves[2] if bias else None
    weights[::5] = 0
    total, scores = weighted_logp_sum(
        *leaves[:2], targets, weights, reweight=reweight, bias=shift, entropy=entropy, **options
    )
    logps, heat, top1 = reference(*leaves[:2], targets, shift, **options)
    expected = (weights * (1 if reweight is None else reweight(logps.detach())) * logps).sum()
    close([total, scores.logps], [expected, logps])
    assert torch.equal(scores.top1, top1) and not scores.logps.requires_grad
    assert (scores.entropy is not None) == entropy
    if entropy:
        close([scores.entropy], [heat])
    close(torch.autograd.grad(3 * total, leaves), torch.autograd.grad(3 * expected, leaves))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [PLAIN, BENT])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_collision_entropy_equals_the_full_logits_and_changes_nothing_else(bias, options, entropy, tiled, request):
    if tiled:
        request.getfixturevalue("small_tiles")
    leaves, targets, g, _ = inputs(37, 101, 16, bias)
    shift = leaves[2] if bias else None
    plain = token_scores(*leaves[:2], targets, bias=shift, entropy=entropy, **options)
    scores = token_scores(*leaves[:2], targets, bias=shift, entropy=entropy, collision=True, **options)
    every = torch.arange(101).repeat(37)
    p = reference(leaves[0].repeat_interleave(101, 0), leaves[1], every, shift, **options)[0].exp().view(37, 101)
    close([scores.collision], [-p.square().sum(1).log()])
    assert plain.collision is None and not scores.collision.requires_grad
    assert torch.equal(scores.logps, plain.logps) and torch.equal(scores.top1, plain.top1)
    assert (scores.entropy is None) if not entropy else torch.equal(scores.entropy, plain.entropy)
    close(*(torch.autograd.grad((x.logps * g).sum(), leaves) for x in (scores, plain)), tolerance=0)


def test_collision_entropy_of_sure_and_of_even_distributions():
    sure = token_scores(1000 * torch.eye(4), torch.eye(4), torch.arange(4), collision=True)
    assert sure.collision.tolist() == [0.0] * 4
    even = token_scores(torch.zeros(2, 4), torch.randn(50, 4), torch.arange(2), collision=True)
    close([even.collision], [torch.full((2,), 50.0).log()])


def test_tiles_do_not_change_the_result(monkeypatch):
    leaves, targets, weights, _ = inputs(13, 70, 16)

    def run():
        scores = token_scores(*leaves, targets, entropy=True)
        total = weighted_logp_sum(*leaves, targets, weights).total
        grads = torch.autograd.grad((scores.logps * weights).sum() + scores.entropy.sum() + total, leaves)
        return [*scores[:2], total, *grads]

    whole = run()
    for rows, columns in ((1, 1), (8, 8), (5, 33), (13, 69)):
        monkeypatch.setattr(tiles, "token_rows", lambda n, v, size, r=rows: r)
        monkeypatch.setattr(tiles, "vocab_tile", lambda n, v, size, r=rows, c=columns: (r, c))
        close(run(), whole)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_low_precision_inputs_have_float32_logits(dtype, tolerance):
    leaves, targets, g, e = inputs(40, 200, 32, True, dtype)
    hidden, weight, bias = leaves
    scores = token_scores(hidden, weight, targets, bias=bias, entropy=True)
    logps, entropy, _ = reference(hidden, weight, targets, bias)
    close([scores.logps, scores.entropy], [logps, entropy])  # of the rounded inputs, to float32
    assert scores.logps.dtype == torch.float32
    expected = torch.autograd.grad((logps * g).sum() + (entropy * e).sum(), leaves, retain_graph=True)
    actual = torch.autograd.grad((scores.logps * g).sum() + (scores.entropy * e).sum(), leaves)
    assert all(x.dtype == dtype for x in actual)
    close(actual, expected, tolerance)
    total = weighted_logp_sum(hidden, weight, targets, g, bias=bias).total
    close(torch.autograd.grad(total, leaves), torch.autograd.grad((logps * g).sum(), leaves), tolerance)


def test_mixed_dtypes_keep_the_dtype_of_each_input():
    (hidden, weight, bias), targets, g, _ = inputs(9, 30, 8, True)
    leaves = [hidden.detach().bfloat16().requires_grad_(), weight, bias.detach().half().requires_grad_()]
    expected = torch.autograd.grad((reference(*leaves[:2], targets, leaves[2])[0] * g).sum(), leaves)
    for total in (
        weighted_logp_sum(*leaves[:2], targets, g, bias=leaves[2]).total,
        (token_scores(*leaves[:2], targets, bias=leaves[2]).logps * g).sum(),
    ):
        actual = torch.autograd.grad(total, leaves)
        assert [x.dtype for x in actual] == [torch.bfloat16, torch.float32, torch.float16]
        close(actual, expected, 5e-3)


def test_autocast_on_cpu_does_not_round_the_logits():
    leaves, targets, g, _ = inputs(20, 50, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(*leaves, targets)
        total = weighted_logp_sum(*leaves, targets, g).total
        grads = torch.autograd.grad((scores.logps * g).sum() + total, leaves)
    logps = reference(*leaves, targets)[0]
    close([scores.logps, total], [logps, (logps * g).sum()])
    close(grads, torch.autograd.grad(2 * (logps * g).sum(), leaves))


def test_gradcheck_in_float64():
    leaves, targets, g, _ = inputs(4, 9, 3, True, torch.float64)

    def scores(hidden, weight, bias):
        return token_scores(hidden, weight, targets, bias=bias, entropy=True, **BENT)[:2]

    def total(hidden, weight, bias):
        return weighted_logp_sum(hidden, weight, targets, g, bias=bias, **BENT).total

    assert torch.autograd.gradcheck(scores, leaves) and torch.autograd.gradcheck(total, leaves)
    assert scores(*leaves)[0].dtype == torch.float64


@pytest.mark.parametrize("call", ["scores", "sum"])
@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients_are_computed(call, wanted):
    (hidden, weight), targets, g, _ = inputs(6, 20, 4)
    leaves = [x.detach().requires_grad_(w) for x, w in zip((hidden, weight), wanted, strict=True)]
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket in (torch.ops.aten.addmm_, torch.ops.aten.mm):
                products.append(func)
            return func(*args, **(kwargs or {}))

    with Count():
        if call == "scores":
            out = (token_scores(*leaves, targets).logps * g).sum()
        else:
            out = weighted_logp_sum(*leaves, targets, g).total
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.backward()
    assert len(products) == 1 + sum(wanted) + (call == "scores" and any(wanted))
    expected = (reference(hidden, weight, targets)[0] * g).sum()
    for leaf, full, w in zip(leaves, torch.autograd.grad(expected, (hidden, weight)), wanted, strict=True):
        assert (leaf.grad is not None) == w
        if w:
            close([leaf.grad], [full])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_give_zero_and_zero_gradients(dtype):
    leaves, targets, weights, _ = inputs(0, 11, 4, True, dtype)
    scores = token_scores(*leaves[:2], targets, bias=leaves[2], entropy=True, collision=True)
    assert [x.shape for x in scores] == [(0,)] * 4
    result = weighted_logp_sum(*leaves[:2], targets, weights, bias=leaves[2], entropy=True)
    assert result.total.item() == 0 and result.scores.entropy.shape == (0,)
    for out in (scores.logps.sum() + scores.entropy.sum(), result.total):
        for grad, leaf in zip(torch.autograd.grad(out, leaves), leaves, strict=True):
            assert grad.shape == leaf.shape and grad.dtype == dtype and not grad.any()


def test_nan_reaches_its_own_token_alone():
    (hidden, weight), targets, _, _ = inputs(5, 12, 4)
    hidden = hidden.detach().index_fill(0, torch.tensor([2]), float("nan"))
    scores = token_scores(hidden, weight, targets, entropy=True)
    assert scores.logps.isnan().tolist() == scores.entropy.isnan().tolist() == [False, False, True, False, False]
    total = weighted_logp_sum(hidden, weight, targets, torch.ones(5)).total
    total.backward()
    assert total.isnan() and weight.grad.isnan().any()


@pytest.mark.parametrize("bad", [-100, 12, -1])
def test_a_target_outside_the_vocabulary_is_nan(bad):
    (hidden, weight), targets, _, _ = inputs(5, 12, 4)
    targets[3] = bad
    scores = token_scores(hidden, weight, targets)
    assert scores.logps.isnan().tolist() == [False] * 3 + [True, False] and not scores.top1[3]
    result = weighted_logp_sum(hidden, weight, targets, torch.ones(5))
    assert result.scores.logps.isnan().sum() == 1 and result.total.isnan()


def test_vocabulary_masked_by_minus_infinity():
    leaves, targets, g, e = inputs(6, 12, 4)
    bias = torch.zeros(12)
    bias[8:] = float("-inf")
    targets = targets % 8
    scores = token_scores(*leaves, targets, bias=bias, entropy=True)
    logps, entropy, _ = reference(leaves[0], leaves[1][:8], targets)
    close(scores[:2], [logps, entropy])
    expected = torch.autograd.grad((logps * g + entropy * e).sum(), leaves)
    close(torch.autograd.grad((scores.logps * g + scores.entropy * e).sum(), leaves), expected)


def test_an_impossible_target_of_no_weight_counts_for_nothing():
    (hidden, weight), targets, _, _ = inputs(5, 12, 4)
    bias = torch.zeros(12)
    bias[11], targets[2] = float("-inf"), 11
    targets[:2], targets[3:] = 3, 5
    weights = torch.ones(5)
    weights[2] = 0
    result = weighted_logp_sum(hidden, weight, targets, weights, bias=bias)
    assert result.scores.logps[2] == float("-inf")
    kept = torch.tensor([0, 1, 3, 4])
    fewer = weighted_logp_sum(hidden[kept], weight, targets[kept], weights[kept], bias=bias)
    close([result.total], [fewer.total])
    close(*(torch.autograd.grad(found.total, (hidden, weight)) for found in (result, fewer)))


def test_huge_logits_neither_overflow_nor_lose_the_tail():
    hidden, weight = torch.tensor([[1.0], [1.0]]), torch.tensor([[1e4], [0.0], [-1e4]])
    scores = token_scores(hidden, weight, torch.tensor([0, 2]), entropy=True)
    assert scores.logps.tolist() == [0.0, -2e4] and scores.entropy.tolist() == [0.0, 0.0]
    assert scores.top1.tolist() == [True, False]


def test_checkpointing_recomputes_to_the_same_gradients():
    (hidden, weight), targets, g, _ = inputs(9, 30, 8)
    for reentrant in (False, True):

        def head(h, w):
            return weighted_logp_sum(h, w, targets, g).total + token_scores(h, w, targets).logps.sum()

        plain = torch.autograd.grad(head(hidden, weight), (hidden, weight))
        saved = torch.utils.checkpoint.checkpoint(head, hidden, weight, use_reentrant=reentrant)
        hidden.grad = weight.grad = None
        saved.backward()
        close([hidden.grad, weight.grad], plain, 1e-6)


def test_second_backward_and_second_order_are_errors():
    (hidden, weight), targets, g, _ = inputs(4, 9, 3)
    total = weighted_logp_sum(hidden, weight, targets, g).total
    once = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    close(torch.autograd.grad(2 * total, (hidden, weight), retain_graph=False), [2 * x for x in once])
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        total.backward()
    logps = token_scores(hidden, weight, targets).logps
    (grad,) = torch.autograd.grad(logps.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


def test_head_gradients_become_grad_without_a_copy():
    (hidden, weight), targets, g, _ = inputs(4, 9, 3)
    total = weighted_logp_sum(hidden, weight, targets, g).total
    made = [x.data_ptr() for x in total.grad_fn.grads[:2]]
    total.backward()
    assert [hidden.grad.data_ptr(), weight.grad.data_ptr()] == made


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden has shape \(2, 3, 4\).*flatten"),
        ({"weight": torch.zeros(9, 5)}, r"weight \(9, 5\)"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets has shape \(3,\)"),
        ({"targets": torch.zeros(2)}, "targets has dtype torch.float32"),
        ({"bias": torch.zeros(4)}, r"bias has shape \(4,\)"),
        ({"weights": torch.zeros(3)}, r"weights has shape \(3,\)"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"softcap": -1.0}, "softcap is -1.0"),
        ({"scale": float("inf")}, "scale is inf"),
    ],
)
def test_bad_arguments_are_named(change, message):
    given = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(9, 4), "targets": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        weighted_logp_sum(**{**given, "weights": torch.ones(2), **change})
    if "weights" not in change:
        with pytest.raises(ValueError, match=message):
            token_scores(**{**given, **change})
