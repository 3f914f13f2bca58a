"""The instrument of series that have no other one, drawn by their view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import PLAIN, Line, line, lines, quantile_lines, rms_lines
from gradlens.history.series import Series
from gradlens.history.view import View
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    curve,
    curves,
    explain_empty,
    missing,
    readout,
    threads,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import StepAxis, fit
from gradlens.instruments.series import input_to_output
from gradlens.instruments.style import BLUE, Entry, categorical_colors, key, subtitle, tint, title

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 6


class GenericInstrument(Instrument):
    """A series by name: a line for numbers, lines for dicts, a band for arrays.

    Dicts may hold numbers or arrays; of an array in a dict, the root mean square is shown.
    """

    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        name = self.names[0]
        view, records = self.view(history), history[name]
        if records.entries:
            return self._dicts(history, ax, axis)
        if not records.kinds <= PLAIN and any(map(_is_array, records.values())):
            return _band(records, view, ax, axis)
        one = line(records)
        title(ax, self.heading(history), *readout(one))
        artists = curves(ax, axis, {name: one}, [BLUE], view.yscale)
        return artists | ({"subtitle": subtitle(ax, view.label)} if view.label else {})

    def _dicts(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        view = self.view(history)
        every = _lines(history[self.names[0]])
        found = {n: one for n, one in every.items() if one.finite.any() or one.reason}
        names = input_to_output(tuple(found), history)
        shown = {name: found[name] for name in names}
        ordered_by_depth = any(name in history.parameters for name in names) or len(names) > FEW
        if ordered_by_depth or not shown:
            one_by_one = self.options.single_lines
            return threads(ax, axis, shown, view.yscale, single_lines=one_by_one)
        return curves(ax, axis, shown, categorical_colors(len(shown)), view.yscale)


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


def _band(records: Series, view: View, ax: Axes, axis: StepAxis) -> Artists:
    axis.apply(ax)
    found = quantile_lines(records, SHARES)
    if not any_finite(found):
        return explain_empty(ax, found)
    low, q1, middle, q3, high = found
    artists: Artists = {
        "range": _between(ax, low, high, 0.15),
        "quartiles": _between(ax, q1, q3, 0.35),
    }
    artists |= curve(ax, axis, middle, BLUE, "median", z=5)
    fit(ax, [one.values for one in found], view.yscale)
    entries = [
        Entry("median", BLUE),
        Entry("middle half", tint(BLUE, 0.4), "box"),
        Entry("all", tint(BLUE, 0.18), "box"),
    ]
    shown = key(ax, entries)
    artists |= {"key": shown} if shown else {}
    return artists | missing(ax, axis, [middle])


def _between(ax: Axes, low: Line, high: Line, share: float) -> Any:
    kept = _evenly(low.steps.size)
    return ax.fill_between(
        low.steps[kept], low.values[kept], high.values[kept], color=tint(BLUE, share), linewidth=0,
        zorder=2,
    )  # fmt: skip


def _evenly(count: int, most: int = 1000) -> Any:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
