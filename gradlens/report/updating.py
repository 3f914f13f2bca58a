"""Brings the figures of a card up to date while its run is being written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bokeh.plotting import figure

from gradlens.instruments.panel import Lines, Map, Picture, Shapes
from gradlens.instruments.scales import StepAxis
from gradlens.report.columns import Columns, columns
from gradlens.report.content import Card
from gradlens.report.figures import Drawn, range_of_colours
from gradlens.report.value_axis import limits


def update(drawn: Drawn, card: Card, axis: StepAxis) -> None:
    """Bring a card's sources and ranges up to date.

    What was added at the end alone is streamed.
    """
    if not drawn.figures:
        return
    found = columns(card, axis)
    for name, source in drawn.sources.items():
        new: dict[str, Any] = dict(found[name])
        old: Any = source.data
        count = len(next(iter(old.values())))
        if "map" not in name and _begins_with(new, old):
            added = {key: values[count:] for key, values in new.items()}
            if len(next(iter(added.values()))):
                source.stream(added)
        else:
            source.data = new
    for place, gaps in enumerate(card.gaps):
        drawn.sources[f"gaps {place}"].tags = [list(gaps.reasons)]
    _update_ranges(drawn.figures, card)


def _update_ranges(figures: tuple[figure, ...], card: Card) -> None:
    """Set the ranges that the page doesn't fit by itself."""
    shown = card.panel.content
    if isinstance(shown, Map):
        _set(figures[1].y_range, range_of_colours(shown))
    elif isinstance(shown, Lines) and not figures[0].tags[0]["fits"]:
        _set(figures[0].y_range, limits(shown))
    elif isinstance(shown, (Picture, Shapes)):
        _set(figures[0].y_range, shown.up.limits)
        if isinstance(shown, Shapes) or shown.steps is None:
            _set(figures[0].x_range, shown.across.limits)


def _set(one: Any, found: tuple[float, float]) -> None:
    one.update(start=found[0], end=found[1])


def _begins_with(new: Columns, old: Mapping[str, Any]) -> bool:
    return all(
        key in old
        and len(old[key]) <= len(values)
        and old[key].dtype == values.dtype
        and old[key].tobytes() == values[: len(old[key])].tobytes()
        for key, values in new.items()
    )
