"""Draws what isn't over the steps: shapes and pictures on two axes, and grids of small panels."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patches import FancyArrowPatch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from gradlens.instruments.drawing import explain_empty, labelled_rows, small_panels, thread
from gradlens.instruments.panel import Artists, Grid, Lines, Picture, Shape, Shapes
from gradlens.instruments.scales import NumberLabels, Ruler, StepAxis, number_label
from gradlens.instruments.series import smooth
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    GRID,
    INK,
    MUTED,
    SMALLEST_SIZE,
    TEXT_SIZE,
    TICK_SIZE,
    density_colormap,
    inside,
    key,
    points,
    shorten,
    size_in_points,
    subtitle,
    text_width,
    tint,
)


def draw_shapes(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes, and explain them above the axes."""
    artists = shapes_on(ax, shown)
    explained = key(ax, shown.key)
    if explained is not None:
        return artists | {"key": explained}
    return artists | ({"subtitle": subtitle(ax, shown.words)} if shown.words else {})


def draw_beside(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes beside a series, which has the key; their words are in a corner."""
    artists = shapes_on(ax, shown)
    if shown.words:
        artists["words"] = ax.annotate(
            shown.words,
            (0, 0),
            xycoords="axes fraction",
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=SMALLEST_SIZE,
            color=MUTED,
            zorder=6,
        )
    return artists


def shapes_on(ax: Axes, shown: Shapes) -> Artists:
    """Draw shapes without a word about them."""
    artists = {one.name: _shape(ax, one, 2 + 0.1 * n) for n, one in enumerate(shown.shapes)}
    _set(ax, shown.across, shown.up)
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


def _set(ax: Axes, across: Ruler, up: Ruler, most: int = 5) -> None:
    """Give an axis two rulers, that on the left with about ``most`` labels."""
    across.apply(ax, across=True, most=4)
    up.apply(ax, most=most)
    ax.grid(visible=up.ticks is None, axis="y")
    # A label may begin left of a narrow axis.
    below = shorten(across.label, size_in_points(ax)[0] + points(25), TICK_SIZE)
    ax.set_xlabel(below, loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1)
    ax.set_ylabel(up.label, fontsize=TICK_SIZE, color=MUTED, labelpad=1)


# Pictures -----------------------------------------------------------------------------------

MARGIN, SPACE = 0.16, 0.027
"""Shares of a panel that the sums of rows and columns take, and the space between."""


def draw_picture(ax: Axes, shown: Picture) -> Artists:
    """Draw a picture, with its rows labelled, or with the sums of its rows and columns."""
    artists: Artists = {}
    inner = ax
    if shown.labels:
        inner = labelled_rows(ax, shown.labels)
    elif shown.margins:
        share = 1 - MARGIN - SPACE
        inner = inside(ax, 0, 0, share, share)
        beside = (
            inside(ax, 0, 1 - MARGIN, share, MARGIN),
            inside(ax, 1 - MARGIN, 0, MARGIN, share),
        )
        artists |= _sums(*beside, shown)
    artists["picture"] = picture_on(inner, shown)
    if not shown.labels:
        _set(inner, shown.across, shown.up, most=3)
        inner.grid(visible=False)
    else:
        inner.set(xlim=shown.across.limits)
        inner.xaxis.set_major_formatter(NumberLabels())
        inner.set_xlabel(
            shown.across.label, loc="right", fontsize=TICK_SIZE, color=MUTED, labelpad=1
        )
    return artists | ({"subtitle": subtitle(ax, shown.words)} if shown.words else {})


def picture_on(ax: Axes, shown: Picture) -> QuadMesh:
    """Draw the colours of a picture."""
    sizes = np.ma.masked_less_equal(shown.sizes, 0)
    return ax.pcolormesh(
        shown.columns, shown.rows, sizes, norm=shown.norm, cmap=density_colormap(),
        rasterized=True, zorder=2,
    )  # fmt: skip


def _sums(across: Axes, up: Axes, shown: Picture) -> Artists:
    """Draw the logarithms of the sums of columns and rows."""
    look: dict[str, Any] = {
        "fill": True,
        "facecolor": tint(BLUE, 0.4),
        "edgecolor": BLUE,
        "lw": 0.6,
    }
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


# Grids --------------------------------------------------------------------------------------


def draw_grid(ax: Axes, axis: StepAxis, shown: Grid) -> Artists:
    """Draw small panels, which have one scale."""
    artists: Artists = {}
    places = small_panels(ax, len(shown.parts), shown.columns, shown.gap)
    for place, (name, one) in zip(places, shown.parts.items(), strict=True):
        _small_title(place, name, *one.readout)
        if isinstance(one, Lines):
            drawn = _small_lines(place, axis, one)
        else:
            drawn = shapes_on(place, one) if isinstance(one, Shapes) else {}
            drawn |= {"picture": picture_on(place, one)} if isinstance(one, Picture) else {}
            _ends(place, one.across, one.up)
        artists |= {f"{name}: {key}": artist for key, artist in drawn.items()}
    return artists | {"subtitle": subtitle(ax, shown.words)}


def _small_title(ax: Axes, name: str, readout: str, alarm: bool) -> None:
    place: dict[str, Any] = {"fontsize": TEXT_SIZE, "y": 1.0, "pad": 3.0}
    width = size_in_points(ax)[0]
    room = width - text_width(readout, TEXT_SIZE) - 6
    if room < 0.5 * width:
        # There is no room for the readout.
        room, readout = width, ""
    ax.set_title(shorten(name, room, TEXT_SIZE), loc="left", color=INK, **place)
    ax.set_title(readout, loc="right", color=ALARM if alarm else MUTED, **place)


def _small_lines(ax: Axes, axis: StepAxis, shown: Lines) -> Artists:
    axis.apply(ax)
    curves = [one for one in shown.all_curves if one.line.finite.any()]
    if not curves:
        return explain_empty(ax, shown.lines, shown.message)
    shown.up(axis.warp).apply(ax, most=3)
    return {
        one.name: thread(ax, axis, smooth(one.line, axis.warp), one.color, 1.0) for one in curves
    }


def _ends(ax: Axes, across: Ruler, up: Ruler) -> None:
    """Label the two ends of the axis below alone, because there is no room for more."""
    _set(ax, across, up)
    ax.set(xlabel="", ylabel="")
    ax.grid(visible=False)
    ax.yaxis.set_major_locator(NullLocator())
    ax.xaxis.set_major_locator(FixedLocator(across.limits))
    ax.xaxis.set_major_formatter(FixedFormatter([number_label(end, 2) for end in across.limits]))
    ax.tick_params(axis="x", labelsize=SMALLEST_SIZE)
    left, right = ax.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
