"""Individual gradients as a BackPACK extension."""

from __future__ import annotations

from typing import Any

import torch
from backpack.extensions.backprop_extension import FAIL_SILENT
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn

from gradlens.individual.gathering import LossReduction, autocast_off
from gradlens.individual.recomputed import batch_axis
from gradlens.individual.rules import operators_of
from gradlens.individual.summed import summed
from gradlens.individual.tap import (
    CallListener,
    LayerCall,
    known_gradient,
    stored_inputs,
    trainable_parameters,
)


class IndividualGradients(FirstOrderBackpropExtension):
    """BackPACK extension that yields one structured operator for each parameter.

    Inside ``with backpack(IndividualGradients()):`` each parameter of an extended model gets its
    operator as ``parameter.individual_gradients``. Within a cockpit it is a quantity's word that
    it needs individual gradients, and nothing is stored on parameters.
    """

    def __init__(
        self, loss_reduction: LossReduction = "mean", listener: CallListener | None = None
    ) -> None:
        super().__init__("individual_gradients", {}, fail_mode=FAIL_SILENT)
        self._loss_reduction = loss_reduction
        self._listener = _SaveOnParameters(loss_reduction) if listener is None else listener

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        trainable = trainable_parameters(module)
        if not trainable:
            return
        inputs = stored_inputs(module)
        call = LayerCall(module, inputs, {}, tuple(g_out), trainable, module.training)
        self._listener.receive(call)


class _SaveOnParameters(CallListener):
    def __init__(self, loss_reduction: LossReduction) -> None:
        self._loss_reduction = loss_reduction
        self._backward_pass: dict[int, int] = {}

    def receive(self, call: LayerCall) -> None:
        index, gradient = known_gradient(call)
        n = gradient.shape[batch_axis(call.module, index)]
        scale = float(n) if self._loss_reduction == "mean" else 1.0
        with torch.no_grad(), autocast_off(gradient):
            for name, operator in operators_of(call, scale).items():
                self._save(call.module._parameters[name], operator)

    def _save(self, parameter: Any, operator: Any) -> None:
        current = torch._C._current_graph_task_id()
        if self._backward_pass.get(id(parameter)) == current:
            operator = summed([parameter.individual_gradients, operator])
        self._backward_pass[id(parameter)] = current
        parameter.individual_gradients = operator
