"""The kernels of the fused head: tiles of logits that are made, used and overwritten in place.

Shapes: N tokens, V vocabulary, H hidden. Nothing here depends on the data for its shape, and no tensor has N x V elements.

Tile rules, from shapes alone. A tile holds at most 1/32 of the full logits where N >= 8,192, at any V:

- token tiles `(rows, V)`, used when gradients are made in one pass: rows = N / 32, at least 256, cut to 160 MB of logits;
- vocabulary tiles `(rows, columns)`, used everywhere else: at most 8,192 rows, and columns for 1/48 of the full logits,
  at least 32 MB, at most 96 MB.

Element-wise work runs over blocks of a tile: about a megabyte on CPU, so that its passes stay in the cache, and 32 MB
elsewhere when an operation needs a temporary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

MB = 1_000_000
ALIGN = 64  # tile sides are multiples of this wherever the limits allow
MAX_ROWS = 8192
FLOOR = -1000.0  # exp underflows to 0 far above it; keeps 0 * -inf out of the entropy


class Transform(NamedTuple):
    """What turns a raw product into a logit, and the dtypes at work."""

    softcap: float | None
    scale: float
    temperature: float
    operand: torch.dtype  # of the matrix products' inputs
    compute: torch.dtype  # of logits, softmax and accumulators

    @property
    def slope(self) -> float:
        """Derivative of the logit with respect to the raw product, but for the soft-cap's part."""
        return self.scale / self.temperature


class Scores(NamedTuple):
    """Per token `(N,)`: log-probability, entropy if asked, whether the target is the argmax, log of the normaliser."""

    logps: Tensor
    entropy: Tensor | None
    top1: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients of hidden, weight and bias, each None unless asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def no_autocast(device: torch.device) -> AbstractContextManager:
    """Keeps an outer autocast from rounding the float32 products inside."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def spans(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) pairs of at most `step` that cover `total`."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


def even_step(total: int, limit: int) -> int:
    """The step of at most `limit` that cuts `total` into equal spans, rounded up to a multiple of ALIGN."""
    limit = limit // ALIGN * ALIGN if limit >= ALIGN else max(limit, 1)
    pieces = -(-total // limit)
    step = -(-total // pieces)
    return min(limit, -(-step // ALIGN) * ALIGN, total)


def token_rows(n: int, v: int, itemsize: int) -> int:
    """Rows of a token tile `(rows, V)`."""
    return even_step(n, min(max(n // 32, 256), 160 * MB // (v * itemsize)))


def vocab_tile(n: int, v: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a vocabulary tile."""
    rows = even_step(n, MAX_ROWS)
    size = min(max(n * v * itemsize // 48, 32 * MB), 96 * MB)
    return rows, even_step(v, max(size // (rows * itemsize), ALIGN))


def block_rows(tile: Tensor, temporaries: bool) -> int:
    """Rows of a tile that are worked on at a time."""
    rows, columns = tile.shape
    if tile.device.type == "cpu" and not torch.compiler.is_compiling():
        size = 1 * MB
    elif temporaries:
        size = 32 * MB
    else:
        return rows
    return min(max(size // (columns * tile.element_size()), 1), rows)


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """`a @ b` in the dtype of `out`, into `out` where it can; CUDA multiplies low precision straight into float32."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b, beta=0)
    return torch.mm(a, b, out_dtype=out.dtype)


def accumulate(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """`total += a @ b`; `first` overwrites, so that `total` may be uninitialised."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=0 if first else 1)
    elif first:
        total.copy_(torch.mm(a, b, out_dtype=total.dtype))
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


def to_logits(block: Tensor, bias: Tensor | None, how: Transform, curve: bool) -> Tensor | None:
    """Raw products to logits in place; returns the soft-cap's derivative if `curve` and there is a soft-cap."""
    if bias is not None:
        block.add_(bias)
    if not how.softcap:
        if how.slope != 1.0:
            block.mul_(how.slope)
        return None
    block.mul_(how.scale / how.softcap).tanh_()
    derivative = 1 - block * block if curve else None
    block.mul_(how.softcap / how.temperature)
    return derivative


def pick(block: Tensor, targets: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Column of each row's target within a block that starts at vocabulary id `start`, and whether it is there."""
    column = targets - start
    inside = (column >= 0) & (column < block.shape[1])
    return column.clamp(0, block.shape[1] - 1).unsqueeze(1), inside


def exponentiate(block: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits x to exp(x - max) in place; returns per row max, sum of exp, and sum of exp * (x - max) if asked."""
    top = block.amax(1)
    block.sub_(top.unsqueeze(1))
    if not entropy:
        return top, block.exp_().sum(1), None
    shifted = block.clamp_min(FLOOR)
    total = block.exp_().sum(1)
    return top, total, shifted.mul_(block).sum(1)


def score(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: Transform, entropy: bool
) -> Scores:
    """Scores of every token, in vocabulary tiles that are merged as they come."""
    n, v = hidden.shape[0], weight.shape[0]
    new = {"dtype": how.compute, "device": hidden.device}
    # A finite lowest value: -inf - -inf would be NaN in the first merge.
    top = torch.full((n,), torch.finfo(how.compute).min, **new)
    total, energy = torch.zeros(n, **new), torch.zeros(n, **new)
    picked = torch.full((n,), float("nan"), **new)
    rows, columns = vocab_tile(n, v, how.compute.itemsize)
    hidden = hidden.to(how.operand)
    buffer = torch.empty(rows * columns if hidden.dtype == how.compute else 0, **new)
    for v0, v1 in spans(v, columns):
        part, part_bias = weight[v0:v1].to(how.operand), None if bias is None else bias[v0:v1].to(how.compute)
        for r0, r1 in spans(n, rows):
            tile = tile_product(hidden[r0:r1], part, buffer)
            pieces = []
            for i, j in spans(r1 - r0, block_rows(tile, entropy)):
                block = tile[i:j]
                to_logits(block, part_bias, how, curve=False)
                column, inside = pick(block, targets[r0 + i : r0 + j], v0)
                value = torch.where(inside, block.gather(1, column).squeeze(1), picked[r0 + i : r0 + j])
                pieces.append((value, *exponentiate(block, entropy)))
            del tile, block
            value, high, mass, heat = (None if p[0] is None else torch.cat(p) for p in zip(*pieces, strict=True))
            picked[r0:r1] = value
            old = top[r0:r1]
            peak = torch.maximum(old, high)
            keep, add = (old - peak).exp(), (high - peak).exp()
            if entropy:
                before, here = energy[r0:r1] + (old - peak) * total[r0:r1], heat + (high - peak) * mass
                energy[r0:r1] = keep * before + add * here
            total[r0:r1] = keep * total[r0:r1] + add * mass
            top[r0:r1] = peak
    log_total = total.log()
    # (picked - top) is exact where the target is the argmax, so a sure token gets a log-probability of 0, not round-off.
    return Scores((picked - top) - log_total, log_total - energy / total if entropy else None, picked >= top, top + log_total)


def tile_product(hidden: Tensor, part: Tensor, buffer: Tensor) -> Tensor:
    """Raw products `hidden @ part.T` of a tile, in the buffer's memory where the dtypes allow."""
    shape = hidden.shape[0], part.shape[0]
    if hidden.dtype != buffer.dtype:
        return torch.mm(hidden, part.t(), out_dtype=buffer.dtype)
    return product(hidden, part.t(), buffer[: shape[0] * shape[1]].view(shape))


def gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scores: Scores,
    grad_logps: Tensor | None,
    grad_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
    how: Transform,
) -> Gradients:
    """Gradients by recomputing vocabulary tiles: d logp = onehot - p, d entropy = -p (log p + entropy)."""
    n, v, h = hidden.shape[0], weight.shape[0], hidden.shape[1]
    new = {"dtype": how.compute, "device": hidden.device}
    gain = how.slope * (torch.zeros_like(scores.lse) if grad_logps is None else grad_logps)
    warmth = None if grad_entropy is None else grad_entropy * how.slope
    offset = gain if warmth is None else gain + warmth * scores.entropy
    rows, columns = vocab_tile(n, v, how.compute.itemsize)
    source, hidden = hidden, hidden.to(how.operand)
    grad_hidden = torch.empty(n, h, **new) if needs[0] else None
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = torch.empty_like(bias) if needs[2] else None
    scratch = torch.empty(columns, h, **new) if needs[1] and weight.dtype != how.compute else None
    buffer = torch.empty(rows * columns if hidden.dtype == how.compute else 0, **new)
    temporaries = bool(how.softcap) or warmth is not None
    for v0, v1 in spans(v, columns):
        part, part_bias = weight[v0:v1].to(how.operand), None if bias is None else bias[v0:v1].to(how.compute)
        column_sum = torch.zeros(v1 - v0, **new) if needs[2] else None
        part_grad = None
        if needs[1]:
            part_grad = grad_weight[v0:v1] if scratch is None else scratch[: v1 - v0]
        for r0, r1 in spans(n, rows):
            tile = tile_product(hidden[r0:r1], part, buffer)
            for i, j in spans(r1 - r0, block_rows(tile, temporaries)):
                a, b = r0 + i, r0 + j
                tokens = (targets[a:b], scores.lse[a:b], gain[a:b], offset[a:b], None if warmth is None else warmth[a:b])
                to_gradient(tile[i:j], part_bias, tokens, v0, how)
            if column_sum is not None:
                column_sum.add_(tile.sum(0))
            tile = tile.to(how.operand)
            if needs[0]:
                accumulate(grad_hidden[r0:r1], tile, part, first=v0 == 0)
            if needs[1]:
                accumulate(part_grad, tile.t(), hidden[r0:r1], first=r0 == 0)
            del tile
        if scratch is not None:
            grad_weight[v0:v1] = part_grad
        if needs[2]:
            grad_bias[v0:v1] = column_sum
    return Gradients(None if grad_hidden is None else grad_hidden.to(source.dtype), grad_weight, grad_bias)


def to_gradient(block: Tensor, bias: Tensor | None, tokens: tuple, start: int, how: Transform) -> None:
    """Raw products to the gradient of the raw products, in place."""
    targets, lse, gain, offset, warmth = tokens
    curve = to_logits(block, bias, how, curve=True)
    block.sub_(lse.unsqueeze(1))
    if warmth is None:
        block.exp_().mul_(-offset.unsqueeze(1))
    else:
        shape = block.clamp_min(FLOOR).mul_(-warmth.unsqueeze(1)).sub_(offset.unsqueeze(1))
        block.exp_().mul_(shape)
    column, inside = pick(block, targets, start)
    # A gather and a scatter of distinct columns stay deterministic on every device, unlike scatter_add.
    block.scatter_(1, column, block.gather(1, column) + (gain * inside).unsqueeze(1))
    if curve is not None:
        block.mul_(curve)


def score_with_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weigh: Callable[[Tensor, int, int], Tensor],
    needs: tuple[bool, bool, bool],
    how: Transform,
    entropy: bool,
) -> tuple[Scores, Tensor, Gradients]:
    """Scores, the factor of each log-probability, and gradients of the sum, in one pass over token tiles.

    For operands in the compute dtype alone. `weigh(logps, start, stop)` gives the factors of tokens start to stop.
    """
    (n, h), v = hidden.shape, weight.shape[0]
    new = {"dtype": how.compute, "device": hidden.device}
    rows = token_rows(n, v, how.compute.itemsize)
    buffer = torch.empty(rows, v, **new)
    source, hidden = hidden, hidden.to(how.compute)
    grad_hidden = torch.empty(n, h, **new) if needs[0] else None
    grad_weight = torch.empty(v, h, **new) if needs[1] else None
    grad_bias = torch.zeros(v, **new) if needs[2] else None
    bias = None if bias is None else bias.to(how.compute)
    pieces = []
    for r0, r1 in spans(n, rows):
        tile = product(hidden[r0:r1], weight.t(), buffer[: r1 - r0])
        for i, j in spans(r1 - r0, block_rows(tile, entropy or bool(how.softcap))):
            a, b = r0 + i, r0 + j
            pieces.append(block_with_gradient(tile[i:j], bias, targets[a:b], lambda x, a=a, b=b: weigh(x, a, b), how, entropy))
        if needs[0]:
            accumulate(grad_hidden[r0:r1], tile, weight, first=True)
        if needs[1]:
            accumulate(grad_weight, tile.t(), hidden[r0:r1], first=r0 == 0)
        if needs[2]:
            grad_bias.add_(tile.sum(0))
    logps, heat, top1, lse, factors = (None if p[0] is None else torch.cat(p) for p in zip(*pieces, strict=True))
    grads = Gradients(
        None if grad_hidden is None else grad_hidden.to(source.dtype),
        grad_weight,
        None if grad_bias is None else grad_bias,
    )
    return Scores(logps, heat, top1, lse), factors, grads


def block_with_gradient(
    block: Tensor, bias: Tensor | None, targets: Tensor, weigh: Callable[[Tensor], Tensor], how: Transform, entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
    """Raw products to the gradient of the weighted sum in place; returns logps, entropy, top1, lse and factors."""
    curve = to_logits(block, bias, how, curve=True)
    column, inside = pick(block, targets, 0)
    picked = torch.where(inside, block.gather(1, column).squeeze(1), float("nan"))
    top, total, energy = exponentiate(block, entropy)
    log_total = total.log()
    logps = (picked - top) - log_total
    factors = weigh(logps)
    gain = factors * how.slope
    block.mul_((-gain / total).unsqueeze(1))
    block.scatter_(1, column, block.gather(1, column) + (gain * inside).unsqueeze(1))
    if curve is not None:
        block.mul_(curve)
    heat = None if energy is None else log_total - energy / total
    return logps, heat, picked >= top, top + log_total, factors
