"""What the nodes of a loss say of it: its functions, how it is reduced, and what it is a sum of.

Reading them takes some microseconds, and neither a plan of the graph nor a backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from string import digits
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_again
from gradlens.graph.graph import Graph, each_once
from gradlens.graph.kinds import WEIGHTS, Kind, Node, is_linear, kind, kind_of, plain_name
from gradlens.numerics.tensors import accumulable
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import (
    hands_gradients_on,
    is_saved_elsewhere,
    output_metadata,
    saved,
    saved_where_they_are,
)

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


@dataclass(frozen=True, eq=False)
class Loss:
    """What is known of a loss by the nodes between it and its loss functions.

    ``functions`` are the nodes of these. ``samples`` is N, 0 if it isn't known. ``reduction`` is
    ``"mean"`` or ``"sum"`` if all terms are reduced so over the batch, else empty. If it
    ``is_multiple``, the values of a single function add up to a multiple of the loss. If it
    has a ``weighing`` node, that multiplies these by numbers of their own, such as rewards or a
    mask. ``squared`` is the node that squares errors, where nothing else is a term.
    """

    value: Tensor
    samples: int
    functions: tuple[Node, ...]
    reduction: str
    is_multiple: bool
    weighing: Node | None = None
    squared: Node | None = None

    @cached_property
    def function(self) -> Node | None:
        """The loss function's node; ``None`` if there are several, or none.

        ``None``, too, if hooks store its tensors elsewhere or compute them again, as in a
        checkpoint: reading these would run the hooks.
        """
        only = self.functions[0] if len(self.functions) == 1 else None
        return None if only is None or is_saved_elsewhere(only) else only

    @property
    def name(self) -> str:
        """The kind of the loss function without digits; empty if there is none."""
        if self.squared is not None:
            return "MseLossBackward"
        return "" if self.function is None else kind(self.function).rstrip(digits)

    @cached_property
    def targets(self) -> Tensor | None:
        """What the loss function compares the outputs with."""
        return None if self.function is None else saved(self.function, "target").detach()

    @cached_property
    def outputs(self) -> Tensor | None:
        """What the loss function compares the targets with.

        Log-probabilities ``[M, C, ...]`` if these are classes.
        """
        return None if self.function is None else saved(self.function, "self").detach()

    @property
    def row_weights(self) -> Tensor | None:
        """The numbers that the function's values are multiplied by, where they are kept as such."""
        kept = [] if self.weighing is None else saved_where_they_are(self.weighing)
        return kept[0].detach() if len(kept) == 1 else None

    @property
    def target_needs_gradient(self) -> bool:
        """Whether the loss function's target is computed from parameters, too."""
        function = self.function
        others = () if function is None else function.next_functions[1:2]
        return self.targets is not None and any(node is not None for node, _ in others)

    @property
    def is_weighted(self) -> bool:
        """Whether the loss function was given weights of classes or samples."""
        return any(saved(self.function, name, None) is not None for name in WEIGHTS)

    @torch.no_grad()
    def values(self, weighted: bool = True) -> Tensor:
        """The function's value at each row of the targets ``[M]``, a mean over its elements."""
        return self._elements(weighted).mean(1)

    def _elements(self, weighted: bool) -> Tensor:
        values = _values(self.function, weighted)
        return values.flatten(1) if values.dim() > 1 else values.reshape(-1, 1)

    @torch.no_grad()
    def rows(self, loss_reduction: LossReduction, scale: float = 1.0) -> Tensor | None:
        """What the losses of a batch's M rows are sums of, ``[M, K]``.

        ``None`` where that can't be had in this way. ``scale`` is the factor between the step's
        loss and this one. The rows are those of the first axis of the function's input: whether
        they are the samples is for the caller to know.
        """
        targets = self.targets
        if targets is None or not (self.is_multiple and targets.dim() and targets.numel()):
            return None
        elements = self._elements(weighted=True)
        parts = elements / max(elements.shape[1], 1)
        samples = len(parts) if loss_reduction == "mean" else 1
        ratio = self.value.detach().to(parts) / scale * samples / parts.sum()
        # Where that isn't finite, the values are taken as they are.
        return parts * torch.where(ratio.isfinite(), ratio, 1.0)


REDUCTIONS = ("", "mean", "sum")
"""Of loss functions, by the numbers that torch's nodes save."""

WITHIN = 64
"""Nodes of a loss that are looked at, at most."""
SHARE = 0.5
"""A sum that is divided by at least so many times the number of samples is a mean: the batch may be
the last one of an epoch, and smaller than what a loop divides by."""


class _Way(NamedTuple):
    """A node on the way from a loss to its terms.

    ``divisor`` is what they were divided by so far, ``None`` once they are reduced.
    """

    node: Node
    divisor: float | None


def read_loss(loss: Tensor, samples: int = 0, scale: float = 1.0) -> Loss:
    """What the nodes of a loss say, which is followed by sums, multiples, means and views.

    A sum that is divided by the number of ``samples`` is a mean; ``scale``, by which the loss was
    multiplied as a part of a step's, has no part in that.
    """
    ways = [] if loss.grad_fn is None else [_Way(loss.grad_fn, min(scale, 1.0))]
    ends: list[Node] = []
    reductions: set[str] = set()
    for node, divisor in islice(ways, WITHIN):  # which get more on the way
        its = kind_of(kind(node))
        how = REDUCTIONS[saved(node, "reduction", 0)]
        if its.reduction and _is_over_samples(node, samples):
            how = its.reduction
        if how and divisor is not None:
            reductions.add(_divided(how, divisor, samples))
            divisor = None
        if its.targets or not _is_passed(its):
            ends.append(node)
            continue
        if its.is_division and divisor is not None:
            divisor *= _divisor(node)
        ways += [_Way(child, divisor) for child, _ in node.next_functions if child is not None]
    functions = tuple(node for node in ends if kind_of(kind(node)).targets)
    is_alone = len(functions) == len(ends) == 1 and len(ways) <= WITHIN
    passed = (way.node for way in ways if way.node is not ends[0])
    is_multiple = is_alone and all(map(_is_multiplied, passed))
    how = reductions.pop() if len(reductions) == 1 else ""
    rows = _rows_of(functions[0]) if len(functions) == 1 else ()
    weights = (way.node for way in ways if kind_of(kind(way.node)).is_product)
    weighing = next((node for node in weights if rows and _rows_of(node) == rows), None)
    squared = ends[0] if len(ends) == 1 and len(ways) <= WITHIN else None
    squared = squared if squared is not None and _squares_errors(squared) else None
    return Loss(loss, samples, functions, how, is_multiple, weighing, squared)


def _squares_errors(node: Node) -> bool:
    """Whether a node squares the difference between predictions and constants of their shape."""
    if plain_name(kind(node)) != "Pow" or is_saved_elsewhere(node) or saved(node, "exponent") != 2:
        return False
    difference = node.next_functions[0][0]
    if difference is None or plain_name(kind(difference)) != "Sub":
        return False
    made = [each for each in difference.next_functions if each[0] is not None]
    if len(made) != 1 or len(difference.next_functions) != 2:
        return False
    predicted, output = made[0]
    shape = output_metadata(difference)[0].shape
    return bool(shape) and output_metadata(predicted)[output].shape == shape


def _rows_of(node: Node) -> tuple[int, ...]:
    """The length of the first axis of what a node has made, if there is one."""
    return tuple(output_metadata(node)[0].shape[:1])


def _is_passed(its: Kind) -> bool:
    """Whether a kind is passed on the way to the terms. What multiplies a term is its weight."""
    return its.is_view or its.is_arithmetic or its.joins or bool(its.reduction)


def _is_multiplied(node: Node) -> bool:
    """Whether a node makes a number that is a multiple of what it is computed from."""
    return is_linear(node) and not output_metadata(node)[0].shape


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


def is_divided(loss: Tensor) -> bool:
    """Whether a loss is another number that was made smaller by a factor that is known."""
    node = loss.grad_fn
    if node is None or not _is_multiplied(node) or not kind_of(kind(node)).is_product:
        return False
    factor = _divisor(node)
    return factor > 1 if kind_of(kind(node)).is_division else factor < 1


def _divided(how: str, divisor: float, samples: int) -> str:
    """The reduction that one is after a division, by NaN if it isn't known what by."""
    if how == "mean" or not samples:
        return how
    if math.isnan(divisor):
        return ""
    return "mean" if divisor >= SHARE * samples else "sum"


# Terms ------------------------------------------------------------------------------------------


def terms(graph: Graph) -> list[int]:
    """The numbers of the nodes that the loss is a weighted sum of the values of.

    The contribution of a row to the loss is its value times the gradient there.
    ``UnavailableError`` if the loss is another function, or if a term depends on another one. One
    number that isn't known may be added, such as the zero that Python's ``sum`` begins with:
    whether it is zero shows in what the contributions add up to.
    """
    found: list[int] = []
    waiting = [graph.root]
    is_added = False
    for edge in each_once(waiting):
        number = edge[0]
        its = kind_of(graph.kinds[number])
        may_be_added = not is_added and math.prod(graph.shape(edge)) == 1
        if is_linear(graph.nodes[number]):
            waiting += graph.descend(edge)
        elif may_be_added and is_linear(graph.nodes[number], up_to_constant=True):
            is_added = True
            waiting += graph.descend(edge)
        elif its.values is not None and (its.targets or graph.shape((number, 0))):
            found.append(number)
        elif hands_gradients_on(graph.nodes[number]):
            waiting += [each for each in [graph.children[number][edge[1]]] if each is not None]
        else:
            raise _no_sum(graph, number)
    behind = graph.below(e[0] for n in found for e in graph.children[n] if e is not None)
    for number in found:
        if number in behind:
            raise _no_sum(graph, number)
    return list(dict.fromkeys(found))


def contributions(node: Node, gradient: Tensor) -> Tensor:
    """What each of a term's values contributes to the loss, of the shape of the values.

    ``gradient`` is that at the node's output.
    """
    with read_again(node):
        values = accumulable(_values(node))
    weights = accumulable(gradient)
    if REDUCTIONS[saved(node, "reduction", 0)] == "mean":
        weights = weights / values.numel()
    # Values without a gradient may be infinite, such as the logarithm of zero.
    return torch.where(weights == 0, 0, weights * values)


def _values(node: Node, weighted: bool = True) -> Tensor:
    values = kind_of(kind(node)).values
    assert values is not None
    return values(node, weighted)


def _no_sum(graph: Graph, number: int) -> UnavailableError:
    return UnavailableError(NO_SUM.format(kind=graph.kinds[number].rstrip(digits)))


NO_SUM = (
    "the contributions of single samples to the loss can't be read off its graph, in which "
    "{kind} comes where only sums, means and losses are followed"
)
