"""Histograms of the elements of per-sample gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Any

from gradlens.history.view import View
from gradlens.numerics.histograms import Counts, bin_edges
from gradlens.quantities.bin_adaptation import BinAdaptation, NoAdaptation, Range
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Histogram1d, Histogram2d, Reduction
from gradlens.stateful import State, load_state, state_of


class _GradHist(SingleStepQuantity):
    """A histogram of one axis or two, each with bins, a range and a policy that adapts this."""

    keep_individual: bool

    def set_axes(
        self, bins: Sequence[int], ranges: Sequence[Range], policies: Sequence[Any]
    ) -> None:
        """Check what the axes have, and begin with these ranges."""
        self._bins = [_checked_bins(self.name, each) for each in bins]
        self._ranges = [_checked_range(self.name, each) for each in ranges]
        self._policies = [_checked_adaptation(self.name, each) for each in policies]

    @property
    def _histogram(self) -> Reduction:
        """That of the present ranges."""
        if len(self._bins) == 1:
            return Histogram1d(self._bins[0], self._ranges[0])
        (bins_x, bins_y), (x, y) = self._bins, self._ranges
        return Histogram2d((bins_x, bins_y), (x, y))

    @property
    def of_samples(self) -> bool:
        return True

    def is_active(self, global_step: int) -> bool:
        adapts = any(policy.should_compute(global_step) for policy in self._policies)
        return adapts or self.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        own = (self._histogram,) if self.should_compute(global_step) else ()
        policies = (policy.reductions_at(global_step) for policy in self._policies)
        return (*own, *chain.from_iterable(policies))

    def compute(self, step: Step) -> dict[str, Any]:
        edges = [bin_edges(*axis) for axis in zip(self._bins, self._ranges, strict=True)]
        record = _fields(step.total(self._histogram))
        record["edges"] = edges if len(edges) > 1 else edges[0]
        if self.keep_individual:
            counts: Mapping[str, Counts] = step.on_host(self._histogram)
            record["parameters"] = {name: _fields(count) for name, count in counts.items()}
        return record

    def adapt_to(self, step: Step) -> None:
        self._ranges = [
            policy.compute(step, old) if policy.should_compute(step.global_step) else old
            for policy, old in zip(self._policies, self._ranges, strict=True)
        ]

    def state_dict(self) -> State:
        if all(isinstance(policy, NoAdaptation) for policy in self._policies):
            return {}
        return {
            "ranges": list(self._ranges),
            "schedules": [state_of(policy.schedule) for policy in self._policies],
            "policies": [policy.state_dict() for policy in self._policies],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = zip(state["ranges"], state["schedules"], state["policies"], strict=True)
        for axis, (policy, (range_, schedule, own)) in enumerate(
            zip(self._policies, saved, strict=True)
        ):
            load_state(policy.schedule, schedule)
            load_state(policy, own)
            if not isinstance(policy, NoAdaptation):
                self._ranges[axis] = tuple(range_)


@dataclass(eq=False)
class GradHist1d(_GradHist):
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
        self.set_axes([self.bins], [self.range], [self.adapt])


@dataclass(eq=False)
class GradHist2d(_GradHist):
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
        for argument in ("bins", "range", "adapt"):
            pair = getattr(self, argument)
            if not isinstance(pair, Collection) or len(pair) != 2:
                raise TypeError(
                    f"{self.name}: {argument}={pair!r}: give a pair, of gradients (x) and "
                    "parameters (y)"
                )
        self.set_axes(self.bins, self.range, self.adapt)


def _fields(counts: Counts) -> dict[str, Any]:
    sides = {"below": counts.below.tolist(), "above": counts.above.tolist()}
    if counts.hist.dim() == 1:
        sides = {side: count for side, (count,) in sides.items()}
    return {"hist": counts.hist, **sides, "nan": int(counts.nan)}


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
