"""Draws panels, a header and notes on a figure."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradlens.history.coverage import few
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import LeftOutWarning
from gradlens.history.view import Group
from gradlens.instruments.instrument import CELL, Instrument, panel_box, step_axis
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.instruments.style import FAINT, INK, MUTED, literal, message, shorten, text_width
from gradlens.plotting.findings import main_findings, others
from gradlens.plotting.layout import HEADING, LINE, Page, Place, arrange
from gradlens.plotting.marks import explain, mark
from gradlens.plotting.panels import EPOCHS, Panel

EMPTY = (8.0, 4.0)
"""Inches across and up of a figure without panels."""

BOTTOM = 0.14
"""Inches from the lower edge to the middle of the last line of text."""


def draw(
    figure: Figure,
    history: History,
    panels: Sequence[Panel],
    title: str,
    log_step: bool = False,
    resize: bool = True,
    widest: float = math.inf,
    findings: Sequence[Finding] = (),
) -> None:
    """Draw panels on a figure, which is emptied first, at most ``widest`` cells in a row.

    With ``resize`` the figure gets the size that the panels need. Without it, the figure keeps its
    size if they can be read at that. The main ones of ``findings`` are marked in the panels and
    explained below them.
    """
    marked = main_findings(findings)
    page = Page(arrange(panels, widest), len(marked) + bool(history.notes))
    figure.clear()
    if resize or not page.is_legible(*_inches(figure)):
        figure.set_size_inches(*page.size)
    _header(figure, title, facts(history))
    _notes(figure, history)
    explain(figure, marked, others(findings), BOTTOM + LINE * bool(history.notes))
    axis = step_axis(history, log_step)
    for row in page.places(*_inches(figure)):
        _draw_row(figure, history, row, axis)
    for ax in figure.axes if marked else ():
        mark(ax, marked)
    literal(figure)


def draw_empty(figure: Figure, title: str, why: str, resize: bool = True) -> None:
    """Draw a title and why there are no panels on a figure, which is emptied first."""
    figure.clear()
    if resize:
        figure.set_size_inches(*EMPTY)
    _header(figure, title, ())
    ax = figure.add_axes((0.05, 0.05, 0.9, 0.8))
    ax.set_axis_off()
    message(ax, why)
    literal(figure)


def facts(history: History) -> tuple[str, ...]:
    """The run in a few words, the most important first."""
    steps = history.steps
    parts = ["file is cut off"] if history.truncated else []
    parts += [f"last step {steps[-1]:,}"] if steps else []
    for name in history.of_kind("Loss")[:1]:
        one = line(history[name])
        parts += [f"last loss {number_label(one.latest)}"] if one.steps.size else []
    if EPOCHS in history:
        one = line(history[EPOCHS])
        parts += [f"epoch {number_label(one.latest)}"] if one.steps.size else []
    return (*parts, f"{len(steps):,} recorded step{'' if len(steps) == 1 else 's'}")


def _draw_row(figure: Figure, history: History, row: Sequence[Place], axis: StepAxis) -> None:
    for group, members in itertools.groupby(row, key=lambda place: place.panel.group):
        found = list(members)
        right = found[-1].left + found[-1].width
        _group_heading(figure, group, found[0].left, right, found[0].top - HEADING)
    for place in row:
        box = panel_box(place.left, place.top, place.width, place.height, figure)
        ax = figure.add_axes((box[0], box[1], box[2], box[3]))
        _draw_panel(place.panel.instrument, history, ax, axis)


def _draw_panel(instrument: Instrument, history: History, ax: Axes, axis: StepAxis) -> None:
    """Draw a panel; an empty one with a ``LeftOutWarning`` if its instrument raises."""
    try:
        instrument.draw_panel(history, ax, axis)
    except Exception as error:
        names = few(instrument.names)
        text = f"{names} can't be drawn ({type(error).__name__}: {error})"
        warnings.warn(text, LeftOutWarning, stacklevel=2)
        ax.clear()
        ax.set_axis_off()
        placed: dict[str, Any] = {"ha": "center", "va": "center", "transform": ax.transAxes}
        shown = shorten(f"{names} can't be drawn", 72 * CELL[0] * 0.8, 7)
        ax.text(0.5, 0.5, shown, fontsize=7, color=MUTED, **placed)


def _group_heading(figure: Figure, group: Group, left: float, right: float, top: float) -> None:
    across, up = _inches(figure)
    text, size = group.upper(), 6.5
    start, height = left + 0.1, 1 - (top + 0.09) / up
    figure.text(start / across, height, text, fontsize=size, color=MUTED, va="center")
    begin = start + text_width(text, size) / 72 + 0.1
    ends = [begin / across, (right - 0.1) / across]
    figure.add_artist(Line2D(ends, [height, height], color=FAINT, linewidth=0.7))


def _header(figure: Figure, title: str, words: Sequence[str]) -> None:
    across, up = _inches(figure)
    room = (across - 0.6) * 72
    texts = ["  ·  ".join(words[:count]) for count in range(len(words), 0, -1)]
    left = room - min(text_width(title, 12, "bold"), 0.75 * room) - 18
    text = next((text for text in texts if text_width(text, 8) < left), "")
    shown = shorten(title, room - text_width(text, 8), 12, "bold")
    height = 1 - 0.26 / up
    place: dict[str, Any] = {"va": "center_baseline"}
    figure.text(0.22 / across, height, shown, fontsize=12, fontweight="bold", color=INK, **place)
    figure.text(1 - 0.22 / across, height, text, fontsize=8, color=MUTED, ha="right", **place)


def _notes(figure: Figure, history: History) -> None:
    if not history.notes:
        return
    across, up = _inches(figure)
    last = history.notes[-1]
    more = f"  (+{len(history.notes) - 1} earlier)" if len(history.notes) > 1 else ""
    text = f"Note at step {last.step:,}: {' '.join(last.text.split())}"
    # At some resolutions, hinting makes small type wider than measured.
    room = 0.95 * (across - 0.44) * 72 - text_width(more, 7)
    shown = shorten(text, room, 7) + more
    figure.text(0.22 / across, BOTTOM / up, shown, fontsize=7, color=MUTED, va="center")


def _inches(figure: Figure) -> tuple[float, float]:
    across, up = figure.get_size_inches()
    return float(across), float(up)
