"""What is wrong with a run, wherever it is shown: marks in panels, and lines that explain them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gradlens.diagnosis.diagnose import diagnose
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.records import LeftOutWarning
from gradlens.instruments.lines import apart
from gradlens.instruments.scales import StepLabels
from gradlens.instruments.style import (
    ALARM,
    BLUE,
    INK,
    PAPER,
    SMALLEST_SIZE,
    TEXT_SIZE,
    font_scale,
    points,
    size_in_points,
    text_width,
    wrapped,
)
from gradlens.plotting.layout import LINE

MOST = 5
"""So many findings are shown in a figure and in a summary."""


def findings_of(history: History) -> tuple[Finding, ...]:
    """What is wrong with a run, ordered by cause.

    If the run can't be diagnosed, nothing, with a ``LeftOutWarning``: the values of a run may be
    anything.
    """
    try:
        # Of numbers that are too large to be compared, nothing follows.
        with np.errstate(all="ignore"):
            return tuple(diagnose(history))
    except Exception as error:
        text = f"the run can't be diagnosed ({type(error).__name__}: {error})"
        warnings.warn(text, LeftOutWarning, stacklevel=2)
        return ()


def main_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The first of those that no other one explains; alarms come before notices."""
    return tuple(finding for finding in findings if not finding.explained_by)[:MOST]


def others(findings: Sequence[Finding], run: str = "RUN") -> str:
    """How many findings there are besides the main ones, and how to see them."""
    main = main_findings(findings)
    rest = [finding for finding in findings if finding not in main]
    if not rest:
        return ""
    follow = "that follows" if len(rest) == 1 else "that follow"
    word = follow if all(finding.explained_by for finding in rest) else "more"
    return f"and {len(rest)} {word}: gradlens diagnose {run}"


# Marks --------------------------------------------------------------------------------------

LEFT, RIGHT, INDENT = 0.28, 0.22, 0.12
"""Inches left and right of the lines, and between a number and its line."""
HINTED = 0.91
"""Share of a line that its text may have as it is measured; at some resolutions, hinting makes
small type wider."""
MOST_LINES = 2
"""Largest number of lines for a finding."""
APART = 9.0
"""Points between the middles of two numbers, at least."""


def colour(finding: Finding) -> str:
    """Red for an alarm and blue for a notice, which colour-blind readers can tell apart."""
    return ALARM if finding.is_alarm else BLUE


def mark(panel: Axes, findings: Sequence[Finding], last: float) -> None:
    """Draw a thin line with its number at the steps of findings up to ``last``, on all axes."""
    for ax in _over_steps(panel):
        _mark(ax, findings, last)


def _over_steps(ax: Axes) -> Iterator[Axes]:
    if ax.axison and isinstance(ax.xaxis.get_major_formatter(), StepLabels):
        yield ax
    for child in ax.child_axes:
        if isinstance(child, Axes):
            yield from _over_steps(child)


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
        _line(ax, finding)
        ax.annotate(
            str(number),
            (finding.step, 1),
            xycoords=ax.get_xaxis_transform(),
            xytext=(shift, -4.0),
            textcoords="offset points",
            annotation_clip=False,
            **_badge(finding),
        )


def _line(ax: Axes, finding: Finding) -> None:
    line = Line2D(
        [finding.step, finding.step],
        [0, 1],
        transform=ax.get_xaxis_transform(),
        color=colour(finding),
        linewidth=0.8,
        linestyle="-" if finding.is_alarm else "--",
        alpha=0.75,
        zorder=3.5,
    )
    # Unlike add_line, this leaves the range of the values as it is.
    ax.add_artist(line)


def _badge(finding: Finding) -> dict[str, Any]:
    """The look of a number: in a filled square for an alarm, and in a circle for a notice."""
    shade = colour(finding)
    face, ink, shape = (shade, PAPER, "square") if finding.is_alarm else (PAPER, shade, "circle")
    box = {"boxstyle": f"{shape},pad=0.2", "facecolor": face, "edgecolor": shade, "linewidth": 0.7}
    place = {"ha": "center", "va": "center", "zorder": 6}
    return {"fontsize": SMALLEST_SIZE, "fontweight": "bold", "color": ink, "bbox": box, **place}


def explained(findings: Sequence[Finding], others: str, across: float) -> list[list[str]]:
    """The lines of text for each finding in a figure of this width in inches.

    ``others`` says what there is besides, at the end of the last line.
    """
    room = HINTED * (across - LEFT - RIGHT) * 72 - points(INDENT * 72)
    texts = [f"step {finding.step:,}: {finding.headline}" for finding in findings]
    ends = ["" for _ in texts[1:]] + [f"   {others}" if others else ""] * bool(texts)
    found = []
    for text, end in zip(texts, ends, strict=True):
        lines = wrapped(text, room - text_width(end, TEXT_SIZE), TEXT_SIZE, MOST_LINES)
        found.append([*lines[:-1], lines[-1] + end])
    return found


def write(figure: Figure, text: str, left: float, top: float, **look: Any) -> None:
    """Write a text on a figure, so many inches from its left edge and from its upper one."""
    across, up = figure.get_size_inches()
    usual: dict[str, Any] = {"fontsize": TEXT_SIZE, "color": INK, "va": "center"}
    figure.text(left / across, 1 - top / up, text, **usual | look)


def explain(
    figure: Figure, findings: Sequence[Finding], texts: Sequence[Sequence[str]], top: float
) -> None:
    """Write the lines of ``explained``, the first one ``top`` inches below the upper edge."""
    line, left = font_scale() * LINE, LEFT + font_scale() * INDENT
    for number, (finding, lines) in enumerate(zip(findings, texts, strict=True), 1):
        write(figure, str(number), LEFT, top, **_badge(finding))
        for text in lines:
            write(figure, text, left, top)
            top += line
