"""Sphinx extension: a small curve of a loss, drawn in the colour of the text.

``.. curve:: NAME`` is one of ``SHAPES``, and its content says in words what it looks like. Curves
are drawings of a symptom, not runs: they are lines of numbers, which need no picture.
"""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import numpy as np
from docutils import nodes
from numpy.typing import NDArray
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

Numbers = NDArray[np.float64]
WIDTH, HEIGHT, EDGE = 160, 64, 6
"""Of a curve in pixels, and of the ground around it."""
POINTS = 60


def _wavy(times: Numbers, size: float) -> Numbers:
    """Waves that look like noise, and are the same in each build."""
    return size * (np.sin(97 * times) + np.sin(41 * times + 1) + np.sin(173 * times + 2)) / 3


SHAPES: Mapping[str, Callable[[Numbers], Numbers]] = {
    "nan": lambda t: np.where(t < 0.45, np.exp(-3 * t) + 0.1, np.nan),
    "flat": lambda t: np.full_like(t, 0.75),
    "high": lambda t: 0.25 + 0.75 * np.exp(-6 * t),
    "diverging": lambda t: np.clip(0.1 + 0.02 * np.exp(9 * t), 0, 1),
    "waves": lambda t: 0.15 + 0.7 * np.exp(-8 * t) + 0.35 * t * (1 + np.sin(38 * t)),
    "slow": lambda t: 0.3 + 0.5 * np.exp(-9 * t) + 0.35 * t,
    "spikes": lambda t: (
        0.1 + 0.6 * np.exp(-4 * t) + 0.6 * np.isclose(t, 0.35, atol=0.01)
        + 0.8 * np.isclose(t, 0.72, atol=0.01)
    ),
    "noisy": lambda t: 0.45 + 0.3 * np.exp(-4 * t) + _wavy(t, 0.35),
    "guess": lambda t: 0.72 + _wavy(t, 0.05),
    "early": lambda t: 0.45 + 0.5 * np.exp(-9 * t),
    "zero": lambda t: 0.02 + 0.9 * np.exp(-9 * t),
}  # fmt: skip
"""Losses between 0 and 1 at times between 0 and 1."""


class Curve(SphinxDirective):
    """``.. curve:: NAME``: a drawing beside the text that follows it."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        text = drawing(SHAPES[self.arguments[0]], " ".join(self.content))
        return [nodes.raw("", text, format="html")]


def drawing(shape: Callable[[Numbers], Numbers], words: str) -> str:
    """A curve with its axes as SVG; where it isn't a number, it ends in a cross."""
    times = np.linspace(0, 1, POINTS)
    losses = shape(times)
    across = EDGE + times * (WIDTH - 2 * EDGE)
    down = EDGE + (1 - losses) * (HEIGHT - 2 * EDGE)
    known = np.isfinite(losses)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across[known], down[known], strict=True))
    axes = f"M{EDGE / 2},{EDGE / 2} V{HEIGHT - EDGE / 2} H{WIDTH - EDGE / 2}"
    cross = ""
    if not known.all():
        x, y = across[known][-1], down[known][-1]
        cross = f'<path class="cross" d="M{x - 4:.1f},{y - 4:.1f} l8,8 m0,-8 l-8,8"/>'
    return (
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(words)}</title>"
        f'<path class="axes" d="{axes}"/><polyline points="{line}"/>{cross}</svg>'
    )


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("curve", Curve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
