"""Trace of the Hessian."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from gradlens.history.history import History
from gradlens.history.lines import field_line
from gradlens.history.series import Series
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.panel import Curve, Lines
from gradlens.instruments.scales import log_if_far, step_label


class HessTraceInstrument(Instrument):
    """Trace of the Hessian with the band of its estimation error, unless it is exact."""

    kinds: ClassVar[tuple[str, ...]] = ("HessTrace",)
    title: ClassVar[str] = "Hessian trace"
    together: ClassVar[bool] = False

    def content(self, history: History) -> Lines:
        records = history[self.names[0]]
        trace, low, high = (field_line(records, name) for name in ("trace", "low", "high"))
        estimated = bool((high.values > low.values).any())
        words = [*_methods(records), *(["band: error of the estimate"] if estimated else [])]
        return Lines(
            (Curve("trace", trace, spreads=((low, high),) if estimated else ()),),
            scale=log_if_far([trace.values]),
            words=" · ".join(words),
            spiky=True,
        )


def _methods(records: Series) -> list[str]:
    """The methods that computed the traces; each change with its first step."""
    found = {s: v for s, v in records.having("method").items() if isinstance(v, str)}
    pairs = pairwise([(0, ""), *found.items()])
    changes = [now for before, now in pairs if now[1] != before[1]]
    if not changes:
        return []
    later = [f"{method} from step {step_label(step)}" for step, method in changes[1:]]
    return [", ".join([changes[0][1], *later])]
