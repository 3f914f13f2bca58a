"""The curvature of one step's loss, shared by all quantities that look at it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from gradlens.curvature.agreement import has_diagonal, same_matrix
from gradlens.curvature.backpack_graph import BackpackGraph, BeyondBackpackError, backpack_graph
from gradlens.curvature.calls import Calls, LossCall, recording
from gradlens.curvature.differentiation import NotTwiceDifferentiableError, derivative
from gradlens.curvature.ggn import GGNOperator, NoOutputsError
from gradlens.curvature.ggn_diagonal import NoRootError
from gradlens.curvature.hessian import HessianOperator, check_loss
from gradlens.curvature.loss_diagonal import (
    DiagonalKind,
    LossDiagonal,
    LossTraces,
    diagonal_by_backpack,
    diagonal_by_hutchinson,
    diagonal_by_per_sample_gradients,
    undefined_diagonal,
)
from gradlens.curvature.network_outputs import (
    LINEAR_IN_OUTPUTS,
    bypass_error,
    bypassing,
    checked_outputs,
    outputs_by_calls,
    remark_on_bypass,
)
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.probes import private_random_numbers
from gradlens.curvature.products import NotFiniteError
from gradlens.curvature.sampled_traces import sampled_traces
from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.gradients import Plans, evidence_of
from gradlens.per_sample.labelling.batch import LossReduction
from gradlens.per_sample.labelling.graph import Graph
from gradlens.per_sample.labelling.planner import samples_of


class LossCurvature:
    """Curvature matrices of the mean mini-batch loss, while its graph is alive.

    Built when first asked for, with ``torch.autograd.grad``: gradients stay where they are.
    BackPACK's context is global, so threads can't look at the curvature of their losses at once.
    ``seed`` is for probes, and differs from step to step. Under a sum loss N is needed: it is
    read off the loss, or has to be passed. ``plans`` keep whose gradients are whose from step to
    step, and ``remarks`` are what the user should know of how the curvature was found.
    """

    def __init__(
        self,
        global_step: int,
        loss: Tensor,
        parameters: Mapping[str, nn.Parameter],
        *,
        model: nn.Module | None = None,
        outputs: Any = None,
        optimizer: Optimizer | None = None,
        loss_reduction: LossReduction = "mean",
        batch_size: int | None = None,
        plans: Plans | None = None,
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
        self._plans = Plans() if plans is None else plans
        self._diagonals: dict[tuple[DiagonalKind, int], LossDiagonal] = {}
        self._traces: dict[tuple[DiagonalKind, int, int | None], LossTraces] = {}
        self.remarks: list[str] = []

    @cached_property
    def hessian(self) -> HessianOperator:
        """The Hessian; ``NotTwiceDifferentiableError`` if there is none."""
        return HessianOperator(self.loss, self.parameters, self._scale)

    @cached_property
    def ggn(self) -> GGNOperator:
        """The generalised Gauss-Newton matrix.

        ``NoOutputsError``, a ``ValueError``, without the one tensor of outputs that it takes.
        """
        outputs = self._network_outputs()
        operator = GGNOperator(self.loss, outputs, self.parameters, self._scale)
        bypassed = bypassing(self.loss, outputs, self.parameters)
        if bypassed and self._outputs is None:
            raise bypass_error(bypassed)
        if bypassed:
            self.remarks.append(remark_on_bypass(bypassed))
        return operator

    def diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """Exact by BackPACK's rules where they hold, and estimated with ``samples`` elsewhere.

        ``"diag_ggn_mc"`` is an estimate everywhere. Quantities that ask for the same share it.
        Without a method, it is undefined, and its traces say why.
        """
        if (kind, samples) not in self._diagonals:
            self._diagonals[kind, samples] = self._defined_diagonal(kind, samples)
        return self._diagonals[kind, samples]

    def traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The diagonal's sums, of ``"diag_ggn_mc"`` without it where a backward pass gives them.

        Then ``samples`` are draws, each for ``sub_batch`` samples or all. Elsewhere it is the
        diagonal, with two samples at least.
        """
        key = (kind, samples, sub_batch)
        if key not in self._traces:
            sampled = self._sampled_traces(samples, sub_batch) if kind == "diag_ggn_mc" else None
            self._traces[key] = sampled or self.diagonal(kind, max(samples, 2)).sums()
        return self._traces[key]

    def run(self, extension: BackpropExtension) -> None:
        """Let a second-order BackPACK extension save its results on the parameters.

        ``BeyondBackpackError`` where BackPACK has no rules.
        """
        try:
            self._checked_graph("diag_h").run(extension)
        except BeyondBackpackError as reason:
            raise BeyondBackpackError(
                f"{type(extension).__name__} can't be run on this network: {reason}"
            ) from reason

    def _sampled_traces(self, samples: int, sub_batch: int | None) -> LossTraces | None:
        """None where there are none; what says why is the way to the diagonal."""
        try:
            found = sampled_traces(
                self._model, self.ggn, samples, sub_batch, self.seed, self._plans
            )
        except (NoRootError, NoOutputsError, NotTwiceDifferentiableError, NotFiniteError):
            return None
        return LossTraces(*found, "Monte Carlo")

    def _defined_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        try:
            return self._diagonal(kind, samples)
        except (NoOutputsError, NotTwiceDifferentiableError, NotFiniteError) as error:
            reason = " ".join(str(error).split())
            return undefined_diagonal(self.parameters, samples, f"{kind} is undefined: {reason}")

    def _diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        matrix = self._matrix(kind)
        reasons, finders = [], [self._by_backpack]
        if kind != "diag_h":
            finders.append(self._by_per_sample_gradients)
        for find in finders:
            try:
                return find(kind, samples)
            except (BeyondBackpackError, NoRootError) as reason:
                reasons.append(str(reason))
        self.remarks.append(
            f"{kind} is estimated, by Hutchinson's method with {samples} products: "
            + "; ".join(reasons)
        )
        return diagonal_by_hutchinson(matrix, self.parameters, samples, self.seed)

    def _by_backpack(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        graph, matrix = self._checked_graph(kind), self._matrix(kind)
        found = diagonal_by_backpack(kind, graph, self.parameters, matrix.scale, samples, self.seed)
        if found.method == "exact" and not has_diagonal(matrix, found.values, self.seed):
            raise BeyondBackpackError("BackPACK's diagonal isn't that of the loss")
        return found

    def _by_per_sample_gradients(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        return diagonal_by_per_sample_gradients(
            kind, self.ggn, self._model, self.parameters, samples, self.seed, self._plans
        )

    def _matrix(self, kind: DiagonalKind) -> CurvatureOperator:
        return self.hessian if kind == "diag_h" else self.ggn

    def _matrix_of(self, kind: DiagonalKind, graph: BackpackGraph) -> CurvatureOperator:
        if kind == "diag_h":
            return HessianOperator(graph.loss, self.parameters, self._scale)
        return GGNOperator(graph.loss, graph.outputs, self.parameters, self._scale)

    def _checked_graph(self, kind: DiagonalKind) -> BackpackGraph:
        graph = self._graph
        if not same_matrix(self._matrix(kind), self._matrix_of(kind, graph), self.seed):
            raise BeyondBackpackError(
                "the loss is not what the loss module returns for the network's modules one after "
                "another: something is added to it, or done between them, or dropout has met zeros"
            )
        return graph

    @cached_property
    def _graph(self) -> BackpackGraph:
        calls = self._recorded
        with private_random_numbers(self.loss.device, self.seed):
            return backpack_graph(self.loss, self.parameters, self._model, calls)

    @cached_property
    def _recorded(self) -> Calls:
        check_loss(self.loss)
        with recording(self._model) as calls:
            derivative([self.loss], list(self.parameters.values()), [torch.ones_like(self.loss)])
        return calls

    @cached_property
    def _loss_calls(self) -> list[LossCall]:
        """A loss module's call that returned the loss itself, or otherwise those found below."""
        check_loss(self.loss)
        with recording(None) as calls:
            edge = get_gradient_edge(self.loss)
            torch.autograd.grad(
                [self.loss], [edge], [torch.ones_like(self.loss)], retain_graph=True
            )
        return calls.of_losses or self._recorded.of_losses

    def _network_outputs(self) -> Tensor:
        """What the user has passed, or otherwise the input of the extended loss module."""
        if self._outputs is not None:
            return checked_outputs(self._outputs)
        calls = self._loss_calls
        if any(isinstance(call.module, nn.NLLLoss) for call in calls):
            self.remarks.append(LINEAR_IN_OUTPUTS)
        return outputs_by_calls(calls)

    @cached_property
    def _scale(self) -> float:
        """1/N under a sum loss, of which the matrices are those of the mean."""
        return 1.0 if self._loss_reduction == "mean" else 1 / self._samples()

    def _samples(self) -> int:
        """N, as per-sample gradients have it."""
        graph = Graph(self.loss)
        info = {"batch_size": self._batch_size}
        try:
            return samples_of(graph, evidence_of(graph, self._model, info))
        except UnavailableError as reason:
            raise ValueError(
                f"the curvature of a sum loss is divided by the number of samples: {reason}"
            ) from reason
