"""Labels and losses of single samples, from the loss function's node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.graph.kinds import kind, kind_of
from gradlens.graph.loss import Loss
from gradlens.numerics.precision import accumulable
from gradlens.stateful import State
from gradlens.torch_private import saved, signed

Floats = NDArray[np.float64]

MOST_LABELS = 4096
"""Labels of a step are kept if there are no more."""


@dataclass(frozen=True)
class LossRows:
    """What a loss function was called with, and its values, for each row of the targets ``[M]``.

    Weights of classes and samples don't count. ``labels`` and ``classes`` are those of a
    classification, in which rows whose label is ``ignored`` have no loss; ``variance`` is that of
    the targets of a regression.
    """

    losses: Tensor | None = None
    labels: Tensor | None = None
    ignored: int | None = None
    classes: int = 0
    count: int = 0
    variance: Tensor | None = None


@torch.no_grad()
def loss_rows(loss: Loss) -> LossRows:
    """The rows of a loss; none where it isn't known which function has computed it."""
    if loss.targets is None or not loss.targets.numel():
        return LossRows()
    targets = torch.atleast_1d(loss.targets)  # a number alone is one row
    of = kind_of(kind(loss.function)).targets
    is_single = targets.numel() == len(targets)  # several labels of a row are none
    count = len(targets) if of == "numbers" else targets.numel()
    is_known = count <= MOST_LABELS and (of != "classes" or targets.dim() == 1)
    return LossRows(
        loss.values(weighted=False) if is_known else None,
        targets.reshape(-1).clone() if is_known and is_single and of != "numbers" else None,
        signed(saved(loss.function, "ignore_index")) if of == "classes" else None,
        _classes(saved(loss.function, "self"), of),
        count,
        accumulable(targets).var(correction=0) if of == "numbers" else None,
    )


def _classes(outputs: Tensor, of: str) -> int:
    """The number of classes; 0 of a regression."""
    if of == "classes":
        return outputs.shape[1 if outputs.dim() > 1 else 0]
    return 2 if of == "probabilities" else 0


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
