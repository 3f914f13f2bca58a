"""What the nodes of a loss say of it: its rows' losses, and how it is reduced over the batch.

Reading them takes some microseconds, and neither a plan of the graph nor a backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import digits
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gradlens.graph.kinds import Node, kind, kind_of
from gradlens.graph.torch_private import is_saved_elsewhere, output_metadata, saved, signed
from gradlens.numerics.precision import accumulable

_SCALAR = frozenset(
    f"{name}Backward{n}"
    for name in ("Mean", "Sum", "Mul", "Div", "ToCopy", "Alias", "View", "Squeeze")
    for n in (0, 1)
)
"""Kinds that sum up all rows with one weight, or multiply the sum."""
_LIKELIHOODS = ("NllLossBackward0", "NllLoss2DBackward0")
_MOST_NODES = 8
"""Scalar nodes that are followed; losses have three at most in the loops of the tests."""


class Rows(NamedTuple):
    """ℓₙ ``[N]`` of the rows of a loss function's input.

    ``targets`` are what they are compared with, and ``outputs`` the network's: log-probabilities
    ``[N, C, ...]`` if the targets are classes.
    """

    losses: Tensor
    targets: Tensor
    outputs: Tensor


def loss_node(loss: Tensor) -> Node | None:
    """The node of the loss function that a loss is a multiple of; ``None`` if there is none."""
    node = loss.grad_fn
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        name = kind(node)
        if name in _LIKELIHOODS or (name not in _SCALAR and len(node.next_functions) != 1):
            return node
        if name not in _SCALAR or output_metadata(node)[0].shape:
            return node
        edges = [each for each, _ in node.next_functions if each is not None]
        node = edges[0] if len(edges) == 1 else None
    return None


def row_losses(loss: Tensor, loss_reduction: LossReduction, scale: float = 1.0) -> Rows | None:
    """The losses of the rows of a batch; ``None`` where they can't be had in this way.

    ``scale`` is the factor between the step's loss and ``loss``. The rows are those of the first
    axis: whether they are the samples is for the caller to know.
    """
    node = loss_node(loss)
    if node is None or is_saved_elsewhere(node):
        return None
    with torch.no_grad():
        values = _values(node)
        if values is None or not values.dim() or not values.numel():
            return None
        rows = values.reshape(len(values), -1).sum(1)
        return Rows(
            rows * _weight(rows, loss.detach() / scale, loss_reduction),
            saved(node, "target"),
            saved(node, "self"),
        )


def _values(node: Node) -> Tensor | None:
    name = kind(node)
    if name not in _LIKELIHOODS:
        return errors_of(node, name)
    return functional.nll_loss(
        accumulable(saved(node, "self")),
        saved(node, "target"),
        _single(saved(node, "weight")),
        ignore_index=signed(saved(node, "ignore_index")),
        reduction="none",
    )


def _single(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else accumulable(weight)


def _weight(rows: Tensor, loss: Tensor, loss_reduction: LossReduction) -> Tensor:
    """What the rows' values are multiplied by, so that they are ℓₙ and add up to the loss.

    Where that isn't finite, they are taken as they are.
    """
    samples = len(rows) if loss_reduction == "mean" else 1
    ratio = loss.to(rows) * samples / rows.sum()
    return torch.where(ratio.isfinite(), ratio, 1.0)


REDUCTIONS = ("", "mean", "sum")
"""Of loss functions, by the numbers that torch's nodes save."""
REDUCING = {"MeanBackward": "mean", "SumBackward": "sum"}
PASSED = {
    "AddBackward", "SubBackward", "NegBackward", "MulBackward", "StackBackward", "CatBackward",
}  # fmt: skip
"""Kinds of nodes that are passed on the way to the terms. What multiplies a term is its weight."""

WITHIN = 64
"""Nodes of a loss that are looked at, at most."""
SHARE = 0.5
"""A sum that is divided by at least so many times the number of samples is a mean: the batch may be
the last one of an epoch, and smaller than what a loop divides by."""


def reduction(loss: Tensor, samples: int, scale: float = 1.0) -> str:
    """``"mean"`` or ``"sum"`` if all terms of a loss are reduced so over the batch, else empty.

    ``samples`` is their number, or 0 if it isn't known. A sum that is divided by it is a mean;
    ``scale``, by which the loss was multiplied as a part of a step's, has no part in that.
    """
    waiting: list[tuple[Node | None, float]] = [(loss.grad_fn, min(scale, 1.0))]
    found: set[str] = set()
    for _ in range(WITHIN):
        if not waiting:
            break
        node, divisor = waiting.pop()
        if node is None:
            continue
        name = kind(node).rstrip(digits)
        own = REDUCTIONS[saved(node, "reduction", 0)]
        if own or (name in REDUCING and _is_over_samples(node, samples)):
            found.add(_divided(own or REDUCING[name], divisor, samples))
            continue
        if name == "DivBackward":
            divisor *= _divisor(node)
        elif not (name in PASSED or name in REDUCING or kind_of(kind(node)).is_view):
            continue
        waiting += [(child, divisor) for child, _ in node.next_functions]
    return found.pop() if len(found) == 1 else ""


def _is_over_samples(node: Node, samples: int) -> bool:
    """Whether the first axis is summed up, and has a row, or several, for each sample."""
    shape = saved(node, "self_sym_sizes", ())
    axes = [axis % max(len(shape), 1) for axis in saved(node, "dim", None) or (0,)]
    return bool(shape) and 0 in axes and (not samples or shape[0] % samples == 0)


def _divisor(node: Node) -> float:
    """The number that a node divides by; NaN if it is none, or is had by waiting for a device."""
    other: Tensor | float | None = None if is_saved_elsewhere(node) else saved(node, "other", None)
    if isinstance(other, Tensor):
        is_known = other.is_cpu and other.numel() == 1 and not other.requires_grad
        return abs(other.item()) if is_known else math.nan
    return math.nan if other is None else abs(other)


def _divided(how: str, divisor: float, samples: int) -> str:
    """The reduction that one is after a division, by NaN if it isn't known what by."""
    if how == "mean" or not samples:
        return how
    if math.isnan(divisor):
        return ""
    return "mean" if divisor >= SHARE * samples else "sum"


LossReduction: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True)
class Batch:
    """The batch of one backward pass.

    ``samples`` is N, ``None`` where it isn't known, and ``known_by`` how it is known, or why it
    isn't. ``loss_reduction`` is whether the loss is a mean or a sum over the samples, and
    ``factor`` the ratio of the tensor that backward is called on to the loss.
    """

    samples: int | None = None
    known_by: str = ""
    loss_reduction: LossReduction = "mean"
    factor: float = 1.0

    @property
    def scale(self) -> float:
        """The factor that makes gₙ of a sample's contribution to the gradient."""
        samples = (self.samples or 1) if self.loss_reduction == "mean" else 1
        return samples / self.factor


@dataclass(frozen=True)
class LossKind:
    """A kind of node with known values, of the shape of its output.

    ``reduces`` says that the node itself may sum them up or take their mean; they have the shape of
    its inputs then. ``dim`` is the name under which the node saves an axis that belongs to a row.
    """

    values: Callable[[Node], Tensor]
    reduces: bool = False
    dim: str = ""


def errors_of(node: Node, name: str) -> Tensor | None:
    """The values of a loss function's node before it reduces them; ``None`` of other kinds."""
    found = KINDS.get(name.rstrip(digits))
    return found.values(node) if found is not None and found.reduces else None


def _saved(name: str) -> Callable[[Node], Tensor]:
    return lambda node: saved(node, name)


def _of_saved(
    function: Callable[..., Tensor], *names: str, **options: Any
) -> Callable[[Node], Tensor]:
    return lambda node: function(*(saved(node, name) for name in names), **options)


def _of_errors(function: Callable[..., Tensor], **names: str) -> Callable[[Node], Tensor]:
    """A loss function of ``self`` and ``target``, whose options are saved under ``names``."""

    def values(node: Node) -> Tensor:
        options = {option: saved(node, name) for option, name in names.items()}
        pair = (accumulable(saved(node, "self")), saved(node, "target"))
        return function(*pair, reduction="none", **options)

    return values


KINDS: Mapping[str, LossKind] = {
    "LogSoftmaxBackward": LossKind(_saved("result"), dim="dim"),
    "CtcLossBackward": LossKind(_saved("result0")),
    "AbsBackward": LossKind(_of_saved(torch.abs, "self")),
    "PowBackward": LossKind(_of_saved(torch.pow, "self", "exponent")),
    "LogBackward": LossKind(_of_saved(torch.log, "self")),
    "LogSigmoidBackward": LossKind(_of_saved(functional.logsigmoid, "self")),
    "SoftplusBackward": LossKind(_of_saved(functional.softplus, "self", "beta", "threshold")),
    "ExpBackward": LossKind(_saved("result")),
    "SqrtBackward": LossKind(_saved("result")),
    "LogsumexpBackward": LossKind(_saved("result")),
    "LinalgVectorNormBackward": LossKind(_saved("result")),
    "MseLossBackward": LossKind(_of_errors(functional.mse_loss), reduces=True),
    "SmoothL1LossBackward": LossKind(
        _of_errors(functional.smooth_l1_loss, beta="beta"), reduces=True
    ),
    "HuberLossBackward": LossKind(_of_errors(functional.huber_loss, delta="delta"), reduces=True),
    "SoftMarginLossBackward": LossKind(_of_errors(functional.soft_margin_loss), reduces=True),
    "BinaryCrossEntropyBackward": LossKind(
        _of_errors(functional.binary_cross_entropy, weight="weight"), reduces=True
    ),
    "BinaryCrossEntropyWithLogitsBackward": LossKind(
        _of_errors(
            functional.binary_cross_entropy_with_logits, weight="weight", pos_weight="pos_weight"
        ),
        reduces=True,
    ),
}
"""Kinds whose values follow from what their nodes have saved."""
