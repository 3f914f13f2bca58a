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

   import torch
   from torch import Tensor

   from gradlens.reductions import ParameterGradients, Reduction

   @dataclass(frozen=True)
   class ParameterDots(Reduction):
       "⟨gₙ, θ⟩ of every sample, [N]: the slope of ℓₙ along the parameters."

       def reduce(self, gradients: ParameterGradients) -> Tensor:
           return gradients.elements.dot(gradients.parameter)

A quantity with ``reductions = (ParameterDots(),)`` reads ``step.total(ParameterDots())``.
``gradients.elements`` is a :class:`~gradlens.operators.operator.GradientOperator`.

A batch may come in parts, from micro-batches or processes. How their values are joined is said by
the class that a reduction derives from:

- ``MergeableReduction``: each part is reduced in its own backward pass, and values of two parts are
  merged, so that neither memory nor work grows with the number of parts.
- ``ReductionAboutMean``: its values are merged, too, but need the mean gradient of the whole batch.
  They are computed when all parts are there, from the gradients of each process's own samples.
- ``Reduction`` itself: all samples are reduced together, such as those of a Gram matrix.

The last two need the per-sample gradients of all micro-batches, which are kept up to the cockpit's
``max_bytes``. ``ParameterDots`` can be merged, by two more lines:

.. testcode::

   from gradlens.reductions import MergeableReduction

   @dataclass(frozen=True)
   class MergeableDots(MergeableReduction):
       "⟨gₙ, θ⟩ of every sample, [N]."

       degree = 1

       def reduce(self, gradients: ParameterGradients) -> Tensor:
           return gradients.elements.dot(gradients.parameter)

       def merge(self, one, other, samples):
           return torch.cat([one, other])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradlens.numerics import deviations
from gradlens.numerics.histograms import Counts, Range
from gradlens.numerics.shards import any_distributed, is_distributed, whole
from gradlens.operators.dense import Buffer, is_to_be_stored, stored, stored_rows
from gradlens.operators.operator import GradientOperator

__all__ = ["AbsMax", "CentredGram", "Deviations", "DirectionDots"]
__all__ += ["ElementDeviations", "ElementRatios", "Gram", "Histogram1d", "Histogram2d", "Mean"]
__all__ += ["MergeableReduction", "ParameterGradients", "Reduction", "ReductionAboutMean", "Spread"]
__all__ += ["SquaredNorms", "SumOfSquares"]

STORED_BYTES = 64 * 2**20
"""Memory that one parameter's per-sample gradients may take while they are reduced: 16 million
elements in single precision, such as 128 samples of a parameter with 131,072 elements. Larger ones
are computed in pieces, again for each pass of a reduction."""


@dataclass(frozen=True)
class ParameterGradients:
    """One parameter with its per-sample gradients: the argument of a reduction.

    ``tensor`` is the parameter, or this process's part of it. ``shared`` is whether several passes
    of reductions use their elements. Where gradients are too large to be stored, they may be those
    of some ``rows`` of the parameter alone, as is ``tensor``. ``buffer`` is memory for stored
    elements, which are then valid until it is used again.
    """

    name: str
    tensor: Tensor
    individual: GradientOperator
    shared: bool = True
    rows: slice | None = None
    buffer: Buffer | None = None

    @cached_property
    def parameter(self) -> Tensor:
        """The parameter, for which the parts of all processes are put together."""
        return whole(self.tensor)

    @cached_property
    def elements(self) -> GradientOperator:
        """``individual``, with stored elements if they are ``shared`` and that saves work."""
        if self.shared and is_to_be_stored(self.individual, STORED_BYTES):
            return stored(self.individual, self.buffer)
        return self.individual

    @property
    def are_apart(self) -> bool:
        """Whether reductions that allow it are computed for some rows at a time."""
        large = self.individual.bytes_of_elements > STORED_BYTES
        worth = self.shared and large and self.individual.is_worth_storing
        return worth and not is_distributed(self.tensor)

    def apart(self) -> Iterator[ParameterGradients]:
        """Stored gradients of some rows at a time, which all reductions share."""
        for rows, individual in stored_rows(self.individual):
            yield ParameterGradients(self.name, self.tensor[rows], individual, False, rows)


class Reduction(ABC):
    """Computes something small from one parameter's per-sample gradients.

    Subclasses are frozen dataclasses. ``passes`` is the number of passes over all elements. If it
    is more than one for all reductions of a step together, the elements may be stored.
    ``reads_parameter`` is whether ``gradients.parameter`` is read. ``from_rows`` is whether the
    value for a parameter is the ``total`` of those for its rows: that of large gradients is then
    computed from some rows at a time.
    """

    passes: ClassVar[int] = 1
    reads_parameter: ClassVar[bool] = False
    from_rows: ClassVar[bool] = False

    @property
    def names(self) -> frozenset[str] | None:
        """The parameters that it is computed of, by name; ``None`` for all."""
        return None

    def is_of(self, name: str) -> bool:
        """Whether it is computed of a parameter."""
        return self.names is None or name in self.names

    @property
    def needs_gathering(self) -> bool:
        """Whether it has tensors of its own of which each process has a part alone."""
        return False

    def gathered(self, name: str) -> Reduction:
        """The reduction of one parameter with these tensors put together."""
        return self

    @abstractmethod
    def reduce(self, gradients: ParameterGradients) -> Any:
        """The value for one parameter; called in the backward pass."""

    def total(self, values: Sequence[Any]) -> Any:
        """The value for several parameters together; by default, the sum of their values."""
        return sum(values[1:], start=values[0])


def names_of(reductions: Iterable[Reduction]) -> frozenset[str] | None:
    """The parameters that reductions are computed of together; ``None`` for all."""
    names = [each.names for each in reductions]
    some = [each for each in names if each is not None]
    return frozenset[str]().union(*some) if names and len(some) == len(names) else None


class MergeableReduction(Reduction):
    """A reduction whose values for two parts of a batch give that for both together.

    ``degree`` is the power of a factor of all gradients that values are multiplied by: 1 for dots,
    2 for squared norms. It is ``None`` where the value of gradients times a factor doesn't follow
    from that of the gradients, as for histograms; where parts weigh their samples differently, such
    values are computed again from the gradients that are kept. Processes exchange values:
    tensors, plain values, lists and dicts of these, and objects of ``classes``.
    """

    degree: ClassVar[int | None] = None
    classes: ClassVar[tuple[type[Any], ...]] = ()

    @property
    def of_part(self) -> MergeableReduction:
        """The reduction whose values are merged, if this one's own can't be."""
        return self

    def of_whole(self, merged: Any, samples: int) -> Any:
        """This reduction's value for a whole batch, from the merged values of ``of_part``."""
        return merged

    @abstractmethod
    def merge(self, one: Any, other: Any, samples: tuple[int, int]) -> Any:
        """The value for the samples of both parts of so many ``samples``, in this order.

        It must be associative, since it isn't said which parts are merged first.
        """

    def scaled(self, value: Any, factor: float) -> Any:
        """The value for the same samples with gradients times a factor, if there is a ``degree``.

        Override it where the value is neither a number nor a tensor, or where a negative factor
        doesn't change its sign, as that of a norm.
        """
        assert self.degree is not None
        return value * factor**self.degree


class ReductionAboutMean(MergeableReduction):
    """A reduction that needs the mean gradient of the whole batch.

    ``reduce`` is for batches that don't come in parts.
    """

    @abstractmethod
    def reduce_about(self, gradients: ParameterGradients, mean: Tensor) -> Any:
        """The value for one parameter and a part of the batch with the ``mean`` ḡ ``[*P]``."""


class _Sums(MergeableReduction):
    """A reduction whose values are added up."""

    def merge(self, one: Any, other: Any, samples: tuple[int, int]) -> Any:
        return one + other


class _Squares(MergeableReduction):
    """A reduction of squared deviations, whose values can merge others and be scaled."""

    passes: ClassVar[int] = 2
    degree: ClassVar[int | None] = 2

    def merge(self, one: Any, other: Any, samples: tuple[int, int]) -> Any:
        return one.merge(other, samples)

    def scaled(self, value: Any, factor: float) -> Any:
        return value.times(factor)


class _PerSample(MergeableReduction):
    """A reduction whose values are ``[N]``, one for each sample."""

    def merge(self, one: Tensor, other: Tensor, samples: tuple[int, int]) -> Tensor:
        return torch.cat([one, other])

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(values)).sum(0)


@dataclass(frozen=True)
class SquaredNorms(_PerSample):
    """‖gₙ‖² of every sample, ``[N]``."""

    from_rows: ClassVar[bool] = True
    degree: ClassVar[int | None] = 2

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.squared_norms()


@dataclass(frozen=True)
class Mean(MergeableReduction):
    """ḡ, ``[*P]``; the total is flat, all parameters one after another.

    Not from ``p.grad``, which may contain more than the samples' gradients.
    """

    names: frozenset[str] | None = None
    degree: ClassVar[int | None] = 1

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.mean()

    def merge(self, one: Tensor, other: Tensor, samples: tuple[int, int]) -> Tensor:
        return deviations.merged_mean(one, other, samples)[0]

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class Deviations(ReductionAboutMean):
    """‖gₙ − ḡ‖² and ⟨gₙ − ḡ, ḡ⟩ of every sample, and ‖ḡ‖², as ``SampleDeviations``."""

    names: frozenset[str] | None = None
    from_rows: ClassVar[bool] = True
    passes: ClassVar[int] = 2
    classes = (deviations.SampleDeviations,)

    def reduce(self, gradients: ParameterGradients) -> deviations.SampleDeviations:
        return gradients.elements.deviations()

    def reduce_about(
        self, gradients: ParameterGradients, mean: Tensor
    ) -> deviations.SampleDeviations:
        return gradients.elements.deviations_about(mean)

    def merge(
        self,
        one: deviations.SampleDeviations,
        other: deviations.SampleDeviations,
        samples: tuple[int, int],
    ) -> deviations.SampleDeviations:
        return one.merge(other)

    def total(self, values: Sequence[deviations.SampleDeviations]) -> deviations.SampleDeviations:
        return deviations.of_all(values)


@dataclass(frozen=True)
class Spread(_Squares):
    """ḡ and Σₙ‖gₙ − ḡ‖², as ``deviations.Spread``."""

    names: frozenset[str] | None = None
    classes = (deviations.Spread,)

    def reduce(self, gradients: ParameterGradients) -> deviations.Spread:
        found = gradients.elements.deviations()
        squares = found.squared_norms.sum()
        return deviations.Spread(gradients.elements.mean(), squares, found.bounds)


@dataclass(frozen=True)
class ElementDeviations(_Squares):
    """ḡ and Σₙ(gₙ − ḡ)² for each element of one parameter, as ``deviations.ElementDeviations``."""

    classes = (deviations.ElementDeviations,)

    def reduce(self, gradients: ParameterGradients) -> deviations.ElementDeviations:
        return gradients.elements.element_deviations()


@dataclass(frozen=True)
class ElementRatios(MergeableReduction):
    """ḡⱼ²/(vⱼ + ε), summed over the elements j, as ``deviations.RatioSums``.

    With vⱼ = Σₙ(gₙⱼ − ḡⱼ)²/(N − ``ddof``). Only sums are kept, which take no memory, except for
    batches in parts: deviations of each element can be merged, and their ratios can't.
    """

    epsilon: float
    ddof: int = 0
    from_rows: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def reduce(self, gradients: ParameterGradients) -> deviations.RatioSums:
        elements = gradients.elements
        return self.of_whole(elements.element_deviations(), elements.batch_size)

    @property
    def of_part(self) -> MergeableReduction:
        return ElementDeviations()

    def of_whole(self, merged: deviations.ElementDeviations, samples: int) -> Any:
        # The quantities that use it refuse a batch of one.
        return deviations.element_ratios(merged, max(samples - self.ddof, 1), self.epsilon)

    def total(self, values: Sequence[deviations.RatioSums]) -> deviations.RatioSums:
        return deviations.sum_of_ratios(values)

    def merge(self, one: Any, other: Any, samples: tuple[int, int]) -> Any:
        raise NotImplementedError("the values of of_part are merged")


@dataclass(frozen=True, eq=False)
class DirectionDots(_PerSample):
    """⟨gₙ, d⟩ of every sample, ``[N]``, for the direction d of an update, by parameter name."""

    direction: Mapping[str, Tensor] = field(repr=False)
    from_rows: ClassVar[bool] = True
    degree: ClassVar[int | None] = 1

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        direction = self.direction[gradients.name]
        own = direction if gradients.rows is None else direction[gradients.rows]
        return gradients.elements.dot(own)

    @property
    def needs_gathering(self) -> bool:
        return any_distributed(self.direction.values())

    def gathered(self, name: str) -> DirectionDots:
        return DirectionDots({name: whole(self.direction[name])})


@dataclass(frozen=True)
class Gram(Reduction):
    """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``."""

    from_rows: ClassVar[bool] = True

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.gram()


@dataclass(frozen=True)
class CentredGram(Reduction):
    """⟨gₙ − ḡ, gₘ − ḡ⟩ of every pair of samples, ``[N, N]``."""

    from_rows: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.centred_gram()


@dataclass(frozen=True)
class SumOfSquares(_Sums):
    """Σₙ gₙ² for each element, ``[*P]``; the total is flat, all parameters one after another."""

    degree: ClassVar[int | None] = 2

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.sum_of_squares()

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.flatten() for value in values])


@dataclass(frozen=True)
class AbsMax(MergeableReduction):
    """The largest absolute value of any element of any gₙ, a scalar."""

    from_rows: ClassVar[bool] = True
    degree: ClassVar[int | None] = 1

    def reduce(self, gradients: ParameterGradients) -> Tensor:
        return gradients.elements.abs_max()

    def merge(self, one: Tensor, other: Tensor, samples: tuple[int, int]) -> Tensor:
        return torch.maximum(one, other)

    def scaled(self, value: Tensor, factor: float) -> Tensor:
        return value * abs(factor)

    def total(self, values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value.double() for value in values]).amax()


@dataclass(frozen=True)
class Histogram1d(_Sums):
    """Counts of the elements of all gₙ in ``bins`` equal bins over ``range``."""

    bins: int
    range: Range
    from_rows: ClassVar[bool] = True
    classes: ClassVar[tuple[type[Any], ...]] = (Counts,)

    def reduce(self, gradients: ParameterGradients) -> Counts:
        return gradients.elements.histogram_1d(self.bins, self.range)


@dataclass(frozen=True)
class Histogram2d(_Sums):
    """Joint counts of the elements of all gₙ (first axis) and of their parameters (second)."""

    bins: tuple[int, int]
    range: tuple[Range, Range]
    from_rows: ClassVar[bool] = True
    classes: ClassVar[tuple[type[Any], ...]] = (Counts,)
    reads_parameter: ClassVar[bool] = True

    def reduce(self, gradients: ParameterGradients) -> Counts:
        return gradients.elements.histogram_2d(gradients.parameter, self.bins, self.range)


def __dir__() -> list[str]:
    return list(__all__)
