"""The columns of numbers that the figures of a card are drawn from, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.layers import LayerTable, edges
from gradlens.instruments.layers import columns as columns_of_table
from gradlens.instruments.panel import Lines, Map, Picture, Shape, Shapes
from gradlens.instruments.scales import Ruler, StepAxis
from gradlens.instruments.series import SMOOTH_FROM, ends_of_area, smooth, thin, trend
from gradlens.report.axes import ABSENT, EXPLAINED, FIRST, SHADES, UNDEFINED, ZERO
from gradlens.report.content import Card, Gaps

Columns = Mapping[str, Any]

PIECES = 600
"""A curve has the least and greatest value of each of so many equal parts of the step axis."""

CELLS = 18_000
COLUMNS = (60, 300)
"""A map has about so many cells, and columns between these two numbers."""

PIXELS = 600
"""Largest number of equal parts of the step axis that a map shows."""


def columns(card: Card, axis: StepAxis) -> dict[str, Columns]:
    """The columns of a card by name; ``axis`` is the range of all steps of the page."""
    match card.panel.content:
        case Lines() as lines:
            return _of_lines(lines, card.up, card.gaps)
        case Map() as map:
            return _of_map(map, axis)
        case Picture() as picture:
            return _of_picture(picture, axis)
        case Shapes() as shapes:
            return _of_shapes(shapes)
        case other:
            raise NotImplementedError(type(other))


def _of_lines(shown: Lines, up: Ruler, gaps: Sequence[Gaps]) -> dict[str, Columns]:
    found: dict[str, Columns] = {}
    linear = up.linear
    for place, (curve, missing) in enumerate(zip(shown.all_curves, gaps, strict=True)):
        is_layer = place >= len(shown.curves)
        raw = smooth(curve.line, bridge=True) if is_layer else curve.line
        steps, values = thin(raw.steps, raw.values, PIECES)
        found[f"values {place}"] = _line(Line(steps, values), linear)
        if not is_layer and has_trend(curve.line):
            found[f"trend {place}"] = _line(trend(curve.line, bridge=True), linear)
        found[f"gaps {place}"] = {"step": compact_steps(missing.steps), "which": missing.which}
        for number, (low, high) in enumerate(curve.spreads):
            found[f"band {place} {number}"] = _band(up, low, high)
    if shown.danger is not None:
        beyond = np.full_like(shown.danger.values, np.inf)
        found["danger"] = _band(up, shown.danger, Line(shown.danger.steps, beyond))
    return found


def _band(up: Ruler, low: Line, high: Line) -> Columns:
    """The area between two lines, of many points between their trends."""
    below, above = (
        _line(end, up.linear) for end in ends_of_area(low, high, 10 * abs(up.limits[1]))
    )
    y = "place" if up.linear else "value"
    return {"step": below["step"], "low": below[y], "high": above[y]}


def has_trend(line: Line) -> bool:
    """Whether a curve has so many values that its trend is in front of them."""
    return int(line.finite.sum()) >= SMOOTH_FROM


def _line(line: Line, linear: float) -> Columns:
    found = {"step": compact_steps(line.steps), "value": compact_values(line.values)}
    return found | {"place": to_places(line.values, linear)} if linear else found


def _of_map(shown: Map, axis: StepAxis) -> dict[str, Columns]:
    most = int(np.clip(CELLS // len(shown.table.names), *COLUMNS))
    thinned, _ = columns_of_table(shown.table, most, axis.warp)
    rows = {f"row {n}": compact_values(row) for n, row in enumerate(thinned.values)}
    cells = {"step": compact_steps(thinned.steps)} | rows
    images = _images(_codes(thinned, shown.norm), thinned.steps, axis)
    return {"cells": cells, "map": {**images, "y": [0], "dh": [len(shown.table.names)]}}


def _codes(table: LayerTable, norm: Normalize) -> NDArray[np.uint8]:
    low = norm.vmin or 0.0
    values = np.maximum(table.values, low) if low > 0 else table.values
    shares = np.ma.filled(norm(np.ma.masked_invalid(values)), np.nan).clip(0, 1)
    codes = np.where(np.isfinite(shares), np.nan_to_num(shares) * (SHADES - 1) + FIRST, ABSENT)
    codes[table.recorded & ~np.isfinite(table.values)] = EXPLAINED if table.reason else UNDEFINED
    if isinstance(norm, LogNorm):
        # Zero isn't on a logarithmic scale, and has a colour of its own.
        codes[table.values == 0] = ZERO
    return codes.astype(np.uint8)


def _of_picture(shown: Picture, axis: StepAxis) -> dict[str, Columns]:
    shares = np.ma.filled(shown.norm(np.ma.masked_less_equal(shown.sizes, 0)), np.nan)
    known = np.isfinite(shares)
    codes = np.where(known, np.nan_to_num(shares) * (SHADES - 1) + FIRST, ABSENT).astype(np.uint8)
    low, high = (float(end) for end in shown.rows[[0, -1]])
    up = {"y": [low], "dh": [high - low]}
    if shown.steps is not None:
        return {"map": {**_images(codes, shown.steps, axis), **up}}
    low, high = (float(end) for end in shown.columns[[0, -1]])
    return {"map": {"image": [codes], "x": [low], "dw": [high - low], **up}}


def _images(codes: NDArray[np.uint8], steps: Floats, axis: StepAxis) -> Columns:
    """An image of equally wide columns for each kind of step axis."""
    found: dict[str, Any] = {}
    for start, one in (("", axis), ("log ", StepAxis(axis.low, axis.high, log=True))):
        ends = edges(one.warp(steps), one.warp(steps))
        found[f"{start}image"] = [codes[:, pixels(ends, PIXELS)]]
        found[f"{start}x"], found[f"{start}dw"] = [ends[0]], [ends[-1] - ends[0]]
    return found


def _of_shapes(shown: Shapes) -> dict[str, Columns]:
    return {
        f"shape {place}": {"x": compact_values(one.x), "value": compact_values(one.y)}
        | ({} if one.kind != "area" else {"low": compact_values(base(one))})
        for place, one in enumerate(shown.shapes)
    }


def base(one: Shape) -> Floats:
    """The lower edge of an area."""
    return np.zeros_like(one.y) if one.low is None else one.low


EXACT = 2.0**24
"""Whole numbers up to it are exact as float32."""


def compact_steps(steps: Floats) -> NDArray[np.floating]:
    """Steps as float32 where that is exact, and otherwise as float64."""
    exact = not steps.size or ((np.abs(steps) <= EXACT).all() and (steps == np.rint(steps)).all())
    return steps.astype(np.float32) if exact else steps


def compact_values(values: Floats) -> NDArray[np.floating]:
    """Numbers as float32, which has seven digits, unless they are out of its range; ∞ is a NaN."""
    known = np.where(np.isfinite(values), values, np.nan)
    sizes = np.abs(known[np.isfinite(known) & (known != 0)])
    limits = np.finfo(np.float32)
    if sizes.size and (sizes.max() > limits.max or sizes.min() < limits.tiny):
        return known
    return known.astype(np.float32)


def pixels(ends: Floats, most: int) -> NDArray[np.int64]:
    """For at most ``most`` equal parts of an axis, which of the pieces between ``ends`` is there.

    As few as show each piece, if these are equally wide.
    """
    widths = np.diff(ends)
    equal = np.allclose(widths, widths[0], rtol=1e-6)
    count = widths.size if equal and widths.size <= most else most
    middles = ends[0] + (np.arange(count) + 0.5) / count * (ends[-1] - ends[0])
    return np.clip(np.searchsorted(ends, middles, side="right") - 1, 0, widths.size - 1)


def to_places(values: Floats, linear: float) -> NDArray[np.float32]:
    """Places of values on an axis that is about linear up to the size ``linear``."""
    known = np.where(np.isfinite(values), values, np.nan)
    places = np.sign(known) * np.log10(1 + np.abs(known) / linear)
    return np.asarray(places, dtype=np.float32)
