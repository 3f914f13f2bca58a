"""What a page shows, as plain data: a card for each panel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.colors import Normalize
from numpy.typing import NDArray

from gradlens.history.lines import Floats, Line
from gradlens.history.view import Group
from gradlens.instruments.layers import LayerTable
from gradlens.instruments.scales import Scale
from gradlens.instruments.style import Color


@dataclass(frozen=True)
class Gaps:
    """Steps ``[G]`` whose value isn't a finite number, and which of the ``reasons`` each has."""

    steps: Floats
    which: NDArray[np.uint8]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """A number per step, called ``name``, in ``unit``."""

    name: str
    line: Line
    color: Color
    gaps: Gaps
    unit: str = ""


@dataclass(frozen=True)
class LinesCard:
    """Curves on one value axis; ``spiky`` if single values may be out of its range."""

    title: str
    group: Group
    words: str
    curves: tuple[Curve, ...]
    scale: Scale = "linear"
    spiky: bool = False
    hint: str = ""


@dataclass(frozen=True)
class MapCard:
    """A number for each layer or parameter over the steps, as colours by ``norm``."""

    title: str
    group: Group
    words: str
    table: LayerTable
    norm: Normalize
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
