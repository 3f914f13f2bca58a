"""What individual gradients are reduced to while backprop runs.

A reduction is a frozen description: equal ones run once for each parameter, whoever asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradlens.individual.operator import GradientOperator
from gradlens.norms import norm
from gradlens.statistics import Counts, histogram_1d, histogram_2d

HISTOGRAM_BYTES = 4 * 2**20
"""Memory of the pieces that are binned: small ones are still in the cache when they are."""


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter with its individual gradients; all that a reduction sees.

    ``gradient`` is what this backward pass alone has put into ``p.grad``, where that is known.
    """

    name: str
    parameter: Tensor
    individual: GradientOperator
    gradient: Tensor | None = None

    @cached_property
    def mean(self) -> Tensor:
        """ḡ, ``[*P]``; not read off ``p.grad``, which may hold more than the samples' gradients."""
        return self.individual.mean()


class Reduction(ABC):
    """Turns one parameter's individual gradients into something small.

    Subclasses are frozen dataclasses.
    """

    @abstractmethod
    def reduce(self, gradients: ParameterGradients) -> Any:
        """The value for one parameter; runs in the backward pass."""

    def total(self, values: Sequence[Any]) -> Any:
        """The value for all parameters together; their sum unless stated otherwise."""
        return sum(values[1:], start=values[0])


@dataclass(frozen=True)
class SquaredNorms(Reduction):
    """‖gₙ‖² of every sample, ``[N]``."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.individual.squared_norms()


@dataclass(frozen=True)
class Mean(Reduction):
    """ḡ, ``[*P]``; the total is flat, all parameters one after another."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.mean

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class MeanSquaredNorm(Reduction):
    """‖ḡ‖², a scalar."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return norm(gradients.mean).square()


@dataclass(frozen=True)
class MeanDots(Reduction):
    """⟨gₙ, ḡ⟩ of every sample, ``[N]``."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.individual.dot(gradients.mean)


@dataclass(frozen=True, eq=False)
class DirectionDots(Reduction):
    """⟨gₙ, d⟩ of every sample, ``[N]``, for one update's direction d."""

    direction: Mapping[str, Tensor]

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.individual.dot(self.direction[gradients.name])


@dataclass(frozen=True)
class Gram(Reduction):
    """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.individual.gram()


@dataclass(frozen=True)
class SumOfSquares(Reduction):
    """Σₙ gₙ² for each element, ``[*P]``; the total is flat, all parameters one after another."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.individual.sum_of_squares()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class AbsMax(Reduction):
    """The largest absolute value of any element of any gₙ, a scalar."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        pieces = gradients.individual.pieces()
        none = torch.zeros((), dtype=gradients.individual.dtype, device=gradients.individual.device)
        largest = [piece.values.abs_().amax() for piece in pieces if piece.values.numel()]
        return torch.stack([none, *largest]).amax()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value.double() for value in values]).amax()


@dataclass(frozen=True)
class Histogram1d(Reduction):
    """Counts of the elements of all gₙ in ``bins`` equal bins over ``range``."""

    bins: int
    range: tuple[float, float]

    def reduce(self, gradients: ParameterGradients) -> Counts:
        pieces = gradients.individual.pieces(HISTOGRAM_BYTES)
        counts = [histogram_1d(piece.values, self.bins, self.range) for piece in pieces]
        none = histogram_1d(gradients.parameter.new_empty(0), self.bins, self.range)
        return self.total([none, *counts])


@dataclass(frozen=True)
class Histogram2d(Reduction):
    """Joint counts of the elements of all gₙ (first axis) and of their parameters (second)."""

    bins: tuple[int, int]
    range: tuple[tuple[float, float], tuple[float, float]]

    def reduce(self, gradients: ParameterGradients) -> Counts:
        parameter = gradients.parameter.detach()
        parts = [
            histogram_2d(
                piece.values,
                parameter[piece.rows] if parameter.dim() else parameter,
                self.bins,
                self.range,
            )
            for piece in gradients.individual.pieces(HISTOGRAM_BYTES)
        ]
        none = histogram_2d(
            parameter.new_empty(0, 0), parameter.new_empty(0), self.bins, self.range
        )
        return self.total([none, *parts])
