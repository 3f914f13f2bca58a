"""The curvature of a loss at the present parameters, shared by all quantities that need it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from gradlens.curvature.factors import SamplesJacobians
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
from gradlens.gradients.gradients import evidence_of
from gradlens.graph.graph import Graph
from gradlens.graph.loss import Batch, LossReduction
from gradlens.graph.model_calls import calls_behind as calls_of_model
from gradlens.numerics.unavailable import UnavailableError
from gradlens.samples.plan import Plans
from gradlens.samples.planner import EMPTY, plan_of


@dataclass(eq=False, kw_only=True)
class Curvature(ABC):
    """The curvature matrices of a mean loss: that of a step's mini-batch, or of a ``Probe``.

    ``parameters`` are those that require a gradient. ``is_part`` says that the loss is that of a
    part of its step's batch, such as the last micro-batch. ``notes`` are messages to the user on
    how the curvature was found. Matrices, diagonals and traces raise ``UnavailableError`` where
    they can't be had.
    """

    global_step: int
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer | None = None
    is_part: bool = False
    seed_after: int = 0
    notes: list[str] = field(default_factory=list, init=False)
    _found: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.parameters = {name: p for name, p in self.parameters.items() if p.requires_grad}

    @property
    def seed(self) -> int:
        """The seed of random vectors, which differs from step to step."""
        return self.global_step + self.seed_after

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
        key = (kind, samples)
        if key not in self._found:
            self._found[key] = self._find_diagonal(*key)
        found: LossDiagonal = self._found[key]
        return found

    @final
    def traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        """The sums of the diagonal's blocks, without a diagonal where a method finds them so.

        That is so for ``"diag_ggn_mc"``, with ``samples`` draws, each for ``sub_batch`` samples of
        the batch (``None``: all). Otherwise they are sums of a diagonal with two draws at least.
        """
        key = (kind, samples, sub_batch)
        if key not in self._found:
            self._found[key] = self._find_traces(*key)
        found: LossTraces = self._found[key]
        return found

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
@dataclass(eq=False, kw_only=True)
class LossCurvature(Curvature):
    """The curvature matrices of the mean mini-batch loss, as long as its graph is alive.

    Each is built when it is first needed, by ``torch.autograd.grad``, which leaves the parameters'
    gradients as they are. ``outputs`` is what the user has passed as such, and ``returned`` the
    tensors that the model has returned; ``find_outputs`` goes before both. ``known_batch`` is given
    where it is known without the graph. ``plans`` hold from step to step which rows belong to which
    sample.
    """

    loss: Tensor
    model: nn.Module | None = None
    outputs: Any = None
    returned: Sequence[Tensor] = ()
    loss_reduction: LossReduction = "mean"
    batch_size: int | None = None
    find_outputs: Callable[[], NetworkOutputs] | None = None
    known_batch: Batch | None = None
    plans: Plans = field(default_factory=Plans)

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
            self.notes.append(bypass)
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
        if self.find_outputs is not None:
            return self.find_outputs()
        if self.outputs is not None:
            return passed_outputs(self.outputs)
        calls = calls_of_losses(self.loss, self.model)
        # NLLLoss is linear in its input, with which the matrix would be zero.
        if calls and not any(isinstance(module, nn.NLLLoss) for module, _ in calls):
            return outputs_of_calls(calls)
        return returned_outputs(self.loss, self.returned, self.parameters)

    @cached_property
    def batch(self) -> Batch:
        """The batch, with its number of samples under a sum loss, which is divided by it.

        Raises ``UnavailableError`` if that number isn't known, or the loss has no graph.
        """
        if self.known_batch is not None:
            return self.known_batch
        if self.loss_reduction == "mean":
            return Batch()
        check_loss(self.loss)
        graph = Graph(self.loss)
        calls = calls_of_model(graph, self.model)
        evidence = evidence_of(graph, self.model, calls, {"batch_size": self.batch_size})
        # Samples are found as for per-sample gradients, so that both are of the same batch.
        plan = plan_of(graph, self.parameters, evidence, calls)
        if plan.samples is None:
            raise UnavailableError(
                f"the curvature of a sum loss is divided by the number of samples: {plan.known_by}"
            )
        return Batch(plan.samples, plan.known_by, "sum")

    def directions(self, k: int) -> Directions:
        return LowRankGGN(self.ggn, self.model, self.plans, self.seed).directions(k)

    def _find_traces(self, kind: DiagonalKind, samples: int, sub_batch: int | None) -> LossTraces:
        if kind == "diag_ggn_mc":
            with suppress(UnavailableError):
                return sampled_traces(
                    self.ggn, samples, sub_batch, self.seed, self.model, self.plans
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
        self.notes.append(
            f"{kind} is estimated, by Hutchinson's method with {samples} products: {better}"
        )
        return found

    def _preferred_diagonal(self, kind: DiagonalKind, samples: int) -> LossDiagonal:
        """The diagonal by a method that is exact, or takes less than Hutchinson's."""
        if kind == "diag_h":
            outputs = self._network_outputs()
            check_piecewise_linear(outputs.tensor)
            bypass = note_on_bypass(self.loss, outputs, self.parameters)
            if bypass:
                raise UnavailableError(bypass)
        jacobians = SamplesJacobians(self.ggn, self.model, self.plans)
        if kind == "diag_ggn_mc":
            return by_draws(jacobians, samples, self.seed)
        return by_roots(jacobians, self.seed)
