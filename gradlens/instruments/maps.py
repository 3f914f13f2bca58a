"""Draws numbers of each parameter or layer over the steps as a map of colours."""

from __future__ import annotations

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.ticker import Formatter
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.drawing import (
    label_rows,
    labelled_rows,
    missing,
    picture_and_series,
    row_stride,
)
from gradlens.instruments.layers import LayerTable, columns
from gradlens.instruments.panel import Artists, Map
from gradlens.instruments.scales import NumberLabels, PercentLabels, StepAxis, round_ticks
from gradlens.instruments.shapes import draw_beside
from gradlens.instruments.style import (
    ALARM,
    FAINT,
    PAPER,
    TICK_SIZE,
    inside,
    key,
    points,
    signal_colormap,
    signed_colormap,
    size_colormap,
    size_in_points,
    subtitle,
)

COLUMNS = 240
"""Largest number of columns; of several steps in one, the value furthest from zero is shown."""
SEPARATED = 60
"""Largest number of rows for which lines separate the modules."""
BESIDE = 40.0
"""Points between a map and the shapes beside it."""
COLORMAPS = {"sizes": size_colormap, "signed": signed_colormap, "signal": signal_colormap}
BAR = (6.0, 34.0)
"""Points for the colour bar, and for it together with its labels."""


GREY = "grey: 0"
"""What a map says where it shows exact zeros."""


def draw_map(ax: Axes, axis: StepAxis, shown: Map) -> Artists:
    """Draw a map, with rows labelled and colours explained where there is room."""
    thinned, places = columns(shown.table, COLUMNS, axis.warp)
    artists: Artists = {}
    inner = ax
    if shown.beside is not None:
        picture, inner = picture_and_series(ax, shown.beside.share, BESIDE)
        artists |= draw_beside(picture, shown.beside) if picture is not None else {}
        stride = row_stride(len(shown.labels), size_in_points(inner)[1])
        label_rows(inner, shown.labels[::stride], stride, len(shown.labels))
    else:
        width = size_in_points(ax)[0]
        bar = inside(ax, 1 - points(BAR[1] - 8) / width, 0, points(BAR[0]) / width, 1)
        inner = labelled_rows(ax, shown.labels, BAR[1])
    axis.apply(inner)
    edges = axis.unwarp(places)
    mesh = artists["map"] = _mesh(inner, edges, thinned, shown)
    if shown.beside is not None:
        explained = key(ax, shown.beside.key)
        artists |= {"key": explained} if explained is not None else {}
        return artists | missing(inner, axis, [_worst(shown.table)])
    artists |= _undefined(inner, edges, thinned)
    marks = {"hatched: no finite number": "undefined" in artists, GREY: shown.has_grey}
    notes = [mark for mark, is_shown in marks.items() if is_shown]
    text = " · ".join([f"colour: {shown.words}", *notes, "from input (top) to output"])
    labels = PercentLabels() if shown.shares else NumberLabels()
    artists |= {
        "colours": colour_bar(bar, mesh, shown.norm, labels),
        "subtitle": subtitle(ax, text),
    }
    return artists | missing(inner, axis, [_worst(shown.table)])


def _mesh(ax: Axes, edges: Floats, found: LayerTable, shown: Map) -> QuadMesh:
    norm = shown.norm
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
        cmap=COLORMAPS[shown.colors]().with_extremes(under=FAINT),
        rasterized=True,
        zorder=2,
    )
    modules = [name.rpartition(".")[0] for name in found.names]
    for row in range(1, len(modules)) if len(modules) <= SEPARATED else ():
        if modules[row] != modules[row - 1]:
            ax.axhline(row, color=PAPER, linewidth=0.8, zorder=3)
    return mesh


def colour_bar(ax: Axes, mesh: ScalarMappable, norm: Normalize, labels: Formatter) -> Artist:
    """Draw the colours of a map on an axis of their own, with labels."""
    linear = norm.linthresh if isinstance(norm, SymLogNorm) else 0.0
    ticks = round_ticks(5, isinstance(norm, LogNorm), linear)
    bar = Colorbar(ax, mesh, ticks=ticks, format=labels)
    bar.minorticks_off()
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.tick_params(length=0, pad=2.5, labelsize=TICK_SIZE)
    assert bar.solids is not None  # it was drawn for a mesh
    return bar.solids


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
