"""The LM head that answers with log-probabilities instead of logits.

The head stays the module it was, called by the model's own forward, so that the hooks of DDP, FSDP2, PEFT and
`torch.compile` see nothing unusual. While a request is set on it, it computes the fused head of `posttrain_losses` on
the positions asked for and returns an `Answer` where logits would be. What a model does to logits after the head
(a scale, a soft-cap) is recorded by the `Answer` and compared with what the fused head was told to apply.

Where the head's weight is the embedding's too, the embedding takes part on the CPU: it hands the weight on to the head,
so that one backward adds the gradients of the few rows that were looked up to that of the head. Apart, PyTorch fills
a second gradient of the weight's size with zeros and adds the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from posttrain_losses import token_scores, weighted_logp_sum
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

# What a model did to its logits: ("scale", factor), ("divide", divisor), ("tanh", 1).
Steps = tuple[tuple[str, float], ...]


class HeadError(ValueError):
    """The fused head cannot serve this model; the message says why."""


class Answer(NamedTuple):
    """Scores in the place of logits. A NamedTuple, so that wrappers that traverse outputs find its tensors."""

    logps: Tensor
    entropy: Tensor | None
    top1: Tensor
    total: Tensor | None
    mean_logit: Tensor | None = None
    collision: Tensor | None = None
    steps: Steps = ()

    def _then(self, name: str, value: Any = 1.0) -> Answer:
        if not isinstance(value, int | float):
            raise HeadError(f"the model combines its logits with a {type(value).__name__}")
        return self._replace(steps=(*self.steps, (name, float(value))))

    def __mul__(self, value: Any) -> Answer:  # type: ignore[override]
        return self._then("scale", value)

    __rmul__ = __mul__  # type: ignore[assignment]

    def __truediv__(self, value: Any) -> Answer:
        return self._then("divide", value)

    def float(self) -> Answer:
        """Scores are float32 already."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Answer:
        """Scores are where and what they must be."""
        return self

    def contiguous(self) -> Answer:
        """Nothing to lay out."""
        return self

    def tanh(self) -> Answer:
        """Half of a soft-cap."""
        return self._then("tanh")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Answer:
        if getattr(func, "__name__", "") == "tanh":
            return args[0].tanh()
        raise HeadError(f"the model applies {getattr(func, '__name__', func)} to its logits")


class PostHead(NamedTuple):
    """What follows the head: logits = softcap * tanh(z * scale / softcap), or z * scale without a soft-cap."""

    scale: float = 1.0
    softcap: float | None = None

    def same(self, other: PostHead) -> bool:
        """Equal to float round-off."""
        if (self.softcap is None) != (other.softcap is None):
            return False
        return math.isclose(self.scale, other.scale, rel_tol=1e-5) and (
            self.softcap is None or math.isclose(self.softcap, other.softcap or 0.0, rel_tol=1e-5)
        )


def read_steps(steps: Steps) -> PostHead:
    """The scale and soft-cap that a recorded chain of operations amounts to."""
    before, after, capped = 1.0, 1.0, False
    for name, value in steps:
        if name == "tanh":
            if capped:
                raise HeadError("the model applies tanh to its logits twice")
            capped = True
            continue
        factor = value if name == "scale" else 1.0 / value
        before, after = (before, after * factor) if capped else (before * factor, after)
    return PostHead(before * after, after) if capped else PostHead(before)


@dataclass
class Request:
    """What a head is asked: `targets` (N,) at the positions `index` (N,) of the flattened hidden states, or at all."""

    targets: Tensor
    index: Tensor | None
    positions: int
    temperature: float = 1.0
    entropy: bool = False
    weights: Tensor | None = None
    reweight: Callable[[Tensor], Tensor] | None = None
    post: PostHead = PostHead()
    mean_logit: bool = False
    collision: bool = False
    tied: Tensor | None = None  # the head's weight, from the embedding

    def answer(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Answer:
        """Scores of the targets under `hidden @ weight.T + bias`."""
        weight = weight if self.tied is None else self.tied
        if isinstance(weight, DTensor):
            raise HeadError("the head is sharded over the vocabulary")
        if hidden.numel() != self.positions * hidden.shape[-1]:
            raise HeadError(f"the head was called with {tuple(hidden.shape)} for {self.positions} positions")
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if self.index is not None:
            hidden = hidden.index_select(0, self.index)
        options: dict[str, Any] = {
            "bias": bias,
            "softcap": self.post.softcap,
            "scale": self.post.scale,
            "temperature": self.temperature,
            "entropy": self.entropy,
        }
        if self.weights is None:
            scores = token_scores(hidden, weight, self.targets, collision=self.collision, **options)
            total = None
        else:
            total, scores = weighted_logp_sum(
                hidden, weight, self.targets, self.weights, reweight=self.reweight, **options
            )
        return Answer(
            scores.logps, scores.entropy, scores.top1, total, self._mean(hidden, weight, bias), scores.collision
        )

    @torch.no_grad()
    def _mean(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """The mean over the vocabulary of each position's logits, at temperature 1; none of capped logits."""
        if not self.mean_logit or self.post.softcap is not None:
            return None
        mean = hidden.float() @ weight.mean(0, dtype=torch.float32)
        return (mean if bias is None else mean + bias.float().mean()) * self.post.scale


class ScoringHead(nn.Linear):
    """A linear head that answers a request when one is set, and is the plain layer otherwise."""

    request: Request | None = None

    def forward(self, input: Tensor) -> Any:
        """Logits, or the `Answer` to the request."""
        request = self.request
        if request is None:
            return super().forward(input)
        return request.answer(input, self.weight, self.bias)


class TiedRows(torch.autograd.Function):
    """The rows `ids` of a weight, and the weight, whose gradient comes back with all that the head adds to it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        """Look up."""
        ctx.save_for_backward(ids)
        ctx.padding, ctx.shape = padding, weight.shape
        ctx.set_materialize_grads(False)
        return F.embedding(ids, weight), weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor | None, weight: Tensor | None) -> tuple[Tensor | None, None, None]:
        """Add the rows' gradients to the weight's in place: only the head made it, and for this node alone."""
        if rows is None:
            return weight, None, None
        ids = ctx.saved_tensors[0].flatten()
        rows = rows.reshape(len(ids), -1)
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0)
        weight = rows.new_zeros(ctx.shape) if weight is None else weight
        return weight.index_add_(0, ids, rows), None, None


class TiedEmbedding(nn.Embedding):
    """An embedding that hands its weight to the head while a request is set on both."""

    request: Request | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The rows of `input`, as ever."""
        if self.request is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(input)
        rows, self.request.tied = TiedRows.apply(self.weight, input, self.padding_idx)
        return rows


def make_scoring(linear: nn.Linear) -> None:
    """Turn a linear layer into a `ScoringHead`, in place: parameters, hooks and names stay.

    The class changes rather than the `forward` attribute, so that a deep copy of the model scores with its own weights.
    """
    if isinstance(linear, ScoringHead):
        return
    if type(linear) is nn.Linear:
        linear.__class__ = ScoringHead
    else:
        linear.__class__ = type(f"Scoring{type(linear).__name__}", (ScoringHead, type(linear)), {})


def find_heads(base: Any) -> list[nn.Linear]:
    """The linear layers one of which computes the logits, through PEFT's copies of a module that is trained in full.

    Raises:
        HeadError: When the head is not a plain linear layer.
    """
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise HeadError(f"{type(base).__name__} has no output embeddings")
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    for layer in heads:
        if hasattr(layer, "base_layer"):
            raise HeadError("an adapter sits on the LM head")
        if not isinstance(layer, nn.Linear) or type(layer).forward not in (nn.Linear.forward, ScoringHead.forward):
            raise HeadError(f"the LM head is a {type(layer).__name__}, not a plain linear layer")
        if "forward" in layer.__dict__:
            raise HeadError("another library replaced the LM head's forward")
    return heads


def find_tied(base: Any, heads: list[nn.Linear]) -> list[nn.Embedding]:
    """The embedding, where its lookup is plain and its weight is trained and the head's."""
    layer, weight = base.get_input_embeddings(), heads[0].weight
    plain = type(layer) in (nn.Embedding, TiedEmbedding) and "forward" not in layer.__dict__
    if not plain or len(heads) > 1 or layer.weight is not weight or type(weight) is not nn.Parameter:
        return []
    trained = weight.requires_grad and torch.is_grad_enabled() and weight.device.type == "cpu"
    simple = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    return [layer] if trained and simple else []


@contextmanager
def asking(layers: Sequence[Any], request: Any) -> Iterator[None]:
    """Set the request for one call of the model, on its heads and on the embedding that they are tied to."""
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            layer.__class__ = TiedEmbedding
        else:
            make_scoring(layer)
        layer.request = request
    try:
        yield
    finally:
        for layer in layers:
            layer.request = None
