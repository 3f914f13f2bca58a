"""Columns of the facts' tables, from what was recorded of some steps.

Steps whose batches have the same size are reduced together: numpy takes about as long for eight of
them as for one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gradlens.facts.batch import batch_columns
from gradlens.facts.loss import LabelCounts, counts_of, label_columns, loss_columns
from gradlens.facts.step_facts import StepNumbers
from gradlens.history.facts import OF_SAMPLES

Floats = NDArray[np.float64]
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
