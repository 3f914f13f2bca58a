"""Lines that hide each other are dashed in turn, so that each can be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from gradlens.history.lines import Line
from gradlens.instruments.style import figure_of

NEAR = 0.5
"""Points between two lines of which one hides the other."""
DASH = 2.5
"""Length of a dash in widths of its line."""

Dashes = Literal["-"] | tuple[float, tuple[float, ...]]


def separate(ax: Axes, drawn: Sequence[Line2D]) -> None:
    """Dash drawn lines that would hide earlier ones.

    Call it when the range of the axis is that of the values.
    """
    styles = dashes([_in_points(ax, one) for one in drawn])
    for one, style in zip(drawn, styles, strict=True):
        one.set_linestyle(style)


def _in_points(ax: Axes, drawn: Line2D) -> Line:
    steps, values = (np.asarray(one, dtype=np.float64) for one in drawn.get_data())
    heights = ax.transData.transform(np.stack([steps, values], 1))[:, 1]
    return Line(steps, heights * 72 / figure_of(ax).dpi)


def dashes(lines: Sequence[Line]) -> list[Dashes]:
    """A solid line for each, and dashes for one that would hide an earlier one; in points."""
    first: list[int] = []
    for place, one in enumerate(lines):
        hidden = [first[other] for other in range(place) if _hides(one, lines[other])]
        first.append(hidden[0] if hidden else place)
    counts = Counter(first)
    seen: Counter[int] = Counter()
    styles: list[Dashes] = []
    for place in first:
        number, count = seen[place], counts[place]
        # The dashes of each fill the gaps of the others.
        dash: Dashes = (-DASH * number, (DASH, DASH * (count - 1)))
        styles.append(dash if number else "-")
        seen[place] += 1
    return styles


def _hides(front: Line, behind: Line) -> bool:
    """Whether two lines are less than ``NEAR`` apart at most of their common steps."""
    _, first, second = np.intersect1d(behind.steps, front.steps, return_indices=True)
    apart = np.abs(behind.values[first] - front.values[second])
    apart = apart[np.isfinite(apart)]
    return bool(apart.size) and bool(np.mean(apart <= NEAR) > 0.8)
