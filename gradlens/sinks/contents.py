"""What one value of a series says in numbers and histograms."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradlens.history.histograms import Histogram, by_parameter, histogram
from gradlens.history.lines import Line, number_lines
from gradlens.history.records import NOUNS, Source
from gradlens.history.scalars import scalars_of
from gradlens.history.series import Series


@dataclass(frozen=True)
class Contents:
    """Numbers and histograms of the value of ``series``, by part.

    ``of_layers`` and ``histograms_of_layers`` are those of single parameters and layers, by the
    name of the parameter or layer and the part.
    """

    series: str
    scalars: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    of_layers: Mapping[tuple[str, str], float]
    histograms_of_layers: Mapping[tuple[str, str], Histogram]


def contents_of(
    name: str,
    step: int,
    records: Series,
    source: Source | None,
    parameters: Collection[str],
    by_layer: bool,
) -> Contents:
    """What a series says at a step; ``records`` has the value of this step.

    Numbers that don't exist are left out. ``by_layer`` says whether those of layers are wanted.
    """
    value = records[step]
    scalars = {one.part: one.line for one in scalars_of(name, records, source, parameters)}
    is_histogram = _is_histogram(value)
    return Contents(
        name,
        _existing(step, scalars),
        {"": histogram(step, value)} if is_histogram else {},
        _existing(step, _of_layers(records.only([step]))) if by_layer else {},
        _histograms_of_layers(step, value) if is_histogram and by_layer else {},
    )


def _is_histogram(value: Any) -> bool:
    """Whether it is one of one dimension."""
    is_any = isinstance(value, Mapping) and {"hist", "edges"} <= value.keys()
    return is_any and np.ndim(value["hist"]) == 1


def _existing(step: int, lines: Mapping[Any, Line]) -> dict[Any, float]:
    """The numbers at a step, without those that are NaN for a reason."""
    found = {place: _number(step, line) for place, line in lines.items()}
    return {place: number for place, number in found.items() if number is not None}


def _number(step: int, line: Line) -> float | None:
    places = np.flatnonzero(line.steps == step)
    if not places.size:
        return None
    number = float(line.values[places[0]])
    return None if math.isnan(number) and line.reason else number


def _of_layers(records: Series) -> dict[tuple[str, str], Line]:
    found = {}
    for place, line in number_lines(records).items():
        words = [word for word in place.split("/") if word not in NOUNS]
        found["".join(words[:1]), "_".join(words[1:])] = line
    return found


def _histograms_of_layers(step: int, value: Mapping[str, Any]) -> dict[tuple[str, str], Histogram]:
    return {(layer, ""): one for layer, one in by_parameter(step, value).items()}
