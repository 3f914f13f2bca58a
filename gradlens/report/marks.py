"""Marks of findings in the figures of a page over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from gradlens.history.finding import Finding
from gradlens.instruments.style import ALARM, BLUE
from gradlens.plotting.findings import main_findings
from gradlens.report.axes import HEIGHT, paint

ALARMS, NOTICES = "alarms", "notices"

Columns = Mapping[str, Any]


def columns(findings: Sequence[Finding]) -> dict[str, Columns]:
    """The steps of the main alarms and notices, and the numbers of those at each step.

    What there is none of is left out.
    """
    found: dict[str, dict[int, list[str]]] = {ALARMS: {}, NOTICES: {}}
    for number, finding in enumerate(main_findings(findings), 1):
        steps = found[ALARMS if finding.is_alarm else NOTICES]
        steps.setdefault(finding.step, []).append(str(number))
    return {
        kind: {"step": [float(step) for step in steps], "number": [*map(" ".join, steps.values())]}
        for kind, steps in found.items()
        if steps
    }


def mark(one: figure, sources: Mapping[str, ColumnDataSource]) -> None:
    """Draw a line at each of these steps, and the numbers beside it."""
    for kind, source in sources.items():
        color, dash = (ALARM, "solid") if kind == ALARMS else (BLUE, "dashed")
        line = one.vspan("step", source=source, line_dash=dash, level="annotation", name=kind)
        paint(line, color)
        # The numbers of notices are below those of alarms.
        text = one.text(
            "step",
            (one.height or HEIGHT) - (8 if kind == ALARMS else 22),
            "number",
            source=source,
            x_offset=3,
            text_baseline="top",
            text_font_size="11px",
            text_font_style="bold",
            level="annotation",
            name=kind,
            y_range_name="pixels",
        )
        paint(text, color, "text_color")
