"""Draws a panel on an axis of matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter

from gradlens.history.lines import Line
from gradlens.instruments.curves import draw_lines, explain_empty, missing, thread
from gradlens.instruments.panel import Artists, Content, Grid, Lines, Map, Panel, Picture, Shapes
from gradlens.instruments.scales import Ruler, StepAxis, StepLabels, number_label
from gradlens.instruments.series import smooth
from gradlens.instruments.shapes import (
    draw_map,
    draw_picture,
    draw_shapes,
    picture_on,
    set_rulers,
    shapes_on,
)
from gradlens.instruments.style import (
    ALARM,
    INK,
    MUTED,
    PAPER,
    SMALLEST_SIZE,
    TEXT_SIZE,
    TICK_SIZE,
    dress,
    figure_of,
    font_scale,
    inside,
    literal,
    points,
    shorten,
    size_in_points,
    subtitle,
    text_width,
    title,
)

CELL = (3.0, 2.15)
"""Inches that a panel of width 1 and height 1 takes in a figure, with its labels."""
MARGINS = (0.46, 0.36, 0.14, 0.44)
"""Inches for labels around a panel: left, bottom, right, top."""
LABELLED = MARGINS[0] + 0.14
"""Inches on the left of a panel whose value axis has a label."""


@dataclass(frozen=True)
class Drawing:
    """What an instrument has drawn: its axis and its artists by name."""

    ax: Axes
    artists: Mapping[str, Artist]

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The axis, followed by the axes inside it."""
        return (self.ax, *(child for child in self.ax.child_axes if isinstance(child, Axes)))

    @property
    def figure(self) -> Figure:
        """The figure of the axis."""
        return figure_of(self.ax)


def draw_panel(panel: Panel, ax: Axes, axis: StepAxis, labels: bool = False) -> Drawing:
    """Draw on ``ax`` with title and common style, over the steps of ``axis``.

    With ``labels``, value axes over steps have one, and there are neither words below the title nor
    readouts.
    """
    dress(ax)
    width = size_in_points(ax)[0]
    drawing = Drawing(ax, _draw(panel.content, ax, axis))
    readout = ("", False) if labels else panel.content.readout
    # The axis may have become narrower, which has room for names on its right.
    title(ax, panel.title, *readout, width=width)
    if labels and "subtitle" in drawing.artists:
        drawing.artists["subtitle"].remove()
    for part in drawing.axes if labels else ():
        over_steps = isinstance(part.xaxis.get_major_formatter(), StepLabels)
        if over_steps and part.axison and len(part.get_yticks()) and not part.yaxis_inverted():
            part.set_ylabel(panel.label, fontsize=TICK_SIZE, color=MUTED, labelpad=2)
    return drawing


def _draw(shown: Content, ax: Axes, axis: StepAxis) -> Artists:
    match shown:
        case Lines():
            return draw_lines(ax, axis, shown)
        case Map():
            artists, inner = draw_map(ax, axis, shown)
            found = shown.table
            broken = (found.recorded & ~np.isfinite(found.values)).any(axis=0)
            line = Line(found.steps, np.where(broken, np.nan, 0.0), found.reason)
            return artists | missing(inner, axis, [line])
        case Picture():
            return draw_picture(ax, shown)
        case Shapes():
            return draw_shapes(ax, shown)
        case Grid():
            return _draw_grid(ax, axis, shown)
        case _:
            return shown.draw(ax, axis)


NARROWEST = 75.0
"""Points of a small panel and the gap beside it, at least."""


def _draw_grid(ax: Axes, axis: StepAxis, shown: Grid) -> Artists:
    """Draw small panels, which have one scale."""
    artists: Artists = {}
    places = _small_panels(ax, len(shown.parts), shown.columns, shown.gap)
    for place, (name, one) in zip(places, shown.parts.items(), strict=True):
        room, (readout, alarm) = size_in_points(place)[0], one.readout
        if (left := room - text_width(readout, TEXT_SIZE) - 6) < 0.5 * room:
            left, readout = room, ""  # There is no room for the readout.
        look: dict[str, Any] = {"fontsize": TEXT_SIZE, "y": 1.0, "pad": 3.0}
        place.set_title(shorten(name, left, TEXT_SIZE), loc="left", color=INK, **look)
        place.set_title(readout, loc="right", color=ALARM if alarm else MUTED, **look)
        drawn: Artists = {}
        if isinstance(one, Lines):
            axis.apply(place)
            curves = [each for each in one.all_curves if each.line.finite.any()]
            if not curves:
                drawn = explain_empty(place, one.lines, one.message)
            else:
                one.up(axis.warp).apply(place, most=3)
            for each in curves:
                line = smooth(each.line, axis.warp)
                drawn[each.name] = thread(place, axis, line, each.color, 1.0)
        else:
            drawn = shapes_on(place, one) if isinstance(one, Shapes) else {}
            drawn |= {"picture": picture_on(place, one)} if isinstance(one, Picture) else {}
            _ends(place, one.across, one.up)
        artists |= {f"{name}: {key}": artist for key, artist in drawn.items()}
    return artists | {"subtitle": subtitle(ax, shown.words)}


def _ends(ax: Axes, across: Ruler, up: Ruler) -> None:
    """Label the two ends of the axis below alone, because there is no room for more."""
    labels = tuple(number_label(end, 2) for end in across.limits)
    set_rulers(ax, replace(across, label="", ticks=across.limits), replace(up, label="", ticks=()))
    ax.grid(visible=False)
    ax.xaxis.set_major_formatter(FixedFormatter(labels))
    ax.tick_params(axis="x", labelsize=SMALLEST_SIZE)
    left, right = ax.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")


def _small_panels(ax: Axes, count: int, columns: int, gap: tuple[float, float]) -> list[Axes]:
    """Axes in rows of at most ``columns``, with a ``gap`` in points between them, across and up."""
    across, up = size_in_points(ax)
    columns = max(1, min(columns, int(across / points(NARROWEST))))
    rows = math.ceil(count / columns)
    columns = math.ceil(count / rows)
    gap_x, gap_y, head = points(gap[0]) / across, points(gap[1]) / up, points(16) / up
    width = (1 - gap_x * (columns - 1)) / columns
    height = max((1 - head - gap_y * (rows - 1)) / rows, 0.2 / rows)
    places = [(number % columns, number // columns) for number in range(count)]
    return [
        inside(ax, x * (width + gap_x), 1 - head - height - y * (height + gap_y), width, height)
        for x, y in places
    ]


def plot_panels(
    panels: Sequence[Panel],
    axis: StepAxis,
    ax: Axes | None = None,
    zoom: float = 1.2,
    margin: float = MARGINS[0],
) -> Drawing:
    """Draw panels beside each other in the place of an axis, or on a new one without a window."""
    if ax is None:
        scale = zoom * font_scale()
        across = scale * CELL[0] * sum(panel.width for panel in panels)
        up = scale * CELL[1] * max(panel.height for panel in panels)
        figure = TextFigure(figsize=(across, up), dpi=150, facecolor=PAPER)
        ax = figure.add_axes(panel_box(0, 0, across, up, figure, margin))
    artists: Artists = {}
    gap = 0.18
    width = 1 / (len(panels) + gap * (len(panels) - 1))
    for place, panel in enumerate(panels):
        part = ax if len(panels) == 1 else inside(ax, place * width * (1 + gap), 0, width, 1)
        before = "" if part is ax else f"{panel.names[0]}: "
        drawn = draw_panel(panel, part, axis).artists
        artists |= {f"{before}{name}": artist for name, artist in drawn.items()}
    literal(ax)
    return Drawing(ax, artists)


def panel_box(
    left: float, top: float, width: float, height: float, figure: Figure, margin: float = MARGINS[0]
) -> tuple[float, float, float, float]:
    """Where an axis goes in a figure, given the cell in inches that holds it and its labels.

    ``margin`` is that on the left, at matplotlib's default ``font.size``.
    """
    across, up = figure.get_size_inches()
    west, south, east, north = (font_scale() * one for one in (margin, *MARGINS[1:]))
    inner = (left + west, up - top - height + south, width - west - east, height - south - north)
    return inner[0] / across, inner[1] / up, inner[2] / across, inner[3] / up


class TextFigure(Figure):
    """A figure whose PDF, PostScript and SVG files have texts that can be searched and edited."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As that of any figure."""
        with matplotlib.rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}):
            super().savefig(*args, **kwargs)
