"""Statistics of recorded values over an epoch or a window, in constant memory."""

from __future__ import annotations

import math
import reprlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch.distributed
from torch import Tensor

from gradlens.cockpit.plain import to_plain
from gradlens.history.history import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.quantity import Quantity, kinds

Statistic: TypeAlias = Literal["mean", "std", "min", "q1", "median", "q3", "max", "iqr"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)
_QUANTILES: Mapping[str, float] = {"q1": 0.25, "median": 0.5, "q3": 0.75}

INDICES: Mapping[str, str] = {"least_unit": "least"}
"""Keys of indices, which have no mean, and the key of the number whose least they are at."""

NO_NUMBER = "there was no number in its values: of lists and arrays, there are no statistics"
INFINITE = "there are infinities among the numbers"
TOO_LARGE = "the numbers, or their squares, are too large to be added up"

LEVEL_SIZE = 512
"""Values that a sketch keeps of each level; up to so many it is exact."""


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean, sum of squared deviations, smallest and largest of some numbers.

    With infinities among them, deviations are NaN, and the mean is the infinity, or NaN of both.
    """

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
        low, high = min(self.low, other.low), max(self.high, other.high)
        if math.isinf(low) or math.isinf(high):
            return RunningMoments(count, low + high, math.nan, low, high)
        share = other.count / count
        apart = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + share * apart,
            self.squares + other.squares + self.count * share * apart * apart,
            low,
            high,
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
        return _between(low, high, part)

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


def _between(low: float, high: float, part: float) -> float:
    """Linear interpolation; next to an infinity it is infinite, between two of them NaN."""
    if low == high or part == 1:
        return high
    if math.isinf(low) or math.isinf(high):
        return low + high
    return low * (1 - part) + high * part if low < 0 < high else low + part * (high - low)


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
        """The statistics by name, with the ``"count"`` of numbers that they are of.

        ``"undefined"`` is how many there were besides that are NaN, if any.
        """
        counts = {"count": self.moments.count}
        if self.undefined:
            counts["undefined"] = self.undefined
        if not self.moments.count:
            why = "all numbers were NaN" if self.undefined else "there was no number"
            nothing = Undefined(self.reason or why)
            return {**dict.fromkeys(self.statistics, nothing), **counts}
        return {**{name: self._known(self._statistic(name)) for name in self.statistics}, **counts}

    def _known(self, value: float) -> float:
        """The value, or why it is none."""
        infinite = math.isinf(self.moments.low) or math.isinf(self.moments.high)
        if math.isnan(value):
            return Undefined(INFINITE if infinite else TOO_LARGE)
        return Undefined(TOO_LARGE) if math.isinf(value) and not infinite else value

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
    ``statistics``, with the ``"count"`` of numbers that they are of, and of NaN, if any, as
    ``"undefined"``. Of an index, such as ``"least_unit"``, the one at the least is kept, where
    ``"min"`` is among the statistics. Arrays and lists are left out. Single values are recorded
    too if ``raw``. The series is called ``name``, by default "OutputNorm (epoch)" or
    "OutputNorm (window)".
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
        """What its series comes from."""
        view = self.quantity.view
        what = "epoch" if self.over == "epoch" else f"{self.over} values"
        return Source(
            ("Aggregate",), replace(view, title=f"{view.title or self.quantity.name} ({what})")
        )


Path: TypeAlias = tuple[str, ...]


@dataclass
class _Window:
    """Summaries of all numbers of some records, and indices of the least."""

    statistics: Sequence[Statistic] = STATISTICS
    records: int = 0
    summaries: dict[Path, Summary] = field(default_factory=dict)
    least: dict[Path, tuple[float, float]] = field(default_factory=dict)

    def add(self, record: Any) -> None:
        self.records += 1
        found = dict(numbers(record)) or {(): Undefined(NO_NUMBER)}
        for path, value in found.items():
            of = _of_index(path)
            if of is None:
                self.summaries.setdefault(path, Summary(self.statistics)).add(value)
            elif of in found:
                self._keep_least(path, (found[of], value))

    def merge(self, other: _Window) -> None:
        self.records += other.records
        for path, summary in other.summaries.items():
            self.summaries.setdefault(path, Summary(self.statistics)).merge(summary)
        for path, least in other.least.items():
            self._keep_least(path, least)

    def record(self) -> dict[str, Any]:
        leaves: dict[Path, Any] = {p: s.record() for p, s in _apart(self.summaries).items()}
        if "min" in self.statistics:
            leaves |= {path: index for path, (_, index) in self.least.items()}
        found: dict[str, Any] = {}
        for path, leaf in leaves.items():
            part = found
            for key in path[:-1]:
                part = part.setdefault(key, {})
            if path:
                part[path[-1]] = leaf
            else:
                found = leaf
        return found

    def _keep_least(self, path: Path, found: tuple[float, float]) -> None:
        self.least[path] = min(self.least.get(path, found), found)


def _of_index(path: Path) -> Path | None:
    """Where the number is whose least an index is at; ``None`` if it is no index."""
    if not path or path[-1] not in INDICES:
        return None
    return (*path[:-1], INDICES[path[-1]])


def _apart(summaries: Mapping[Path, Summary]) -> dict[Path, Summary]:
    """One summary at each path, where some stand at a path that leads to others.

    That is of values which were a number once, and several by name otherwise. It goes by the name
    "", but for one that never was a number, such as a layer whose batch was empty.
    """
    inner = {path[:length] for path in summaries for length in range(len(path))}
    return {
        (*path, "") if path in inner else path: summary
        for path, summary in summaries.items()
        if path not in inner or summary.moments.count
    }


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
        self._step = 0
        self._recorded: dict[str, tuple[int, _Window]] = {}

    def sources(self, quantities: Iterable[Quantity]) -> dict[str, Source]:
        """What the series come from, those of the quantities themselves first."""
        own = {q.name: Source(kinds(q), q.view, q.of_samples) for q in quantities}
        shown = {name: own[name] for name in own if name in self._shown(quantities)}
        return shown | {a.name: a.source for a in self._aggregates.values()}

    def begin_step(self, global_step: int) -> None:
        """A step has begun, which what is aggregated from now on stands under."""
        if global_step != self._step:
            self._recorded = {}
        self._step = global_step

    def take_in(self, global_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """What to record of a step's values: those that aren't aggregated, and full windows."""
        self._step = max(self._step, global_step)
        kept = dict(values)
        for name in self._aggregates.keys() & values.keys():
            aggregate = self._aggregates[name]
            window = self._windows.setdefault(name, _Window(aggregate.statistics))
            window.add(values[name])
            if not aggregate.raw:
                del kept[name]
            if window.records == aggregate.over:
                kept |= self._records(global_step, {aggregate.name: self._windows.pop(name)})
        return kept

    def push(self, metrics: Mapping[str, float]) -> None:
        """Take in numbers that the training loop has found."""
        for name, value in metrics.items():
            self._pushed.setdefault(name, _Window()).add(value)

    def has_pushed(self, name: str) -> bool:
        """Whether numbers of this name wait for the end of the epoch."""
        return name in self._pushed

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
        return self._step, self._records(self._step, windows)

    def rest(self) -> tuple[int, dict[str, Any]]:
        """The record of an epoch, and of windows that aren't full."""
        step, values = self.end_epoch()
        windows = {self._aggregates[name].name: window for name, window in self._windows.items()}
        self._windows = {}
        return step, values | self._records(step, windows)

    def _records(self, global_step: int, windows: Mapping[str, _Window]) -> dict[str, Any]:
        """Records of windows, with what was recorded of the same series under the same step."""
        for name, window in windows.items():
            step, whole = self._recorded.get(name, (global_step, window))
            if whole is not window and step == global_step:
                whole.merge(window)
            else:
                self._recorded[name] = (global_step, window)
        return {name: self._recorded[name][1].record() for name in windows}

    def _shown(self, quantities: Iterable[Any]) -> list[str]:
        kept = (q for q in quantities if isinstance(q, Quantity))
        return [
            q.name for q in kept if q.name not in self._aggregates or self._aggregates[q.name].raw
        ]


PUSHED = Source(("Aggregate",), View("", group="performance"))
"""What metrics come from that the training loop has pushed."""


def pushable(name: str, value: Any) -> float:
    """The value of a metric as a float; ``TypeError`` names the metric if it is no number."""
    try:
        plain = to_plain(value)
        if isinstance(plain, np.ndarray) and plain.size == 1:
            plain = plain.item()
        if isinstance(plain, (int, float)):
            return plain if isinstance(plain, Undefined) else float(plain)
    except (TypeError, OverflowError):
        pass
    raise TypeError(
        f"push({name}=...) takes a number, or a tensor or array of one element, and got "
        f"{_in_words(value)}"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)


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
