"""Statistics of quantities and of pushed metrics, such as those of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from gradlens.history.json_lines import encoded, value_of
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.numerics.running_statistics import STATISTICS, RunningStatistics, Statistic
from gradlens.quantities.quantity import Quantity, class_names
from gradlens.stateful import State


@dataclass(frozen=True, eq=False)
class Aggregate:
    """A quantity of which statistics are recorded, ``over`` an epoch or a number of its values.

    It takes the quantity's place in the list that a cockpit is given. ``cockpit.tick_epoch()`` ends
    an epoch. In the record, each number of the quantity's value is replaced by a dict of its
    ``statistics``, with the ``"count"`` of the numbers, and of those that are NaN, if any, as
    ``"undefined"``. Arrays, lists and indices, such as ``"least_unit"``, are left out. With
    ``raw``, single values are recorded as well. The series is called ``name``, by default
    "OutputNorm (epoch)" or "OutputNorm (window)".

    ``TypeError`` if ``quantity`` isn't one; ``ValueError`` if ``over`` or ``statistics`` aren't
    among those above.
    """

    quantity: Quantity
    over: Literal["epoch"] | int = "epoch"
    statistics: Sequence[Statistic] = STATISTICS
    raw: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.quantity, Quantity):
            raise TypeError(
                f"{self.quantity!r} is not a quantity: pass one, as in Aggregate(Loss())"
            )
        if self.over != "epoch" and (type(self.over) is not int or self.over < 1):
            raise ValueError(f"over={self.over!r}: use 'epoch', or a number of values from 1 on")
        listed = isinstance(self.statistics, Iterable) and not isinstance(self.statistics, str)
        chosen = tuple(self.statistics) if listed else ()
        if not chosen or any(name not in STATISTICS for name in chosen):
            raise ValueError(
                f"statistics={self.statistics!r}: choose some of {', '.join(STATISTICS)}"
            )
        object.__setattr__(self, "statistics", chosen)
        what = "epoch" if self.over == "epoch" else "window"
        object.__setattr__(self, "name", self.name or f"{self.quantity.name} ({what})")

    @property
    def source(self) -> Source:
        """The source of its series, with the quantity's view."""
        view = self.quantity.view
        what = "epoch" if self.over == "epoch" else f"{self.over} values"
        return Source(
            ("Aggregate",), replace(view, title=f"{view.title or self.quantity.name} ({what})")
        )


Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a number in a record of nested dicts."""

INDICES = {"least_unit"}
"""Keys of indices, which have no mean."""

NO_NUMBER = "there was no number in its values: of lists and arrays, there are no statistics"


@dataclass
class Window:
    """Statistics of each number of some records, of which ``records`` is the count."""

    statistics: Sequence[Statistic] = STATISTICS
    records: int = 0
    by_path: dict[Path, RunningStatistics] = field(default_factory=dict)

    def add(self, record: Any) -> None:
        """Add a record."""
        self.records += 1
        found = dict(numbers(record)) or {(): Undefined(NO_NUMBER)}
        for path, value in found.items():
            self.by_path.setdefault(path, RunningStatistics(self.statistics)).add(value)

    def record(self) -> dict[str, Any]:
        """A record of the same structure, with statistics in place of the numbers."""
        found: dict[str, Any] = {}
        for path, statistics in _separated(self.by_path).items():
            part, leaf = found, statistics.record()
            for key in path[:-1]:
                part = part.setdefault(key, {})
            if path:
                part[path[-1]] = leaf
            else:
                found = leaf
        return found

    def state_dict(self) -> State:
        """The statistics so far."""
        return {
            "statistics": list(self.statistics),
            "records": self.records,
            "by_path": {path: found.state_dict() for path, found in self.by_path.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Window:
        """The window that a state is of."""
        window = cls(state["statistics"], state["records"])
        for path, found in state["by_path"].items():
            window.by_path[path] = RunningStatistics(window.statistics)
            window.by_path[path].load_state_dict(found)
        return window


def numbers(record: Any, path: Path = ()) -> Iterable[tuple[Path, float]]:
    """All numbers in a record that have a mean, with their paths."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            if key not in INDICES:
                yield from numbers(value, (*path, key))
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield path, record


def _separated(by_path: Mapping[Path, RunningStatistics]) -> dict[Path, RunningStatistics]:
    """The statistics by paths of which none is the beginning of another.

    A value may be a number in one record and a dict in another. The number's statistics are then
    placed into the dict under the key "", or left out if all were NaN, such as those of a layer
    whose batch was empty.
    """
    inner = {path[:length] for path in by_path for length in range(len(path))}
    return {
        (*path, "") if path in inner else path: statistics
        for path, statistics in by_path.items()
        if path not in inner or statistics.numbers
    }


class Aggregation:
    """Collects the values of a cockpit's aggregates and pushed metrics until they are recorded."""

    def __init__(self, quantities: Iterable[Any]) -> None:
        """``quantities`` and ``Aggregate``s of them; ``ValueError`` if two series have one name."""
        given = tuple(quantities)
        self._aggregates = {a.quantity.name: a for a in given if isinstance(a, Aggregate)}
        self._over = {each.name: each.over for each in self._aggregates.values()}
        self.has_aggregates = bool(self._over)
        self.quantities: tuple[Quantity, ...] = tuple(
            q.quantity if isinstance(q, Aggregate) else q for q in given
        )
        self.sources = {
            q.name: Source(class_names(q), q.view, q.of_samples)
            for q in self.quantities
            if q.name not in self._aggregates or self._aggregates[q.name].raw
        }
        """Those of all series by name, those of quantities themselves first."""
        for aggregate in self._aggregates.values():
            if aggregate.name in self.sources:
                raise ValueError(
                    f"two series are called {aggregate.name!r}: give one of them another name, as "
                    f"in Aggregate(..., name='{aggregate.name} 2')"
                )
            self.sources[aggregate.name] = aggregate.source
        self._windows: dict[str, Window] = {}
        """What isn't recorded yet of each series of aggregates and pushed metrics."""
        self._recorded: dict[str, Window] = {}
        """What was recorded at step ``_at``, to which further values of that step are added."""
        self._at = 0

    def take_in(self, global_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a step: values that aren't aggregated, and statistics of full windows."""
        kept = dict(values)
        for name in self._aggregates.keys() & values.keys():
            aggregate = self._aggregates[name]
            value = value_of(encoded(values[name]))
            self._add(global_step, aggregate.name, value, aggregate.statistics)
            if not aggregate.raw:
                del kept[name]
            if self._windows[aggregate.name].records == aggregate.over:
                kept |= self._records(global_step, [aggregate.name])
        return kept

    def push(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Add values of the training loop's metrics."""
        for name, value in metrics.items():
            self._add(global_step, name, value, STATISTICS)

    def _add(self, step: int, name: str, value: Any, statistics: Sequence[Statistic]) -> None:
        self._windows.setdefault(name, Window(statistics)).add(value)
        if self.has_recorded(step, name):
            self._recorded[name].add(value)

    def has_pushed(self, name: str) -> bool:
        """Whether a metric of this name has values in the present epoch."""
        return name in self._windows and name not in self._over

    def has_recorded(self, global_step: int, name: str) -> bool:
        """Whether a series has a record at a step, to which further values are added."""
        return global_step == self._at and name in self._recorded

    def end_epoch(self, global_step: int, and_windows: bool = False) -> dict[str, Any]:
        """The record of an epoch at its last step, ``and_windows`` that aren't full."""
        of_epoch = (n for n in self._windows if self._over.get(n, "epoch") == "epoch")
        return self._records(global_step, [*(self._windows if and_windows else of_epoch)])

    def state_dict(self) -> State:
        """The windows that aren't full, and the statistics under the last step."""
        return {
            "at": self._at,
            "aggregates": [*self._over],
            "windows": {name: window.state_dict() for name, window in self._windows.items()},
            "recorded": {name: window.state_dict() for name, window in self._recorded.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; windows of what isn't aggregated any more are left out."""
        self._at = state["at"]
        gone = {*state["aggregates"]} - self._over.keys()
        self._windows, self._recorded = (
            {name: Window.from_state(one) for name, one in state[part].items() if name not in gone}
            for part in ("windows", "recorded")
        )

    def _records(self, step: int, names: Iterable[str]) -> dict[str, Any]:
        """Records of windows, with what the same series have recorded at the same step."""
        if step != self._at:
            self._recorded, self._at = {}, step
        for name in names:
            window = self._windows.pop(name)
            self._recorded.setdefault(name, window)
        return {name: self._recorded[name].record() for name in names}
