"""The colours of a page: those of the figures, and for a dark background those of dark figures."""

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
    signal_colormap,
    signed_colormap,
    size_colormap,
)
from gradlens.plotting.dark import DARK, dark, dark_colormap

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
IN_DARK: Mapping[str, str] = {
    "page": "#0f1317",
    **{name: DARK[color] for name, color in LIGHT.items() if color in DARK},
}
"""Colours of a page by their names as CSS variables."""


def in_light(color: Color) -> str:
    """A line's colour on a white background."""
    return to_hex(color)


def in_dark(color: Color) -> str:
    """A line's colour on a dark background."""
    return to_hex(dark(color))


def variables(colors: Mapping[str, str]) -> str:
    """Colours as CSS variables."""
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


ABSENT, UNDEFINED, ZERO = 0, 1, 2
"""Numbers of the colours of a cell without a record, of one whose record isn't a number, and of one
whose number is exactly zero on a logarithmic scale."""

FIRST = 3
SHADES = 256 - FIRST
"""The number of the first of a map's other colours, and how many there are."""


def palette(colors: Colormap) -> list[str]:
    """256 colours: for no record, for no number, for zero, and from small to large."""
    shades = [to_hex(color) for color in colors(np.linspace(0, 1, SHADES))]
    return ["#00000000", ALARM, FAINT, *shades]


SIZES, SIGNED = size_colormap(), signed_colormap()
OF_THE_GROUND: Mapping[str, tuple[Colormap, Colormap]] = {
    name: (colors, dark_colormap(colors))
    for name, colors in (("density", density_colormap()), ("signal", signal_colormap()))
}
"""Colours on a white and on a dark background that have the background's in them."""


def gradient(colors: Colormap) -> str:
    """A colour bar as a CSS background."""
    stops = ", ".join(to_hex(color) for color in colors(np.linspace(0, 1, 9)))
    return f"linear-gradient(90deg, {stops})"
