"""A screen of a run: which panels, which step axis, which title."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, get_args

from matplotlib.figure import Figure

from gradlens.history.coverage import few
from gradlens.history.finding import Finding
from gradlens.history.history import History
from gradlens.history.lines import line
from gradlens.history.records import LeftOutWarning, Source
from gradlens.history.view import Group
from gradlens.instruments import BUILT_IN, GenericInstrument, Instrument, Options
from gradlens.instruments.instrument import step_axis
from gradlens.instruments.layers import drawable
from gradlens.instruments.panel import Panel
from gradlens.instruments.scales import StepAxis, number_label
from gradlens.plotting.layout import WIDEST, FigureSize, Look, columns
from gradlens.plotting.rendering import Words, cannot_be_drawn, draw, draw_empty
from gradlens.plotting.summary import findings_of
from gradlens.spelling import near

EPOCHS = "epoch_count"
"""Series of ``Cockpit.log`` that is given as a number in the header, and has no panel."""

GROUPS: tuple[Group, ...] = get_args(Group)
"""All groups, in the order in which a figure has them."""


Shown = TypeVar("Shown", Panel, Instrument)

MOST = 48
"""Panels of a screen, at most: more can't be read on one page, and take longer than ten seconds."""


@dataclass(frozen=True)
class Screen:
    """All panels of a run, or with ``layers`` those of single layers and parameters.

    With ``findings``, what is wrong with the run is marked in them. ``names`` chooses single panels
    by title; ``size``, ``look`` and ``options`` are those of ``CockpitPlotter.plot``.
    """

    title: str
    layers: bool = False
    log_steps: bool = False
    instruments: tuple[Instrument, ...] = BUILT_IN
    findings: bool = True
    names: tuple[str, ...] = ()
    size: FigureSize = None
    look: Look = "screen"
    options: Options = field(default=Options())

    def __post_init__(self) -> None:
        given: object = self.size
        if isinstance(given, str):
            raise TypeError(
                f"size={given!r}: pass inches, as in size=3.3, or size=(6.75, 2.5) with a height"
            )
        if self.look not in get_args(Look):
            raise ValueError(f"there is no style {self.look!r}{near(self.look, get_args(Look))}")

    def panels(self, history: History) -> tuple[Panel, ...]:
        """The panels to draw, of which there may be none."""
        return panels(self.parts(history), history)

    def parts(self, history: History) -> tuple[Instrument, ...]:
        """The instruments to draw, once for each panel."""
        instruments = [replace(one, options=self.options) for one in self.instruments]
        if not self.names:
            return limited((layer_parts if self.layers else main_parts)(history, instruments))
        secondary = _parts([one for one in instruments if one.secondary], history)
        every = (*main_parts(history, instruments), *secondary)
        return limited(named(self.names, [(one.heading(history), one.names, one) for one in every]))

    def lacks(self, history: History) -> str:
        """Why there is nothing to draw; empty if there is something."""
        if self.parts(history):
            return ""
        if self.layers and main_parts(history, self.instruments):
            return (
                "there is nothing by layer or parameter: track GradNorm, GradCovariance, "
                "NormTest(by='layer'), or GradHist1d(keep_individual=True)"
            )
        return nothing(history)

    def marked(self, history: History) -> tuple[Finding, ...]:
        """What is wrong with a run, if that is to be marked."""
        return findings_of(history) if self.findings else ()

    def draw(
        self,
        history: History,
        figure: Figure,
        panels: tuple[Panel, ...] | None = None,
        resize: bool = True,
        findings: Sequence[Finding] | None = None,
        axis: StepAxis | None = None,
    ) -> None:
        """Draw on a figure, which is emptied first.

        ``panels``, ``findings`` and the ``axis`` are those of ``history``, or of a longer one.
        Without ``resize`` the figure keeps its size if everything can be read at that.
        """
        shown = self.panels(history) if panels is None else panels
        if not shown:
            draw_empty(figure, self.title, self.lacks(history), resize, self.look)
            return
        widest = min(WIDEST if self.layers else math.inf, columns(self.size))
        found = self.marked(history) if findings is None else findings
        draw(
            figure, shown, words_of(history, self.title),
            axis or step_axis(history, self.log_steps), resize, widest, found, self.look, self.size,
            history.steps[-1],
        )  # fmt: skip


def words_of(history: History, title: str) -> Words:
    """The words of a figure of a run: the most important facts first."""
    steps = history.steps
    parts = ["file is cut off"] if history.truncated else []
    parts += [f"last step {steps[-1]:,}"] if steps else []
    logged = [("last loss", name) for name in history.of_kind("Loss")[:1]]
    for what, name in (*logged, *([("epoch", EPOCHS)] if EPOCHS in history else [])):
        one = line(history[name])
        parts += [f"{what} {number_label(one.latest)}"] if one.steps.size else []
    facts = (*parts, f"{len(steps):,} recorded step{'' if len(steps) == 1 else 's'}")
    return Words(title, facts, tuple(history.notes))


# Which instruments draw which series --------------------------------------------------------


def panels(parts: Iterable[Instrument], history: History) -> tuple[Panel, ...]:
    """The panels of instruments that have been told their series.

    That of an instrument which raises has a message, and there is a ``LeftOutWarning``.
    """
    found = []
    for one in parts:
        try:
            panel = one.panel(history)
        except Exception as error:
            shown = cannot_be_drawn(one.names, error)
            panel = Panel(one.heading(history), one.group(history), one.names, shown)
        found.append(panel)
    return tuple(found)


def main_parts(
    history: History, instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Instrument, ...]:
    """The instruments of the main screen, once for each panel, group by group.

    A series that none of the instruments draws has a ``GenericInstrument``.
    """
    main = [one for one in instruments if not one.secondary]
    drawn = {name for one in main for name in one.series(history)} | {EPOCHS}
    others = [name for name in history.names if name not in drawn and drawable(history[name])]
    return _parts([*main, *(GenericInstrument((name,)) for name in others)], history)


def layer_parts(
    history: History, instruments: Sequence[Instrument] = BUILT_IN
) -> tuple[Instrument, ...]:
    """The instruments of the secondary screen, once for each panel.

    Of main ones of the group "layers", it leaves out those whose numbers have a map.
    """
    secondary = _parts([one for one in instruments if one.secondary], history)
    maps = {name for one in secondary if one.by_layer for name in one.names}
    main = [
        one
        for one in main_parts(history, instruments)
        if one.group(history) == "layers" and not (one.mapped and maps.issuperset(one.names))
    ]
    return _by_group([*secondary, *main], history)


Named = TypeVar("Named")


def named(
    names: Sequence[str], known: Sequence[tuple[str, Sequence[str], Named]]
) -> tuple[Named, ...]:
    """What has these names, which are titles, or else names of series.

    Of a title that several begin with, such as those of two quantities of one class, the first is
    meant. ``ValueError`` if there is none of a name.
    """
    titles = [title for title, _, _ in known]
    called = [
        *((title, one) for title, _, one in known),
        *((title.split(": ")[0], one) for title, _, one in known),
        *((name, one) for _, series, one in known for name in series),
    ]
    found = dict(reversed(called))
    for name in names:
        if name not in found:
            raise ValueError(f"there is no panel {name!r}{near(name, titles)}")
    return tuple(found[name] for name in names)


def limited(found: tuple[Shown, ...]) -> tuple[Shown, ...]:
    """The first ``MOST`` panels; a ``LeftOutWarning`` names what is left out."""
    if len(found) > MOST:
        names = few([name for one in found[MOST:] for name in one.names])
        text = f"a figure has at most {MOST} panels: those of {names} are left out"
        warnings.warn(text, LeftOutWarning, stacklevel=3)
    return found[:MOST]


def _parts(instruments: Sequence[Instrument], history: History) -> tuple[Instrument, ...]:
    """The instruments once for each panel, without what another draws by a more specific kind."""
    kinds: dict[str, set[str]] = {}
    for one in instruments:
        for name in one.series(history):
            kinds.setdefault(name, set()).add(one.kind(history, name))
    parts: list[Instrument] = []
    for one in instruments:
        kept = []
        for name in one.series(history):
            kind, known = one.kind(history, name), history.sources.get(name, Source()).kinds
            # Without a kind, it is drawn for another reason.
            if not kind or kind == next(each for each in known if each in kinds[name]):
                kept.append(name)
        parts += replace(one, names=tuple(kept)).parts(history) if kept else ()
    return _by_group(parts, history)


def _by_group(parts: Iterable[Instrument], history: History) -> tuple[Instrument, ...]:
    return tuple(sorted(parts, key=lambda one: GROUPS.index(one.group(history))))


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
