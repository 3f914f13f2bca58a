"""Weights of linear layers: gₙ = Σₛ δₙₛ xₙₛᵀ."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    ElementDeviations,
    SampleDeviations,
    by_products,
)
from gradlens.numerics.histograms import (
    CHUNK,
    Companions,
    Grid,
    add_signs,
    below_zero,
    tally,
)
from gradlens.numerics.norms import norm, scale_of, whole_range
from gradlens.numerics.tensors import SMALL, accumulable, double, widest
from gradlens.operators.operator import GradientOperator, centred, slices

MOST = 0.4
"""The share of elements in rows and columns with large ones from which on all are binned."""

PER_ELEMENT = 12
"""Products for each element of a gradient that take as long as a pass over the elements.

Measured on one core.
"""


class OfFactors(GradientOperator, ABC):
    """Gradients that are products of output gradients δ ``[N, ...]`` and inputs x ``[N, ...]``."""

    _delta: Tensor
    _inputs: Tensor

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._delta, self._inputs

    def _keep_only(self, samples: Tensor) -> None:
        self._delta, self._inputs = self._delta[samples], self._inputs[samples]


class OuterProducts(OfFactors):
    """gₙ = Σₛ δₙₛ xₙₛᵀ with output gradients δ ``[N, S, R]`` and inputs x ``[N, S, K]``.

    S are the positions in a sequence; a plain linear layer has one, and its factors are ``[N, R]``
    and ``[N, K]``. Norms and products go through the factors alone (Goodfellow, 2015,
    arXiv:1510.01799), for several positions through the positions' own Gram matrices, where those
    are smaller than the gradients (Li et al., 2022, arXiv:2110.05679, section 4).
    """

    makes_blocks = True
    few = CHUNK
    """Elements up to which a histogram of all is cheaper than one of large elements and signs."""

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float = 1.0, eps: float = 0.0) -> None:
        if delta.dim() == 3 and delta.shape[1] == 1:
            delta, inputs = delta[:, 0], inputs[:, 0]
        self._delta, self._inputs, own_eps = factors_of(delta, inputs, scale)
        self._positions = 1 if delta.dim() == 2 else delta.shape[1]
        shape = (delta.shape[-1], inputs.shape[-1])
        eps = max(eps, own_eps)
        super().__init__(len(delta), shape, self._delta.dtype, delta.device, eps)

    def positions(self) -> OuterProducts:
        """δₙₛ xₙₛᵀ of each position s, of which gₙ is the sum, as gradients ``[N·S, *P]``.

        Those of the first sample come first. S is that of the longest sample; the last positions of
        shorter ones are zero.
        """
        delta, inputs = self.factors()
        return OuterProducts(delta.flatten(0, 1), inputs.flatten(0, 1), eps=self.eps)

    def factors(self) -> tuple[Tensor, Tensor]:
        """δ and x with an axis of positions, ``[N, S, R]`` and ``[N, S, K]``."""
        if self._delta.dim() == 3:
            return self._delta, self._inputs
        return self._delta[:, None], self._inputs[:, None]

    @property
    def is_worth_storing(self) -> bool:
        # Results of few elements take fewer calls than those of the factors. A projection, a mean
        # and the elements themselves take a product for each position.
        few = self.batch_size * self._rows * self._columns <= SMALL
        factors = self._positions * (self._rows + self._columns)
        are_larger = self._positions > 1 and factors >= self._rows * self._columns
        return few or are_larger or self._positions >= PER_ELEMENT

    def _block(self, samples: slice, rows: slice) -> Tensor:
        if self._delta.dim() == 2:
            return self._delta[samples, rows, None] * self._inputs[samples, None]
        return self._delta[samples, :, rows].mT @ self._inputs[samples]

    def _write(self, to: Tensor) -> None:
        delta, inputs = self.factors()
        product = torch.mul if self._positions == 1 else torch.bmm
        product(delta.mT, inputs, out=to)

    def squared_norms(self) -> Tensor:
        if self._positions == 1:
            dtype = widest(self.device)
            norms = [
                torch.linalg.vector_norm(factor, dim=1, dtype=dtype)
                for factor in (self._delta, self._inputs)
            ]
            return norms[0].mul_(norms[1]).square_()
        if not self._has_cheap_norms:
            return super().squared_norms()
        return torch.cat(
            [
                squared_norms_by_positions(self._delta[part], self._inputs[part])
                for part in self._parts_by_positions()
            ]
        )

    def _gram(self, other: GradientOperator, max_bytes: int | None = None) -> Tensor:
        if isinstance(other, OuterProducts) and self._has_cheap_gram(other):
            return self._gram_by_positions(other)
        return super()._gram(other, max_bytes)

    def centred_gram(self) -> Tensor:
        return centred(self._own_gram) if self._has_cheap_gram(self) else super().centred_gram()

    @property
    def _own_gram(self) -> Tensor:
        """The Gram matrix by positions, kept until ``forget``; not to be written to."""
        if "gram" not in self._kept:
            self._kept["gram"] = self._gram_by_positions(self)
        return self._kept["gram"]

    @property
    def _doubles(self) -> tuple[Tensor, Tensor]:
        """δ ``[N·S, R]`` and x ``[N·S, K]`` in float64."""
        return double(self._delta).flatten(0, -2), double(self._inputs).flatten(0, -2)

    @property
    def _has_cheap_norms(self) -> bool:
        """Whether norms take fewer products through positions than through elements."""
        return self._are_cheaper(self._positions**2)

    @property
    def has_cheap_deviations(self) -> bool:
        """Whether deviations by the Gram matrix are cheaper than by the elements."""
        return self._are_cheaper(self.batch_size * self._positions**2)

    def _are_cheaper(self, pairs: int) -> bool:
        """Whether products of so many pairs of factors for a sample are cheaper than elements."""
        of_elements = (PER_ELEMENT + self._positions) * self._rows * self._columns
        return self.batch_size > 0 and 0 < pairs * (self._rows + self._columns) <= of_elements

    def _has_cheap_gram(self, other: OuterProducts) -> bool:
        """Whether inner products with another's take fewer products by positions than by elements.

        The other's may be the same.
        """
        own, others = (each.batch_size * each._positions for each in (self, other))
        through_positions = own * others * (self._rows + self._columns)
        built = own if other is self else own + others
        pairs = self.batch_size * other.batch_size
        return 0 < through_positions < (built + pairs) * self._rows * self._columns

    def _parts_by_positions(self) -> list[slice]:
        """Samples whose positions' Gram matrices fit into a piece."""
        bytes_per_sample = 2 * self._positions**2 * torch.float64.itemsize
        return slices(self.batch_size, self._piece_bytes // max(bytes_per_sample, 1))

    def _gram_by_positions(self, other: OuterProducts) -> Tensor:
        """⟨gₙ, gₘ⟩ with each of the other's gₘ in float64, ``[N, M]``.

        There, products of numbers in float32 are exact, and their sums cancel little.
        """
        s, (m, t) = self._positions, (other.batch_size, other._positions)
        delta, inputs = self._doubles
        deltas, others = delta, inputs
        if other is not self:
            deltas, others = (each.to(delta) for each in other._doubles)
        bytes_per_sample = 2 * s * m * t * delta.dtype.itemsize
        at_once = self._piece_bytes // max(bytes_per_sample, 1)
        sides = [(delta, inputs)]
        if at_once < self.batch_size:
            split = (each.split(max(at_once, 1) * s) for each in sides[0])
            sides = [*zip(*split, strict=True)]
        parts = []
        for one, two in sides:
            products = (one @ deltas.T) * (two @ others.T)
            parts.append(products if s == t == 1 else products.reshape(-1, s, m, t).sum((1, 3)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def deviations(self) -> SampleDeviations:
        if not self.has_cheap_deviations:
            return super().deviations()
        gram = self._own_gram
        with_mean = gram.mean(1)
        return by_products(gram.diagonal(), with_mean, with_mean.mean(), self._noise)

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        if not self._has_cheap_norms:
            return super()._deviations_about(centre)
        centre = double(centre)
        squared_norms, with_centre = [], []
        for part in self._parts_by_positions():
            delta, inputs = (double(each[part]) for each in self.factors())
            squared_norms.append(squared_norms_by_positions(delta, inputs))
            products = (delta @ centre).flatten(1)
            with_centre.append(torch.linalg.vecdot(products, inputs.flatten(1)))
        found = torch.cat(squared_norms), torch.cat(with_centre)
        return by_products(*found, norm(centre).square(), self._noise)

    def _dot(self, direction: Tensor) -> Tensor:
        size = scale_of(direction)
        delta = self._delta.flatten(0, -2) / size  # in place of the direction, which is larger
        products = (delta @ direction.to(self.dtype)).view(self.batch_size, -1)
        return double(torch.linalg.vecdot(products, self._inputs.flatten(1))) * size

    def sum(self) -> Tensor:
        return self._delta.flatten(0, -2).T @ self._inputs.flatten(0, -2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights.detach().to(self.device, self.dtype)
        delta, inputs = self.factors()
        delta = delta * weights[:, None, None]
        return delta.flatten(0, 1).T @ inputs.flatten(0, 1)

    def sum_of_squares(self) -> Tensor:
        if self._positions != 1:
            return super().sum_of_squares()
        delta, inputs = self._doubles
        return delta.square().T @ inputs.square()

    def element_deviations(self) -> ElementDeviations:
        if self._positions != 1:
            return super().element_deviations()
        delta, inputs = self._doubles
        squares = delta.square().T @ inputs.square()
        return self._element_deviations_by_sums(delta.T @ inputs, squares)

    def _tally(self, grid: Grid, beside: Companions | None, max_bytes: int) -> Tensor:
        far = self._far(grid)
        if far is None:
            return super()._tally(grid, beside, max_bytes)
        table, number = grid.zeros(self.device, beside), self.batch_size
        opposite: Any = 0
        if beside is None:
            sums = ([double(each.sum(1)) for each in pair] for pair in self._signs())
            opposite = sum(int(torch.dot(*pair)) for pair in sums)
            number *= self._rows * self._columns
        else:
            opposite = self._delta.new_zeros(self._rows, self._columns)
            for one, other in self._signs():
                if bool(other.any()):  # as not among the outputs of a ReLU
                    opposite.addmm_(one.T, other)
        add_signs(table, grid, beside, number, opposite)
        for each in self._products(far, max_bytes):
            near = None if beside is None else beside[each.rows[:, None], each.columns]
            table += tally(each.values[None], grid, near)
            number = each.values.numel() if near is None else 1
            add_signs(table, grid, near, number, below_zero(each.signs, near), times=-1)
        return table

    def _signs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Where δ and x have opposite signs, as numbers, whose sums and products are fast."""
        for one, other in ((torch.gt, torch.lt), (torch.lt, torch.gt)):
            delta, inputs = (torch.empty_like(factor) for factor in self._tensors)
            yield one(self._delta, 0, out=delta), other(self._inputs, 0, out=inputs)

    def _products(self, far: _Far, max_bytes: int) -> Iterator[_Products]:
        """All elements at some rows and columns, in parts that fit into a cache."""
        inputs = self._inputs.gather(1, far.columns)
        at_once = min(max_bytes // self.dtype.itemsize, CHUNK) // inputs.shape[1]
        for places in far.places.split(max(at_once, 1)):
            sample = places // self._rows
            delta = self._delta.flatten().index_select(0, places)[:, None]
            others, columns = (each.index_select(0, sample) for each in (inputs, far.columns))
            signs = delta.sign() * others.sign()
            yield _Products(delta * others, signs, places % self._rows, columns)

    def _far(self, grid: Grid) -> _Far | None:
        """Where elements of gradients may not be smaller than ``grid.centre``.

        Of the others, signs are enough, which follow from those of the factors. Where products
        underflow, they don't, so that these elements are among the first. ``None`` where binning
        all elements is cheaper, and on devices, which would have to be waited for.
        """
        elements = self.batch_size * self._rows * self._columns
        if self._positions != 1 or self.device.type != "cpu" or elements <= self.few:
            return None
        delta, inputs, limits = self._delta.abs(), self._inputs.abs(), torch.finfo(self.dtype)
        are_zero = torch.eq(inputs, 0, out=torch.empty_like(inputs))
        least = are_zero.mul_(limits.max).add_(inputs).amin(1, keepdim=True)
        # By numpy, which compares several times as fast. Not "at least", as a NaN isn't.
        vanishing = (delta.numpy() > 0) & ((delta * least).numpy() < limits.tiny)
        small = (delta * inputs.amax(1, keepdim=True)).numpy() < grid.centre
        places = np.flatnonzero(~small | vanishing)
        small = (inputs * delta.amax(1, keepdim=True)).numpy() < grid.centre
        columns = ~small | vanishing.any(1, keepdims=True)
        most = max(int(np.count_nonzero(columns, axis=1).max()), 1)
        if len(places) * most >= MOST * elements:
            return None
        chosen = torch.from_numpy(columns).byte().topk(most, dim=1, sorted=False).indices
        return _Far(torch.from_numpy(places), chosen)


@dataclass(frozen=True)
class _Far:
    """Rows of gradients, as places ``[n]`` in δ ``[N, R]``, and columns ``[N, k]`` by sample."""

    places: Tensor
    columns: Tensor


@dataclass(frozen=True)
class _Products:
    """Elements ``[n, k]`` at ``rows`` ``[n]`` and ``columns`` ``[n, k]``.

    ``signs`` are those of exact products: values may underflow.
    """

    values: Tensor
    signs: Tensor
    rows: Tensor
    columns: Tensor


def squared_norms_by_positions(delta: Tensor, inputs: Tensor) -> Tensor:
    """‖Σₛ δₙₛ xₙₛᵀ‖² from δ ``[N, S, R]`` and x ``[N, S, K]``, by their Gram matrices, ``[N]``."""
    pairs = (double(whole_range(lambda x: x @ x.mT, each)) for each in (delta, inputs))
    return torch.linalg.vecdot(*(products.flatten(1) for products in pairs))


def factors_of(delta: Tensor, inputs: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
    """Both factors in one precision, their product times ``scale``, and the larger rounding error.

    Under autocast an input can be wider than the output gradient.
    """
    eps = max(torch.finfo(delta.dtype).eps, torch.finfo(inputs.dtype).eps)
    tracked = delta.requires_grad or inputs.requires_grad
    if tracked or delta.dtype != inputs.dtype or delta.dtype.itemsize < 4:
        delta, inputs = accumulable(delta), accumulable(inputs)
        dtype = torch.promote_types(delta.dtype, inputs.dtype)
        delta, inputs = delta.to(dtype), inputs.to(dtype)
    if scale == 1.0:
        return delta, inputs, eps
    # The smaller one, which takes less memory.
    if inputs.numel() < delta.numel():
        return delta, inputs * scale, eps
    return delta * scale, inputs, eps
