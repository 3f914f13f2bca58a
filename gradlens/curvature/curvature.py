"""The curvature of a loss at the present parameters, shared by all quantities that need it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.curvature.diagonals import (
    DiagonalKind,
    LossDiagonal,
    LossTraces,
    by_draws,
    by_hutchinson,
    by_roots,
    check_piecewise_linear,
    coupled_traces,
    sampled_traces,
)
from gradlens.curvature.directions import Directions, LowRankGGN
from gradlens.curvature.hessian import GGNOperator, HessianOperator, check_loss
from gradlens.curvature.network_outputs import (
    LINEAR_IN_RETURNED,
    NetworkOutputs,
    calls_of_losses,
    note_on_bypass,
    outputs_of_calls,
    passed_outputs,
    returned_outputs,
)
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.samples_jacobians import SamplesJacobians
from gradlens.gradients.gradients import evidence_of
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.model_calls import calls_behind as calls_of_model
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans
from gradlens.samples.planner import EMPTY, plan_of


class Curvature(ABC):
    """The curvature matrices of a mean loss: that of a step's mini-batch, or of a ``Probe``.

    ``parameters`` are those that require a gradient. ``seed`` is that of random vectors, and
    differs from step to step. ``is_part`` says that the loss is that of a part of its step's batch,
    such as the last micro-batch. ``notes`` are messages to the user on how the curvature was found.
    Matrices, diagonals and traces raise ``UnavailableError`` where they can't be had.
    """

    def __init__(
        self,
        global_step: int,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None = None,
        is_part: bool = False,
    ) -> None:
        self.global_step = global_step
        self.seed = global_step
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.optimizer = optimizer
        self.is_part = is_part
        self.notes: list[str] = []
        self._diagonals: dict[tuple[DiagonalKind, int], LossDiagonal] = {}
        self._traces: dict[tuple[DiagonalKind, int, int | None], LossTraces] = {}

    @property
    @abstractmethod
    def hessian(self) -> CurvatureOperator:
        """The Hessian ``[D, D]``."""

    @property
    @abstractmethod
    def ggn(self) -> CurvatureOperator:
        """The generalised Gauss-Newton matrix ``[D, D]``."""

    @property
    @abstractmethod
    def batch(self) -> Batch:
        """The samples, with their number under a sum loss, which is divided by it."""

    @final
    def diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal by the first method that applies.

        Exact where one of them is, and estimated with ``samples`` draws otherwise;
        ``"diag_ggn_mc"`` is always an estimate. Each is found once for all quantities.
        """
        if (kind, samples) not in self._diagonals:
            self._diagonals[kind, samples] = self._find_diagonal(kind, samples)
        return self._diagonals[kind, samples]

    @final
    def traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The sums of the diagonal's blocks, without a diagonal where a method finds them so.

        That is so for ``"diag_ggn_mc"``, with ``samples`` draws, each for ``sub_batch`` samples of
        the batch (``None``: all). Otherwise they are sums of a diagonal with two draws at least.
        """
        key = (kind, samples, sub_batch)
        if key not in self._traces:
            self._traces[key] = self._find_traces(*key)
        return self._traces[key]

    @abstractmethod
    def directions(self, k: int) -> Directions:
        """The eigenvectors of the generalised Gauss-Newton matrix's k largest eigenvalues.

        Described by what the loss and its samples do along them.
        """

    @abstractmethod
    def _find_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal, which isn't known yet."""

    @abstractmethod
    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The traces, which aren't known yet."""

    @final
    @property
    def loss_factor(self) -> int:
        """The loss over the mean of ℓₙ: N under a sum loss, 1 under a mean loss.

        Raises ``ValueError`` as ``batch`` does.
        """
        return self.batch.samples or 1

    @final
    def note(self, text: str) -> None:
        """Append to the notes."""
        self.notes.append(text)


@final
class LossCurvature(Curvature):
    """The curvature matrices of the mean mini-batch loss, as long as its graph is alive.

    Each is built when it is first needed, by ``torch.autograd.grad``, which leaves the parameters'
    gradients as they are. ``outputs`` is what the user has passed as such, and ``returned`` the
    tensors that the model has returned; ``find_outputs`` goes before both. ``batch`` is given where
    it is known without the graph. ``plans`` hold from step to step which rows belong to which
    sample.
    """

    def __init__(
        self,
        global_step: int,
        loss: Tensor,
        parameters: Mapping[str, nn.Parameter],
        *,
        model: nn.Module | None = None,
        outputs: Any = None,
        returned: Sequence[Tensor] = (),
        optimizer: Optimizer | None = None,
        loss_reduction: LossReduction = "mean",
        batch_size: int | None = None,
        find_outputs: Callable[[], NetworkOutputs] | None = None,
        batch: Batch | None = None,
        plans: Plans | None = None,
        is_part: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(global_step, parameters, optimizer, is_part)
        self.seed = global_step if seed is None else seed
        self.loss = loss
        self._model = model
        self._outputs = outputs
        self._returned = returned
        self._loss_reduction = loss_reduction
        self._batch_size = batch_size
        self._find_outputs = find_outputs
        self._batch = batch
        self._plans = Plans() if plans is None else plans

    @cached_property
    def hessian(self) -> HessianOperator:
        """The Hessian; ``UnavailableError`` if the loss can't be differentiated twice."""
        self._check_batch()
        return HessianOperator(self.loss, self.parameters, 1 / self.loss_factor)

    @cached_property
    def ggn(self) -> GGNOperator:
        """The generalised Gauss-Newton matrix.

        At the outputs that the user has passed, or otherwise at the input of the extended loss
        module, or at what the model has returned; ``UnavailableError`` where there isn't one tensor
        of them.
        """
        self._check_batch()
        found = self._network_outputs()
        operator = GGNOperator(self.loss, found.tensor, self.parameters, 1 / self.loss_factor)
        if found.origin == "the model's output" and operator.is_zero(self.seed):
            raise UnavailableError(LINEAR_IN_RETURNED.format(remedy=found.remedy))
        bypass = note_on_bypass(self.loss, found, self.parameters)
        if bypass:
            self.note(bypass)
        return operator

    def _check_batch(self) -> None:
        """``UnavailableError`` if the batch is empty, whose loss is NaN or, of a sum, zero."""
        check_loss(self.loss)
        loss = float(self.loss.detach())
        if loss and not math.isnan(loss):
            return
        try:
            outputs = self._network_outputs().tensor
        except UnavailableError:
            return  # without outputs, it isn't known
        if not outputs.numel():
            raise UnavailableError(EMPTY)

    def _network_outputs(self) -> NetworkOutputs:
        if self._find_outputs is not None:
            return self._find_outputs()
        if self._outputs is not None:
            return passed_outputs(self._outputs)
        calls = calls_of_losses(self.loss, self._model)
        # NLLLoss is linear in its input, with which the matrix would be zero.
        if calls and not any(isinstance(module, nn.NLLLoss) for module, _ in calls):
            return outputs_of_calls(calls)
        return returned_outputs(self.loss, self._returned, self.parameters)

    @cached_property
    def batch(self) -> Batch:
        """The batch, with its number of samples under a sum loss, which is divided by it.

        Raises ``UnavailableError`` if that number isn't known, or the loss has no graph.
        """
        if self._batch is not None:
            return self._batch
        if self._loss_reduction == "mean":
            return Batch()
        check_loss(self.loss)
        graph = Graph(self.loss)
        calls = calls_of_model(graph, self._model)
        evidence = evidence_of(graph, self._model, calls, {"batch_size": self._batch_size})
        # Samples are found as for per-sample gradients, so that both are of the same batch.
        plan = plan_of(graph, self.parameters, evidence, calls)
        if plan.samples is None:
            raise UnavailableError(
                f"the curvature of a sum loss is divided by the number of samples: {plan.known_by}"
            )
        return Batch(plan.samples, plan.known_by, "sum")

    def directions(self, k: int) -> Directions:
        return LowRankGGN(self.ggn, self._model, self._plans, self.seed).directions(k)

    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        if kind == "diag_ggn_mc":
            with suppress(UnavailableError):
                return sampled_traces(
                    self.ggn, samples, sub_batch, self.seed, self._model, self._plans
                )
            with suppress(UnavailableError):
                return coupled_traces(self.ggn, samples, self.seed)
        return self.diagonal(kind, max(samples, 2))

    def _find_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        try:
            return self._preferred_diagonal(kind, samples)
        except UnavailableError as reason:
            better = str(reason)
        # Hutchinson's method takes nothing but products, so its reason is the matrix's own.
        found = by_hutchinson(self.hessian if kind == "diag_h" else self.ggn, samples, self.seed)
        self.note(f"{kind} is estimated, by Hutchinson's method with {samples} products: {better}")
        return found

    def _preferred_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal by a method that is exact, or takes less than Hutchinson's."""
        if kind == "diag_h":
            outputs = self._network_outputs()
            check_piecewise_linear(outputs.tensor)
            bypass = note_on_bypass(self.loss, outputs, self.parameters)
            if bypass:
                raise UnavailableError(bypass)
        jacobians = SamplesJacobians(self.ggn, self._model, self._plans)
        if kind == "diag_ggn_mc":
            return by_draws(jacobians, samples, self.seed)
        return by_roots(jacobians, self.seed)
