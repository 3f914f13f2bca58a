"""The batch of a step that comes in several parts: from micro-batches, processes or both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch

from gradlens.gradients.collect import OVERWRITTEN
from gradlens.gradients.gradients import Setting
from gradlens.numerics.shards import has_nonzero
from gradlens.numerics.shards import whole as of_all_processes
from gradlens.numerics.unavailable import Contain, UnavailableError
from gradlens.operators.dense import Buffer
from gradlens.operators.operator import GradientOperator
from gradlens.parts.part import (
    EMPTY,
    BatchPart,
    KeptGradients,
    Keyed,
    Results,
    Values,
    merged,
    part_factor,
)
from gradlens.parts.processes import Processes
from gradlens.reductions import (
    Deviations,
    Mean,
    MergeableReduction,
    ParameterGradients,
    Reduction,
    ReductionAboutMean,
    Spread,
    names_of,
)

MEAN = "mean"
"""The key of the mean gradient among the results of parts."""


def _obstacle(reduction: Reduction, whole: BatchPart, max_bytes: int, processes: int) -> str:
    """The reason why a reduction can't be computed of what was kept; empty if it can be.

    It is the same in all processes.
    """
    why, known = TOGETHER, whole.are_kept
    if isinstance(reduction, ReductionAboutMean):
        if MEAN in whole.results.failed:
            return whole.results.failed[MEAN]
        known = known or isinstance(reduction, Deviations)
    elif isinstance(reduction, MergeableReduction):
        why = WEIGHTS
    elif processes > 1:
        known = known and whole.kept_bytes <= max_bytes
    return "" if known else _too_large(whole, max_bytes, why)


def _too_large(whole: BatchPart, max_bytes: int, why: str) -> str:
    return TOO_LARGE.format(
        why=why, samples=whole.samples, least=whole.kept_bytes, max_bytes=max_bytes
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


def second_phase(
    setting: Setting,
    whole: BatchPart,
    reductions: Mapping[str, Reduction],
    operators: Mapping[str, GradientOperator],
    contain: Contain,
) -> Results:
    """Reductions of gradients that were kept until the ``whole`` batch is known."""
    values: dict[str, dict[str, Any]] = {key: {} for key in reductions}
    failed: dict[str, str] = {}

    def refuse(reason: str, key: str) -> None:
        failed.setdefault(key, reason)

    shared = sum(each.passes for each in reductions.values()) > 1
    reads_parameter = any(each.reads_parameter for each in reductions.values())
    names = [name for name in setting.parameters if name in whole.covered]
    buffer = Buffer()
    for name in names if reductions else ():
        # All processes take part, in the same order and whatever samples one of them has.
        gathered = {key: each.gathered(name) for key, each in reductions.items()}
        own = setting.parameters[name]
        parameter = of_all_processes(own) if reads_parameter else own
        if name not in operators:
            continue
        gradients = ParameterGradients(name, parameter, operators[name], shared, buffer=buffer)
        with torch.no_grad():
            for key, reduction in gathered.items():
                work = f"{type(reduction).__name__} of {name}"
                if key in failed or not reduction.is_of(name):
                    continue
                with contain(work, partial(refuse, key=key)):
                    if isinstance(reduction, ReductionAboutMean):
                        mean = whole.results.values[MEAN][name]
                        values[key][name] = reduction.reduce_about(gradients, mean)
                    else:
                        values[key][name] = reduction.reduce(gradients)
    return Results(values, failed)


PLACE_IN_MEMORY = re.compile(" at 0x[0-9a-fA-F]+")
"""What differs in the texts that describe the same function in two processes."""

SPREAD = "spread"
"""The key of the spread among the results of micro-batches."""


@dataclass(frozen=True)
class Whole:
    """All parts as one, and the values of reductions of it, or why they have none.

    ``kept`` are per-sample gradients of this process, and ``not_kept`` is why there are none.
    """

    part: BatchPart
    values: Mapping[Reduction, Values] = field(default_factory=dict)
    failed: Mapping[Reduction, str] = field(default_factory=dict)
    kept: Mapping[str, GradientOperator] = field(default_factory=dict)
    not_kept: str = ""


class BatchAssembly:
    """Joins the parts of a step's batch until the last one is there.

    Values of most reductions are merged part by part. Where a reduction needs the mean gradient of
    the whole batch, or the gradients of all samples together, those of a process's micro-batches
    are kept up to ``max_bytes``; the latter are exchanged up to ``max_bytes`` of all processes.
    """

    def __init__(self, setting: Setting, processes: Processes, max_bytes: int) -> None:
        self.processes = processes
        self._setting = setting
        self._max_bytes = max_bytes
        self._own: BatchPart | None = None
        self._kept = KeptGradients(max_bytes)
        self._step = 0
        self._later: tuple[str, ...] = ()
        self._is_exchanged = False
        self._is_interrupted = False
        self._differ: bool | None = None

    @property
    def is_compared(self) -> bool:
        """Whether it is known if all processes track the same."""
        return self._differ is not None

    def compare(self, tracked: Sequence[str]) -> None:
        """Find out whether all processes track the same.

        Where they don't, they exchange at all steps, so that none waits for another in vain.
        """
        texts = [PLACE_IN_MEMORY.sub("", each) for each in tracked]
        self._differ = any(each != texts for each in self.processes.of_all(texts))

    @property
    def exchanges_always(self) -> bool:
        """Whether processes exchange also at steps at which this one tracks nothing."""
        return bool(self._differ)

    def begin_step(self, global_step: int) -> str:
        """Drop the parts of a step that never had a last one; a note, if there are any."""
        left = 0 if self._own is None or self._step == global_step else self._own.passes
        goes_on = self._is_interrupted and self._step == global_step and self._is_left_behind()
        before, self._step, self._is_exchanged = self._step, global_step, False
        self._later = ()
        self._is_interrupted = False
        if goes_on:
            self._own = replace(EMPTY, failure=INTERRUPTED)
        if not left:
            return ""
        self.drop()
        return LEFT_OVER.format(count=left, step=before)

    def exchange_later(self, names: Sequence[str]) -> None:
        """Quantities of these names will exchange after the update, if all processes track them."""
        self._later = tuple(names)

    def interrupt(self) -> None:
        """Drop all parts, since an exception has left the context of one."""
        self.drop()
        self._is_interrupted = True

    def _is_left_behind(self) -> bool:
        """Whether gradients from before an exception are still in ``p.grad``."""
        gradients = [parameter.grad for parameter in self._setting.parameters.values()]
        return any(has_nonzero(each) for each in gradients if each is not None)

    def leave_out(self) -> None:
        """Exchange nothing at this step."""
        self._is_exchanged = True

    @property
    def has_begun(self) -> bool:
        """Whether there are earlier parts of the step's batch."""
        return self._own is not None

    def has_parts(self, accumulating: bool) -> bool:
        """Whether a backward pass is that of a part of its step's batch."""
        return accumulating or self._own is not None or self.processes.count > 1

    def is_one_of_several(self, accumulating: bool) -> bool:
        """Whether a backward pass is that of one of several micro-batches."""
        return accumulating or self._own is not None

    def part_reductions(self, reductions: Sequence[Reduction], accumulating: bool) -> Keyed:
        """What is computed of a part in its backward pass, for these reductions of the whole."""
        several = self.is_one_of_several(accumulating)
        about = [each for each in reductions if isinstance(each, ReductionAboutMean)]
        names = names_of(about)
        summary: Keyed = {SPREAD: Spread(names)} if several else {MEAN: Mean(names)}
        return {**_part_by_part(reductions), **(summary if about else {})}

    def add(
        self,
        part: BatchPart,
        operators: Mapping[str, GradientOperator],
        reductions: Sequence[Reduction],
        accumulating: bool,
        contain: Contain,
    ) -> None:
        """Take in a part, with the operators that are needed until all parts are there."""
        part = replace(part, tracked=self._tracked(reductions))
        if self._own is None:
            self._own, self._kept = part, KeptGradients(self._max_bytes)
        else:
            keyed = self.part_reductions(reductions, accumulating)
            self._own = merged(self._own, part, keyed, self._setting.loss_reduction, contain)
        self._kept.add(operators, part.samples or 0, part.weight)

    def _tracked(self, reductions: Sequence[Reduction]) -> tuple[str, ...]:
        return (f"step {self._step}", *keyed(reductions), *self._later)

    def refuse(self, reason: str, reductions: Sequence[Reduction], accumulating: bool) -> None:
        """Take in that a part has failed, so that no other process waits for it."""
        if self._is_exchanged or not self.has_parts(accumulating):
            return
        own = self._own or replace(EMPTY, tracked=self._tracked(reductions))
        self._own = replace(own, failure=reason)
        if not accumulating:
            self._exchanged(replace(EMPTY, tracked=own.tracked, failure=reason), {})
            self.drop()

    def drop(self) -> None:
        """Drop all parts, if there are some."""
        if self._own is not None:
            self._own, self._kept = None, KeptGradients(self._max_bytes)

    def whole(self, reductions: Sequence[Reduction], contain: Contain) -> Whole:
        """All parts as one; all processes must call it at the same steps.

        ``UnavailableError`` with the reason if one of them has failed.
        """
        assert self._own is not None
        own, kept, by_key = self._own, self._kept, keyed(reductions)
        self.drop()
        if not kept.are_unchanged:
            own = replace(own, failure=own.failure or OVERWRITTEN)
        first = {**_part_by_part(reductions), MEAN: Mean()}
        part = self._exchanged(_to_send(own, kept), first)
        if part.failure:
            raise UnavailableError(part.failure)
        operators, spreads = self._of_whole(own, kept, part)
        not_kept = "" if part.are_kept else _too_large(part, self._max_bytes, TOGETHER)

        results = _of_whole(by_key, part)
        done, count = {*results.values, *results.failed}, self.processes.count
        left = {key: each for key, each in by_key.items() if key not in done}
        reasons = {k: _obstacle(each, part, self._max_bytes, count) for k, each in left.items()}
        found = [results, Results(failed={key: why for key, why in reasons.items() if why})]
        possible = {key: left[key] for key, why in reasons.items() if not why}
        apart = {k: each for k, each in possible.items() if isinstance(each, MergeableReduction)}
        together = {key: each for key, each in possible.items() if key not in apart}
        phase = partial(second_phase, self._setting, part, contain=contain)
        if apart:  # of each process's own samples, which weigh the same from now on
            size = own.samples or 0
            if kept.are_all:
                of_own = phase(reductions=apart, operators=operators)
            else:
                mean = part.results.values[MEAN]
                of_own = Results(
                    {
                        key: {
                            n: s.about(mean[n], size, not_kept)
                            for n, s in spreads.items()
                            if each.is_of(n)
                        }
                        for key, each in apart.items()
                        if isinstance(each, Deviations)
                    }
                )
            mine = BatchPart(size, size, results=of_own)
            found.append(self._exchanged(mine, apart).results)
        if together:
            of_all = self.processes.joined_operators(operators)
            found.append(phase(reductions=together, operators=of_all))
        values = {by_key[k]: v for each in found for k, v in each.values.items() if k in by_key}
        failed = {by_key[k]: v for each in found for k, v in each.failed.items() if k in by_key}
        sums = part.sums and replace(part.sums, averaged_over=count)
        part = replace(part, weight=part.weight / count, sums=sums)
        retained = operators if part.are_kept else {}
        covered = {
            reduction: {name: value for name, value in of_all.items() if name in part.covered}
            for reduction, of_all in values.items()
        }
        return Whole(part, covered, failed, retained, not_kept)

    def _exchanged(self, own: BatchPart, reductions: Keyed) -> BatchPart:
        self._is_exchanged = True
        return self.processes.merged(own, reductions, self._setting.loss_reduction)

    def _of_whole(
        self, own: BatchPart, kept: KeptGradients, whole: BatchPart
    ) -> tuple[Mapping[str, GradientOperator], Values]:
        """What is kept, and the spreads of all own samples, as gradients of the whole batch."""
        weight = whole.weight if self._setting.loss_reduction == "mean" else None
        samples = whole.samples or 0
        factor = part_factor(own.weight, own.samples or 0, weight, samples)
        spreads = own.results.values.get(SPREAD, {})
        return kept.joined(weight, samples), {n: s.times(factor) for n, s in spreads.items()}


def keyed(reductions: Sequence[Reduction]) -> dict[str, Reduction]:
    """Reductions by keys that are the same in all processes."""
    return {f"{place}: {_name(each)}": each for place, each in enumerate(reductions)}


def _name(reduction: Reduction) -> str:
    """A reduction with its settings, if it shows them, and without its place in memory."""
    kind = type(reduction)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(reduction)


def _part_by_part(reductions: Sequence[Reduction]) -> Keyed:
    """What is merged part by part, for those reductions that allow it."""
    return {key: each.of_part for key, each in keyed(reductions).items() if _is_of_part(each)}


def _is_of_part(reduction: Reduction) -> TypeGuard[MergeableReduction]:
    """Whether a part's value can be computed in its own backward pass."""
    if not isinstance(reduction, MergeableReduction) or isinstance(reduction, ReductionAboutMean):
        return False
    return not reduction.needs_gathering


def need_gradients(reductions: Sequence[Reduction]) -> bool:
    """Whether the gradients of parts are needed after their backward passes."""
    return any(not _is_of_part(each) or each.of_part.degree is None for each in reductions)


def _of_whole(reductions: Mapping[str, Reduction], whole: BatchPart) -> Results:
    """The values of the whole batch, from the merged ones of its parts."""
    found, samples = whole.results, whole.samples or 0
    values = {
        key: {name: reduction.of_whole(value, samples) for name, value in found.values[key].items()}
        for key, reduction in reductions.items()
        if key in found.values and isinstance(reduction, MergeableReduction)
    }
    return replace(found, values=values)


def _to_send(own: BatchPart, kept: KeptGradients) -> BatchPart:
    """A process's part, with the mean gradient in place of the spread."""
    found = own.results
    values = {key: value for key, value in found.values.items() if key != SPREAD}
    failed = {MEAN if key == SPREAD else key: why for key, why in found.failed.items()}
    if SPREAD in found.values:
        values[MEAN] = {name: spread.mean for name, spread in found.values[SPREAD].items()}
    results = replace(found, values=values, failed=failed)
    return replace(own, results=results, are_kept=kept.are_all, kept_bytes=kept.needed_bytes)


INTERRUPTED = (
    "an exception has left the context of an earlier backward pass of this step, and the gradients "
    "from before it are still in p.grad: to repeat the step, call optimizer.zero_grad() first"
)
LEFT_OVER = (
    "{count} micro-batches of step {step} have no values, since none of them was the last: "
    "pass accumulating=False with the last one"
)
