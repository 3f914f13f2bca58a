"""How the outputs of layers depend on a network's width, and the figure of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes

from gradlens.curvature.estimate import Estimate
from gradlens.history.lines import Floats, Line
from gradlens.history.undefined import Undefined
from gradlens.instruments.axes import LABELLED, Drawing, plot_panels
from gradlens.instruments.curves import explain_empty, thread
from gradlens.instruments.panel import Artists, Drawn, Panel
from gradlens.instruments.scales import Ruler, StepAxis, fit, number_label, padded
from gradlens.instruments.shapes import label_below
from gradlens.instruments.style import ALARM, BLUE, MUTED, ORANGE, TICK_SIZE, Color, Entry, key

Verdict: TypeAlias = Literal["grows", "vanishes", "constant", "undecided"]

NO_LOGARITHM = "it is 0, NaN or infinite at some widths"

TOLERANCE = 0.25
"""Of an exponent that counts as 0: half of 1/2, of which those of infinitely wide networks are
multiples in the parametrisations in use (Yang and Hu, 2021, arXiv:2011.14522)."""

WORDS: dict[Verdict, str] = {
    "grows": "grows with the width",
    "vanishes": "vanishes with the width",
    "undecided": "is undecided, which more seeds or widths may change",
}
PLURAL: dict[Verdict, str] = {"grows": "grow", "vanishes": "vanish"}
NAMED = 2
"""Layers whose names have room in a key."""
COLOURS: dict[Verdict, Color] = {
    "grows": ALARM, "vanishes": ORANGE, "undecided": MUTED, "constant": BLUE
}  # fmt: skip


@dataclass(frozen=True)
class Slope:
    """An exponent of the width, and the 95 % confidence interval from ``low`` to ``high``."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        low, high = (number_label(end, 2) for end in (self.low, self.high))
        return f"{number_label(self.value, 2)} ({low} to {high})"


@dataclass(frozen=True)
class CoordinateCheck:
    """Sizes of L layers' outputs at W widths, for S seeds each, after 0 to T steps of training.

    ``sizes`` ``[L, W, S, T + 1]`` are root mean squares of the outputs for the first batch, and
    ``changes`` of their differences from those before training, in the same order as ``layers`` and
    ascending ``widths`` ``[W]``. ``step`` is the last one at which all of them are finite, of which
    slopes are.
    """

    widths: Floats
    layers: tuple[str, ...]
    sizes: Floats
    changes: Floats

    @cached_property
    def step(self) -> int:
        """The last step before an output was NaN or infinite; -1 if there was no such step."""
        known = np.isfinite(self.sizes).all((0, 1, 2)) & np.isfinite(self.changes).all((0, 1, 2))
        return int(np.argmin(np.append(known, False))) - 1

    @cached_property
    def size_slopes(self) -> dict[str, Slope]:
        """Exponents a of sizes ∝ widthᵃ."""
        return self._slopes(self.sizes)

    @cached_property
    def change_slopes(self) -> dict[str, Slope]:
        """Exponents a of changes ∝ widthᵃ; 0 of outputs that training doesn't change."""
        return self._slopes(self.changes)

    def _slopes(self, values: Floats) -> dict[str, Slope]:
        found = values[..., self.step] if self.step >= 0 else np.full(values.shape[:-1], np.nan)
        return {n: _slope(self.widths, row) for n, row in zip(self.layers, found, strict=True)}

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """What is said of each layer.

        It ``"grows"`` if its outputs or their changes do, and ``"vanishes"`` if their changes do:
        an exponent's interval is above or below 0 by more than a quarter. It is ``"constant"`` if
        the intervals are within a quarter of 0, and otherwise ``"undecided"``. Outputs may become
        smaller with the width if their changes don't, as those of the last layer before training.
        """
        return {
            name: _verdict(self.size_slopes[name], self.change_slopes[name]) for name in self.layers
        }

    def layers_that(self, verdict: Verdict) -> tuple[str, ...]:
        """The layers with a verdict."""
        return tuple(name for name in self.layers if self.verdicts[name] == verdict)

    @property
    def grows(self) -> tuple[str, ...]:
        """Layers whose outputs, or their changes, grow with the width."""
        return self.layers_that("grows")

    @property
    def vanishes(self) -> tuple[str, ...]:
        """Layers whose changes vanish with the width: they learn less and less."""
        return self.layers_that("vanishes")

    @property
    def undecided(self) -> tuple[str, ...]:
        """Layers of which neither is certain, nor that they are constant."""
        return self.layers_that("undecided")

    @property
    def is_finite(self) -> bool:
        """Whether all outputs are finite at all steps."""
        return self.step == self.sizes.shape[-1] - 1

    @property
    def passes(self) -> bool:
        """Whether each layer is constant, as in the maximal update parametrisation."""
        return self.outcome == "passes"

    @property
    def outcome(self) -> Literal["passes", "fails", "undecided"]:
        """It fails if a layer grows or vanishes, or if outputs become NaN or infinite."""
        if self.grows or self.vanishes or not self.is_finite:
            return "fails"
        return "undecided" if self.undecided else "passes"

    def __str__(self) -> str:
        widths = ", ".join(map(number_label, self.widths.tolist()))
        lines = [f"coordinate check: {self.outcome}, after {self.step} steps at widths {widths}"]
        if not self.is_finite:
            lines.append("outputs are NaN or infinite at the next step")
        for verdict, words in WORDS.items():
            lines += [
                f"{name} {words}: size ∝ width^{self.size_slopes[name]}, "
                f"change ∝ width^{self.change_slopes[name]}"
                for name in self.layers_that(verdict)
            ]
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Drawing:
        """Draw the changes of outputs against the width on ``ax``, or on a new figure.

        They are geometric means over the seeds, after the step of the slopes. Layers that grow are
        red, those that vanish orange, and those that are undecided grey.
        """
        readout = self.outcome, self.outcome == "fails"
        content = Drawn(lambda ax, _: self._draw(ax), readout)
        panel = Panel(f"Change after {self.step} steps", "layers", (), content)
        return plot_panels([panel], StepAxis(0, 1), ax, zoom=1.5, margin=LABELLED)

    def _draw(self, ax: Axes) -> Artists:
        table = self.changes[..., self.step] if self.step > 0 else self.changes[..., 0]
        with np.errstate(divide="ignore"):
            means = np.exp(np.log(table).mean(-1))  # a change of 0 has none
        means[means == 0] = np.nan
        lines = [Line(self.widths, row) for row in means]
        ends = padded(float(self.widths[0]), float(self.widths[-1]), log=True)
        Ruler("", ends, log=True, ticks=tuple(self.widths.tolist())).apply(ax, across=True)
        label_below(ax, "width")
        if not np.isfinite(means).any():
            return explain_empty(ax, lines, "no output has changed")
        fit(ax, [*means], "log")
        ax.set_ylabel("rms of the change", fontsize=TICK_SIZE, color=MUTED, labelpad=2)
        axis, artists = StepAxis(float(self.widths[0]), float(self.widths[-1])), Artists()
        for name, line in zip(self.layers, lines, strict=True):
            color = COLOURS[self.verdicts[name]]
            artists[name] = thread(ax, axis, line, color, 1.4)
        explained = key(ax, [*self._entries()])
        return artists | ({"key": explained} if explained else {})

    def _entries(self) -> Iterator[Entry]:
        """The names of what isn't constant, where there are few of them."""
        for verdict, color in COLOURS.items():
            names = self.layers_that(verdict)
            is_named = len(names) <= NAMED and verdict != "constant"
            count = f"{len(names)} layer{'s' if len(names) > 1 else ''}"
            what = ", ".join(names) if is_named else count
            if names:
                yield Entry(f"{PLURAL.get(verdict, verdict)}: {what}", color)


def _slope(widths: Floats, values: Floats) -> Slope:
    """The exponent of values ``[W, S]``, and Student's interval over the seeds' own exponents.

    The seeds are independent, so that this holds whatever the errors at single widths are.
    """
    if not values.any():
        return Slope(0.0, 0.0, 0.0)
    if not (np.isfinite(values) & (values > 0)).all():
        nan = Undefined(NO_LOGARITHM)
        return Slope(nan, nan, nan)
    places = np.log(widths) - np.log(widths).mean()
    found = places @ np.log(values) / (places @ places)
    value, error = float(found.mean()), float(found.std(ddof=1)) / len(found) ** 0.5
    return Slope(value, *Estimate(value, error, len(found) - 1, 0).confidence_interval())


def _verdict(size: Slope, change: Slope) -> Verdict:
    if size.low > TOLERANCE or change.low > TOLERANCE:
        return "grows"
    if change.high < -TOLERANCE:
        return "vanishes"
    is_certain = change.low >= -TOLERANCE and max(size.high, change.high) <= TOLERANCE
    return "constant" if is_certain else "undecided"
