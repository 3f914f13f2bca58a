"""Trace of the Hessian."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.lines import Line, field_line
from gradlens.history.series import Series
from gradlens.instruments.drawing import (
    Artists,
    any_finite,
    band,
    beyond,
    curve,
    explain_empty,
    missing,
    readout,
    smooth,
    zero_line,
)
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.scales import (
    StepAxis,
    fit,
    log_if_far,
    step_label,
    within_reach,
    without_spikes,
)
from gradlens.instruments.style import BLUE, subtitle, title


class HessTraceInstrument(Instrument):
    """Trace of the Hessian with the band of its estimation error, unless it is exact."""

    kinds: ClassVar[tuple[str, ...]] = ("HessTrace",)
    title: ClassVar[str] = "Hessian trace"
    together: ClassVar[bool] = False

    def draw(self, history: History, ax: Axes, axis: StepAxis) -> Artists:
        records = history[self.names[0]]
        trace, low, high = (field_line(records, name) for name in ("trace", "low", "high"))
        drawn = [smooth(axis, one) for one in (trace, low, high)]
        title(ax, self.heading(history), *readout(trace))
        axis.apply(ax)
        if not any_finite([trace]):
            return explain_empty(ax, [trace])
        artists = curve(ax, axis, trace, BLUE, "trace")
        # The interval of a trace that few samples dominate reaches up to many times the trace.
        ends = [within_reach(one.values, drawn[0].values) for one in drawn[1:]]
        fit(ax, [without_spikes(trace.values), *ends], log_if_far([trace.values]))
        artists |= beyond(ax, axis, [trace, *drawn[1:]])
        estimated = _has_width(low, high)
        if estimated:
            artists["band"] = band(ax, axis, low, high, BLUE)
        words = [*_methods(records), *(["band: error of the estimate"] if estimated else [])]
        if words:
            artists["subtitle"] = subtitle(ax, " · ".join(words))
        return artists | zero_line(ax) | missing(ax, axis, [trace])


def _has_width(low: Line, high: Line) -> bool:
    return bool((high.values > low.values).any())


def _methods(records: Series) -> list[str]:
    """The methods that computed the traces; each change with its first step."""
    found = {s: v for s, v in records.having("method").items() if isinstance(v, str)}
    pairs = pairwise([(0, ""), *found.items()])
    changes = [now for before, now in pairs if now[1] != before[1]]
    if not changes:
        return []
    later = [f"{method} from step {step_label(step)}" for step, method in changes[1:]]
    return [", ".join([changes[0][1], *later])]
