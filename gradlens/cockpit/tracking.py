"""What a cockpit's steps share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.forward_passes import ForwardPasses
from gradlens.cockpit.optimizer_steps import OptimizerSteps
from gradlens.cockpit.run import Run
from gradlens.cockpit.updates import Updates
from gradlens.curvature.probe import Probe, ProbedModel
from gradlens.gradients.gradients import Setting
from gradlens.observers.observer import Observer
from gradlens.parts.assembly import BatchAssembly
from gradlens.parts.processes import processes_apart
from gradlens.quantities.quantity import Quantity
from gradlens.samples.plan import Plans
from gradlens.torch_private import is_joined


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
    optimizer_steps: OptimizerSteps
    assembly: BatchAssembly
    forward_passes: ForwardPasses
    observers: Sequence[Observer]
    budget: Budget | None
    output_plans: Plans = field(default_factory=Plans)
    probed: dict[Probe, ProbedModel] = field(default_factory=dict)

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

    def begin_step(self, global_step: int) -> None:
        """A step's context is entered: the one before is over, and what waited for the update."""
        budget, is_first = self.budget, not self.run.has_begun
        goes_back = self.run.begin_step(global_step)
        if budget is not None:
            if budget.begin_step(global_step):  # what was tracked before has been paid for
                self.run.take_in(global_step, "spending", budget.spending)
            if budget.pays_for_none:
                self.run.note_now(budget.pays_for_none)
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
        is_behind = self.forward_passes.begin_step(global_step)
        if is_behind and self.run.has_values(global_step):
            self.run.note_now(REPEATED)
        elif goes_back:
            self.run.note_now(BACK)
        left_over = self.assembly.begin_step(global_step)
        if left_over:
            self.run.note_now(left_over)

    def end_step(self, global_step: int, goes_on: bool = False) -> None:
        """A step's context is left; perhaps the step goes on with another one."""
        self.forward_passes.end_step(global_step, goes_on)
        if not goes_on:
            self.optimizer_steps.forget()
            self.expect(self.forward_passes.next_steps)

    def expect(self, steps: Sequence[int]) -> None:
        """Prepare forward passes for one of these steps; without any, it is unknown which comes."""
        pending = self.updates.pending
        needs_next_step = pending is not None and pending.needs_next_step
        self.forward_passes.expect(steps, needs_next_step)

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
        self.forward_passes.close()


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
