"""Where panels are placed: rows and pages, as pure functions of the panels and their sizes.

All inches are those at matplotlib's default ``font.size``, and grow with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gradlens.instruments.axes import CELL
from gradlens.instruments.panel import Panel
from gradlens.instruments.style import font_scale

HEADER, HEADING, FOOTER, EDGE = 0.52, 0.2, 0.3, 0.12
"""Inches for the header of a figure, for the group names above a row, for a line of text below the
rows, and for edges."""

LINE = 0.17
"""Inches from one line of text below the rows to the next."""

ASPECT = 1.65
"""Ratio of width to height that a figure should come close to, as a wide screen's."""

WIDEST, TALLEST = 4.0, 1.45
"""Cells in a row of a page of single layers, and the page's height over its width, at most."""

UNEQUAL = 1.6
"""How many times as high as it needs to be a panel may become in a row with higher ones."""

LEGIBLE = 0.7
"""Fraction of the size that panels need, below which a figure's own size is not kept."""

LEAST = 0.55
"""Fraction of a panel's usual height below which it has no room for a line."""

Row = tuple[Panel, ...]
Look = Literal["screen", "paper", "dark"]
FigureSize = float | tuple[float, float] | None
"""Inches: the width, or the width and the height; ``None`` for what the panels need."""


@dataclass(frozen=True)
class Place:
    """A panel and its rectangle in inches, from the left and the top of the figure."""

    panel: Panel
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Page:
    """The rows of a figure, and how many ``lines`` of text are below them.

    Rows that are ``bare`` have neither a header nor groups. ``legend`` is the number of lines of
    text below the header.
    """

    rows: tuple[Row, ...]
    bare: bool = False
    lines: int = 0
    legend: int = 0

    @property
    def size(self) -> tuple[float, float]:
        # A few panels may be larger than many.
        zoom = 1 + 0.5 / sum(panel.width for row in self.rows for panel in row)
        width = max(_row_width(row) for row in self.rows) * CELL[0] * zoom + 2 * EDGE
        return font_scale() * width, self.height(zoom)

    def is_legible(self, width: float, height: float) -> bool:
        """Whether the panels can be read on a figure of another size."""
        needed = self.size
        return height >= LEGIBLE * needed[1] and width >= LEGIBLE * needed[0]

    def height(self, stretch: float = LEAST) -> float:
        """Height in inches with panels so many times as high as usual, by default the least."""
        cells = sum(_row_height(row) for row in self.rows)
        return self._fixed + font_scale() * cells * CELL[1] * stretch

    def height_for(self, width: float) -> float:
        """Height in inches of a figure of another width, with panels of about their usual shape.

        Wide panels that become narrow are higher, because what is in them needs more rows.
        """
        usual = font_scale() * max(_row_width(row) for row in self.rows) * CELL[0]
        return self.height(min(max(width / usual, 0.9), 1.3) * math.sqrt(max(usual / width, 1.0)))

    def places(self, width: float, height: float) -> tuple[tuple[Place, ...], ...]:
        """The panels of each row on a figure of this size, which they fill."""
        cells = sum(_row_height(row) for row in self.rows)
        cell, top = (height - self._fixed) / cells, self._header
        rows = []
        for row in self.rows:
            tall, unit = cell * _row_height(row), (width - 2 * EDGE) / _row_width(row)
            top += self._heading
            lefts = itertools.accumulate((panel.width * unit for panel in row), initial=EDGE)
            placed = zip(row, lefts, strict=False)
            rows.append(
                tuple(Place(one, left, top, one.width * unit, tall) for one, left in placed)
            )
            top += tall
        return tuple(rows)

    @property
    def _heading(self) -> float:
        return 0.0 if self.bare else font_scale() * HEADING

    @property
    def _header(self) -> float:
        return 0.0 if self.bare else font_scale() * (HEADER + self.legend * LINE)

    @property
    def _fixed(self) -> float:
        footer = FOOTER + (self.lines - 1) * LINE if self.lines else EDGE
        return self._header + font_scale() * footer + len(self.rows) * self._heading


# Pages --------------------------------------------------------------------------------------


def pages(panels: Sequence[Panel]) -> tuple[tuple[Panel, ...], ...]:
    """Panels of single layers on as few pages as possible, in their order, about equally full.

    A page has few columns, and is not much taller than wide.
    """
    page = TALLEST * WIDEST**2 * CELL[0] / CELL[1]
    fewest = math.ceil(sum(panel.width * panel.height for panel in panels) / page)
    # Pieces of about equal area, by where the middles of panels are.
    ends = [*itertools.accumulate(panel.width * panel.height for panel in panels)]
    middles = [(end + start) / 2 for start, end in itertools.pairwise([0.0, *ends])]
    for count in range(fewest, len(panels)):
        numbers = [int(count * middle / ends[-1]) for middle in middles]
        found = tuple(
            tuple(panel for panel, one in zip(panels, numbers, strict=True) if one == number)
            for number in dict.fromkeys(numbers)
        )
        sizes = (_size(arrange(part, WIDEST)) for part in found)
        if all(height <= TALLEST * width for width, height in sizes):
            return found
    return tuple((panel,) for panel in panels)


def columns(size: FigureSize) -> float:
    """The largest number of cells in a row of a figure of this size."""
    width = width_of(size, math.inf)
    return max(1.0, width / (LEGIBLE * font_scale() * CELL[0]))


def width_of(size: FigureSize, needed: float) -> float:
    """The width of a figure of this size, by default the one that is needed."""
    return needed if size is None else size if isinstance(size, (int, float)) else size[0]


# Rows ---------------------------------------------------------------------------------------


def arrange(panels: Sequence[Panel], widest: float = math.inf) -> tuple[Row, ...]:
    """Break panels into rows, in their order.

    Rows should be about equally wide, the figure about ``ASPECT``, and groups in one piece; all
    rows are then stretched to the width of the widest. No row has more than ``widest`` cells,
    unless it is a single panel.
    """

    @cache
    def cost(start: int, end: int) -> float:
        return _cost(panels[start:end], widest)

    @cache
    def balanced(start: int, rows: int) -> tuple[float, tuple[Row, ...]]:
        """How ragged the panels from here on are at best in so many rows, and these rows."""
        if rows == 1:
            return cost(start, len(panels)), (tuple(panels[start:]),)
        options = []
        for cut in range(start + 1, len(panels) - rows + 2):
            torn = panels[cut - 1].group == panels[cut].group
            options.append((balanced(cut, rows - 1)[0] + cost(start, cut) + 0.6 * torn, cut))
        raggedness, cut = min(options)
        return raggedness, (tuple(panels[start:cut]), *balanced(cut, rows - 1)[1])

    options = (balanced(0, rows) for rows in range(1, len(panels) + 1))
    return min(options, key=lambda found: _badness(*found))[1]


def _cost(row: Sequence[Panel], widest: float) -> float:
    """That of rows of unequal widths, which is least in equal ones, of low panels, of wide rows."""
    width = _row_width(row)
    mixed = _row_height(row) > UNEQUAL * min(panel.height for panel in row)
    too_wide = len(row) > 1 and width > widest
    return width**2 + 100 * (mixed + 10 * too_wide)


def _badness(raggedness: float, rows: Sequence[Row]) -> float:
    """Cost of a figure: its aspect, how far rows are stretched, and their raggedness."""
    width, height = _size(rows)
    stretch = sum((1 - _row_width(row) * CELL[0] / width) ** 2 for row in rows)
    even = len(rows) * (sum(_row_width(row) for row in rows) / len(rows)) ** 2
    aspect = math.log(width / height / ASPECT)
    return 3 * aspect**2 + stretch + 0.3 * (raggedness - even)


def _size(rows: Sequence[Row]) -> tuple[float, float]:
    width = max(_row_width(row) for row in rows) * CELL[0]
    return width, HEADER + sum(_row_height(row) * CELL[1] + HEADING for row in rows)


def _row_width(row: Sequence[Panel]) -> float:
    return sum(panel.width for panel in row)


def _row_height(row: Sequence[Panel]) -> float:
    return max(panel.height for panel in row)
