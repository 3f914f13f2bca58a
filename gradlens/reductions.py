"""Reductions of per-sample gradients, computed during the backward pass.

A reduction computes something small from one parameter's per-sample gradients, such as their norms,
as soon as they are complete in the backward pass; they are freed afterwards. It is a frozen
dataclass whose fields are its settings. Reductions that are equal are computed once a step for each
parameter, however many quantities name them in their ``reductions``.

To write one, derive from ``Reduction`` and compute the value for one parameter in ``reduce``.
``total`` adds up the values of several parameters; override it if the value for all of them is not
the sum:

.. testcode::

   from dataclasses import dataclass

   from torch import Tensor

   from gradlens.reductions import ParameterGradients, Reduction

   @dataclass(frozen=True)
   class ParameterDots(Reduction):
       "⟨gₙ, θ⟩ of every sample, [N]: the slope of ℓₙ along the parameters."

       def reduce(self, gradients: ParameterGradients) -> Tensor:
           return gradients.elements.dot(gradients.parameter)

A quantity with ``reductions = (ParameterDots(),)`` reads ``step.total(ParameterDots())``.
``gradients.elements`` is a :class:`~gradlens.per_sample.operators.operator.GradientOperator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradlens.numerics import deviations
from gradlens.numerics.histograms import Counts, Range
from gradlens.numerics.shards import whole
from gradlens.per_sample.operators.operator import GradientOperator
from gradlens.per_sample.operators.stored import stored

__all__ = [
    "AbsMax",
    "CentredGram",
    "Deviations",
    "DirectionDots",
    "ElementDeviations",
    "Gram",
    "Histogram1d",
    "Histogram2d",
    "Mean",
    "ParameterGradients",
    "Reduction",
    "SquaredNorms",
    "SumOfSquares",
]

STORED_BYTES = 64 * 2**20
"""Memory that one parameter's per-sample gradients may take while they are reduced: 16 million
elements in single precision, such as 128 samples of a parameter with 131,072 elements. Larger ones
are computed in pieces, again for each pass of a reduction."""


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter with its per-sample gradients: the argument of a reduction.

    ``tensor`` is the parameter, or this process's shard of it. ``shared`` is whether several passes
    of reductions use their elements.
    """

    name: str
    tensor: Tensor
    individual: GradientOperator
    shared: bool = True

    @cached_property
    def parameter(self) -> Tensor:
        """The parameter; the shards of all processes are put together for it."""
        return whole(self.tensor)

    @cached_property
    def elements(self) -> GradientOperator:
        """``individual``, with stored elements if they are ``shared`` and that saves work."""
        return stored(self.individual, STORED_BYTES) if self.shared else self.individual


class Reduction(ABC):
    """Computes something small from one parameter's per-sample gradients.

    Subclasses are frozen dataclasses. ``passes`` is the number of passes over all elements. If it
    is more than one for all reductions of a step together, the elements may be stored.
    """

    passes: ClassVar[int] = 1

    @abstractmethod
    def reduce(self, gradients: ParameterGradients) -> Any:
        """The value for one parameter; called in the backward pass."""

    def total(self, values: Sequence[Any]) -> Any:
        """The value for several parameters together; by default, the sum of their values."""
        return sum(values[1:], start=values[0])


@dataclass(frozen=True)
class SquaredNorms(Reduction):
    """‖gₙ‖² of every sample, ``[N]``."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.squared_norms()


@dataclass(frozen=True)
class Mean(Reduction):
    """ḡ, ``[*P]``; the total is flat, all parameters one after another.

    Not from ``p.grad``, which may contain more than the samples' gradients.
    """

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.mean()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class Deviations(Reduction):
    """‖gₙ − ḡ‖² and ⟨gₙ − ḡ, ḡ⟩ of every sample, and ‖ḡ‖², as ``SampleDeviations``."""

    passes: ClassVar[int] = 2

    def reduce(self, gradients: ParameterGradients) -> deviations.SampleDeviations:
        return gradients.elements.deviations()

    def total(self, values: Sequence[deviations.SampleDeviations]) -> deviations.SampleDeviations:
        first, *others = [value.cpu() for value in values]
        return sum(others, start=first)


@dataclass(frozen=True)
class ElementDeviations(Reduction):
    """ḡ and Σₙ(gₙ − ḡ)² for each element of one parameter, as ``deviations.ElementDeviations``."""

    passes: ClassVar[int] = 2

    def reduce(self, gradients: ParameterGradients) -> deviations.ElementDeviations:
        return gradients.elements.element_deviations()


@dataclass(frozen=True, eq=False)
class DirectionDots(Reduction):
    """⟨gₙ, d⟩ of every sample, ``[N]``, for the direction d of an update, by parameter name."""

    direction: Mapping[str, Tensor]

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.dot(whole(self.direction[gradients.name]))


@dataclass(frozen=True)
class Gram(Reduction):
    """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.gram()


@dataclass(frozen=True)
class CentredGram(Reduction):
    """⟨gₙ − ḡ, gₘ − ḡ⟩ of every pair of samples, ``[N, N]``."""

    passes: ClassVar[int] = 2

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.centred_gram()


@dataclass(frozen=True)
class SumOfSquares(Reduction):
    """Σₙ gₙ² for each element, ``[*P]``; the total is flat, all parameters one after another."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.sum_of_squares()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class AbsMax(Reduction):
    """The largest absolute value of any element of any gₙ, a scalar."""

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.abs_max()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value.double() for value in values]).amax()


@dataclass(frozen=True)
class Histogram1d(Reduction):
    """Counts of the elements of all gₙ in ``bins`` equal bins over ``range``."""

    bins: int
    range: Range

    def reduce(self, gradients: ParameterGradients) -> Counts:
        return gradients.elements.histogram_1d(self.bins, self.range)


@dataclass(frozen=True)
class Histogram2d(Reduction):
    """Joint counts of the elements of all gₙ (first axis) and of their parameters (second)."""

    bins: tuple[int, int]
    range: tuple[Range, Range]

    def reduce(self, gradients: ParameterGradients) -> Counts:
        return gradients.elements.histogram_2d(gradients.parameter, self.bins, self.range)
