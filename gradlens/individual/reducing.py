"""Reduces each parameter's individual gradients during a backward pass, once they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.individual.gathering import Gathering, LossReduction, autocast_off
from gradlens.individual.operator import GradientOperator
from gradlens.individual.recomputed import CannotRecomputeError
from gradlens.individual.reductions import ParameterGradients, Reduction

RETAINED_BYTES = 96 * 2**20
"""Memory that stored individual gradients may take until the update."""


class ReducedGradients(Gathering):
    """Reduces each parameter's individual gradients when its gradient is complete, and frees them.

    A parameter's gradient is complete when autograd accumulates it, since then all uses of it have
    been seen. ``values`` are by reduction and parameter name, ``covered`` are the parameters that
    have them, and ``retained``, with ``retain``, are the operators themselves.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        loss_reduction: LossReduction,
        reductions: Iterable[Reduction],
        batch_size: int | None = None,
        retain: bool = False,
        waits: bool = False,
    ) -> None:
        super().__init__(parameters, loss_reduction, batch_size)
        self.values: dict[Reduction, dict[str, Any]] = {reduction: {} for reduction in reductions}
        self.covered: set[str] = set()
        self.retained: dict[str, GradientOperator] = {}
        self.waiting: dict[str, GradientOperator] = {}
        self._retain = retain
        self._shared = sum(each.passes for each in self.values) + retain > 1
        self._may_retain = RETAINED_BYTES
        self._waits = waits
        self._parameters = parameters
        self._without_gradient = {name for name, p in parameters.items() if p.grad is None}
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._completion(name))
            for name, parameter in parameters.items()
            if parameter.is_leaf and parameter.requires_grad
        ]

    def _completion(self, name: str) -> Callable[[Tensor], None]:
        return lambda _: self._complete(name, torch._C._current_graph_task_id())

    def _complete(self, name: str, backward_pass: int) -> None:
        if self.error is not None or name not in self.names:
            return
        parameter = self._parameters[name]
        try:
            with torch.no_grad(), autocast_off(parameter):
                self._reduce(name, parameter, backward_pass)
        except CannotRecomputeError as reason:
            self._forget(name, str(reason))
        except Exception as error:  # the user's backward pass goes on
            self._forget(name, str(error))
            self.error = error

    def _reduce(self, name: str, parameter: nn.Parameter, backward_pass: int) -> None:
        individual = self.take(name, backward_pass)
        if individual is None:
            return
        if name in self.covered:
            raise RuntimeError(
                f"parameter {name!r} got gradients from two backward passes inside one context: "
                "add the losses and call backward once, or use a context for each"
            )
        if self._waits:
            self.waiting[name] = individual
            self.covered.add(name)
            return
        gradient = parameter.grad if name in self._without_gradient else None
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        self._reduce_operator(name, individual, gradient)

    def _reduce_operator(
        self, name: str, individual: GradientOperator, gradient: Tensor | None = None
    ) -> None:
        parameter = self._parameters[name]
        gradients = ParameterGradients(name, parameter, individual, gradient, self._shared)
        found = {reduction: reduction.reduce(gradients) for reduction in self.values}
        for reduction, value in found.items():
            self.values[reduction][name] = value
        self.covered.add(name)
        if self._retain:
            self.retained[name] = self._lasting(gradients)

    def _lasting(self, gradients: ParameterGradients) -> GradientOperator:
        """What tells projections after the update at least cost."""
        elements = gradients.elements
        needed = elements.batch_size * elements.shape.numel() * elements.dtype.itemsize
        if elements is not gradients.individual and needed <= self._may_retain:
            self._may_retain -= needed
            return elements
        gradients.individual.outlive_update()
        return gradients.individual

    def take_joined(
        self,
        operators: Mapping[str, GradientOperator],
        missing: Mapping[str, str],
        coupling: Iterable[str],
    ) -> None:
        """Reduce the whole batch instead of the part that was seen."""
        self._waits, self.waiting, self.covered = False, {}, set()
        self.missing, self.coupling = dict(missing), set(coupling)
        for name, operator in operators.items():
            parameter = self._parameters[name]
            try:
                with torch.no_grad(), autocast_off(parameter):
                    self._reduce_operator(name, operator)
            except CannotRecomputeError as reason:
                self._forget(name, str(reason))

    def close(self) -> None:
        """Reduce what has been heard, and take in nothing more."""
        self._reduce_rest()
        super().close()

    def _forget(self, name: str, reason: str) -> None:
        self.missing[name] = reason
        self.covered.discard(name)
        for values in self.values.values():
            values.pop(name, None)

    def finish(self) -> None:
        """Reduce what autograd didn't accumulate (``torch.autograd.grad``), and stop listening."""
        self._reduce_rest()
        self._remove_hooks()

    def _reduce_rest(self) -> None:
        self.explain_missing()
        for name in self.names:
            if name in self.covered:
                self._drop(name)
            else:
                passes = {**self._uses.get(name, {}), **self._uses_in_graph.get(name, {})}
                self._complete(name, max(passes))

    def _drop(self, name: str) -> None:
        self._uses.pop(name, None)
        self._uses_in_graph.pop(name, None)

    def stop(self) -> None:
        """Stop listening and let go of all gradients."""
        self._remove_hooks()
        self._uses.clear()
        self._uses_in_graph.clear()
        self.retained, self.waiting = {}, {}

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
