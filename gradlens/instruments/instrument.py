"""What every instrument is: one panel of a figure, drawn from a history alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, final, get_args

from matplotlib.axes import Axes

from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.view import Group, View
from gradlens.instruments.axes import Drawing, plot_panels
from gradlens.instruments.panel import Content, Lines, Panel
from gradlens.instruments.scales import StepAxis, value_scale
from gradlens.instruments.series import layout

Normalisation = Literal["", "row", "kind"]


@dataclass(frozen=True)
class Options:
    """What the panels of a figure show in another way than by default.

    With ``single_lines``, each of many parameters has a line of its own. ``normalise`` says by
    whose medians the rows of a map are divided.
    """

    single_lines: bool = False
    normalise: Normalisation = ""

    def __post_init__(self) -> None:
        known = get_args(Normalisation)
        if self.normalise not in known:
            raise ValueError(f"normalise={self.normalise!r}: use one of {', '.join(known[1:])}")


@dataclass(frozen=True)
class Instrument(ABC):
    """One panel: which series it draws, and how.

    ``names`` are the series to draw. Without them, these are the series of quantities whose class
    is one of ``kinds`` or is derived from one of them, and the series that ``Cockpit.log`` has
    recorded under one of the names ``logged``. A panel is placed in the group of its quantity's
    view, and in the group ``home`` if it has only logged series. ``title`` and ``label``, that of
    the value axis, go before those of the view. ``aspect`` says what is drawn of records that have
    several numbers.

    All series share one panel if ``together``, and otherwise each has a panel of its own.
    ``secondary`` instruments are on the secondary screen only; numbers of ``mapped`` ones are there
    as a map of layers × steps instead. With ``part``, only series of dicts that have this entry are
    drawn. ``by_layer`` instruments draw series of every kind that hold numbers by parameter or
    layer.
    """

    names: tuple[str, ...] = ()
    options: Options = field(default=Options(), kw_only=True)

    kinds: ClassVar[tuple[str, ...]] = ()
    logged: ClassVar[tuple[str, ...]] = ()
    home: ClassVar[Group] = "other"
    title: ClassVar[str] = ""
    aspect: ClassVar[str] = ""
    label: ClassVar[str] = ""
    together: ClassVar[bool] = False
    secondary: ClassVar[bool] = False
    mapped: ClassVar[bool] = False
    part: ClassVar[str] = ""
    by_layer: ClassVar[bool] = False

    @abstractmethod
    def content(self, history: History) -> Content:
        """What the panel of ``self.names`` shows; all of these have records, which may be NaN."""

    @final
    def series(self, history: History) -> tuple[str, ...]:
        """Names of the series with records that this instrument draws."""
        of_kinds = (name for kind in self.kinds for name in history.of_kind(kind))
        # A quantity may have taken the name of what is logged.
        logged = (name for name in self.logged if name not in history.sources)
        by_kind = history.names if self.by_layer else tuple(dict.fromkeys((*of_kinds, *logged)))
        known = (n for n in self.names or by_kind if n in history)
        found = [n for n in known if history[n]]
        if self.by_layer:
            return tuple(n for n in found if layout(history[n], history) is not None)
        part = self.part
        return tuple(n for n in found if not part or any(history[n].having(part).values()))

    @final
    def kind(self, history: History, name: str) -> str:
        """The most specific kind of a series that is one of ``kinds``; empty if none is."""
        source = history.sources.get(name, Source())
        return next((kind for kind in source.kinds if kind in self.kinds), "")

    @final
    def view(self, history: History) -> View:
        """How the quantity of the first series is to be shown; an empty view if there is none."""
        return history.sources.get(self.names[0], Source()).view

    @final
    def parts(self, history: History) -> tuple[Instrument, ...]:
        """This instrument once for each panel that it needs; empty without data."""
        names = self.series(history)
        if self.together:
            return (replace(self, names=names),) if names else ()
        return tuple(replace(self, names=(name,)) for name in names)

    @final
    def panels(self, history: History) -> tuple[Panel, ...]:
        """The panels of all series, as data; empty without data."""
        return tuple(one.panel(history) for one in self.parts(history))

    @final
    def panel(self, history: History) -> Panel:
        """The panel of ``names``, as data."""
        shown = self.content(history) if self.series(history) else Lines()
        view = self.view(history)
        if isinstance(shown, Lines):
            wish = view.yscale  # a linear one stays so, however wide the values are
            values = [one.values for one in shown.lines]
            scale = shown.scale or ("linear" if wish == "linear" else value_scale(wish, values))
            single = shown.single_lines or self.options.single_lines
            shown = replace(shown, scale=scale, single_lines=single)
        own = self._own_title(history, self.names[0])
        label = self.label or view.label or own
        return Panel(self.heading(history), self.group(history), self.names, shown, label)

    @final
    def group(self, history: History) -> Group:
        """The group of the first series that comes from a quantity, and otherwise ``home``."""
        sources = (history.sources[name] for name in self.names if name in history.sources)
        return next((source.view.group for source in sources), self.home)

    @final
    def plot(self, history: History, ax: Axes | None = None, log_step: bool = False) -> Drawing:
        """Draw on ``ax``, or on a new figure that needs no window.

        ``log_step`` makes the step axis logarithmic. Nothing but the axis changes.
        """
        name = self.title or "".join(self.kinds[:1])
        panels = self.panels(history) or (Panel(name, self.home, (), Lines()),)
        return plot_panels(panels, step_axis(history, log_step), ax)

    @final
    def heading(self, history: History) -> str:
        """The title of the panel, with the name of its series if several have the same title."""
        name = self.names[0]
        source = history.sources.get(name)
        own = self._own_title(history, name)
        if self.together or source is None:
            return own
        kind = self.kind(history, name) or source.kind
        alike = [n for n in history.of_kind(kind) if self._own_title(history, n) == own]
        if name in (own, kind) or len(alike) == 1:
            return own
        # A bracket that both end with, such as "(evaluation)", is shown once.
        bracket = own[own.rfind(" (") :] if own.endswith(")") else ""
        return f"{own}: {name.removesuffix(bracket)}"

    def title_of_logged(self, name: str) -> str:
        """The title of one of the series ``logged`` where it has a panel of its own."""
        return self.title

    def _own_title(self, history: History, name: str) -> str:
        source = history.sources.get(name)
        own = self.title or (source.view.title if source else "") or name
        return f"{own}: {self.aspect}" if self.aspect else own


def step_axis(history: History, log: bool = False) -> StepAxis:
    """The steps of a history, which all its panels share."""
    steps = history.steps
    return StepAxis(steps[0], steps[-1], log) if steps else StepAxis(0, 1, log)
