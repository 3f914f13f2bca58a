"""Histograms with equal bins, exact in every precision.

Bin k holds the values from its left edge to before its right one, the last bin also its right
edge. Values are compared with the edges as real numbers: no rounding can move one across an edge.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Range = tuple[float, float]

CHUNK = 2**19
"""Elements that are binned at once: 2 MiB in float32, which stays in a processor's cache."""


@dataclass(frozen=True)
class Counts:
    """How many values are in each cell of a ``Grid``, or of two; int64 ``[size]`` or ``[a, b]``."""

    cells: Tensor

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.cells + other.cells)

    @property
    def hist(self) -> Tensor:
        """The counts of the bins; values outside the range are in the outer bins."""
        found = self._numbers
        for axis in range(found.dim()):
            found = _folded(found.movedim(axis, 0)).movedim(0, axis)
        return found

    @property
    def below(self) -> Tensor:
        """For each axis, the number of values below the range, ``[axes]``."""
        return torch.stack([marginal[0] for marginal in self._marginals])

    @property
    def above(self) -> Tensor:
        """For each axis, the number of values above the range, ``[axes]``."""
        return torch.stack([marginal[-2] for marginal in self._marginals])

    @property
    def nan(self) -> Tensor:
        """The number of values that are in no bin, a scalar."""
        return self.cells.sum() - self._numbers.sum()

    @property
    def _numbers(self) -> Tensor:
        """Without the cells of NaN, the last ones."""
        return self.cells[(slice(-1),) * self.cells.dim()]

    @property
    def _marginals(self) -> list[Tensor]:
        if self.cells.dim() == 1:
            return [self.cells]
        return [self.cells.sum(1), self.cells.sum(0)]


def bin_edges(bins: int, range_: Range) -> np.ndarray:
    """The ``bins + 1`` edges in float64; edges that differ from zero by rounding alone are zero."""
    low, high = range_
    steps = np.arange(bins + 1)
    edges = (low / bins) * (bins - steps) + (high / bins) * steps
    edges[np.abs(edges) < 4 * np.finfo(float).eps * max(-low, high)] = 0.0
    edges[0], edges[-1] = low, high
    return np.maximum.accumulate(edges.clip(low, high))


@lru_cache(maxsize=32)
def grid_of(bins: int, range_: Range, dtype: torch.dtype, device: torch.device) -> Grid:
    """A histogram's axis, cached, since all parameters of a step share it."""
    return Grid(bins, range_, dtype, device)


class Grid:
    """The axis of a histogram for values of one precision on one device.

    The real line is cut into cells: 0 is below the range, 1 to ``bins`` are the bins, then come
    what is above the range and NaN. ``zero`` is the cell of 0 and ``negative`` that of the
    negative numbers next to it; all numbers smaller in absolute value than ``centre`` are in one of
    these two. ``bins`` and ``range_`` are those of the histogram, ``dtype`` is float32 or float64.
    """

    def __init__(self, bins: int, range_: Range, dtype: torch.dtype, device: torch.device) -> None:
        low, high = range_
        limits = torch.finfo(dtype)
        thresholds = _thresholds(bins, range_, dtype)
        self.bins = bins
        self.size = bins + 3
        self.zero = int((thresholds <= 0).sum())
        self.negative = self.zero - int((thresholds == 0).sum())
        left = -float(thresholds[self.negative - 1]) if self.negative else math.inf
        right = float(thresholds[self.zero]) if self.zero <= bins else math.inf
        self.centre = min(left, right)
        rate = bins / (high - low)
        error = 4 * limits.eps * max(-low, high) * rate
        self._can_guess = error < 0.125 and limits.tiny < rate < limits.max
        self._rate = rate
        # Cell 1 starts at ``low``. A quarter less, the guess is right or one too low.
        offset = 0.75 - low * rate if self._can_guess else 0.0
        self._offset = torch.tensor(offset, dtype=dtype, device=device)
        self._thresholds = thresholds.to(device)
        self._next = torch.cat(
            [thresholds, torch.full((2,), math.nan, dtype=dtype, device="cpu")]
        ).to(device)

    def cells(self, values: Tensor) -> Tensor:
        """The cell of each value, int32 of the same shape; int64 on devices, which count these."""
        # A guess takes more operations, and less time for many numbers on the processor.
        if not self._can_guess or values.device.type != "cpu" or values.numel() <= BISECTED:
            values = values.contiguous()
            on_host = values.device.type == "cpu"
            found = torch.bucketize(values, self._thresholds, right=True, out_int32=on_host)
            return found.masked_fill_(values.isnan(), self.bins + 2)
        guess = torch.add(self._offset, values, alpha=self._rate).clamp_(0, self.bins + 1)
        cells = guess.nan_to_num_(nan=self.bins + 2).int()
        following = self._next.index_select(0, cells.flatten())
        following = following if values.dim() == 1 else following.view(values.shape)
        # As numbers, since a comparison with a result in bool takes three times as long.
        return cells.add_(following.le_(values).int())

    def counts(self, values: Tensor, beside: Companions | None) -> Tensor:
        """How often each cell occurs, or each pair with one of the values' companions, int64."""
        cells = self.cells(values)
        if beside is None:
            return count(cells, self.size)
        joint = cells.mul_(beside.size).add_(beside.cells)
        return count(joint, self.size * beside.size).view(self.size, beside.size)

    def zeros(self, device: torch.device, beside: Companions | None) -> Tensor:
        """``counts`` of no values."""
        shape = (self.size,) if beside is None else (self.size, beside.size)
        return torch.zeros(shape, dtype=torch.int64, device=device)

    def compact_cells(self, values: Tensor) -> Tensor:
        """As ``cells``, in one byte each where that is enough; computed in chunks."""
        dtype = torch.uint8 if self.size <= 256 else torch.int32
        parts = [self.cells(chunk).to(dtype) for chunk in values.reshape(-1).split(CHUNK)]
        return torch.cat(parts).view(values.shape)


@dataclass(frozen=True)
class Companions:
    """The cells of numbers that stand beside values in a joint histogram, below ``size``."""

    cells: Tensor
    size: int

    def __getitem__(self, places: Any) -> Companions:
        return Companions(self.cells[places], self.size)

    def flat(self) -> Companions:
        """With one axis."""
        return Companions(self.cells.flatten(), self.size)


def _thresholds(bins: int, range_: Range, dtype: torch.dtype) -> Tensor:
    """The smallest number of each cell but the first, and but NaN's, ``[bins + 1]``."""
    edges = torch.tensor(bin_edges(bins, range_), device="cpu")
    infinity = torch.tensor(math.inf, dtype=dtype, device="cpu")
    rounded = edges.to(dtype)
    too_small = rounded.double() < edges
    too_small[-1] = rounded[-1].double() <= edges[-1]  # the last bin includes its right edge
    return torch.where(too_small, torch.nextafter(rounded, infinity), rounded)


MANY = 0.35
"""The share of large numbers above which all are binned.

Measured on two cores: then, picking them out takes longer than binning the others.
"""


BISECTED = 2**11
"""Up to so many numbers, each one's cell is found by bisection, which takes the fewest calls."""

FEW = 2**14
"""Up to so many numbers, all are binned: that takes less time than more calls."""


COLUMNS, MOST_COUNTERS = 2**10, 2**20
"""Counters of one cell on a device, and of all cells, which take 8 MiB.

A trade-off: many times the 32 numbers that a GPU adds at once, and few to be summed up. With one
counter for each cell, counting an MLP's elements took 100 ms of an H100, and with these, 2 ms.
"""


def tally(values: Tensor, grid: Grid, beside: Companions | None = None) -> Tensor:
    """How many of ``values`` ``[n, *Q]`` are in each cell, int64 ``[grid.size]``.

    With companions ``[*Q]``, the same for all n, in each pair of cells, ``[grid.size, size]``. Of
    numbers smaller than ``grid.centre``, only the signs are counted.
    """
    if values.device.type != "cpu" or values.numel() <= FEW:
        # The sizes of what follows depend on the values, which would have to be waited for.
        return grid.counts(values, beside)
    table = grid.zeros(values.device, beside)
    flat, others = values.flatten(1), None if beside is None else beside.flat()
    length = flat.shape[1]
    for rows in flat.split(max(CHUNK // length, 1)):
        for start in range(0, length, CHUNK):
            some = slice(start, start + CHUNK)
            part, own = rows[:, some], None if others is None else others[some]
            # By numpy, which looks through flags several times as fast.
            places = torch.from_numpy(np.flatnonzero(~(part.abs().numpy() < grid.centre)))  # NaN
            if len(places) > MANY * part.numel():
                table += grid.counts(part, own)
                continue
            large = part.flatten().index_select(0, places)
            near = None if own is None else own[places % part.shape[1]]
            table += grid.counts(large, near)
            opposite = below_zero(part, own)
            if own is None:
                add_signs(table, grid, None, part.numel(), opposite)
                add_signs(table, grid, None, len(large), below_zero(large, None), times=-1)
            else:
                add_signs(table, grid, own, len(part), opposite.sum(0))
                add_signs(table, grid, near, 1, below_zero(large, near), times=-1)
    return table


def below_zero(values: Tensor, beside: Companions | None) -> Any:
    """How many of at most 2**24 values on the processor are negative; beside others, which ones.

    As numbers, which are cheaper than a result in bool, and added up without a conversion.
    """
    flags = torch.lt(values, 0, out=torch.empty_like(values))
    return int(flags.sum()) if beside is None else flags


def add_signs(
    table: Tensor,
    grid: Grid,
    beside: Companions | None,
    number: int,
    opposite: Any,
    times: int = 1,
) -> None:
    """Add to counts, so many times, what is smaller than ``grid.centre``.

    There is a ``number`` of these, of which so many are the ``opposite`` of positive. Beside
    companions, both are for each of them.
    """
    negative = opposite
    if beside is not None:
        cells = beside.cells.flatten()
        negative = torch.bincount(cells, opposite.flatten().double(), beside.size).long()
    table[grid.negative] += times * negative
    table[grid.zero] += times * (number * number_of(1, beside) - negative)


def number_of(elements: int, beside: Companions | None) -> int | Tensor:
    """How many elements there are, or how many companions are in each cell, ``[size]``."""
    return elements if beside is None else count(beside.cells, beside.size)


def count(indices: Tensor, length: int) -> Tensor:
    """How often each index below ``length`` occurs, int64 ``[length]``."""
    indices = indices.flatten()
    if indices.device.type == "cpu":
        # Bytes are counted in half of the time that other integers take.
        indices = indices.to(torch.uint8) if length <= 256 else indices
        return torch.bincount(indices, minlength=length)
    # bincount reads the largest index back to the host. Neighbours are counted in other columns,
    # since a device adds to the same number one by one.
    columns = max(min(COLUMNS, MOST_COUNTERS // length), 1)
    table = torch.zeros(length, columns, dtype=torch.int64, device=indices.device)
    whole = len(indices) - len(indices) % columns
    one = torch.ones((), dtype=torch.int64, device=indices.device)
    for part in (indices[:whole].view(-1, columns), indices[whole:].view(1, -1)):
        if part.numel():
            table.scatter_add_(0, part.long(), one.expand(part.shape))
    return table.sum(1)


def _folded(table: Tensor) -> Tensor:
    """Add what is outside the range to the outer bins along the first axis."""
    hist = table[1:-1].clone()
    hist[0] += table[0]
    hist[-1] += table[-1]
    return hist


def comparable(values: Tensor) -> Tensor:
    """In a precision that holds edges well."""
    return values.float() if values.dtype.itemsize < 4 else values
