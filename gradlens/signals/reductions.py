"""Reductions of layers' signals, which are computed right in the hook that receives a tensor.

A reduction is a frozen description: equal ones of several quantities run once for each layer and
signal. Values stay on the device, and nothing here synchronises with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.norms import norm, row_norms
from gradlens.numerics.precision import double

Value = TypeVar("Value")

PIECE = 2**21
"""Elements that are converted to a higher precision at once."""


class SignalReduction(ABC, Generic[Value]):
    """Turns a tensor into something small; subclasses are frozen dataclasses.

    Values are tensors, or dataclasses of these. ``small`` values are moved to the host, in
    float64, before they are merged. ``by_sample`` says that the value depends on which axis counts
    the samples, and which one positions.
    """

    small: ClassVar[bool] = True
    by_sample: ClassVar[bool] = False

    @abstractmethod
    def reduce(self, samples: Tensor) -> Value:
        """The value for one call of a layer, from ``[N, S, F]``: samples, positions, features."""

    @abstractmethod
    def merge(self, values: Sequence[Value]) -> Value | Undefined:
        """One value for all calls of a layer in a step."""


@dataclass(frozen=True)
class Norms:
    """Sizes of a tensor with ``count`` samples and ``elements`` numbers.

    ``norm`` is ‖x‖₂ of the whole, ``sample_norms`` Σₙ‖xₙ‖₂, and ``sample_rms`` Σₙ‖xₙ‖₂/√numel(xₙ).
    """

    norm: Tensor
    sample_norms: Tensor
    sample_rms: Tensor
    count: int
    elements: int


@dataclass(frozen=True)
class Size(SignalReduction[Norms]):
    """Norms of the whole tensor and of each sample."""

    by_sample: ClassVar[bool] = True

    def reduce(self, samples: Tensor) -> Norms:
        flat = samples.flatten(1)
        norms = row_norms(flat)
        total = double(norms).sum()
        return Norms(
            norm(double(norms)),
            total,
            total / max(flat.shape[1], 1) ** 0.5,
            flat.shape[0],
            flat.numel(),
        )

    def merge(self, values: Sequence[Norms]) -> Norms:
        return Norms(
            norm(torch.stack([value.norm for value in values])),
            torch.stack([value.sample_norms for value in values]).sum(),
            torch.stack([value.sample_rms for value in values]).sum(),
            sum(value.count for value in values),
            sum(value.elements for value in values),
        )


@dataclass(frozen=True)
class FeatureCounts:
    """``active`` ``[F]``: at how many of ``count`` samples and positions each feature is active."""

    active: Tensor
    count: int


@dataclass(frozen=True)
class Active(SignalReduction[FeatureCounts]):
    """How often each feature's absolute value is above ``threshold``; NaN if a value is NaN."""

    threshold: float = 1e-8

    def reduce(self, samples: Tensor) -> FeatureCounts:
        active = torch.count_nonzero(samples.abs() > self.threshold, dim=(0, 1)).double()
        active = active.masked_fill(samples.isnan().any(0).any(0), torch.nan)
        return FeatureCounts(active, samples.shape[0] * samples.shape[1])

    def merge(self, values: Sequence[FeatureCounts]) -> FeatureCounts | Undefined:
        if not _alike([value.active for value in values]):
            return Undefined(DIFFERENT_FEATURES)
        active = torch.stack([value.active for value in values]).sum(0)
        return FeatureCounts(active, sum(value.count for value in values))


@dataclass(frozen=True)
class Maxima(SignalReduction[Tensor]):
    """The largest value of each feature, ``[F]``."""

    def reduce(self, samples: Tensor) -> Tensor:
        if not samples.shape[0] * samples.shape[1]:
            return samples.new_full(samples.shape[-1:], -torch.inf)
        return samples.amax((0, 1))

    def merge(self, values: Sequence[Tensor]) -> Tensor | Undefined:
        return (
            torch.stack(list(values)).amax(0) if _alike(values) else Undefined(DIFFERENT_FEATURES)
        )


@dataclass(frozen=True)
class FeatureMoments:
    """``mean`` and population ``variance`` of each feature, ``[F]``, over ``count`` positions."""

    mean: Tensor
    variance: Tensor
    count: int


@dataclass(frozen=True)
class Moments(SignalReduction[FeatureMoments]):
    """Mean and variance of each feature over samples and positions."""

    def reduce(self, samples: Tensor) -> FeatureMoments:
        if not samples.numel():
            none = double(samples.new_zeros(samples.shape[-1]))
            return FeatureMoments(none, none, 0)
        at_once = max(1, PIECE // samples[0].numel())
        pieces = [_moments(double(piece)) for piece in samples.split(at_once)]
        return pieces[0] if len(pieces) == 1 else _joined(pieces)

    def merge(self, values: Sequence[FeatureMoments]) -> FeatureMoments | Undefined:
        alike = _alike([value.mean for value in values])
        return _joined(values) if alike else Undefined(DIFFERENT_FEATURES)


def _moments(samples: Tensor) -> FeatureMoments:
    variance, mean = torch.var_mean(samples, dim=(0, 1), correction=0)
    return FeatureMoments(mean, variance, samples.shape[0] * samples.shape[1])


def _joined(values: Sequence[FeatureMoments]) -> FeatureMoments:
    """Within the parts and between them (Chan et al., 1979)."""
    values = [value for value in values if value.count] or values[:1]
    count = sum(value.count for value in values)
    shares = [value.count / count if count else 1.0 for value in values]
    mean = torch.stack([s * v.mean for s, v in zip(shares, values, strict=True)]).sum(0)
    parts = [
        s * (v.variance + (v.mean - mean).square()) for s, v in zip(shares, values, strict=True)
    ]
    return FeatureMoments(mean, torch.stack(parts).sum(0), count)


@dataclass(frozen=True)
class Products:
    """Products of x ``[M, F]``, with M = ``positions``, less a ``centre`` ``[F]``: z = x − c.

    ``matrix`` is the smaller one of zᵀz ``[F, F]`` and zzᵀ ``[M, M]``.
    """

    matrix: Tensor
    centre: Tensor
    positions: int
    features: int


@dataclass(frozen=True)
class Gram(SignalReduction[Products]):
    """The smaller of the two Gram matrices, of features or of samples and positions.

    In double precision, since the eigenvalues of its matrix are the squares of singular values.
    ``centred`` takes the mean of each feature away first, since products of numbers that are far
    from zero lose the digits of a covariance.
    """

    centred: bool = False

    def reduce(self, samples: Tensor) -> Products:
        rows = samples.flatten(0, -2)
        positions, features = rows.shape
        centre = double(rows.new_zeros(features))
        if self.centred and positions:
            centre = rows.sum(0, dtype=centre.dtype) / positions
        if positions < features:
            return Products(_product(rows.T, centre[:, None]), centre, positions, features)
        return Products(_product(rows, centre), centre, positions, features)

    def merge(self, values: Sequence[Products]) -> Products | Undefined:
        if len(values) == 1:
            return values[0]
        if len({value.features for value in values}) > 1:
            return Undefined(DIFFERENT_FEATURES)
        if any(value.positions < value.features for value in values):
            return Undefined(
                "the layer was called several times, with fewer samples and positions than it has "
                "features: use larger batches, or one call"
            )
        positions = sum(value.positions for value in values)
        weighted = [value.centre * value.positions for value in values]
        centre = torch.stack(weighted).sum(0) / max(positions, 1)
        matrix = torch.stack([value.matrix for value in values]).sum(0)
        for value in values:
            apart = value.centre - centre
            matrix += torch.outer(apart, apart) * value.positions
        return Products(matrix, centre, positions, values[0].features)


def _product(rows: Tensor, centre: Tensor) -> Tensor:
    """zᵀz of z = x − c, ``[R, C]``, converted piece by piece; c is ``[C]`` or ``[R, 1]``."""
    total = centre.new_zeros(rows.shape[1], rows.shape[1])
    at_once = max(1, PIECE // max(rows.shape[1], 1))
    centres = centre.expand(rows.shape).split(at_once)
    for piece, some in zip(rows.split(at_once), centres, strict=True):
        part = double(piece) - some
        total.addmm_(part.T, part)
    return total


@dataclass(frozen=True)
class Copies(SignalReduction[Tensor]):
    """The tensor itself, flat: the one reduction whose value isn't small.

    For quantities that compare a step with the previous one.
    """

    small: ClassVar[bool] = False

    def reduce(self, samples: Tensor) -> Tensor:
        return samples.detach().clone().reshape(-1)

    def merge(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values))


DIFFERENT_FEATURES = (
    "the layer was called with different numbers of features: give each place of the network a "
    "layer of its own, such as its own ReLU"
)


def _alike(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1
