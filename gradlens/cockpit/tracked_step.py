"""One step under a cockpit: from entering its context to the recorded values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor

from gradlens.cockpit.backpack_step import BackpackStep
from gradlens.cockpit.curvature_phase import compute_curvature
from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.values import OF_OPTIMIZERS, StepValues
from gradlens.gradients.collect import OTHER_LOSS
from gradlens.gradients.gradients import Gradients, sample_axes
from gradlens.gradients.loss_factor import (
    BackwardCall,
    LossFactor,
    loss_scale,
    unscaled_loss,
)
from gradlens.gradients.per_sample_gradients import UNSEEN
from gradlens.graph.scaler import GradientScale
from gradlens.graph.uncompiled import ran_compiled, uncompiled_calls
from gradlens.history.coverage import Coverage, few
from gradlens.messages import log
from gradlens.numerics.noise_scales import PartSums
from gradlens.numerics.shards import has_nonzero
from gradlens.numerics.unavailable import UnavailableError
from gradlens.observers.observer import Observer, Outcome, StepContext
from gradlens.operators.operator import GradientOperator
from gradlens.parts.apart import PartGradients, PartOfBatch
from gradlens.parts.assembly import Whole, need_gradients
from gradlens.parts.part import BatchPart, Keyed, Results, smaller
from gradlens.quantities.quantity import Needed
from gradlens.quantities.step import NEW_COCKPIT, REMOVED, Step
from gradlens.reductions import Reduction
from gradlens.samples.planner import UNUSED
from gradlens.signals.recorded_calls import Made
from gradlens.torch_private import compiler_is_imported, uncompiled_backward


class TrackedStep:
    """One step's context, as ``Cockpit.__call__`` returns it.

    It calls the active quantities in their phases before and after the backward pass, lets those
    wait that have later ones (``Updates``), and tells the observers. What fails in them, or in the
    work for all of them, ends in ``Boundary``: their values are NaN with the reason.

    Per-sample ``gradients`` are those of the backward pass in the context. They are reduced by the
    ``reductions`` of the step, and by the observers' ``own`` ones; if the batch has several parts,
    those ``of_part`` are computed here, and joined to those of the whole by ``BatchAssembly``.
    """

    _is_entered = True  # until it is made

    def __init__(
        self,
        tracking: Tracking,
        global_step: int,
        extensions: Sequence[BackpropExtension],
        info: Mapping[str, Any],
        accumulating: bool,
        debug: bool,
    ) -> None:
        self._tracking = tracking
        scale = GradientScale(info.get("scaler"), info.get("optimizer"))
        self._context = StepContext(global_step, info, accumulating, scale)
        self._observers: Sequence[Observer] = ()
        self._by_user = extensions
        self._debug = debug
        self._values = StepValues(global_step, tracking.boundary)
        self._reductions: Sequence[Reduction] = ()
        self._own: Sequence[Reduction] = ()
        self._of_part: Keyed = {}
        self._is_tracked = self._is_part = self._finds_losses = False
        self._backpack: BackpackStep | None = None
        self._gradients: Gradients | None = None
        self._factor: LossFactor | None = None
        self._start: Mapping[str, Tensor] | None = None
        self._step: Step | None = None
        self._add_up: Tensor | None = None
        self._apart: PartGradients | None = None
        self._contexts: ExitStack | None = None
        self._is_entered = False

    def __del__(self) -> None:
        """Say so if it was never entered."""
        if not (self._is_entered or sys.is_finalizing()):
            self._tracking.run.note(self._context.global_step, NOT_ENTERED)

    # On entering.

    def __enter__(self) -> None:
        tracking, step, info = self._tracking, self._context.global_step, self._context.info
        boundary, updates, assembly = tracking.boundary, tracking.updates, tracking.assembly
        if self._is_entered:
            raise RuntimeError(ENTERED)
        self._is_entered = True
        try:
            with boundary.contain("the beginning of a step", self._refuse_all):
                tracking.begin_step(step)
                active = tracking.active_at(step)
                if active:
                    self._values = StepValues(step, boundary, active)
                waits = updates.interval is not None
                self._is_tracked = bool(self._values.active) or waits or assembly.exchanges_always
                if self._is_tracked and tracking.may_end_alone:
                    assembly.leave_out()
                    self._refuse_all(MAY_END_ALONE)
                if tracking.budget is None or tracking.is_look(step):
                    tracking.optimizer_steps.follow(info.get("optimizer"))
                    has_ids = "ids" in info
                    self._observers = [o for o in tracking.observers if has_ids or not o.of_ids]
                    boundary.tell(self._observers, lambda each: each.enter(self._context))
                else:
                    tracking.optimizer_steps.rest()
                    boundary.tell(tracking.observers, lambda each: each.skip())
            self._own = [*chain.from_iterable(each.reductions for each in self._observers)]
            if self._values.active:
                self._values.check_needs(info, boundary.strict or not tracking.run.has_recorded)
            if self._by_user:  # what BackPACK says of the user's own extensions is raised
                self._prepare()
            elif self._is_tracked or self._own:
                with boundary.contain("preparing a step", self._refuse_all):
                    self._prepare()
            else:
                tracking.setting.buffer.free()
            tracking.costs.begin_backward()
        except BaseException:
            self._abandon()
            raise

    def _prepare(self) -> None:
        tracking, context = self._tracking, self._context
        if self._debug:
            names = ", ".join(quantity.name for quantity in self._values.active) or "nothing"
            log(f"[Step {context.global_step}] active: {names}")
        if self._by_user or not tracking.of_backpack.isdisjoint(self._values.active):
            step, setting = context.global_step, tracking.setting
            self._backpack = BackpackStep(
                step, self._by_user, self._values, setting, tracking.boundary
            )
        with ExitStack() as stack:
            stack.enter_context(uncompiled_backward())
            if "loss" not in context.info and compiler_is_imported():
                self._run_uncompiled(stack)
            if self._values.before_backward:
                compute_curvature(tracking, context, self._values)
            waiting = {} if context.accumulating else self._values.waiting
            if waiting:
                copied = any(each.phases[-1] not in OF_OPTIMIZERS for each in waiting)
                parameters = tracking.setting.parameters if copied else {}
                self._start = {name: p.detach().clone() for name, p in parameters.items()}
            self._enter_contexts(stack)
            self._contexts = stack.pop_all()
        scale = context.scale.of_backward
        tracking.begin_backward(context.global_step, scale, self._sample_axes)

    def _run_uncompiled(self, stack: ExitStack) -> None:
        """Run forward passes in this context uncompiled, such as that of a whole training step.

        A checkpoint must compute again what it has computed: if that was compiled, it stays so.
        """
        uncompiled = stack.enter_context(ExitStack())
        uncompiled.enter_context(uncompiled_calls())

        def check(root: Tensor) -> None:
            with self._tracking.boundary.contain("the beginning of a backward pass"):
                if ran_compiled(root):
                    uncompiled.close()

        stack.enter_context(BackwardCall(check))

    def _sample_axes(self, made: Iterable[Made]) -> Mapping[Made, int]:
        """The axes that count the samples of tensors that nodes have made, if they are known."""
        setting, info, found = self._tracking.setting, self._context.info, dict[Made, int]()
        with self._tracking.boundary.contain("finding the samples of layers' outputs"):
            if "loss" in info:
                found = sample_axes(setting, info["loss"], info, made)
        return found

    def _enter_contexts(self, stack: ExitStack) -> None:
        tracking, interval = self._tracking, self._tracking.updates.interval
        info, values, accumulating = self._context.info, self._values, self._context.accumulating
        # In the same order in all processes.
        found = values.reductions if interval is None else [*values.reductions, interval.reduction]
        self._reductions = tuple(dict.fromkeys(found))
        wants_losses = values.needs("individual_losses")
        wants_losses |= interval is not None and interval.needs_losses
        self._finds_losses = wants_losses and info.get("individual_losses") is None
        due = (each for each in values.computed if each.name not in values.recorded)
        later = [each.name for each in due if each.returns_to_start]
        tracking.assembly.exchange_later(later)
        self._is_part = tracking.assembly.has_parts(accumulating)
        if self._is_part:
            self._of_part = tracking.assembly.part_reductions(self._reductions, accumulating)
        retain = any(quantity.retains_gradients for quantity in values.computed)
        needed = (*self._reductions, *self._own, retain, self._is_part, self._finds_losses)
        if any(needed):
            of_batch = self._of_part.values() if self._is_part else self._reductions
            of_samples = (*self._reductions, *self._own, retain, self._finds_losses)
            self._factor = self._gradients = (Gradients if any(of_samples) else PartOfBatch)(
                tracking.setting,
                info,
                reductions=dict.fromkeys([*of_batch, *self._own]),
                retain=retain and not self._is_part,
                keep=self._keep(retain),
                contain=tracking.boundary.contain,
                needs_losses=self._finds_losses,
            )
        elif values.needs("optimizer"):
            self._factor = LossFactor(info)
        if self._factor is not None:
            stack.enter_context(self._factor.finding())
        if self._is_part and values.needs(PARTS_APART):
            leaves = tracking.setting.leaves
            self._apart = PartGradients(leaves, not tracking.assembly.has_begun)
            stack.enter_context(self._apart.measuring())
        if self._backpack is not None:
            stack.enter_context(self._backpack.running(self._debug))

    def _keep(self, retain: bool) -> Callable[[GradientOperator], GradientOperator] | None:
        """What is made of operators that are kept until all parts of the batch are there."""
        if not self._is_part or not (retain or need_gradients(self._reductions)):
            return None
        several = self._tracking.assembly.is_one_of_several(self._context.accumulating)
        return smaller if several else lambda each: each

    def _refuse_all(self, reason: str) -> None:
        self._values.refuse_all(reason)
        self._tracking.updates.refuse_interval(reason)

    # On leaving.

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        tracking, boundary, context = self._tracking, self._tracking.boundary, self._context
        try:
            tracking.costs.end_backward([each.name for each in self._values.active])
            once = 0.0 if self._gradients is None else self._gradients.planning_seconds
            with boundary.contain("the end of a step"):
                try:
                    self._finish(error)
                finally:
                    if self._observers:
                        outcome = self._outcome(error)
                        boundary.tell(self._observers, lambda each: each.leave(context, outcome))
                    self._release()
                    tracking.end_step(context.global_step, context.accumulating and error is None)
            tracking.costs.end_step(once)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Undo what an exception of this context's own has left undone."""
        if self._contexts is not None:
            self._contexts.close()
        self._tracking.assembly.interrupt()
        self._release()

    def _interrupt(self, error: BaseException) -> None:
        """Drop the batch's parts, since an exception leaves the context.

        After a whole backward pass, other processes may have left theirs without one, and would
        wait for this one's part.
        """
        assembly, gradients = self._tracking.assembly, self._gradients
        accumulating = self._context.accumulating
        are_complete = gradients is not None and gradients.reducer.has_seen_all
        if are_complete and not accumulating and isinstance(error, Exception):
            reason = LEFT_EARLY.format(error=type(error).__name__)
            refused = reason, self._reductions, accumulating
            self._tracking.boundary.attempt(EXCHANGE, None, assembly.refuse, *refused)
        assembly.interrupt()

    def _release(self) -> None:
        if self._gradients is not None:
            self._gradients.release()
        if self._backpack is not None:
            self._backpack.release()
        self._gradients = self._factor = self._backpack = self._start = None
        self._step = self._add_up = self._apart = None

    def _finish(self, error: BaseException | None) -> None:
        """End the backward pass, and record what the quantities have found."""
        tracking, boundary, values = self._tracking, self._tracking.boundary, self._values
        step, accumulating = self._context.global_step, self._context.accumulating
        if self._contexts is not None:
            work = "the end of a backward pass"
            boundary.attempt(work, self._refuse_all, self._contexts.close)
        if error is not None:
            self._interrupt(error)
        elif self._backpack is not None and self._backpack.lacking:
            tracking.run.note(step, self._backpack.lacking)
        if error is not None or not self._is_tracked:
            if not accumulating:
                tracking.assembly.drop()  # what an exception has left of an untracked step
            return
        if not values.failure:
            boundary.attempt("the end of a step", self._refuse_all, self._compute)
        if values.failure:
            refused = values.failure, self._reductions, accumulating
            boundary.attempt(EXCHANGE, None, tracking.assembly.refuse, *refused)
        if not accumulating:
            boundary.attempt("recording a step", None, tracking.run.record, step, values.recorded)

    def _outcome(self, error: BaseException | None) -> Outcome:
        """What observers get of this context, also if an ``error`` has left it."""
        gradients = self._gradients
        if gradients is None:
            return Outcome(error, step=self._step)
        if self._own:
            gradients.reducer.finish()
        values, failed = gradients.reducer.values, gradients.reducer.failed
        given = self._own if self._is_part else (*self._reductions, *self._own)
        known = {each: values[each] for each in given if each not in failed}
        reasons = [failed[each] for each in self._own if each in failed]
        if self._own:
            reasons += self._missing(gradients).values()
        without = next(iter(reasons), "")
        return Outcome(error, known, gradients.batch.samples, without, self._step)

    def _compute(self) -> None:
        tracking, whole = self._tracking, self._whole()
        if whole is None or self._context.accumulating:
            return
        step = self._step_of(whole)
        if self._add_up is not None and not step.measured(self._losses_add_up):
            step = replace(step, individual_losses=None, without_losses=OTHER_LOSS)
        self._step = step
        self._add_notes(step, whole)
        with torch.no_grad():
            if tracking.updates.interval is not None:
                work, ends = "the interval between two steps", tracking.updates.end_interval
                tracking.boundary.attempt(work, None, ends, step, whole.part.projections)
            self._values.compute_after(step)
            if self._start is not None:
                self._await_update(step, whole, self._start)

    def _whole(self) -> Whole | None:
        """Reduce what is left: the whole batch, or ``None`` if another part of it follows."""
        gradients, assembly = self._gradients, self._tracking.assembly
        accumulating = self._context.accumulating
        losses, without_losses = self._individual_losses()
        loss = unscaled_loss(self._context.info)
        if gradients is None:
            samples = self._context.info.get("batch_size")
            return Whole(BatchPart(samples, 1.0, 1, loss, losses, without_losses))
        reducer = gradients.reducer
        reducer.finish()
        values, failed = reducer.values, reducer.failed
        keyed = self._of_part.items()
        if self._is_part and loss is not None:  # without its graph, and as precise as a sum may be
            loss = loss.detach().cpu().double().reshape(())
        interval = self._tracking.updates.interval
        before = None if interval is None or accumulating else interval.update
        part = BatchPart(
            samples=gradients.batch.samples,
            weight=gradients.called_with,
            loss=loss,
            individual_losses=losses,
            without_losses=without_losses,
            results=Results(
                {key: values[each] for key, each in keyed},
                {key: failed[each] for key, each in keyed if each in failed},
            ),
            covered=frozenset(reducer.covered),
            missing=self._missing(gradients),
            coupling=gradients.coupling,
            groups=self._context.info.get("groups"),
            projections=None if before is None else before.projections,
            sums=None if self._apart is None else self._sums_of_part(self._apart, gradients),
        )
        if not self._is_part:
            return Whole(part, values, failed, reducer.kept)
        contain = self._tracking.boundary.contain
        assembly.add(part, reducer.kept, self._reductions, accumulating, contain)
        return None if accumulating else assembly.whole(self._reductions, contain)

    def _sums_of_part(self, apart: PartGradients, gradients: Gradients) -> PartSums | None:
        """What is known of this part's own gradients; ``None`` without any samples, too."""
        samples = gradients.batch.samples
        if samples is None:  # as of compiled code, whose graph doesn't say
            samples = self._context.info.get("batch_size")
        if samples == 0:
            return None
        return apart.sums(gradients.called_with, samples, self._tracking.setting.loss_reduction)

    def _missing(self, gradients: Gradients) -> Mapping[str, str]:
        """Why parameters have no per-sample gradients of this backward pass, if some are wanted."""
        if isinstance(gradients, PartOfBatch):
            return {}
        found, covered = gradients.collector.unavailable, gradients.reducer.covered
        absent = [name for name in self._tracking.setting.parameters if name not in covered]
        reasons = {name: found.get(name, UNSEEN) for name in absent}
        gone = self._tracking.changed_parameters()[1] if UNUSED in reasons.values() else ()
        return reasons | {n: REMOVED for n in gone if reasons.get(n) == UNUSED}

    def _individual_losses(self) -> tuple[Tensor | None, str]:
        """ℓₙ of this part of the batch, or why they aren't known."""
        known: Tensor | None = self._context.info.get("individual_losses")
        if known is not None or not self._finds_losses:
            return None if known is None else known.detach(), ""
        assert self._factor is not None
        assert self._gradients is not None
        try:
            _ = self._factor.factor  # what isn't certain has its reason there
            found, add_up = self._gradients.losses()
        except UnavailableError as reason:
            said = "individual_losses=" in str(reason)
            return None, str(reason) if said else PASS_LOSSES.format(why=reason)
        if self._is_part:
            return (found, "") if bool(add_up) else (None, OTHER_LOSS)
        self._add_up = add_up  # read from the device with all else that is measured
        return found, ""

    def _losses_add_up(self, _: Step) -> Tensor | None:
        """Whether the losses of samples that were read off the graph add up to the loss."""
        return self._add_up

    def _loss_weight(self, whole: BatchPart) -> float:
        """That of ``Step``; a NaN with the reason if it isn't known."""
        factor, scale = self._factor, self._context.scale.of_backward
        if self._is_part:
            return whole.weight / scale
        if factor is None:
            return 1.0
        found: float = self._tracking.boundary.value(
            "the loss's weight", lambda: factor.weight / scale
        )
        return found

    def _step_of(self, whole: Whole) -> Step:
        tracking, context, part = self._tracking, self._context, whole.part
        parameters, interval = tracking.setting.parameters, tracking.updates.interval
        signals = tracking.signals_of(context.global_step)
        untracked, removed = tracking.changed_parameters()
        present = [(name, parameters[name].grad) for name in part.missing]
        return Step(
            context.global_step,
            parameters,
            tracking.setting.loss_reduction,
            batch_size=part.samples,
            loss=part.loss,
            individual_losses=part.individual_losses,
            optimizer=context.info.get("optimizer"),
            info={**context.info, "groups": part.groups} if self._is_part else context.info,
            reduced=whole.values,
            signals=signals,
            uncovered=_uncovered(part, tracking.frozen),
            failed=whole.failed,
            loss_weight=self._loss_weight(part),
            removed=removed,
            without_losses=part.without_losses,
            untracked=untracked,
            lacking=frozenset(n for n, g in present if g is not None and has_nonzero(g)),
            missing=part.missing,
            gradient_scale=context.scale,
            parts=part.sums,
            measures=(
                self._losses_add_up,
                *(measure for each in self._values.computed for measure in each.measures),
                *(() if interval is None else (interval.changed,)),
                *(measure for each in self._observers for measure in each.measures),
            ),
        )

    def _add_notes(self, step: Step, whole: Whole) -> None:
        """Record which parameters have per-sample gradients, and what the user should know."""
        tracking, gradients, notes = self._tracking, self._gradients, list(step.signals.notes)
        if step.untracked:
            notes.append(UNTRACKED.format(names=few(step.untracked)))
        if step.removed:
            notes.append(f"{few(step.removed)}: {REMOVED}")
        if gradients is not None and whole.values:
            part, frozen, known_by = whole.part, tracking.frozen, gradients.batch.known_by
            coverage = Coverage(
                {name: reason for name, reason in part.missing.items() if name not in frozen},
                tuple(sorted(part.coupling)),
                tracking.setting.batchnorm,
                part.samples,
                PARTS + known_by if self._is_part else known_by,
                frozen,
            )
            tracking.run.take_in(step.global_step, "coverage", coverage)
        if gradients is not None:
            factor = gradients.batch.factor / loss_scale(step.info)
            is_mean = tracking.setting.loss_reduction == "mean"
            is_known = "scaler" in step.info
            if factor > ONE and not is_known:
                notes.append(SCALED.format(factor=f"{factor:.6g}"))
            is_known |= "loss_scale" in step.info or not is_mean or not gradients.is_divided
            if self._is_part and whole.part.weight > ONE >= factor and not is_known:
                notes.append(DIVIDED)
            if not self._is_part and step.gradient_scale.of_backward > ONE > gradients.batch.factor:
                notes.append(NOT_SCALED)
            beside = [name for name in gradients.beside if name not in whole.part.missing]
            if beside and not self._is_part:
                notes.append(BESIDE.format(names=few(beside)))
        for note in notes:
            tracking.run.note(step.global_step, note)

    def _await_update(self, step: Step, whole: Whole, start: Mapping[str, Tensor]) -> None:
        waiting = self._values.waiting
        if not waiting:
            return
        of_losses = [each.name for each in waiting if "individual_losses" in each.needs]
        if of_losses and step.individual_losses is None and not step.uncovered:
            text = NO_INDIVIDUAL_LOSSES.format(
                quantities=", ".join(of_losses), why=step.without_losses
            )
            self._tracking.run.note(step.global_step, text)
        self._tracking.updates.wait(step, waiting, whole, start)


def _uncovered(part: BatchPart, frozen: Collection[str]) -> str:
    """Why no parameter has per-sample gradients; empty if one has."""
    if part.covered or not part.missing:
        return ""
    name, reason = min(part.missing.items(), key=lambda each: each[0] in frozen)
    return f"no parameter has per-sample gradients; of {name}: {reason}"


PARTS_APART: Needed = "gradients_of_parts"
EXCHANGE = "the exchange with other processes"

ONE = 1.01
"""A factor that isn't larger may be one: a loss over three is rounded, in bfloat16 by 0.2 %."""

SCALED = (
    "backward was called on {factor} times the loss. Per-sample gradients are those of the loss "
    "itself; GradNorm and others that read p.grad use it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
NOT_SCALED = (
    "the loss that was passed was multiplied by the scaler before, or backward was called without "
    "the scaler's factor, and values are those of what was passed: pass the loss itself, and call "
    "backward on scaler.scale(loss)"
)
DIVIDED = (
    "the losses of a step's micro-batches were divided before they were passed, and values "
    "describe the mean of what was passed: pass the factor as loss_scale=... to the context, such "
    "as loss_scale=1/4 for four micro-batches"
)
PARTS = "all parts of the batch; of each, "
BESIDE = (
    "the samples' gradients don't add up to p.grad of {names}: the loss has a term that isn't a "
    "sum over samples (a regulariser). Quantities describe the part that comes from the samples"
)
UNTRACKED = (
    "{names} need a gradient and are not tracked, since they were frozen, or not yet in the model, "
    f"when the cockpit was made: {NEW_COCKPIT}"
)
ENTERED = (
    "a context is entered once, for one step: call the cockpit anew for each step, as in "
    "`with cockpit(step, loss=loss):`"
)
NOT_ENTERED = (
    "the cockpit was called, and the context that it has returned hasn't been entered, so that "
    "nothing is recorded: call backward inside `with cockpit(step, loss=loss):`"
)
LEFT_EARLY = "a {error} has left the context of one process, whose part of the batch is unknown"
MAY_END_ALONE = (
    "since DistributedDataParallel.join was entered, processes may have different numbers of "
    "steps, and none can wait for what others have found: give all of them the same number of "
    "batches, by drop_last=True or a DistributedSampler, and leave join out"
)
NO_INDIVIDUAL_LOSSES = "{quantities} can't be found without per-sample losses: {why}"
PASS_LOSSES = (
    "{why}. Pass the losses of single samples, of shape [N], to the context, as "
    "individual_losses=..."
)
