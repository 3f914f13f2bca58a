"""The interface of structured per-sample gradients.

Throughout, a parameter of shape ``P`` is taken as a matrix of R rows (its first axis) and K columns
(all other axes together); scalars and vectors have K = 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gradlens.numerics.histograms import (
    Counts,
    Grid,
    JointTally,
    Range,
    comparable,
    counts_of_1d,
    counts_of_2d,
    grid_of,
    tally_1d,
)
from gradlens.numerics.norms import dots, products_of_pairs, squared_row_norms

PIECE_BYTES = 16 * 2**20
"""Default bound of the temporary memory of one piece."""


@dataclass(frozen=True)
class Piece:
    """Some rows of some samples' per-sample gradients.

    ``values`` has shape ``[len(samples), len(rows), *P[1:]]``, for a scalar parameter
    ``[len(samples)]``; ``samples`` and ``rows`` index the batch and the parameter's first axis.
    """

    samples: slice
    rows: slice
    values: Tensor


@dataclass(frozen=True)
class AlongMean:
    """⟨gₙ, ḡ⟩ of every sample ``[N]``, and ‖ḡ‖²."""

    dots: Tensor
    squared_norm: Tensor


class GradientOperator(ABC):
    """Per-sample gradients gₙ ``[N, *P]`` of one parameter, without building them.

    gₙ is N times sample n's contribution to a mean loss, or that contribution itself under a sum
    loss; ``scale`` is this factor, so callers get no other scaling. All results are of
    the operator's ``dtype``: that of the factors, except that half precisions accumulate in
    float32.

    A subclass defines ``_block``. Everything else follows from it piece by piece; a subclass may
    override the other private methods where its structure allows something cheaper. They compute
    with unscaled gradients as ``[N, R, K]``. With ``makes_blocks``, results of ``_block`` are new
    tensors each time, and are scaled in place.
    """

    makes_blocks: ClassVar[bool] = False

    def __init__(
        self,
        batch_size: int,
        shape: torch.Size | tuple[int, ...],
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.batch_size = batch_size
        self.shape = torch.Size(shape)
        self.scale = scale
        self.dtype = dtype
        self.device = device
        self._held: tuple[Tensor | None, ...] = ()
        self._rows = self.shape[0] if self.shape else 1
        self._columns = math.prod(self.shape[1:])

    def __repr__(self) -> str:
        shape = [self.batch_size, *self.shape]
        return f"{type(self).__name__}({shape}, dtype={self.dtype}, device='{self.device}')"

    @final
    def hold(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Keep references to tensors, so that the ones that the operator is made of don't change.

        Autograd makes a gradient without other references the parameter's own ``grad``, which the
        user may change.
        """
        self._held = tensors

    @final
    def squared_norms(self) -> Tensor:
        """‖gₙ‖² of every sample, ``[N]``."""
        with torch.no_grad():
            return self._squared_norms() * self.scale**2

    @final
    def gram(self) -> Tensor:
        """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``."""
        with torch.no_grad():
            return self._gram() * self.scale**2

    @final
    def dot(self, direction: Tensor) -> Tensor:
        """⟨gₙ, direction⟩ of every sample, ``[N]``; ``direction`` has shape ``[*P]``."""
        if direction.shape != self.shape:
            raise ValueError(
                f"the direction has shape {list(direction.shape)}, the parameter has "
                f"{list(self.shape)}: pass one number per parameter element"
            )
        with torch.no_grad():
            matrix = direction.detach().to(self.dtype).reshape(self._rows, self._columns)
            return self._dot(matrix) * self.scale

    @final
    def sum(self) -> Tensor:
        """Σₙ gₙ, ``[*P]``."""
        return self._sum_times(self.scale)

    @final
    def mean(self) -> Tensor:
        """ḡ = (1/N)·Σₙ gₙ, ``[*P]``."""
        return self._sum_times(self.scale / self.batch_size if self.batch_size else math.nan)

    @final
    def along_mean(self) -> AlongMean | None:
        """Per-sample gradients along their mean; ``None`` where that takes the mean itself."""
        with torch.no_grad():
            dots = self._dots_with_sum()
        if dots is None or not self.batch_size:
            return None
        dots = dots * self.scale**2 / self.batch_size
        return AlongMean(dots.to(self.dtype), dots.mean().to(self.dtype))

    @final
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σₙ wₙ gₙ with weights ``[N]``, ``[*P]``."""
        with torch.no_grad():
            total = self._weighted_sum(weights.to(self.device, self.dtype))
            return (total * self.scale).reshape(self.shape)

    @final
    def sum_of_squares(self) -> Tensor:
        """Σₙ gₙ² for each element, ``[*P]``."""
        with torch.no_grad():
            return (self._sum_of_squares() * self.scale**2).reshape(self.shape)

    @final
    def pieces(self, max_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
        """All elements of all gₙ, each once, in pieces of at most ``max_bytes`` of memory.

        One row of one sample is the smallest piece, however small ``max_bytes`` is.
        """
        for samples, rows in self._partition(max_bytes):
            with torch.no_grad():
                values = self._block(samples, rows) * self.scale
            kept = (rows.stop - rows.start, *self.shape[1:]) if self.shape else ()
            yield Piece(samples, rows, values.reshape(len(values), *kept))

    @final
    def dense(self) -> Tensor:
        """gₙ themselves, ``[N, *P]``: N times the parameter's memory."""
        dense = torch.empty(
            self.batch_size, self._rows, self._columns, dtype=self.dtype, device=self.device
        )
        with torch.no_grad():
            for samples, rows in self._partition(PIECE_BYTES):
                torch.mul(self._block(samples, rows), self.scale, out=dense[samples, rows])
            return dense.reshape(self.batch_size, *self.shape)

    @final
    def abs_max(self) -> Tensor:
        """The largest absolute value of any element of any gₙ, a scalar; NaN if there is one."""
        with torch.no_grad():
            return self._abs_max()

    @final
    def histogram_1d(self, bins: int, range_: Range, max_bytes: int = PIECE_BYTES) -> Counts:
        """Counts of the elements of all gₙ in equal bins.

        Elements are computed in pieces of at most ``max_bytes`` of memory.
        """
        grid = grid_of(bins, range_, self.dtype, self.device)
        with torch.no_grad():
            return counts_of_1d(self._tally_1d(grid, max_bytes))

    @final
    def histogram_2d(
        self,
        companions: Tensor,
        bins: tuple[int, int],
        range_: tuple[Range, Range],
        max_bytes: int = PIECE_BYTES,
    ) -> Counts:
        """Joint counts of the elements of all gₙ and of their ``companions`` ``[*P]``."""
        companions = comparable(companions.detach()).reshape(self._rows, self._columns)
        grid = grid_of(bins[0], range_[0], self.dtype, self.device)
        second = grid_of(bins[1], range_[1], companions.dtype, self.device)
        with torch.no_grad():
            cells = second.compact_cells(companions)
            return counts_of_2d(self._tally_2d(grid, cells, second.size, max_bytes))

    # Defined, or overridden, by subclasses.

    @abstractmethod
    def _block(self, samples: slice, rows: slice) -> Tensor:
        """Some samples' gradients with respect to some rows, ``[n, r, K]``."""

    @property
    def elementwise(self) -> bool:
        """Whether results take all elements, so that storing them pays for more than one."""
        return True

    def _workspace(self) -> int:
        """Elements of temporary memory that ``_block`` needs for each sample beyond its result."""
        return 0

    def _squared_norms(self) -> Tensor:
        squared_norms = torch.zeros(self.batch_size, dtype=self.dtype, device=self.device)
        for samples, rows in self._partition(PIECE_BYTES):
            squared_norms[samples] += squared_row_norms(self._block(samples, rows).flatten(1))
        return squared_norms

    def _gram(self) -> Tensor:
        gram = torch.zeros(self.batch_size, self.batch_size, dtype=self.dtype, device=self.device)
        everyone = slice(0, self.batch_size)
        bytes_per_row = self.batch_size * self._columns * self.dtype.itemsize
        for rows in slices(self._rows, PIECE_BYTES // max(bytes_per_row, 1)):
            gram += products_of_pairs(self._rows_of(everyone, rows).flatten(1))
        return gram

    def _dot(self, matrix: Tensor) -> Tensor:
        dot = torch.zeros(self.batch_size, dtype=self.dtype, device=self.device)
        for samples, rows in self._partition(PIECE_BYTES):
            dot[samples] += dots(self._block(samples, rows).flatten(1), matrix[rows].flatten())
        return dot

    def _sum(self) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for samples, rows in self._partition(PIECE_BYTES):
            total[rows] += self._block(samples, rows).sum(0)
        return total

    def _dots_with_sum(self) -> Tensor | None:
        """⟨gₙ, Σₘgₘ⟩ in float64, ``[N]``, where that is cheaper than the sum itself."""
        return None

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for samples, rows in self._partition(PIECE_BYTES):
            total[rows] += torch.tensordot(weights[samples], self._block(samples, rows), 1)
        return total

    def _sum_of_squares(self) -> Tensor:
        total = torch.zeros(self._rows, self._columns, dtype=self.dtype, device=self.device)
        for samples, rows in self._partition(PIECE_BYTES):
            total[rows] += self._block(samples, rows).square().sum(0)
        return total

    def _abs_max(self) -> Tensor:
        largest = [torch.zeros((), dtype=self.dtype, device=self.device)]
        for samples, rows in self._partition(PIECE_BYTES):
            block = self._scaled_block(samples, rows)
            if block.numel():
                largest.append(block.abs().amax())
        return torch.stack(largest).amax()

    def _tally_1d(self, grid: Grid, max_bytes: int) -> Tensor:
        """Counts by ``grid``'s cells."""
        table = torch.zeros(grid.size, dtype=torch.int64, device=self.device)
        for samples, rows in self._partition(max_bytes):
            block = self._scaled_block(samples, rows)
            # A vector's elements are in one row rather than in one each.
            values = block.mT if self._columns == 1 else block
            table += tally_1d(values.flatten(0, 1), grid)
        return table

    def _tally_2d(self, grid: Grid, companions: Tensor, size: int, max_bytes: int) -> Tensor:
        """Joint counts by ``grid``'s cells and ``companions`` ``[R, K]``, cells below ``size``."""
        tally = JointTally(companions, grid, size)
        for samples, rows in self._partition(max_bytes):
            tally.add(self._scaled_block(samples, rows), rows)
        return tally.table()

    # Shared by the above.

    @final
    def _scaled_block(self, samples: slice, rows: slice) -> Tensor:
        """As ``_block``, scaled; not to be written to."""
        block = self._block(samples, rows)
        if self.scale == 1.0:
            return block
        return block.mul_(self.scale) if self.makes_blocks else block * self.scale

    @final
    def _sum_times(self, factor: float) -> Tensor:
        with torch.no_grad():
            total = self._sum()
            # Often 1, and one pass over memory takes as long as a part of the product.
            return (total if factor == 1.0 else total * factor).reshape(self.shape)

    @final
    def _rows_of(self, samples: slice, rows: slice) -> Tensor:
        """As ``_block``, with the workspace bounded."""
        per_sample = max(self._workspace() * self.dtype.itemsize, 1)
        parts = slices(samples.stop - samples.start, PIECE_BYTES // per_sample) or [slice(0, 0)]
        shifted = [slice(samples.start + p.start, samples.start + p.stop) for p in parts]
        blocks = [self._block(part, rows) for part in shifted]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @final
    def _partition(self, max_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Slices of samples and rows whose blocks fit into ``max_bytes``."""
        size = self.dtype.itemsize
        row_bytes = max(self._columns * size, 1)
        workspace = self._workspace() * size
        sample_bytes = max(self._rows * row_bytes + workspace, 1)
        if sample_bytes <= max_bytes:
            yield from (
                (samples, slice(0, self._rows))
                for samples in slices(self.batch_size, max_bytes // sample_bytes)
            )
            return
        # A workspace that alone is too large would be needed again for each slice of rows.
        rows_at_once = max(max_bytes - workspace, max_bytes // 2) // row_bytes
        for sample in range(self.batch_size):
            for rows in slices(self._rows, rows_at_once):
                yield slice(sample, sample + 1), rows


def slices(length: int, step: int) -> list[slice]:
    """Consecutive slices that cover ``range(length)``, ``step`` (at least one) long each."""
    step = max(int(step), 1)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
