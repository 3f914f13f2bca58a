"""Per-sample gradients of a tracked step: from entering its context to those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gradlens.gradients.gradients import Gradients, Setting
from gradlens.gradients.loss_factor import loss_scale, unscaled_loss
from gradlens.gradients.per_sample_gradients import UNSEEN
from gradlens.history.coverage import Coverage, few
from gradlens.numerics.shards import has_nonzero
from gradlens.numerics.unavailable import Contain
from gradlens.observers.observer import Outcome, StepContext
from gradlens.operators.operator import GradientOperator
from gradlens.parts.assembly import BatchAssembly, Whole, need_gradients
from gradlens.parts.part import BatchPart, Results, smaller
from gradlens.quantities.step import REMOVED, Step
from gradlens.reductions import Reduction
from gradlens.samples.planner import UNUSED


class StepGradients:
    """Per-sample gradients ``of_pass``, the backward pass in a context, and of its step's batch.

    ``reductions`` are of the whole batch, and ``own`` ones of this backward pass. ``is_part`` says
    that the batch has several parts. ``projections`` are those of the step before.
    """

    def __init__(
        self,
        setting: Setting,
        assembly: BatchAssembly,
        context: StepContext,
        *,
        is_part: bool,
        reductions: Sequence[Reduction],
        own: Sequence[Reduction],
        retain: bool,
        projections: Tensor | None,
        contain: Contain,
        needs_losses: bool,
    ) -> None:
        self._setting = setting
        self._assembly = assembly
        self._context = context
        self._reductions = reductions
        self._own = own
        self._projections = projections
        self._contain = contain
        self.is_part = is_part
        self._of_part: Mapping[str, Reduction] = {}
        if self.is_part:
            self._of_part = assembly.part_reductions(reductions, context.accumulating)
        of_batch = self._of_part.values() if self.is_part else reductions
        self.of_pass = Gradients(
            setting,
            context.info,
            reductions=dict.fromkeys([*of_batch, *own]),
            retain=retain and not self.is_part,
            keep=self._keep(retain),
            contain=contain,
            needs_losses=needs_losses,
        )

    def _keep(self, retain: bool) -> Callable[[GradientOperator], GradientOperator] | None:
        """What is made of operators that are kept until all parts of the batch are there."""
        if not self.is_part or not (retain or need_gradients(self._reductions)):
            return None
        several = self._assembly.is_one_of_several(self._context.accumulating)
        return smaller if several else lambda each: each

    def finish(self, individual_losses: Tensor | None, without_losses: str) -> Whole | None:
        """Reduce what is left: the whole batch, or ``None`` if another part of it follows.

        ``without_losses`` is the reason why there are no ``individual_losses``.
        """
        reducer, accumulating = self.of_pass.reducer, self._context.accumulating
        reducer.finish()
        part = self._part(individual_losses, without_losses)
        if not self.is_part:
            return Whole(part, reducer.values, reducer.failed, reducer.retained)
        kept = reducer.take_kept()
        self._assembly.add(part, kept, self._reductions, accumulating, self._contain)
        return None if accumulating else self._assembly.whole(self._reductions, self._contain)

    def _part(self, individual_losses: Tensor | None, without_losses: str) -> BatchPart:
        reducer, loss = self.of_pass.reducer, unscaled_loss(self._context.info)
        if self.is_part and loss is not None:  # without its graph, and as precise as a sum may be
            loss = loss.detach().cpu().double().reshape(())
        values, failed, of_part = reducer.values, reducer.failed, self._of_part
        return BatchPart(
            samples=self.of_pass.batch.samples,
            weight=self.of_pass.called_with,
            loss=loss,
            individual_losses=individual_losses,
            without_losses=without_losses,
            results=Results(
                {key: values[each] for key, each in of_part.items()},
                {key: failed[each] for key, each in of_part.items() if each in failed},
            ),
            covered=frozenset(reducer.covered),
            missing=self._missing(),
            coupling=self.of_pass.coupling,
            projections=None if self._context.accumulating else self._projections,
        )

    def _missing(self) -> Mapping[str, str]:
        """Why parameters have no per-sample gradients of this backward pass."""
        found, covered = self.of_pass.collector.unavailable, self.of_pass.reducer.covered
        absent = [name for name in self._setting.parameters if name not in covered]
        reasons = {name: found.get(name, UNSEEN) for name in absent}
        gone = changed_parameters(self._setting).removed if UNUSED in reasons.values() else ()
        return reasons | {n: REMOVED for n in gone if reasons.get(n) == UNUSED}

    def for_step(self, whole: Whole) -> dict[str, Any]:
        """What ``Step`` has of per-sample gradients, by the names of its fields."""
        missing, gradients = whole.part.missing, self._setting.parameters
        present = [(name, gradients[name].grad) for name in missing]
        return {
            "batch_size": whole.part.samples,
            "reduced": whole.values,
            "uncovered": self._uncovered(whole.part),
            "failed": whole.failed,
            "lacking": frozenset(n for n, g in present if g is not None and has_nonzero(g)),
            "missing": missing,
        }

    def _uncovered(self, whole: BatchPart) -> str:
        """Why no parameter has per-sample gradients; empty if one has."""
        if whole.covered or not whole.missing:
            return ""
        frozen = self._frozen()
        name, reason = min(whole.missing.items(), key=lambda each: each[0] in frozen)
        return f"no parameter has per-sample gradients; of {name}: {reason}"

    def _frozen(self) -> tuple[str, ...]:
        return tuple(name for name, p in self._setting.parameters.items() if not p.requires_grad)

    def outcome(self, error: BaseException | None, step: Step | None) -> Outcome:
        """What observers get of this backward pass, also if an ``error`` has come of it."""
        reducer = self.of_pass.reducer
        if self._own:
            reducer.finish()
        given = self._own if self.is_part else (*self._reductions, *self._own)
        values, failed = reducer.values, reducer.failed
        known = {each: values[each] for each in given if each not in failed}
        without = ""
        if self._own:
            reasons = [failed[each] for each in self._own if each in failed]
            without = next(iter((*reasons, *self._missing().values())), "")
        return Outcome(error, known, self.of_pass.batch.samples, without, step)

    def coverage(self, whole: BatchPart) -> Coverage:
        """Which parameters have per-sample gradients at this step."""
        frozen, known_by = self._frozen(), self.of_pass.batch.known_by
        return Coverage(
            {name: reason for name, reason in whole.missing.items() if name not in frozen},
            tuple(sorted(whole.coupling)),
            self._setting.batchnorm,
            whole.samples,
            PARTS + known_by if self.is_part else known_by,
            frozen,
        )

    def notes(self, whole: Whole) -> Iterator[str]:
        """What the user should know of this step."""
        info = self._context.info
        factor = self.of_pass.batch.factor / loss_scale(info)
        if factor > ONE and "scaler" not in info:
            yield SCALED.format(factor=f"{factor:.6g}")
        if self.of_pass.beside and not self.is_part:
            yield BESIDE.format(names=few(self.of_pass.beside))


ONE = 1.01
"""A factor that isn't larger may be one: a loss over three is rounded, in bfloat16 by 0.2 %."""

SCALED = (
    "backward was called on {factor} times the loss. Per-sample gradients are those of the loss "
    "itself; GradNorm and others that read p.grad use it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
PARTS = "all parts of the batch; of each, "
BESIDE = (
    "the samples' gradients don't add up to p.grad of {names}: the loss has a term that isn't a "
    "sum over samples (a regulariser). Quantities describe the part that comes from the samples"
)


class ChangedParameters(NamedTuple):
    """How the model's parameters differ from those that the cockpit has found at the start."""

    untracked: list[str]
    """Names of those that need a gradient and have been frozen, or absent, at the start."""
    removed: list[str]
    """Names of tracked ones that the model doesn't have any more."""


def changed_parameters(setting: Setting) -> ChangedParameters:
    """Compare the model's present parameters with those that are tracked."""
    if setting.model is None:
        return ChangedParameters([], [])
    leaves = setting.leaves
    tracked = {id(leaf) for leaf in [*setting.parameters.values(), *leaves.values()]}
    present = dict(setting.model.named_parameters())
    found = {id(parameter) for parameter in present.values()}
    return ChangedParameters(
        [name for name, p in present.items() if p.requires_grad and id(p) not in tracked],
        [name for name, p in setting.parameters.items() if not found & {id(p), id(leaves[name])}],
    )
