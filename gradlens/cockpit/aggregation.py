"""Statistics of quantities and of pushed metrics, such as those of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gradlens.history.json_lines import encoded
from gradlens.history.records import Source
from gradlens.history.series import Series, value_of
from gradlens.history.undefined import Undefined
from gradlens.quantities.quantity import Quantity, class_names
from gradlens.stateful import State

Statistic: TypeAlias = Literal["mean", "std", "min", "q1", "median", "q3", "max", "iqr"]

STATISTICS: tuple[Statistic, ...] = get_args(Statistic)


@dataclass(frozen=True, eq=False)
class Aggregate:
    """A quantity of which statistics are recorded, ``over`` an epoch or a number of its values.

    It takes the quantity's place in the list that a cockpit is given. ``cockpit.tick_epoch()`` ends
    an epoch. In the record, each number of the quantity's value is replaced by a dict of its
    ``statistics``, with the ``"count"`` of the numbers, and of those that are NaN, if any, as
    ``"undefined"``. The mean of a ratio, such as the noise scale, is the ratio of the means of what
    it is computed from. Arrays, lists and indices, such as ``"least_unit"``, are left out. With
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


INDICES = {"least_unit"}
"""Keys of indices, which have no mean."""

NO_NUMBER = "there was no number in its values: of lists and arrays, there are no statistics"


NO_RATIO = "the mean of {} isn't positive"


def statistics_of(
    values: Sequence[Any],
    statistics: Sequence[Statistic],
    ratios: Mapping[str, tuple[str, str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """A record of the same structure as the values, with statistics in place of the numbers.

    A value may be a number in one record and a dict in another. The number's statistics are then
    placed into the dict under the key "", or left out if all were NaN, such as those of a layer
    whose batch was empty. Without any number, the record is empty. ``ratios`` have the keys of
    their numerators and denominators.
    """
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    dicts = [value for value in values if isinstance(value, Mapping)]
    names = dict.fromkeys(name for each in dicts for name in each if name not in INDICES)
    parts = {name: [each[name] for each in dicts if name in each] for name in names}
    of_parts = {name: statistics_of(of, statistics, ratios) for name, of in parts.items()}
    found = {name: part for name, part in of_parts.items() if part}
    for name, of in ratios.items():
        if "mean" in statistics and found.keys() >= {name, *of}:
            found[name]["mean"] = _ratio_of_means(dicts, *of)
    if not found:
        return summary(numbers, statistics) if numbers else {}
    return found if all(map(math.isnan, numbers)) else {"": summary(numbers, statistics), **found}


def _ratio_of_means(
    records: Sequence[Mapping[str, Any]], numerator: str, denominator: str
) -> float:
    """Of the records that have both, whose own ratios are biased where denominators are small."""
    every = [[each.get(key, math.nan) for key in (numerator, denominator)] for each in records]
    known = [pair for pair in every if all(map(math.isfinite, pair))]
    above, below = (sum(each) for each in zip(*known, strict=True)) if known else (0.0, 0.0)
    return above / below if below > 0 else Undefined(NO_RATIO.format(denominator))


class Aggregation:
    """Collects the values of a cockpit's aggregates and pushed metrics until they are recorded."""

    def __init__(self, quantities: Iterable[Any]) -> None:
        """``quantities`` and ``Aggregate``s of them; ``ValueError`` if two series have one name."""
        given = tuple(quantities)
        self._aggregates = {a.quantity.name: a for a in given if isinstance(a, Aggregate)}
        self._over = {each.name: each.over for each in self._aggregates.values()}
        self._of_name = {each.name: each for each in self._aggregates.values()}
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
        self._windows: dict[str, Series] = {}
        """What isn't recorded yet of each series of aggregates and pushed metrics, in its order."""
        self._recorded: dict[str, Series] = {}
        """What was recorded at step ``_at``, to which further values of that step are added."""
        self._at = 0

    def take_in(self, global_step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a step: values that aren't aggregated, and statistics of full windows."""
        kept = dict(values)
        for name in self._aggregates.keys() & values.keys():
            aggregate = self._aggregates[name]
            self._add(global_step, aggregate.name, values[name])
            if not aggregate.raw:
                del kept[name]
            if len(self._windows[aggregate.name]) == aggregate.over:
                kept |= self._records(global_step, [aggregate.name])
        return kept

    def push(self, global_step: int, metrics: Mapping[str, float]) -> None:
        """Add values of the training loop's metrics."""
        for name, value in metrics.items():
            self._add(global_step, name, value)

    def _add(self, step: int, name: str, value: Any) -> None:
        self._windows.setdefault(name, Series.of({}))
        every = [self._windows, *([self._recorded] if self.has_recorded(step, name) else [])]
        for series in (each[name] for each in every):
            series.add(len(series), encoded(value))

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
            "windows": {n: encoded([*each.values()]) for n, each in self._windows.items()},
            "recorded": {n: encoded([*each.values()]) for n, each in self._recorded.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; windows of what isn't aggregated any more are left out."""
        self._at = state["at"]
        gone = {*state["aggregates"]} - self._over.keys()
        for part, of_series in (("windows", self._windows), ("recorded", self._recorded)):
            of_series.clear()
            for name in state[part].keys() - gone:
                of_series[name] = Series.of(dict(enumerate(value_of(state[part][name]))))

    def _records(self, step: int, names: Iterable[str]) -> dict[str, Any]:
        """Records of windows, with what the same series have recorded at the same step."""
        if step != self._at:
            self._recorded, self._at = {}, step
        for name in names:
            window = self._windows.pop(name)
            self._recorded.setdefault(name, window)
        return {name: self._record(name) for name in names}

    def _record(self, name: str) -> dict[str, Any]:
        values = [*self._recorded[name].values()]
        aggregate, nothing = self._of_name.get(name), [Undefined(NO_NUMBER)]
        chosen = STATISTICS if aggregate is None else aggregate.statistics
        ratios = {} if aggregate is None else aggregate.quantity.ratios
        return statistics_of(values, chosen, ratios) or summary(nothing * len(values), chosen)


# Statistics of numbers -------------------------------------------------------------------------

INFINITE = "there are infinities among the numbers"
TOO_LARGE = "the numbers, or their squares, are too large to be added up"


def summary(
    numbers: Sequence[float], statistics: Sequence[Statistic] = STATISTICS
) -> dict[str, float]:
    """The statistics of numbers by name, and the ``"count"`` of the numbers.

    Those that are NaN are left out; ``"undefined"`` is their count, if there are any.
    """
    known = np.sort([each for each in numbers if not math.isnan(each)])
    counts = {"count": len(known)}
    if len(known) < len(numbers):
        counts["undefined"] = len(numbers) - len(known)
    if not len(known):
        reasons = [each.reason for each in numbers if isinstance(each, Undefined)]
        why = "all numbers were NaN" if numbers else "there was no number"
        return {**dict.fromkeys(statistics, Undefined(reasons[-1] if reasons else why)), **counts}
    found, infinite = _statistics(known), not np.isfinite(known).all()
    return {**{name: _explained(found[name], infinite) for name in statistics}, **counts}


def _statistics(ordered: NDArray[np.float64]) -> dict[Statistic, float]:
    """All statistics of numbers in ascending order, the standard deviation of the population.

    With infinities, the mean is the infinity, or NaN if there are infinities of both signs.
    """
    low, high = float(ordered[0]), float(ordered[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        # From the first on: the mean of equal numbers is exactly that number.
        is_finite = math.isfinite(low) and math.isfinite(high)
        mean = low + float((ordered - low).mean()) if is_finite else low + high
        std = float(np.sqrt(np.square(ordered - mean).mean()))
        q1, median, q3 = (_quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    return {"mean": mean, "std": std, "min": low, "q1": q1, "median": median, "q3": q3,
            "max": high, "iqr": q3 - q1}  # fmt: skip


def _explained(value: float, infinite: bool) -> float:
    """The value; a NaN with the reason if it overflows, or is NaN because of infinities."""
    if math.isnan(value):
        return Undefined(INFINITE if infinite else TOO_LARGE)
    return Undefined(TOO_LARGE) if math.isinf(value) and not infinite else value


def _quantile(ordered: NDArray[np.float64], share: float) -> float:
    """The number below which a share is, interpolated linearly.

    It is infinite next to an infinity, and NaN between infinities of both signs.
    """
    part, place = math.modf(share * (len(ordered) - 1))
    low, high = map(float, ordered[[int(place), math.ceil(place + part)]])
    if low == high or not part:
        return low
    if math.isinf(low) or math.isinf(high):
        return low + high
    # Either form overflows where the other one doesn't.
    return low * (1 - part) + high * part if low < 0 < high else low + part * (high - low)
