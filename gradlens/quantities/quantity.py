"""What a quantity is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from inspect import isabstract
from itertools import takewhile
from typing import Any, ClassVar, Literal, TypeAlias, final

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.curvature.loss_curvature import LossCurvature
from gradlens.history.view import View
from gradlens.per_sample.extension import PerSampleGradients
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update
from gradlens.reductions import Reduction
from gradlens.schedules import Schedule, decided_once, linear
from gradlens.signals.signal import Request

Needed: TypeAlias = Literal["loss", "optimizer", "individual_losses"]


class Phase(Enum):
    """When a quantity computes, in the order of one tracked step."""

    BEFORE_BACKWARD = "before backward"
    """On entering the context, while the loss's graph is whole."""
    AFTER_BACKWARD = "after backward"
    """On leaving the context."""
    AFTER_UPDATE = "after the update"
    """Once the optimizer has stepped."""
    AT_NEXT_STEP = "at the next step"
    """On leaving the next context."""


class Quantity(ABC):  # noqa: B024 - its subclasses say in which phases it computes
    """A quantity of a training run, computed at the steps of its own schedule.

    It declares as data what it needs (``reductions`` of per-sample gradients, ``needs`` from the
    user), when it computes (``phases``) and how it is shown (``view``). In each of its phases the
    method of that name is called; what the last one returns is the value, and what earlier ones
    return is passed on as ``earlier``. A value is a number, an array or tensor, or lists and dicts
    of these. The subclasses below are the usual combinations of phases.
    """

    phases: ClassVar[Sequence[Phase]] = ()
    """When it computes, in the order of ``Phase``."""
    reductions: Sequence[Reduction] = ()
    """Reductions of the per-sample gradients that ``compute`` asks the step for."""
    needs: ClassVar[Sequence[Needed]] = ()
    """What the context needs on a tracked step. The user passes loss and optimizer to it;
    per-sample losses are computed if the cockpit has been given the loss module."""
    retains_gradients: ClassVar[bool] = False
    """Whether per-sample gradients must stay until the optimizer has stepped."""
    view: ClassVar[View] = View("")
    modules: Mapping[str, nn.Module] = {}
    """Layers by name whose signals are captured."""

    def __init__(
        self,
        track_schedule: Schedule | None = None,
        verbose: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        """Track at the steps for which ``track_schedule`` is true, by default all.

        ``verbose`` prints each value. ``name`` is the key in the history, by default the name of
        the class; two quantities in a cockpit need different ones.
        """
        schedule = linear(1) if track_schedule is None else track_schedule
        self.name = type(self).__name__ if name is None else name
        if not callable(schedule):
            raise TypeError(
                f"{self.name}: track_schedule={schedule!r} is not callable: pass a function from "
                "the global step to a bool, such as gradlens.schedules.linear(10)"
            )
        self.track_schedule = decided_once(schedule)
        self.verbose = verbose

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.track_schedule!r}, name={self.name!r})"

    @property
    def of_samples(self) -> bool:
        """Whether values are made of per-sample gradients."""
        return bool(self.reductions) or self.retains_gradients

    @property
    def layer_requests(self) -> Mapping[str, Request]:
        """What of the signals of its ``modules`` is captured; by default, nothing."""
        return {}

    def should_compute(self, global_step: int) -> bool:
        """Whether there is a value to find at this step."""
        return bool(self.track_schedule(global_step))

    def is_active(self, global_step: int) -> bool:
        """Whether it needs the step, for a value or to adapt to it."""
        return self.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of per-sample gradients to be made at this step, if it is active."""
        reductions = tuple(self.reductions)
        return reductions if reductions and self.should_compute(global_step) else ()

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        """BackPACK extensions to be active in this step's backward pass."""
        retains = self.retains_gradients and self.should_compute(global_step)
        return [PerSampleGradients()] if retains or self.reductions_at(global_step) else []

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        """Functions to be called on each module after BackPACK's extensions have run on it."""
        return []

    def needs_layer_hooks(self, global_step: int) -> bool:
        """Whether layers need hooks in the forward pass of this step, if it is active.

        Curvature, BackPACK's extensions and per-sample losses need them. Per-sample gradients
        don't: they are found from the loss's graph.
        """
        curved = Phase.BEFORE_BACKWARD in self.phases
        if (curved or "individual_losses" in self.needs) and self.should_compute(global_step):
            return True
        found = self.extensions(global_step)
        extends = any(not isinstance(each, PerSampleGradients) for each in found)
        return extends or bool(self.extension_hooks(global_step))

    def choose(  # noqa: B027
        self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Select layers or parameters when a cockpit is made; by default, do nothing.

        ``parameters`` are the trainable ones by name; ``model`` is ``None`` if the cockpit has been
        given parameters only. ``ValueError`` if nothing fits.
        """

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:  # noqa: B027
        """Called when a cockpit's first context is entered; by default, do nothing."""

    def adapt_to(self, step: Step) -> None:  # noqa: B027
        """Adapt to this step's results, for later steps; by default, do nothing."""

    def before_backward(self, curvature: LossCurvature) -> Any:
        """``Phase.BEFORE_BACKWARD``: the loss's graph is whole."""
        raise NotImplementedError

    def after_backward(self, step: Step, earlier: Any) -> Any:
        """``Phase.AFTER_BACKWARD``: gradients and reductions are known."""
        raise NotImplementedError

    def after_update(self, step: Step, update: Update, earlier: Any) -> Any:
        """``Phase.AFTER_UPDATE``: the parameters are updated; ``step`` is the one before that."""
        raise NotImplementedError

    def at_next_step(self, start: Step, update: Update, end: Step, earlier: Any) -> Any:
        """``Phase.AT_NEXT_STEP``: ``update`` leads from ``start`` to ``end``."""
        raise NotImplementedError


class SingleStepQuantity(Quantity):
    """A quantity whose value needs one step alone."""

    phases = (Phase.AFTER_BACKWARD,)

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at a step for which ``should_compute`` is true; called after backward."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step)


class CurvatureQuantity(Quantity):
    """A quantity of the loss's curvature, computed before backward frees the graph."""

    phases = (Phase.BEFORE_BACKWARD,)
    needs: ClassVar[Sequence[Needed]] = ("loss",)

    @abstractmethod
    def compute(self, curvature: LossCurvature) -> Any:
        """The value at a step for which ``should_compute`` is true; called before backward."""

    @final
    def before_backward(self, curvature: LossCurvature) -> Any:
        return self.compute(curvature)


class GradientCurvatureQuantity(Quantity):
    """A quantity of the loss's curvature and of the gradients that backward computes after it."""

    phases = (Phase.BEFORE_BACKWARD, Phase.AFTER_BACKWARD)
    needs: ClassVar[Sequence[Needed]] = ("loss",)

    @abstractmethod
    def before_backward(self, curvature: LossCurvature) -> Any:
        """What ``compute`` needs of the curvature."""

    @abstractmethod
    def compute(self, step: Step, earlier: Any) -> Any:
        """The value, from the step and what ``before_backward`` has returned."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step, earlier)


class UpdateQuantity(Quantity):
    """A quantity whose value needs the parameter update that follows the step.

    It is computed right after the optimizer's step if the optimizer is passed to the context,
    otherwise when the next context is entered.
    """

    phases = (Phase.AFTER_UPDATE,)

    @abstractmethod
    def compute(self, step: Step, update: Update) -> Any:
        """The value at the step that the update followed."""

    @final
    def after_update(self, step: Step, update: Update, earlier: Any) -> Any:
        return self.compute(step, update)


class TwoPointQuantity(Quantity):
    """A quantity whose value needs a step, the update after it, and the next step.

    The per-sample gradients of both steps are projected onto the update. The value is stored under
    the first of the two.
    """

    phases = (Phase.AT_NEXT_STEP,)
    retains_gradients = True

    @abstractmethod
    def compute(self, start: Step, update: Update, end: Step) -> Any:
        """The value at ``start``; ``update`` has the projections at both points."""

    @final
    def at_next_step(self, start: Step, update: Update, end: Step, earlier: Any) -> Any:
        return self.compute(start, update, end)


def kinds(quantity: Quantity) -> tuple[str, ...]:
    """Names of the quantity's class and of those it derives from, up to the first abstract one.

    The most specific is first. A figure shows a quantity with the instrument of the first of these
    names that has one, so that a class derived from ``GradNorm`` is drawn as ``GradNorm`` is.
    """
    concrete = takewhile(
        lambda cls: cls is not Quantity and not isabstract(cls), type(quantity).__mro__
    )
    return tuple(cls.__name__ for cls in concrete)
