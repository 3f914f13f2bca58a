"""What a cockpit's steps share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.forward_passes import ForwardPasses
from gradlens.cockpit.model import processes_apart
from gradlens.cockpit.run import Run
from gradlens.cockpit.updates import Updates
from gradlens.curvature.probe import ProbedModels
from gradlens.gradients.gradients import Setting
from gradlens.graph.data_parallel import may_end_alone
from gradlens.observers.observer import Observer, Outcome, StepContext
from gradlens.parts.assembly import BatchAssembly
from gradlens.quantities.quantity import Quantity
from gradlens.samples.plan import Plans


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """The parts of a cockpit that its steps work on.

    ``setting`` names the parameters, the model and the loss reduction. ``output_plans`` are plans
    of the graphs of the network's outputs, for curvature.
    """

    quantities: Sequence[Quantity]
    setting: Setting
    run: Run
    boundary: Boundary
    updates: Updates
    assembly: BatchAssembly
    forward_passes: ForwardPasses
    observers: Sequence[Observer]
    budget: Budget | None
    output_plans: Plans
    probed: ProbedModels

    @property
    def may_end_alone(self) -> bool:
        """Whether the other processes may have no further step."""
        return may_end_alone(self.setting.replicas)

    def begin_idle_step(self, global_step: int) -> None:
        """The context of a step is entered for which the budget has no means."""
        self.boundary.begin_step(global_step)
        self._begin_budget(global_step)
        self.run.begin_step(global_step)
        self.tell(lambda observer: observer.skip())
        if self.budget is not None:
            self.budget.begin_backward()

    def end_idle_step(self, global_step: int) -> None:
        """The context of such a step is left."""
        if self.budget is None:
            return
        self.budget.end_backward(())
        forecast = self.forward_passes.forecast
        steps = forecast.steps_behind(global_step)
        if self.budget.expect(steps):
            forecast.end_step(global_step)
        else:
            self.forward_passes.layers.end(global_step, False)
            self.expect(steps)
        self.budget.end_step()

    def _begin_budget(self, global_step: int) -> None:
        """A step's context is entered: the one before is over, and paid for."""
        if self.budget is not None:
            if self.budget.begin_step(global_step):
                self._record_spending(self.budget)
            if self.budget.pays_for_none:
                self.run.note(global_step, self.budget.pays_for_none)

    def begin_step(self, global_step: int) -> None:
        """A step's context is entered: what waited for the update is over."""
        self._begin_budget(global_step)
        new = [quantity for quantity in self.quantities if not quantity.has_started]
        for quantity in new:
            with self.boundary.contain(f"starting {quantity.name}"):
                quantity.begin(self.setting.parameters)
        late = [quantity.name for quantity in new if type(quantity).start is not Quantity.start]
        if late and self.run.is_continued and not self.run.has_begun:
            self.run.note(global_step, LATE_START.format(names=", ".join(late), step=global_step))
        apart = processes_apart(self.setting)
        if apart:
            self.run.note(global_step, APART.format(count=apart))
        self._compare_processes()
        self.updates.begin_step(global_step)
        self.run.begin_step(global_step)
        is_behind = self.forward_passes.forecast.is_behind(global_step)
        if is_behind and self.run.has_values(global_step):
            self.run.note(global_step, REPEATED)
        self.forward_passes.layers.announce(global_step)
        left_over = self.assembly.begin_step(global_step)
        if left_over:
            self.run.note(global_step, left_over)

    def _compare_processes(self) -> None:
        if self.assembly.is_compared or self.may_end_alone:
            return
        several = self.assembly.processes.count > 1
        texts = [f"{q.name}: {q.track_schedule!r}" for q in self.quantities if several]
        self.assembly.compare(texts)

    def tell(self, what: Callable[[Observer], None]) -> None:
        """Tell all observers something; where one fails, the others go on."""
        self.boundary.tell(self.observers, what)

    def end_step(self, context: StepContext, outcome: Outcome) -> None:
        """A step's context is left: it is complete, or goes on with another context, or neither."""
        goes_on = context.accumulating and outcome.error is None
        forward_passes = self.forward_passes
        forward_passes.layer_hooks.take_error()
        forward_passes.outputs.take()
        forward_passes.layers.end(context.global_step, goes_on)
        if not context.accumulating and outcome.error is None:
            self.updates.close_interval()
        if not goes_on:
            forward_passes.eager_calls.end_step()
            self.expect(forward_passes.forecast.next_steps)

    def expect(self, steps: Sequence[int]) -> None:
        """Prepare forward passes for one of these steps; without any, it is unknown which comes."""
        waits = self.updates.is_waiting or self.assembly.has_own_parts
        self.forward_passes.expect(steps, self.updates.needs_next_step, waits)
        self.tell(lambda observer: observer.expect(steps))

    def close(self) -> None:
        """Compute what waited for the last update, remove all hooks, and release memory."""
        with self.boundary.contain("the last update"):
            self.updates.resolve_and_close()
            self.updates.close_interval()
        self.tell(lambda observer: observer.close())
        with self.boundary.contain("closing the run"):
            if self.budget is not None:
                self._record_spending(self.budget)
                if self.budget.without_turns:
                    self.run.note(self.budget.latest_step, self.budget.without_turns)
            self.run.close()
        self.setting.buffer.free()
        self.probed.close()
        self.forward_passes.close()

    def _record_spending(self, budget: Budget) -> None:
        self.run.record_spending(budget.latest_step, budget.spending)


REPEATED = (
    "the step has had a context before, whose values are replaced in the history; the run's file "
    "keeps both. Give each context a step of its own, counted through all epochs, or each network "
    "a cockpit of its own"
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
