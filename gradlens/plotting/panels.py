"""Which panels a figure of a run has: the instruments that have something to draw."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from gradlens.history.coverage import few
from gradlens.history.history import History
from gradlens.history.records import LeftOutWarning
from gradlens.history.view import Group
from gradlens.instruments import BUILT_IN, GenericInstrument, Instrument
from gradlens.instruments.generic import drawable
from gradlens.spelling import near

EPOCHS = "epoch_count"
"""Series of ``Cockpit.log`` that is given as a number in the header, and has no panel."""

GROUPS: tuple[Group, ...] = (
    "performance",
    "step size",
    "gradients",
    "curvature",
    "noise",
    "layers",
    "other",
)
"""All groups, in the order in which a figure has them."""
assert set(GROUPS) == set(get_args(Group))


MOST = 48
"""Panels of a screen, at most: more can't be read on one page, and take longer than ten seconds."""


@dataclass(frozen=True)
class Panel:
    """An instrument for certain series, its group, and its size in cells."""

    instrument: Instrument
    group: Group
    width: float = 1.0
    height: float = 1.0


def main_panels(
    history: History, instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Panel, ...]:
    """Panels of the main screen, group by group.

    A series that none of the instruments draws has a ``GenericInstrument``. Of more than ``MOST``
    panels, the last ones are left out, with a ``LeftOutWarning``.
    """
    return limited(all_main_panels(history, instruments))


def all_main_panels(
    history: History, instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Panel, ...]:
    """Panels of the main screen, however many there are."""
    main = [one for one in instruments if not one.secondary]
    drawn = {name for one in main for name in one.series(history)} | {EPOCHS}
    others = [name for name in history.names if name not in drawn and drawable(history[name])]
    return _panels([*main, *(GenericInstrument((name,)) for name in others)], history)


def layer_panels(
    history: History, instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Panel, ...]:
    """Panels of the secondary screen: its instruments, and main panels of the group "layers".

    Of these, it leaves out those whose numbers have a map. There are at most ``MOST``, as on the
    main screen.
    """
    secondary = _panels([one for one in instruments if one.secondary], history)
    drawn = [panel.instrument for panel in secondary]
    maps = {name for one in drawn if one.by_layer for name in one.names}
    main = [
        panel
        for panel in filter(is_of_layers, all_main_panels(history, instruments))
        if not (panel.instrument.mapped and maps.issuperset(panel.instrument.names))
    ]
    return limited(_by_group([*secondary, *main]))


def named_panels(
    history: History, names: Sequence[str], instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Panel, ...]:
    """The panels of these names, which are titles, or else names of series.

    Of a title that several panels begin with, such as those of two quantities of one class, the
    first panel is meant.

    ``ValueError`` if there is none of a name.
    """
    secondary = [one for one in instruments if one.secondary]
    every = (*all_main_panels(history, instruments), *_panels(secondary, history))
    known: dict[str, Panel] = {}
    titles = [panel.instrument.heading(history) for panel in every]
    beginnings = [title.split(": ")[0] for title in titles]
    for names_of_panels in (titles, beginnings):
        for title, panel in zip(names_of_panels, every, strict=True):
            known.setdefault(title, panel)
    for panel in every:
        for series in panel.instrument.names:
            known.setdefault(series, panel)
    for name in names:
        if name not in known:
            raise ValueError(f"there is no panel {name!r}{near(name, titles)}")
    return tuple(known[name] for name in names)


def limited(panels: tuple[Panel, ...]) -> tuple[Panel, ...]:
    """The first ``MOST`` panels; a ``LeftOutWarning`` names what is left out."""
    if len(panels) > MOST:
        names = few([name for panel in panels[MOST:] for name in panel.instrument.names])
        text = f"a figure has at most {MOST} panels: those of {names} are left out"
        warnings.warn(text, LeftOutWarning, stacklevel=3)
    return panels[:MOST]


def is_of_layers(panel: Panel) -> bool:
    """Whether a main panel moves to the secondary screen if there is one."""
    return panel.group == "layers"


def _panels(instruments: Sequence[Instrument], history: History) -> tuple[Panel, ...]:
    found = [panel for one in _most_specific(instruments, history) for panel in one.panels(history)]
    return _by_group(Panel(one, one.group(history), *one.size(history)) for one in found)


def _by_group(panels: Iterable[Panel]) -> tuple[Panel, ...]:
    return tuple(sorted(panels, key=lambda panel: GROUPS.index(panel.group)))


def _most_specific(instruments: Sequence[Instrument], history: History) -> list[Instrument]:
    """The instruments, each without the series that another one draws by a more specific kind."""
    series = [(one, one.series(history)) for one in instruments]
    kinds: dict[str, set[str]] = {}
    for one, names in series:
        for name in names:
            kinds.setdefault(name, set()).add(one.kind(history, name))

    def is_kept(one: Instrument, name: str) -> bool:
        kind = one.kind(history, name)
        if not kind:  # drawn for another reason than its kind
            return True
        return kind == next(k for k in history.sources[name].kinds if k in kinds[name])

    kept = [(one, tuple(n for n in names if is_kept(one, n))) for one, names in series]
    return [replace(one, names=names) for one, names in kept if names]


def nothing(history: History) -> str:
    """Why there is nothing to draw, and what to do."""
    if not history.names:
        return "the history is empty: no quantity was tracked"
    if not history.steps:
        names = ", ".join(history.names)
        return (
            "the history has no steps: backward must run inside the cockpit's context, as in "
            "`with cockpit(step, loss=loss):`; also check discard, the cockpit's budget, and the "
            f"track_schedule of {names}"
        )
    return f"none of the recorded series can be drawn: {', '.join(history.names)}"
