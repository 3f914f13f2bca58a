"""Finds the samples and layers behind a loss that has jumped, at the step at which it has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradlens.gradients.gradients import Setting, layer_of
from gradlens.gradients.loss_factor import loss_scale
from gradlens.graph.graph import Graph
from gradlens.graph.loss import read_loss
from gradlens.graph.model_calls import calls_behind
from gradlens.history.history import History
from gradlens.history.spikes import Origin, SampleId, Spike, Suspect
from gradlens.observers.not_finite import (
    bad_gradients,
    bad_parameters,
    bad_rows,
    first_place,
    steep_places,
    term_of,
)
from gradlens.observers.observer import Observer, Outcome, Records, StepContext, Values
from gradlens.observers.spike_trigger import Jump, SpikeTrigger
from gradlens.reductions import Deviations, SquaredNorms
from gradlens.stateful import State

SUSPECTS = 4
"""Samples that are named at most."""
TRACKED = 8
"""Latest tracked steps whose median a layer's Σₙ‖gₙ‖² is compared with."""
STEEP = 3
"""Operations that may have made a NaN in the backward pass, of which no more are named."""
RATES = 12
"""Latest learning rates whose median the present one is compared with."""

_OF_NORMS = (SquaredNorms(), Deviations())
"""Reductions that have the norms of the samples' gradients."""


class Autopsies(Observer):
    """Watches the loss, and finds what is behind its jumps.

    What was found is recorded again when it is known whether the loss is back.
    """

    work = "an autopsy of the loss"

    def __init__(self, setting: Setting, records: Records) -> None:
        self._setting = setting
        self._records = records
        self._trigger = SpikeTrigger()
        self._tracked: deque[Mapping[str, Any]] = deque(maxlen=TRACKED)
        self._rates: deque[float] = deque(maxlen=RATES)
        self._latest: tuple[int, Spike] | None = None
        self._gradient_was_finite = True
        self._front = _smallest_in_front(setting.parameters)
        self._part = 0
        """The number of the micro-batch in its step, from one on; 0 between steps."""
        self._before: Tensor | None = None
        """The sum of the gradient in front that the backward pass adds to."""
        self._jump: Jump | None = None
        self._evidence = Evidence()
        self.measures = (self._sum_in_front,)

    def enter(self, context: StepContext) -> None:
        """Read the loss; if it has jumped, look at the graph while it is whole."""
        self._jump, self.reductions = None, ()
        self._part += 1
        self._before = self._sum_in_front(None)
        passed: Tensor | None = context.info.get("loss")
        if passed is None:
            return
        loss = passed.item() / loss_scale(context.info)
        back = self._trigger.recovery(context.global_step, loss)
        if back is not None and self._latest is not None and self._latest[0] == back[0]:
            self._add(back[0], replace(self._latest[1], back=back[1]))
        self._jump = self._trigger.take_in(context.global_step, loss)
        optimizer = context.info.get("optimizer")
        if self._jump is None:
            self._rates += [] if optimizer is None else [learning_rate(optimizer)]
            return
        if math.isfinite(loss):  # whose gradients are whose can't be read off where they are NaN
            self.reductions = (SquaredNorms(),)
        self._evidence = Evidence()
        if passed.requires_grad:
            with torch.no_grad():
                self._evidence = _evidence(self._setting, context.info, math.isfinite(loss))

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Record what is behind a jump of the loss, also if an exception has come of it."""
        try:
            self._look_back(context, outcome)
        finally:
            if outcome.error is not None or not context.accumulating:
                self._part = 0

    def _look_back(self, context: StepContext, outcome: Outcome) -> None:
        if outcome.error is not None and not isinstance(outcome.error, Exception):
            return  # an interrupt
        if self._jump is not None:
            self._add(context.global_step, self._spike(self._jump, context, outcome))
            return
        self._look_at_gradient(context, outcome)
        found = next((each for r in _OF_NORMS if (each := outcome.values.get(r))), None)
        if found is not None:
            self._tracked.append(found)

    def _add(self, global_step: int, spike: Spike) -> None:
        """Record it; of several micro-batches of a step, the first culprit stays.

        One with a number that isn't finite is worse than one whose loss has jumped.
        """
        known = self._records.history.spikes.get(global_step)
        is_worse = known is not None and known.is_finite and not spike.is_finite
        if known is None or known.part == spike.part or is_worse:
            self._latest = (global_step, spike)
            self._records.take_in(global_step, "spike", spike)

    def _spike(self, jump: Jump, context: StepContext, outcome: Outcome) -> Spike:
        """What was found, after the backward pass."""
        evidence, is_finite, info = self._evidence, math.isfinite(jump.loss), context.info
        found = outcome.values.get(SquaredNorms(), {}) if is_finite else {}
        norms = {name: squared_norms(value) for name, value in found.items()}
        total = torch.stack([*norms.values()]).sum(0) if norms else None
        samples = outcome.samples or (evidence.samples if total is None else len(total))
        why = outcome.without_values or (UNREACHED if info["loss"].requires_grad else NO_GRADIENT)
        if evidence.origin == "backward":
            why = UNSCHEDULED
        return Spike(
            jump.loss,
            jump.median,
            jump.deviation,
            jump.start,
            part=self._part if self._part > 1 or context.accumulating else 0,
            samples=samples,
            suspects=evidence.suspects(total, samples, info.get("ids")),
            without_norms="" if norms else why if is_finite else NOT_FINITE,
            layers={} if evidence.origin else by_layer(norms),
            layers_before=self._layers_before(),
            origin=evidence.origin or ("jump" if is_finite else "forward"),
            place=evidence.place,
            hint=evidence.hint,
            rate_before=median(self._rates) if self._rates else math.nan,
            **_rates(info, self._records.history),
        )

    def _sum_in_front(self, _: object) -> Tensor | None:
        """The sum of the gradient in front; ``None`` if there is none."""
        gradient = self._front.grad
        if gradient is None or type(gradient) is not Tensor or gradient.layout != torch.strided:
            return None
        return gradient.detach().sum()

    def _look_at_gradient(self, context: StepContext, outcome: Outcome) -> None:
        """Look at one gradient, in which those of all layers meet.

        A gradient scaler's steps have infinite ones, which it leaves out. What an earlier
        micro-batch, or a step that was skipped, has left in it isn't this pass's.
        """
        info, step = context.info, outcome.step
        total = self._sum_in_front(step) if step is None else step.measured(self._sum_in_front)
        if total is None:
            return
        is_finite = math.isfinite(abs(total.item()))
        was_finite, self._gradient_was_finite = self._gradient_was_finite, is_finite
        if is_finite or not was_finite or info.get("scaler") is not None or "loss" not in info:
            return
        if self._before is not None and not math.isfinite(abs(self._before.item())):
            return
        loss = info["loss"].item() / loss_scale(info)
        bad = bad_gradients(self._setting.parameters) if math.isfinite(loss) else []
        if bad:
            self._trigger.expect_not_finite()
            hint = ", ".join(steep_places(Graph(info["loss"]), self._setting.names)[:STEEP])
            self._evidence = Evidence(origin="backward", place=layer_of(bad[-1]), hint=hint)
            self._add(context.global_step, self._spike(Jump(loss), context, outcome))

    def _layers_before(self) -> dict[str, float]:
        """The median over the latest tracked steps of each layer's Σₙ‖gₙ‖²."""
        steps = [by_layer({n: squared_norms(v) for n, v in each.items()}) for each in self._tracked]
        names = dict.fromkeys(name for each in steps for name in each)
        return {name: median([each[name] for each in steps if name in each]) for name in names}

    def state_dict(self) -> State:
        """What later jumps depend on."""
        return {
            "trigger": self._trigger.state_dict(),
            "rates": list(self._rates),
            "tracked": [
                {name: squared_norms(value) for name, value in each.items()}
                for each in self._tracked
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._trigger.load_state_dict(state["trigger"])
        self._rates = deque(state["rates"], maxlen=RATES)
        self._tracked = deque(state["tracked"], maxlen=TRACKED)
        self._latest = None


@dataclass(frozen=True)
class Evidence:
    """What the loss's graph shows before the backward pass.

    ``losses``, ``inputs`` and ``targets`` are by row: ℓₙ, and the root mean squares of the input's
    and of real targets. ``bad`` are the rows that aren't finite where ``origin`` says, at the layer
    ``place``; ``origin`` is empty if the loss is finite. ``hint`` is that of ``Spike``.
    """

    losses: Tensor | None = None
    inputs: Tensor | None = None
    targets: Tensor | None = None
    bad: Tensor | None = None
    origin: Origin | None = None
    place: str = ""
    hint: str = ""

    @property
    def samples(self) -> int:
        """The number of rows; 0 if it isn't known."""
        known = [each for each in (self.losses, self.inputs) if each is not None]
        return len(known[0]) if known else 0

    def suspects(
        self, norms: Tensor | None, samples: int, ids: Sequence[SampleId] | None
    ) -> tuple[Suspect, ...]:
        """The samples with the largest squared ``norms`` or losses, or that aren't finite."""
        losses, inputs, targets, bad = (
            each if each is not None and len(each) == samples else None
            for each in (self.losses, self.inputs, self.targets, self.bad)
        )
        names = ids if ids is not None and len(ids) == samples else [None] * samples
        ranked = _worst(bad, norms if norms is not None else losses, self.origin is not None)
        return tuple(
            Suspect(
                index,
                names[index],
                _share(norms, index),
                math.nan if losses is None else float(losses[index]),
                _share(None if losses is None else losses.abs(), index),
                _ratio(inputs, index),
                _ratio(targets, index),
            )
            for index in ranked
        )


def _worst(bad: Tensor | None, sizes: Tensor | None, is_broken: bool) -> list[int]:
    """The places of the samples to name, the worst first."""
    if is_broken:
        if bad is None and sizes is not None:
            bad = ~sizes.isfinite()
        # Where no sample is finite, it isn't one that has broken the others.
        if bad is None or bool(bad.all()):
            return [0] if bad is not None and len(bad) == 1 else []
        return [int(index) for index in bad.nonzero().flatten()[:SUSPECTS]]
    if sizes is None:
        return []
    ranked = torch.where(sizes.isnan(), -math.inf, sizes)
    return [int(index) for index in ranked.topk(min(SUSPECTS, len(sizes))).indices]


def _share(sizes: Tensor | None, index: int) -> float:
    return math.nan if sizes is None else float(sizes[index] / sizes.sum())


def _ratio(sizes: Tensor | None, index: int) -> float:
    if sizes is None:
        return math.nan
    return float(sizes[index] / sizes[sizes.isfinite()].median())


def _evidence(setting: Setting, info: Mapping[str, Any], is_finite: bool) -> Evidence:
    """Look at the parameters, at what the model was called with, and at the graph."""
    graph = Graph(info["loss"])
    loss = read_loss(info["loss"])
    rows = loss.rows(setting.loss_reduction, loss_scale(info))
    known = info.get("individual_losses")
    losses = known if known is not None else None if rows is None else rows.losses
    samples = 0 if losses is None else len(losses)
    inputs = _inputs(graph, setting, samples or len(info.get("ids") or ()))
    targets = loss.targets
    if targets is not None and not (targets.is_floating_point() and targets.dim()):
        targets = None
    on_host = None if losses is None else losses.detach().double().cpu()
    found = Evidence(on_host, _root_mean_squares(inputs), _root_mean_squares(targets))
    if is_finite:
        return found
    weights = bad_parameters(setting.leaves)
    if weights:
        return replace(found, origin="weights", place=layer_of(weights[0]))
    given: tuple[tuple[Origin, Tensor | None], ...] = (("input", inputs), ("target", targets))
    for origin, tensor in given:
        bad = None if tensor is None else bad_rows(tensor)
        if bad is not None and bool(bad.any()):
            return replace(found, origin=origin, bad=bad.cpu())
    place = first_place(graph, setting.names, found.samples)
    bad = place.bad if place is not None else None
    if bad is None and found.losses is not None:
        bad = ~found.losses.isfinite()
    term = term_of(graph, None if place is None else place.node)
    bad = None if bad is None else bad.cpu()
    name = "" if place is None else place.name
    return replace(found, origin="forward", place=name, hint=term, bad=bad)


def _inputs(graph: Graph, setting: Setting, samples: int) -> Tensor | None:
    """The first real tensor that the model was called with, with a row for each sample."""
    calls = calls_behind(graph, setting.model)
    given = (each.reference() for call in calls for each in call.inputs if each.is_real)
    known = (each for each in given if each is not None and each.dim())
    return next((each for each in known if len(each) == samples or not samples), None)


def _root_mean_squares(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not len(tensor):
        return None
    rows = tensor.detach().reshape(len(tensor), -1).double()
    return rows.square().mean(1).sqrt().cpu()


def _smallest_in_front(parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """The smallest parameter of the first layer, which all backward passes end at."""
    first = layer_of(next(iter(parameters)))
    own = (each for name, each in parameters.items() if layer_of(name) == first)
    return min(own, key=nn.Parameter.numel)


def squared_norms(value: Any) -> Tensor:
    """‖gₙ‖² ``[N]`` from the value of one of the two reductions, in float64 on the host."""
    if isinstance(value, Tensor):
        return value.detach().double().cpu()
    found: Tensor = value.squared_norms + 2 * value.dots + value.squared_mean
    return found.clamp(min=0).cpu()


def norms_of(values: Values) -> Tensor | None:
    """‖gₙ‖² ``[N]`` of all parameters together, if a step's reductions show it."""
    found = next((values[r] for r in _OF_NORMS if values.get(r)), None)
    return None if found is None else torch.stack([*map(squared_norms, found.values())]).sum(0)


def by_layer(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """Σₙ‖gₙ‖² of each layer, from the squared norms of its parameters."""
    found: dict[str, float] = {}
    for name, each in norms.items():
        found[layer_of(name)] = found.get(layer_of(name), 0.0) + float(each.sum())
    return found


def learning_rate(optimizer: Optimizer) -> float:
    """The largest of the groups'; NaN if there is none."""
    return max((float(g["lr"]) for g in optimizer.param_groups if "lr" in g), default=math.nan)


def _rates(info: Mapping[str, Any], history: History) -> dict[str, Any]:
    """The learning rate, and the sharpness that was recorded last."""
    optimizer = info.get("optimizer")
    rate = math.nan if optimizer is None else learning_rate(optimizer)
    found = {"rate": rate}
    for name in history.of_kind("Stability"):
        series = history[name]
        if series:
            at = max(series)
            known = {key: float(series[at][key]) for key in ("sharpness", "threshold")}
            return {**found, **known, "sharpness_step": at}
    for name in history.of_kind("HessMaxEV"):
        series = history[name]
        if series and type(optimizer) is SGD:
            at = max(series)
            momentum = max(float(group["momentum"]) for group in optimizer.param_groups)
            threshold = (2 + 2 * momentum) / rate if rate else math.inf
            known = {"sharpness": float(series[at]), "threshold": threshold}
            return {**found, **known, "sharpness_step": at}
    return found


UNSCHEDULED = (
    "the loss was finite, so that nothing was known before the backward pass: a quantity of each "
    "sample's gradient alone at each step, such as TICTrace, would show the sample"
)
NOT_FINITE = "the loss isn't finite"
NO_GRADIENT = "the loss needs no gradient"
UNREACHED = "no backward pass went through the loss inside the context"
