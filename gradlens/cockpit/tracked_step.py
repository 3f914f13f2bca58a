"""One step under a cockpit: from entering its context to the recorded values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor

from gradlens.cockpit.extensions import StepExtensions, needs_layer_hooks, step_extensions
from gradlens.cockpit.gradients import StepGradients
from gradlens.cockpit.plain import recordable
from gradlens.cockpit.tracking import Tracking
from gradlens.cockpit.updates import WaitingQuantity
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.history.undefined import Undefined
from gradlens.hooks.backpack_context import own_pass, with_extensions
from gradlens.hooks.global_state import GlobalState
from gradlens.per_sample.losses import PerSampleLosses
from gradlens.quantities.quantity import Phase, Quantity
from gradlens.quantities.step import NothingCoveredError, Step, gradient_scale


class TrackedStep:
    """One step's context, as ``Cockpit.__call__`` returns it.

    It calls the active quantities in their phases before and after the backward pass, and lets
    those wait that have later ones (``Updates``).
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
        self._active: tuple[Quantity, ...] = ()
        self._extensions: StepExtensions | None = None
        self._gradients: StepGradients | None = None
        self._losses: PerSampleLosses | None = None
        self._values: dict[str, Any] = {}
        self._earlier: dict[str, Any] = {}
        self._failures = Failures()
        self._contexts = ExitStack()
        self._before = GlobalState()

    def __enter__(self) -> None:
        try:
            self._enter()
        except BaseException:
            self._abandon()
            raise

    def _enter(self) -> None:
        tracking, step = self._tracking, self._global_step
        tracking.begin_step(step)
        self._active = tracking.forecast.active_at(step)
        if self._active or self._by_user or tracking.updates.interval is not None:
            self._before.keep_gradients(tracking.setting.parameters.values())
            self._prepare()
        if tracking.budget is not None:
            tracking.budget.begin_backward()

    def _prepare(self) -> None:
        step, model = self._global_step, self._tracking.setting.model
        check_info(self._active, self._info, step)
        self._check_layer_hooks()
        if self._debug:
            print(f"[Step {step}] active: {', '.join(q.name for q in self._active) or 'nothing'}")
        self._extensions = step_extensions(self._active, self._by_user, model, step)
        self._before_backward(self._extensions)
        with ExitStack() as stack:
            self._enter_contexts(stack, self._extensions)
            self._contexts = stack.pop_all()
        self._tracking.layers.begin(step, gradient_scale(self._info))

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
            self._before.restore()

    def _abandon(self) -> None:
        """Undo what an exception, perhaps an interrupt in the midst of it, has left undone."""
        self._contexts.close()
        self._tracking.assembly.drop()
        self._release()
        self._before.restore()

    def _exit(self, error: BaseException | None) -> None:
        tracking = self._tracking
        if tracking.budget is not None:
            tracking.budget.end_backward()
        self._contexts.close()
        if error is not None:
            tracking.assembly.drop()
        once = 0.0 if self._gradients is None else self._gradients.labelling_seconds
        try:
            if error is None and (self._active or tracking.updates.interval is not None):
                self._finish()
        finally:
            goes_on = self._accumulating and error is None
            self._release()
            tracking.end_step(self._global_step, self._accumulating, goes_on)
            if tracking.budget is not None:
                tracking.budget.end_step(once)

    def _release(self) -> None:
        if self._gradients is not None:
            self._gradients.release()
        self._gradients = self._losses = None
        # Results of extensions that only quantities need are removed from the parameters.
        saved = frozenset() if self._extensions is None else self._extensions.saved
        for parameter in self._tracking.setting.parameters.values() if saved else ():
            for savefield in saved & vars(parameter).keys():
                delattr(parameter, savefield)

    # On entering.

    def _check_layer_hooks(self) -> None:
        """What runs by hooks on layers has nothing to work on if a forward pass ran without."""
        tracking, step = self._tracking, self._global_step
        model = tracking.setting.model
        by_user = needs_layer_hooks(self._by_user, model)
        if by_user:
            if tracking.layer_hooks.missed_call:
                raise ValueError(LATE.format(extension=type(self._by_user[0]).__name__))
            tracking.layer_hooks.install_always()
        lacking = [
            quantity.name
            for quantity in self._active
            if quantity.extension_hooks(step) or needs_layer_hooks(quantity.extensions(step), model)
        ]
        if lacking and tracking.layer_hooks.missed_call:
            self._values |= dict.fromkeys(lacking, Undefined(UNFORESEEN))
            tracking.layer_hooks.install_always()

    def _before_backward(self, extensions: StepExtensions) -> None:
        """Run what needs the curvature of the loss, while the loss's graph is whole."""
        tracking, setting, info = self._tracking, self._tracking.setting, self._info
        active = [
            quantity
            for quantity in self._active
            if Phase.BEFORE_BACKWARD in quantity.phases and not self._accumulating
        ]
        if not active and not extensions.apart:
            return
        if "loss" not in info:
            raise ValueError(
                f"{type(extensions.apart[0]).__name__} is of second order and needs the loss: "
                "pass loss=... to the context"
            )
        curvature = LossCurvature(
            self._global_step,
            info["loss"],
            setting.parameters,
            model=setting.model,
            outputs=info.get("outputs"),
            optimizer=info.get("optimizer"),
            loss_reduction=setting.loss_reduction,
            batch_size=info.get("batch_size"),
            plans=tracking.output_plans,
        )
        with own_pass(setting.model):
            for extension in extensions.apart:
                curvature.run(extension)
            for quantity in active:
                with self._failures:
                    self._take(quantity, Phase.BEFORE_BACKWARD, quantity.before_backward(curvature))
        for note in curvature.notes:
            tracking.run.note(self._global_step, note)
        if active and tracking.assembly.has_parts(self._accumulating):
            tracking.run.note(self._global_step, CURVATURE_OF_A_PART)

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
            self._losses = PerSampleLosses(tracking.setting.loss_reduction)
            within.append(self._losses)
        is_part = tracking.assembly.has_parts(self._accumulating)
        if extensions.per_sample or interval is not None or is_part:
            self._gradients = self._step_gradients()
            stack.enter_context(self._gradients.collecting())
        if within or extensions.hooks:
            stack.enter_context(with_extensions(within, extensions.hooks, self._debug))

    def _step_gradients(self) -> StepGradients:
        tracking, step = self._tracking, self._global_step
        reductions = {r for quantity in self._active for r in quantity.reductions_at(step)}
        if tracking.updates.interval is not None:
            reductions.add(tracking.updates.interval.reduction)
        retain = any(q.retains_gradients and q.should_compute(step) for q in self._active)
        return StepGradients(
            tracking.setting,
            tracking.assembly,
            reductions,
            retain,
            self._info,
            self._accumulating,
        )

    # On leaving, after a backward pass without exceptions.

    def _finish(self) -> None:
        tracking, gradients, failures = self._tracking, self._gradients, self._failures
        losses = self._individual_losses()
        if gradients is not None:
            gradients.finish(losses)
        if not self._accumulating:
            step = self._step(losses)
            self._add_notes(step)
            with torch.no_grad():
                with failures:
                    tracking.updates.end_interval(step)
                for quantity in self._active:
                    with failures:
                        self._after_backward(quantity, step)
                tracking.run.record(self._global_step, self._values)
                with failures:
                    self._await_update(step)
        if gradients is not None and gradients.error is not None:
            raise gradients.error
        failures.raise_first()

    def _individual_losses(self) -> Tensor | None:
        if self._losses is None:
            known: Tensor | None = self._info.get("individual_losses")
            return None if known is None else known.detach()
        factor = 1.0 if self._gradients is None else self._gradients.loss_factor
        return None if self._losses.values is None else self._losses.values / factor

    def _step(self, individual_losses: Tensor | None) -> Step:
        setting, gradients, info = self._tracking.setting, self._gradients, self._info
        loss = info.get("loss")
        if gradients is not None and gradients.whole is not None:
            whole = gradients.whole
            individual_losses = whole.individual_losses
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
            {} if gradients is None else gradients.reducer.values,
            self._tracking.layers.finish(self._global_step),
            "" if gradients is None else gradients.refusal,
        )

    def _add_notes(self, step: Step) -> None:
        run, gradients = self._tracking.run, self._gradients
        for note in step.signals.notes:
            run.note(step.global_step, note)
        if gradients is None or gradients.error:
            return
        if gradients.reducer.values:
            run.cover(step.global_step, gradients.coverage)
        for note in gradients.notes():
            run.note(step.global_step, note)

    def _after_backward(self, quantity: Quantity, step: Step) -> None:
        name, phases = quantity.name, quantity.phases
        due = name not in self._values and quantity.should_compute(step.global_step)
        begun = name in self._earlier or phases[0] is Phase.AFTER_BACKWARD
        try:
            if due and begun and Phase.AFTER_BACKWARD in phases:
                found = quantity.after_backward(step, self._earlier.pop(name, None))
                self._take(quantity, Phase.AFTER_BACKWARD, found)
            quantity.adapt_to(step)
        except NothingCoveredError as error:
            if not error.refusal:
                raise
            if quantity.should_compute(step.global_step):
                self._values[name] = Undefined(error.refusal)

    def _await_update(self, step: Step) -> None:
        waiting = [
            WaitingQuantity(quantity, self._earlier.get(quantity.name))
            for quantity in self._active
            if quantity.phases
            and quantity.phases[-1] in (Phase.AFTER_UPDATE, Phase.AT_NEXT_STEP)
            and quantity.should_compute(step.global_step)
            and quantity.name not in self._values
        ]
        if not waiting:
            return
        lacking = [w.quantity.name for w in waiting if "individual_losses" in w.quantity.needs]
        were_missing = self._tracking.layer_hooks.missed_call
        if lacking and step.individual_losses is None and not were_missing:
            text = NO_INDIVIDUAL_LOSSES.format(quantities=", ".join(lacking))
            self._tracking.run.note(step.global_step, text)
        retained = {} if self._gradients is None else self._gradients.reducer.retained
        self._tracking.updates.wait(step, waiting, retained)


class Failures:
    """Catches exceptions, so that what comes after them is done, and raises the first one later."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._first = self._first or error
        return True

    def raise_first(self) -> None:
        """Raise the first exception that was caught, if any."""
        if self._first is not None:
            raise self._first


def check_info(active: Sequence[Quantity], info: Mapping[str, Any], global_step: int) -> None:
    """``ValueError`` names what the context needs and was not passed, or a loss that is none."""
    for quantity in active:
        for needed in set(quantity.needs) - {"individual_losses"}:
            if needed not in info:
                raise ValueError(
                    f"{quantity.name} needs the {needed} at step {global_step}: pass "
                    f"{needed}=... to the context, as in cockpit(global_step, {needed}="
                    f"{needed})"
                )
    loss = info.get("loss")
    if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss= must be a tensor with one element, got {shape}: pass the loss that "
            "backward is called on (loss.mean() or loss.sum() of individual losses)"
        )


LATE = (
    "{extension} is the first BackPACK extension to be passed, and this step's forward pass ran "
    "without hooks on layers: call gradlens.extend(model) before the first step, which installs "
    "them for all steps"
)
UNFORESEEN = (
    "this step's forward pass ran without hooks on layers, since no quantity was expected to need "
    "them; they are installed from now on. Where steps come irregularly, run the forward pass "
    "inside cockpit.forward(step)"
)
CURVATURE_OF_A_PART = (
    "the batch comes in parts, from micro-batches or processes; its curvature is that of the last "
    "part of the first process alone"
)
NO_INDIVIDUAL_LOSSES = (
    "{quantities} can't be found without per-sample losses: pass the loss module to the cockpit "
    "(Cockpit(..., loss_function=loss_function)), or them to the context, as "
    "info={{'individual_losses': ...}}"
)
