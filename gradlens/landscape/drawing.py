"""What the figures of lines and planes share."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes

from gradlens.instruments.instrument import CELL, LABELLED, Drawing, panel_box
from gradlens.instruments.panel import Artists
from gradlens.instruments.scales import number_label
from gradlens.instruments.style import (
    MUTED,
    PAPER,
    TICK_SIZE,
    dress,
    font_scale,
    literal,
    points,
    shorten,
    size_in_points,
    title,
)
from gradlens.plotting.output import TextFigure

SIZE = 1.5
"""Width and height of a new figure in panels of a cockpit's figure."""

MARGIN = 25.0
"""Points on the left of an axis, where the labels of its ticks are."""


def new_axes() -> Axes:
    """An axis on a new figure, which needs no window."""
    across, up = (SIZE * font_scale() * inches for inches in CELL)
    figure = TextFigure(figsize=(across, up), dpi=150, facecolor=PAPER)
    left, bottom, width, height = panel_box(0, 0, across, up, figure, LABELLED)
    return figure.add_axes((left, bottom, width, height))


def drawing_of(
    ax: Axes | None, heading: str, loss: float, draw: Callable[[Axes], Artists]
) -> Drawing:
    """What ``draw`` draws on an axis, or on a new figure, under a heading with the loss at 0."""
    ax = new_axes() if ax is None else ax
    dress(ax)
    title(ax, heading, f"{number_label(loss)} at 0")
    artists = draw(ax)
    literal(ax)
    return Drawing(ax, artists)


def label_axes(ax: Axes, below: str, left: str) -> None:
    """Labels of the axes, with their middles left out where there is no room.

    That below the axis ends on the right, and may begin left of the axis.
    """
    width, height = size_in_points(ax)
    ax.set_xlabel(
        shorten(below, width + points(MARGIN), TICK_SIZE),
        loc="right",
        fontsize=TICK_SIZE,
        color=MUTED,
        labelpad=1,
    )
    ax.set_ylabel(shorten(left, height, TICK_SIZE), fontsize=TICK_SIZE, color=MUTED, labelpad=2)
