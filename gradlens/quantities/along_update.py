"""What the loss does along the optimizer's own update, from losses that are computed again."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.over_data import LossOverData
from gradlens.curvature.probe import Probe
from gradlens.gradients.gradients import layer_of
from gradlens.graph.fully_shard import kept_whole, reshard, sharding_of
from gradlens.graph.passes import why_not_to_pass
from gradlens.graph.uncompiled import uncompiled_calls
from gradlens.graph.undisturbed import (
    random_states,
    training_kept,
    undisturbed,
    without_fused_recurrence,
)
from gradlens.history.coverage import few
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import inner
from gradlens.numerics.shards import own_parts, processes_of, whole
from gradlens.numerics.tensors import on_host
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.quantities.optimizer import NEGATIVE, UNKNOWN_SIZE
from gradlens.quantities.parameter_quantity import real_parts
from gradlens.quantities.quantity import Needed, Phase, Quantity
from gradlens.quantities.step import Step
from gradlens.quantities.update import Update, why_not_held
from gradlens.torch_private import foreach, torch_functions_on, uncompiled_backward

Closure: TypeAlias = Callable[[], Tensor]
EachLoss: TypeAlias = Callable[[Callable[[Tensor, float], None]], None]
"""Calls a function with each batch's loss, with its graph, and its weight in the whole loss."""


class Taken(NamedTuple):
    """What is known when the optimizer has stepped: the closure, and the rates of its groups."""

    closure: Closure | None
    rates: tuple[float, ...]


# The quantities --------------------------------------------------------------------------------


@dataclass(eq=False)
class _AlongUpdate(Quantity):
    """A quantity of losses that are computed again, at points on the line of an update."""

    phases = (Phase.AFTER_BACKWARD, Phase.AFTER_OPTIMIZER, Phase.AFTER_UPDATE)
    needs: Sequence[Needed] = field(default=("optimizer", "closure"), init=False, repr=False)
    returns_to_start = True

    on: Probe | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._model: nn.Module | None = None
        self._probed: LossOverData | None = None
        if self.on is not None:
            self.needs = ("optimizer",)

    @final
    def choose(self, model: nn.Module | None, parameters: Mapping[str, nn.Parameter]) -> None:
        if model is None:
            raise ValueError(NO_MODEL.format(name=self.name))
        self._model = model

    @final
    def after_backward(self, step: Step, earlier: Any) -> Closure | None:
        return None if self.on is not None else step.info["closure"]

    @final
    def after_optimizer(self, step: Step, earlier: Closure | None) -> Taken:
        assert step.optimizer is not None  # the cockpit has checked `needs`
        if problem := why_not_held(step.optimizer, step.parameters):
            raise UnavailableError(problem)
        return Taken(earlier, _rates(step.optimizer))

    @final
    def after_update(self, step: Step, update: Update, earlier: Taken) -> Any:
        assert self._model is not None
        length = update.norm()
        if length == 0 or not math.isfinite(length):
            what = "is zero" if length == 0 else "has NaN or Inf"
            raise UnavailableError(f"the update {what}")
        if step.untracked:
            raise UnavailableError(UNTRACKED.format(names=few(step.untracked)))
        if processes_of(step.parameters.values()) > len(update.of_all(None)):
            raise UnavailableError(OTHER_PROCESSES)
        with ExitStack() as stack:
            if self.on is None:
                adds_up = step.loss_reduction == "sum"
                each, expected = _of_closure(earlier.closure), step
            else:
                stack.enter_context(self.on.mode_of(self._model))
                each, expected, adds_up = self._of_probe(self.on, self._model), None, False
            line = UpdateLine(self._model, step.parameters, update, each, adds_up, expected)
            stack.enter_context(line.placed())
            return self.compute(step, line, earlier)

    @abstractmethod
    def compute(self, step: Step, line: UpdateLine, taken: Taken) -> Any:
        """The value, from losses along the line of the update."""

    def _of_probe(self, probe: Probe, model: nn.Module) -> EachLoss:
        loss = self._probed = self._probed or probe.loss_of(model)
        return lambda take: loss.each(lambda batch: take(batch.loss, batch.weight / loss.divisor))


def _of_closure(closure: Closure | None) -> EachLoss:
    assert closure is not None

    def each(take: Callable[[Tensor, float], None]) -> None:
        with torch_functions_on():
            loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(loss, Tensor)
            kind = f"one of shape {list(loss.shape)}" if is_tensor else f"a {type(loss).__name__}"
            raise UnavailableError(NO_LOSS.format(kind=kind))
        take(loss, 1.0)

    return each


def _rates(optimizer: Optimizer) -> tuple[float, ...]:
    """The learning rates of the groups that move."""
    rates = on_host([group.get("lr", math.inf) for group in optimizer.param_groups])
    return tuple(sorted({float(rate) for rate in rates} - {0.0}))


@final
@dataclass(eq=False)
class CriticalSharpness(_AlongUpdate):
    """2/η_c with η_c, the smallest rate at which the optimizer's own update raises the loss.

    The loss L at the parameters θ before the step is compared with L(θ + s·Δθ), where Δθ is the
    update that the optimizer has made, with momentum, decay and clipping, and s a multiple of it:
    η_c = s·η at the smallest s where the loss is higher than at s = 0 (Kalra et al., 2026,
    arXiv:2601.16979, Definition 1). It takes at most nine forward passes, no derivatives, and the
    memory of three copies of the parameters.

    A value holds the ``"sharpness"`` 2/η_c, the ``"threshold"`` 2/η, and the ``"ratio"`` η/η_c of
    both; if it is above 1, this step has raised the loss of its own batch. ``"low"`` and ``"high"``
    are ratios between which the loss crosses that at s = 0. They differ by a sixteenth at most, as
    in the paper, unless nine passes weren't enough, as may be at a run's first value. The ratio is
    interpolated as for a quadratic loss, where it is exact: sharpness is −dᵀHd/(gᵀd·η) with d = Δθ,
    and gᵀHg/gᵀg for plain gradient descent. ``"passes"`` counts the forward passes.

    The search begins at the rate of the last value, and goes up or down by factors of 2 to 8 until
    the loss is higher at one end and lower at the other. A rise and a fall between two of these
    rates isn't seen. Where the loss isn't lower, or isn't higher, at any rate that was tried, the
    ratio is a NaN with the range. η is that of a step on the mean loss: with SGD and a sum loss, N
    times the learning rate; with other optimizers the learning rate, since a factor of the loss
    changes nothing. Where parameter groups have different rates, there is no single η, and only the
    ratio has a value.

    The loss is that of the context's ``closure``, a function that computes the loss of the step's
    batch again; a step of several micro-batches needs one of all of them. It is called with the
    same random numbers each time, so that dropout leaves out the same elements. These aren't those
    of the step's own forward pass. Afterwards, parameters, buffers, attributes of modules and
    random numbers are the same as before, bit for bit; what else the closure or your hooks change
    stays so. With a probe, ``on``, it is the loss of the probe instead. The values are those of all
    processes together, also of a model that ``fully_shard`` was called with. The model must be
    passed to the cockpit (``ValueError``).
    """

    state = ("last",)
    view = View("Critical sharpness", group="curvature", yscale="symlog", label="2/η")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: float | None = None

    def compute(self, step: Step, line: UpdateLine, taken: Taken) -> dict[str, float]:
        rate: float = self._rate(step, taken.rates)
        threshold = Undefined(rate.reason) if isinstance(rate, Undefined) else 2 / rate
        unit = 1.0 if isinstance(rate, Undefined) else rate
        start = line.checked_start()
        first = 1.0 if self._last is None else min(max(self._last / unit, 1 / REACH), REACH)
        found = search(lambda multiple: line.loss(multiple) - start, line.rounding(start), first)
        line.check_again(start)
        self._last = found.guess and found.guess * unit
        ratio, low, high = (
            [Undefined(found.reason)] * 3
            if found.reason
            else [1 / one for one in (found.multiple, found.high, found.low)]
        )
        sharpness = ratio * threshold if math.isfinite(ratio * threshold) else ratio
        return {
            "sharpness": threshold if isinstance(threshold, Undefined) else sharpness,
            "threshold": threshold,
            "ratio": ratio,
            "low": low,
            "high": high,
            "passes": line.passes,
        }

    def _rate(self, step: Step, rates: Sequence[float]) -> float:
        """η of a step on the mean loss; a NaN with the reason if there isn't one."""
        if len(rates) != 1:
            return Undefined(SEVERAL_RATES.format(count=len(rates)))
        if not math.isfinite(rates[0]):
            return Undefined(NO_RATE)
        if type(step.optimizer) is not SGD:
            return rates[0]
        if step.loss_reduction == "sum" and step.batch_size is None:
            return Undefined(UNKNOWN_SIZE)
        try:
            rate = rates[0] * step.gradient_factor
        except UnavailableError as reason:
            return Undefined(str(reason))
        return rate if rate > 0 else Undefined(NEGATIVE)


@final
@dataclass(eq=False)
class StepLedger(_AlongUpdate):
    """The change of the loss by a step, ΔL = gᵀd + ½dᵀHd + rest, by layer.

    d is the update that the optimizer has made; g and H are gradient and Hessian at the parameters
    before it, of the loss that is computed again. A value holds ``"change"``, the ``"first"`` and
    the ``"second"`` term, and the ``"rest"``, which is that of all higher orders and of rounding:
    on a quadratic loss, it is zero. ``"layers"`` has the ``"first"`` and ``"second"`` term of each
    layer l, gₗᵀdₗ and ½dₗᵀ(Hd)ₗ, which add up to those of the network. A sum loss isn't divided by
    N.

    It takes one product with the Hessian and four forward passes, and the memory of a graph that is
    differentiated twice and of three copies of the parameters. Where the loss can't be
    differentiated twice, second term and rest are NaN. Of a model that ``fully_shard`` was called
    with, each process gathers all parameters and the update for the product. ``closure`` and ``on``
    are as for ``CriticalSharpness``.
    """

    view = View("Step ledger", group="step size", label="ΔL")

    def compute(self, step: Step, line: UpdateLine, taken: Taken) -> dict[str, Any]:
        start = line.checked_start()
        change = line.loss(1.0) - start
        firsts, seconds = line.terms()
        line.check_again(start)
        names = {name: layer_of(name) for name in firsts}
        layers = {
            layer: {
                "first": _sum(firsts[name] for name in names if names[name] == layer),
                "second": seconds
                if isinstance(seconds, Undefined)
                else _sum(seconds[name] for name in names if names[name] == layer),
            }
            for layer in dict.fromkeys(names.values())
        }
        first, change = _sum(firsts.values()), _sum([change])
        second = seconds if isinstance(seconds, Undefined) else _sum(seconds.values())
        why = [each for each in (second, change, first) if isinstance(each, Undefined)]
        rest = why[0] if why else change - first - second
        return {"change": change, "first": first, "second": second, "rest": rest, "layers": layers}


def _sum(numbers: Iterable[float]) -> float:
    """A NaN with the reason if one of them isn't finite."""
    total = sum(numbers := [*numbers])
    return math.fsum(numbers) if math.isfinite(total) else Undefined(NOT_FINITE_ENDS)


# The line of an update -------------------------------------------------------------------------

OTHER = 0.01
"""The share by which losses of one batch may differ: half precision rounds them by less."""
ROUNDING = 4
"""Units of rounding by which a loss may differ from itself, as a sum over a batch."""


class UpdateLine:
    """A loss on the line from the parameters at a step's start, along its update.

    ``each`` passes this process's losses on. That of all processes is their mean, or their sum if
    it ``adds_up``. At the start it must be that of the ``expected`` step, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        update: Update,
        each: EachLoss,
        adds_up: bool = False,
        expected: Step | None = None,
    ) -> None:
        self.passes = 0
        self._model = model
        self._parameters = parameters
        self._update = update
        self._each = each
        self._adds_up = adds_up
        self._expected = expected
        self._own = own_parts([p.data for p in parameters.values()])
        self._start, self._direction = (
            own_parts([found[name] for name in parameters])
            for found in (update.start, update.direction)
        )
        self._end: list[Tensor] = []
        self._epsilon = 0.0
        self._draws = False

    @contextmanager
    def placed(self) -> Iterator[None]:
        """The model is the same after the context as before."""
        self._end = [each.clone() for each in self._own]
        try:
            yield
        finally:
            self._move(1.0)

    def _move(self, multiple: float) -> None:
        """Place the parameters; at 0 and 1 they are, bit for bit, as before and after the step."""
        start = self._end if multiple == 1 else self._start
        foreach("copy_", self._own, start)
        if multiple not in (0, 1):
            foreach("add_", self._own, self._direction, alpha=multiple)
        reshard(self._model)

    @contextmanager
    def _passing(self) -> Iterator[None]:
        """A context for one pass, which begins with the random numbers that are next in training.

        All passes draw the same ones, and training as well.
        """
        self.passes += 1
        with (
            undisturbed(self._model),
            training_kept(self._model.parameters()),
            uncompiled_calls(),
            uncompiled_backward(),
        ):
            before = random_states(self._own)
            yield
            self._draws |= random_states(self._own) != before

    def loss(self, multiple: float) -> float:
        """The loss at a multiple of the update."""
        self._move(multiple)

        def own() -> list[float]:
            parts: list[float] = []
            with self._passing(), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training itself has warned
                self._each(lambda loss, weight: parts.append(self._read(loss) * weight))
            return [sum(parts), float(self._draws)]

        found, draws = self._of_all(own)
        self._draws = draws > 0
        return found

    def _read(self, loss: Tensor) -> float:
        # A loss in double precision, of a network in single, has that network's errors.
        precise = all(each.dtype == torch.float64 for each in self._own)
        least = torch.finfo(torch.float64 if precise else torch.float32).eps
        self._epsilon = max(torch.finfo(loss.dtype).eps, least)
        return float(loss.detach())

    def rounding(self, start: float) -> float:
        """How far losses may differ by rounding alone."""
        return ROUNDING * self._epsilon * abs(start)

    def checked_start(self) -> float:
        """The loss at the start; ``UnavailableError`` if it is known to be that of other data."""
        found = self.loss(0.0)
        if not math.isfinite(found):
            raise UnavailableError(NOT_FINITE.format(loss=found))
        if self._expected is not None and self._expected.loss is not None and not self._draws:
            known = float(self._expected.loss)
            if not abs(found - known) <= OTHER * abs(known) + self.rounding(known):
                raise UnavailableError(DIFFERENT.format(found=found, known=known))
        return found

    def check_again(self, start: float) -> None:
        """``UnavailableError`` unless the loss at the start is the same once more."""
        if self._expected is None:
            return  # a probe's data are compared in each pass
        again = self.loss(0.0)
        if not abs(again - start) <= self._epsilon**0.5 * abs(start):
            raise UnavailableError(NOT_THE_SAME.format(one=start, other=again))

    def terms(self) -> tuple[dict[str, float], dict[str, float] | Undefined]:
        """gᵀd and ½dᵀHd of each parameter that has a gradient, of the loss at the start.

        The latter is a NaN with the reason if the loss can't be differentiated twice.
        """
        self._move(0.0)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        direction = [whole(self._update.direction[name]) for name in trained]
        sharding = sharding_of(self._model)
        firsts, seconds = torch.zeros(2, len(trained), dtype=torch.float64, device="cpu")
        why = ""

        def add(loss: Tensor, weight: float) -> None:
            nonlocal why
            if not loss.requires_grad:
                raise UnavailableError(NO_GRAPH)
            if unpassable := why_not_to_pass(loss):
                raise UnavailableError(unpassable)
            made = {} if sharding is None else sharding.unsharded()
            leaves = {name: made.get(id(p), p) for name, p in trained.items()}
            try:
                curved = HessianOperator(loss, leaves).product(direction)
                seconds.add_(_products(curved, direction), alpha=weight / 2)
            except UnavailableError as error:
                why = str(error)
            gradient = derivative([loss], [*leaves.values()], [torch.ones_like(loss)])
            firsts.add_(_products(gradient, direction), alpha=weight)

        def own() -> list[float]:
            with (
                self._passing(),
                kept_whole(self._model),
                without_fused_recurrence(self._model),
                torch.enable_grad(),
            ):
                self._each(add)
            return [*firsts.tolist(), *seconds.tolist(), float(bool(why))]

        *both, lacking = self._of_all(own)
        count = len(trained)
        first = dict(zip(trained, both[:count], strict=True))
        if lacking:
            return first, Undefined(why or FAILED_ELSEWHERE.format(reason="no second derivative"))
        return first, dict(zip(trained, both[count:], strict=True))

    def _of_all(self, own: Callable[[], list[float]]) -> list[float]:
        """Numbers of all processes, each of which takes part, also if it has none."""
        found: list[float] | str
        failure: Exception | None = None
        try:
            found = own()
        except Exception as error:
            found, failure = first_line(error), error
        every = self._update.of_all(found)
        if failure is not None:
            raise failure
        for each in every:
            if isinstance(each, str):
                raise UnavailableError(FAILED_ELSEWHERE.format(reason=each))
        divisor = 1 if self._adds_up else len(every)
        return [math.fsum(numbers) / divisor for numbers in zip(*every, strict=True)]


def _products(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Inner products of pairs ``[P]``, on the host and in float64."""
    flat = [
        (real_parts(a.to_dense()).flatten(), real_parts(b).flatten())
        for a, b in zip(ones, others, strict=True)
    ]
    dtypes = [torch.promote_types(one.dtype, torch.float32) for one, _ in flat]
    pairs = [(a.to(dtype), b.to(dtype)) for (a, b), dtype in zip(flat, dtypes, strict=True)]
    found = on_host([inner(one, other) for one, other in pairs])
    return torch.stack([each.double() for each in found])


# The search ------------------------------------------------------------------------------------

TRIES = 7
"""Rates that are tried; with two passes at the start, there are fewer than ten."""
RESOLUTION = 1 / 16
"""As in arXiv:2601.16979, Section 3.2."""
REACH = 2.0**40
"""The largest multiple, or one over the least, at which a search begins: so many times the rate is
doubled at most in arXiv:2601.16979, Appendix A."""
FAR = 8.0
"""The most by which a rate changes to the next one that is tried.

A trade-off: larger changes find a far crossing sooner, and are more likely to miss a nearer one.
"""


class Found(NamedTuple):
    """The multiple at which the loss crosses that at the start, between ``low`` and ``high``.

    If there is a ``reason`` why it isn't known, the others have no meaning. A later search begins
    at the ``guess``, if there is one.
    """

    multiple: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""
    guess: float | None = None


Point: TypeAlias = tuple[float, float]
"""A multiple of the update, and by how much the loss is higher there than at the start."""


def search(rise: Callable[[float], float], rounding: float, first: float = 1.0) -> Found:
    """The smallest multiple at which a loss is higher than at the start, as far as it is seen.

    ``rise`` is how much higher the loss is, and ``rounding`` how much is no difference. Where it is
    not finite, the loss counts as higher. It is a·s + b·s² on a quadratic, so that the rise over s
    is a line: where the line through two points is zero is tried, a third of the resolution before
    or behind it, on the side where less is known.
    """
    low: Point = 0.0, 0.0
    high: Point = math.inf, math.inf
    before: Point | None = None
    at, falls = first, False
    for _ in range(TRIES):
        change = rise(at)
        point = at, change if math.isfinite(change) else math.inf
        width = high[0] / low[0] if low[0] else math.inf
        falls |= point[1] < -rounding
        if point[1] > rounding:
            high, low = point, low if low[0] < at else (0.0, 0.0)
        elif at > low[0]:
            low = point
        elif not falls:
            break
        if not low[0]:  # higher at all rates so far
            guess = _zero(before, point)
            at = at / 2 if not guess < at / 2 else max(guess * (1 - RESOLUTION / 3), at / FAR)
        elif high[0] == math.inf:  # at none
            guess = _zero(before, point)
            at = 2 * at if not guess > 2 * at else min(guess * (1 + RESOLUTION / 3), at * FAR)
        elif not falls:  # lower by rounding: a quadratic is lowest half way to where it crosses
            at = low[0] / 2
        elif high[0] / low[0] <= 1 + RESOLUTION:
            break
        else:
            at = _between(low, high, math.log(high[0] / low[0]) <= math.log(width) / 2)
        before = point
    if high[0] == math.inf:
        return Found(reason=NEVER_HIGHER.format(multiple=low[0]), guess=low[0])
    if not falls:
        return Found(reason=NEVER_LOWER.format(multiple=low[0] or high[0]))
    zero = _zero(low, high)
    multiple = zero if low[0] <= zero <= high[0] else math.sqrt(low[0] * high[0])
    return Found(multiple, low[0], high[0], guess=multiple)


def _zero(one: Point | None, other: Point) -> float:
    """Where the line through two points of the rise over the multiple is zero; NaN if nowhere."""
    if one is None:
        return math.nan
    slopes = one[1] / one[0], other[1] / other[0]
    difference = slopes[1] - slopes[0]
    if not math.isfinite(difference) or difference == 0:
        return math.nan
    return one[0] - slopes[0] * (other[0] - one[0]) / difference


def _between(low: Point, high: Point, shrank: bool) -> float:
    """The next rate to try: near the zero of the line, or half way if that doesn't help."""
    zero = _zero(low, high)
    if shrank and low[0] <= zero <= high[0]:
        is_above = zero / low[0] <= high[0] / zero
        aim = zero * (1 + RESOLUTION / 3) if is_above else zero * (1 - RESOLUTION / 3)
        if low[0] < aim < high[0]:
            return aim
    return math.sqrt(low[0] * high[0])


# Reasons why values are NaN --------------------------------------------------------------------

NEVER_HIGHER = (
    "the loss isn't higher than before the step at any rate up to {multiple:.3g} times the "
    "optimizer's own: 1 / {multiple:.3g} is above the ratio"
)
NEVER_LOWER = (
    "the loss isn't lower than before the step, by more than rounding, at any rate down to "
    "{multiple:.3g} times the optimizer's own: the update doesn't lead downhill, or is too small"
)
DIFFERENT = (
    "the closure's loss is {found:.6g} where the step's was {known:.6g}, and it draws no random "
    "numbers: let it compute the loss of the step's whole batch, under autocast if the step does"
)
NOT_THE_SAME = (
    "two calls of the closure give the losses {one:.6g} and {other:.6g} with the same parameters "
    "and random numbers: let it take the same batch in each call"
)
NO_LOSS = "the closure returned {kind}: let it return the loss, a tensor with one element"
NO_GRAPH = "the closure's loss needs no gradient: let it compute the loss as for a backward pass"
OTHER_PROCESSES = (
    "the parameters are divided among processes by tensor parallelism, and it isn't known whether "
    "these have the same losses, by which they agree on the rates that are tried"
)
NO_RATE = "the optimizer has no learning rate"
NOT_FINITE = "the loss before the update is {loss}"
NOT_FINITE_ENDS = "the loss after the update, or a derivative before it, isn't finite"
UNTRACKED = "{names} are trained and not tracked, so that it isn't known how they have moved"
NO_MODEL = (
    "{name} computes the loss again and must leave the model as it was: pass the model, as in "
    "Cockpit(model, ...), instead of its parameters"
)
FAILED_ELSEWHERE = "the loss couldn't be computed in another process: {reason}"
SEVERAL_RATES = (
    "the optimizer has {count} learning rates other than zero: the ratio is that of the update as "
    "a whole"
)
