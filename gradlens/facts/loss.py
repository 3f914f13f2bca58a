"""Labels and losses of single samples, from the node of the loss in its graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from string import digits
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from gradlens.graph.kinds import Node, kind, kind_of
from gradlens.graph.loss import PASSED, errors_of
from gradlens.graph.torch_private import is_saved_elsewhere, saved, signed
from gradlens.numerics.precision import accumulable
from gradlens.stateful import State

Floats = NDArray[np.float64]

WITHIN = 32
"""A loss has so many nodes between itself and the node of its loss function, at most."""

_PASSED = {"DivBackward", "MeanBackward", "SumBackward", *PASSED}
"""Kinds of nodes between a loss and its loss function."""

MOST_LABELS = 4096
"""Labels of a step are kept if there are no more."""


@dataclass(frozen=True)
class LossNode:
    """The node of a loss function, and its kind without digits."""

    node: Node
    kind: str


def loss_node(loss: Tensor) -> LossNode | None:
    """The node of the loss function that a loss was computed by; ``None`` if it isn't known.

    A loss that is computed by several of them has none, nor has one whose tensors hooks store
    elsewhere or compute again, as in a checkpoint: reading these would run the hooks.
    """
    waiting: list[Node | None] = [loss.grad_fn]
    found: list[LossNode] = []
    visited = 0
    while waiting and visited < WITHIN:
        node = waiting.pop()
        if node is None:
            continue
        visited += 1
        name = kind(node).rstrip(digits)
        if name in LOSSES and is_saved_elsewhere(node):
            return None
        if name in LOSSES:
            found.append(LossNode(node, name))
        elif name in _PASSED or kind_of(kind(node)).is_view:
            waiting += [child for child, _ in node.next_functions]
    return found[0] if len(found) == 1 else None


def is_weighted(found: LossNode) -> bool:
    """Whether a loss function was given weights of classes or samples."""
    weights = (saved(found.node, name, None) for name in ("weight", "pos_weight"))
    return any(each is not None for each in weights)


@dataclass(frozen=True)
class LossRows:
    """What a loss function was called with, and its values, for each row of the targets ``[M]``.

    ``labels`` and ``classes`` are those of a classification, in which rows whose label is
    ``ignored`` have no loss; ``variance`` is that of the targets of a regression.
    """

    losses: Tensor | None = None
    labels: Tensor | None = None
    ignored: int | None = None
    classes: int = 0
    count: int = 0
    variance: Tensor | None = None


@torch.no_grad()
def loss_rows(found: LossNode) -> LossRows:
    if not saved(found.node, "target").numel():
        return LossRows()
    return LOSSES[found.kind](found.node)


def _classes(node: Node) -> LossRows:
    log_probabilities, labels = saved(node, "self").detach(), saved(node, "target").detach()
    axis = 1 if log_probabilities.dim() > 1 else 0
    classes = log_probabilities.shape[axis]
    if labels.numel() > MOST_LABELS or labels.dim() != 1:
        return LossRows(count=labels.numel(), classes=classes)
    places = labels.clamp(0, classes - 1)[:, None]  # an ignored label may be any number
    return LossRows(
        -accumulable(log_probabilities.gather(1, places)).squeeze(1),
        labels.clone(),
        signed(saved(node, "ignore_index")),
        classes,
        len(labels),
    )


def _probabilities(node: Node) -> LossRows:
    """Of a binary classification; labels that are no classes, or several for each row, are none."""
    # A number alone is one row.
    logits, targets = (torch.atleast_1d(saved(node, n).detach()) for n in ("self", "target"))
    if targets.numel() > MOST_LABELS:
        return LossRows(count=targets.numel(), classes=2)
    function = functional.binary_cross_entropy
    if "Logits" in kind(node):
        function = functional.binary_cross_entropy_with_logits
    losses = function(accumulable(logits), accumulable(targets), reduction="none")
    single = targets.numel() == len(targets)
    return LossRows(
        losses.reshape(len(targets), -1).mean(1),
        targets.reshape(-1).clone() if single else None,
        classes=2,
        count=targets.numel(),
    )


def _errors(node: Node) -> LossRows:
    errors = errors_of(node, kind(node))
    assert errors is not None
    targets = torch.atleast_1d(accumulable(saved(node, "target").detach()))
    losses = errors.reshape(len(targets), -1).mean(1)
    return LossRows(losses if len(losses) <= MOST_LABELS else None, count=len(targets),
                    variance=targets.var(correction=0))  # fmt: skip


LOSSES: Mapping[str, Any] = {
    "NllLossBackward": _classes,
    "NllLoss2DBackward": _classes,
    "BinaryCrossEntropyBackward": _probabilities,
    "BinaryCrossEntropyWithLogitsBackward": _probabilities,
    "MseLossBackward": _errors,
    "SmoothL1LossBackward": _errors,
    "HuberLossBackward": _errors,
    "SoftMarginLossBackward": _errors,
}
"""What reads the rows of a node, by its kind."""


def known_rows(losses: Floats, labels: Floats, ignored: int | None) -> tuple[Floats, Floats]:
    """The same with NaN as the loss of ignored rows, and −1 as their label."""
    if ignored is None or len(losses) != len(labels):
        return losses, labels
    is_ignored = labels == ignored
    return np.where(is_ignored, np.nan, losses), np.where(is_ignored, -1, labels)


def loss_columns(losses: Floats, classes: int) -> dict[str, Floats]:
    """Columns of the steps' table, from losses of single samples ``[K, N]``; NaN is none."""
    counts = (~np.isnan(losses)).sum(axis=1)
    known = np.where(np.isnan(losses), -np.inf, losses)
    ordered = np.sort(losses, axis=1)  # NaN come last
    places = np.stack([np.maximum(counts - 1, 0), np.minimum(counts // 2, losses.shape[1] - 1)], 1)
    largest, middle = np.take_along_axis(ordered, places, axis=1).T
    found = {
        "loss_max": largest,
        "loss_largest": np.where(counts > 0, known.argmax(axis=1), np.nan),
        "loss_median": middle,
    }
    if classes > 1:
        over = (known > 2 * math.log(classes)).sum(axis=1)
        found["loss_over"] = np.where(counts > 0, over / np.maximum(counts, 1), np.nan)
    return found


def label_columns(counts: NDArray[np.int64]) -> dict[str, Floats]:
    """Columns of the steps' table, from how often each class is a label ``[K, C]``."""
    sums = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(sums, 1)
    entropies = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=1)
    return {"label_entropy": np.where(sums[:, 0] > 0, entropies, np.nan)}


def counts_of(labels: Floats) -> NDArray[np.int64]:
    """How often each class is a label ``[K, C]``, of labels ``[K, N]`` of which −1 is none.

    Rows with labels that are no classes have no counts.
    """
    are_classes = (labels < MOST_CLASSES) & (labels == np.floor(labels)) | (labels < 0)
    known = (labels >= 0) & are_classes.all(axis=1, keepdims=True)
    classes = np.where(known, labels, 0).astype(np.int64)
    most = int(classes.max(initial=0)) + 1
    places = classes + most * np.arange(len(labels))[:, None]
    counts = np.bincount(places[known], minlength=most * len(labels))
    return counts.reshape(len(labels), most)


class LabelCounts:
    """How often each class was a label so far."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)

    def add(self, found: NDArray[np.int64]) -> None:
        """Add how often each class is a label of a batch ``[C]``."""
        most = max(len(found), len(self._counts))
        before = self._counts
        self._counts = np.pad(found, (0, most - len(found)))
        self._counts[: len(before)] += before

    def state_dict(self) -> State:
        """The counts."""
        return {"counts": self._counts.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._counts = np.array(state["counts"], dtype=np.int64)

    def columns(self) -> dict[str, float]:
        """Columns of the layers' table."""
        return {f"labels/{label}": float(n) for label, n in enumerate(self._counts) if n}


MOST_CLASSES = 1000
"""Labels are counted by class if their numbers are below this."""
