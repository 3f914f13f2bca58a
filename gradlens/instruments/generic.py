"""The instrument of series that have no other one, drawn by their view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import PLAIN, Line, line, lines, quantile_lines, rms_lines
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import categorical_colors

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 6


class GenericInstrument(Instrument):
    """A series by name: a line for numbers, lines for dicts, a band for arrays.

    Dicts may hold numbers or arrays; of an array in a dict, the root mean square is shown.
    """

    def content(self, history: History) -> Lines:
        name = self.names[0]
        view, records = self.view(history), history[name]
        if records.entries:
            return self._dicts(history)
        if not records.kinds <= PLAIN and any(map(_is_array, records.values())):
            low, q1, middle, q3, high = quantile_lines(records, SHARES)
            curve = Curve("median", middle, spreads=((low, high), (q1, q3)))
            return Lines((curve,), scale=view.yscale, words="median, middle half, and all elements")
        return Lines((Curve(name, line(records)),), scale=view.yscale, words=view.label)

    def _dicts(self, history: History) -> Lines:
        view = self.view(history)
        every = _lines(history[self.names[0]])
        found = {n: one for n, one in every.items() if one.finite.any() or one.reason}
        shown = {name: found[name] for name in input_to_output(tuple(found), history)}
        ordered_by_depth = any(name in history.parameters for name in shown) or len(shown) > FEW
        if ordered_by_depth:
            return Lines(layers=shown, scale=view.yscale)
        colors = categorical_colors(len(shown))
        return Lines(tuple(map(Curve, shown, shown.values(), colors)), scale=view.yscale)


def _is_array(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or np.ndim(value) > 0


def drawable(records: Series) -> bool:
    """Whether there is a way to draw a series: numbers, arrays, or dicts of these."""
    return any(_known(value) for value in records.values())


def _known(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_known(part) and not isinstance(part, Mapping) for part in value.values())
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(part, (int, float)) for part in value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biuf"
    return isinstance(value, (int, float, np.number))


def _lines(records: Series) -> dict[str, Line]:
    numbers = lines(records)
    sizes = {} if all(map(_is_number, numbers.values())) else rms_lines(records)
    return {name: one if _is_number(one) else sizes[name] for name, one in numbers.items()}


def _is_number(one: Line) -> bool:
    return bool(one.finite.any()) or bool(one.reason)
