"""Finds the samples and layers behind a loss that has jumped, at the step at which it has."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.gradients.gradients import Setting, layer_of
from gradlens.gradients.loss_factor import loss_scale
from gradlens.graph.graph import Graph
from gradlens.history.history import History
from gradlens.history.setup import threshold_at
from gradlens.history.spikes import NEVER, Spike
from gradlens.numerics.deviations import of_all
from gradlens.observers.evidence import Evidence, bad_tensors, evidence_of, steep_places
from gradlens.observers.observer import Observer, Outcome, Records, StepContext, Values
from gradlens.reductions import Deviations, SquaredNorms
from gradlens.stateful import State

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
        self._jump: Spike | None = None
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
            is_whole = self._part == 1 and not context.accumulating
            self.reductions = (SquaredNorms(), Deviations()) if is_whole else (SquaredNorms(),)
        self._evidence = Evidence()
        if passed.requires_grad:
            with torch.no_grad():
                self._evidence = evidence_of(self._setting, context.info, math.isfinite(loss))

    def leave(self, context: StepContext, outcome: Outcome) -> None:
        """Record what is behind a jump of the loss, also if an exception has come of it."""
        part, is_over = self._part, outcome.error is not None or not context.accumulating
        self._part = 0 if is_over else part
        if outcome.error is not None and not isinstance(outcome.error, Exception):
            return  # an interrupt
        if self._jump is not None:
            self._add(context.global_step, self._spike(self._jump, context, outcome, part))
            return
        self._look_at_gradient(context, outcome, part)
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

    def _spike(self, jump: Spike, context: StepContext, outcome: Outcome, part: int) -> Spike:
        """What was found, after the backward pass of a part of the step."""
        evidence, is_finite, info = self._evidence, math.isfinite(jump.loss), context.info
        found = outcome.values.get(SquaredNorms(), {}) if is_finite else {}
        norms = {name: squared_norms(value) for name, value in found.items()}
        total = torch.stack([*norms.values()]).sum(0) if norms else None
        about = outcome.values.get(Deviations()) if norms else None
        without = of_all([*about.values()]).norms_without().cpu() if about else None
        samples = outcome.samples or (evidence.samples if total is None else len(total))
        why = outcome.without_values or (UNREACHED if info["loss"].requires_grad else NO_GRADIENT)
        if evidence.origin == "backward":
            why = UNSCHEDULED
        return replace(
            jump,
            part=part if part > 1 or context.accumulating else 0,
            samples=samples,
            suspects=evidence.suspects(total, without, samples, info.get("ids")),
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

    def _look_at_gradient(self, context: StepContext, outcome: Outcome, part: int) -> None:
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
        gradients = {name: p.grad for name, p in self._setting.parameters.items()}
        bad = bad_tensors(gradients) if math.isfinite(loss) else []
        if bad:
            self._trigger.expect_not_finite()
            hint = ", ".join(steep_places(Graph(info["loss"]), self._setting.names)[:STEEP])
            self._evidence = Evidence(origin="backward", place=layer_of(bad[-1]), hint=hint)
            self._add(context.global_step, self._spike(Spike(loss), context, outcome, part))

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
    names = (name for kind in ("Stability", "HessMaxEV") for name in history.of_kind(kind))
    series = next((history[name] for name in names if history[name]), None)
    if series is None:
        return {"rate": rate}
    at = next(reversed(series))
    known = series[at]
    if not isinstance(known, Mapping):
        setup = history.latest("setup")
        threshold = math.nan if setup is None else threshold_at(setup, rate)
        known = {"sharpness": known, "threshold": threshold}
    found = {key: float(known[key]) for key in ("sharpness", "threshold")}
    return {"rate": rate, **found, "sharpness_step": at}


UNSCHEDULED = (
    "the loss was finite, so that nothing was known before the backward pass: a quantity of each "
    "sample's gradient alone at each step, such as TICTrace, would show the sample"
)
NOT_FINITE = "the loss isn't finite"
NO_GRADIENT = "the loss needs no gradient"
UNREACHED = "no backward pass went through the loss inside the context"


# At which steps the loss has jumped, from the losses alone ------------------------------------

AT_LEAST = 12
"""Losses before the first jump that can be found. The median of the first ones is the loss at the
start of the run."""
RECENT = 50
"""Latest losses that a loss is compared with. As many steps after a jump, these are losses at the
new level, which is no jump any more."""
DEVIATIONS = 9.0
"""Median absolute deviations above the median: six standard deviations of a normal distribution."""
OF_START = 0.5
"""Least jump, over the loss at the start. In 72 healthy runs of 800 steps on scikit-learn's digits
and diabetes, with batches of 16 and 64, a loss jumps as far once in ten runs, and a tenth as far
three times a run."""
OF_MEDIAN = 0.5
"""Least jump, over the median before."""
REST = 10
"""Steps after the first jump in which another one doesn't count, unless it is ``LARGER``; after
each further one, they are one more, so that T steps have fewer than the square root of 2T."""
LARGER = 3.0
"""Times the jump before, above which a jump always counts."""


@dataclass
class _Excursion:
    """The losses since a jump at a step, until one is below the ``limit`` again."""

    step: int
    limit: float
    losses: int = 0


class SpikeTrigger:
    """Takes in one loss after the other.

    A loss has jumped if it is larger than all recent ones, and ``DEVIATIONS`` above their median.
    It counts once, until it is back; and a loss that isn't finite, until one is.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._first: list[float] = []
        self._was_finite = True
        self._excursion: _Excursion | None = None
        self._count = 0
        self._last_step = 0
        self._last_size = 0.0

    def take_in(self, step: int, loss: float) -> Spike | None:
        """The jump, if the loss of this step is one: what the losses alone say of it."""
        found = self._jump(step, loss)
        self._was_finite = math.isfinite(loss)
        if self._was_finite:
            self._recent.append(loss)
            if len(self._first) < AT_LEAST:
                self._first.append(loss)
        return found

    def recovery(self, step: int, loss: float) -> tuple[int, int] | None:
        """The step of the last jump and ``Spike.back``, if this is known by this loss."""
        excursion = self._excursion
        if excursion is None:
            return None
        excursion.losses += 1
        if loss <= excursion.limit:
            self._excursion = None
            return excursion.step, max(step - excursion.step, 0)
        if excursion.losses >= RECENT:
            self._excursion = None
            return excursion.step, NEVER
        return None

    def expect_not_finite(self) -> None:
        """The next losses won't be finite, since gradients are not: this doesn't count again."""
        self._was_finite = False

    def _jump(self, step: int, loss: float) -> Spike | None:
        recent, is_finite = self._recent, math.isfinite(loss)
        if not is_finite and not self._was_finite:
            return None
        is_new = self._excursion is None and len(recent) >= AT_LEAST
        if is_finite and (not is_new or loss <= max(recent)):
            return None
        found, limit = Spike(loss), sys.float_info.max
        if recent:
            middle = median(recent)
            deviation = median([abs(each - middle) for each in recent])
            found = Spike(loss, middle, deviation, abs(median(self._first)))
        if is_finite:
            least = max(DEVIATIONS * deviation, OF_START * found.start, OF_MEDIAN * abs(middle))
            size = loss - middle
            rests = self._count and step - self._last_step < REST + self._count
            if size <= least or (rests and size < LARGER * self._last_size):
                return None
            limit, self._last_size = middle + least, size
        self._excursion = _Excursion(step, limit)
        self._last_step = step
        self._count += 1
        return found

    def state_dict(self) -> State:
        """What later jumps depend on."""
        return {
            "recent": list(self._recent),
            "first": list(self._first),
            "was_finite": self._was_finite,
            "excursion": None if self._excursion is None else asdict(self._excursion),
            "last": [self._count, self._last_step, self._last_size],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._recent = deque(state["recent"], maxlen=RECENT)
        self._first = list(state["first"])
        self._was_finite = state["was_finite"]
        excursion = state["excursion"]
        self._excursion = None if excursion is None else _Excursion(**excursion)
        self._count, self._last_step, self._last_size = state["last"]
