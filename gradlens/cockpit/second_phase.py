"""Reductions of the whole batch that take more than the values of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gradlens.numerics.deviations import Spread
from gradlens.numerics.precision import autocast_off
from gradlens.numerics.shards import whole
from gradlens.numerics.strata import all_drawn, count
from gradlens.numerics.unavailable import Contain
from gradlens.operators.dense import Buffer
from gradlens.operators.operator import GradientOperator
from gradlens.parts.kept import KeptGradients
from gradlens.parts.part import BatchPart, Results
from gradlens.reductions import (
    MergeableReduction,
    ParameterGradients,
    Reduction,
    ReductionAboutMean,
    WholeBatch,
)

MEAN = "mean"
"""The key of the mean gradient among the results of parts."""


@dataclass(frozen=True)
class Remaining:
    """Reductions that the values of parts don't give, by their keys.

    ``merged`` are computed of each process's own samples, whose values are merged, and ``together``
    of the samples of all processes. ``failed`` are the reasons why others can't be computed.
    """

    merged: Mapping[str, MergeableReduction]
    together: Mapping[str, Reduction]
    failed: Mapping[str, str]


def remaining(
    reductions: Mapping[str, Reduction], whole: BatchPart, max_bytes: int, processes: int
) -> Remaining:
    """What is to be computed; it is the same in all processes."""
    done = {*whole.results.values, *whole.results.failed}
    left = {key: each for key, each in reductions.items() if key not in done}
    reasons = {k: _obstacle(each, whole, max_bytes, processes) for k, each in left.items()}
    possible = {key: each for key, each in left.items() if not reasons[key]}
    merged = {k: each for k, each in possible.items() if isinstance(each, MergeableReduction)}
    together = {key: each for key, each in possible.items() if key not in merged}
    return Remaining(merged, together, {key: reason for key, reason in reasons.items() if reason})


def _obstacle(reduction: Reduction, whole: BatchPart, max_bytes: int, processes: int) -> str:
    """The reason why a reduction can't be computed; empty if it can be."""
    why, known = TOGETHER, all_drawn(whole.strata)
    if isinstance(reduction, ReductionAboutMean):
        if MEAN in whole.results.failed:
            return whole.results.failed[MEAN]
        known = known or reduction.estimates
    elif isinstance(reduction, MergeableReduction):
        why = WEIGHTS
    elif processes > 1:
        known = known and whole.kept_bytes <= max_bytes
    if known:
        return ""
    return TOO_LARGE.format(
        why=why, samples=count(whole.strata), least=whole.kept_bytes, max_bytes=max_bytes
    )


TOO_LARGE = (
    "the batch comes in parts, from micro-batches or processes, and {why}. Those of {samples} "
    "samples take {least} bytes, more than max_bytes={max_bytes}: pass "
    "Cockpit(..., max_bytes={least}), or leave the quantity out"
)
TOGETHER = "it needs the per-sample gradients of all parts together"
WEIGHTS = (
    "their losses aren't weighted by their numbers of samples, so that it needs the per-sample "
    "gradients again when all weights are known"
)


class SecondPhase:
    """Reduces the gradients that a process has kept, when the ``whole`` batch is known.

    ``spreads`` are those of the process's own samples, where some of these aren't kept.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        whole: BatchPart,
        kept: KeptGradients,
        spreads: Mapping[str, Spread],
        contain: Contain,
    ) -> None:
        self._parameters = parameters
        self._whole = whole
        self._kept = kept
        self._spreads = spreads
        self._contain = contain

    def own(self, reductions: Mapping[str, MergeableReduction]) -> Results:
        """Of the process's own samples."""
        return self._results(reductions, self._kept.operators, self._own_value)

    def together(
        self, reductions: Mapping[str, Reduction], operators: Mapping[str, GradientOperator]
    ) -> Results:
        """Of the samples of all processes."""
        return self._results(reductions, operators, lambda each, gradients: each.reduce(gradients))

    def _own_value(self, reduction: Reduction, gradients: ParameterGradients) -> Any:
        if not isinstance(reduction, ReductionAboutMean):
            return reduction.reduce(gradients)
        name, (stratum,) = gradients.name, self._kept.strata
        mean = self._whole.results.values[MEAN][name]
        spread = None if stratum.is_complete else self._spreads[name]
        return reduction.reduce_about(gradients, WholeBatch(mean, stratum, spread))

    def _results(
        self,
        reductions: Mapping[str, Reduction],
        operators: Mapping[str, GradientOperator],
        value_of: Callable[[Reduction, ParameterGradients], Any],
    ) -> Results:
        values: dict[str, dict[str, Any]] = {key: {} for key in reductions}
        failed: dict[str, str] = {}

        def refuse(reason: str, key: str) -> None:
            failed.setdefault(key, reason)

        shared = sum(each.passes for each in reductions.values()) > 1
        reads_parameter = any(each.reads_parameter for each in reductions.values())
        names = [name for name in self._parameters if name in self._whole.covered]
        buffer = Buffer()
        for name in names if reductions else ():
            # All processes take part, in the same order and whatever samples one of them has.
            gathered = {key: each.gathered(name) for key, each in reductions.items()}
            own = self._parameters[name]
            parameter = whole(own) if reads_parameter else own
            if name not in operators:
                continue
            gradients = ParameterGradients(name, parameter, operators[name], shared, buffer=buffer)
            with torch.no_grad(), autocast_off(parameter):
                for key in [key for key in reductions if key not in failed]:
                    work = f"{type(reductions[key]).__name__} of {name}"
                    with self._contain(work, partial(refuse, key=key)):
                        values[key][name] = value_of(gathered[key], gradients)
        return Results(values, failed)
