"""Gathers operators by parameter during a backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from gradlens.individual.attribution import MIXED, UNTOLD, Attribution
from gradlens.individual.folding import Order, folded_operators
from gradlens.individual.operator import GradientOperator
from gradlens.individual.recomputed import CannotRecomputeError, Recomputed, batch_axis
from gradlens.individual.rules import BatchAxisError, Operators, couples_samples, operators_of
from gradlens.individual.summed import summed
from gradlens.individual.tap import CallListener, LayerCall, known_gradient

LossReduction: TypeAlias = Literal["mean", "sum"]

Readings: TypeAlias = dict[Order | None, GradientOperator]
"""A parameter's operators by one call, by how its rows may be folded; ``None`` if they aren't."""


class Gathering(CallListener):
    """Operators of backward passes, by parameter name.

    What a known layer's calls tell goes before what the loss's graph tells, unless that knows of
    more uses, and both go before recomputing a layer. Errors don't interrupt a backward pass:
    ``error`` keeps the first one until somebody asks, ``missing`` says why a parameter has no
    operator, ``coupling`` names layers that mix samples, ``epsilon`` is the relative rounding error
    of the least precise output gradient. Operators that ``attribution`` refutes are dropped.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss_reduction: LossReduction,
        batch_size: int | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.missing: dict[str, str] = {}
        self.coupling: set[str] = set()
        self.epsilon = 0.0
        self.error: Exception | None = None
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.loss_reduction: LossReduction = loss_reduction
        self.factor = 1.0
        self._left_out: set[str] = set()
        self.attribution: Attribution | None = None
        self.knows_loss = False
        self.heard = False
        self.closed = False
        self.orders: dict[str, Order] = {}
        # By name and backward pass: a gradient that the user asks for inside the context, without
        # accumulating it into the parameters, must not be mixed with the one that is.
        self._uses: dict[str, dict[int, list[Readings]]] = {}
        self._uses_in_graph: dict[str, dict[int, list[Readings]]] = {}
        self._missing_in_graph: dict[str, str] = {}
        self.left_to_graph: set[str] = set()
        self.told_by_graph: set[str] = set()

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Give no gradients of some parameters, and say why."""
        self._left_out |= reasons.keys()
        self.missing |= reasons

    def close(self) -> None:
        """Take in nothing more."""
        self.closed = True

    def forget_calls(self) -> None:
        """As before the first call."""
        self._uses.clear()
        self._uses_in_graph.clear()

    def receive_loss_gradient(self, gradient: Tensor) -> None:
        """Take in ∂(what backward is called on)/∂loss, a factor that gₙ must not contain."""
        if self.paused:
            return
        # All else waits for the loss's gradient, so on a GPU this costs no more than a launch.
        self.factor = float(gradient.detach())

    @property
    def loss_scale(self) -> float:
        """What samples' contributions are multiplied by to give gₙ, but for N."""
        return 1 / self.factor if self.factor else math.nan

    def receive(self, call: LayerCall) -> None:
        """Take in a completed call of a layer that holds some of the parameters."""
        self.heard = True
        names = {
            key: self._names[id(parameter)]
            for key, parameter in call.module._parameters.items()
            if key in call.trainable and id(parameter) in self._names
        }
        elsewhere = self.left_to_graph | self._left_out
        names = {key: name for key, name in names.items() if name not in elsewhere}
        if not names or self.error is not None or self.closed:
            return
        try:
            with torch.no_grad(), autocast_off(known_gradient(call)[1]):
                self._take_in(call, names)
        except (CannotRecomputeError, BatchAxisError) as reason:
            self._miss(names.values(), str(reason))
        except Exception as error:  # the user's backward pass goes on
            self.error = error

    def orders_of(self, name: str) -> tuple[Order, ...]:
        """How samples may be folded with another axis where the parameter is used."""
        alone = Order.SAMPLES_FIRST if self.batch_size == 1 else None
        told = self.orders.get(layer_of(name), alone)
        if told is not None:
            return (told,)
        return () if self.attribution is None else tuple(Order)

    def receive_use(self, name: str, readings: Readings, precision: torch.dtype) -> None:
        """Take in one use of a parameter, found in the graph of the backward pass.

        ``precision`` is that of the output gradient it was made from.
        """
        self.heard = True
        if self.closed or name in self._left_out:
            return
        self.epsilon = max(self.epsilon, torch.finfo(precision).eps)
        uses = self._uses_in_graph.setdefault(name, {})
        uses.setdefault(torch._C._current_graph_task_id(), []).append(readings)

    def miss_use(self, name: str, reason: str) -> None:
        """Say why the graph doesn't tell a parameter's individual gradients."""
        self._missing_in_graph[name] = reason

    def _take_in(self, call: LayerCall, names: Mapping[str, str]) -> None:
        if call.flaw:
            self._miss(names.values(), call.flaw)
            return
        if couples_samples(call):
            self.coupling.add(layer_of(next(iter(names.values()))))
        by_order = self._by_order(call, names.values())
        self.epsilon = max(self.epsilon, torch.finfo(known_gradient(call)[1].dtype).eps)
        backward_pass = torch._C._current_graph_task_id()
        operators = next(iter(by_order.values()))
        for key in operators.keys() & names.keys():
            uses = self._uses.setdefault(names[key], {})
            readings = {order: found[key] for order, found in by_order.items()}
            uses.setdefault(backward_pass, []).append(readings)
        aliases = {names[key] for key in operators if key in names}
        self._miss(set(names.values()) - aliases, "its layer computes its weight from it")

    def _miss(self, names: Iterable[str], reason: str) -> None:
        self.missing |= dict.fromkeys(names, reason)

    def _by_order(self, call: LayerCall, names: Iterable[str]) -> dict[Order | None, Operators]:
        """The call's operators, by how its rows may count the samples.

        Those of samples that are folded with another axis have to be confirmed.
        """
        index, found = known_gradient(call)
        axis = batch_axis(call.module, index)
        rows = found.shape[axis] if found.dim() > axis else None
        if self.batch_size is None:
            self.batch_size = rows
        samples = self.batch_size
        if rows is not None and rows == samples:
            return {None: operators_of(call, self._scale)}
        orders = {order for name in names for order in self.orders_of(name)}
        if not (rows and samples and axis == 0 and rows % samples == 0 and orders):
            raise BatchAxisError(self._misplaced(axis))
        return {order: folded_operators(call, self._scale, samples, order) for order in orders}

    def _misplaced(self, axis: int) -> str:
        # Without numbers, which would make a new reason of each batch.
        remedy = "" if self.knows_loss else ", and pass loss=... to the context to try how it is"
        return (
            f"axis {axis} of its output should count the samples of the batch: put the batch first "
            f"and keep it apart from other axes within the network, or folded with one{remedy}"
        )

    @property
    def _scale(self) -> float:
        samples = self.batch_size or 1
        return (float(samples) if self.loss_reduction == "mean" else 1.0) * self.loss_scale

    def take(self, name: str, backward_pass: int | None = None) -> GradientOperator | None:
        """Remove and return a parameter's operator, its uses in one or all passes added up."""
        verdicts = []
        for candidate in self._candidates(name, backward_pass):
            operator = summed(candidate.uses)
            try:
                verdict = self._judge(name, candidate, operator)
            except CannotRecomputeError as reason:
                self.missing[name] = str(reason)
                continue
            if verdict == "":
                self._accept(name, candidate)
                return operator
            verdicts.append(verdict)
        if verdicts:
            self.missing[name] = UNTOLD if UNTOLD in verdicts else MIXED
        if verdicts and UNTOLD not in verdicts and self.attribution is not None:
            self.attribution.refuted.add(name)
        return None

    def _accept(self, name: str, candidate: _Candidate) -> None:
        self.missing.pop(name, None)
        if candidate.in_graph:
            self.told_by_graph.add(name)
        if self.attribution is not None:
            if candidate.order is not None:
                self.attribution.orders[layer_of(name)] = candidate.order
            if candidate.in_graph:
                self.attribution.left_to_graph.add(name)

    def _candidates(self, name: str, backward_pass: int | None) -> list[_Candidate]:
        """What a parameter's operator may be, the likeliest first."""
        calls = _of_pass(self._uses.pop(name, {}), backward_pass)
        in_graph = _of_pass(self._uses_in_graph.pop(name, {}), backward_pass)
        told = self.orders.get(layer_of(name))
        by_calls = [] if name in self.missing else _readings(calls, told)
        if not in_graph or name in self._missing_in_graph:
            return by_calls
        by_graph = [replace(each, in_graph=True) for each in _readings(in_graph, told)]
        recomputed = any(isinstance(use, Recomputed) for each in by_calls for use in each.uses)
        calls_first = by_calls and not recomputed and len(calls) >= len(in_graph)
        return [*by_calls, *by_graph] if calls_first else [*by_graph, *by_calls]

    def _judge(self, name: str, candidate: _Candidate, operator: GradientOperator) -> str:
        """Why a candidate isn't the right one; nothing if it may be."""
        attribution, order, layer = self.attribution, candidate.order, layer_of(name)
        if attribution is None:
            return ""
        agrees = attribution.agrees(name, operator, self.epsilon)
        if agrees is False:
            return MIXED
        if order is None:
            return ""
        told = self._order_told(layer, attribution)
        if told is None and agrees is None:
            return UNTOLD
        return "" if told in (None, order) else MIXED

    def _order_told(self, layer: str, attribution: Attribution) -> Order | None:
        """The order that another of the layer's parameters has told, or does."""
        if layer in attribution.orders:
            return attribution.orders[layer]
        for name in (name for name in self._uses if layer_of(name) == layer):
            for candidate in _readings(_of_pass(self._uses[name], None), None):
                if attribution.agrees(name, summed(candidate.uses), self.epsilon):
                    return candidate.order
        return None

    def explain_missing(self) -> None:
        """Say of parameters that no layer has told about what the graph has."""
        for name, reason in self._missing_in_graph.items():
            if name not in self._uses:
                self.missing.setdefault(name, reason)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that have operators."""
        return tuple({**self._uses, **self._uses_in_graph})


@dataclass(frozen=True)
class _Candidate:
    """What may be a parameter's operator, as the sum of ``uses``.

    ``order`` is that of folded samples, if they are.
    """

    uses: Sequence[GradientOperator]
    order: Order | None = None
    in_graph: bool = False


def _readings(calls: Sequence[Readings], told: Order | None) -> list[_Candidate]:
    """One for each order of samples; one without an order if that doesn't matter."""
    if not calls:
        return []
    if all(None in readings for readings in calls):
        return [_Candidate([readings[None] for readings in calls])]
    return [
        _Candidate([readings.get(order) or readings[None] for readings in calls], order)
        for order in (Order if told is None else (told,))
        if all(order in readings or None in readings for readings in calls)
    ]


_Of = TypeVar("_Of")


def _of_pass(uses: dict[int, list[_Of]], backward_pass: int | None) -> list[_Of]:
    wanted = uses if backward_pass is None else uses.keys() & {backward_pass}
    return [use for known in wanted for use in uses[known]]


def autocast_off(tensor: Tensor) -> AbstractContextManager[Any]:
    """Precision as given, on the tensor's device."""
    device = tensor.device.type
    # Switching it off takes longer than asking.
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def layer_of(parameter_name: str) -> str:
    """The layer that a parameter belongs to: its name up to the last dot."""
    return parameter_name.rpartition(".")[0] or parameter_name
