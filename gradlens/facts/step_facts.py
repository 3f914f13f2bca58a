"""What is recorded of one step: on the device, as numbers, and as columns of tables."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.facts.batch import Rows, batch_columns, joined
from gradlens.facts.loss import (
    LabelCounts,
    LossRows,
    counts_of,
    known_rows,
    label_columns,
    loss_columns,
)
from gradlens.history.facts import OF_SAMPLES

Floats = NDArray[np.float64]


@dataclass
class StepFacts:
    """What is recorded of one step, on the device.

    ``numbers`` are columns of the steps' table, and ``of_layers`` those of the layers' table, where
    the step has a row there. Of several micro-batches, there are the ``rows`` and ``loss_rows`` of
    each, and its ``parts`` of the loss: the loss, whether it is that of the micro-batch alone, and
    how many samples it is of.
    """

    step: int
    numbers: dict[str, Tensor | float] = field(default_factory=dict)
    of_layers: dict[str, Tensor] | None = None
    parts: list[tuple[Tensor, bool, int]] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    ids: list[int | str] = field(default_factory=list)
    loss_rows: list[LossRows] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in the order in which ``StepNumbers`` takes them."""
        yield from (value for value in self.numbers.values() if isinstance(value, Tensor))
        yield from (self.of_layers or {}).values()
        for rows in self.rows:
            yield from rows.numbers
        for part in self.loss_rows:
            yield from (each for each in (part.losses, part.labels) if each is not None)


@dataclass(frozen=True)
class StepNumbers:
    """What is recorded of one step, in double precision.

    ``of_layers`` is ``None`` if the step has no row in the layers' table. ``rows`` ``[4, N]`` are
    numbers of the inputs' rows, of ``elements`` each; of micro-batches whose rows have other sizes
    than those of the last, there are none. ``losses`` ``[N]`` and ``labels`` ``[N]`` are those of
    samples, and empty where they aren't known.
    """

    step: int
    numbers: Mapping[str, float]
    of_layers: Mapping[str, float] | None
    rows: Floats | None
    elements: int
    losses: Floats
    labels: Floats
    classes: int
    ids: Sequence[int | str]

    @property
    def samples(self) -> float | None:
        """The number of samples; ``None`` if it isn't known."""
        return self.numbers.get("labels") if self.rows is None else self.rows.shape[1]


def read(steps: Sequence[StepFacts]) -> list[StepNumbers]:
    """The same as numbers, which are copied from the device together."""
    tensors = [tensor for facts in steps for tensor in facts.tensors()]
    flat = [tensor.detach().reshape(-1).double() for tensor in tensors]
    numbers = torch.cat(flat).cpu().numpy() if flat else np.zeros(0)
    ends = np.cumsum([len(each) for each in flat]).tolist()
    pieces = (
        numbers[end - tensor.numel() : end].reshape(tuple(tensor.shape))
        for tensor, end in zip(tensors, ends, strict=True)
    )
    return [_numbers(facts, pieces) for facts in steps]


def _numbers(facts: StepFacts, pieces: Iterator[Floats]) -> StepNumbers:
    numbers = {
        name: float(next(pieces)) if isinstance(value, Tensor) else value
        for name, value in facts.numbers.items()
    }
    of_layers = None
    if facts.of_layers is not None:
        of_layers = {name: float(next(pieces)) for name in facts.of_layers}
    parts = [(rows.elements, [next(pieces) for _ in rows.numbers]) for rows in facts.rows]
    elements = parts[-1][0] if parts else 0
    same = [numbers for size, numbers in parts if size == elements]
    of_samples = [_of_samples(part, pieces) for part in facts.loss_rows]
    return StepNumbers(
        facts.step,
        numbers,
        of_layers,
        joined(same) if same else None,
        elements,
        np.concatenate([NONE, *(losses for losses, _ in of_samples)]),
        np.concatenate([NONE, *(labels for _, labels in of_samples)]),
        facts.loss_rows[-1].classes if facts.loss_rows else 0,
        facts.ids,
    )


def _of_samples(part: LossRows, pieces: Iterator[Floats]) -> tuple[Floats, Floats]:
    losses = NONE if part.losses is None else next(pieces)
    labels = NONE if part.labels is None else next(pieces)
    return known_rows(losses, labels, part.ignored)


NONE = np.zeros(0)


Columns = dict[str, float]


def columns(
    steps: Sequence[StepNumbers], labels: LabelCounts
) -> tuple[list[Columns], list[tuple[int, Columns]]]:
    """The rows of the steps' table, and those of the layers' table with their steps.

    ``labels`` are counted.
    """
    found: list[Columns] = [dict(step.numbers) for step in steps]
    batches = {n: each.rows for n, each in enumerate(steps) if each.rows is not None}
    for places, rows in _alike(batches, [step.elements for step in steps]):
        _add(found, places, batch_columns(rows, steps[places[0]].elements))
    losses = {n: each.losses for n, each in enumerate(steps) if _are_all(each, each.losses)}
    for places, values in _alike(losses, [step.classes for step in steps]):
        _add(found, places, loss_columns(values, steps[places[0]].classes))
    counts: dict[int, NDArray[np.int64]] = {}
    known = {n: each.labels for n, each in enumerate(steps) if _are_all(each, each.labels)}
    for places, values in _alike(known, [0] * len(steps)):
        counts |= zip(places, counts_of(values), strict=True)
        _add(found, places, label_columns(np.stack([counts[n] for n in places])))
    of_layers: list[tuple[int, Columns]] = []
    for n, step in enumerate(steps):
        if len(step.ids) == step.samples:
            found[n] |= ids_of(found[n], step.ids)
        if n in counts:
            labels.add(counts[n])
        if step.of_layers is not None:
            of_layers.append((step.step, {**step.of_layers, **labels.columns()}))
    return found, of_layers


def _are_all(step: StepNumbers, values: Floats) -> bool:
    """Whether there is one for each sample, rather than for each word."""
    return values.size > 0 and values.size == step.samples


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
        if isinstance(one, int) and abs(one) <= LARGEST_ID
    }


LARGEST_ID = 2**24
"""The tables are in single precision, which has all whole numbers up to this one."""
