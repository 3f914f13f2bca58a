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

from gradlens.facts.batch import median
from gradlens.hooks.node_kinds import VIEWS, Node, kind
from gradlens.hooks.torch_private import saved
from gradlens.numerics.precision import accumulable
from gradlens.stateful import State

Floats = NDArray[np.float64]

REDUCTIONS = ("", "mean", "sum")
"""By the numbers that torch's nodes save."""

WITHIN = 32
"""A loss has so many nodes between itself and the node of its loss function, at most."""

_SUMS = {"AddBackward", "SubBackward", "MulBackward", "DivBackward", "NegBackward"}
_REDUCING = {"MeanBackward": "mean", "SumBackward": "sum"}

MOST_LABELS = 4096
"""Labels of a step are kept if there are no more."""


@dataclass(frozen=True)
class LossNode:
    """The node of a loss function: its kind, without digits, and how it is reduced to a number.

    ``reduction`` is empty if it isn't known.
    """

    node: Node
    kind: str
    reduction: str


def loss_node(loss: Tensor) -> LossNode | None:
    """The node of the loss function that a loss was computed by; ``None`` if it isn't known.

    A loss that is computed by several of them has none.
    """
    waiting: list[tuple[Node | None, str]] = [(loss.grad_fn, "")]
    found: list[LossNode] = []
    visited = 0
    while waiting and visited < WITHIN:
        node, outer = waiting.pop()
        if node is None:
            continue
        visited += 1
        name = kind(node).rstrip(digits)
        if name in LOSSES:
            inner = REDUCTIONS[saved(node, "reduction", 0)]
            found.append(LossNode(node, name, inner or outer))
        elif name in _REDUCING:
            waiting.append((node.next_functions[0][0], _REDUCING[name]))
        elif name in _SUMS or VIEWS.match(kind(node)):
            waiting += [(child, outer) for child, _ in node.next_functions]
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class LossRows:
    """What a loss function was called with, and its values, for each row of the targets ``[M]``.

    ``labels`` and ``classes`` are those of a classification, and ``variance`` is that of the
    targets of a regression.
    """

    losses: Tensor | None = None
    labels: Tensor | None = None
    classes: int = 0
    count: int = 0
    variance: Tensor | None = None


@torch.no_grad()
def loss_rows(found: LossNode) -> LossRows:
    return LOSSES[found.kind](found.node)


def _classes(node: Node) -> LossRows:
    log_probabilities, labels = saved(node, "self").detach(), saved(node, "target").detach()
    axis = 1 if log_probabilities.dim() > 1 else 0
    classes = log_probabilities.shape[axis]
    if labels.numel() > MOST_LABELS or labels.dim() != 1:
        return LossRows(count=labels.numel(), classes=classes)
    ignored = labels == saved(node, "ignore_index")
    chosen = torch.where(ignored, 0, labels)[:, None]
    losses = -accumulable(log_probabilities.gather(1, chosen)).squeeze(1)
    return LossRows(
        torch.where(ignored, math.nan, losses),
        torch.where(ignored, -1, labels),
        classes,
        len(labels),
    )


def _probabilities(node: Node) -> LossRows:
    """Of a binary classification; labels that are no classes, or several for each row, are none."""
    logits, targets = saved(node, "self").detach(), saved(node, "target").detach()
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
        2,
        targets.numel(),
    )


def _errors(node: Node) -> LossRows:
    predictions, targets = saved(node, "self").detach(), saved(node, "target").detach()
    differences = accumulable(predictions) - accumulable(targets)
    losses = differences.square().reshape(len(targets), -1).mean(1)
    variance = accumulable(targets).var(correction=0)
    return LossRows(losses if len(losses) <= MOST_LABELS else None, count=len(targets),
                    variance=variance)  # fmt: skip


LOSSES: Mapping[str, Any] = {
    "NllLossBackward": _classes,
    "NllLoss2DBackward": _classes,
    "BinaryCrossEntropyBackward": _probabilities,
    "BinaryCrossEntropyWithLogitsBackward": _probabilities,
    "MseLossBackward": _errors,
    "SmoothL1LossBackward": _errors,
    "HuberLossBackward": _errors,
}
"""What reads the rows of a node, by its kind."""


def loss_columns(losses: Floats, classes: int) -> dict[str, float]:
    """Columns of the steps' table, from losses of single samples ``[N]``."""
    known = losses[~np.isnan(losses)]
    if not known.size:
        return {}
    found = {
        "loss_max": float(known.max()),
        "loss_largest": float(np.nanargmax(losses)),
        "loss_median": median(known),
    }
    if classes > 1:
        found["loss_over"] = float((known > 2 * math.log(classes)).mean())
    return found


def label_columns(labels: Floats) -> dict[str, float]:
    """Columns of the steps' table, from the labels of single samples ``[N]``; −1 is none."""
    counts = counts_of(labels)
    if not counts.size:
        return {}
    shares = counts[counts > 0] / counts.sum()
    return {"label_entropy": float(-(shares * np.log(shares)).sum())}


def counts_of(labels: Floats) -> NDArray[np.int64]:
    """How often each class is a label; none if some labels are no classes."""
    known = labels[labels >= 0]
    classes = known.astype(np.int64)
    if not known.size or classes.max() >= MOST_CLASSES or (classes != known).any():
        return np.zeros(0, dtype=np.int64)
    return np.bincount(classes)


class LabelCounts:
    """How often each class was a label so far."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)

    def add(self, labels: Floats) -> None:
        """Count the labels of a batch."""
        found = counts_of(labels)
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
