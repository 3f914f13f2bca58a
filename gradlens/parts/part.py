"""One batch from several backward passes: of micro-batches, of processes, or of both.

The loss of the whole is Σᵢ wᵢ Lᵢ, where wᵢ are the factors that backward was called with, over
their sum (1/k for each of k micro-batches, 1/R for each of R processes). A sample of a part with
Nᵢ of all N samples thus has gₙ = N·wᵢ/Nᵢ·∇ℓₙ under a mean loss; under a sum loss gₙ = ∇ℓₙ.

Parts are joined two at a time, and the result is a part again, whose values are those of a batch
that consists of both alone. A part without samples changes nothing. Gradients that are needed when
all parts are there are kept if memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlens.graph.loss import LossReduction
from gradlens.history.spikes import SampleId
from gradlens.numerics.noise_scales import PartSums
from gradlens.numerics.unavailable import Contain
from gradlens.operators.composed import Joined
from gradlens.operators.dense import Dense
from gradlens.operators.operator import GradientOperator
from gradlens.reductions import MergeableReduction

MAX_BYTES = 64 * 2**20
"""Default memory of the gradients that are kept for a whole batch.

A trade-off: it is that of 256 samples of 3c3d.
"""


@dataclass(frozen=True)
class _Part:
    """What is kept of one part, whose loss has a ``weight``, and how many samples it had."""

    operators: Mapping[str, GradientOperator]
    weight: float
    samples: int


class KeptGradients:
    """The per-sample gradients of a process's parts, if those of all fit ``max_bytes``.

    Those of a single part are kept in any case. ``needed_bytes`` is the memory of all, and
    ``are_all`` whether they are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[_Part] = []
        self.needed_bytes = 0
        self.are_all = True
        self._was_changed = False

    def add(self, operators: Mapping[str, GradientOperator], samples: int, weight: float) -> None:
        """Keep a part's gradients, or none any more if they don't fit beside the others."""
        if not samples or not operators:
            return
        self._was_changed = not self.are_unchanged
        self.needed_bytes += sum(operator.nbytes for operator in operators.values())
        if self._parts and self.needed_bytes > self._max_bytes:
            self._parts, self.are_all = [], False
        if self.are_all:
            self._parts.append(_Part(operators, weight, samples))

    @property
    def are_unchanged(self) -> bool:
        """Whether no part's gradients were overwritten after its backward pass."""
        operators = (each for part in self._parts for each in part.operators.values())
        return not self._was_changed and all(each.is_unchanged for each in operators)

    def joined(self, weight: float | None, samples: int) -> Mapping[str, GradientOperator]:
        """What is kept, as gradients of a batch with so many samples, in all processes.

        ``weight`` is that of its loss, ``None`` under a sum loss.
        """
        parts = self._parts
        if not parts:
            return {}
        factors = [part_factor(p.weight, p.samples, weight, samples) for p in parts]
        names = [n for n in parts[0].operators if all(n in part.operators for part in parts)]
        return {n: _joined([part.operators[n] for part in parts], factors) for n in names}


def part_factor(
    weight: float, samples: int, whole_weight: float | None, whole_samples: int
) -> float:
    """gₙ in the whole batch over gₙ in the part: N·wᵢ/(Nᵢ·w), one under a sum loss (no weight).

    It is also one where no part has a weight, and thus no gradients.
    """
    if not whole_weight or not samples:
        return 1.0
    factor = (whole_samples * weight) / (samples * whole_weight)
    return 1.0 if abs(factor - 1) < ROUNDING else factor


ROUNDING = 1e-12
"""The most by which a factor of 1 is off, computed from weights in double precision."""


def smaller(operator: GradientOperator) -> GradientOperator:
    """The same gradients as elements where these take less memory than factors."""
    takes_less = operator.bytes_of_elements < operator.nbytes
    return Dense(operator.dense(), eps=operator.eps) if takes_less else operator


def _joined(parts: list[GradientOperator], factors: list[float]) -> GradientOperator:
    return parts[0] if len(parts) == 1 and factors == [1.0] else Joined(parts, factors)


Values: TypeAlias = Mapping[str, Any]
"""A reduction's values, by parameter name."""

Keyed: TypeAlias = Mapping[str, MergeableReduction]
"""Reductions by keys, which are the same in all processes."""


@dataclass(frozen=True)
class Results:
    """By reductions' keys: their values, why they have none, and which to compute again."""

    values: Mapping[str, Values] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    unscaled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BatchPart:
    """The results of one backward pass, or of several.

    ``samples`` is ``None`` if it isn't known. ``weight`` is that of the loss in what the optimizer
    minimises: the factor that backward was called with, of ``passes`` backward passes. ``loss`` is
    the loss and ``individual_losses`` are ℓₙ ``[N]``, or ``None`` for the reason
    ``without_losses``. ``covered`` are the parameters that have per-sample gradients, and
    ``missing`` the reasons why others have none. ``groups`` are those of the samples, if they were
    passed. ``are_kept`` is whether these are kept until all
    parts are there, which takes ``kept_bytes``. ``projections`` ``[N]`` are those of the step
    before on its update, and ``sums`` are of this part's own gradients. ``tracked`` says what is
    computed at which step, and ``failure`` why nothing can be.
    """

    samples: int | None = None
    weight: float = 1.0
    passes: int = 1
    loss: Tensor | None = None
    individual_losses: Tensor | None = None
    without_losses: str = ""
    results: Results = field(default_factory=Results)
    covered: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)
    coupling: frozenset[str] = frozenset()
    groups: tuple[SampleId, ...] | None = None
    are_kept: bool = True
    kept_bytes: int = 0
    projections: Tensor | None = None
    sums: PartSums | None = None
    tracked: tuple[str, ...] = ()
    failure: str = ""


EMPTY = BatchPart(samples=0)
"""A part without samples."""


def merged(
    one: BatchPart,
    other: BatchPart,
    reductions: Keyed,
    loss_reduction: LossReduction,
    contain: Contain,
) -> BatchPart:
    """Both as one. A parameter is missing if it is missing in one of them."""
    projections = [each.projections for each in (one, other) if each.projections is not None]
    sums = [each.sums for each in (one, other) if each.sums is not None]
    of_both: dict[str, Any] = {
        "are_kept": one.are_kept and other.are_kept,
        "kept_bytes": one.kept_bytes + other.kept_bytes,
        "projections": torch.cat(projections) if projections else None,
        "sums": sums[0] if len(sums) == 1 else sums[0].merge(sums[1]) if sums else None,
        "tracked": one.tracked,
        "failure": one.failure or other.failure or _difference(one.tracked, other.tracked),
    }
    if other.samples == 0 or one.samples == 0:
        return replace(other if one.samples == 0 else one, **of_both)
    sizes = (one.samples or 0, other.samples or 0)
    passes = one.passes + other.passes
    if loss_reduction == "mean":
        weight = one.weight + other.weight
        # Of losses that backward hasn't reached, each is as much of the whole as another.
        first, second = (one.weight, other.weight) if weight else (one.passes, other.passes)
        shares = first / (first + second), second / (first + second)
        factors = (
            part_factor(one.weight, sizes[0], weight, sum(sizes)),
            part_factor(other.weight, sizes[1], weight, sum(sizes)),
        )
        if not weight and one.weight:
            of_both["failure"] = of_both["failure"] or CANCEL
    else:
        weight = (one.passes * one.weight + other.passes * other.weight) / passes
        shares = factors = (1.0, 1.0)
    loss = losses = None
    if one.loss is not None and other.loss is not None:
        loss = shares[0] * one.loss + shares[1] * other.loss
    if one.individual_losses is not None and other.individual_losses is not None:
        of_parts = zip(factors, (one.individual_losses, other.individual_losses), strict=True)
        losses = torch.cat([factor * each for factor, each in of_parts])
    return BatchPart(
        sum(sizes) or None,
        weight,
        passes,
        loss,
        losses,
        one.without_losses or other.without_losses,
        _merged_results(one.results, other.results, reductions, sizes, factors, contain),
        one.covered & other.covered,
        {**one.missing, **other.missing},
        one.coupling | other.coupling,
        None if one.groups is None or other.groups is None else one.groups + other.groups,
        **of_both,
    )


def _difference(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    """The reason why parts can't be joined that were tracked differently, if they were."""
    if one == other:
        return ""
    apart = [f"{each} on one and not on another" for each in {*one} ^ {*other}]
    return DIFFERENT.format(what="; ".join(sorted(apart)) or "in another order")


DIFFERENT = (
    "the parts of the batch were tracked differently ({what}): all processes, and all "
    "micro-batches of a step, need the same quantities and schedules, and contexts of the same "
    "steps"
)


CANCEL = (
    "the factors that backward was called with, of losses of several parts of the batch, add up to "
    "zero, so that there is no mean loss that they are multiples of"
)


def _merged_results(
    one: Results,
    other: Results,
    reductions: Keyed,
    sizes: tuple[int, int],
    factors: tuple[float, float],
    contain: Contain,
) -> Results:
    """Values of so many samples, each times a factor of its gradients, as values of all of them."""
    failed = {**other.failed, **one.failed}
    unscaled = one.unscaled | other.unscaled
    values: dict[str, Values] = {}

    def refuse(reason: str, key: str) -> None:
        failed.setdefault(key, reason)

    for key, reduction in reductions.items():
        if key in failed or key in unscaled or key not in one.values or key not in other.values:
            continue
        if reduction.degree is None and any(abs(f - 1) > OF_LOSSES for f in factors):
            unscaled |= {key}
            continue
        with contain(f"merging {type(reduction).__name__}", partial(refuse, key=key)):
            first = _scaled(reduction, one.values[key], factors[0])
            second = _scaled(reduction, other.values[key], factors[1])
            names = [name for name in first if name in second]
            values[key] = {n: reduction.merge(first[n], second[n], sizes) for n in names}
    return Results(values, failed, unscaled)


OF_LOSSES = 1e-6
"""The most by which a factor of 1 is off, computed from the weights of losses in float32."""


def _scaled(reduction: MergeableReduction, values: Values, factor: float) -> Values:
    if factor == 1.0 or reduction.degree is None:
        return values
    return {name: reduction.scaled(value, factor) for name, value in values.items()}
