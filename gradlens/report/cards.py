"""What a page shows, as plain data: a card for each panel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradlens.history.lines import Floats
from gradlens.history.view import Group
from gradlens.instruments.panel import Curve, Lines, Map, all_curves
from gradlens.instruments.style import Color


@dataclass(frozen=True)
class Gaps:
    """Steps ``[G]`` whose value isn't a finite number, and which of the ``reasons`` each has."""

    steps: Floats
    which: NDArray[np.uint8]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class LinesCard:
    """Numbers per step on one value axis, with the gaps of each of its ``curves``."""

    title: str
    group: Group
    words: str
    lines: Lines
    gaps: tuple[Gaps, ...]
    hint: str = ""

    @cached_property
    def curves(self) -> tuple[Curve, ...]:
        """The curves in front, and those of layers behind them."""
        return all_curves(self.lines)


@dataclass(frozen=True)
class MapCard:
    """A number for each layer or parameter over the steps, as colours."""

    title: str
    group: Group
    words: str
    map: Map
    hint: str = ""


@dataclass(frozen=True)
class PictureCard:
    """Shades ``[rows, K]`` between 0 (nothing) and 1 over two axes.

    ``across`` and ``up`` are the ends of the axes. With ``steps`` ``[K]``, a column belongs to a
    step; otherwise columns are equal parts of the axis ``across``, which is called ``label``.
    """

    title: str
    group: Group
    words: str
    shades: Floats
    up: tuple[float, float]
    up_label: str
    across: tuple[float, float] = (0.0, 1.0)
    label: str = ""
    steps: Floats | None = None
    hint: str = ""


@dataclass(frozen=True)
class ShapesCard:
    """Functions of something else than the step: ``x`` and ``y`` of each by its name."""

    title: str
    group: Group
    words: str
    label: str
    shapes: tuple[tuple[str, Floats, Floats, Color], ...]
    hint: str = ""


Card = LinesCard | MapCard | PictureCard | ShapesCard
