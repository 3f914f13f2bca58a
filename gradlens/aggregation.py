"""Statistics of recorded values over an epoch or a window, in constant memory."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch.distributed

from gradlens.history import Source
from gradlens.quantities.quantity import Quantity
from gradlens.undefined import Undefined
from gradlens.view import View

Statistic: TypeAlias = Literal["mean", "std", "min", "q1", "median", "q3", "max", "iqr"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_QUANTILES: Mapping[str, float] = {"q1": 0.25, "median": 0.5, "q3": 0.75}

LEVEL_SIZE = 512
"""Values that a sketch keeps of each level; up to so many it is exact."""


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean, sum of squared deviations, smallest and largest of some numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @property
    def std(self) -> float:
        """Standard deviation of the population; NaN of no numbers."""
        return math.sqrt(self.squares / self.count) if self.count else math.nan

    def add(self, value: float) -> RunningMoments:
        """With one number more (Welford, 1962)."""
        return self.merge(RunningMoments(1, value, 0.0, value, value))

    def merge(self, other: RunningMoments) -> RunningMoments:
        """With all numbers of another one (Chan et al., 1979)."""
        count = self.count + other.count
        if not count:
            return self
        share = other.count / count
        # Infinities of one sign have no difference.
        apart = 0.0 if other.mean == self.mean else other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + share * apart,
            self.squares + other.squares + self.count * share * apart * apart,
            min(self.low, other.low),
            max(self.high, other.high),
        )


class QuantileSketch:
    """Quantiles of a stream of numbers, exact up to ``LEVEL_SIZE`` of them.

    A level that is full is sorted, and every second of its numbers goes to the next level, where
    it stands for two; which ones alternates, so that nothing depends on chance (after Manku et
    al., 1998). With n numbers, the rank of a quantile is off by at most log₂(n/512)/512 of n:
    0.4 % of them at 2,000 and 2.2 % at a million.
    """

    def __init__(self) -> None:
        self._levels: list[list[float]] = [[]]
        self._odd: list[bool] = [False]

    def add(self, value: float) -> None:
        """Take in one number."""
        self._levels[0].append(value)
        self._make_room()

    def merge(self, other: QuantileSketch) -> None:
        """Take in all numbers of another one."""
        for level, values in enumerate(other._levels):
            self._up_to(level)
            self._levels[level] += values
        self._make_room()

    def quantile(self, share: float) -> float:
        """The quantile at a share of the ranks, interpolated; NaN of no numbers."""
        weighted = sorted((v, 2**level) for level, vs in enumerate(self._levels) for v in vs)
        if not weighted:
            return math.nan
        # Each number stands at the middle of the ranks that it stands for.
        ranks, below = [], 0
        for _, weight in weighted:
            ranks.append(below + (weight - 1) / 2)
            below += weight
        wanted = share * (below - 1)
        place = bisect_left(ranks, wanted)
        if place == 0 or place == len(ranks):
            return weighted[min(place, len(ranks) - 1)][0]
        (low, _), (high, _) = weighted[place - 1 : place + 1]
        part = (wanted - ranks[place - 1]) / (ranks[place] - ranks[place - 1])
        return low if low == high else low + part * (high - low)

    def _up_to(self, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append([])
            self._odd.append(False)

    def _make_room(self) -> None:
        level = 0
        while level < len(self._levels):
            values = self._levels[level]
            if len(values) > LEVEL_SIZE:
                self._up_to(level + 1)
                values.sort()
                # With an odd count, the largest one stays behind.
                rest = [values.pop()] if len(values) % 2 else []
                self._levels[level + 1] += values[self._odd[level] :: 2]
                self._levels[level] = rest
                self._odd[level] = not self._odd[level]
            level += 1


class Summary:
    """Statistics of a stream of numbers; those that are NaN are counted apart."""

    def __init__(self, statistics: Sequence[Statistic] = STATISTICS) -> None:
        self.statistics = tuple(statistics)
        self.moments = RunningMoments()
        self.undefined = 0
        self.reason = ""
        ordered = {*self.statistics} & {*_QUANTILES, "iqr"}
        self._sketch = QuantileSketch() if ordered else None

    def add(self, value: float) -> None:
        """Take in one number."""
        if math.isnan(value):
            self.undefined += 1
            self.reason = value.reason if isinstance(value, Undefined) else self.reason
            return
        self.moments = self.moments.add(value)
        if self._sketch is not None:
            self._sketch.add(value)

    def merge(self, other: Summary) -> None:
        """Take in all numbers of another one, such as another process's."""
        self.moments = self.moments.merge(other.moments)
        self.undefined += other.undefined
        self.reason = other.reason or self.reason
        if self._sketch is not None and other._sketch is not None:
            self._sketch.merge(other._sketch)

    def record(self) -> dict[str, float]:
        """The statistics by name, with the ``"count"`` of numbers that they are of."""
        if not self.moments.count:
            nothing = Undefined(self.reason or "there was no number")
            return {**dict.fromkeys(self.statistics, nothing), "count": 0}
        return {**{name: self._statistic(name) for name in self.statistics},
                "count": self.moments.count}  # fmt: skip

    def _statistic(self, name: Statistic) -> float:
        if name in _QUANTILES:
            return self._quantile(_QUANTILES[name])
        if name == "iqr":
            return self._quantile(0.75) - self._quantile(0.25)
        moments = self.moments
        return {"mean": moments.mean, "std": moments.std, "min": moments.low,
                "max": moments.high}[name]  # fmt: skip

    def _quantile(self, share: float) -> float:
        assert self._sketch is not None  # it is there if the statistics need it
        return self._sketch.quantile(share)


# Aggregates of quantities -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Aggregate:
    """A quantity of which statistics are recorded, ``over`` an epoch or so many of its values.

    Takes the quantity's place in the list that a cockpit gets. Epochs end with
    ``cockpit.tick_epoch()``. Every number of a record, wherever it is in it, becomes a dict of its
    ``statistics``; arrays and lists are left out. Single values are recorded too if ``raw``. The
    series is called ``name``, by default "OutputNorm (epoch)" or "OutputNorm (window)".
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
        if self.over != "epoch" and (not isinstance(self.over, int) or self.over < 1):
            raise ValueError(f"over={self.over!r}: use 'epoch', or a number of values from 1 on")
        unknown = [name for name in self.statistics if name not in STATISTICS]
        if unknown or isinstance(self.statistics, str):
            raise ValueError(
                f"statistics={self.statistics!r}: choose some of {', '.join(STATISTICS)}"
            )
        what = "epoch" if self.over == "epoch" else "window"
        object.__setattr__(self, "name", self.name or f"{self.quantity.name} ({what})")

    @property
    def source(self) -> Source:
        """What its series comes from."""
        view = self.quantity.view
        what = "epoch" if self.over == "epoch" else f"{self.over} values"
        return Source(
            "Aggregate", replace(view, title=f"{view.title or self.quantity.name} ({what})")
        )


Path: TypeAlias = tuple[str, ...]


@dataclass
class _Window:
    """Summaries of all numbers of some records."""

    statistics: Sequence[Statistic] = STATISTICS
    records: int = 0
    summaries: dict[Path, Summary] = field(default_factory=dict)

    def add(self, record: Any) -> None:
        self.records += 1
        for path, value in numbers(record):
            if path not in self.summaries:
                self.summaries[path] = Summary(self.statistics)
            self.summaries[path].add(value)

    def merge(self, other: _Window) -> None:
        self.records += other.records
        for path, summary in other.summaries.items():
            if path in self.summaries:
                self.summaries[path].merge(summary)
            else:
                self.summaries[path] = summary

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, summary in self.summaries.items():
            part = found
            for key in path[:-1]:
                part = part.setdefault(key, {})
            if path:
                part[path[-1]] = summary.record()
            else:
                found = summary.record()
        return found


def numbers(record: Any, path: Path = ()) -> Iterable[tuple[Path, float]]:
    """All numbers in a record, with the keys that lead to them."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from numbers(value, (*path, key))
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield path, record


class Aggregation:
    """Takes in what a cockpit records, and gives back what is to be recorded."""

    def __init__(self, quantities: Iterable[Any]) -> None:
        """``quantities`` may be any of these or ``Aggregate``s."""
        given = tuple(quantities)
        self._aggregates = {a.quantity.name: a for a in given if isinstance(a, Aggregate)}
        self.quantities = tuple(q.quantity if isinstance(q, Aggregate) else q for q in given)
        names = [*(a.name for a in self._aggregates.values()), *self._shown(self.quantities)]
        for aggregate in self._aggregates.values():
            if names.count(aggregate.name) > 1:
                raise ValueError(
                    f"two series are called {aggregate.name!r}: give one of them another name, as "
                    f"in Aggregate(..., name='{aggregate.name} 2')"
                )
        self._windows: dict[str, _Window] = {}
        self._pushed: dict[str, _Window] = {}
        self._step: int | None = None

    def sources(self, quantities: Iterable[Quantity]) -> dict[str, Source]:
        """What the series come from, those of the quantities themselves first."""
        own = {q.name: Source(type(q).__name__, q.view, q.of_samples) for q in quantities}
        shown = {name: own[name] for name in own if name in self._shown(quantities)}
        return shown | {a.name: a.source for a in self._aggregates.values()}

    def take_in(self, global_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """What to record of a step's values: those that aren't aggregated, and full windows."""
        self._step = global_step if self._step is None else max(self._step, global_step)
        kept = dict(values)
        for name in self._aggregates.keys() & values.keys():
            aggregate = self._aggregates[name]
            window = self._windows.setdefault(name, _Window(aggregate.statistics))
            window.add(values[name])
            if not aggregate.raw:
                del kept[name]
            if window.records == aggregate.over:
                kept[aggregate.name] = self._windows.pop(name).record()
        return kept

    def push(self, metrics: Mapping[str, float]) -> None:
        """Take in numbers that the training loop has found."""
        for name, value in metrics.items():
            self._pushed.setdefault(name, _Window()).add(float(value))

    def end_epoch(self, across_processes: bool = False) -> tuple[int, dict[str, Any]]:
        """The step to record an epoch under, and its record."""
        epochs = {n: w for n, w in self._windows.items() if self._aggregates[n].over == "epoch"}
        windows = {self._aggregates[name].name: window for name, window in epochs.items()}
        windows |= self._pushed
        if across_processes:
            windows = _gathered(windows)
        for name in epochs:
            del self._windows[name]
        self._pushed = {}
        return self._step or 0, {name: window.record() for name, window in windows.items()}

    def rest(self) -> tuple[int, dict[str, Any]]:
        """The record of an epoch, and of windows that aren't full."""
        step, values = self.end_epoch()
        for name, window in self._windows.items():
            values[self._aggregates[name].name] = window.record()
        self._windows = {}
        return step, values

    def _shown(self, quantities: Iterable[Any]) -> list[str]:
        kept = (q for q in quantities if isinstance(q, Quantity))
        return [
            q.name for q in kept if q.name not in self._aggregates or self._aggregates[q.name].raw
        ]


PUSHED = Source("Aggregate", View("", group="performance"))
"""What metrics come from that the training loop has pushed."""


def _gathered(windows: dict[str, _Window]) -> dict[str, _Window]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "there are no processes to gather from: call torch.distributed.init_process_group "
            "first, or tick_epoch() without across_processes"
        )
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, windows)
    total: dict[str, _Window] = {}
    for found in everyone:
        for name, window in found.items():
            if name in total:
                total[name].merge(window)
            else:
                total[name] = window
    return total
