"""Histograms of gradient elements, and of these against their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradlens.history.histograms import Histogram, by_parameter, ends, histogram, latest, percent
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import row_labels
from gradlens.instruments.panel import Curve, Grid, Lines, Picture, Shape, Shapes
from gradlens.instruments.scales import Ruler, number_label, padded
from gradlens.instruments.series import ordered
from gradlens.instruments.style import BLUE, FAINT, MUTED, ORANGE, Color, Entry, tint

ELEMENT = "element of gₙ"


class Histogram1dInstrument(Instrument):
    """Density of gradient elements at the latest step, in front of the first one's.

    It shows densities, because ranges may differ from step to step. Outer bins with clipped
    elements are marked. Pages show all steps.
    """

    kinds = ("GradHist1d",)

    def content(self, history: History) -> Lines | Shapes:
        records = history[self.names[0]]
        found = ends(records)
        if not found:
            return Lines((Curve("elements", line(records)),))
        first, last = found[0], found[-1]
        shown = _densities(last, _with_margins(_range(found)), *found[:-1])
        key = [Entry(f"step {last.step:,}", BLUE, "box")]
        if first is not last:
            key.append(Entry(f"step {first.step:,}", MUTED, "thin"))
        if last.clipped:
            key.append(Entry(f"{percent(last.clipped)} clipped", ORANGE, "box"))
        return replace(
            shown,
            key=tuple(key),
            over_steps=_over_steps(records),
            readout=(last.excess(clipped=False), last.nan > 0),
        )


def _densities(one: Histogram, across: tuple[float, float], *first: Histogram) -> Shapes:
    """The density of a histogram as an area, with the outline of the first one."""
    filled = np.concatenate([each.density[each.density > 0] for each in (one, *first)])
    # At least a decade, so that small differences between bins aren't magnified.
    up = padded(min(filled.min(), 0.1 * filled.max()), filled.max(), log=True)
    shapes = [_stairs("latest", one, up[0], tint(BLUE, 0.4)), _outline("outline", one, up[0], BLUE)]
    shapes += [_outline("first", each, up[0], MUTED) for each in first]
    for name, count, which in (
        ("below", one.below, slice(0, 2)),
        ("above", one.above, slice(-2, None)),
    ):
        if count[0]:
            shapes.append(_stairs(name, one, up[0], ORANGE, which))
    return Shapes(tuple(shapes), Ruler(ELEMENT, across), Ruler("density", up, log=True))


def _stairs(
    name: str, one: Histogram, floor: float, color: Color, which: slice = slice(None)
) -> Shape:
    """The area of bins, which begins below the axis, because zero isn't on a logarithmic one."""
    x = np.repeat(one.edges[0], 2)[1:-1]
    y = np.repeat(np.maximum(one.density, floor / 10), 2)
    return Shape(name, x[which], y[which], color, "area", np.full(x[which].size, floor / 10))


def _outline(name: str, one: Histogram, floor: float, color: Color) -> Shape:
    return replace(_stairs(name, one, floor, color), kind="line", low=None, width=0.8)


def _range(shown: Sequence[Histogram], side: int = 0) -> tuple[float, float]:
    """The range of all bins that aren't empty."""
    filled = [one.occupied(side) for one in shown if one.counts.any()] or [(-1.0, 1.0)]
    return min(low for low, _ in filled), max(high for _, high in filled)


def _with_margins(ends: tuple[float, float]) -> tuple[float, float]:
    pad = 0.02 * (ends[1] - ends[0])
    return ends[0] - pad, ends[1] + pad


# All steps ----------------------------------------------------------------------------------

COLUMNS, ROWS = 240, 60
"""Largest number of columns and rows of the histograms of a run."""
REACH = 0.9
"""Share of the histograms of a run whose range is shown as a whole."""


def _over_steps(records: Series) -> Picture:
    """The densities at all steps, or evenly at ``COLUMNS`` of them."""
    steps = [*records]
    chosen = np.unique(np.linspace(0, len(steps) - 1, COLUMNS).round().astype(np.int64))
    values = ((steps[place], records[steps[place]]) for place in chosen)
    every = [histogram(step, one) for step, one in values if isinstance(one, Mapping)]
    found = [one for one in every if one.counts.any()] or ends(records)
    lows, highs = np.array([one.occupied(0) for one in found]).T
    low, high = float(np.quantile(lows, 1 - REACH)), float(np.quantile(highs, REACH))
    rows = np.linspace(low, high, ROWS + 1)
    at = np.array([one.step for one in found], dtype=np.float64)
    return Picture(
        np.array([one.mean_density(rows) for one in found]).T,
        columns=np.append(at, at[-1]),
        rows=rows,
        across=Ruler("step", (at[0], at[-1])),
        up=Ruler(ELEMENT, (low, high)),
        words="density of elements of gₙ, log",
        steps=at,
    )


# Two dimensions -----------------------------------------------------------------------------


class Histogram2dInstrument(Instrument):
    """Gradient elements (across) and parameter values (up) at the latest step.

    The colour is the logarithm of the count; the marginals have logarithmic counts too.
    """

    kinds = ("GradHist2d",)

    def content(self, history: History) -> Lines | Picture:
        records = history[self.names[0]]
        found = ends(records)
        if not found:
            return Lines((Curve("elements", line(records)),))
        last = found[-1]
        most = number_label(float(last.counts.max()))
        return replace(
            _counts(last, *(_with_margins(_range([last], side)) for side in (0, 1))),
            words=f"step {last.step:,} · colour: count, 1 to {most}, log",
            margins=True,
        )


def _counts(one: Histogram, across: tuple[float, float], up: tuple[float, float]) -> Picture:
    columns, rows = one.edges
    return Picture(
        one.counts.T,
        columns,
        rows,
        Ruler(ELEMENT, across),
        Ruler("parameter", up),
        readout=(one.excess(), one.nan > 0),
    )


# By parameter -------------------------------------------------------------------------------

MOST = 48
"""Largest number of small panels."""
EMPTY = Lines(message="no finite element")


def _by_parameter(one: Instrument, history: History) -> tuple[int, dict[str, Histogram]]:
    """The latest step, and the histograms of its parameters from input to output."""
    found = latest(history[one.names[0]], one.part)
    assert found is not None
    return found[0], ordered(by_parameter(*found), history)


class LayerHistogramsInstrument(Instrument):
    """Density of gradient elements at the latest step, a small panel for each parameter.

    All panels have the same range of elements, so that those of a vanishing gradient are narrow.
    For very many parameters, there is one panel with a row for each, and colour is log density.
    """

    kinds = ("GradHist1d",)
    title = "Gradient elements by parameter"
    secondary = True
    part = "parameters"

    def content(self, history: History) -> Grid | Picture:
        step, parts = _by_parameter(self, history)
        across = _range([*parts.values()])
        if len(parts) > MOST:
            return Picture(
                np.array([one.density for one in parts.values()]),
                columns=next(iter(parts.values())).edges[0],
                rows=np.arange(len(parts) + 1.0),
                across=Ruler(ELEMENT, _with_margins(across)),
                up=Ruler("", (len(parts), 0)),
                words=f"step {step:,} · colour: density, log · from input to output",
                labels=row_labels([*parts], history),
            )
        words = f"step {step:,} · density, log · orange: clipped · from input to output"
        return Grid({name: _small(one, across) for name, one in parts.items()}, words)


def _small(one: Histogram, across: tuple[float, float]) -> Lines | Shapes:
    if not one.counts.any():
        return replace(EMPTY, latest=(one.excess(), one.nan > 0))
    shown = _densities(one, across)
    zero = Shape("zero", np.zeros(2), np.array(shown.up.limits), FAINT, width=0.7)
    return replace(shown, shapes=(*shown.shapes, zero), readout=(one.excess(), one.nan > 0))


class LayerJointHistogramsInstrument(Instrument):
    """Gradient elements and parameter values at the latest step, a small panel for each parameter.

    All panels have the same two ranges, and the colour is the logarithm of the count. There are
    ``MOST`` panels at most, those nearest to the input.
    """

    kinds = ("GradHist2d",)
    title = "Joint histogram by parameter"
    secondary = True
    part = "parameters"

    def content(self, history: History) -> Grid:
        step, parts = _by_parameter(self, history)
        shown = {name: parts[name] for name in [*parts][:MOST]}
        ranges = _range([*shown.values()], 0), _range([*shown.values()], 1)
        found: dict[str, Lines | Picture | Shapes] = {
            name: _counts(one, *ranges) if one.counts.any() else EMPTY
            for name, one in shown.items()
        }
        first = f"first {len(shown)} of {len(parts)}, " if len(parts) > len(shown) else ""
        words = f"step {step:,} · across: gₙ, up: parameter · colour: count, log · {first}"
        return Grid(found, f"{words}from input to output")
