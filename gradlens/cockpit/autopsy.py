"""Finds the samples and layers behind a loss that has jumped, at the step at which it has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.hooks import RemovableHandle

from gradlens.cockpit.not_finite import bad_gradients, bad_parameters, bad_rows, first_place
from gradlens.cockpit.spike_trigger import Jump, SpikeTrigger
from gradlens.gradients.gradients import Gradients, Setting, layer_of
from gradlens.gradients.loss_factor import loss_scale
from gradlens.gradients.reduce import Reducer
from gradlens.graph.graph import Graph
from gradlens.graph.hooks import on_gradient
from gradlens.graph.loss import loss_node, row_losses
from gradlens.graph.model_calls import calls_behind
from gradlens.graph.torch_private import is_saved_elsewhere, saved, uncompiled_backward
from gradlens.history.history import History
from gradlens.history.spikes import Origin, SampleId, Spike, Suspect
from gradlens.numerics.unavailable import Contain
from gradlens.reductions import Deviations, Reduction, SquaredNorms
from gradlens.stateful import State

SUSPECTS = 4
"""Samples that are named at most."""
TRACKED = 8
"""Latest tracked steps whose median a layer's Σₙ‖gₙ‖² is compared with."""
RATES = 12
"""Latest learning rates whose median the present one is compared with."""

Values = Mapping[Reduction, Mapping[str, Any]]
"""Results of reductions by parameter name."""


class Autopsies:
    """What is kept from step to step, so that a jump of the loss is seen and can be judged.

    ``record`` is called with a step and what was found at it, and again when it is known whether
    the loss is back.
    """

    def __init__(self, setting: Setting, record: Callable[[int, Spike], None]) -> None:
        self.setting = setting
        self._record = record
        self._trigger = SpikeTrigger()
        self._tracked: deque[Mapping[str, Any]] = deque(maxlen=TRACKED)
        self._rates: deque[float] = deque(maxlen=RATES)
        self._latest: tuple[int, Spike] | None = None
        self._gradient_was_finite = True
        self._front = _smallest_in_front(setting.parameters)
        self._step: int | None = None
        self.part = 0
        """The number of the micro-batch in its step."""

    def begin_step(self, global_step: int, info: Mapping[str, Any]) -> Jump | None:
        """Read the loss of a context that is entered; the jump, if it is one."""
        self.part = self.part + 1 if global_step == self._step else 0
        self._step = global_step
        passed: Tensor | None = info.get("loss")
        if passed is None:
            return None
        loss = passed.item() / loss_scale(info)
        back = self._trigger.recovery(global_step, loss)
        if back is not None and self._latest is not None and self._latest[0] == back[0]:
            self.add(back[0], replace(self._latest[1], back=back[1]))
        jump = self._trigger.take_in(global_step, loss)
        optimizer = info.get("optimizer")
        if jump is None and optimizer is not None:
            self._rates.append(learning_rate(optimizer))
        return jump

    def add(self, global_step: int, spike: Spike) -> None:
        """Record what was found at a step."""
        self._latest = (global_step, spike)
        self._record(global_step, spike)

    def end_step(self, global_step: int, info: Mapping[str, Any], values: Values) -> None:
        """Look at one gradient, in which those of all layers meet, before a context is left.

        A gradient scaler's steps have infinite ones, which it leaves out.
        """
        gradient = self._front.grad
        if gradient is None or type(gradient) is not Tensor or gradient.layout != torch.strided:
            return
        is_finite = math.isfinite(abs(gradient.detach().sum().item()))
        was_finite, self._gradient_was_finite = self._gradient_was_finite, is_finite
        if is_finite or not was_finite or info.get("scaler") is not None or "loss" not in info:
            return
        loss = info["loss"].item() / loss_scale(info)
        if not math.isfinite(loss):
            return
        bad = bad_gradients(self.setting.parameters)
        if bad:
            self._trigger.expect_not_finite()
            found: Values = {r: v for r, v in values.items() if r == SquaredNorms()}
            norms = norms_of(found)
            samples = 0 if norms is None else len(norms)
            evidence = Evidence(origin="backward")
            self.add(
                global_step,
                Spike(
                    loss,
                    origin="backward",
                    place=layer_of(bad[-1]),
                    part=self.part,
                    samples=samples,
                    suspects=evidence.suspects(norms, samples, info.get("ids")),
                    without_norms=UNSCHEDULED if norms is None else "",
                ),
            )

    def keep(self, values: Values) -> None:
        """Keep the squared norms of a tracked step, if it has some."""
        found = next((values[r] for r in (SquaredNorms(), Deviations()) if values.get(r)), None)
        if found is not None:
            self._tracked.append(found)

    @property
    def rate_before(self) -> float:
        """The median of the latest learning rates."""
        return median(self._rates) if self._rates else math.nan

    def layers_before(self) -> dict[str, float]:
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


class Autopsy:
    """The autopsy of one step: from entering its context to what is recorded.

    It has per-sample gradients of its own, since none may be scheduled at this step.
    """

    def __init__(
        self,
        global_step: int,
        jump: Jump,
        info: Mapping[str, Any],
        part: int,
        contain: Contain,
    ) -> None:
        self._step = global_step
        self._jump = jump
        self._info = info
        self._part = part
        self._contain = contain
        self._evidence = Evidence()
        self._reducer: Reducer | None = None
        self._gradients: Gradients | None = None
        self._handle: RemovableHandle | None = None
        self._contexts = ExitStack()
        self._reason = ""

    def begin(self, setting: Setting) -> None:
        """Look at the graph while it is whole, and collect gradients from now on."""
        loss: Tensor = self._info["loss"]
        if not loss.requires_grad:
            return
        with self._contain("the autopsy of a loss", self._refuse), torch.no_grad():
            self._evidence = _evidence(setting, self._info, math.isfinite(self._jump.loss))
        if not math.isfinite(self._jump.loss):
            # Whose gradients are whose can't be read off where they are NaN.
            self._refuse(NOT_FINITE)
            return
        with self._contain("per-sample gradients of an autopsy", self._refuse):
            self._contexts.enter_context(uncompiled_backward())
            self._gradients = Gradients(setting, self._info)
            collector = self._gradients.collector
            self._reducer = Reducer(
                setting.parameters, collector, [SquaredNorms()], contain=self._contain
            )
            self._reducer.start(setting.leaves)
            with torch.enable_grad():
                self._gradients.begin(loss)
            self._handle = on_gradient(loss, self._receive)

    def _refuse(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _receive(self, gradient: Tensor) -> None:
        with self._contain("reading the factor of the loss", self._refuse):
            if self._gradients is not None:
                factor = gradient.detach().sum() * loss_scale(self._info)
                self._gradients.receive_factor(factor)

    def finish(self, autopsies: Autopsies, history: History) -> Spike:
        """What was found, after the backward pass."""
        norms = self._norms()
        evidence = self._evidence
        total = torch.stack([*norms.values()]).sum(0) if norms else None
        samples = len(total) if total is not None else evidence.samples
        if self._gradients is not None and self._gradients.batch.samples is not None:
            samples = self._gradients.batch.samples
        spike = Spike(
            self._jump.loss,
            self._jump.median,
            self._jump.deviation,
            self._jump.start,
            part=self._part,
            samples=samples,
            suspects=evidence.suspects(total, samples, self._info.get("ids")),
            without_norms="" if norms else self._why_no_norms(),
            layers={} if evidence.origin else by_layer(norms),
            layers_before=autopsies.layers_before(),
        )
        if not math.isfinite(self._jump.loss):
            origin = evidence.origin or "forward"
            spike = replace(spike, origin=origin, place=evidence.place)
        return replace(spike, **_rates(self._info, autopsies, history))

    def _norms(self) -> dict[str, Tensor]:
        if self._reducer is None:
            return {}
        self._reducer.finish()
        found = self._reducer.values[SquaredNorms()]
        if SquaredNorms() in self._reducer.failed:
            self._refuse(self._reducer.failed[SquaredNorms()])
            return {}
        return {name: squared_norms(value) for name, value in found.items()}

    def _why_no_norms(self) -> str:
        if self._reason or self._gradients is None:
            return self._reason or "the loss needs no gradient"
        return next(iter(self._gradients.collector.unavailable.values()), UNREACHED)

    def release(self) -> None:
        """Remove all hooks, and free all gradients."""
        if self._handle is not None:
            self._handle.remove()
        if self._gradients is not None:
            self._gradients.end()
        if self._reducer is not None:
            self._reducer.stop()
        self._gradients = self._reducer = self._handle = None
        self._contexts.close()


@dataclass(frozen=True)
class Evidence:
    """What the loss's graph shows before the backward pass.

    ``losses``, ``inputs`` and ``targets`` are by row: ℓₙ, and the root mean squares of the input's
    and of real targets. ``bad`` are the rows that aren't finite where ``origin`` says, at the layer
    ``place``; ``origin`` is empty if the loss is finite.
    """

    losses: Tensor | None = None
    inputs: Tensor | None = None
    targets: Tensor | None = None
    bad: Tensor | None = None
    origin: Origin | None = None
    place: str = ""

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
    loss: Tensor = info["loss"]
    graph = Graph(loss)
    rows = row_losses(loss, setting.loss_reduction, loss_scale(info))
    known = info.get("individual_losses")
    losses = known if known is not None else None if rows is None else rows.losses
    samples = 0 if losses is None else len(losses)
    inputs = _inputs(graph, setting, samples or len(info.get("ids") or ()))
    targets = _targets(loss)
    found = Evidence(
        _on_host(losses),
        _root_mean_squares(inputs),
        _root_mean_squares(targets),
    )
    if is_finite:
        return found
    weights = bad_parameters(setting.leaves)
    if weights:
        return replace(found, origin="weights", place=_layers(weights))
    given: tuple[tuple[Origin, Tensor | None], ...] = (("input", inputs), ("target", targets))
    for origin, tensor in given:
        bad = None if tensor is None else bad_rows(tensor)
        if bad is not None and bool(bad.any()):
            return replace(found, origin=origin, bad=bad.cpu())
    place = first_place(graph, setting.names, found.samples)
    bad = place.bad if place is not None else None
    if bad is None and found.losses is not None:
        bad = ~found.losses.isfinite()
    name = "" if place is None else place.name
    return replace(found, origin="forward", place=name, bad=None if bad is None else bad.cpu())


def _inputs(graph: Graph, setting: Setting, samples: int) -> Tensor | None:
    """The first real tensor that the model was called with, with a row for each sample."""
    calls = calls_behind(graph.nodes, setting.model)
    given = (each.reference() for call in calls for each in call.inputs if each.is_real)
    known = (each for each in given if each is not None and each.dim())
    return next((each for each in known if len(each) == samples or not samples), None)


def _targets(loss: Tensor) -> Tensor | None:
    """What a loss function compares the outputs with, if that is real."""
    node = loss_node(loss)
    is_here = node is not None and not is_saved_elsewhere(node)
    found: Tensor | None = saved(node, "target", None) if is_here else None
    is_real = found is not None and found.is_floating_point() and found.dim()
    return found if is_real else None


def _root_mean_squares(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not len(tensor):
        return None
    rows = tensor.detach().reshape(len(tensor), -1).double()
    return rows.square().mean(1).sqrt().cpu()


def _on_host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().double().cpu()


def _layers(parameters: Iterable[str]) -> str:
    return next(iter(dict.fromkeys(map(layer_of, parameters))))


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
    found = next((values[r] for r in (SquaredNorms(), Deviations()) if values.get(r)), None)
    return None if found is None else torch.stack([*map(squared_norms, found.values())]).sum(0)


def by_layer(norms: Mapping[str, Tensor]) -> dict[str, float]:
    """Σₙ‖gₙ‖² of each layer, from the squared norms of its parameters."""
    found: dict[str, float] = {}
    for name, each in norms.items():
        found[layer_of(name)] = found.get(layer_of(name), 0.0) + float(each.sum())
    return found


def learning_rate(optimizer: Any) -> float:
    """The largest of the groups'; NaN if there is none."""
    return max((float(g["lr"]) for g in optimizer.param_groups if "lr" in g), default=math.nan)


def _rates(info: Mapping[str, Any], autopsies: Autopsies, history: History) -> dict[str, Any]:
    """The learning rate, and the sharpness that was recorded last."""
    optimizer = info.get("optimizer")
    rate = math.nan if optimizer is None else learning_rate(optimizer)
    found = {"rate": rate, "rate_before": autopsies.rate_before}
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
    "the loss was finite, so that nothing was known before the backward pass: a quantity of "
    "per-sample gradients at each step, such as NormTest, would show the sample"
)
NOT_FINITE = "the loss isn't finite"
UNREACHED = "no backward pass went through the loss inside the context"
