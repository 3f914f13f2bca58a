"""What a quantity is given: the curvature of a loss at the present parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import final

from torch import nn
from torch.optim import Optimizer

from gradlens.curvature.diagonals import DiagonalKind, LossDiagonal, LossTraces
from gradlens.curvature.directions import Directions
from gradlens.curvature.operator import CurvatureOperator
from gradlens.graph.loss import Batch


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
        ``"diag_ggn_mc"`` is always an estimate. Each is found once for all quantities. Where no
        method applies, its values are NaN, and its traces hold the reason.
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
