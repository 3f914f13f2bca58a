"""Weights of embeddings: each sample touches a few rows only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    ElementDeviations,
    SampleDeviations,
    by_products,
)
from gradlens.numerics.histograms import Companions, Grid, number_of, tally
from gradlens.numerics.norms import norm, scale_of
from gradlens.numerics.tensors import accumulable, double
from gradlens.operators.operator import GradientOperator, centred, slices


class IndexedRows(GradientOperator):
    """gₙ has row ``indices[m]`` increased by ``delta[m]``, for every m that belongs to sample n.

    ``indices`` and ``owners`` are ``[M]``, ``delta`` is ``[M, K]`` and the weight ``[R, K]``. Rows
    that a sample touches more than once are added up at construction.
    """

    def __init__(
        self,
        indices: Tensor,
        delta: Tensor,
        owners: Tensor,
        batch_size: int,
        num_rows: int,
        scale: float = 1.0,
        eps: float | None = None,
    ) -> None:
        eps = torch.finfo(delta.dtype).eps if eps is None else eps
        delta = accumulable(delta)
        columns = delta.shape[1]
        super().__init__(batch_size, (num_rows, columns), delta.dtype, delta.device, eps)
        cells, inverse = torch.unique(owners * num_rows + indices, return_inverse=True)
        self._owner = cells // num_rows
        self._row = cells % num_rows
        values = delta.new_zeros(len(cells), columns)
        values.index_add_(0, inverse.flatten(), delta.reshape(-1, columns))
        self._values = values if scale == 1.0 else values.mul_(scale)

    @property
    def is_worth_storing(self) -> bool:
        return False

    def _block(self, samples: slice, rows: slice) -> Tensor:
        n, r = samples.stop - samples.start, rows.stop - rows.start
        block = self._values.new_zeros(n, r, self._columns)
        self._add_block(block, samples, rows)
        return block

    def _add_block(self, block: Tensor, samples: slice, rows: slice) -> None:
        inside = (
            (self._owner >= samples.start)
            & (self._owner < samples.stop)
            & (self._row >= rows.start)
            & (self._row < rows.stop)
        )
        owner, row = self._owner[inside] - samples.start, self._row[inside] - rows.start
        block[owner, row] += self._values[inside].to(block.dtype)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._owner, self._row, self._values

    def _keep_only(self, samples: Tensor) -> None:
        places = self._owner.new_full((self.batch_size,), -1)
        places[samples] = torch.arange(len(samples), device=samples.device)
        kept = places[self._owner] >= 0
        self._owner, self._row = places[self._owner[kept]], self._row[kept]
        self._values = self._values[kept]

    def squared_norms(self) -> Tensor:
        return self._per_sample(double(self._values).square().sum(1))

    def _dot(self, direction: Tensor) -> Tensor:
        touched = direction[self._row]
        size = scale_of(touched)
        rows = (touched / size).to(self.dtype)
        return double(self._per_sample(torch.linalg.vecdot(self._values, rows))) * size

    def _gram(self, other: GradientOperator, max_bytes: int | None = None) -> Tensor:
        if not isinstance(other, IndexedRows):
            return super()._gram(other, max_bytes)
        batches = [self] if other is self else [self, other]
        gram = self._double_zeros(self.batch_size, other.batch_size)
        touched = torch.unique(self._row)
        if other is not self:
            touched = touched[torch.isin(touched, other._row.to(touched))]
        gradients = sum(each.batch_size for each in batches)
        bytes_per_row = max(gradients * self._columns * gram.dtype.itemsize, 1)
        for rows in slices(len(touched), (max_bytes or self._piece_bytes) // bytes_per_row):
            blocks = [each._at(touched[rows].to(each.device)).to(gram) for each in batches]
            gram += blocks[0] @ blocks[-1].T
        return gram

    def _at(self, rows: Tensor) -> Tensor:
        """Gradients with respect to some rows, by their ascending numbers ``[r]``, ``[N, r·K]``."""
        place = torch.searchsorted(rows, self._row).clamp_(max=len(rows) - 1)
        inside = rows[place] == self._row
        block = self._double_zeros(self.batch_size, len(rows), self._columns)
        block[self._owner[inside], place[inside]] = double(self._values[inside])
        return block.flatten(1)

    def centred_gram(self) -> Tensor:
        return centred(self.gram())

    def deviations(self) -> SampleDeviations:
        touched, compact = torch.unique(self._row, return_inverse=True)
        values = double(self._values)
        total = values.new_zeros(len(touched), self._columns).index_add_(0, compact, values)
        with_total = self._per_sample(torch.linalg.vecdot(values, total[compact]))
        with_mean = with_total / self.batch_size
        return by_products(self.squared_norms(), with_mean, with_mean.mean(), self._noise)

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        with_rows = torch.linalg.vecdot(double(self._values), double(centre)[self._row])
        squared_centre = norm(double(centre)).square()
        return by_products(
            self.squared_norms(), self._per_sample(with_rows), squared_centre, self._noise
        )

    def element_deviations(self) -> ElementDeviations:
        total = self._per_row(double(self._values))
        return self._element_deviations_by_sums(total, self.sum_of_squares())

    def sum(self) -> Tensor:
        return self._per_row(self._values)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights.detach().to(self.device, self.dtype)
        return self._per_row(self._values * weights[self._owner][:, None])

    def sum_of_squares(self) -> Tensor:
        return self._per_row(double(self._values).square())

    def abs_max(self) -> Tensor:
        return torch.cat([self._values.flatten(), self._values.new_zeros(1)]).abs().amax()

    def _tally(self, grid: Grid, beside: Companions | None, max_bytes: int) -> Tensor:
        near = None if beside is None else beside[self._row]
        table = tally(self._values[None], grid, near)
        everywhere = self.batch_size * number_of(self._rows * self._columns, beside)
        table[grid.zero] += everywhere - number_of(self._values.numel(), near)
        return table

    def _per_sample(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.batch_size).index_add_(0, self._owner, values)

    def _per_row(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._rows, self._columns).index_add_(0, self._row, values)
