"""Losses of the rows of a batch, from what a loss function's node has saved.

This takes some microseconds, and neither a plan of the graph nor a backward pass. It is possible
where the loss is one loss function's, whose rows are summed up or averaged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from gradlens.hooks.node_kinds import Node, kind
from gradlens.hooks.torch_private import is_saved_elsewhere, output_metadata, saved, signed
from gradlens.numerics.precision import accumulable
from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.per_sample.labelling.loss_terms import errors_of

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
