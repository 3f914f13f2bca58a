"""The colours of a page: those of the figures, and for a dark background paler ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import Colormap, to_hex

from gradlens.instruments.style import (
    ALARM,
    BLUE,
    FAINT,
    GRID,
    INK,
    MUTED,
    PAPER,
    Color,
    density_colormap,
    signed_colormap,
    size_colormap,
    tint,
)

PALER = 0.68
"""Share of a line's colour on a dark background; the rest is white."""

LIGHT: Mapping[str, str] = {
    "page": "#f4f6f8",
    "paper": PAPER,
    "ink": INK,
    "muted": MUTED,
    "faint": FAINT,
    "grid": GRID,
    "alarm": ALARM,
    "accent": BLUE,
}
DARK: Mapping[str, str] = {
    "page": "#0f1317",
    "paper": "#181d23",
    "ink": "#e8ecf0",
    "muted": "#9aa6b2",
    "faint": "#46505b",
    "grid": "#28303a",
    "alarm": "#ff8a7a",
    "accent": "#6bb5e8",
}
"""Colours of a page by their names as CSS variables."""


def in_light(color: Color) -> str:
    """A line's colour on a white background."""
    return to_hex(color)


def in_dark(color: Color) -> str:
    """A line's colour on a dark background."""
    return DARK["ink"] if color == INK else to_hex(tint(color, PALER))


def variables(colors: Mapping[str, str]) -> str:
    """Colours as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


SHADES = 254
"""Colours of a map, besides two for cells without a number."""

ABSENT, UNDEFINED = 0, 1
"""Numbers of the colours of a cell without a record, and of one whose record isn't a number."""


def palette(colors: Colormap) -> list[str]:
    """256 colours: for no record, for no number, and from small to large."""
    shades = [to_hex(color) for color in colors(np.linspace(0, 1, SHADES))]
    return ["#00000000", ALARM, *shades]


SIZES, SIGNED, DENSITY = size_colormap(), signed_colormap(), density_colormap()
DENSITY_IN_DARK = density_colormap().reversed()


def gradient(colors: Colormap) -> str:
    """A colour bar as a CSS background."""
    stops = ", ".join(to_hex(color) for color in colors(np.linspace(0, 1, 9)))
    return f"linear-gradient(90deg, {stops})"
