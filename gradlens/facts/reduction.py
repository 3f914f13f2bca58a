"""How a loss is reduced over the batch, from its graph."""

from __future__ import annotations

import math
from string import digits

from torch import Tensor

from gradlens.hooks.node_kinds import VIEWS, Node, kind
from gradlens.hooks.torch_private import saved

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
        elif not (name in PASSED or name in REDUCING or VIEWS.match(kind(node))):
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
    other: Tensor | float | None = saved(node, "other", None)
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
