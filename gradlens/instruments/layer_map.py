"""Numbers of each parameter or layer over time as a map of layers × steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.ticker import Formatter, Locator, MaxNLocator
from numpy.typing import NDArray

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line
from gradlens.instruments.drawing import (
    Artists,
    explain_empty,
    label_rows,
    missing,
    row_stride,
)
from gradlens.instruments.instrument import Instrument, Normalisation
from gradlens.instruments.layers import (
    LayerTable,
    are_shares,
    columns,
    layer_class,
    layout,
    table,
    words,
)
from gradlens.instruments.scales import (
    LogTicks,
    NumberLabels,
    PercentLabels,
    Scale,
    StepAxis,
    SymlogTicks,
    log_if_wide,
)
from gradlens.instruments.style import (
    ALARM,
    FAINT,
    PAPER,
    TICK_SIZE,
    inside,
    points,
    shorten_apart,
    signed_colormap,
    size_colormap,
    size_in_points,
    subtitle,
    text_width,
)

COLUMNS = 240
"""Largest number of columns; of several steps in one, the value furthest from zero is shown."""
DECADES = 12.0
"""Largest number of decades of a colour scale; values below them have the last colour."""
SEPARATED = 60
"""Largest number of rows for which lines separate the modules."""
BAR = (6.0, 34.0)
"""Points for the colour bar, and for it together with its labels."""


class LayerMapInstrument(Instrument):
    """A number for each parameter or layer over time: rows from input to output, colour its size.

    Draws every series of dicts by parameter or layer, and of dicts whose entry ``"parameters"`` or
    ``"layers"`` is such a dict. These dicts have numbers, or dicts with a ``"value"`` or a
    ``"trace"``. The colour scale is logarithmic unless the view is linear and the values are of
    similar size; the scale of fractions goes from 0 to 1. A cell is hatched if the record isn't a
    finite number, and blank if there is no record.
    """

    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = True
    by_layer: ClassVar[bool] = True
    width: ClassVar[float] = 2.0

    def _own_title(self, history: History, name: str) -> str:
        found = layout(history[name], history)
        own = super()._own_title(history, name)
        return f"{own} by {found.noun}" if found else own

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        found = layout(records, history)
        assert found is not None  # ``series`` has only those with a layout
        view = self.view(history)
        whole = table(records, found, history)
        if not np.isfinite(whole.values).any():
            axis.apply(ax)
            return explain_empty(ax, [Line(whole.steps, whole.values[0], whole.reason)])
        if self.options.normalise and not are_shares(whole.values, view):
            whole = normalised(whole, self.options.normalise, history)
        thinned, places = columns(whole, COLUMNS, axis.warp)
        inner, bar = _axes(ax, row_labels(thinned.names, history))
        axis.apply(inner)
        shares = are_shares(thinned.values, view)
        norm = Normalize(0, 1) if shares else colour_norm(thinned.values, view.yscale)
        edges = axis.unwarp(places)
        mesh = _mesh(inner, edges, thinned, norm)
        artists = _undefined(inner, edges, thinned)
        marks = {"hatched: no finite number": bool(artists), GREY: has_grey(thinned, norm)}
        what = words(found, view) + OVER[self.options.normalise] * (not shares)
        text = _words(what, norm, [mark for mark, shown in marks.items() if shown])
        artists |= {
            "map": mesh,
            "colours": colour_bar(bar, mesh, norm, PercentLabels() if shares else NumberLabels()),
            "subtitle": subtitle(ax, text),
        }
        return artists | missing(inner, axis, [_worst(whole)])


OVER: Mapping[Normalisation, str] = {
    "": "",
    "row": " over the row's median",
    "kind": " over the kind's median",
}


def _words(what: str, norm: Normalize, marks: Sequence[str]) -> str:
    scale = ", log" if isinstance(norm, (LogNorm, SymLogNorm)) else ""
    return " · ".join([f"colour: {what}{scale}", *marks, "from input (top) to output"])


GREY = "grey: 0"
"""What a map says where it shows exact zeros."""


def has_grey(found: LayerTable, norm: Normalize) -> bool:
    """Whether there are zeros that the scale of colours doesn't have."""
    return isinstance(norm, LogNorm) and bool((found.values == 0).any())


def row_labels(names: Sequence[str], history: History) -> list[str]:
    """Short names, with the class of a layer that has only a number."""
    found = []
    for name, label in zip(names, short_names(names), strict=True):
        kind = layer_class(name, history)
        number = [word for word in name.split(".") if word not in PARAMETERS][-1:]
        found.append(f"{label} {kind}" if kind and number and number[0].isdigit() else label)
    return found


PARAMETERS = ("weight", "bias")


def normalised(found: LayerTable, by: Normalisation, history: History) -> LayerTable:
    """The table with its rows divided by the medians of their sizes, or of those of their kind.

    A kind is a class of layers, and of their parameters the last word of the name.
    """
    kinds = [_kind(name, history) if by == "kind" else name for name in found.names]
    values = found.values.copy()
    for kind in {*kinds}:
        rows = np.array([one == kind for one in kinds])
        sizes = np.abs(values[rows])
        known = sizes[np.isfinite(sizes) & (sizes > 0)]
        values[rows] /= np.median(known) if known.size else 1.0
    return replace(found, values=values)


def _kind(name: str, history: History) -> str:
    word = name.rpartition(".")[2] if name in history.parameters else ""
    return f"{layer_class(name, history)} {word}"


def _axes(ax: Axes, names: Sequence[str]) -> tuple[Axes, Axes]:
    """An axis for the map with its rows labelled by names, and one for the colours."""
    width, height = size_in_points(ax)
    stride = row_stride(len(names), height)
    labels = shorten_apart(names[::stride], 0.3 * width, TICK_SIZE)
    left = max(0.0, max(text_width(label, TICK_SIZE) for label in labels) - points(24)) / width
    bar = inside(ax, 1 - points(BAR[1] - 8) / width, 0, points(BAR[0]) / width, 1)
    inner = inside(ax, left, 0, 1 - left - points(BAR[1]) / width, 1)
    label_rows(inner, labels, stride, len(names))
    return inner, bar


def short_names(names: Sequence[str]) -> list[str]:
    """The names without the modules that all of them are in."""
    modules = [name.split(".")[:-1] for name in names]
    common = itertools.takewhile(lambda words: len({*words}) == 1, zip(*modules, strict=False))
    start = "".join(f"{words[0]}." for words in common) if len(names) > 1 else ""
    return [name.removeprefix(start) for name in names]


def _mesh(ax: Axes, edges: Floats, found: LayerTable, norm: Normalize) -> QuadMesh:
    low = norm.vmin or 0.0
    values = found.values
    if isinstance(norm, LogNorm):
        # Zero isn't on a logarithmic scale, and has the colour of what is below it.
        values = np.where(values == 0, low / 2, np.maximum(values, low))
    mesh = ax.pcolormesh(
        edges,
        np.arange(len(found.names) + 1),
        np.ma.masked_invalid(values),
        norm=norm,
        cmap=(signed_colormap() if low < 0 else size_colormap()).with_extremes(under=FAINT),
        rasterized=True,
        zorder=2,
    )
    modules = [name.rpartition(".")[0] for name in found.names]
    for row in range(1, len(modules)) if len(modules) <= SEPARATED else ():
        if modules[row] != modules[row - 1]:
            ax.axhline(row, color=PAPER, linewidth=0.8, zorder=3)
    return mesh


def colour_norm(values: Floats, wish: Scale) -> Normalize:
    """The scale of colours for finite numbers of one or both signs; NaN is left out.

    It is linear if ``wish`` is and the sizes don't span too much, and otherwise logarithmic. With
    values of both signs, it is symmetric.
    """
    found = values[np.isfinite(values)]
    sizes = np.abs(found[found != 0])
    if not sizes.size:
        return Normalize(0, 1)
    low, high = float(sizes.min()), float(sizes.max())
    linear = wish == "linear" and log_if_wide([sizes]) == "linear"
    if (found < 0).any():
        return Normalize(-high, high) if linear else _symmetric(low, high)
    if linear:
        start = 0.0 if (found == 0).any() or low == high else low
        return Normalize(start, high)
    low = max(low / 10 if (found == 0).any() else low, high * 10**-DECADES)
    # At least a decade, so that noise isn't magnified.
    return LogNorm(min(low, high / 10), high)


def _symmetric(low: float, high: float) -> Normalize:
    threshold = 10.0 ** math.floor(math.log10(max(low, 1e-3 * high)))
    return SymLogNorm(threshold, linscale=0.5, vmin=-high, vmax=high, base=10)


def colour_bar(ax: Axes, mesh: ScalarMappable, norm: Normalize, labels: Formatter) -> Artist:
    """Draw the colours of a map on an axis of their own, with labels."""
    bar = Colorbar(ax, mesh, ticks=_ticks(norm), format=labels)
    bar.minorticks_off()
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0, pad=2.5, labelsize=TICK_SIZE)
    assert bar.solids is not None  # it was drawn for a mesh
    return bar.solids


def _ticks(norm: Normalize) -> Locator:
    if isinstance(norm, LogNorm):
        return LogTicks(5)
    if isinstance(norm, SymLogNorm):
        return SymlogTicks(norm.linthresh)
    return MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10])


def _undefined(ax: Axes, edges: Floats, found: LayerTable) -> Artists:
    """Hatch the cells whose record isn't a finite number."""
    hatched = found.recorded & ~np.isfinite(found.values)
    boxes = [
        [(edges[a], row), (edges[b], row), (edges[b], row + 1), (edges[a], row + 1)]
        for row, cells in enumerate(hatched)
        for a, b in _runs(cells)
    ]
    if not boxes:
        return {}
    hatches = PolyCollection(
        boxes, facecolors=PAPER, edgecolors=ALARM, hatch="/////", linewidths=0, zorder=2.5
    )
    return {"undefined": ax.add_collection(hatches, autolim=False)}


def _runs(cells: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First place, and the place after the last one, of each piece of ``True``."""
    changes = np.flatnonzero(np.diff(np.concatenate(([False], cells, [False])).astype(np.int8)))
    return [(int(a), int(b)) for a, b in changes.reshape(-1, 2)]


def _worst(found: LayerTable) -> Line:
    """One line that is NaN at steps at which the record of some row isn't a finite number."""
    broken = (found.recorded & ~np.isfinite(found.values)).any(axis=0)
    return Line(found.steps, np.where(broken, np.nan, 0.0))
