"""What all figures of a page have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import (
    BasicTicker,
    ColumnDataSource,
    CustomJS,
    CustomJSTickFormatter,
    CustomJSTransform,
    FixedTicker,
    LinearColorMapper,
    Range1d,
)
from bokeh.models.annotations import Span

from gradlens.instruments.scales import StepAxis
from gradlens.report.palette import LIGHT, OF_THE_GROUND, SIGNED, SIZES, palette

MAPS = {"sizes": SIZES, "signed": SIGNED} | {n: light for n, (light, _) in OF_THE_GROUND.items()}


@dataclass(frozen=True)
class Shared:
    """The range of steps, marks, the line at the pointer, what events do, ticks, and colours."""

    x_range: Range1d
    marks: Mapping[str, ColumnDataSource] = field(default_factory=dict)
    span: Span = field(
        default_factory=lambda: Span(
            dimension="height", line_color=LIGHT["muted"], line_width=1, line_alpha=0.7
        )
    )
    hover: CustomJS = field(
        default_factory=lambda: CustomJS(code="gradlens.hover(cb_obj.x, cb_obj.y, cb_obj.origin)")
    )
    leave: CustomJS = field(default_factory=lambda: CustomJS(code="gradlens.leave()"))
    reset: CustomJS = field(default_factory=lambda: CustomJS(code="gradlens.reset()"))
    select: CustomJS = field(
        default_factory=lambda: CustomJS(code="gradlens.select(cb_obj.y, cb_obj.origin)")
    )
    steps: CustomJSTickFormatter = field(
        default_factory=lambda: CustomJSTickFormatter(code="return gradlens.stepLabel(tick)")
    )
    ticks: BasicTicker = field(
        default_factory=lambda: BasicTicker(desired_num_ticks=5, mantissas=[1, 2, 5])
    )
    log_ticks: FixedTicker = field(
        default_factory=lambda: FixedTicker(
            ticks=[0.0, *(math.log10(1 + 10**n) for n in range(16))]
        )
    )
    places: CustomJSTransform = field(
        default_factory=lambda: CustomJSTransform(
            func="return Math.log10(1 + Math.max(x, 0))",
            v_func="return Float64Array.from(xs, (x) => Math.log10(1 + Math.max(x, 0)))",
        )
    )
    mappers: Mapping[str, LinearColorMapper] = field(
        default_factory=lambda: {
            name: LinearColorMapper(palette=palette(colors), low=-0.5, high=255.5)
            for name, colors in MAPS.items()
        }
    )


def shared(axis: StepAxis, marks: Mapping[str, Mapping[str, Any]]) -> Shared:
    """For figures over the steps of an axis, with the columns of marks by their kind."""
    sources = {kind: ColumnDataSource(dict(columns)) for kind, columns in marks.items()}
    return Shared(value_range(*axis.ends), sources)


def value_range(start: float, end: float) -> Range1d:
    """A range of an axis."""
    return Range1d(start=start, end=end)
