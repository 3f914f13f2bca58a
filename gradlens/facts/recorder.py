"""Records the facts of a run at each step."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlens.facts.network import Network, activation_shares, setup_of
from gradlens.facts.parameters import (
    NOT_ZEROED,
    OptimizerSteps,
    Strangers,
    dense,
    gradients_of,
    parameter_numbers,
    second_moments,
    some_elements,
    unscaled_norm,
    update_numbers,
)
from gradlens.facts.rows import Rows, dense_labels, loss_rows, output_columns, rows_of
from gradlens.facts.step_facts import StepFacts, columns
from gradlens.gradients.gradients import Setting
from gradlens.gradients.loss_factor import loss_scale
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Loss, read_loss
from gradlens.graph.model_calls import ModelCall, calls_behind, latest_call
from gradlens.history.facts import Rows as RowsOfFacts
from gradlens.history.facts import TableName
from gradlens.observers.autopsy import learning_rate
from gradlens.observers.observer import Observer, Outcome, Records, StepContext
from gradlens.stateful import State

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
    """Records the facts of the steps of a run that it ``watches``.

    Numbers stay on the device until those of some steps are read together.
    """

    work = "recording the facts of a step"

    def __init__(
        self,
        setting: Setting,
        run: Records,
        watches: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self._setting = setting
        self._run = run
        self._watches = watches
        self._parameters = dense(setting.parameters)
        self._optimizer = OptimizerSteps(self._parameters)
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
        step, info = context.global_step, context.info
        optimizer = info.get("optimizer")
        self._optimizer.enter(optimizer)
        if not self._watches(step):
            self.skip()
            return
        if not (self._goes_on and self._present is not None and self._present.step == step):
            self._end_last_step()
            is_layer_step = self._steps in FIRST_LAYER_STEPS or self._steps % LAYER_INTERVAL == 0
            self._present = StepFacts(step, of_layers={} if is_layer_step else None)
            self._steps += 1
        given = info.get("loss")
        graph = None
        is_first = self._present.of_layers is not None and not self._goes_on
        if is_first and given is not None and given.grad_fn is not None:
            graph = Graph(given)
            self._calls = max(len(calls_behind(graph, self._setting.model)), 1)
        call = latest_call(self._setting.model, self._calls)
        if call is not None and call is not self._call():
            self._call = weakref.ref(call)
            rows = rows_of(call)
            self._present.rows += [] if rows is None else [rows]
        self._present.ids += info.get("ids", ())
        loss = None
        if given is not None and given.grad_fn is not None:
            loss = read_loss(given, _samples(self._present.rows, info), loss_scale(info))
            if given.numel() == 1:
                self._read_loss(self._present, loss, info)
        if optimizer is not None:
            self._present.numbers["lr"] = learning_rate(optimizer)
            self._present.numbers["stateless"] = float(not optimizer.state)
        if is_first and loss is not None:
            self._present.numbers |= output_columns(loss)
        if is_first:
            self._read_network(self._present, graph, loss, info)

    def skip(self) -> None:
        """The last update is over."""
        self._end_last_step()

    def _read_loss(self, facts: StepFacts, loss: Loss, info: Mapping[str, Any]) -> None:
        found, scale = loss_rows(loss), loss_scale(info)
        value = loss.value.detach().reshape(()).float().clone()
        facts.parts.append((value / scale, scale != 1, found.count or loss.samples))
        if loss.function is None:
            return
        facts.loss_rows.append(found)
        facts.numbers["labels"] = found.count + float(facts.numbers.get("labels", 0.0))
        facts.numbers["classes"] = float(found.classes)
        if found.variance is not None:
            facts.numbers["target_variance"] = found.variance

    def _read_network(
        self, facts: StepFacts, graph: Graph | None, loss: Loss | None, info: Mapping[str, Any]
    ) -> None:
        network = None
        if graph is not None and loss is not None:
            network = Network(graph, self._setting.names), loss
            strangers = self._strangers.numbers(network[0].strangers)
            facts.of_layers = activation_shares(network[0]) | strangers | dense_labels(network[1])
        setup = setup_of(self._setting, info, network, facts.rows)
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

    def _end_last_step(self) -> None:
        """The update that follows the latest step is over."""
        facts, self._present = self._present, None
        self._goes_on = False
        if facts is None:
            return
        if self._optimizer.is_following:
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
        if not steps:
            return
        rows, of_layers = columns(steps, self._labels)
        self._record("steps", [facts.step for facts in steps], rows)
        for step, row in of_layers:
            if row:
                self._record("layers", [step], [row])

    def _record(
        self, table: TableName, steps: Sequence[int], rows: Sequence[Mapping[str, float]]
    ) -> None:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name, math.nan) for row in rows] for name in names}
        self._run.take_in(steps[-1], "facts", RowsOfFacts.of(table, steps, columns))

    def state_dict(self) -> State:
        """How many steps and labels there were; called between an update and the next context."""
        self._end_last_step()
        self.flush()
        return {"steps": self._steps, "labels": dict(self._labels)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._steps = state["steps"]
        self._labels = Counter(state["labels"])

    def close(self) -> None:
        """Record the last step, and remove all hooks."""
        self._end_last_step()
        self.flush()
        self._optimizer.close()


def joined_loss(parts: Sequence[tuple[Tensor, bool, int]], is_mean: bool) -> Tensor:
    """The loss of a step, from those of its micro-batches.

    They add up as their gradients do, unless each is the mean over a micro-batch alone.
    """
    losses = torch.stack([loss for loss, _, _ in parts])
    if len(parts) == 1 or not is_mean or not all(alone for _, alone, _ in parts):
        return losses.sum()
    counts = losses.new_tensor([count or 1 for _, _, count in parts])
    return (losses * counts).sum() / counts.sum()


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
