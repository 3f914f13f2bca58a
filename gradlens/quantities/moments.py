"""The averages of gradients that optimizers keep, and how the present gradient compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.norms import inner
from gradlens.numerics.shards import any_distributed, over_parts, own_part
from gradlens.numerics.tensors import accumulable, double, on_device, widest
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.parameter_quantity import (
    OfParameters,
    gradient_of,
    real_parts,
)
from gradlens.quantities.quantity import OptimizerQuantity, mean
from gradlens.quantities.step import NO_ELEMENTS, Step, explained
from gradlens.quantities.update import OF_SOME
from gradlens.torch_private import foreach


@dataclass(frozen=True)
class Moments:
    """What an optimizer keeps of the gradients of a parameter of shape ``P``.

    ``first`` is its average m of gradients ``[*P]``, and ``second`` its average v of their squares
    ``[*P]``, or √v if it ``is_root``; ``None`` if it keeps none. They are divided by ``weights``,
    such as 1 − βᵗ for an average that begins at zero. The optimizer divides by √v where that is
    above ``floor``, its ε.
    """

    first: Tensor | None = None
    second: Tensor | None = None
    floor: float = 0.0
    weights: tuple[float | Tensor, float | Tensor] = (1.0, 1.0)
    is_root: bool = False


Reader = Callable[[Mapping[str, Any], Mapping[str, Any]], Moments]
"""The moments from the optimizer's state of a parameter, and from the parameter's group."""


def _adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    second = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
    one, other = (_weight(beta, state["step"]) for beta in group["betas"])
    return Moments(state["exp_avg"], second, group["eps"], (one, other))


def _adamax(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    weight = _weight(group["betas"][0], state["step"])
    return Moments(state["exp_avg"], state["exp_inf"], group["eps"], (weight, 1.0), is_root=True)


def _sgd(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    if not group["momentum"]:
        raise UnavailableError("the optimizer has no momentum, and keeps no average of gradients")
    return Moments(state["momentum_buffer"])


def _rmsprop(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    second = state["square_avg"]
    if group["centered"]:
        second = torch.addcmul(second, state["grad_avg"], state["grad_avg"], value=-1).clamp_min_(0)
    return Moments(second=second, floor=group["eps"])


def _adadelta(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    return Moments(second=state["square_avg"], floor=group["eps"] ** 0.5)  # ε is added to v


def _adagrad(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    return Moments(second=state["sum"], floor=group["eps"])


def _adafactor(state: Mapping[str, Any], group: Mapping[str, Any]) -> Moments:
    second = state.get("variance")
    dtype = (state["row_var"] if second is None else second).dtype
    floor = torch.finfo(dtype).eps if group["eps"][0] is None else group["eps"][0]
    if second is None:
        rows, columns = state["row_var"], state["col_var"]
        if any_distributed([rows]):
            raise UnavailableError("processes have parts of a matrix whose v is kept as factors")
        second = rows @ columns / rows.mean(-2, keepdim=True).clamp_min(floor)
    return Moments(second=second, floor=floor)


READERS: Mapping[type[Optimizer], Reader] = {
    **dict.fromkeys((optim.Adam, optim.NAdam, optim.RAdam, optim.SparseAdam), _adam),
    optim.AdamW: _adam,
    optim.Adamax: _adamax,
    optim.SGD: _sgd,
    optim.RMSprop: _rmsprop,
    optim.Adadelta: _adadelta,
    optim.Adagrad: _adagrad,
    optim.Adafactor: _adafactor,
    optim.Muon: lambda state, group: Moments(state["momentum_buffer"]),
}
"""By the class of the optimizer, or the first one that it derives from."""


def _weight(beta: float | Tensor, step: float | Tensor) -> float | Tensor:
    """1 − βᵗ, where the number of steps lies: a number of another device isn't read."""
    given = [own_part(each) if isinstance(each, Tensor) else each for each in (beta, step)]
    if any(isinstance(each, Tensor) and each.device.type != "cpu" for each in given):
        base, power = (double(each) if isinstance(each, Tensor) else each for each in given)
        found: Tensor = 1 - base**power
        return found
    return 1 - float(given[0]) ** float(given[1])


def moments_of(
    optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any], also: Mapping[Any, Reader]
) -> Moments:
    """A parameter's moments; ``UnavailableError`` if the optimizer keeps none."""
    known = {**READERS, **also}
    read = next((known[each] for each in type(optimizer).__mro__ if each in known), None)
    if read is None:
        raise UnavailableError(UNKNOWN.format(name=type(optimizer).__name__))
    state = optimizer.state.get(parameter, {})
    try:
        found = read(state, group)
    except KeyError:
        raise UnavailableError(NOT_YET) from None
    kept = [each for each in (found.first, found.second) if each is not None]
    if not kept or any(isinstance(each, float) and not each for each in found.weights):
        raise UnavailableError(NOT_YET)
    return found


UNKNOWN = (
    "no average of gradients is known that a {name} keeps: if there is one, pass "
    "readers={{{name}: ...}}"
)
NOT_YET = "the optimizer hasn't updated it yet, and has no state of it"


@dataclass(frozen=True)
class Compared:
    """A parameter's gradient, if it has one, beside its moments."""

    parameter: Tensor
    moments: Moments
    gradient: Tensor | None


AT_ONCE = {"cpu": 2**18}
"""Elements that are compared at once; what is computed of them stays in a processor's cache.

Measured on one core with 25 million parameters: 0.13 s, and 0.17 s with 2**16, 0.25 s with 2**20.
"""
ON_OTHERS = 2**22
"""The same on other devices, which bounds the memory that this takes: 16 MB for each tensor."""


def sums_of(found: Sequence[Compared]) -> Tensor:
    """Σm², Σv, Σg², Σ(g/max(√v, ε))² and Σmg of K parameters ``[K, 5]``, on a device.

    In double precision, so that squares don't leave its range. What doesn't exist is zero.
    """
    owners, rows = list[int](), list[Tensor]()
    device = found[0].parameter.device
    for pieces in _portions(found):
        owners += [piece.owner for piece in pieces]
        rows.append(_sums(pieces).to(device))
    table = torch.cat(rows)
    if len(owners) > len(found):
        places = on_device(torch.tensor(owners, device="cpu"), device)
        table = table.new_zeros(len(found), 5).index_add_(0, places, table)
    parameters = [each.parameter for each in found]
    return torch.stack(over_parts(parameters, table.unbind(), lambda parts: parts.sum(0)))


@dataclass(frozen=True)
class _Piece:
    """Elements of a parameter's tensors ``[n]``, and the place of the parameter among all.

    What doesn't exist is empty.
    """

    owner: int
    first: Tensor
    root: Tensor
    gradient: Tensor
    floor: float | Tensor


def _portions(found: Sequence[Compared]) -> Iterator[Sequence[_Piece]]:
    """Pieces of all parameters, as many at once as there is room for, and on one device."""
    waiting, elements, device = list[_Piece](), 0, found[0].parameter.device
    for owner, each in enumerate(found):
        limit = AT_ONCE.get(each.parameter.device.type, ON_OTHERS)
        for piece, size in _pieces(owner, each, limit):
            if waiting and (elements + size > limit or each.parameter.device != device):
                yield waiting
                waiting, elements = [], 0
            device = each.parameter.device
            waiting.append(piece)
            elements += size
    yield waiting


def _pieces(owner: int, compared: Compared, size: int) -> Iterator[tuple[_Piece, int]]:
    """Pieces of this process's part, and how many elements they have."""
    moments = compared.moments
    tensors = (moments.first, moments.second, compared.gradient)
    none = own_part(next(each for each in tensors if each is not None)).new_zeros(0)
    flat = [none if t is None else real_parts(own_part(t)).detach().reshape(-1) for t in tensors]
    count = max(each.numel() for each in flat)
    for start in range(0, max(count, 1), size):
        first, second, gradient = (accumulable(each[start : start + size]) for each in flat)
        root = second if moments.is_root else second.sqrt()
        floor = moments.floor * moments.weights[1] ** 0.5
        yield _Piece(owner, first, root, gradient, floor), min(size, count - start)


def _sums(pieces: Sequence[_Piece]) -> Tensor:
    """``[Q, 5]`` of Q pieces on one device."""
    firsts, roots, gradients, floors = (
        [getattr(piece, name) for piece in pieces]
        for name in ("first", "root", "gradient", "floor")
    )
    quotients = [*roots]
    # Floors that are numbers, and those that are tensors, are for one operation each.
    for kind in (float, Tensor):
        if places := [n for n, floor in enumerate(floors) if isinstance(floor, kind)]:
            both = [_both(gradients[n], roots[n]) for n in places]
            ones, others = ([pair[side] for pair in both] for side in (0, 1))
            divisors = foreach("clamp_min", others, [floors[n] for n in places])
            for n, quotient in zip(places, foreach("div", ones, divisors), strict=True):
                quotients[n] = quotient
    tensors: Sequence[Sequence[Tensor]] = (firsts, roots, gradients, quotients)
    device = firsts[0].device
    if device.type == "cpu":  # where products in double precision are faster than norms
        tensors = [[*map(double, each)] for each in tensors]
        squares = [_products(each, each) for each in tensors]
    else:
        squares = [foreach("norm", [*each], 2, widest(device)) for each in tensors]
        squares = [[norm.square() for norm in each] for each in squares]
    columns = [*squares, _products(tensors[0], tensors[2])]
    rows = [each for column in columns for each in column]
    return torch.stack(rows).view(len(columns), len(pieces)).T


def _both(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of the same elements; both empty if one is."""
    return one[: len(other)], other[: len(one)]


def _products(ones: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Inner products in double precision, zero where there is nothing."""
    pairs = map(_both, ones, others)
    return [inner(double(one), double(other)) for one, other in pairs]


@dataclass(eq=False)
class OptimizerState(OfParameters, OptimizerQuantity):
    """The optimizer's averages of gradients, and how the gradient that it has taken compares.

    For each parameter, ``"m"`` is ‖m‖₂ of the average m of gradients, and ``"root_v"`` is
    ‖√v‖₂ = (Σv)^½ of the average v of their squares, both in units of ``GradNorm``. ``"cosine"`` is
    ⟨m, g⟩/(‖m‖·‖g‖) for the gradient g. ``"rms"`` is RMSₜ, the root mean square of g/√max(v, ε²):
    it is near 1 in general, and 2.3 or more some steps before spikes of the loss, when v is too old
    for the gradient (Wortsman et al., 2023, arXiv:2304.13013, Algorithm 2). Entries are those that
    the optimizer has averages for. A record also has the mean ``"cosine"`` and the
    ``"largest_rms"`` of all parameters.

    All are from right after the optimizer's step, as in the paper, so that m and v have g in them,
    and the cosine of independent gradients is √(1 − β²) rather than 0. m and v are those that the
    optimizer computes with: divided by 1 − βᵗ by Adam, AdamW, NAdam, RAdam, SparseAdam, and Adamax
    for its m, and by no others. With AMSGrad, v is the largest so far; centered RMSprop subtracts
    the squared mean; Adamax's √v is its infinity norm; Adagrad's v is a sum; Adafactor's v is that
    of its factors. SGD and Muon have m alone, and RMSprop, Adadelta, Adagrad and Adafactor v alone.
    g is ``p.grad``: after clipping, and without weight decay. Where the optimizer's step writes
    into it, as SGD's with ``nesterov=True`` and ``foreach=True`` does, entries with g are NaN.

    Of other optimizers, and of parameters that have no state yet, values are NaN with the reason.
    ``readers`` adds optimizers: functions by class, which make ``Moments`` of a parameter's state
    and of its group.
    """

    summaries: ClassVar = {"cosine": ("cosine", mean), "largest_rms": ("rms", max)}
    view = View("Optimizer state", group="step size", yscale="log", label="‖m‖, ‖√v‖")

    readers: Mapping[type[Optimizer], Reader] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.measures = (self._sums,)

    def _sums(self, step: Step) -> tuple[dict[str, Any], Tensor]:
        """For each parameter what there is, or why there is nothing; and sums over its elements."""
        optimizer, known, compared = step.optimizer, dict[str, Any](), list[Compared]()
        assert optimizer is not None  # the cockpit has checked `needs`
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name in self.present(step):
            parameter = step.parameters[name]
            group, found = groups.get(id(parameter)), gradient_of(parameter, step)
            try:
                if group is None:
                    raise UnavailableError(OF_SOME.format(names="it"))
                if not parameter.numel():
                    raise UnavailableError(NO_ELEMENTS)
                moments = moments_of(optimizer, parameter, group, self.readers)
            except UnavailableError as error:
                known[name] = Undefined(str(error))
                continue
            gradient = None if isinstance(found, Undefined) else found
            has = (each is not None for each in (moments.first, moments.second))
            why_not = found.reason if isinstance(found, Undefined) else ""
            sign = -1 if group.get("maximize") else 1
            known[name] = (*has, why_not, *moments.weights, sign)
            compared.append(Compared(parameter, moments, gradient))
        return known, sums_of(compared) if compared else torch.zeros(0, 5, device="cpu")

    def compute(self, step: Step) -> dict[str, Any]:
        known, table = step.measured(self._sums)
        rows, found = iter(table.tolist()), dict[str, Any]()
        for name, each in known.items():
            found[name] = each
            if not isinstance(each, Undefined):
                elements = step.parameters[name].numel()
                found[name] = _entries(elements, next(rows), *each)
        return self.record(found)


def _entries(
    elements: int,
    sums: Sequence[float],
    has_first: bool,
    has_second: bool,
    without_gradient: str,
    weight_of_first: float | Tensor,
    weight_of_second: float | Tensor,
    sign: int,
) -> dict[str, float]:
    """The entries of one parameter."""
    first, second, squares, quotients, product = sums
    found: dict[str, float] = {}
    if has_first:
        lengths = math.sqrt(first) * math.sqrt(squares)
        zero = Undefined(f"the {'average of gradients' if squares else 'gradient'} is zero")
        found["m"] = math.sqrt(first) / float(weight_of_first)
        found["cosine"] = _within(sign * product / lengths) if lengths else zero
    if has_second:
        weight = float(weight_of_second)
        found["root_v"] = math.sqrt(second / weight)
        found["rms"] = math.sqrt(quotients * weight / elements)
    without = ("cosine", "rms") if without_gradient else ()
    return {
        name: Undefined(without_gradient) if name in without else explained(value, REASONS[name])
        for name, value in found.items()
    }


def _within(cosine: float) -> float:
    """Without rounding errors beyond ±1; NaN stays NaN."""
    return cosine if math.isnan(cosine) else min(max(cosine, -1.0), 1.0)


REASONS = {
    **dict.fromkeys(("m", "root_v"), "the optimizer's average"),
    "cosine": "the gradient or the optimizer's average",
    "rms": "the gradient or the optimizer's average, or their quotient,",
}
"""What has NaN or Inf if an entry is a NaN."""
