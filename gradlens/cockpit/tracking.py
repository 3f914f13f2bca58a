"""The steps of a cockpit: what is active at them, what their forward passes run with, their ends.

A forward pass runs before the context of its step is entered, so that it is prepared for the steps
that may come next. What it doesn't need costs it nothing: hooks on layers would take a hundredth to
a tenth of a plain step of a small network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import SAID_AFTER, Budget, Costs
from gradlens.cockpit.run import Run
from gradlens.cockpit.step_signals import NOTHING_TO_RECORD, StepSignals
from gradlens.cockpit.updates import Updates
from gradlens.curvature.probe import Probe, ProbedModel
from gradlens.diagnosis.opening import opening
from gradlens.gradients.gradients import Setting
from gradlens.graph.hooks import HookOwner, OwnedHook, removal
from gradlens.graph.model_calls import (
    forget_calls,
    forget_earlier_calls,
    keep_calls,
    keep_outputs,
    take_outputs,
)
from gradlens.graph.uncompiled import EagerCalls, uncompiled_calls
from gradlens.observers.observer import Observer
from gradlens.parts.assembly import BatchAssembly
from gradlens.parts.processes import processes_apart
from gradlens.quantities.quantity import Quantity
from gradlens.quantities.step import Step
from gradlens.samples.plan import Plans
from gradlens.signals.capture import FindAxes
from gradlens.signals.signal import LayerSignals
from gradlens.torch_private import (
    compiled_modules,
    is_joined,
    runs_step_hooks,
)


class Tracking:
    """The parts of a cockpit that its steps work on, and the order of these steps.

    ``setting`` names the parameters, the model and the loss reduction; the model is the network
    inside the ``wrapped`` one that the user calls. Observers ``of_optimizer`` are told of its
    steps. The quantities ``of_backpack`` name BackPACK's extensions. ``output_plans`` are plans of
    the graphs of the network's outputs, for curvature.
    """

    def __init__(
        self,
        *,
        setting: Setting,
        wrapped: nn.Module | None,
        loss_function: nn.Module | None,
        quantities: Sequence[Quantity],
        run: Run,
        boundary: Boundary,
        updates: Updates,
        assembly: BatchAssembly,
        observers: Sequence[Observer],
        of_optimizer: Sequence[Observer],
        budget: Budget | None,
        says_opening: bool,
    ) -> None:
        self.setting = setting
        self.quantities = quantities
        self.run = run
        self.boundary = boundary
        self.updates = updates
        self.assembly = assembly
        self.observers = observers
        self.budget = budget
        self.costs = Costs() if budget is None else budget
        self._says_opening = says_opening
        self.optimizer_steps = OptimizerSteps(of_optimizer, boundary, self.costs)
        self.output_plans = Plans()
        self.probed: dict[Probe, ProbedModel] = {}
        self.of_backpack = {each for each in quantities if each.extends_backward}
        self._of_graphs = {each for each in quantities if each.needs_graph}
        self._of_outputs = {each for each in quantities if each.of_loss_curvature}
        self._past: deque[int] = deque(maxlen=3)
        self._unfinished: int | None = None
        self._active: dict[int, tuple[Quantity, ...]] = {}
        self._eager_calls = EagerCalls([m for m in (wrapped, loss_function) if m is not None])
        # Compiled code is made anew where hooks come and go.
        self._is_compiled = wrapped is not None and bool(compiled_modules(wrapped))
        model = self._model = setting.model
        self._keeps_calls = model is not None
        self.signals: StepSignals | None = None
        if model is not None:
            keep_calls(model, user=self)
            if any(each.layer_requests for each in quantities):
                self.signals = StepSignals(model, quantities, boundary, run)
        self.expect(())

    # What is active.

    def active_at(self, global_step: int, is_contained: bool = True) -> tuple[Quantity, ...]:
        """The active quantities, which are decided on once for each step.

        Where a schedule raises an exception, its quantity isn't active, if this ``is_contained``.
        """
        if global_step not in self._active:
            active = []
            for quantity in self.quantities if self.costs.has_means(global_step) else ():
                try:
                    active += [quantity] if quantity.is_active(global_step) else []
                except Exception as error:
                    if not is_contained:
                        raise
                    self.boundary.report(f"{quantity.name}'s schedule", error)
            self._active[global_step] = tuple(active)
        return self._active[global_step]

    def is_look(self, global_step: int) -> bool:
        """Whether a budget is spent at a step: something is tracked, or nothing ever is."""
        has_means = self.costs.has_means(global_step)
        return has_means and (not self.quantities or bool(self.active_at(global_step)))

    def _possible(self, steps: Sequence[int]) -> Sequence[Quantity]:
        """The quantities that may be active at one of these steps: all of them without any step.

        A user's schedule may raise an exception, such as that of a table without an entry for the
        step: it is raised when the step is tracked, if it ever is.
        """
        try:
            found = [q for step in steps for q in self.active_at(step, is_contained=False)]
        except Exception:
            return self.quantities
        return found if steps else self.quantities

    @property
    def may_end_alone(self) -> bool:
        """Whether the other processes may have no further step."""
        return any(map(is_joined, self.setting.replicas))

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the parameters that need no gradient now."""
        return tuple(name for name, p in self.setting.parameters.items() if not p.requires_grad)

    def changed_parameters(self) -> tuple[list[str], list[str]]:
        """Names of the model's trained parameters that aren't tracked, and of tracked ones gone.

        The former were frozen, or absent, when the cockpit was made.
        """
        setting = self.setting
        if setting.model is None:
            return [], []
        leaves = setting.leaves
        tracked = {id(leaf) for leaf in [*setting.parameters.values(), *leaves.values()]}
        present = dict(setting.model.named_parameters())
        found = {id(parameter) for parameter in present.values()}
        return (
            [name for name, p in present.items() if p.requires_grad and id(p) not in tracked],
            [n for n, p in setting.parameters.items() if not found & {id(p), id(leaves[n])}],
        )

    # A step, from one context to the next.

    def begin_step(self, global_step: int) -> None:
        """A step's context is entered: the one before is over, and what waited for the update."""
        is_first, goes_back = not self.run.has_begun, self.run.begin_step(global_step)
        self._begin_measured(global_step)
        new = [quantity for quantity in self.quantities if not quantity.has_started]
        for quantity in new:
            with self.boundary.contain(f"starting {quantity.name}"):
                quantity.begin(self.setting.parameters)
        late = [quantity.name for quantity in new if type(quantity).start is not Quantity.start]
        is_late = bool(late) and is_first and self.run.is_continued
        if is_late and self.run.history.steps[0] < global_step:  # else all values are replaced
            self.run.note_now(LATE_START.format(names=", ".join(late), step=global_step))
        apart = processes_apart(self.setting) if is_first else 0
        if apart:
            self.run.note_now(APART.format(count=apart))
        is_compared = self.assembly.processes.count == 1 or self.assembly.is_compared
        if not (is_compared or self.may_end_alone):
            self.assembly.compare([f"{q.name}: {q.schedule!r}" for q in self.quantities])
        if self.updates.pending is not None or self.updates.interval is not None:
            self.updates.begin_step(global_step)
        if self._past and self._past[-1] >= global_step and self.run.has_values(global_step):
            self.run.note_now(REPEATED)
        elif goes_back:
            self.run.note_now(BACK)
        self._drop_other(global_step)
        if self.signals is not None:
            self.signals.begin_step(global_step)
        left_over = self.assembly.begin_step(global_step)
        if left_over:
            self.run.note_now(left_over)

    def _begin_measured(self, global_step: int) -> None:
        """Record what tracking costs, and say once what the first steps have shown."""
        costs, steps = self.costs, self.costs.steps
        if costs.begin_step(global_step) and (self.budget or self._says_opening):
            self.run.take_in(global_step, "spending", costs.spending)
        if self.budget is not None and self.budget.pays_for_none:
            self.run.note_now(self.budget.pays_for_none)
        if self._says_opening and steps == SAID_AFTER < costs.steps:
            self.boundary.attempt("summing up the first steps", None, self._say_opening)

    def _say_opening(self) -> None:
        for line in opening(self.run.history):
            self.run.say(line)

    def begin_backward(self, global_step: int, scale: float, find_axes: FindAxes) -> None:
        """A step's backward pass begins, as in ``SignalCapture.begin``."""
        if self.signals is not None:
            self.signals.begin(self.active_at(global_step), scale, find_axes)

    def _drop_other(self, global_step: int) -> None:
        """Drop the micro-batches of another step, which is never finished."""
        if self._unfinished is not None and self._unfinished != global_step:
            self._past.append(self._unfinished)
            self._unfinished = None
            if self.signals is not None:
                self.signals.discard_step()

    def signals_of(self, global_step: int) -> LayerSignals:
        """The signals captured at a step, as ``StepSignals.finish``."""
        if self.signals is None:
            return LayerSignals()
        return self.signals.finish(global_step, self.active_at(global_step), self.assembly)

    def end_step(self, global_step: int, goes_on: bool = False) -> None:
        """A step's context is left, also after an exception; perhaps another one follows."""
        if self._of_outputs:
            self.take_outputs()
        if not goes_on:
            self._past.append(global_step)
            forget_earlier_calls(self._model)
            self.optimizer_steps.forget()
            self._expect_next()
            return
        self._unfinished = global_step
        if self.signals is not None:
            self.signals.end_part(self.active_at(global_step))

    def take_outputs(self) -> tuple[Tensor, ...]:
        """What the model has returned last, if a quantity may need it; it is kept no longer."""
        return take_outputs(self._model, self) if self._of_outputs else ()

    # The steps to come.

    @property
    def past(self) -> list[int]:
        """The numbers of the last steps."""
        return [*self._past]

    def continue_from(self, past: Collection[int]) -> None:
        """Continue from a state, whose last steps had these numbers."""
        self._past.clear()
        self._past += past
        self._active = {}
        self._expect_next()

    def _expect_next(self) -> None:
        """The step is over; the next one follows at the distance of the last, if that is known."""
        self._unfinished = None
        distances = {after - before for before, after in pairwise(self._past)}
        is_known = len(distances) == 1 and 0 not in distances
        following = (self._past[-1] + distances.pop(),) if is_known else ()
        if self.signals is not None:
            self.signals.expect(self._possible(following))
        self.expect(following)

    def expect(self, steps: Sequence[int]) -> None:
        """Prepare forward passes for one of these steps; without any, it is unknown which comes."""
        pending = self.updates.pending
        needs_next_step = pending is not None and pending.needs_next_step
        self._active = {step: self._active[step] for step in steps if step in self._active}
        active = self._possible(steps)
        self._eager_calls.run_if(needs_next_step or not self._of_graphs.isdisjoint(active))
        # Without means, hooks would take a tenth of a plain step of a small network for nothing.
        may_be_tracked = needs_next_step or not steps or any(map(self.costs.has_means, steps))
        needed = may_be_tracked or self._is_compiled
        # From what the model is called with, the number of samples is read.
        if self._model is not None and needed != self._keeps_calls:
            self._keeps_calls = needed
            (keep_calls if needed else forget_calls)(self._model, user=self)
        if self._of_outputs:
            keep_outputs(self._model, self, not self._of_outputs.isdisjoint(active))

    @contextmanager
    def forward(self, global_step: int) -> Iterator[None]:
        """A context for a step's forward pass, which doesn't run compiled if a quantity needs it.

        There is a note if the context can't have this effect.
        """
        self.expect([global_step])
        with ExitStack() as stack:
            if self._eager_calls.needed:
                note = partial(self.run.note, global_step)
                with self.boundary.contain("running a forward pass uncompiled", note):
                    stack.enter_context(uncompiled_calls())
            self._drop_other(global_step)
            if self.signals is not None:
                active = self.active_at(global_step)
                stack.enter_context(self.signals.forward(global_step, active))
            yield

    def evaluation(self, step: Step, name: str) -> AbstractContextManager[None]:
        """As ``StepSignals.evaluation``."""
        if self.signals is None:
            raise ValueError(NOTHING_TO_RECORD)
        return self.signals.evaluation(step, name)

    def close(self) -> None:
        """Compute what waited for the last update, remove all hooks, and release memory."""
        with self.boundary.contain("the last update"):
            self.updates.resolve()
            self.updates.drop()
            self.optimizer_steps.close()
        with self.boundary.contain("closing the run"):
            self.boundary.tell(self.observers, lambda observer: observer.close())
            if self.budget is not None:
                self.run.take_in(self.budget.latest_step, "spending", self.budget.spending)
                if self.budget.without_turns:
                    self.run.note(self.budget.latest_step, self.budget.without_turns)
            self.run.close()
        self.setting.buffer.free()
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove all hooks on the model, and forget its calls."""
        if self.signals is not None:
            self.signals.close()
        self._eager_calls.close()
        if self._model is not None:
            forget_calls(self._model, user=self)


class OptimizerSteps(HookOwner):
    """Tells observers when the optimizer of the latest context begins its step, and ends it.

    A step inside of another one's, such as that of a base optimizer, is a part of it. Compiled
    steps aren't seen. Hooks stay from step to step, since a compiled step would be compiled anew
    for others.
    """

    def __init__(self, observers: Sequence[Observer], boundary: Boundary, costs: Costs) -> None:
        self._observers = observers
        self._boundary = boundary
        self._costs = costs
        self._optimizer: Optimizer | None = None
        self._remove_hooks: Callable[[], object] = lambda: None
        self._depth = 0
        self._is_told = False

    def follow(self, optimizer: Optimizer | None) -> None:
        """A context is entered with this optimizer; without one, it is the last one still."""
        self._is_told = True
        if optimizer is None or optimizer is self._optimizer or not self._observers:
            return
        self.close()
        if runs_step_hooks(optimizer):
            before = optimizer.register_step_pre_hook(OwnedHook(self, OptimizerSteps._begin))
            after = optimizer.register_step_post_hook(OwnedHook(self, OptimizerSteps._end))
            self._remove_hooks = removal(self, [before, after])
            self._optimizer = optimizer

    def rest(self) -> None:
        """A context is entered in which nothing is tracked: nobody is told until the next one."""
        self._is_told = False

    def forget(self) -> None:
        """A context is left: a step that has begun before, and hasn't ended, has raised.

        Or the context is in its closure; its end is that of a step, too.
        """
        self._depth = 0

    def _begin(self, optimizer: Optimizer, *_: object) -> None:
        self._depth += 1
        if self._depth == 1 and self._is_told:
            self._tell(lambda each: each.before_optimizer(optimizer))

    def _end(self, optimizer: Optimizer, *_: object) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._is_told:
            self._tell(lambda each: each.after_optimizer(optimizer))

    def _tell(self, what: Callable[[Observer], None]) -> None:
        began = self._costs.clock()
        self._boundary.tell(self._observers, what)
        self._costs.optimizer_step(began)

    def close(self) -> None:
        """Remove the hooks."""
        self._remove_hooks()
        self._optimizer = None


REPEATED = (
    "the step has had a context before, whose values are replaced in the history; the run's file "
    "keeps both. Give each context a step of its own, counted through all epochs, or each network "
    "a cockpit of its own"
)
BACK = (
    "the step comes after a later one: series are in the order of the steps' numbers, and not in "
    "that of the training. Count steps up, through all epochs, and give each loop a cockpit of its "
    "own; where a checkpoint is loaded, call cockpit.load_state_dict(...), too"
)
APART = (
    "torch.distributed has {count} processes, and values are those of this process's own samples: "
    "for those of the joined batch of processes that train the model together, pass it as "
    "DistributedDataParallel has wrapped it"
)
LATE_START = (
    "quantities start at step {step}, within a run that is continued: {names}. To continue from "
    "the run's own start, save cockpit.state_dict() with the model, and load it by "
    "cockpit.load_state_dict(...)"
)
