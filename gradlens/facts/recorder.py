"""Records the facts of a run at each step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.facts.network import Network, activation_shares, setup_of
from gradlens.facts.parameters import (
    FEW,
    Strangers,
    dense,
    is_same,
    parameter_numbers,
    second_moments,
    some_elements,
    unscaled_norm,
    update_numbers,
)
from gradlens.facts.rows import (
    Rows,
    dense_labels,
    loss_rows,
    output_columns,
    rows_of,
    token_columns,
)
from gradlens.facts.step_facts import StepFacts, facts_of
from gradlens.gradients.gradients import Setting
from gradlens.gradients.loss_factor import joined_loss, loss_scale
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Loss, read_loss
from gradlens.graph.model_calls import ModelCall, calls_behind, latest_call
from gradlens.graph.scaler import GradientScale
from gradlens.observers.autopsy import learning_rate
from gradlens.observers.observer import Observer, Outcome, Records, StepContext
from gradlens.stateful import State
from gradlens.torch_private import runs_step_hooks, version, versions

FIRST_LAYER_STEPS = frozenset({0, 1, 2, 4, 8, 16})
LAYER_INTERVAL = 20
"""Layers and parameters are recorded at the first steps and then at every 20th, which divides the
price of reading all parameters by 20."""

NORM_INTERVAL = 4
"""The norm of all gradients is computed at the first steps and then at every fourth, since reading
all gradients takes up to 5 % of a step of a network of large matrix products."""

FLUSHED = 8
"""So many steps are read from the device together, which costs one synchronisation."""


class FactRecorder(Observer):
    """Records the facts of the steps of a run.

    Numbers stay on the device until those of some steps are read together.
    """

    work = "recording the facts of a step"

    def __init__(self, setting: Setting, run: Records) -> None:
        self._setting = setting
        self._run = run
        self._parameters = dense(setting.parameters)
        self._first = {name: some_elements(p, FEW) for name, p in self._parameters.items()}
        self._optimizer = GradientsUsed(self._parameters)
        self._strangers = Strangers()
        self._labels: Counter[int] = Counter()
        self._complete: list[StepFacts] = []
        self._present: StepFacts | None = None
        self._goes_on = False
        self._call: Callable[[], ModelCall | None] = lambda: None
        """The call of the model whose inputs were read last, which isn't kept alive."""
        self._calls = 1
        """How many calls of the model there are behind a loss: the first has the batch's inputs."""
        self._steps = 0
        self._before: dict[str, Tensor] = {}

    def enter(self, context: StepContext) -> None:
        """Read the loss's graph while it is whole; the last update is over."""
        info = context.info
        optimizer, given = info.get("optimizer"), info.get("loss")
        self._optimizer.enter(optimizer)
        facts = self._present
        if facts is None or not self._goes_on or facts.step != context.global_step:
            self._end_update()
            is_layer_step = self._steps in FIRST_LAYER_STEPS or self._steps % LAYER_INTERVAL == 0
            facts = StepFacts(context.global_step, of_layers={} if is_layer_step else None)
            self._present = facts
            self._steps += 1
        if given is not None and given.grad_fn is None:
            given = None
        is_first = facts.of_layers is not None and not self._goes_on
        graph = Graph(given) if is_first and given is not None else None
        if graph is not None:
            self._calls = max(len(calls_behind(graph, self._setting.model)), 1)
        call = latest_call(self._setting.model, self._calls)
        if call is not None and call is not self._call():
            self._call = weakref.ref(call)
            rows = rows_of(call)
            facts.rows += [] if rows is None else [rows]
        facts.ids += info.get("ids", ())
        loss = None
        if given is not None:
            scale = loss_scale(info)
            loss = read_loss(given, _samples(facts.rows, info), scale)
            self._read_loss(facts, loss, scale)
        if optimizer is not None:
            facts.numbers["lr"] = learning_rate(optimizer)
            facts.numbers["stateless"] = float(not optimizer.state)
            facts.numbers["overwritten"] = float(self._optimizer.is_overwritten)
            if self._optimizer.is_overwritten:
                facts.numbers["restored"] = is_same(self._first, self._parameters)
        if is_first:
            self._read_network(facts, graph, loss, info)

    def _read_loss(self, facts: StepFacts, loss: Loss, scale: float) -> None:
        found = loss_rows(loss)
        value = loss.value.detach().reshape(()).float() / scale
        facts.parts.append((value, scale != 1, found.count or loss.samples))
        if loss.row_weights is not None:
            facts.numbers["negative_weights"] = (loss.row_weights < 0).float().mean()
        if loss.function is None and loss.squared is None:
            return
        facts.loss_rows.append(found)
        facts.numbers["labels"] = found.count + float(facts.numbers.get("labels", 0.0))
        facts.numbers["classes"] = float(found.classes)
        facts.numbers |= found.of_targets

    def _read_network(
        self, facts: StepFacts, graph: Graph | None, loss: Loss | None, info: Mapping[str, Any]
    ) -> None:
        network = None
        if graph is not None and loss is not None:
            network = Network(graph, self._setting.names)
            strangers = self._strangers.numbers(network.strangers)
            facts.of_layers = activation_shares(network) | strangers | dense_labels(loss)
            facts.numbers |= output_columns(loss) | token_columns(self._call(), loss)
            facts.numbers |= network.columns(loss)
        setup = setup_of(self._setting, info, network, loss, facts.rows)
        self._run.take_in(facts.step, "setup", setup)
        if setup.groups and not any(name for group in setup.groups for name in group.parameters):
            self._run.note(facts.step, OTHER_OPTIMIZER)

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Read the gradients; a step that an exception has left isn't recorded."""
        self._optimizer.leave(context.accumulating and outcome.error is None)
        if self._optimizer.is_stale:
            self._run.note(context.global_step, NOT_ZEROED)
        if outcome.error is not None:
            self._present, self._goes_on, self._before = None, False, {}
            self.flush()
            return
        facts, info, scale = self._present, context.info, context.scale
        self._goes_on = context.accumulating
        if facts is None or context.accumulating:
            return
        if facts.parts:
            is_mean = self._setting.loss_reduction == "mean"
            facts.numbers["loss"] = joined_loss(facts.parts, is_mean)
        gradients = gradients_of(self._parameters)
        scales = scale.of(self._setting.parameters)
        is_norm_step = self._steps <= NORM_INTERVAL or self._steps % NORM_INTERVAL == 0
        total = unscaled_norm(gradients, scales) if is_norm_step else None
        if total is not None:
            facts.numbers["grad_norm"] = total
        facts.numbers["stale"] = float(self._optimizer.is_stale)
        if facts.of_layers is not None:
            facts.of_layers |= parameter_numbers(self._parameters, gradients, scales)
            if info.get("optimizer") is not None:
                facts.of_layers |= second_moments(info["optimizer"], self._parameters)
            self._before = {name: some_elements(p) for name, p in self._parameters.items()}
        self._optimizer.begin(scale if is_norm_step else None)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """See what it begins with."""
        self._optimizer.before_step(optimizer)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """See what it leaves."""
        self._optimizer.after_step(optimizer)

    def skip(self) -> None:
        """The update that follows the latest step is over, and nothing is seen until the next."""
        self._end_update()
        self._optimizer.forget()

    def _end_update(self) -> None:
        facts, self._present = self._present, None
        self._goes_on = False
        if facts is None:
            return
        if self._optimizer.is_seen:
            facts.numbers["updates"] = float(self._optimizer.count)
            at_step = self._optimizer.norm
            if self._optimizer.count == 1:
                found = facts.numbers.get("grad_norm") if at_step is None else at_step
                if found is not None:
                    facts.numbers["grad_norm_at_step"] = found
        if self._before and facts.of_layers is not None:
            facts.of_layers |= update_numbers(self._before, self._parameters)
        self._before = {}
        self._complete.append(facts)
        if len(self._complete) >= FLUSHED or self._steps <= FLUSHED:
            self.flush()

    def flush(self) -> None:
        """Record all steps that are complete."""
        steps, self._complete = self._complete, []
        for step, facts in facts_of(steps, self._labels).items():
            self._run.take_in(step, "facts", facts)

    def state_dict(self) -> State:
        """How many steps and labels there were; called between an update and the next context."""
        self._end_update()
        self.flush()
        return {"steps": self._steps, "labels": dict(self._labels)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._present, self._complete, self._goes_on = None, [], False
        self._steps = state["steps"]
        self._labels = Counter(state["labels"])

    def close(self) -> None:
        """Record the last step."""
        self._end_update()
        self.flush()


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients of parameters that this process has as a whole, if they aren't sparse."""
    return {
        name: p.grad
        for name, p in parameters.items()
        if p.grad is not None and p.grad.layout == torch.strided
    }


def _samples(rows: Sequence[Rows], info: Mapping[str, Any]) -> int:
    """N, from what was passed to the context, or the rows of the latest micro-batch; 0 if unknown.

    In the order in which a plan of the graph takes these.
    """
    losses = info.get("individual_losses")
    known = len(losses) if losses is not None and losses.dim() else 0
    return info.get("batch_size") or known or (len(rows[-1]) if rows else 0)


OTHER_OPTIMIZER = (
    "the optimizer that was passed has none of the cockpit's parameters, so that nothing is known "
    "of its steps: pass the optimizer of the tracked model, made of the parameters that the model "
    "has now, unless it updates copies"
)


@dataclass(frozen=True)
class _Left:
    """A parameter and its gradient when a context was left, or when the optimizer used it."""

    parameter: nn.Parameter
    updates: int
    gradient: weakref.ref[Tensor]
    changes: int
    is_used: bool = False

    def now(self) -> Tensor | None:
        """The gradient, if it is the parameter's still."""
        gradient = self.gradient()
        return gradient if self.parameter.grad is gradient else None

    def is_stale(self) -> bool:
        """Whether the optimizer has used the gradient, and it is still what it was then."""
        gradient = self.now()
        return (
            gradient is not None
            and version(gradient) == self.changes
            and (self.is_used or version(self.parameter) > self.updates)
            # Zeros that were written by gradient.data.zero_() don't count as a change.
            and bool(gradient.any())
        )


class GradientsUsed:
    """Counts an optimizer's steps after a backward pass, and finds what they begin with.

    The ``norm`` of the gradients is computed only if they have changed since the backward pass, as
    by clipping. ``is_stale`` says that the latest backward pass has added to the gradients of a
    past step, judged by one parameter: to one that the optimizer has used, and that was changed
    nowhere since. What isn't certain doesn't count: where the optimizer isn't known, a loop that
    clips gradients in place isn't found, nor is one with a fused optimizer, whose updates autograd
    doesn't count. ``is_overwritten`` says that something has written to the optimizer's parameters
    since its latest step; what is written to ``parameter.data`` isn't counted. ``is_seen`` says
    that an optimizer is known whose steps can be seen.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int] = []
        self._scale: GradientScale | None = None
        self._left: _Left | None = None
        self._was_stale = self._goes_on = False
        self._updated: list[int] = []
        self._optimizer: Optimizer | None = None
        self.count = 0
        self.norm: Tensor | None = None
        self.is_stale = self.is_overwritten = self.is_seen = False

    def enter(self, optimizer: Optimizer | None) -> None:
        """The next backward pass comes: see what has become of gradients and parameters."""
        self._was_stale = self._left is not None and self._left.is_stale()
        if optimizer is not None and optimizer is not self._optimizer:
            self._optimizer, self._updated = optimizer, []
            self.is_seen = runs_step_hooks(optimizer)
        now = _versions_held(self._optimizer) if self._updated else []
        self.is_overwritten, self._updated = now != self._updated, now

    def leave(self, goes_on: bool) -> None:
        """The backward pass is over; the step may go on with another one, before an update."""
        self._goes_on = goes_on
        left, self._left = self._left, self._now()
        self.is_stale = False
        if self._was_stale and left is not None and self._left is not None:
            added = self._left.changes == left.changes + 1
            self.is_stale = added and self._left.gradient() is left.gradient()

    def begin(self, scale: GradientScale | None) -> None:
        """The optimizer's steps come next; with the gradients' ``scale``, their norm is found."""
        self.count, self.norm, self._scale = 0, None, scale
        self._versions = [] if scale is None else self._present_versions()

    def forget(self) -> None:
        """Steps and backward passes come that aren't seen."""
        self._updated, self._left = [], None

    def before_step(self, optimizer: Optimizer) -> None:
        """Count it; whatever has changed the gradient until now hasn't set it to zero."""
        self.count += 1
        self._updated = []  # a closure may be called within the step
        scale = self._scale if self.count == 1 else None
        if scale is not None and self._versions != self._present_versions():
            gradients = gradients_of(self._parameters)
            self.norm = unscaled_norm(gradients, scale.of(self._parameters))
        left = None if self._left is None else self._left.now()
        if left is None or self._left is None or self._goes_on:
            return  # one that goes on runs in a closure, within the optimizer's step
        groups = optimizer.param_groups
        if any(each is self._left.parameter for group in groups for each in group["params"]):
            self._left = replace(self._left, changes=version(left), is_used=True)

    def after_step(self, optimizer: Optimizer) -> None:
        """Its parameters change no more until its next step, unless something else writes."""
        self._updated = _versions_held(optimizer)

    def _present_versions(self) -> list[int]:
        return versions(gradients_of(self._parameters).values())

    def _now(self) -> _Left | None:
        for parameter in self._parameters.values():
            gradient = parameter.grad
            if type(gradient) is Tensor and gradient.layout is torch.strided:
                changes = version(gradient)
                return _Left(parameter, version(parameter), weakref.ref(gradient), changes)
        return None


def _versions_held(optimizer: Optimizer | None) -> list[int]:
    """How often each parameter of the optimizer has been changed."""
    groups = [] if optimizer is None else optimizer.param_groups
    return versions(each for group in groups for each in group["params"])


NOT_ZEROED = (
    "the backward pass has added to gradients that the optimizer had used already, so that p.grad "
    "is a sum over steps: call optimizer.zero_grad() before it"
)
