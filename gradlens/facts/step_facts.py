"""What is recorded of one step: on the device, and as numbers by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradlens.facts.parameters import ByKind
from gradlens.facts.rows import (
    LossRows,
    Rows,
    batch_columns,
    counts_of,
    joined,
    known_rows,
    label_columns,
    loss_columns,
)
from gradlens.history.records import OF_SAMPLES
from gradlens.history.series import EXACT
from gradlens.numerics.tensors import on_host

Floats = NDArray[np.float64]


@dataclass
class StepFacts:
    """What is recorded of one step, on the device.

    ``numbers`` are those of the step, and ``of_layers`` those of layers and parameters where they
    are recorded at the step. Of several micro-batches, there are the ``rows`` and ``loss_rows`` of
    each, and its ``parts`` of the loss: the loss, whether it is that of the micro-batch alone, and
    how many samples it is of.
    """

    step: int
    numbers: dict[str, Tensor | float] = field(default_factory=dict)
    of_layers: ByKind | None = None
    parts: list[tuple[Tensor, bool, int]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    ids: list[int | str] = field(default_factory=list)
    loss_rows: list[LossRows] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """How many elements a row of the inputs has; 0 if that isn't known."""
        return self.rows[-1].elements if self.rows else 0

    @property
    def classes(self) -> int:
        """The number of classes; 0 if there are none."""
        return self.loss_rows[-1].classes if self.loss_rows else 0

    def inputs(self) -> Floats | None:
        """Numbers ``[4, N]`` of the inputs' rows.

        Of micro-batches whose rows have other sizes than those of the last, there are none.
        """
        same = [each for each in self.rows if each.elements == self.elements]
        return joined(same) if same else None

    def losses_and_labels(self) -> tuple[Floats, Floats]:
        """Those of samples ``[N]``, and empty where they aren't known."""
        found = [
            known_rows(_numbers(each.losses), _numbers(each.labels), each.ignored)
            for each in self.loss_rows
        ]
        losses, labels = zip(*found, strict=True) if found else ((), ())
        return np.concatenate([NONE, *losses]), np.concatenate([NONE, *labels])


def _numbers(tensor: Tensor | None) -> Floats:
    return NONE if tensor is None else tensor.detach().double().numpy()


NONE = np.zeros(0)


Columns = dict[str, float]


def facts_of(steps: Sequence[StepFacts], labels: Counter[int]) -> dict[int, dict[str, Any]]:
    """The facts of some steps, as ``History.facts`` has them.

    All tensors are moved to the host together. The labels are added to ``labels``, which says how
    often each class was one so far.
    """
    steps = on_host(list(steps))
    found = [{name: float(value) for name, value in each.numbers.items()} for each in steps]
    inputs = [each.inputs() for each in steps]
    samples = [
        each.numbers.get("labels") if rows is None else rows.shape[1]
        for each, rows in zip(steps, inputs, strict=True)
    ]
    elements, classes = [each.elements for each in steps], [each.classes for each in steps]
    batches = {n: rows for n, rows in enumerate(inputs) if rows is not None}
    for places, rows in _alike(batches, elements):
        _add(found, places, batch_columns(rows, elements[places[0]]))
    # There is one for each sample, rather than for each word.
    of_rows = [step.losses_and_labels() for step in steps]
    for row, (values, _) in zip(found, of_rows, strict=True):
        if np.isfinite(values).any():
            row["loss_mean"] = float(np.nanmean(values))
    of_samples = [
        [each if each.size and each.size == size else None for each in both]
        for both, size in zip(of_rows, samples, strict=True)
    ]
    losses = {n: each for n, (each, _) in enumerate(of_samples) if each is not None}
    for places, values in _alike(losses, classes):
        _add(found, places, loss_columns(values, classes[places[0]]))
    counts: dict[int, NDArray[np.int64]] = {}
    known = {n: each for n, (_, each) in enumerate(of_samples) if each is not None}
    for places, values in _alike(known, [0] * len(steps)):
        counts |= zip(places, counts_of(values), strict=True)
        _add(found, places, label_columns(np.stack([counts[n] for n in places])))
    facts: dict[int, dict[str, Any]] = {}
    for n, step in enumerate(steps):
        if len(step.ids) == samples[n]:
            found[n] |= ids_of(found[n], step.ids)
        if n in counts:
            labels.update({int(c): int(counts[n][c]) for c in np.flatnonzero(counts[n])})
        facts[step.step] = {"steps": found[n]}
        if step.of_layers is not None:
            by_kind = {
                **{k: {n: float(v) for n, v in of.items()} for k, of in step.of_layers.items()},
                "labels": {str(each): float(labels[each]) for each in sorted(labels)},
            }
            facts[step.step]["layers"] = {kind: of for kind, of in by_kind.items() if of}
    return facts


def _alike(
    arrays: Mapping[int, Floats], kinds: Sequence[Hashable]
) -> Iterator[tuple[list[int], Floats]]:
    """Arrays of the same shape and kind with the places of their steps, as one."""
    groups: dict[Hashable, list[int]] = {}
    for place, array in arrays.items():
        groups.setdefault((array.shape, kinds[place]), []).append(place)
    for places in groups.values():
        yield places, np.stack([arrays[place] for place in places])


def _add(rows: Sequence[Columns], places: Sequence[int], found: Mapping[str, Floats]) -> None:
    """Add the numbers of columns to their rows; NaN is none."""
    for name, column in found.items():
        for place, value in zip(places, column.tolist(), strict=True):
            if not math.isnan(value):
                rows[place][name] = value


def ids_of(row: Mapping[str, float], ids: Sequence[int | str]) -> Columns:
    """The user's own numbers of the samples that a row gives by their places in the batch."""
    chosen = {name: ids[int(row[name])] for name in OF_SAMPLES if name in row}
    return {
        f"{name}_id": float(one)
        for name, one in chosen.items()
        if isinstance(one, int) and abs(one) <= EXACT
    }
