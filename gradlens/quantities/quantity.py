"""The contract of a quantity: options, what it needs, and the phases in which it computes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from inspect import isabstract
from itertools import takewhile
from typing import Any, ClassVar, Literal, TypeAlias, final

from backpack.extensions.backprop_extension import BackpropExtension
from torch import nn

from gradlens.curvature.curvature import Curvature
from gradlens.curvature.probe import Probe
from gradlens.history.view import View
from gradlens.quantities.step import Measure, Step
from gradlens.quantities.update import Update
from gradlens.reductions import Reduction
from gradlens.schedules import EVERY_STEP, Schedule, checked
from gradlens.signals.selection import Selection, select
from gradlens.signals.signal import Request
from gradlens.spelling import near
from gradlens.stateful import State, Stateful

Needed: TypeAlias = Literal[
    "loss", "optimizer", "closure", "individual_losses", "gradients_of_parts", "groups"
]


class Phase(Enum):
    """A time in a tracked step at which quantities compute; the value is the method's name."""

    BEFORE_BACKWARD = "before_backward"
    """When the context is entered: the loss's graph is complete."""
    AFTER_BACKWARD = "after_backward"
    """When the context is left: gradients and reductions are computed."""
    BEFORE_OPTIMIZER = "before_optimizer"
    """Right before a step of the optimizer that was passed, which takes the gradients as they are.
    """
    AFTER_OPTIMIZER = "after_optimizer"
    """Right after a step of the optimizer that was passed, which still has its gradients."""
    AFTER_UPDATE = "after_update"
    """When all parameters are updated: the optimizer has stepped, or the next step begins."""
    AT_NEXT_STEP = "at_next_step"
    """When the context of the next step is left."""


@dataclass(eq=False)
class Quantity(ABC):
    """A quantity of a training run, computed at the steps of its own schedule.

    A subclass states as data what it needs (``reductions``, ``needs``), when it computes
    (``phases``) and how it is shown (``view``). At a tracked step the cockpit calls, for each of
    its phases, the method with the phase's name. The last of these methods returns the value: a
    number, an array or tensor, or lists and dicts of these. What another one returns is passed to
    the next one as ``earlier``.

    The usual combinations of phases have base classes, such as ``SingleStepQuantity``, whose
    subclasses define ``compute`` alone. ``TypeError`` if ``track_schedule`` is neither a
    number nor callable, or if ``phases`` are empty, in another order than in a step, or without
    their methods.
    """

    track_schedule: Schedule | int = EVERY_STEP
    """Function from the global step to whether the quantity is tracked at that step, or a number K
    for every K-th step."""
    verbose: bool = False
    """Whether each value is printed."""
    _: KW_ONLY
    name: str = ""
    """Key in the history, by default the name of the class; unique in a cockpit."""

    phases: ClassVar[Sequence[Phase]] = ()
    """The phases in which the quantity computes, in the order of ``Phase``."""
    reductions: Sequence[Reduction] = field(default=(), init=False, repr=False)
    """Reductions of the per-sample gradients whose results the quantity reads from the step."""
    measures: Sequence[Measure] = field(default=(), init=False, repr=False)
    """Functions of the step whose results the quantity reads by ``step.measured``; the program
    waits once for a device, since those of all quantities are moved together."""
    needs: Sequence[Needed] = field(default=(), init=False, repr=False)
    """What the quantity needs on a tracked step: ``"loss"``, ``"optimizer"`` and ``"closure"``,
    which the user passes to the context; ``"individual_losses"``, which are read off the loss's
    graph if the user doesn't pass them; or ``"gradients_of_parts"``, for ``step.parts``."""
    on: Probe | None = field(default=None, init=False, repr=False)
    """Whose loss's curvature ``before_backward`` is given; ``None`` for that of the step's loss."""
    retains_gradients: ClassVar[bool] = False
    """Whether per-sample gradients are kept until the optimizer has stepped."""
    ratios: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Keys of values that are ratios, with those of their numerators and denominators."""
    choices: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Names of options with what they may be; ``ValueError`` for anything else."""
    least: ClassVar[Mapping[str, int]] = {}
    """Names of options that are numbers or ``None``, with the smallest number they may be."""
    is_relative: ClassVar[bool] = False
    """Whether ``update.start_norms`` are measured in ``Phase.AFTER_UPDATE``."""
    returns_to_start: ClassVar[bool] = False
    """Whether ``update.start`` is there in ``Phase.AFTER_UPDATE``, and processes exchange then."""
    view: ClassVar[View] = View("")
    """Title, group and axis with which figures show the quantity."""
    modules: Mapping[str, nn.Module] = field(default_factory=dict, init=False, repr=False)
    """Layers by name whose signals are captured."""

    schedule: Schedule = field(init=False, repr=False)
    """The ``track_schedule`` as a function that is called once for each step."""
    keeps: Stateful | None = field(default=None, init=False, repr=False)
    """What keeps values of one step for the next, whose state is that of the quantity."""
    state: ClassVar[Sequence[str]] = ()
    """Names of what else is kept for later values, in attributes of these names behind a ``_``."""
    in_cockpit: bool = field(default=False, init=False, repr=False)
    """Whether the quantity is in a cockpit; it can't be in a second one, since it may keep values
    of one step for the next."""
    has_started: bool = field(default=False, init=False, repr=False)
    """Whether ``start`` was called, or a state was loaded."""

    def __post_init__(self) -> None:
        self.name = self.name or type(self).__name__
        self.schedule = checked(self.track_schedule, self.name)
        if not isinstance(self.verbose, bool):
            raise TypeError(
                f"{self.name}: verbose={self.verbose!r} is neither True nor False: pass other "
                "settings by their names"
            )
        for option, choices in self.choices.items():
            given = getattr(self, option)
            if given not in choices:
                names, hint = ", ".join(map(repr, choices)), near(str(given), choices)
                raise ValueError(f"{self.name}: {option}={given!r} is none of {names}{hint}")
        for option, least in self.least.items():
            given = getattr(self, option)
            if given is not None and given < least:
                raise ValueError(f"{self.name}: {option}={given} is too few: use {least} or more")
        if not self.phases or [p for p in Phase if p in self.phases] != list(self.phases):
            raise TypeError(
                f"{self.name}: phases={self.phases!r}: list one Phase or more, in their order, or "
                "derive from a class that does, such as SingleStepQuantity"
            )
        for phase in self.phases:
            if getattr(type(self), phase.value) is getattr(Quantity, phase.value):
                raise TypeError(
                    f"{self.name} lists {phase} among its phases: define its method {phase.value}"
                )

    # The methods of the phases: a subclass defines those of its own.

    def before_backward(self, curvature: Curvature) -> Any:
        """Compute in ``Phase.BEFORE_BACKWARD``, from the curvature of the loss, or of a probe's."""
        raise NotImplementedError

    def after_backward(self, step: Step, earlier: Any) -> Any:
        """Compute in ``Phase.AFTER_BACKWARD``, from gradients and reductions."""
        raise NotImplementedError

    def before_optimizer(self, step: Step, earlier: Any) -> Any:
        """Compute in ``Phase.BEFORE_OPTIMIZER``.

        ``step`` is the one that the optimizer's follows. Its gradients are those that the optimizer
        takes, such as clipped ones; its reductions and signals are freed by then.
        """
        raise NotImplementedError

    def after_optimizer(self, step: Step, earlier: Any) -> Any:
        """Compute in ``Phase.AFTER_OPTIMIZER``; as before it, but gradients may have changed."""
        raise NotImplementedError

    def after_update(self, step: Step, update: Update, earlier: Any) -> Any:
        """Compute in ``Phase.AFTER_UPDATE``.

        ``step`` is the one that the update follows; its reductions and signals are freed by then.
        """
        raise NotImplementedError

    def at_next_step(self, start: Step, update: Update, end: Step, earlier: Any) -> Any:
        """Compute in ``Phase.AT_NEXT_STEP``; ``update`` leads from ``start`` to ``end``."""
        raise NotImplementedError

    # Further methods that a subclass may define.

    def choose(  # noqa: B027
        self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Select layers or parameters when a cockpit is made; by default, do nothing.

        ``parameters`` are the trainable ones by name. ``model`` is ``None`` if the cockpit was
        given parameters only. ``ValueError`` if nothing fits.
        """

    def start(self, parameters: Mapping[str, nn.Parameter]) -> None:  # noqa: B027
        """Prepare for a run when a cockpit's first context is entered; by default, do nothing."""

    def adapt_to(self, step: Step) -> None:  # noqa: B027
        """Adapt later steps to this step's results; by default, do nothing."""

    def state_dict(self) -> State:
        """What later values depend on, besides the step itself: by default, ``state`` or ``keeps``.

        Called between steps, once the quantity has started. Nested dicts, lists and tuples of
        tensors, numbers and strings; of tensors that are changed in place, copies.
        """
        if self.keeps is not None:
            return self.keeps.state_dict()
        kept = {name: getattr(self, f"_{name}") for name in self.state}
        return {n: dict(each) if isinstance(each, dict) else each for n, each in kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned, if it isn't empty, instead of ``start``.

        Tensors may be on another device than the parameters.
        """
        if self.keeps is not None:
            self.keeps.load_state_dict(state)
        elif not self.state:
            raise ValueError("the quantity saves no state, but there is one")
        for name in self.state:
            setattr(self, f"_{name}", state[name])

    @final
    def join_cockpit(self) -> None:
        """Called by the cockpit that the quantity is in from now on."""
        self.in_cockpit = True

    @final
    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Called when a context is entered, until the quantity has started."""
        self.has_started = True
        self.start(parameters)

    @final
    def resume(self, state: Mapping[str, Any]) -> None:
        """Called by a cockpit that continues from a state."""
        if state:
            self.load_state_dict(state)
            self.has_started = True

    # What the cockpit reads, which follows from the data and the schedule.

    @property
    def of_samples(self) -> bool:
        """Whether values are computed from per-sample gradients."""
        return bool(self.reductions) or self.retains_gradients

    @property
    def of_loss_curvature(self) -> bool:
        """Whether values are computed from the curvature of the step's own loss."""
        return Phase.BEFORE_BACKWARD in self.phases and self.on is None

    @property
    def layer_requests(self) -> Mapping[str, Request]:
        """What is captured of the signals of ``modules``, by their names; by default, nothing."""
        return {}

    def should_compute(self, global_step: int) -> bool:
        """Whether the quantity has a value at this step."""
        return bool(self.schedule(global_step))

    def is_active(self, global_step: int) -> bool:
        """Whether the quantity needs this step, to compute a value or to adapt to it."""
        return self.should_compute(global_step)

    def reductions_at(self, global_step: int) -> tuple[Reduction, ...]:
        """Reductions of the per-sample gradients of this step."""
        reductions = tuple(self.reductions)
        return reductions if reductions and self.should_compute(global_step) else ()

    def extensions(self, global_step: int) -> list[BackpropExtension]:
        """BackPACK extensions that are active in this step's backward pass; by default, none."""
        return []

    def extension_hooks(self, global_step: int) -> list[Callable[[nn.Module], None]]:
        """Functions that are called on each module after BackPACK's extensions have run on it."""
        return []

    @property
    def extends_backward(self) -> bool:
        """Whether the class names BackPACK extensions or extension hooks itself."""
        names = ("extensions", "extension_hooks")
        return any(getattr(type(self), name) is not getattr(Quantity, name) for name in names)

    @property
    def needs_graph(self) -> bool:
        """Whether forward passes must not run compiled at steps at which it is active.

        Compiled code shows neither the operations in the loss's graph nor hooks on layers.
        """
        of_loss = self.of_loss_curvature or "individual_losses" in self.needs
        of_layers = self.extends_backward or bool(self.layer_requests)
        return self.of_samples or of_loss or of_layers


def class_names(quantity: Quantity) -> tuple[str, ...]:
    """Names of the quantity's class and of those it derives from, up to the first abstract one.

    The most specific is first. A figure shows a quantity with the instrument of the first of these
    names that has one, so that a class derived from ``GradNorm`` is drawn as ``GradNorm`` is.
    """
    kinds = (cls for cls in type(quantity).__mro__ if issubclass(cls, Quantity))
    concrete = takewhile(lambda cls: cls is not Quantity and not isabstract(cls), kinds)
    return tuple(cls.__name__ for cls in concrete)


# The usual combinations of phases ---------------------------------------------------------------


class SingleStepQuantity(Quantity):
    """A quantity of a single step's loss, gradients and reductions."""

    phases = (Phase.AFTER_BACKWARD,)

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at a tracked step; called after the backward pass."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step)


@dataclass(eq=False)
class CurvatureQuantity(Quantity):
    """A quantity of the loss's curvature, computed before the backward pass frees the graph.

    With a probe, ``on``, it is of the curvature of the probe's loss instead, and doesn't need the
    step's loss. Where a step's batch comes in parts, it is computed once, before the last one.
    """

    phases = (Phase.BEFORE_BACKWARD,)
    needs: Sequence[Needed] = field(default=("loss",), init=False, repr=False)

    on: Probe | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on is not None:
            self.needs = tuple(each for each in self.needs if each != "loss")

    @abstractmethod
    def compute(self, curvature: Curvature) -> Any:
        """The value at a tracked step; called before the backward pass."""

    @final
    def before_backward(self, curvature: Curvature) -> Any:
        return self.compute(curvature)


class GradientCurvatureQuantity(Quantity):
    """A quantity of the loss's curvature, and of the gradients that are computed after it."""

    phases = (Phase.BEFORE_BACKWARD, Phase.AFTER_BACKWARD)
    needs: Sequence[Needed] = ("loss",)

    @abstractmethod
    def before_backward(self, curvature: Curvature) -> Any:
        """What ``compute`` needs of the curvature."""

    @abstractmethod
    def compute(self, step: Step, earlier: Any) -> Any:
        """The value at a tracked step; ``earlier`` is what ``before_backward`` has returned."""

    @final
    def after_backward(self, step: Step, earlier: Any) -> Any:
        return self.compute(step, earlier)


class OptimizerQuantity(Quantity):
    """A quantity of an optimizer's state, and of the gradients that it has taken.

    It is computed right after the step of the optimizer that is passed to the context. Where that
    isn't seen, the value is a NaN: a gradient scaler has skipped it, or it is a part of compiled
    code, or ran inside the context.
    """

    phases = (Phase.AFTER_OPTIMIZER,)
    needs: Sequence[Needed] = ("optimizer",)

    @abstractmethod
    def compute(self, step: Step) -> Any:
        """The value at the step that the optimizer's follows; its ``measures`` are known then."""

    @final
    def after_optimizer(self, step: Step, earlier: Any) -> Any:
        return self.compute(step)


class UpdateQuantity(Quantity):
    """A quantity of the parameter update that follows a step.

    It is computed right after the optimizer's step if the optimizer is passed to the context, and
    otherwise when the next context is entered.
    """

    phases = (Phase.AFTER_UPDATE,)

    @abstractmethod
    def compute(self, step: Step, update: Update) -> Any:
        """The value at the step that the update follows."""

    @final
    def after_update(self, step: Step, update: Update, earlier: Any) -> Any:
        return self.compute(step, update)


class TwoPointQuantity(Quantity):
    """A quantity of a step, the update after it, and the next step.

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


# Of single layers or parameters ---------------------------------------------------------------


Summaries: TypeAlias = Mapping[str, tuple[str, Callable[[Sequence[float]], float]]]


class OfParts(Quantity):
    """A quantity with a value for each layer, or for each parameter."""

    summaries: ClassVar[Summaries] = {}
    """Entries of a record for all parts together: the entry of each part's value that they are of,
    and what is made of those that are numbers, such as ``mean`` or ``max``."""

    def summary(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """Further entries of the record, for all parts together; by default, the ``summaries``.

        One is left out if no part has the entry, and a NaN with its reason if none has a number.
        """
        found: dict[str, Any] = {}
        records = [part for part in parts.values() if isinstance(part, Mapping)]
        for name, (entry, combine) in self.summaries.items():
            values = [record[entry] for record in records if entry in record]
            known = [value for value in values if not math.isnan(value)]
            if values:
                found[name] = combine(known) if known else values[0]
        return found

    def end_step(self) -> None:
        """Called when all parts of a step have values; by default, do nothing."""


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def select_for(quantity: str, model: nn.Module | None, layers: Selection) -> dict[str, nn.Module]:
    """As ``select``; ``ValueError`` names the quantity, also if there is no model."""
    if model is None:
        raise ValueError(
            f"{quantity} selects layers: pass the model, as in Cockpit(model, ...), instead of "
            "its parameters"
        )
    try:
        return select(model, layers)
    except ValueError as error:
        raise ValueError(f"{quantity}: {error}") from None
