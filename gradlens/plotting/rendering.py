"""Draws panels, a header and notes on a figure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import Note
from gradlens.history.view import Group
from gradlens.instruments.axes import LABELLED, MARGINS, draw_panel, panel_box
from gradlens.instruments.panel import Lines, Panel
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.instruments.style import (
    FAINT,
    HEADER_SIZE,
    MUTED,
    PAPER,
    TEXT_SIZE,
    TITLE_SIZE,
    Color,
    Entry,
    font_scale,
    literal,
    message,
    points,
    shorten,
    text_width,
    wrapped,
)
from gradlens.plotting.dark import darken
from gradlens.plotting.findings import (
    HINTED,
    explain,
    explained,
    main_findings,
    mark,
    others,
    write,
)
from gradlens.plotting.layout import (
    HEADER,
    HEADING,
    LINE,
    FigureSize,
    Look,
    Page,
    Place,
    arrange,
)
from gradlens.plotting.panels import EPOCHS, cannot_be_drawn

EMPTY = (8.0, 4.0)
"""Inches across and up of a figure without panels."""

BOTTOM = 0.14
"""Inches from the lower edge to the middle of the last line of text."""
SPACE = 0.03
"""Inches on the left of labels, which rendering may make a little wider."""
NARROWEST = 1.5
"""Inches below which the labels of a panel leave no room for its lines."""
NOTE_LINES = 3
"""Largest number of lines of a note."""


@dataclass(frozen=True)
class Words:
    """What a figure says besides its panels: its title, the run in a few words, and its notes.

    ``legend`` explains the colours of all panels.
    """

    title: str
    facts: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    legend: tuple[Entry, ...] = ()


def words_of(history: History, title: str) -> Words:
    """The words of a figure of a run."""
    return Words(title, facts(history), tuple(history.notes))


def draw(
    figure: Figure,
    panels: Sequence[Panel],
    words: Words,
    axis: StepAxis,
    resize: bool = True,
    widest: float = math.inf,
    findings: Sequence[Finding] = (),
    look: Look = "screen",
    size: FigureSize = None,
    last: float = math.inf,
) -> None:
    """Draw panels on a figure, which is emptied first, at most ``widest`` cells in a row.

    ``size`` is that of the figure in inches, or its width alone. With ``resize`` the figure has the
    size that the panels need instead. Without it, the figure keeps its size if they can be read at
    that. The main ones of ``findings`` are explained below the panels, and marked in them up to the
    step ``last``. With the look "paper", there are panels alone, and their value axes have labels;
    with "dark", the ground is dark.
    """
    # A figure of a paper has its title and its explanations in the caption.
    bare = look == "paper"
    marked = () if bare else main_findings(findings)
    figure.clear()
    figure.set_facecolor(PAPER)
    page = Page(arrange(panels, widest), bare)
    if size is None and not resize and page.is_legible(*_inches(figure)):
        size = _inches(figure)
    width = page.size[0] if size is None else size if isinstance(size, (int, float)) else size[0]
    explanations = explained(marked, others(findings), width)
    note = [] if bare else _note(words.notes, width)
    legend = [] if bare else _legend(words.legend, width)
    page = replace(page, lines=sum(map(len, explanations)) + len(note), legend=len(legend))
    figure.set_size_inches(*_figure_size(page, size))
    if not bare:
        _header(figure, words)
    _write_legend(figure, legend)
    top = _inches(figure)[1] - font_scale() * (BOTTOM + (page.lines - 1) * LINE)
    explain(figure, marked, explanations, top)
    for place, text in enumerate(note, page.lines - len(note)):
        write(figure, text, 0.22, top + font_scale() * place * LINE, color=MUTED)
    _draw_rows(figure, page, axis)
    for ax in figure.axes if marked else ():
        mark(ax, marked, min(last, axis.high))
    literal(figure)
    if look == "dark":
        darken(figure)


def _figure_size(page: Page, size: FigureSize) -> tuple[float, float]:
    if size is None:
        return page.size
    width = size if isinstance(size, (int, float)) else size[0]
    if not width >= NARROWEST * font_scale():
        raise ValueError(
            f"size={size}: a figure is at least {NARROWEST * font_scale():g} inches wide"
        )
    if isinstance(size, (int, float)):
        return size, page.height(size)
    if size[1] < page.least_height:
        panels, least = sum(map(len, page.rows)), page.least_height
        raise ValueError(
            f"size={size}: {panels} panels of this width are at least {least:.1f} inches high: "
            "pass the width alone, a larger size, or fewer panels"
        )
    return size


def draw_empty(
    figure: Figure, title: str, why: str, resize: bool = True, look: Look = "screen"
) -> None:
    """Draw a title and why there are no panels on a figure, which is emptied first."""
    figure.clear()
    figure.set_facecolor(PAPER)
    if resize:
        figure.set_size_inches(*EMPTY)
    _header(figure, Words(title))
    ax = figure.add_axes((0.05, 0.05, 0.9, 0.8))
    ax.set_axis_off()
    message(ax, why)
    literal(figure)
    if look == "dark":
        darken(figure)


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


def _draw_rows(figure: Figure, page: Page, axis: StepAxis) -> None:
    rows = page.places(*_inches(figure))
    if not page.bare:
        for row in rows:
            _group_headings(figure, row)
            _draw_row(figure, row, axis, page.bare, MARGINS[0])
        return
    for row in rows:
        _draw_row(figure, row, axis, page.bare, LABELLED)
    # Only what has been drawn says how wide labels are.
    margin = _needed_margin(figure)
    for ax in figure.axes:
        ax.remove()
    for row in rows:
        _draw_row(figure, row, axis, page.bare, margin)


def _needed_margin(figure: Figure) -> float:
    """Inches on the left of panels for their labels, at matplotlib's default ``font.size``."""
    boxes = [(ax.bbox.x0, ax.get_tightbbox()) for ax in figure.axes]
    widest = max((left - box.x0 for left, box in boxes if box is not None), default=0.0)
    return (max(widest, 0.0) / figure.dpi + SPACE) / font_scale()


def _group_headings(figure: Figure, row: Sequence[Place]) -> None:
    for group, members in itertools.groupby(row, key=lambda place: place.panel.group):
        found = list(members)
        right = found[-1].left + found[-1].width
        _group_heading(figure, group, found[0].left, right, found[0].top - font_scale() * HEADING)


def _draw_row(
    figure: Figure,
    row: Sequence[Place],
    axis: StepAxis,
    labels: bool,
    margin: float,
) -> None:
    for place in row:
        box = panel_box(place.left, place.top, place.width, place.height, figure, margin)
        ax = figure.add_axes((box[0], box[1], box[2], box[3]))
        _draw_panel(place.panel, ax, axis, labels)


def _draw_panel(panel: Panel, ax: Axes, axis: StepAxis, labels: bool) -> None:
    """Draw a panel; one with a message, and a ``LeftOutWarning``, if that fails."""
    try:
        draw_panel(panel, ax, axis, labels)
    except Exception as error:
        ax.clear()
        message = cannot_be_drawn(panel.names, error)
        draw_panel(replace(panel, content=Lines(message=message)), ax, axis)


def _group_heading(figure: Figure, group: Group, left: float, right: float, top: float) -> None:
    text, height = group.upper(), top + font_scale() * 0.09
    start = left + 0.1
    write(figure, text, start, height, color=MUTED)
    begin = start + text_width(text, TEXT_SIZE) / 72 + 0.1
    _stroke(figure, begin, right - 0.1, height, FAINT, 0.7)


def _stroke(
    figure: Figure, left: float, right: float, top: float, color: Color, width: float
) -> None:
    across, up = figure.get_size_inches()
    ends, height = [left / across, right / across], 1 - top / up
    figure.add_artist(Line2D(ends, [height, height], color=color, linewidth=width))


def _header(figure: Figure, words: Words) -> None:
    across = _inches(figure)[0]
    room = (across - 0.6) * 72
    texts = ["  ·  ".join(words.facts[:count]) for count in range(len(words.facts), 0, -1)]
    left = room - text_width(words.title, HEADER_SIZE, "bold") - 18
    text = next((text for text in texts if text_width(text, TITLE_SIZE) < left), "")
    shown, size = _fitting(words.title, room - text_width(text, TITLE_SIZE))
    place: dict[str, Any] = {"top": font_scale() * 0.26, "va": "center_baseline"}
    write(figure, shown, 0.22, fontsize=size, fontweight="bold", **place)
    write(figure, text, across - 0.22, fontsize=TITLE_SIZE, color=MUTED, ha="right", **place)


def _fitting(title: str, room: float) -> tuple[str, str]:
    """A title in the largest type in which it has room on one line, or else on two."""
    for size in (HEADER_SIZE, "medium", TITLE_SIZE):
        if text_width(title, size, "bold") <= room:
            return title, size
    return "\n".join(wrapped(title, room, TITLE_SIZE, 2, "bold")), TITLE_SIZE


def _legend(entries: Sequence[Entry], across: float) -> list[list[tuple[float, Entry]]]:
    """The lines of a legend in a figure of this width: entries, and inches to each."""
    if not entries:
        return []
    room = (across - 0.44) * 72
    widest = max(text_width(entry.label, TEXT_SIZE) for entry in entries) + points(34)
    columns = max(1, min(len(entries), int(room / widest)))
    return [
        [(0.22 + n * room / columns / 72 * min(1.0, columns * widest / room), entry)
         for n, entry in enumerate(entries[start : start + columns])]
        for start in range(0, len(entries), columns)
    ]  # fmt: skip


def _write_legend(figure: Figure, lines: Sequence[Sequence[tuple[float, Entry]]]) -> None:
    across = _inches(figure)[0]
    for place, entries in enumerate(lines):
        top = font_scale() * (HEADER + (place - 0.2) * LINE)
        for left, entry in entries:
            _stroke(figure, left, left + 0.19, top, entry.color, 2)
            text = shorten(entry.label, (across - left - 0.5) * 72, TEXT_SIZE)
            write(figure, text, left + 0.26, top)


def _note(notes: Sequence[Note], across: float) -> list[str]:
    """The lines of the latest note in a figure of this width."""
    if not notes:
        return []
    last = notes[-1]
    more = f" (+{len(notes) - 1} earlier)" if len(notes) > 1 else ""
    room = HINTED * (across - 0.44) * 72 - text_width(more, TEXT_SIZE)
    lines = wrapped(f"Note at step {last.step:,}: {last.text}", room, TEXT_SIZE, NOTE_LINES)
    return [*lines[:-1], lines[-1] + more]


def _inches(figure: Figure) -> tuple[float, float]:
    across, up = figure.get_size_inches()
    return float(across), float(up)
