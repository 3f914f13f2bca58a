"""Per-sample gradients as a BackPACK extension."""

from __future__ import annotations

from typing import Any

import torch
from backpack.extensions.backprop_extension import FAIL_SILENT
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn

from gradlens.backpack_adapter.layer_calls import (
    own_parameters,
    stored_inputs,
    trainable_parameters,
)
from gradlens.gradients.collect import BackwardPass, Collector
from gradlens.graph.graph import Graph
from gradlens.graph.hooks import without_hooks
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.undisturbed import buffers_kept
from gradlens.operators.operator import GradientOperator
from gradlens.operators.summed import summed
from gradlens.samples.planner import plan_of_rows
from gradlens.torch_private import backward_pass_id, tree_leaves


class PerSampleGradients(FirstOrderBackpropExtension):
    """BackPACK extension that yields one structured operator for each parameter.

    Inside ``with backpack(PerSampleGradients()):`` each parameter of an extended model gets its
    operator as ``parameter.per_sample_gradients``. BackPACK calls an extension for one layer at a
    time, so the rows along the layer's batch axis are taken for the samples of the batch. Within a
    cockpit, a quantity returns this extension to request per-sample gradients; they are found from
    the loss's graph, and nothing is stored on parameters.
    """

    def __init__(self, loss_reduction: LossReduction = "mean") -> None:
        super().__init__("per_sample_gradients", {}, fail_mode=FAIL_SILENT)
        self._loss_reduction: LossReduction = loss_reduction
        self._backward_pass: dict[int, int] = {}

    def __call__(self, module: nn.Module, g_inp: Any, g_out: tuple[Tensor | None, ...]) -> None:
        """Called by BackPACK when the gradient at the module's output is known."""
        if not trainable_parameters(module):
            return
        for name, operator in self._operators(module, stored_inputs(module), g_out).items():
            self._save(module.get_parameter(name), operator)

    def _operators(
        self, module: nn.Module, inputs: tuple[Any, ...], g_out: tuple[Tensor | None, ...]
    ) -> dict[str, GradientOperator]:
        """Run the layer once more, and a backward pass through it alone."""
        parameters = own_parameters(module)
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
        with torch.enable_grad(), buffers_kept(module):
            result = without_hooks(module)(*arguments)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        pairs = [(o, g) for o, g in zip(outputs, g_out, strict=False) if g is not None]
        if not pairs or pairs[0][0].grad_fn is None:
            return {}
        output, gradient = pairs[0]
        graph, axis = Graph(output), batch_axis(module)
        plan = plan_of_rows(graph, parameters, output.shape[axis], axis)
        collector = Collector(plan.unavailable)
        batch = Batch(plan.samples, plan.known_by, self._loss_reduction)
        BackwardPass(graph, plan, batch, collector).run(gradient)
        found = {name: collector.take(name) for name in parameters}
        return {name: operator for name, operator in found.items() if operator is not None}

    def _save(self, parameter: Any, operator: Any) -> None:
        current = backward_pass_id()
        if self._backward_pass.get(id(parameter)) == current:
            operator = summed([parameter.per_sample_gradients, operator])
        self._backward_pass[id(parameter)] = current
        parameter.per_sample_gradients = operator


def batch_axis(module: nn.Module) -> int:
    """The axis of a layer's output that counts the samples."""
    return int(isinstance(module, nn.RNNBase) and not module.batch_first)
