"""One step under a cockpit: from entering its context to the recorded values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

from gradlens.backpack_adapter.context import with_extensions
from gradlens.backpack_adapter.loss_modules import PerSampleLosses
from gradlens.cockpit.autopsy import Autopsy
from gradlens.cockpit.boundary import Refuse
from gradlens.cockpit.extensions import (
    SavedResults,
    StepExtensions,
    needs_layer_hooks,
    step_extensions,
)
from gradlens.cockpit.gradients import StepGradients
from gradlens.cockpit.model import changed_parameters
from gradlens.cockpit.plain import recordable
from gradlens.cockpit.start_point import StartPoint
from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.updates import WaitingQuantity
from gradlens.curvature.curvature import Curvature
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.curvature.probe import Probe
from gradlens.gradients.gradients import sample_axes
from gradlens.gradients.loss_factor import (
    BackwardCall,
    LossFactor,
    loss_scale,
    unscaled_loss,
)
from gradlens.graph.passes import why_not_to_pass
from gradlens.graph.scaler import GradientScale
from gradlens.graph.torch_private import outside_modes, uncompiled_backward
from gradlens.graph.uncompiled import ran_compiled, uncompiled_calls
from gradlens.graph.undisturbed import GlobalState, own_pass
from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.messages import log
from gradlens.numerics.shards import is_distributed
from gradlens.numerics.unavailable import UnavailableError
from gradlens.parts.kept import KeptGradients
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.quantities.step import NEW_COCKPIT, REMOVED, Step
from gradlens.reductions import Reduction
from gradlens.signals.recorded_calls import Made


@dataclass
class Entry:
    """Whether the context of a step was entered."""

    global_step: int
    is_entered: bool = False


class IdleStep:
    """The context of a step for which the budget has no means, in which nothing is done.

    It passes a tenth of the functions that another one does: most steps are such.
    """

    def __init__(self, tracking: Tracking, global_step: int) -> None:
        self._tracking = tracking
        self._global_step = global_step

    def __enter__(self) -> None:
        try:
            self._tracking.begin_idle_step(self._global_step)
        except Exception as error:
            self._tracking.boundary.report("the beginning of a step", error)

    def __exit__(self, *_: object) -> None:
        try:
            self._tracking.end_idle_step(self._global_step)
        except Exception as error:
            self._tracking.boundary.report("the end of a step", error)


class TrackedStep:
    """One step's context, as ``Cockpit.__call__`` returns it.

    It calls the active quantities in their phases before and after the backward pass, and lets
    those wait that have later ones (``Updates``). What fails in them, or in the work for all of
    them, ends in ``Boundary``: their values are NaN with the reason.
    """

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
        self._global_step = global_step
        self._by_user = extensions
        self._info = info
        self._accumulating = accumulating
        self._debug = debug
        self.entry = Entry(global_step)
        self._active: tuple[Quantity, ...] = ()
        self._extensions: StepExtensions | None = None
        self._saved: SavedResults | None = None
        self._gradients: StepGradients | None = None
        self._losses: PerSampleLosses | None = None
        self._losses_reason = ""
        self._factor: LossFactor | None = None
        self._autopsy: Autopsy | None = None
        self._values: dict[str, Any] = {}
        self._earlier: dict[str, Any] = {}
        self._start: StartPoint | None = None
        self._failure = ""
        self._contexts = ExitStack()
        self._gradient_scale = GradientScale()
        self._global_state = GlobalState()

    def __enter__(self) -> None:
        try:
            self._enter()
        except BaseException:
            self._abandon()
            raise

    def _enter(self) -> None:
        tracking, step = self._tracking, self._global_step
        if self.entry.is_entered:
            raise RuntimeError(ENTERED)
        self.entry.is_entered = True
        tracking.boundary.begin_step(step)
        self._gradient_scale = GradientScale(self._info.get("scaler"), self._info.get("optimizer"))
        with tracking.boundary.contain("the beginning of a step", self._refuse_all):
            tracking.begin_step(step, self._info)
            self._active = tracking.forecast.active_at(step, tracking.boundary)
            if self._is_tracked and tracking.may_end_alone:
                tracking.assembly.leave_out()
                self._refuse_all(MAY_END_ALONE)
        try:
            # Without a context of the boundary, which costs more than this.
            with outside_modes():
                self._begin_autopsy()
        except Exception as error:
            tracking.boundary.report("reading the loss", error)
        self._check_user_hooks()
        self._check_needs(tracking.boundary.strict or not tracking.run.has_recorded)
        if self._is_tracked or self._by_user:
            self._prepare_contained()
        else:
            tracking.setting.buffer.free()
        if tracking.budget is not None:
            tracking.budget.begin_backward()

    def _begin_autopsy(self) -> None:
        """Look for a jump of the loss, and for what is behind it."""
        tracking, step = self._tracking, self._global_step
        if "ids" in self._info:
            with tracking.boundary.contain("the losses of single samples"):
                tracking.sample_log.add(step, self._info)
        if tracking.autopsies is None:
            return
        jump = tracking.autopsies.begin_step(step, self._info)
        if jump is not None:
            contain = tracking.boundary.contain
            self._autopsy = Autopsy(step, jump, self._info, tracking.autopsies.part, contain)
            self._global_state.keep_gradients(tracking.setting.leaves.values())
            self._autopsy.begin(tracking.setting)

    @property
    def _is_tracked(self) -> bool:
        """Whether there is something to compute, or to exchange with other processes."""
        tracking = self._tracking
        waits = tracking.updates.interval is not None
        return bool(self._active) or waits or tracking.assembly.exchanges_always

    def _prepare_contained(self) -> None:
        """What BackPACK says of the user's own extensions is raised, as without gradlens."""
        if self._by_user:
            self._prepare()
            return
        with self._tracking.boundary.contain("preparing a step", self._refuse_all):
            self._prepare()

    def _prepare(self) -> None:
        step, model = self._global_step, self._tracking.setting.model
        self._global_state.keep_gradients(self._tracking.setting.leaves.values())
        self._check_layer_hooks()
        if self._debug:
            log(f"[Step {step}] active: {', '.join(q.name for q in self._active) or 'nothing'}")
        self._extensions = step_extensions(self._active, self._by_user, model, step)
        if self._by_user:
            tracked = self._tracking.setting.parameters.values()
            self._saved = SavedResults(self._by_user, tracked)
        with ExitStack() as stack:
            if self._needs_graph():
                self._run_uncompiled(stack)
            self._before_backward(self._extensions)
            if self._waiting():
                updates, optimizer = self._tracking.updates, self._info.get("optimizer")
                self._start = updates.start_point(optimizer)
            self._enter_contexts(stack, self._extensions)
            self._contexts = stack.pop_all()
        scale = self._gradient_scale.of_backward
        self._tracking.layers.begin(step, scale, self._sample_axes)

    def _sample_axes(self, made: Mapping[Made, tuple[int, ...]]) -> Mapping[Made, int]:
        """The axes that count the samples of tensors that nodes have made, if they are known."""
        setting, loss, found = self._tracking.setting, self._info.get("loss"), dict[Made, int]()
        with self._tracking.boundary.contain("finding the samples of layers' outputs"):
            if loss is not None:
                found = sample_axes(setting, loss, self._info, made)
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._exit(error)
        except BaseException:
            self._abandon()
            raise
        if error is not None and not isinstance(error, Exception):
            self._global_state.restore()

    def _abandon(self) -> None:
        """Undo what an exception, perhaps an interrupt in the midst of it, has left undone."""
        self._contexts.close()
        self._tracking.assembly.interrupt()
        self._release()
        self._global_state.restore()

    def _exit(self, error: BaseException | None) -> None:
        tracking, boundary = self._tracking, self._tracking.boundary
        if tracking.budget is not None:
            tracking.budget.end_backward(self._active)
        with boundary.contain("the end of a backward pass", self._refuse_all):
            self._contexts.close()
        if error is not None:
            self._interrupt(error)
        once = 0.0 if self._gradients is None else self._gradients.labelling_seconds
        try:
            if error is None and self._by_user:
                self._check_user_results()
            if error is None and self._is_tracked:
                self._finish()
        finally:
            is_complete = not self._accumulating and error is None
            goes_on = self._accumulating and error is None
            with boundary.contain("the end of a step"):
                self._end_autopsy(error)
                start = self._start
                self._release()
                if is_complete and start is not None:
                    tracking.updates.finish_start(start)
                scale = self._gradient_scale
                tracking.end_step(self._global_step, self._info, scale, is_complete, goes_on)
            if tracking.budget is not None:
                tracking.budget.end_step(once)

    def _interrupt(self, error: BaseException) -> None:
        """Drop the batch's parts, since an exception leaves the context.

        After a whole backward pass, other processes may have left theirs without one, and would
        wait for this one's part.
        """
        assembly, gradients = self._tracking.assembly, self._gradients
        is_last = gradients is not None and gradients.are_complete and not self._accumulating
        if is_last and isinstance(error, Exception):
            reason = LEFT_EARLY.format(error=type(error).__name__)
            with self._tracking.boundary.contain("the exchange with other processes"):
                assembly.refuse(reason, self._reductions(), self._accumulating)
        assembly.interrupt()

    def _end_autopsy(self, error: BaseException | None) -> None:
        """Record what is behind a jump of the loss, also if an exception has come of it."""
        tracking, step, gradients = self._tracking, self._global_step, self._gradients
        values = {} if gradients is None or gradients.whole is not None else gradients.values
        if error is None and "ids" in self._info:
            with tracking.boundary.contain("the gradient norms of single samples"):
                tracking.sample_log.add_norms(self._info["ids"], values)
        if tracking.autopsies is None or not isinstance(error, Exception | None):
            return
        try:
            if self._autopsy is not None:
                spike = self._autopsy.finish(tracking.autopsies, tracking.run.history)
                tracking.autopsies.add(step, spike)
            else:
                tracking.autopsies.end_step(step, self._info, values)
                tracking.autopsies.keep(values)
        except Exception as failed:
            tracking.boundary.report("an autopsy", failed)

    def _release(self) -> None:
        if self._autopsy is not None:
            self._autopsy.release()
        if self._gradients is not None:
            self._gradients.release()
        self._gradients = self._losses = self._factor = self._saved = None
        if self._start is not None:
            self._start.close()
        self._start = None
        # Results of extensions that only quantities need are removed from the parameters.
        saved = frozenset() if self._extensions is None else self._extensions.saved
        for parameter in self._tracking.setting.parameters.values() if saved else ():
            for savefield in saved & vars(parameter).keys():
                delattr(parameter, savefield)

    # Reasons why quantities have no value.

    def _refusing(self, *quantities: Quantity) -> Refuse:
        def refuse(reason: str) -> None:
            for quantity in quantities:
                if quantity.should_compute(self._global_step):
                    self._values.setdefault(quantity.name, Undefined(reason))

        return refuse

    def _refuse_all(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._refusing(*self._active)(reason)
        self._tracking.updates.refuse_interval(reason)

    # On entering.

    def _check_user_hooks(self) -> None:
        """``ValueError`` if the user's extensions have nothing to work on."""
        hooks = self._tracking.layer_hooks
        if needs_layer_hooks(self._by_user, self._tracking.setting.model):
            if hooks.missed_call:
                raise ValueError(LATE.format(extension=type(self._by_user[0]).__name__))
            hooks.install_always()
            self._tracking.eager_calls.run_always()

    def _check_needs(self, raises: bool) -> None:
        """Quantities without what the user passes to the context have no value.

        ``ValueError`` instead if it ``raises``, as before anything was recorded: nothing is lost
        by ending a run at its first step.
        """
        for quantity in self._active:
            needed = lacking(quantity, self._info)
            if not needed:
                continue
            if raises:
                raise ValueError(NOT_PASSED.format(quantity=quantity.name, needed=needed))
            self._refusing(quantity)(NOT_PASSED.format(quantity=quantity.name, needed=needed))

    def _check_layer_hooks(self) -> None:
        """What runs by hooks on layers has nothing to work on if a forward pass ran without."""
        tracking, step = self._tracking, self._global_step
        model = tracking.setting.model
        by_hooks = [
            quantity
            for quantity in self._active
            if quantity.extension_hooks(step) or needs_layer_hooks(quantity.extensions(step), model)
        ]
        if by_hooks and (tracking.layer_hooks.missed_call or tracking.eager_calls.ran_compiled):
            self._refusing(*by_hooks)(UNFORESEEN)
            tracking.layer_hooks.install_always()

    def _needs_graph(self) -> bool:
        of_earlier = self._tracking.updates.interval is not None
        needed = self._tracking.forecast.needs_graph_at(self._global_step)
        return needed or of_earlier or bool(self._by_user)

    def _run_uncompiled(self, stack: ExitStack) -> None:
        """Run backward and forward passes in this context uncompiled.

        A checkpoint must compute again what it has computed: if that was compiled, it stays so.
        """
        stack.enter_context(uncompiled_backward())
        uncompiled = stack.enter_context(ExitStack())
        uncompiled.enter_context(uncompiled_calls())

        def check(tensor: Tensor) -> None:
            with self._tracking.boundary.contain("the beginning of a backward pass"):
                if ran_compiled(tensor):
                    uncompiled.close()

        if "loss" in self._info:
            check(self._info["loss"])
        else:
            stack.enter_context(BackwardCall(check))

    def _before_backward(self, extensions: StepExtensions) -> None:
        """Run what needs curvature, while the loss's graph is whole."""
        active = [
            quantity
            for quantity in self._active
            if Phase.BEFORE_BACKWARD in quantity.phases
            and not self._accumulating
            and quantity.name not in self._values
        ]
        of_loss = [quantity for quantity in active if quantity.on is None]
        if of_loss or extensions.apart:
            self._run_on_loss(of_loss, extensions.apart)
        for probe in dict.fromkeys(quantity.on for quantity in active):
            if probe is not None:
                self._run_on_probe(probe, [each for each in active if each.on is probe])

    def _run_on_loss(self, active: Sequence[Quantity], apart: Sequence[BackpropExtension]) -> None:
        tracking, setting, info = self._tracking, self._tracking.setting, self._info
        loss = unscaled_loss(info)
        if loss is None:
            self._refuse_curvature(active, apart)
            return
        if self._has_no_curvature(active, apart):
            return
        reason = why_not_to_pass(loss) if loss.grad_fn is not None else ""
        if reason:
            self._refusing(*active)(reason)
            active = ()
        is_part = tracking.assembly.has_parts(self._accumulating)
        curvature = LossCurvature(
            self._global_step,
            loss,
            setting.parameters,
            model=setting.model,
            outputs=info.get("outputs"),
            returned=tracking.model_outputs.take(),
            optimizer=info.get("optimizer"),
            loss_reduction=setting.loss_reduction,
            batch_size=info.get("batch_size"),
            plans=tracking.output_plans,
            is_part=is_part,
        )
        with setting.own_passes(), own_pass(setting.model):
            for extension in apart:
                self._run_apart(curvature, extension)
            self._run_on(curvature, active)
        if active and is_part:
            tracking.run.note(self._global_step, CURVATURE_OF_A_PART)

    def _run_on_probe(self, probe: Probe, active: Sequence[Quantity]) -> None:
        tracking, setting = self._tracking, self._tracking.setting
        assert setting.model is not None  # the cockpit has checked it
        if self._has_no_curvature(active):
            return
        probed = tracking.probed.of(probe, setting.model)
        optimizer = self._info.get("optimizer")
        with (
            tracking.boundary.contain("a probe", self._refusing(*active)),
            setting.own_passes(),
            own_pass(setting.model, setting.parameters.values()),
            probed.curvature(self._global_step, setting.parameters, optimizer) as curvature,
        ):
            self._run_on(curvature, active)

    def _has_no_curvature(
        self, active: Sequence[Quantity], apart: Sequence[BackpropExtension] = ()
    ) -> bool:
        """Whether parameters have no second derivatives, so that quantities have no value."""
        parameters = self._tracking.setting.parameters.values()
        if not any(parameter.requires_grad for parameter in parameters):
            self._refusing(*active)(ALL_FROZEN)
            return True
        if any(map(is_distributed, parameters)):
            if any(extension in self._by_user for extension in apart):
                raise NotImplementedError(NO_SECOND_DERIVATIVES)
            self._refusing(*active)(NO_SECOND_DERIVATIVES)
            return True
        return False

    def _run_on(self, curvature: Curvature, active: Iterable[Quantity]) -> None:
        tracking = self._tracking
        for quantity in active:
            with tracking.boundary.contain(quantity.name, self._refusing(quantity)):
                self._take(quantity, Phase.BEFORE_BACKWARD, quantity.before_backward(curvature))
        for note in curvature.notes:
            tracking.run.note(self._global_step, note)

    def _refuse_curvature(
        self, active: Iterable[Quantity], apart: Sequence[BackpropExtension]
    ) -> None:
        """Refuse what needs the loss, which wasn't passed; ``ValueError`` if the user runs it."""
        for extension in apart:
            reason = SECOND_ORDER.format(extension=type(extension).__name__)
            if extension in self._by_user:
                raise ValueError(reason)
            self._refusing(*self._needing(extension))(reason)
        for quantity in active:
            reason = NOT_PASSED.format(quantity=quantity.name, needed="loss")
            self._refusing(quantity)(reason)

    def _run_apart(self, curvature: LossCurvature, extension: BackpropExtension) -> None:
        if extension in self._by_user:
            curvature.run(extension)
            return
        refuse = self._refusing(*self._needing(extension))
        with self._tracking.boundary.contain(type(extension).__name__, refuse):
            curvature.run(extension)

    def _needing(self, extension: BackpropExtension) -> list[Quantity]:
        step, kind = self._global_step, type(extension)
        return [q for q in self._active if any(type(e) is kind for e in q.extensions(step))]

    def _take(self, quantity: Quantity, phase: Phase, found: Any) -> None:
        """Keep what a phase has returned: the value, if it was the quantity's last phase."""
        if phase is quantity.phases[-1]:
            self._values[quantity.name] = recordable(quantity, self._global_step, found)
        else:
            self._earlier[quantity.name] = found

    def _enter_contexts(self, stack: ExitStack, extensions: StepExtensions) -> None:
        tracking, interval = self._tracking, self._tracking.updates.interval
        within = list(extensions.within)
        wants_losses = any("individual_losses" in quantity.needs for quantity in self._active)
        wants_losses |= interval is not None and interval.needs_losses
        if wants_losses and self._info.get("individual_losses") is None:
            self._losses = PerSampleLosses(tracking.setting.loss_reduction, lambda: self._samples)
            within.append(self._losses)
        is_part = tracking.assembly.has_parts(self._accumulating)
        wants_gradients = extensions.per_sample or interval is not None or is_part
        wants_gradients |= self._losses is not None
        wants_step = any("optimizer" in quantity.needs for quantity in self._active)
        if wants_gradients:
            self._gradients = self._step_gradients()
        if wants_gradients or wants_step:
            self._factor = LossFactor(self._info, self._gradients)
            stack.enter_context(self._factor.finding())
        if within or extensions.hooks:
            hooks = [partial(self._run_hook, quantity, hook) for quantity, hook in extensions.hooks]
            stack.enter_context(with_extensions(within, hooks, self._debug))

    def _run_hook(
        self, quantity: Quantity, hook: Callable[[nn.Module], None], module: nn.Module
    ) -> None:
        with self._tracking.boundary.contain(quantity.name, self._refusing(quantity)):
            hook(module)

    def _step_gradients(self) -> StepGradients:
        tracking, step = self._tracking, self._global_step
        interval = tracking.updates.interval
        retain = any(q.retains_gradients and q.should_compute(step) for q in self._active)
        return StepGradients(
            tracking.setting,
            tracking.assembly,
            self._reductions(),
            retain,
            None if interval is None else interval.projections,
            self._info,
            self._accumulating,
            tracking.boundary.contain,
            self._losses is not None,
        )

    def _reductions(self) -> tuple[Reduction, ...]:
        """Those of this step, in the same order in all processes."""
        step, interval = self._global_step, self._tracking.updates.interval
        found = [r for quantity in self._active for r in quantity.reductions_at(step)]
        return tuple(dict.fromkeys(found if interval is None else [*found, interval.reduction]))

    # On leaving, after a backward pass without exceptions.

    def _finish(self) -> None:
        tracking, boundary = self._tracking, self._tracking.boundary
        self._check_for_hook_errors()
        if not self._failure:
            with boundary.contain("the end of a step", self._refuse_all):
                self._compute()
        if self._failure:
            with boundary.contain("the exchange with other processes"):
                tracking.assembly.refuse(self._failure, self._reductions(), self._accumulating)
        if not self._accumulating:
            with boundary.contain("recording a step"):
                tracking.run.record(self._global_step, self._values)

    def _check_user_results(self) -> None:
        """Exceptions of the user's own extensions are raised, and what they lack is noted."""
        error = self._tracking.layer_hooks.take_error()
        if error is not None:
            raise error
        lacking = [] if self._saved is None else self._saved.lacking()
        if lacking:
            text = NOTHING_SAVED.format(extensions=", ".join(lacking))
            self._tracking.run.note(self._global_step, text)

    def _check_for_hook_errors(self) -> None:
        error = self._tracking.layer_hooks.take_error()
        if error is None:
            return
        by_hooks = [q for q in self._active if q.needs_layer_hooks(self._global_step)]
        self._tracking.boundary.report("a hook on a layer", error, self._refusing(*by_hooks))

    def _compute(self) -> None:
        tracking, gradients, boundary = self._tracking, self._gradients, self._tracking.boundary
        losses = self._individual_losses()
        if gradients is not None:
            gradients.finish(losses, self._why_no_losses() if losses is None else "")
        if self._accumulating:
            return
        step = self._step(losses)
        self._add_notes(step)
        with torch.no_grad():
            with boundary.contain("the interval between two steps"):
                projections = None if gradients is None else gradients.start_projections
                tracking.updates.end_interval(step, projections)
            for quantity in self._active:
                with boundary.contain(quantity.name, self._refusing(quantity)):
                    self._after_backward(quantity, step)
            self._await_update(step)

    def _individual_losses(self) -> Tensor | None:
        if self._losses is None:
            known: Tensor | None = self._info.get("individual_losses")
            return None if known is None else known.detach()
        assert self._factor is not None
        try:
            factor = self._factor.factor
        except UnavailableError as reason:
            self._losses.refuse(str(reason))
            return None
        if self._factor.loss is not None:
            self._losses.check_sum(self._factor.loss / loss_scale(self._info), factor)
        values, samples = self._losses.values, self._samples
        if values is not None and len(values) == (samples or len(values)):
            return values / factor
        return self._losses_of_graph()

    @property
    def _samples(self) -> int | None:
        """The number of samples of this part of the batch, if it is known."""
        return None if self._gradients is None else self._gradients.part_samples

    def _losses_of_graph(self) -> Tensor | None:
        """Where loss modules weren't called, or not with a row for each sample."""
        if self._gradients is None:
            return None
        try:
            return self._gradients.losses()
        except UnavailableError as reason:
            self._losses_reason = str(reason)
            return None

    def _loss_weight(self) -> float:
        """That of ``Step``; a NaN with the reason if it isn't known."""
        gradients, factor = self._gradients, self._factor
        if gradients is not None and gradients.whole is not None:
            return gradients.whole.part.weight / self._gradient_scale.of_backward
        if factor is None:
            return 1.0
        found: float = self._tracking.boundary.value(
            "the loss's weight", lambda: factor.weight / self._gradient_scale.of_backward
        )
        return found

    def _step(self, individual_losses: Tensor | None) -> Step:
        setting, gradients, info = self._tracking.setting, self._gradients, self._info
        changed = changed_parameters(setting)
        loss = unscaled_loss(info)
        without_losses = self._why_no_losses() if individual_losses is None else ""
        if gradients is not None and gradients.whole is not None:
            whole = gradients.whole.part
            individual_losses, without_losses = whole.individual_losses, whole.without_losses
            loss = None if whole.loss is None else torch.tensor(whole.loss, dtype=torch.float64)
        return Step(
            self._global_step,
            setting.parameters,
            setting.loss_reduction,
            info.get("batch_size") if gradients is None else gradients.batch.samples,
            loss,
            individual_losses,
            info.get("optimizer"),
            info,
            {} if gradients is None else gradients.values,
            self._tracking.layers.finish(self._global_step),
            "" if gradients is None else gradients.uncovered,
            {} if gradients is None else gradients.failed,
            self._loss_weight(),
            changed.removed,
            without_losses,
            changed.untracked,
            frozenset() if gradients is None else gradients.lacking,
            {} if gradients is None else gradients.missing,
            self._gradient_scale,
        )

    def _why_no_losses(self) -> str:
        if self._tracking.layer_hooks.missed_call:
            return UNFORESEEN
        found = "" if self._losses is None else self._losses.unavailable
        return found or PASS_LOSSES.format(why=self._losses_reason)

    def _add_notes(self, step: Step) -> None:
        run, gradients = self._tracking.run, self._gradients
        for note in step.signals.notes:
            run.note(step.global_step, note)
        if step.untracked:
            run.note(step.global_step, UNTRACKED.format(names=few(step.untracked)))
        if step.removed:
            run.note(step.global_step, f"{few(step.removed)}: {REMOVED}")
        if gradients is None:
            return
        if gradients.values:
            run.cover(step.global_step, gradients.coverage)
        for note in gradients.notes():
            run.note(step.global_step, note)

    def _after_backward(self, quantity: Quantity, step: Step) -> None:
        name, phases = quantity.name, quantity.phases
        due = name not in self._values and quantity.should_compute(step.global_step)
        begun = name in self._earlier or phases[0] is Phase.AFTER_BACKWARD
        if due and begun and Phase.AFTER_BACKWARD in phases:
            found = quantity.after_backward(step, self._earlier.pop(name, None))
            self._take(quantity, Phase.AFTER_BACKWARD, found)
        quantity.adapt_to(step)

    def _waiting(self) -> list[WaitingQuantity]:
        """The active quantities that need the update after this step."""
        return [
            WaitingQuantity(quantity, self._earlier.get(quantity.name))
            for quantity in self._active
            if not self._accumulating
            and quantity.phases[-1] in (Phase.AFTER_UPDATE, Phase.AT_NEXT_STEP)
            and quantity.should_compute(self._global_step)
            and quantity.name not in self._values
        ]

    def _await_update(self, step: Step) -> None:
        waiting = self._waiting()
        if not waiting or self._start is None:
            return
        of_losses = [w.quantity.name for w in waiting if "individual_losses" in w.quantity.needs]
        missed_call = self._tracking.layer_hooks.missed_call
        if of_losses and step.individual_losses is None and not missed_call:
            text = NO_INDIVIDUAL_LOSSES.format(
                quantities=", ".join(of_losses), why=step.without_losses
            )
            self._tracking.run.note(step.global_step, text)
        retained = KeptGradients() if self._gradients is None else self._gradients.retained
        self._tracking.updates.wait(step, waiting, retained, self._start)


def lacking(quantity: Quantity, info: Mapping[str, Any]) -> str:
    """What a quantity needs and the user hasn't passed to the context."""
    needed = (each for each in quantity.needs if each != "individual_losses")
    return next((each for each in needed if each not in info), "")


UNTRACKED = (
    "{names} need a gradient and are not tracked, since they were frozen, or not yet in the model, "
    f"when the cockpit was made: {NEW_COCKPIT}"
)
NOT_PASSED = (
    "{quantity} needs the {needed}: pass {needed}=... to the context, as in "
    "cockpit(global_step, {needed}={needed})"
)
SECOND_ORDER = "{extension} is of second order and needs the loss: pass loss=... to the context"
NOTHING_SAVED = (
    "{extensions} saved nothing on the parameters that are tracked. BackPACK's extensions need a "
    "backward pass inside the context, and hooks on model and loss module before the forward pass: "
    "pass both to the cockpit (Cockpit(model, loss_function=loss_function)), or extend them by "
    "backpack.extend"
)
ENTERED = (
    "a context is entered once, for one step: call the cockpit anew for each step, as in "
    "`with cockpit(step, loss=loss):`"
)
NOT_ENTERED = (
    "the cockpit was called, and the context that it has returned hasn't been entered, so that "
    "nothing is recorded: call backward inside `with cockpit(step, loss=loss):`"
)
LATE = (
    "{extension} is the first BackPACK extension to be passed, and this step's forward pass ran "
    "without hooks on layers: call gradlens.extend(model) before the first step, which installs "
    "them for all steps"
)
UNFORESEEN = (
    "this step's forward pass ran without hooks on layers, since it was compiled, or no quantity "
    "was expected to need them. Where steps come irregularly, or a function was compiled, run the "
    "forward pass inside `with cockpit.forward(step):`"
)
ALL_FROZEN = (
    "all parameters that are tracked are frozen: if others are trained, close the cockpit and make "
    "a new one, which continues the run's file with resume=True"
)
NO_SECOND_DERIVATIVES = (
    "the parameters are divided among processes (fully_shard or tensor parallelism), where torch "
    "has no second derivatives: they are freed behind each layer in the backward pass, or "
    "gradients are exchanged by functions that can't be differentiated"
)
LEFT_EARLY = "a {error} has left the context of one process, whose part of the batch is unknown"
MAY_END_ALONE = (
    "since DistributedDataParallel.join was entered, processes may have different numbers of "
    "steps, and none can wait for what others have found: give all of them the same number of "
    "batches, by drop_last=True or a DistributedSampler, and leave join out"
)
CURVATURE_OF_A_PART = (
    "the batch comes in parts, from micro-batches or processes; its curvature is that of the last "
    "part of the first process alone"
)
NO_INDIVIDUAL_LOSSES = "{quantities} can't be found without per-sample losses: {why}"
PASS_LOSSES = (
    "{why}. Pass the losses of single samples, of shape [N], to the context, as "
    "info={{'individual_losses': ...}}, or compute the loss by a loss module and pass it to the "
    "cockpit (Cockpit(..., loss_function=loss_function))"
)
