"""Gathers operators by parameter during a backward pass, and reduces each once it is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.individual.operator import GradientOperator
from gradlens.individual.recomputed import CannotRecomputeError, batch_axis
from gradlens.individual.reductions import ParameterGradients, Reduction
from gradlens.individual.rules import (
    BatchAxisError,
    couples_samples,
    operators_of,
)
from gradlens.individual.summed import summed
from gradlens.individual.tap import CallListener, LayerCall

LossReduction: TypeAlias = Literal["mean", "sum"]

OVERWRITTEN = "an in-place operation has overwritten the layer's input"


class Gathering(CallListener):
    """Operators of one backward pass, by parameter name.

    Errors don't interrupt the backward pass: ``error`` keeps the first one until somebody asks,
    ``missing`` says why a parameter has no operator, ``coupling`` names layers that mix samples,
    ``epsilon`` is the relative rounding error of the least precise output gradient.
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
        self._loss_reduction = loss_reduction
        self._uses: dict[str, list[GradientOperator]] = {}

    def receive(self, call: LayerCall) -> None:
        """Take in a completed call of a layer that holds some of the parameters."""
        names = {
            key: self._names[id(parameter)]
            for key, parameter in call.module._parameters.items()
            if parameter is not None and id(parameter) in self._names
        }
        if not names or self.error is not None:
            return
        try:
            with torch.no_grad(), autocast_off(known_gradient(call)[1]):
                self._take_in(call, names)
        except CannotRecomputeError as reason:
            self.missing |= dict.fromkeys(names.values(), str(reason))
        except Exception as error:  # the user's backward pass goes on
            self.error = _named(error, call.module, next(iter(names.values())))

    def _take_in(self, call: LayerCall, names: Mapping[str, str]) -> None:
        if call.inputs_changed:
            self.missing |= dict.fromkeys(names.values(), OVERWRITTEN)
            return
        if couples_samples(call.module):
            self.coupling.add(_layer(next(iter(names.values()))))
        scale = self._scale(call)
        self.epsilon = max(self.epsilon, torch.finfo(known_gradient(call)[1].dtype).eps)
        for key, operator in operators_of(call, scale).items():
            if key in names:
                self._uses.setdefault(names[key], []).append(operator)

    def _scale(self, call: LayerCall) -> float:
        index, found = known_gradient(call)
        axis = batch_axis(call.module, index)
        length = found.shape[axis] if found.dim() > axis else None
        if self.batch_size is None:
            self.batch_size = length
        if length is None or length != self.batch_size:
            raise BatchAxisError(
                f"axis {axis} of its output {list(found.shape)} should count the samples of the "
                f"batch, N = {self.batch_size}: put the batch first and keep it apart from other "
                "axes within the network"
            )
        return float(length) if self._loss_reduction == "mean" else 1.0

    def take(self, name: str) -> GradientOperator | None:
        """Remove and return a parameter's operator, its uses added up."""
        uses = self._uses.pop(name, None)
        if uses is None or name in self.missing:
            return None
        return summed(uses)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that have operators."""
        return tuple(self._uses)


class ReducedGradients(Gathering):
    """Reduces each parameter's individual gradients when its gradient is complete, and frees them.

    A parameter's gradient is complete when autograd accumulates it, since then all uses of it have
    been seen. ``values`` are by reduction and parameter name, ``means`` are the ḡ ``[*P]``. Where
    ``p.grad`` was empty before the backward pass and ``trust_gradients`` says that the loss is a
    mean or sum over samples, ḡ is read off it.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss_reduction: LossReduction,
        reductions: Iterable[Reduction],
        batch_size: int | None = None,
        trust_gradients: bool = True,
    ) -> None:
        super().__init__(parameters, loss_reduction, batch_size)
        self.values: dict[Reduction, dict[str, Any]] = {reduction: {} for reduction in reductions}
        self.means: dict[str, Tensor] = {}
        self._parameters = parameters
        self._fresh = {name for name, p in parameters.items() if p.grad is None}
        self._trust_gradients = trust_gradients
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._completion(name))
            for name, parameter in parameters.items()
            if parameter.is_leaf and parameter.requires_grad
        ]

    def _completion(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._complete(name)

    def _complete(self, name: str) -> None:
        if self.error is not None or name not in self.names:
            return
        parameter = self._parameters[name]
        try:
            with torch.no_grad(), autocast_off(parameter):
                self._reduce(name, parameter)
        except CannotRecomputeError as reason:
            self._forget(name, str(reason))
        except Exception as error:  # the user's backward pass goes on
            self._forget(name, str(error))
            self.error = error

    def _reduce(self, name: str, parameter: nn.Parameter) -> None:
        individual = self.take(name)
        if individual is None:
            return
        if name in self.means:
            raise RuntimeError(
                f"parameter {name!r} got gradients from two backward passes inside one context: "
                "add the losses and call backward once, or use a context for each"
            )
        gradient = parameter.grad if name in self._fresh else None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        mean = self._mean_from(gradient, individual)
        gradients = ParameterGradients(parameter, individual, gradient, mean)
        for reduction, values in self.values.items():
            values[name] = reduction.reduce(gradients)
        self.means[name] = gradients.mean

    def _mean_from(self, gradient: Tensor | None, individual: GradientOperator) -> Tensor | None:
        if gradient is None or not self._trust_gradients or gradient.dtype != individual.dtype:
            return None
        return gradient if self._loss_reduction == "mean" else gradient / individual.batch_size

    def _forget(self, name: str, reason: str) -> None:
        self.missing[name] = reason
        for values in self.values.values():
            values.pop(name, None)

    def finish(self) -> None:
        """Reduce what autograd didn't accumulate (``torch.autograd.grad``), and stop listening."""
        for name in self.names:
            self._complete(name)
        self.stop()

    def stop(self) -> None:
        """Stop listening and let go of whatever has not been reduced."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._uses.clear()


def known_gradient(call: LayerCall) -> tuple[int, Tensor]:
    """The first output that the loss depends on, and the gradient at it."""
    return next((i, g) for i, g in enumerate(call.grad_outputs) if g is not None)


def autocast_off(tensor: Tensor) -> torch.autocast:
    """Precision as given, on the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False)


def _layer(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0] or parameter_name


def _named(error: Exception, module: nn.Module, parameter_name: str) -> Exception:
    if not isinstance(error, BatchAxisError):
        return error
    return BatchAxisError(f"layer {_layer(parameter_name)!r} ({type(module).__name__}): {error}")
