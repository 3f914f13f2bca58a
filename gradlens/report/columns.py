"""The columns of numbers that the figures of a card are drawn from, by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.instruments.layers import LayerTable
from gradlens.instruments.layers import columns as columns_of_table
from gradlens.instruments.scales import StepAxis
from gradlens.instruments.series import SMOOTH_FROM, ends_of_area, smooth, thin, trend
from gradlens.report.arrays import compact_steps, compact_values, edges, pixels
from gradlens.report.cards import Card, LinesCard, MapCard, PictureCard, ShapesCard
from gradlens.report.palette import ABSENT, FIRST, SHADES, UNDEFINED, ZERO
from gradlens.report.value_axis import known, threshold, to_places

Columns = Mapping[str, Any]

PIECES = 600
"""A curve has the least and greatest value of each of so many equal parts of the step axis."""

CELLS = 18_000
COLUMNS = (60, 300)
"""A map has about so many cells, and columns between these two numbers."""

PIXELS = 600
"""Largest number of equal parts of the step axis that a map shows."""


@singledispatch
def columns(card: Card, axis: StepAxis) -> dict[str, Columns]:
    """The columns of a card by name; ``axis`` is the range of all steps of the page."""
    raise NotImplementedError(type(card))


@columns.register
def _(card: LinesCard, axis: StepAxis) -> dict[str, Columns]:
    found: dict[str, Columns] = {}
    linear = threshold(card)
    for place, (curve, gaps) in enumerate(zip(card.curves, card.gaps, strict=True)):
        is_layer = place >= len(card.lines.curves)
        shown = smooth(curve.line, bridge=True) if is_layer else curve.line
        steps, values = thin(shown.steps, shown.values, PIECES)
        found[f"values {place}"] = _line(Line(steps, values), linear)
        if not is_layer and has_trend(curve.line):
            found[f"trend {place}"] = _line(trend(curve.line, bridge=True), linear)
        found[f"gaps {place}"] = {"step": compact_steps(gaps.steps), "which": gaps.which}
        for number, (low, high) in enumerate(curve.spreads):
            found[f"band {place} {number}"] = _band(card, low, high)
    if card.lines.danger is not None:
        beyond = np.full_like(card.lines.danger.values, np.inf)
        found["danger"] = _band(card, card.lines.danger, Line(card.lines.danger.steps, beyond))
    return found


def _band(card: LinesCard, low: Line, high: Line) -> Columns:
    """The area between two lines, of many points between their trends."""
    ends = ends_of_area(low, high, 10 * float(np.abs(known(card)).max()))
    below, above = (_line(end, threshold(card)) for end in ends)
    y = "place" if threshold(card) else "value"
    return {"step": below["step"], "low": below[y], "high": above[y]}


def has_trend(line: Line) -> bool:
    """Whether a curve has so many values that its trend is in front of them."""
    return int(line.finite.sum()) >= SMOOTH_FROM


def _line(line: Line, linear: float) -> Columns:
    found = {"step": compact_steps(line.steps), "value": compact_values(line.values)}
    return found | {"place": to_places(line.values, linear)} if linear else found


@columns.register
def _(card: MapCard, axis: StepAxis) -> dict[str, Columns]:
    most = int(np.clip(CELLS // len(card.map.table.names), *COLUMNS))
    thinned, _ = columns_of_table(card.map.table, most, axis.warp)
    rows = {f"row {n}": compact_values(row) for n, row in enumerate(thinned.values)}
    cells = {"step": compact_steps(thinned.steps)} | rows
    images = _images(_codes(thinned, card.map.norm), thinned.steps, axis)
    return {"cells": cells, "map": {**images, "y": [0], "dh": [len(card.map.table.names)]}}


def _codes(table: LayerTable, norm: Normalize) -> NDArray[np.uint8]:
    low = norm.vmin or 0.0
    values = np.maximum(table.values, low) if low > 0 else table.values
    shares = np.ma.filled(norm(np.ma.masked_invalid(values)), np.nan).clip(0, 1)
    codes = np.where(np.isfinite(shares), np.nan_to_num(shares) * (SHADES - 1) + FIRST, ABSENT)
    codes[table.recorded & ~np.isfinite(table.values)] = UNDEFINED
    if isinstance(norm, LogNorm):
        # Zero isn't on a logarithmic scale, and has a colour of its own.
        codes[table.values == 0] = ZERO
    return codes.astype(np.uint8)


@columns.register
def _(card: PictureCard, axis: StepAxis) -> dict[str, Columns]:
    codes = np.where(card.shades > 0, card.shades * (SHADES - 1) + FIRST, ABSENT).astype(np.uint8)
    up = {"y": [card.up[0]], "dh": [card.up[1] - card.up[0]]}
    if card.steps is not None:
        return {"map": {**_images(codes, card.steps, axis), **up}}
    low, high = card.across
    return {"map": {"image": [codes], "x": [low], "dw": [high - low], **up}}


def _images(codes: NDArray[np.uint8], steps: Floats, axis: StepAxis) -> Columns:
    """An image of equally wide columns for each kind of step axis."""
    found: dict[str, Any] = {}
    for start, one in (("", axis), ("log ", StepAxis(axis.low, axis.high, log=True))):
        ends = edges(steps, one)
        found[f"{start}image"] = [codes[:, pixels(ends, PIXELS)]]
        found[f"{start}x"], found[f"{start}dw"] = [ends[0]], [ends[-1] - ends[0]]
    return found


@columns.register
def _(card: ShapesCard, axis: StepAxis) -> dict[str, Columns]:
    return {
        f"shape {place}": {"x": compact_values(x), "value": compact_values(y)}
        for place, (_, x, y, _) in enumerate(card.shapes)
    }
