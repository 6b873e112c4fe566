"""The kernels of the fused head: tiles of logits that are made, used and overwritten in place.

Shapes: N tokens, V vocabulary, H hidden. No shape here depends on the data, and no tensor has N x V elements.

Tile rules, from shapes alone. Where N >= 8,192, a tile is at most 1/21 of the full logits at any V:

- token tiles `(rows, V)`, used when gradients are made in one pass: rows = N / 25, at least 384 (768 where N < 8,192,
  as every tile reads and writes the whole gradient of the weight), cut to 160 MB;
- vocabulary tiles `(rows, columns)`, used everywhere else: at most 8,192 rows, and columns for 1/48 of the full logits,
  at least 32 MB, at most 96 MB.

Element-wise work runs over blocks of a tile: about two megabytes on CPU, so that its passes stay in the cache, and
32 MB elsewhere when an operation needs a temporary.

A tile's gradient is left as `p - onehot`; the factor of each token goes onto the rows of `hidden` and of the result,
which are far smaller than the tile.
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
    """Per token `(N,)`: log-probability, entropy if asked, whether the target is the argmax, log of the normaliser.

    Last the collision entropy, if asked.
    """

    logps: Tensor
    entropy: Tensor | None
    top1: Tensor
    lse: Tensor
    collision: Tensor | None = None


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
    pieces = max(-(-total // limit), 1)
    step = -(-total // pieces)
    return max(min(limit, -(-step // ALIGN) * ALIGN, total), 1)


def token_rows(n: int, v: int, itemsize: int) -> int:
    """Rows of a token tile `(rows, V)`."""
    least = 384 if n >= 8192 else 768
    return even_step(n, min(max(n // 25, least), 160 * MB // (v * itemsize)))


def vocab_tile(n: int, v: int, itemsize: int) -> tuple[int, int]:
    """Rows and columns of a vocabulary tile."""
    rows = even_step(n, MAX_ROWS)
    size = min(max(n * v * itemsize // 48, 32 * MB), 96 * MB)
    return rows, even_step(v, max(size // (rows * itemsize), ALIGN))


def block_rows(tile: Tensor, temporaries: bool) -> int:
    """Rows of a tile that are worked on at a time."""
    rows, columns = tile.shape
    if tile.device.type == "cpu" and not torch.compiler.is_compiling():
        size = 2 * MB
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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: Transform,
    entropy: bool,
    collision: bool = False,
) -> Scores:
    """Scores of every token, in vocabulary tiles that are merged as they come."""
    n, v = hidden.shape[0], weight.shape[0]
    new = {"dtype": how.compute, "device": hidden.device}
    # A finite lowest value: -inf - -inf would be NaN in the first merge.
    top = torch.full((n,), torch.finfo(how.compute).min, **new)
    total, energy, squares = (torch.zeros(n, **new) for _ in range(3))
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
                sums = exponentiate(block, entropy)
                pieces.append((value, *sums, block.square_().sum(1) if collision else None))
            del tile, block
            value, high, mass, heat, square = concatenate(pieces)
            picked[r0:r1] = value
            old = top[r0:r1]
            peak = torch.maximum(old, high)
            keep, add = (old - peak).exp(), (high - peak).exp()
            if entropy:
                before, here = energy[r0:r1] + (old - peak) * total[r0:r1], heat + (high - peak) * mass
                energy[r0:r1] = keep * before + add * here
            if collision:
                squares[r0:r1] = keep * keep * squares[r0:r1] + add * add * square
            total[r0:r1] = keep * total[r0:r1] + add * mass
            top[r0:r1] = peak
    return finish(picked, top, total, energy if entropy else None, squares if collision else None)


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
    (n, h), v = hidden.shape, weight.shape[0]
    if n == 0:
        inputs = (hidden, weight, bias)
        return Gradients(*(torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)))
    new = {"dtype": how.compute, "device": hidden.device}
    gain = torch.zeros(n, **new) if grad_logps is None else grad_logps * how.slope
    warmth = None if grad_entropy is None else grad_entropy * how.slope
    gain, warmth, unit = normalise(gain, warmth, how)
    tokens = Tokens.of(targets, scores, gain, warmth)
    rows, columns = vocab_tile(n, v, how.compute.itemsize)
    operand = hidden.to(how.operand)
    factored = operand if tokens.row is None else (hidden.to(how.compute) * tokens.row).to(how.operand)
    grad_hidden = torch.empty(n, h, **new) if needs[0] else None
    grad_weight = torch.empty_like(weight) if needs[1] else None
    grad_bias = torch.empty_like(bias) if needs[2] else None
    scratch = torch.empty(columns, h, **new) if needs[1] and weight.dtype != how.compute else None
    buffer = torch.empty(rows * columns if how.operand == how.compute else 0, **new)
    for v0, v1 in spans(v, columns):
        part, part_bias = weight[v0:v1].to(how.operand), None if bias is None else bias[v0:v1].to(how.compute)
        column_sum = torch.zeros(v1 - v0, **new) if needs[2] else None
        part_grad = None
        if needs[1]:
            part_grad = grad_weight[v0:v1] if scratch is None else scratch[: v1 - v0]
        for r0, r1 in spans(n, rows):
            tile = tile_product(operand[r0:r1], part, buffer)
            for i, j in spans(r1 - r0, block_rows(tile, bool(how.softcap) or warmth is not None)):
                to_gradient(tile[i:j], part_bias, tokens.slice(r0 + i, r0 + j), v0, how)
            if needs[2]:
                column_sum.add_(tile.sum(0) if tokens.row is None else tile.t().mv(tokens.row[r0:r1].squeeze(1)))
            tile = tile.to(how.operand)
            if needs[0]:
                accumulate(grad_hidden[r0:r1], tile, part, first=v0 == 0)
            if needs[1]:
                accumulate(part_grad, tile.t(), factored[r0:r1], first=r0 == 0)
            del tile
        if needs[1] and unit is not None:
            part_grad.mul_(unit)
        if scratch is not None:
            grad_weight[v0:v1] = part_grad
        if needs[2]:
            grad_bias[v0:v1] = column_sum if unit is None else column_sum * unit
    return Gradients(scaled(grad_hidden, tokens.row, unit, hidden.dtype), grad_weight, grad_bias)


def scaled(grad: Tensor | None, *factors_and_dtype: Tensor | torch.dtype | None) -> Tensor | None:
    """`grad` times factors in place, each of which may be None, then in the dtype."""
    *factors, dtype = factors_and_dtype
    if grad is None:
        return None
    for factor in factors:
        if factor is not None:
            grad.mul_(factor)
    return grad.to(dtype)


class Tokens(NamedTuple):
    """What a tile's gradient needs of each token: `(N,)`, and `(N, 1)` for the three factors."""

    targets: Tensor
    lse: Tensor
    row: Tensor | None  # factor left off the tile; None with an entropy gradient, which has no common factor
    gain: Tensor
    offset: Tensor | None
    warmth: Tensor | None

    @classmethod
    def of(cls, targets: Tensor, scores: Scores, gain: Tensor, warmth: Tensor | None) -> "Tokens":
        """From the gradients of log-probabilities and entropies."""
        if warmth is None:
            return cls(targets, scores.lse, -gain.unsqueeze(1), gain, None, None)
        offset = gain + warmth * scores.entropy
        return cls(targets, scores.lse, None, gain, offset.unsqueeze(1), warmth.unsqueeze(1))

    def slice(self, start: int, stop: int) -> "Tokens":
        """Tokens start to stop."""
        return Tokens(*(None if x is None else x[start:stop] for x in self))


def normalise(gain: Tensor, warmth: Tensor | None, how: Transform) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """For low-precision products, factors of at most 1 and their unit.

    A factor of one over a token count would leave float16's range.
    """
    if how.operand == how.compute:
        return gain, warmth, None
    unit = gain.abs().amax() if warmth is None else torch.maximum(gain.abs().amax(), warmth.abs().amax())
    unit = torch.where(unit > 0, unit, 1)
    return gain / unit, None if warmth is None else warmth / unit, unit


def to_gradient(block: Tensor, bias: Tensor | None, tokens: Tokens, start: int, how: Transform) -> None:
    """Raw products to their gradient in place, but for `tokens.row` and constants."""
    curve = to_logits(block, bias, how, curve=True)
    block.sub_(tokens.lse.unsqueeze(1))
    if tokens.warmth is None:
        block.exp_()
        add_at_target(block, tokens.targets, start, -torch.ones_like(tokens.gain))
    else:
        shape = block.clamp_min(FLOOR).mul_(-tokens.warmth).sub_(tokens.offset)
        block.exp_().mul_(shape)
        add_at_target(block, tokens.targets, start, tokens.gain)
    if curve is not None:
        block.mul_(curve)


def add_at_target(block: Tensor, targets: Tensor, start: int, value: Tensor) -> None:
    """Adds to each row's target column, if the block has it."""
    column, inside = pick(block, targets, start)
    add_at(block, column, torch.where(inside, value, 0))


def add_at(block: Tensor, column: Tensor, value: Tensor) -> None:
    """Adds a value `(n,)` to one column `(n, 1)` of each row.

    A gather and a scatter of one column a row stay deterministic on every device, unlike scatter_add.
    """
    block.scatter_(1, column, block.gather(1, column) + value.unsqueeze(1))


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

    For a weight in the compute dtype alone. `weigh(logps, start, stop)` gives the factors of tokens start to stop.
    """
    (n, h), v = hidden.shape, weight.shape[0]
    new = {"dtype": how.compute, "device": hidden.device}
    rows = token_rows(n, v, how.compute.itemsize)
    buffer = torch.empty(rows, v, **new)
    operand = hidden.to(how.compute)
    shift = None if bias is None else bias.to(how.compute)
    grad_hidden = torch.empty(n, h, **new) if needs[0] else None
    grad_weight = torch.empty(v, h, **new) if needs[1] else None
    grad_bias = torch.zeros(v, **new) if needs[2] else None
    # Where logits are linear in hidden, its gradient holds each expected logit: entropy needs no pass over the tile.
    linear = entropy and needs[0] and bias is None and not how.softcap
    heat = entropy and not linear
    pieces = []
    for r0, r1 in spans(n, rows):
        tile = product(operand[r0:r1], weight.t(), buffer[: r1 - r0])
        column, inside = pick(tile, targets[r0:r1], 0)
        blocks = spans(r1 - r0, block_rows(tile, heat or bool(how.softcap)))
        picked, top, total, energy, curve = concatenate(
            [score_block(tile[i:j], shift, column[i:j], how, heat) for i, j in blocks]
        )
        add_at(tile, column, torch.where(inside, -total if curve is None else -total * curve, 0))
        scores = finish(torch.where(inside, picked, float("nan")), top, total, energy)
        factors = weigh(scores.logps, r0, r1)
        row = (factors * (-how.slope) / total).unsqueeze(1)
        if needs[0]:
            accumulate(grad_hidden[r0:r1], tile, weight, first=True)
            if linear:
                scores = scores._replace(entropy=linear_entropy(operand[r0:r1], grad_hidden[r0:r1], total, scores, how))
            grad_hidden[r0:r1].mul_(row)
        pieces.append((*scores, factors))
        if needs[1]:
            accumulate(grad_weight, tile.t(), operand[r0:r1] * row, first=r0 == 0)
        if needs[2]:
            grad_bias.add_(tile.t().mv(row.squeeze(1)))
    *scores, factors = concatenate(pieces)
    grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
    grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
    return Scores(*scores), factors, Gradients(grad_hidden, grad_weight, grad_bias)


def linear_entropy(hidden: Tensor, grad: Tensor, total: Tensor, scores: Scores, how: Transform) -> Tensor:
    """Entropies from `grad = sum_v e_v W_v - total W_target`: its product with `hidden` is `total * (E[z] - z_target)`.

    As -log p of the target is log(normaliser) - its logit, entropy = -log p - slope * (E[z] - z_target); round-off
    could make it fall below 0.
    """
    return (-how.slope * torch.linalg.vecdot(hidden, grad) / total - scores.logps).clamp_min_(0)


def score_block(
    block: Tensor, bias: Tensor | None, column: Tensor, how: Transform, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Raw products of all V to the gradient of e = exp(logit - max) in place.

    Returns the logit in `column`, max, sum of e, that of e log e if asked, and with a soft-cap its derivative there.
    """
    curve = to_logits(block, bias, how, curve=True)
    picked = block.gather(1, column).squeeze(1)
    sums = exponentiate(block, entropy)
    if curve is None:
        return picked, *sums, None
    block.mul_(curve)
    return picked, *sums, curve.gather(1, column).squeeze(1)


def finish(picked: Tensor, top: Tensor, total: Tensor, energy: Tensor | None, squares: Tensor | None = None) -> Scores:
    """Scores from a target's logit and the row's max, sums of e = exp(x - max), of e (x - max) and of e * e."""
    log_total = total.log()
    # picked - top is exactly 0 where the target is the argmax: a sure token's log-probability has no round-off.
    logps = (picked - top) - log_total
    entropy = None if energy is None else log_total - energy / total
    collision = None if squares is None else 2 * log_total - squares.log()
    return Scores(logps, entropy, picked >= top, top + log_total, collision)


def concatenate(pieces: list[tuple]) -> tuple:
    """Field by field; a field that is None stays None."""
    return tuple(None if field[0] is None else torch.cat(field) for field in zip(*pieces, strict=True))
