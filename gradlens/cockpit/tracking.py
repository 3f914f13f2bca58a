"""What a cockpit's steps share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradlens.backpack_adapter.layer_hooks import HookInstaller
from gradlens.cockpit.autopsy import Autopsies
from gradlens.cockpit.batch_assembly import BatchAssembly
from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.forecast import Forecast, may_hold
from gradlens.cockpit.layers import LayerTracking
from gradlens.cockpit.model import processes_apart
from gradlens.cockpit.run import Run
from gradlens.cockpit.sample_log import SampleLog
from gradlens.cockpit.stale_gradient import StaleGradient
from gradlens.cockpit.updates import Updates
from gradlens.curvature.probed_model import ProbedModels
from gradlens.diagnosis.live import LiveDiagnosis
from gradlens.facts.recorder import FactRecorder
from gradlens.gradients.gradients import Setting
from gradlens.graph.data_parallel import may_end_alone
from gradlens.graph.model_calls import ModelOutputs, forget_calls, keep_calls, keeps_calls
from gradlens.graph.scaler import GradientScale
from gradlens.graph.uncompiled import EagerCalls, uncompiled_calls
from gradlens.history.finding import Finding
from gradlens.quantities.quantity import Quantity
from gradlens.samples.plan import Plans


@dataclass(frozen=True)
class Tracking:
    """The parts of a cockpit that its steps work on.

    ``setting`` names the parameters, the model and the loss reduction. ``output_plans`` are plans
    of the graphs of the network's outputs, for curvature.
    """

    quantities: Sequence[Quantity]
    setting: Setting
    output_plans: Plans
    probed: ProbedModels
    run: Run
    updates: Updates
    assembly: BatchAssembly
    forecast: Forecast
    layer_hooks: HookInstaller
    eager_calls: EagerCalls
    model_outputs: ModelOutputs
    layers: LayerTracking
    stale_gradient: StaleGradient
    facts: FactRecorder | None
    diagnosis: LiveDiagnosis | None
    budget: Budget | None
    autopsies: Autopsies | None
    sample_log: SampleLog
    boundary: Boundary

    @property
    def may_end_alone(self) -> bool:
        """Whether the other processes may have no further step."""
        return may_end_alone(self.setting.replicas)

    def start(self) -> None:
        """Keep the calls of the model, from which the number of samples is read."""
        if self.setting.model is not None:
            keep_calls(self.setting.model, user=self.layer_hooks)
        self.expect(())

    def begin_idle_step(self, global_step: int) -> None:
        """The context of a step is entered for which the budget has no means."""
        self.boundary.begin_step(global_step)
        self._begin_budget(global_step)
        self.run.begin_step(global_step)
        if self.facts is not None:
            self.facts.skip()
        if self.budget is not None:
            self.budget.begin_backward()

    def end_idle_step(self, global_step: int) -> None:
        """The context of such a step is left."""
        if self.budget is None:
            return
        self.budget.end_backward(())
        steps = self.forecast.steps_behind(global_step)
        if self.budget.expect(steps):
            self.forecast.end_step(global_step)
        else:
            self.layers.end(global_step, False)
            self.expect(steps)
        self.budget.end_step()

    def _begin_budget(self, global_step: int) -> None:
        """A step's context is entered: the one before is over, and paid for."""
        if self.budget is not None:
            if self.budget.begin_step(global_step):
                self._record_spending(self.budget)
            if self.budget.pays_for_none:
                self.run.note(global_step, self.budget.pays_for_none)

    def begin_step(self, global_step: int, info: Mapping[str, Any]) -> None:
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
        if self.forecast.is_behind(global_step) and self.run.has_values(global_step):
            self.run.note(global_step, REPEATED)
        self.stale_gradient.begin_step(info.get("optimizer"))
        self.layers.announce(global_step)
        left_over = self.assembly.begin_step(global_step)
        if left_over:
            self.run.note(global_step, left_over)
        if self.facts is not None:
            with self.boundary.contain("recording the facts of a step"):
                if self._watches(global_step):
                    self.facts.begin(global_step, info)
                else:
                    self.facts.skip()

    def _watches(self, global_step: int) -> bool:
        return self.budget is None or self.budget.watches(global_step)

    def _compare_processes(self) -> None:
        if self.assembly.is_compared or self.may_end_alone:
            return
        several = self.assembly.processes.count > 1
        texts = [f"{q.name}: {q.track_schedule!r}" for q in self.quantities if several]
        if self.assembly.compare(texts, self.updates.is_of_another):
            self.updates.drop_projections()

    def end_step(
        self,
        global_step: int,
        info: Mapping[str, Any],
        scale: GradientScale,
        is_complete: bool,
        goes_on: bool,
    ) -> None:
        """A step's context is left.

        It is complete, or ``goes_on`` with another context, or an exception has left it.
        """
        self.layer_hooks.take_error()
        self.model_outputs.take()
        self.layers.end(global_step, goes_on)
        is_stale = self.stale_gradient.end_step(goes_on)
        if is_stale:
            self.run.note(global_step, NOT_ZEROED)
        if self.facts is not None:
            with self.boundary.contain("recording the facts of a step"):
                if is_complete or goes_on:
                    self.facts.end(info, scale, goes_on, is_stale)
                else:
                    self.facts.abandon()
        if is_complete:
            self.updates.close_interval()
            self._diagnose(LiveDiagnosis.after_step)
        if not goes_on:
            self.eager_calls.end_step()
            self.expect(self.forecast.next_steps)

    def _diagnose(self, find: Callable[[LiveDiagnosis], Sequence[Finding]]) -> None:
        """Record what is newly found wrong with the run."""
        if self.diagnosis is not None:
            with self.boundary.contain("diagnosing the run"):
                for finding in find(self.diagnosis):
                    self.run.record_finding(finding)

    def expect(self, steps: Sequence[int]) -> None:
        """Let later forward passes run with hooks on layers, and uncompiled, if a step needs that.

        Without any, it is unknown which step comes next, and hooks are installed.
        """
        self.forecast.keep(steps)
        if self.budget is not None:
            self._spare_forward_passes(self.budget, steps)
        needed = self.forecast.needs_layer_hooks(steps)
        next_step = self.updates.needs_next_step
        self.eager_calls.run_if(self.forecast.needs_graph(steps) or next_step)
        # Compiled code is made anew where hooks come and go, and isn't slowed down by any.
        stay = self.eager_calls.has_modules
        self.layer_hooks.install_if(needed or next_step or stay or not steps)
        self.model_outputs.keep_if(self.forecast.needs_outputs(() if stay else steps))

    def _spare_forward_passes(self, budget: Budget, steps: Sequence[int]) -> None:
        """Take away the hooks in forward passes of steps for which the budget has no means."""
        is_active = (may_hold(lambda n: bool(self.forecast.active_at(n)), step) for step in steps)
        watched = not steps or any(map(self._watches, steps))
        active = watched or any(is_active)
        waits = self.updates.is_waiting or self.assembly.has_own_parts
        started = all(quantity.has_started for quantity in self.quantities)
        budget.expect(steps, has_work=active or waits or not started)
        if self.facts is not None:
            self.facts.expect(watched)
        model = self.setting.model
        if model is None or self.eager_calls.has_modules:
            return
        needed = active or waits
        if needed != keeps_calls(model, user=self.layer_hooks):
            (keep_calls if needed else forget_calls)(model, user=self.layer_hooks)

    @contextmanager
    def uncompiled(self, global_step: int) -> Iterator[None]:
        """A context for a step's forward pass, which doesn't run compiled if a quantity needs it.

        There is a note if the context can't have this effect.
        """
        with ExitStack() as stack:
            if self.eager_calls.needed:
                note = partial(self.run.note, global_step)
                with self.boundary.contain("running a forward pass uncompiled", note):
                    stack.enter_context(uncompiled_calls())
            yield

    def flush(self) -> None:
        """Record the facts of all steps that are complete."""
        if self.facts is not None:
            with self.boundary.contain("recording the facts of a step"):
                self.facts.flush()

    def close(self) -> None:
        """Compute what waited for the last update, remove all hooks, and release memory."""
        with self.boundary.contain("the last update"):
            self.updates.resolve_and_close()
            self.updates.close_interval()
        if self.facts is not None:
            with self.boundary.contain("recording the last facts"):
                self.facts.close()
        self._diagnose(LiveDiagnosis.now)
        with self.boundary.contain("what is known of single samples"):
            self.sample_log.close()
        with self.boundary.contain("closing the run"):
            if self.budget is not None:
                self._record_spending(self.budget)
                if self.budget.without_turns:
                    self.run.note(self.budget.latest_step, self.budget.without_turns)
            self.run.close()
        self.setting.buffer.free()
        self.stale_gradient.close()
        self.layers.close()
        self.layer_hooks.close()
        self.probed.close()
        self.eager_calls.close()
        self.model_outputs.keep_if(False)
        if self.setting.model is not None:
            forget_calls(self.setting.model, user=self.layer_hooks)

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
NOT_ZEROED = (
    "the backward pass has added to gradients that the optimizer had used already, so that p.grad "
    "is a sum over steps: call optimizer.zero_grad() before it"
)
