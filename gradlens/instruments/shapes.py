"""Draws colours and shapes: maps of layers over the steps, pictures, and shapes on any two axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FixedFormatter, FixedLocator, Formatter, NullLocator

from gradlens.history.lines import Floats
from gradlens.instruments.panel import Artists, Map, Picture, Shape, Shapes
from gradlens.instruments.scales import NumberLabels, Ruler, StepAxis, round_ticks, value_labels
from gradlens.instruments.series import LayerTable, columns
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    COLORMAPS,
    FAINT,
    GRID,
    MUTED,
    PAPER,
    SMALLEST_SIZE,
    TICK_SIZE,
    explained,
    inside,
    points,
    shorten,
    shorten_apart,
    size_in_points,
    subtitle,
    text_width,
    tint,
    written,
)


def draw_shapes(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes, and explain them above the axes."""
    return shapes_on(ax, shown) | explained(ax, shown.key, shown.words)


def draw_beside(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes beside a series, which has the key; their words are in a corner."""
    artists = shapes_on(ax, shown)
    if shown.words:
        look = {"fontsize": SMALLEST_SIZE, "zorder": 6}
        artists["words"] = written(ax, shown.words, (0, 0), (3, 3), **look)
    return artists


def shapes_on(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes without a word about them."""
    artists = {one.name: _shape(ax, one, 2 + 0.1 * n) for n, one in enumerate(shown.shapes)}
    set_rulers(ax, shown.across, shown.up)
    if shown.equal:
        ax.set_aspect("equal", adjustable="box", anchor="NW")
        for spine in ax.spines.values():
            spine.set(visible=True, color=GRID, linewidth=0.8)
    return artists


def _shape(ax: Axes, one: Shape, z: float) -> Artist:
    look: dict[str, Any] = {"color": one.color, "alpha": one.opacity, "zorder": z}
    if one.kind == "area":
        low = 0.0 if one.low is None else one.low
        return ax.fill_between(one.x, low, one.y, linewidth=0, **look)
    if one.kind == "arrow":
        start, end = zip(one.x[[0, -1]], one.y[[0, -1]], strict=True)
        look |= {"arrowstyle": "-|>", "mutation_scale": 7, "shrinkA": 0, "shrinkB": 0}
        return ax.add_patch(FancyArrowPatch(start, end, linewidth=one.width, **look))
    style = "none" if one.kind == "points" else one.style
    marks = {"marker": "o", "markersize": one.width, "markeredgewidth": 0}
    (line,) = ax.plot(
        one.x, one.y, linestyle=style, linewidth=one.width,
        **(marks if one.kind == "points" else {"marker": "none"}), **look,
    )  # fmt: skip
    return line


def set_rulers(ax: Axes, across: Ruler, up: Ruler, most: int = 5) -> None:
    """Give an axis two rulers, that on the left with about ``most`` labels."""
    across.apply(ax, across=True, most=4)
    up.apply(ax, most=most)
    ax.grid(visible=up.ticks is None, axis="y")
    label_below(ax, across.label)
    ax.set_ylabel(up.label, fontsize=TICK_SIZE, color=MUTED, labelpad=1)


def label_below(ax: Axes, text: str) -> None:
    """Label the axis below, where a label may begin left of a narrow axis."""
    shown = shorten(text, size_in_points(ax)[0] + points(25), TICK_SIZE)
    ax.set_xlabel(shown, loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)


# Pictures -----------------------------------------------------------------------------------

MARGIN, SPACE = 0.16, 0.027
"""Shares of a panel that the sums of rows and columns take, and the space between."""


def draw_picture(ax: Axes, shown: Picture) -> Artists:
    """Draw a picture, with its rows labelled, or with the sums of its rows and columns."""
    artists: Artists = {}
    inner = ax
    if shown.labels:
        inner = labelled_rows(ax, shown.labels)
        inner.set(xlim=shown.across.limits)
        inner.xaxis.set_major_formatter(NumberLabels())
        label_below(inner, shown.across.label)
    elif shown.margins:
        share = 1 - MARGIN - SPACE
        inner = inside(ax, 0, 0, share, share)
        above = inside(ax, 0, 1 - MARGIN, share, MARGIN)
        artists |= _sums(above, inside(ax, 1 - MARGIN, 0, MARGIN, share), shown)
    if not shown.labels:
        set_rulers(inner, shown.across, shown.up, most=3)
        inner.grid(visible=False)
    artists["picture"] = picture_on(inner, shown)
    return artists | explained(ax, (), shown.words)


def picture_on(ax: Axes, shown: Picture) -> QuadMesh:
    sizes = np.ma.masked_less_equal(shown.sizes, 0)
    return ax.pcolormesh(
        shown.columns, shown.rows, sizes, norm=shown.norm, cmap=COLORMAPS["density"],
        rasterized=True, zorder=2,
    )  # fmt: skip


def _sums(across: Axes, up: Axes, shown: Picture) -> Artists:
    """Draw the logarithms of the sums of columns and rows."""
    look: dict[str, Any] = {"fill": True, "facecolor": tint(BLUE, 0.4), "edgecolor": BLUE}
    look["lw"] = 0.6
    # They start at half an element, so that a single one is visible.
    columns, rows = (np.log10(2 * np.maximum(shown.sizes.sum(n), 0.5)) for n in (0, 1))
    artists: Artists = {
        "marginal x": across.stairs(columns / columns.max(), shown.columns, **look),
        "marginal y": up.stairs(rows / rows.max(), shown.rows, orientation="horizontal", **look),
    }
    across.set(xlim=shown.across.limits, ylim=(0, 1.05))
    up.set(ylim=shown.up.limits, xlim=(0, 1.05))
    for ax in (across, up):
        ax.grid(visible=False)
        ax.set(xticks=[], yticks=[])
    up.spines["bottom"].set_visible(False)
    up.spines["left"].set(visible=True, color=GRID)
    return artists


# Maps ---------------------------------------------------------------------------------------

COLUMNS = 240
"""Largest number of columns; of several steps in one, the value furthest from zero is shown."""
SEPARATED = 60
"""Largest number of rows for which lines separate the modules."""
BESIDE = 40.0
"""Points between a map and the shapes beside it."""
BAR = (6.0, 34.0)
"""Points for the colour bar, and for it together with its labels."""

GREY = "grey: 0"
"""What a map says where it shows exact zeros."""


def draw_map(ax: Axes, axis: StepAxis, shown: Map) -> tuple[Artists, Axes]:
    """Draw a map, with rows labelled and colours explained where there is room, and its axis."""
    thinned, places = columns(shown.table, COLUMNS, axis.warp)
    edges = axis.unwarp(places)
    artists: Artists = {}
    if shown.beside is not None:
        picture, inner = picture_and_series(ax, shown.beside.share, BESIDE)
        artists |= draw_beside(picture, shown.beside) if picture is not None else {}
        stride = row_stride(len(shown.labels), size_in_points(inner)[1])
        label_rows(inner, shown.labels[::stride], stride, len(shown.labels))
        axis.apply(inner)
        artists["map"] = _mesh(inner, edges, thinned, shown)
        return artists | explained(ax, shown.beside.key, ""), inner
    width = size_in_points(ax)[0]
    bar = inside(ax, 1 - points(BAR[1] - 8) / width, 0, points(BAR[0]) / width, 1)
    inner = labelled_rows(ax, shown.labels, BAR[1])
    axis.apply(inner)
    mesh = artists["map"] = _mesh(inner, edges, thinned, shown)
    artists |= _undefined(inner, edges, thinned)
    marks = {"hatched: no finite number": "undefined" in artists, GREY: shown.has_grey}
    notes = [mark for mark, is_shown in marks.items() if is_shown]
    text = " · ".join([f"colour: {shown.words}", *notes, "from input (top) to output"])
    artists["colours"] = colour_bar(bar, mesh, shown.norm, value_labels(shown.shares))
    return artists | {"subtitle": subtitle(ax, text)}, inner


def _mesh(ax: Axes, edges: Floats, found: LayerTable, shown: Map) -> QuadMesh:
    norm = shown.norm
    low = norm.vmin or 0.0
    values = found.values
    if isinstance(norm, LogNorm):
        # Zero isn't on a logarithmic scale, and has the colour of what is below it.
        values = np.where(values == 0, low / 2, np.maximum(values, low))
    mesh = ax.pcolormesh(
        edges, np.arange(len(found.names) + 1), np.ma.masked_invalid(values), norm=norm,
        cmap=COLORMAPS[shown.colors].with_extremes(under=FAINT), rasterized=True, zorder=2,
    )  # fmt: skip
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
    hatched = np.pad(found.recorded & ~np.isfinite(found.values), ((0, 0), (1, 1)))
    boxes = []
    for row, cells in enumerate(hatched):
        # The first place, and the place after the last one, of each piece of hatched cells.
        for a, b in edges[np.flatnonzero(np.diff(cells))].reshape(-1, 2):
            boxes.append([(a, row), (b, row), (b, row + 1), (a, row + 1)])
    if not boxes:
        return {}
    hatches = PolyCollection(
        boxes, facecolors=PAPER, edgecolors=MUTED if found.reason else ALARM, hatch="/////",
        linewidths=0, zorder=2.5,
    )  # fmt: skip
    return {"undefined": ax.add_collection(hatches, autolim=False)}


# Axes inside a panel ------------------------------------------------------------------------

LEAST_SERIES = 60.0
"""Points below which a series beside a picture can't be read."""
ROW = 9.0
"""Points that a row with a label takes, at least."""


def picture_and_series(ax: Axes, share: float, gap: float) -> tuple[Axes | None, Axes]:
    """Axes of a picture, which takes a ``share`` of the width, and of a series on its right.

    ``gap`` is between them, in points. Where the series has no room beside a picture, there is
    none, and the series has the whole axis.
    """
    width = size_in_points(ax)[0]
    left = share + points(gap) / width
    if (1 - left) * width < points(LEAST_SERIES):
        return None, ax
    return inside(ax, 0, 0, share, 1), inside(ax, left, 0, 1 - left, 1)


def row_stride(count: int, height: float) -> int:
    """The least n for which each n-th of ``count`` rows on ``height`` points can have a label."""
    return max(1, math.ceil(points(ROW) * count / height))


def labelled_rows(ax: Axes, names: Sequence[str], right: float = 0.0) -> Axes:
    """An axis inside another one for rows with names on the left, ``right`` points narrower."""
    width, height = size_in_points(ax)
    stride = row_stride(len(names), height)
    labels = shorten_apart(names[::stride], 0.3 * width, TICK_SIZE)
    left = max(0.0, max(text_width(label, TICK_SIZE) for label in labels) - points(24)) / width
    inner = inside(ax, left, 0, 1 - left - points(right) / width, 1)
    label_rows(inner, labels, stride, len(names))
    return inner


def label_rows(ax: Axes, labels: Sequence[str], stride: int, count: int) -> None:
    """Set the value axis to ``count`` rows, the first on top, and label each ``stride``-th."""
    ax.set_yscale("linear")
    ax.set_ylim(count, 0)
    ax.set_ylabel("")
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(FixedLocator([row + 0.5 for row in range(0, count, stride)]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FixedFormatter(labels))
