"""The curvature of one step's loss, shared by all quantities that look at it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.hessian import HessianOperator
from gradlens.individual.gathering import LossReduction
from gradlens.individual.recomputed import batch_axis
from gradlens.individual.tap import (
    CallListener,
    LayerCall,
    known_gradient,
    listen,
    stop_listening,
)


class LossCurvature:
    """Curvature matrices of the mean mini-batch loss, while its graph is alive.

    Built when first asked for, with ``torch.autograd.grad``: gradients stay where they are.
    ``seed`` is for probes, and differs from step to step. Under a sum loss N is needed: it is
    found if the model is extended, and otherwise must be told.
    """

    def __init__(
        self,
        global_step: int,
        loss: Tensor,
        parameters: Mapping[str, nn.Parameter],
        *,
        model: nn.Module | None = None,
        outputs: Tensor | None = None,
        optimizer: Optimizer | None = None,
        loss_reduction: LossReduction = "mean",
        batch_size: int | None = None,
    ) -> None:
        self.global_step = global_step
        self.seed = global_step
        self.loss = loss
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.optimizer = optimizer
        self._model = model
        self._outputs = outputs
        self._loss_reduction = loss_reduction
        self._batch_size = batch_size

    @cached_property
    def hessian(self) -> HessianOperator:
        """The Hessian; ``NotTwiceDifferentiableError`` if there is none."""
        counter = _BatchCounter()
        if self._model is not None:
            listen(self._model, counter)
        try:
            operator = HessianOperator(self.loss, self.parameters)
        finally:
            if self._model is not None:
                stop_listening(self._model, counter)
        operator.scale = self._scale(counter.batch_size)
        return operator

    @cached_property
    def ggn(self) -> GGNOperator:
        """The generalised Gauss-Newton matrix; ``ValueError`` without the network's outputs."""
        if self._outputs is None:
            raise ValueError(
                "the generalised Gauss-Newton matrix takes the network's outputs: pass "
                "info={'outputs': ...} to the context"
            )
        scale = self._scale(len(self._outputs))
        return GGNOperator(self.loss, self._outputs, self.parameters, scale)

    def _scale(self, found: int | None) -> float:
        if self._loss_reduction == "mean":
            return 1.0
        batch_size = self._batch_size or found
        if batch_size is None:
            raise ValueError(
                "the curvature of a sum loss takes the batch size: pass batch_size=... to the "
                "context, or the model to the cockpit"
            )
        return 1 / batch_size


class _BatchCounter(CallListener):
    """Sees how many samples the layers get."""

    def __init__(self) -> None:
        self.batch_size: int | None = None

    def receive(self, call: LayerCall) -> None:
        index, gradient = known_gradient(call)
        if self.batch_size is None:
            self.batch_size = gradient.shape[batch_axis(call.module, index)]
