"""The curvature of one step's loss, shared by all quantities that look at it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.curvature.backpack_graph import BackpackGraph, BeyondBackpackError, backpack_graph
from gradlens.curvature.calls import Calls, recording
from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import NoRootError
from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.loss_diagonal import (
    DiagonalKind,
    LossDiagonal,
    diagonal_by_backpack,
    diagonal_by_hutchinson,
    diagonal_by_individual_gradients,
)
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probes import private_random_numbers
from gradlens.individual.gathering import LossReduction


class LossCurvature:
    """Curvature matrices of the mean mini-batch loss, while its graph is alive.

    Built when first asked for, with ``torch.autograd.grad``: gradients stay where they are.
    ``seed`` is for probes, and differs from step to step. Under a sum loss N is needed: it is
    found if the model is extended, and otherwise must be told. ``remarks`` are what the user
    should know of how it was found.
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
        self._calls: Calls | None = None
        self._diagonals: dict[tuple[DiagonalKind, int], LossDiagonal] = {}
        self.remarks: list[str] = []

    @cached_property
    def hessian(self) -> HessianOperator:
        """The Hessian; ``NotTwiceDifferentiableError`` if there is none."""
        with recording(self._model) as self._calls:
            operator = HessianOperator(self.loss, self.parameters)
        operator.scale = self._scale(self._calls.batch_size)
        return operator

    @cached_property
    def ggn(self) -> GGNOperator:
        """The generalised Gauss-Newton matrix; ``ValueError`` without the network's outputs."""
        outputs = self._network_outputs()
        return GGNOperator(self.loss, outputs, self.parameters, self._scale(len(outputs)))

    def diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """Exact by BackPACK's rules where they hold, and estimated with ``samples`` elsewhere.

        ``"diag_ggn_mc"`` is an estimate everywhere. Quantities that ask for the same share it.
        """
        if (kind, samples) not in self._diagonals:
            self._diagonals[kind, samples] = self._diagonal(kind, samples)
        return self._diagonals[kind, samples]

    def run(self, extension: BackpropExtension) -> None:
        """Let a second-order BackPACK extension save its results on the parameters.

        ``BeyondBackpackError`` where BackPACK has no rules.
        """
        try:
            self._graph.run(extension)
        except BeyondBackpackError as reason:
            raise BeyondBackpackError(
                f"{type(extension).__name__} can't be run on this network: {reason}"
            ) from reason

    def _diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        reasons, finders = [], [self._by_backpack]
        if kind != "diag_h" and self._model is not None:
            finders.append(self._by_individual_gradients)
        for find in finders:
            try:
                return find(kind, samples)
            except (BeyondBackpackError, NoRootError) as reason:
                reasons.append(str(reason))
        self.remarks.append(
            f"{kind} is estimated, by Hutchinson's method with {samples} products: "
            + "; ".join(reasons)
        )
        return diagonal_by_hutchinson(self._matrix(kind), self.parameters, samples, self.seed)

    def _by_backpack(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        found = diagonal_by_backpack(
            kind, self._graph, self.parameters, self.hessian.scale, samples, self.seed
        )
        if found.method == "exact" and not self._agrees(kind, found):
            raise BeyondBackpackError("BackPACK's diagonal isn't that of the loss")
        return found

    def _by_individual_gradients(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        assert self._model is not None
        found = diagonal_by_individual_gradients(
            kind,
            self.loss,
            self._network_outputs(),
            self._model,
            self.parameters,
            self.ggn.scale,
            samples,
            self.seed,
        )
        if found.method == "exact" and not self._agrees(kind, found):
            raise NoRootError("the diagonal from individual gradients isn't that of the loss")
        return found

    @cached_property
    def _graph(self) -> BackpackGraph:
        calls = self._recorded
        with private_random_numbers(self.loss.device, self.seed):
            return backpack_graph(self.loss, self.parameters, self._model, calls)

    @property
    def _recorded(self) -> Calls:
        _ = self.hessian
        assert self._calls is not None
        return self._calls

    def _matrix(self, kind: DiagonalKind) -> CurvatureOperator:
        return self.hessian if kind == "diag_h" else self.ggn

    def _network_outputs(self) -> Tensor:
        """What the user has passed, or otherwise the input of the one extended loss module."""
        calls = [] if self._outputs is not None else self._recorded.of_losses
        found = calls[0].inputs[0] if len(calls) == 1 else self._outputs
        if found is None or not found.requires_grad:
            raise ValueError(
                "the generalised Gauss-Newton matrix takes the network's outputs: pass "
                "info={'outputs': ...} to the context, or extend the loss module"
            )
        outputs: Tensor = found
        return outputs

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

    def _agrees(self, kind: DiagonalKind, found: LossDiagonal) -> bool:
        """Compare the largest element of one parameter, another one at each step."""
        matrix = self._matrix(kind)
        names = list(found.values)
        name = names[self.global_step % len(names)]
        diagonal = found.values[name].flatten()
        place = int(diagonal.abs().argmax())
        unit = torch.zeros(matrix.shape[0], dtype=matrix.torch_dtype, device=matrix.device)
        unit[matrix.slices[name].start + place] = 1
        truth = float(matrix.multiply(unit)[matrix.slices[name]][place])
        largest = max(float(values.abs().max()) for values in found.values.values())
        eps = torch.finfo(matrix.torch_dtype).eps
        difference = abs(float(diagonal[place]) - truth)
        return not difference > 10 * (eps**0.5 * abs(truth) + eps * largest)
