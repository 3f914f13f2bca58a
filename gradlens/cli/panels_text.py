"""Panels as text for a terminal: a line of blocks for each curve, of shades for each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from matplotlib.colors import Normalize

from gradlens.cli.text import printable, wrapped
from gradlens.history.lines import Floats, Line
from gradlens.instruments.panel import Content, Grid, Lines, Map, Panel, Picture, Shapes, any_finite
from gradlens.instruments.scales import number_label
from gradlens.instruments.series import columns

LEVELS = "▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
NAME, LATEST = 30, 12
"""Characters of a name, and of a latest value, at most."""
ROWS = 8
"""Rows of a map or a picture, at most, evenly among all."""

Row = tuple[str, str, str]
"""A name, what is drawn, and a latest value."""


def sparkline(line: Line, width: int, log: bool = False) -> str:
    """A line in ``width`` characters: the median of each part of its steps, blank without any.

    There are no more parts than records. ``log`` has an effect on positive values only.
    """
    width = min(width, line.steps.size)
    steps, values = line.steps[line.finite], line.values[line.finite]
    if not values.size or width < 1:
        return " " * width
    values = np.log(values) if log and values.min() > 0 else values / (np.abs(values).max() or 1)
    places = (steps - line.steps[0]) / ((line.steps[-1] - line.steps[0]) or 1) * (width - 1)
    parts = places.round().astype(np.int64)
    medians = {int(n): float(np.median(values[parts == n])) for n in np.unique(parts)}
    low, high = min(medians.values()), max(medians.values())
    top = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    signs = {n: LEVELS[round((median - low) * top)] for n, median in medians.items()}
    return "".join(signs.get(n, " ") for n in range(width))


def panels_text(panels: Iterable[Panel], heading: str, width: int) -> str:
    """The panels below a heading, group by group, in lines of at most ``width`` characters."""
    lines = wrapped(heading, width)
    for group, members in itertools.groupby(panels, key=lambda panel: panel.group):
        lines += ["", group.upper()]
        for panel in members:
            lines += _panel(panel, width)
    return "\n".join(lines)


def _panel(panel: Panel, width: int) -> Iterator[str]:
    """A title with its readout, and a line for each row; of a single curve, one line altogether."""
    content, (readout, alarm) = panel.content, panel.content.readout
    latest = f"{readout}{' !' * alarm}"
    if isinstance(content, Lines) and not any_finite(content.lines):
        yield from wrapped(f"{panel.title}: {content.why}", width, hanging="  ")
        return
    name = min(NAME, width // 3)
    room = width - name - LATEST - 4
    rows = [*_rows(content, max(room, 0))]
    if len(rows) == 1:
        rows = [(panel.title, rows[0][1], latest)]
    else:
        yield from wrapped(f"{panel.title}  {latest}".rstrip(), width, hanging="  ")
    for called, drawn, value in rows:
        text = printable(called)
        short = text if len(text) <= name else f"…{text[1 - name :]}"
        yield f"  {short:<{name}} {drawn if room > 0 else ''} {value}".rstrip()[:width]


def _rows(content: Content, room: int) -> Iterator[Row]:
    match content:
        case Lines():
            log = content.up().log
            for curve in content.all_curves:
                latest = f"{number_label(curve.line.latest)} {curve.unit}".rstrip()
                yield curve.name, sparkline(curve.line, room, log), latest
        case Map():
            thinned, _ = columns(content.table, max(room, 1), lambda steps: steps)
            yield from _shades(content.labels, thinned.values, content.norm)
        case Picture():
            # As many columns as there is room for, and the row at the top of a figure first.
            chosen = np.linspace(0, content.sizes.shape[1] - 1, min(room, content.sizes.shape[1]))
            sizes = content.sizes[:, chosen.round().astype(np.int64)]
            middles = (content.rows[1:] + content.rows[:-1]) / 2
            labels = content.labels or [*map(number_label, middles)]
            upwards = slice(None, None, 1 if content.labels else -1)
            known = np.where(sizes > 0, sizes, np.nan)
            yield from _shades(labels[upwards], known[upwards], content.norm)
        case Shapes():
            lines = [one for one in content.shapes if one.kind == "line" and one.x.size > 2]
            areas = [one for one in content.shapes if one.kind == "area" and one.x.size > 2]
            for one in lines or areas:
                yield one.name, sparkline(Line(one.x, one.y), room, content.up.log), ""
        case Grid():
            for name, part in content.parts.items():
                rows = [(drawn, value) for _, drawn, value in _rows(part, room)]
                # Of each small panel, the row that shows most.
                most = max(rows, key=lambda row: len(row[0].replace(" ", "")), default=("", ""))
                yield name, *most


def _shades(labels: Sequence[str], values: Floats, norm: Normalize) -> Iterator[Row]:
    """Rows of shades, blank where there is no number."""
    shares = np.ma.filled(norm(np.ma.masked_invalid(values)), np.nan).clip(0, 1)
    codes = np.where(np.isnan(shares), 0, 1 + np.nan_to_num(shares) * (len(SHADES) - 2)).round()
    for place in np.unique(np.linspace(0, len(labels) - 1, ROWS).round().astype(np.int64)):
        yield labels[place], "".join(SHADES[int(code)] for code in codes[place]), ""
