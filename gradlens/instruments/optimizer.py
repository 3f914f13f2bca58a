"""What the optimizer makes of gradients: its averages of them, clipping, and relative updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, field_line
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import LayerLinesInstrument, layer_lines, network_norm, over_layers
from gradlens.instruments.panel import Curve, Lines, Readout, readout
from gradlens.instruments.scales import number_label
from gradlens.instruments.series import short_names
from gradlens.instruments.style import BLUE, INK, MUTED, ORANGE, PURPLE

SPIKE = 2.3
"""RMSₜ from which on it counts as a spike in Wortsman et al. (2023, arXiv:2304.13013): those of the
loss follow within one to eight steps."""

LARGE = 0.3
"""‖Δp‖/‖p‖ of a matrix from which on it is an alarm, as for the diagnosis of long steps
(``gradlens/diagnosis/rules/of_layers.py``)."""


class MomentsInstrument(Instrument):
    """‖m‖ and ‖√v‖ of all parameters together: the averages that the optimizer keeps."""

    kinds = ("OptimizerState",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        fields = {"‖m‖": "m", "‖√v‖": "root_v"}
        found = {n: over_layers(records, history, field, _norm) for n, field in fields.items()}
        known = {name: one for name, one in found.items() if one.finite.any()}
        colors = {"‖m‖": BLUE, "‖√v‖": PURPLE}
        shown = known or {"‖m‖": found["‖m‖"]}
        curves = tuple(Curve(name, one, colors[name]) for name, one in shown.items())
        return Lines(curves, words=f"{', '.join(shown)} of all parameters")


def _norm(table: Floats, axis: int) -> Floats:
    return np.asarray(np.sqrt(np.nansum(np.square(table), axis=axis)))


class MomentCosinesInstrument(LayerLinesInstrument):
    """Cosine of the angle between the gradient and its average, for each parameter."""

    kinds: ClassVar[tuple[str, ...]] = ("OptimizerState",)
    mapped = False
    part = "cosine"
    title = "Gradient and momentum"
    label = "cosine"
    fields: ClassVar[tuple[str, ...]] = ("cosine",)
    limits: ClassVar[tuple[float, float] | None] = (-1.05, 1.05)

    def content(self, history: History) -> Lines:
        return replace(super().content(history), words="cosine")


class GradientOverRootInstrument(Instrument):
    """RMS of g/√v of each parameter, and the largest: above 2.3 where v is too old."""

    kinds = ("OptimizerState",)
    part = "largest_rms"
    title = "Gradient over √v"
    label = "RMS"

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = layer_lines(records, history, ("rms",))
        return Lines(
            (Curve("largest", field_line(records, "largest_rms"), INK),),
            found,
            words=f"RMS; above {SPIKE} before spikes",
            levels=(1.0, SPIKE),
            latest=_largest_of_matrices(found, history, SPIKE),
        )


def _largest_of_matrices(found: Mapping[str, Line], history: History, alarm: float) -> Readout:
    """The largest of the latest values, with its name if it is an alarm.

    Of parameters with one axis, few elements scatter widely, and new biases have large updates.
    """
    shapes = history.parameters
    matrices = {n: one for n, one in found.items() if len(shapes.get(n, ())) > 1}
    latest = {n: one.latest for n, one in matrices.items() if one.steps.size and one.finite[-1]}
    if not latest:
        return "", False
    name = max(latest, key=latest.__getitem__)
    is_alarm = latest[name] >= alarm
    called = f" in {short_names([*found])[[*found].index(name)]}" if is_alarm else ""
    return f"{number_label(latest[name])}{called}", is_alarm


class RelativeUpdateInstrument(Instrument):
    """‖Δp‖/‖p‖ of the whole network, and of each parameter from input to output.

    An alarm names the matrix of which the latest update is ``LARGE``.
    """

    kinds = ("RelativeUpdate",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        found = layer_lines(records, history, ("value",))
        latest = _largest_of_matrices(found, history, LARGE)
        curve = Curve("all", field_line(records, "value"), INK)
        shown = Lines((curve,), found, words=self.view(history).label)
        return replace(shown, latest=latest) if latest[1] else shown


class LedgerInstrument(Instrument):
    """The change of the loss by each step, and the terms that add up to it on a linear axis."""

    kinds = ("StepLedger",)

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        change = field_line(records, "change")
        terms = {"gᵀd": ("first", BLUE), "½dᵀHd": ("second", ORANGE), "rest": ("rest", PURPLE)}
        curves = (
            Curve("ΔL", change, INK),
            *(Curve(name, field_line(records, one), c, 1.1) for name, (one, c) in terms.items()),
        )
        return Lines(curves, latest=readout(change, "ΔL"), spiky=True)


class ClippingInstrument(Instrument):
    """The gradient norm of the whole network before and after clipping."""

    kinds = ("ClippedGradNorm",)

    def content(self, history: History) -> Lines:
        after = network_norm(history, self.names[0])
        share = f"{100 * after.finite.mean():.0f} % of steps" if after.steps.size else ""
        shown: tuple[Curve, ...] = (Curve("after", after, ORANGE),)
        for name in history.of_kind("GradNorm")[:1]:
            before = network_norm(history, name)
            known = dict(zip(before.steps, before.values, strict=True))
            unclipped = np.array([known.get(step, np.nan) for step in after.steps])
            filled = np.where(after.finite, after.values, unclipped)
            whole = replace(after, values=filled)
            shown = (Curve("before", before, MUTED), Curve("after", whole, ORANGE))
        return Lines(shown, latest=(share, False))
