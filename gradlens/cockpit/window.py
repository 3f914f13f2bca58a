"""Statistics of the numbers in some records, such as those of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch.distributed

from gradlens.history.undefined import Undefined
from gradlens.numerics.exchange import all_gathered
from gradlens.numerics.quantile_sketch import QuantileSketch
from gradlens.numerics.running_moments import RunningMoments
from gradlens.numerics.running_statistics import STATISTICS, RunningStatistics, Statistic
from gradlens.numerics.saveable import restored, saveable
from gradlens.stateful import State

Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a number in a record of nested dicts."""

INDICES: Mapping[str, str] = {"least_unit": "least"}
"""Keys of indices, and the key of the number whose minimum they belong to. An index has no mean."""

NO_NUMBER = "there was no number in its values: of lists and arrays, there are no statistics"


@dataclass
class Window:
    """Statistics of each number of some records, and the indices of the least ones.

    ``records`` is the count of the records, and ``least`` holds pairs of a minimum and its index.
    """

    statistics: Sequence[Statistic] = STATISTICS
    records: int = 0
    by_path: dict[Path, RunningStatistics] = field(default_factory=dict)
    least: dict[Path, tuple[float, float]] = field(default_factory=dict)

    def add(self, record: Any) -> None:
        """Add a record."""
        self.records += 1
        found = dict(numbers(record)) or {(): Undefined(NO_NUMBER)}
        for path, value in found.items():
            minimum = _path_of_minimum(path)
            if minimum is None:
                self.by_path.setdefault(path, RunningStatistics(self.statistics)).add(value)
            elif minimum in found:
                self._keep_least(path, (found[minimum], value))

    def merge(self, other: Window) -> None:
        """Add all records of another window."""
        self.records += other.records
        for path, statistics in other.by_path.items():
            self.by_path.setdefault(path, RunningStatistics(self.statistics)).merge(statistics)
        for path, least in other.least.items():
            self._keep_least(path, least)

    def record(self) -> dict[str, Any]:
        """A record of the same structure, with statistics in place of the numbers."""
        leaves: dict[Path, Any] = {p: s.record() for p, s in _separated(self.by_path).items()}
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

    def state_dict(self) -> State:
        """The statistics so far."""
        return {
            "statistics": list(self.statistics),
            "records": self.records,
            "by_path": {path: found.state_dict() for path, found in self.by_path.items()},
            "least": saveable(self.least),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Window:
        """The window that a state is of."""
        window = cls(state["statistics"], state["records"], least=restored(state["least"]))
        for path, found in state["by_path"].items():
            window.by_path[path] = RunningStatistics(window.statistics)
            window.by_path[path].load_state_dict(found)
        return window

    def _keep_least(self, path: Path, found: tuple[float, float]) -> None:
        self.least[path] = min(self.least.get(path, found), found)


def numbers(record: Any, path: Path = ()) -> Iterable[tuple[Path, float]]:
    """All numbers in a record, with their paths."""
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from numbers(value, (*path, key))
    elif isinstance(record, (int, float)) and not isinstance(record, bool):
        yield path, record


def gathered(windows: dict[str, Window]) -> dict[str, Window]:
    """The windows of all processes, merged by name; ``RuntimeError`` without a process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise RuntimeError(
            "there are no processes to gather from: call torch.distributed.init_process_group "
            "first, or tick_epoch() without across_processes"
        )
    total: dict[str, Window] = {}
    for found in all_gathered(windows, CLASSES, torch.device("cpu")):
        for name, window in found.items():
            if name in total:
                total[name].merge(window)
            else:
                total[name] = window
    return total


CLASSES = (Window, RunningStatistics, RunningMoments, QuantileSketch)
"""What a window consists of."""


def _path_of_minimum(path: Path) -> Path | None:
    """The path of the number whose minimum an index belongs to; ``None`` if it is no index."""
    if not path or path[-1] not in INDICES:
        return None
    return (*path[:-1], INDICES[path[-1]])


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
        if path not in inner or statistics.moments.count
    }
