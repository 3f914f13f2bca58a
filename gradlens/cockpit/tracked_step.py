"""One step under a cockpit: from entering the context to the recorded values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from backpack import backpack
from backpack.context import CTX
from backpack.extensions.backprop_extension import BackpropExtension
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from backpack.extensions.secondorder.base import SecondOrderBackpropExtension
from torch import Tensor, nn

from gradlens.cockpit.gradient_tracking import SLEPT, StepGradients
from gradlens.cockpit.plain import to_plain
from gradlens.curvature.backpack_graph import extended_by_backpack
from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.history.undefined import Undefined
from gradlens.hooks.undisturbed import undisturbed
from gradlens.per_sample.extension import PerSampleGradients
from gradlens.per_sample.losses import PerSampleLosses
from gradlens.quantities.quantity import (
    CurvatureQuantity,
    CurvedQuantity,
    GradientCurvatureQuantity,
    Quantity,
    SingleStepQuantity,
    TwoPointQuantity,
    UpdateQuantity,
)
from gradlens.quantities.step import NothingCoveredError, Step, gradient_scale

if TYPE_CHECKING:
    from gradlens.cockpit.cockpit import Cockpit


class TrackedStep:
    """One step's context, as ``Cockpit.__call__`` returns it."""

    def __init__(
        self,
        cockpit: Cockpit,
        global_step: int,
        extensions: Sequence[BackpropExtension],
        info: Mapping[str, Any],
        accumulating: bool,
        debug: bool,
    ) -> None:
        self._cockpit = cockpit
        self._global_step = global_step
        self._extensions = extensions
        self._info = info
        self._accumulating = accumulating
        self._debug = debug
        self._active: tuple[Quantity, ...] = ()
        self._gradients: StepGradients | None = None
        self._losses: PerSampleLosses | None = None
        self._savefields: set[str] = set()
        self._values: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self._failures = _Failures()
        self._exit: ExitStack | None = None

    def __enter__(self) -> None:
        self._begin()
        if self._cockpit.budget is not None:
            self._cockpit.budget.begin_backward()

    def _begin(self) -> None:
        step, cockpit = self._global_step, self._cockpit
        cockpit._begin_step(step)
        left_over = cockpit._gradients.begin_step(step)
        if left_over:
            cockpit._note(step, left_over)
        self._active = cockpit._active_at(step)
        if not self._active and not self._extensions and cockpit._interval is None:
            return
        self._check_info()
        self._check_extensions()
        if self._debug:
            print(f"[Step {step}] active: {', '.join(q.name for q in self._active) or 'nothing'}")
        try:
            extensions, hooks = self._wanted_extensions()
            self._compute_curvature(_distinct(extensions))
            with ExitStack() as stack:
                self._enter_extensions(stack, extensions, hooks)
                self._exit = stack.pop_all()
            cockpit._layers.begin(step, gradient_scale(self._info))
        except BaseException:
            self._release()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._cockpit.budget is not None:
            self._cockpit.budget.end_backward()
        if self._exit is not None:
            self._exit.close()
        if error is not None:
            self._cockpit._gradients.waiting.clear()
        try:
            if error is None and (self._active or self._cockpit._interval is not None):
                self._finish()
        finally:
            self._end(goes_on=self._accumulating and error is None)

    def _end(self, goes_on: bool) -> None:
        cockpit = self._cockpit
        cockpit._layers.end(self._global_step, goes_on)
        if not self._accumulating:
            cockpit._close_interval()
        self._release()
        if not goes_on:
            cockpit._expect(cockpit._layers.steps_to_come)
        if cockpit.budget is not None:
            cockpit.budget.end_step()

    def _release(self) -> None:
        if self._gradients is not None:
            self._gradients.release()
        self._gradients = self._losses = None
        # Nothing that quantities have asked BackPACK for stays on parameters.
        for parameter in self._cockpit.parameters.values() if self._savefields else ():
            for savefield in self._savefields & vars(parameter).keys():
                delattr(parameter, savefield)

    # On entering.

    def _check_info(self) -> None:
        for quantity in self._active:
            for needed in set(quantity.needs) - {"individual_losses"}:
                if needed not in self._info:
                    raise ValueError(
                        f"{quantity.name} needs the {needed} at step {self._global_step}: pass "
                        f"{needed}=... to the context, as in cockpit(global_step, {needed}="
                        f"{needed})"
                    )
        loss = self._info.get("loss")
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"loss= must be a tensor with one element, got {shape}: pass the loss that "
                "backward is called on (loss.mean() or loss.sum() of per-sample losses)"
            )

    def _check_extensions(self) -> None:
        """BackPACK has nothing to work on where layers were not watched."""
        cockpit, step = self._cockpit, self._global_step
        extending = [
            q
            for q in self._active
            if q.extension_hooks(step) or self._runs_on_calls(q.extensions(step))
        ]
        by_user = self._runs_on_calls(self._extensions)
        if (by_user or extending) and cockpit._gradients.has_slept:
            if by_user:
                raise ValueError(LATE.format(extension=type(self._extensions[0]).__name__))
            self._give_up(extending)
        if by_user:
            cockpit._gradients.stay_awake()

    def _give_up(self, quantities: Sequence[Quantity]) -> None:
        """They need what layers tell, which were not watched."""
        self._values |= {quantity.name: Undefined(SLEPT) for quantity in quantities}
        self._cockpit._gradients.stay_awake()

    def _runs_on_calls(self, extensions: Sequence[BackpropExtension]) -> bool:
        """Whether one of them is run on what taps have seen, other than our own."""
        model = self._cockpit.model
        foreign = (e for e in extensions if not isinstance(e, PerSampleGradients))
        by_taps = any(isinstance(e, FirstOrderBackpropExtension) for e in foreign)
        return by_taps and model is not None and not extended_by_backpack(model)

    def _compute_curvature(self, extensions: Sequence[BackpropExtension]) -> None:
        step, cockpit, info = self._global_step, self._cockpit, self._info
        active = [
            q for q in self._active if isinstance(q, CurvedQuantity) and not self._accumulating
        ]
        apart = [e for e in extensions if self._runs_apart(e)]
        if not active and not apart:
            return
        if "loss" not in info:
            raise ValueError(
                f"{type(apart[0]).__name__} is of second order and needs the loss: pass loss=... "
                "to the context"
            )
        curvature = LossCurvature(
            step,
            info["loss"],
            cockpit.parameters,
            model=cockpit.model,
            outputs=info.get("outputs"),
            optimizer=info.get("optimizer"),
            loss_reduction=cockpit.loss_reduction,
            batch_size=info.get("batch_size"),
            plans=cockpit._gradients.plans_of_outputs,
        )
        # BackPACK's own hooks run in these backward passes too; they must keep what they store.
        with backpack(retain_graph=True), undisturbed(cockpit.model):
            for extension in apart:
                curvature.run(extension)
            for quantity in active:
                with self._failures:
                    self._look(quantity, curvature)
        for remark in curvature.remarks:
            cockpit._note(step, remark)
        if active and cockpit._gradients.joins(self._accumulating):
            cockpit._note(step, CURVATURE_OF_A_PART)

    def _runs_apart(self, extension: BackpropExtension) -> bool:
        """Whether it needs more of the network than is kept of it, and so a pass of its own."""
        model = self._cockpit.model
        return (
            isinstance(extension, SecondOrderBackpropExtension)
            and model is not None
            and not extended_by_backpack(model)
        )

    def _look(self, quantity: Quantity, curvature: LossCurvature) -> None:
        if isinstance(quantity, GradientCurvatureQuantity):
            self._seen[quantity.name] = quantity.look(curvature)
        elif isinstance(quantity, CurvatureQuantity):
            value = quantity.compute(curvature)
            self._values[quantity.name] = recordable(quantity, self._global_step, value)

    def _enter_extensions(
        self,
        stack: ExitStack,
        extensions: Sequence[BackpropExtension],
        hooks: Sequence[Callable[[nn.Module], None]],
    ) -> None:
        cockpit = self._cockpit
        ours = [ext for ext in extensions if isinstance(ext, PerSampleGradients)]
        foreign = _distinct([extension for extension in extensions if extension not in ours])
        within = [extension for extension in foreign if not self._runs_apart(extension)]
        if self._needs_individual_losses():
            self._losses = PerSampleLosses(cockpit.loss_reduction)
            within.append(self._losses)
        if ours or cockpit._interval is not None or cockpit._gradients.joins(self._accumulating):
            self._gradients = self._step_gradients()
            stack.enter_context(self._gradients.listening())
        if within or hooks:
            stack.enter_context(_within_backpack(within, hooks, self._debug))
        users = {extension.savefield for extension in self._extensions}
        self._savefields = {extension.savefield for extension in foreign} - users

    def _wanted_extensions(
        self,
    ) -> tuple[list[BackpropExtension], list[Callable[[nn.Module], None]]]:
        step, extensions, hooks = self._global_step, list(self._extensions), []
        for quantity in self._active:
            extensions += quantity.extensions(step)
            hooks += quantity.extension_hooks(step)
        return extensions, hooks

    def _needs_individual_losses(self) -> bool:
        interval = self._cockpit._interval
        waiting = [] if interval is None else interval.quantities
        wanted = any("individual_losses" in q.needs for q in (*self._active, *waiting))
        return wanted and self._info.get("individual_losses") is None

    def _step_gradients(self) -> StepGradients:
        cockpit, step = self._cockpit, self._global_step
        wanted = {r for quantity in self._active for r in quantity.reductions_at(step)}
        if cockpit._interval is not None:
            wanted.add(cockpit._interval.reduction)
        retain = any(q.retains_gradients and q.should_compute(step) for q in self._active)
        return cockpit._gradients.at_step(wanted, retain, self._info, self._accumulating)

    # On leaving, after a backward pass without exceptions.

    def _finish(self) -> None:
        if self._gradients is not None:
            self._gradients.finish(self._individual_losses())
        if self._accumulating:
            self._raise_error_of_gradients()
            return
        step, cockpit = self._step(), self._cockpit
        self._take_notes(step)
        failures, values = self._failures, self._values
        with torch.no_grad():
            if cockpit._interval is not None:
                with failures:
                    cockpit._complete_interval(step)
            for quantity in self._active:
                with failures:
                    self._compute(quantity, step, values)
            cockpit._record(self._global_step, values)
            with failures:
                self._await_update(step)
        self._raise_error_of_gradients()
        failures.raise_first()

    def _raise_error_of_gradients(self) -> None:
        if self._gradients is not None and self._gradients.error is not None:
            raise self._gradients.error

    def _individual_losses(self) -> Tensor | None:
        if self._losses is None:
            known: Tensor | None = self._info.get("individual_losses")
            return None if known is None else known.detach()
        found, gradients = self._losses.values, self._gradients
        factor = 1.0 if gradients is None else gradients.gradients.batch.factor
        return None if found is None else found / factor

    def _compute(self, quantity: Quantity, step: Step, values: dict[str, Any]) -> None:
        name, seen = quantity.name, self._seen
        try:
            due = name not in values and quantity.should_compute(step.global_step)
            if due and isinstance(quantity, SingleStepQuantity):
                values[name] = recordable(quantity, step.global_step, quantity.compute(step))
            if isinstance(quantity, GradientCurvatureQuantity) and name in seen:
                value = quantity.compute(step, seen.pop(name))
                values[name] = recordable(quantity, step.global_step, value)
            quantity.adapt_to(step)
        except NothingCoveredError as error:
            if not error.refusal:
                raise
            if quantity.should_compute(step.global_step):
                values[name] = Undefined(error.refusal)

    def _await_update(self, step: Step) -> None:
        waiting = [
            quantity
            for quantity in self._active
            if isinstance(quantity, (UpdateQuantity, TwoPointQuantity))
            and quantity.should_compute(step.global_step)
            and quantity.name not in self._values
        ]
        if not waiting:
            return
        lacking = [q.name for q in waiting if "individual_losses" in q.needs]
        slept = self._cockpit._gradients.has_slept
        if lacking and step.individual_losses is None and not slept:
            text = NO_INDIVIDUAL_LOSSES.format(quantities=", ".join(lacking))
            self._cockpit._note(step.global_step, text)
        retained = {} if self._gradients is None else self._gradients.reducer.retained
        self._cockpit._await_update(step, waiting, retained)

    def _step(self) -> Step:
        gradients, info = self._gradients, self._info
        loss, individual_losses = info.get("loss"), self._individual_losses()
        if gradients is not None and gradients.joined is not None:
            whole = gradients.joined
            individual_losses = whole.individual_losses
            loss = None if whole.loss is None else torch.tensor(whole.loss, dtype=torch.float64)
        return Step(
            self._global_step,
            self._cockpit.parameters,
            self._cockpit.loss_reduction,
            info.get("batch_size") if gradients is None else gradients.batch.samples,
            loss,
            individual_losses,
            info.get("optimizer"),
            info,
            {} if gradients is None else gradients.reducer.values,
            self._cockpit._layers.finish(self._global_step),
            "" if gradients is None else gradients.refusal,
        )

    def _take_notes(self, step: Step) -> None:
        gradients, cockpit = self._gradients, self._cockpit
        for remark in step.signals.remarks:
            cockpit._note(step.global_step, remark)
        if gradients is None or gradients.error:
            return
        if gradients.reducer.values:
            cockpit._cover(step.global_step, gradients.coverage)
        for remark in gradients.remarks():
            cockpit._note(step.global_step, remark)


LATE = (
    "{extension} is the first BackPACK extension to be passed, and the layers were not watched in "
    "this step's forward pass: call gradlens.extend(model) before the first step, which lets them "
    "be watched at each"
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


class _Failures:
    """Catches exceptions, so that what others find is kept, and raises the first one later."""

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
        if self._first is not None:
            raise self._first


def recordable(quantity: Quantity, global_step: int, value: Any) -> Any:
    """The value as a history holds it, printed if the quantity is verbose."""
    try:
        plain = to_plain(value)
    except TypeError as error:
        raise TypeError(f"{quantity.name}: {error}") from error
    if quantity.verbose:
        print(f"[Step {global_step}] {quantity.name}: {plain}")
    return plain


def _within_backpack(
    extensions: Sequence[BackpropExtension],
    hooks: Sequence[Callable[[nn.Module], None]],
    debug: bool,
) -> backpack:
    # Entering a context of BackPACK replaces the outer one, which may be another cockpit's.
    outer, outer_hook = CTX.get_active_exts(), CTX.get_extension_hook()

    def run_hooks(module: nn.Module) -> None:
        for hook in (outer_hook, *hooks):
            hook(module)

    return backpack(*outer, *extensions, extension_hook=run_hooks, debug=debug)


def _distinct(extensions: Sequence[BackpropExtension]) -> list[BackpropExtension]:
    """One of each class, the user's own first."""
    by_class: dict[type[BackpropExtension], BackpropExtension] = {}
    for extension in extensions:
        by_class.setdefault(type(extension), extension)
    return list(by_class.values())
