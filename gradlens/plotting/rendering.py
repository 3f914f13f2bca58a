"""Draws panels, a header, findings and notes on a figure."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradlens.history.coverage import few
from gradlens.history.finding import Finding
from gradlens.history.records import LeftOutWarning, Note
from gradlens.instruments.axes import LABELLED, MARGINS, draw_panel, panel_box
from gradlens.instruments.curves import apart
from gradlens.instruments.panel import Lines, Panel
from gradlens.instruments.scales import StepAxis, StepLabels
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    FAINT,
    HEADER_SIZE,
    INK,
    MUTED,
    PAPER,
    SMALLEST_SIZE,
    TEXT_SIZE,
    TITLE_SIZE,
    Color,
    Entry,
    fitted,
    font_scale,
    literal,
    message,
    points,
    shorten,
    size_in_points,
    text_width,
    wrapped,
)
from gradlens.plotting.dark import darken
from gradlens.plotting.layout import (
    HEADER,
    HEADING,
    LINE,
    FigureSize,
    Look,
    Page,
    Place,
    arrange,
    width_of,
)
from gradlens.plotting.summary import main_findings, others

EMPTY = (8.0, 4.0)
"""Inches across and up of a figure without panels."""

BOTTOM = 0.14
"""Inches from the lower edge to the middle of the last line of text."""
LEFT, RIGHT, INDENT = 0.28, 0.22, 0.12
"""Inches left and right of lines of text, and between a number and its line."""
HINTED = 0.91
"""Share of a line that its text may have as it is measured; at some resolutions, hinting makes
small type wider."""
SPACE = 0.03
"""Inches on the left of labels, which rendering may make a little wider."""
NARROWEST = 1.5
"""Inches below which the labels of a panel leave no room for its lines."""
FINDING_LINES, NOTE_LINES = 2, 3
"""Largest number of lines for a finding, and for a note."""


@dataclass(frozen=True)
class Words:
    """What a figure says besides its panels: its title, the run in a few words, and its notes.

    ``legend`` explains the colours of all panels.
    """

    title: str
    facts: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    legend: tuple[Entry, ...] = ()


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
    width, narrowest = width_of(size, page.size[0]), NARROWEST * font_scale()
    if size is not None and not width >= narrowest:
        raise ValueError(f"size={size}: a figure is at least {narrowest:g} inches wide")
    below = [] if bare else [*_explained(marked, others(findings), width), *_note(words, width)]
    legend, room = () if bare else words.legend, (width - 0.44) * 72
    longest = max((text_width(entry.label, TEXT_SIZE) for entry in legend), default=0.0)
    columns = max(1, min(len(legend), int(room / (longest + points(34)))))
    page = replace(page, lines=len(below), legend=math.ceil(len(legend) / columns))
    figure.set_size_inches(*_figure_size(page, size))
    if not bare:
        _header(figure, words)
    _write_legend(figure, legend, columns, min(room / columns, longest + points(34)) / 72)
    lowest = _inches(figure)[1] - font_scale() * BOTTOM
    for place, texts in enumerate(reversed(below)):
        for left, text, options in texts:
            write(figure, text, left, lowest - font_scale() * place * LINE, **options)
    _draw_rows(figure, page, axis)
    for ax in figure.axes if marked else ():
        mark(ax, marked, min(last, axis.high))
    literal(figure)
    if look == "dark":
        darken(figure)


def _figure_size(page: Page, size: FigureSize) -> tuple[float, float]:
    if size is None:
        return page.size
    if isinstance(size, (int, float)):
        return size, page.height_for(size)
    panels, least = sum(map(len, page.rows)), page.height()
    if size[1] < least:
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


# Panels -------------------------------------------------------------------------------------


def _draw_rows(figure: Figure, page: Page, axis: StepAxis) -> None:
    rows = page.places(*_inches(figure))
    places = [place for row in rows for place in row]
    _draw_panels(figure, places, axis, page.bare, LABELLED if page.bare else MARGINS[0])
    if page.bare:
        # Only what has been drawn says how wide labels are.
        boxes = [(ax.bbox.x0, ax.get_tightbbox()) for ax in figure.axes]
        widest = max((left - box.x0 for left, box in boxes if box is not None), default=0.0)
        margin = (max(widest, 0.0) / figure.dpi + SPACE) / font_scale()
        for ax in figure.axes:
            ax.remove()
        _draw_panels(figure, places, axis, page.bare, margin)
        return
    for row in rows:
        for group, members in itertools.groupby(row, key=lambda place: place.panel.group):
            first, *_, last = [*members] * 2
            text, height = group.upper(), first.top + font_scale() * (0.09 - HEADING)
            write(figure, text, first.left + 0.1, height, color=MUTED)
            begin = first.left + 0.2 + text_width(text, TEXT_SIZE) / 72
            _stroke(figure, begin, last.left + last.width - 0.1, height, FAINT, 0.7)


def _draw_panels(
    figure: Figure, places: Sequence[Place], axis: StepAxis, labels: bool, margin: float
) -> None:
    """Draw panels; one with a message, and a ``LeftOutWarning``, if that fails."""
    for place in places:
        panel = place.panel
        box = panel_box(place.left, place.top, place.width, place.height, figure, margin)
        ax = figure.add_axes(box)
        try:
            draw_panel(panel, ax, axis, labels)
        except Exception as error:
            ax.clear()
            draw_panel(replace(panel, content=cannot_be_drawn(panel.names, error)), ax, axis)


def cannot_be_drawn(names: Sequence[str], error: Exception) -> Lines:
    """What says that series are left out; why is said in a ``LeftOutWarning``."""
    text = f"{few(names)} can't be drawn"
    warnings.warn(f"{text} ({type(error).__name__}: {error})", LeftOutWarning, stacklevel=2)
    return Lines(message=text)


# Texts and strokes --------------------------------------------------------------------------


def write(figure: Figure, text: str, left: float, top: float, **look: Any) -> None:
    """Write a text on a figure, so many inches from its left edge and from its upper one."""
    across, up = _inches(figure)
    usual: dict[str, Any] = {"fontsize": TEXT_SIZE, "color": INK, "va": "center"}
    figure.text(left / across, 1 - top / up, text, **usual | look)


def _stroke(
    figure: Figure, left: float, right: float, top: float, color: Color, width: float
) -> None:
    across, up = _inches(figure)
    ends, height = [left / across, right / across], 1 - top / up
    figure.add_artist(Line2D(ends, [height, height], color=color, linewidth=width))


def _header(figure: Figure, words: Words) -> None:
    across = _inches(figure)[0]
    room = (across - 0.6) * 72
    texts = ["  ·  ".join(words.facts[:count]) for count in range(len(words.facts), 0, -1)]
    left = room - text_width(words.title, HEADER_SIZE, "bold") - 18
    text = next((text for text in texts if text_width(text, TITLE_SIZE) < left), "")
    room -= text_width(text, TITLE_SIZE)
    shown, size = fitted(words.title, [(s, room) for s in (HEADER_SIZE, "medium", TITLE_SIZE)])
    place: dict[str, Any] = {"top": font_scale() * 0.26, "va": "center_baseline"}
    write(figure, shown, 0.22, fontsize=size, fontweight="bold", **place)
    write(figure, text, across - 0.22, fontsize=TITLE_SIZE, color=MUTED, ha="right", **place)


def _write_legend(figure: Figure, entries: Sequence[Entry], columns: int, stride: float) -> None:
    """Explain colours below the header, in columns that are so many inches wide."""
    for place, entry in enumerate(entries):
        left = 0.22 + place % columns * stride
        top = font_scale() * (HEADER + (place // columns - 0.2) * LINE)
        _stroke(figure, left, left + 0.19, top, entry.color, 2)
        room = (_inches(figure)[0] - left - 0.5) * 72
        write(figure, shorten(entry.label, room, TEXT_SIZE), left + 0.26, top)


Text = tuple[float, str, Mapping[str, Any]]
"""A text, how many inches from the left edge it is, and its look."""


def _explained(findings: Sequence[Finding], others: str, across: float) -> Iterator[Sequence[Text]]:
    """The lines of text for the findings in a figure of this width in inches.

    ``others`` says what there is besides, at the end of the last line.
    """
    left = LEFT + font_scale() * INDENT
    room = HINTED * (across - LEFT - RIGHT) * 72 - points(INDENT * 72)
    for number, finding in enumerate(findings, 1):
        end = f"   {others}" if others and number == len(findings) else ""
        text = f"step {finding.step:,}: {finding.headline}"
        lines = wrapped(text, room - text_width(end, TEXT_SIZE), TEXT_SIZE, FINDING_LINES)
        lines[-1] += end
        yield [(LEFT, str(number), _badge(finding)), (left, lines[0], {})]
        yield from ([(left, line, {})] for line in lines[1:])


def _note(words: Words, across: float) -> Iterator[Sequence[Text]]:
    """The lines of the latest note in a figure of this width."""
    for last in words.notes[-1:]:
        more = f" (+{len(words.notes) - 1} earlier)" if len(words.notes) > 1 else ""
        room = HINTED * (across - 0.44) * 72 - text_width(more, TEXT_SIZE)
        lines = wrapped(f"Note at step {last.step:,}: {last.text}", room, TEXT_SIZE, NOTE_LINES)
        lines[-1] += more
        yield from ([(0.22, line, {"color": MUTED})] for line in lines)


def _inches(figure: Figure) -> tuple[float, float]:
    across, up = figure.get_size_inches()
    return float(across), float(up)


# Marks of findings --------------------------------------------------------------------------

APART = 9.0
"""Points between the middles of two numbers, at least."""


def mark(panel: Axes, findings: Sequence[Finding], last: float) -> None:
    """Draw a thin line with its number at the steps of findings up to ``last``, on all axes."""
    if panel.axison and isinstance(panel.xaxis.get_major_formatter(), StepLabels):
        _mark(panel, findings, last)
    for child in panel.child_axes:
        if isinstance(child, Axes):
            mark(child, findings, last)


def _mark(ax: Axes, findings: Sequence[Finding], last: float) -> None:
    low, high = ax.get_xlim()
    numbered = [(n, one) for n, one in enumerate(findings, 1) if low <= one.step <= last]
    numbered.sort(key=lambda each: each[1].step)
    if not numbered:
        return
    steps = np.array([low, high, *(one.step for _, one in numbered)], dtype=np.float64)
    places = ax.xaxis.get_transform().transform(steps)
    width = size_in_points(ax)[0]
    places = width * (places[2:] - places[0]) / (places[1] - places[0])
    shifts = apart(places, points(APART), width) - places
    for (number, finding), shift in zip(numbered, shifts, strict=True):
        # Unlike add_line, add_artist leaves the range of the values as it is.
        at: dict[str, Any] = {"transform": ax.get_xaxis_transform(), "zorder": 3.5}
        look: dict[str, Any] = {"alpha": 0.75, "linewidth": 0.8, "color": colour(finding)}
        look["linestyle"] = "-" if finding.is_alarm else "--"
        x = [finding.step, finding.step]
        ax.add_artist(Line2D(x, [0, 1], **look, **at))
        ax.annotate(
            str(number), (finding.step, 1), xycoords=ax.get_xaxis_transform(), xytext=(shift, -4.0),
            textcoords="offset points", annotation_clip=False, **_badge(finding),
        )  # fmt: skip


def colour(finding: Finding) -> str:
    """Red for an alarm and blue for a notice, which colour-blind readers can tell apart."""
    return ALARM if finding.is_alarm else BLUE


def _badge(finding: Finding) -> dict[str, Any]:
    """The look of a number: in a filled square for an alarm, and in a circle for a notice."""
    shade = colour(finding)
    face, ink, shape = (shade, PAPER, "square") if finding.is_alarm else (PAPER, shade, "circle")
    box = {"boxstyle": f"{shape},pad=0.2", "facecolor": face, "edgecolor": shade, "linewidth": 0.7}
    place = {"ha": "center", "va": "center", "zorder": 6}
    return {"fontsize": SMALLEST_SIZE, "fontweight": "bold", "color": ink, "bbox": box, **place}
