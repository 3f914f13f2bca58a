"""Weights of linear layers: gₙ = Σₛ δₙₛ xₙₛᵀ."""

from __future__ import annotations

import torch
from torch import Tensor

from gradlens.individual.operator import (
    PIECE_BYTES,
    GradientOperator,
    accumulable,
    slices,
    squared_norm,
)


class OuterProduct(GradientOperator):
    """gₙ = δₙ xₙᵀ with output gradients δ ``[N, R]`` and inputs x ``[N, K]``.

    Norms and products need the factors alone (Goodfellow, 2015, arXiv:1510.01799).
    """

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float = 1.0) -> None:
        self._delta, self._inputs = _same_precision(delta, inputs)
        shape = (delta.shape[1], inputs.shape[1])
        super().__init__(len(delta), shape, scale, self._delta.dtype, delta.device)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._delta[samples, rows, None] * self._inputs[samples, None, :]

    def _squared_norms(self) -> Tensor:
        return squared_norm(self._delta) * squared_norm(self._inputs)

    def _gram(self) -> Tensor:
        return (self._delta @ self._delta.T) * (self._inputs @ self._inputs.T)

    def _dot(self, matrix: Tensor) -> Tensor:
        return torch.linalg.vecdot(self._delta @ matrix, self._inputs)

    def _sum(self) -> Tensor:
        return self._delta.T @ self._inputs

    def _sum_of_squares(self) -> Tensor:
        return self._delta.square().T @ self._inputs.square()


class SumOfOuterProducts(GradientOperator):
    """gₙ = Σₛ δₙₛ xₙₛᵀ with δ ``[N, S, R]`` and x ``[N, S, K]``, S positions in a sequence.

    Norms and the Gram matrix go through the positions' own Gram matrices where those are smaller
    than the gradients (Li et al., 2022, arXiv:2110.05679, section 4).
    """

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float = 1.0) -> None:
        self._delta, self._inputs = _same_precision(delta, inputs)
        self._positions = delta.shape[1]
        shape = (delta.shape[2], inputs.shape[2])
        super().__init__(len(delta), shape, scale, self._delta.dtype, delta.device)

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._delta[samples, :, rows].mT @ self._inputs[samples]

    def _squared_norms(self) -> Tensor:
        if self._positions * (self._rows + self._columns) >= self._rows * self._columns:
            return super()._squared_norms()
        bytes_per_sample = 2 * self._positions**2 * self.dtype.itemsize
        parts = [
            torch.einsum(
                "nst,nst->n",
                self._delta[part] @ self._delta[part].mT,
                self._inputs[part] @ self._inputs[part].mT,
            )
            for part in slices(self.batch_size, PIECE_BYTES // max(bytes_per_sample, 1))
        ]
        return torch.cat(parts)

    def _gram(self) -> Tensor:
        n, s = self.batch_size, self._positions
        through_positions = (n * s) ** 2 * (self._rows + self._columns)
        through_gradients = n * (s + n) * self._rows * self._columns
        if through_positions >= through_gradients:
            return super()._gram()
        delta, inputs = self._delta.flatten(0, 1), self._inputs.flatten(0, 1)
        bytes_per_sample = 2 * n * s**2 * self.dtype.itemsize
        rows = [
            ((delta[part] @ delta.T) * (inputs[part] @ inputs.T)).reshape(-1, s, n, s).sum((1, 3))
            for part in (
                slice(samples.start * s, samples.stop * s)
                for samples in slices(n, PIECE_BYTES // max(bytes_per_sample, 1))
            )
        ]
        return torch.cat(rows)

    def _dot(self, matrix: Tensor) -> Tensor:
        return torch.einsum("nsk,nsk->n", self._delta @ matrix, self._inputs)

    def _sum(self) -> Tensor:
        return self._delta.flatten(0, 1).T @ self._inputs.flatten(0, 1)


def _same_precision(delta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast an input can be wider than the output gradient."""
    delta, inputs = accumulable(delta), accumulable(inputs)
    dtype = torch.promote_types(delta.dtype, inputs.dtype)
    return delta.to(dtype), inputs.to(dtype)
