"""Histograms of the elements of per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from gradlens.history.view import View
from gradlens.numerics.histograms import Counts, bin_edges
from gradlens.quantities.bin_adaptation import (
    BinAdaptation,
    NoAdaptation,
    Range,
    adapted_state,
    load_adapted,
)
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Histogram1d, Histogram2d, Reduction
from gradlens.stateful import State


@dataclass(eq=False)
class GradHist1d(SingleStepQuantity):
    """Histogram of all elements of all per-sample gradients.

    A value is ``{"hist": int64 [bins], "edges": [bins + 1], "below", "above", "nan"}``: ``bins``
    bins of equal width over ``range``, the last one including its right edge. Elements outside the
    range are counted in the outermost bins, and their numbers are ``below`` and ``above``; ``nan``
    is the number of NaN. ``keep_individual`` adds ``"parameters"``: the same for each parameter by
    name, with the same edges. ``adapt`` is a policy that sets the range of the next histograms.
    ``ValueError`` for less than one bin, or an empty range; ``TypeError`` for what is none.
    """

    view = View("Gradient elements", group="gradients", yscale="log", label="count")

    # As in cockpit-for-pytorch.
    bins: int = 100
    range: Range = (-2.0, 2.0)
    adapt: BinAdaptation | None = None
    keep_individual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bins = _checked_bins(self.name, self.bins)
        self.range = _checked_range(self.name, self.range)
        self._adaptation = _checked_adaptation(self.name, self.adapt)

    @property
    def _histogram(self) -> Histogram1d:
        return Histogram1d(self.bins, self.range)

    @property
    def of_samples(self) -> bool:
        return True

    def is_active(self, global_step: int) -> bool:
        return self.should_compute(global_step) or self._adaptation.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        own = (self._histogram,) if self.should_compute(global_step) else ()
        return (*own, *self._adaptation.reductions_at(global_step))

    def compute(self, step: Step) -> dict[str, Any]:
        edges = bin_edges(self.bins, self.range)
        return _record(step, self._histogram, self.keep_individual, edges)

    def adapt_to(self, step: Step) -> None:
        if self._adaptation.should_compute(step.global_step):
            self.range = self._adaptation.compute(step, self.range)

    def state_dict(self) -> State:
        return adapted_state([self._adaptation], [self.range])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        (self.range,) = load_adapted([self._adaptation], [self.range], state)


@dataclass(eq=False)
class GradHist2d(SingleStepQuantity):
    """Joint histogram of all elements of per-sample gradients (x) and of their parameters (y).

    A value is as for ``GradHist1d``, with ``"hist"`` ``[bins_x, bins_y]`` and two entries each in
    ``"edges"``, ``"below"`` and ``"above"``. ``bins``, ``range`` and ``adapt`` are pairs for x, y.
    """

    view = View("Joint histogram", group="gradients")

    # As in cockpit-for-pytorch.
    bins: tuple[int, int] = (40, 50)
    range: tuple[Range, Range] = ((-1.0, 1.0), (-2.0, 2.0))
    adapt: tuple[BinAdaptation | None, BinAdaptation | None] = (None, None)
    keep_individual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        (bins_x, bins_y) = _checked_pair(self.name, "bins", self.bins)
        (x, y) = _checked_pair(self.name, "range", self.range)
        self.bins = (_checked_bins(self.name, bins_x), _checked_bins(self.name, bins_y))
        self.range = (_checked_range(self.name, x), _checked_range(self.name, y))
        policies = _checked_pair(self.name, "adapt", self.adapt)
        self._adaptations = tuple(_checked_adaptation(self.name, each) for each in policies)

    @property
    def _histogram(self) -> Histogram2d:
        return Histogram2d(self.bins, self.range)

    @property
    def of_samples(self) -> bool:
        return True

    def is_active(self, global_step: int) -> bool:
        adapts = any(policy.should_compute(global_step) for policy in self._adaptations)
        return adapts or self.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        own = (self._histogram,) if self.should_compute(global_step) else ()
        policies = (policy.reductions_at(global_step) for policy in self._adaptations)
        return (*own, *(reduction for policy in policies for reduction in policy))

    def compute(self, step: Step) -> dict[str, Any]:
        (x, y), (bins_x, bins_y) = self.range, self.bins
        edges = [bin_edges(bins_x, x), bin_edges(bins_y, y)]
        return _record(step, self._histogram, self.keep_individual, edges)

    def adapt_to(self, step: Step) -> None:
        x, y = (
            policy.compute(step, old) if policy.should_compute(step.global_step) else old
            for policy, old in zip(self._adaptations, self.range, strict=True)
        )
        self.range = (x, y)

    def state_dict(self) -> State:
        return adapted_state(self._adaptations, self.range)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        x, y = load_adapted(self._adaptations, self.range, state)
        self.range = (x, y)


def _record(step: Step, histogram: Reduction, keep_individual: bool, edges: Any) -> dict[str, Any]:
    record = {**_fields(step.total(histogram)), "edges": edges}
    if keep_individual:
        counts: Mapping[str, Counts] = step.on_host(histogram)
        record["parameters"] = {name: _fields(count) for name, count in counts.items()}
    return record


def _fields(counts: Counts) -> dict[str, Any]:
    sides = {"below": counts.below.tolist(), "above": counts.above.tolist()}
    if counts.hist.dim() == 1:
        sides = {side: count for side, (count,) in sides.items()}
    return {"hist": counts.hist, **sides, "nan": int(counts.nan)}


def _checked_pair(name: str, argument: str, pair: Any) -> tuple[Any, Any]:
    if not isinstance(pair, Collection) or len(pair) != 2:
        raise TypeError(
            f"{name}: {argument}={pair!r}: give a pair, of gradients (x) and parameters (y)"
        )
    first, second = pair
    return first, second


def _checked_adaptation(name: str, policy: BinAdaptation | None) -> BinAdaptation:
    if not isinstance(policy, BinAdaptation | None):
        raise TypeError(
            f"{name}: adapt={policy!r} is no policy that adapts a range: pass an instance of one, "
            "as in adapt=gradlens.quantities.bin_adaptation.GradAbsMax()"
        )
    return policy or NoAdaptation()


def _checked_bins(name: str, bins: Any) -> int:
    if not isinstance(bins, Integral):
        raise TypeError(f"{name}: bins={bins!r} is not a whole number: pass an int")
    if bins < 1:
        raise ValueError(f"{name}: bins={bins}: use 1 or more")
    return int(bins)


def _checked_range(name: str, range_: Any) -> Range:
    if not isinstance(range_, Collection) or len(range_) != 2:
        raise TypeError(f"{name}: range={range_!r} is not a pair: give (low, high)")
    low, high = range_
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"{name}: range={range_!r} is empty: give (low, high) with low < high")
    return (float(low), float(high))
