"""The large elements of many outer products, found without computing the small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradlens.numerics.histograms import negative


@dataclass(frozen=True)
class Block:
    """Some elements ``[b, m]`` of scale·δₙ xₙᵀ, by their factors.

    ``delta`` ``[b, 1]`` are elements of δ, with the index ``row`` ``[b]`` and the index ``sample``
    ``[b]`` of their sample. ``inputs`` ``[b, m]`` are elements of x. The indices of these are the
    first m of their sample's row of ``columns`` ``[N, ≥ m]``.
    """

    scale: float
    delta: Tensor
    inputs: Tensor
    row: Tensor
    columns: Tensor
    sample: Tensor

    @property
    def number(self) -> int:
        """How many elements there are."""
        return self.inputs.numel()

    def values(self) -> Tensor:
        """The elements ``[b, m]``, in a new tensor."""
        products = self.delta * self.inputs
        return products if self.scale == 1.0 else products.mul_(self.scale)

    def opposite(self) -> Tensor:
        """Where the two factors have opposite signs, as ones, ``[b, m]``."""
        return negative(self.delta.sign() * self.inputs)

    def column(self) -> Tensor:
        """x's index, ``[b, m]``."""
        return self.columns[:, : self.inputs.shape[1]].index_select(0, self.sample)


@final
class Tail:
    """Elements of scale·δₙ xₙᵀ with absolute values of ``threshold`` or more, and NaN, each once.

    δ is ``[N, R]``, x ``[N, K]``. Some smaller elements are among them, and all whose sign is lost
    because they underflow. Of both factors, what is too small for any of them is left out. The rest
    of x is sorted by size, so that each element of δ takes a leading part of it; elements of δ that
    take about as much form a block. Where a sample has less of x than others, its part is filled up
    with zeros, whose products with finite numbers are no elements. ``at_most`` is a bound on the
    number of elements that is found before sorting. ``keeps_signs`` is whether an element is
    negative where its factors have opposite signs: none underflows. For tensors on the processor.
    """

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float, threshold: float) -> None:
        self._delta, self._inputs, self._scale = delta, inputs, scale
        self._rows = self._columns = 0
        self.keeps_signs = True
        if not delta.numel() or not inputs.numel():
            return
        size, other_size = _Sizes.of(delta), _Sizes.of(inputs)
        concerned = _concerned(size, other_size, scale, threshold).nonzero()[:, 0]
        if not len(concerned):
            return
        if 2 * len(concerned) < len(delta):  # others take a little time, as does a copy
            self._delta = delta.index_select(0, concerned)
            self._inputs = inputs.index_select(0, concerned)
            size, other_size = size.some(concerned), other_size.some(concerned)
        self._required, self.keeps_signs = _required(size, other_size, scale, threshold)
        least = self._required.amin(1, keepdim=True)
        self._takes = _Places.of(other_size.largest[:, None], self._required)
        self._is_taken = _Places.of(other_size.all, least)
        self._rows, self._columns = self._takes.most, self._is_taken.most

    @property
    def at_most(self) -> int:
        return len(self._delta) * self._rows * self._columns

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """Of about ``max_elements`` each."""
        if not self.at_most:
            return
        row, takes = self._takes.by_sample()
        column, is_taken = self._is_taken.by_sample()
        inputs = self._inputs.gather(1, column).masked_fill_(~is_taken, 0.0)
        size, order = inputs.abs().sort(1, descending=True)
        inputs, column = inputs.gather(1, order), column.gather(1, order)
        delta, required = self._delta.gather(1, row).flatten(), self._required.gather(1, row)
        taken = torch.searchsorted(size.neg(), required.neg(), right=True).mul_(takes)
        lengths, order = _descending(taken.flatten())
        start, stop = 0, np.count_nonzero(lengths)
        while start < stop:
            length = int(lengths[start])
            chosen = order[start : min(start + max(max_elements // length, 1), stop)]
            sample = chosen // self._rows
            yield Block(
                self._scale,
                delta[chosen, None],
                inputs[:, :length].index_select(0, sample),
                row=row.flatten()[chosen],
                columns=column,
                sample=sample,
            )
            start += len(chosen)


@dataclass(frozen=True)
class _Sizes:
    """Absolute values of a factor ``[N, M]``, each sample's largest, and its smallest but zero.

    ``smallest`` is huge where all are zero.
    """

    all: Tensor
    largest: Tensor
    smallest: Tensor

    @classmethod
    def of(cls, factor: Tensor) -> _Sizes:
        size = factor.abs()
        above_zero = size.sign().sub_(1).mul_(-torch.finfo(size.dtype).max).add_(size)
        return cls(size, size.amax(1), above_zero.amin(1))

    def some(self, samples: Tensor) -> _Sizes:
        parts = (self.all, self.largest, self.smallest)
        return _Sizes(*(part.index_select(0, samples) for part in parts))


def _concerned(size: _Sizes, other: _Sizes, scale: float, threshold: float) -> Tensor:
    """Samples with any such elements, ``[N]``; at little cost, since often there are few."""
    small = size.largest * other.largest * scale < threshold
    return ~(small & (size.smallest * other.smallest * scale > 0))  # so a NaN concerns its sample


def _required(size: _Sizes, other: _Sizes, scale: float, threshold: float) -> tuple[Tensor, bool]:
    """How large x must be for δ's element to take it, ``[N, R]``; -1 where all of x is taken.

    The second is whether all products are finite, and none of numbers other than zero underflows.
    """
    limits = torch.finfo(size.all.dtype)
    bound = threshold / scale * (1 - 4 * limits.eps)
    if min(bound, threshold) < 4 * limits.tiny:  # where products lose the factors' precision
        bound = 0.0
    # A number over a tensor would go through the reciprocal, which can overflow.
    required = torch.full_like(size.all, bound).div_(size.all)
    ordinary = (size.largest * other.largest).isfinite()
    ordinary &= size.smallest * other.smallest * scale > 0
    all_ordinary = bool(ordinary.all())
    if bound > 0 and all_ordinary:
        return required, True
    zero = size.all == 0
    finite = size.all.isfinite() & other.largest.isfinite()[:, None]
    signed = zero | (size.all * other.smallest[:, None] * scale > 0)
    required = required.masked_fill_(zero, torch.inf).masked_fill_(~(finite & signed), -1.0)
    return required, all_ordinary


def _descending(lengths: Tensor) -> tuple[NDArray[np.int64], Tensor]:
    """Lengths ``[n]`` in descending order, and their indices."""
    found = lengths.numpy()
    # For integers of 16 bits, numpy uses radix sort, which takes a quarter of the time.
    short = found.astype(np.int16) if found.max() < 2**15 else found
    order = np.argsort(-short, kind="stable")
    return found[order], torch.from_numpy(order)


@dataclass(frozen=True)
class _Places:
    """Where a mask ``[N, M]`` is true, and the ``number`` ``[N]`` of these places in each row.

    They are arrays of numpy, which finds the true elements several times as fast as torch.
    """

    mask: NDArray[np.bool_]
    number: NDArray[np.int64]

    @classmethod
    def of(cls, size: Tensor, required: Tensor) -> _Places:
        """Where a size is not below what is required, as a NaN is not."""
        mask = ~(size.numpy() < required.numpy())
        return cls(mask, np.count_nonzero(mask, axis=1))

    @property
    def most(self) -> int:
        """The largest number of places in a row."""
        return int(self.number.max())

    def by_sample(self) -> tuple[Tensor, Tensor]:
        """The places of each row, ``[N, most]``, and which of these are places."""
        are_places = np.arange(self.most) < self.number[:, None]
        places = np.zeros(are_places.shape, dtype=np.int64)
        places[are_places] = np.flatnonzero(self.mask) % self.mask.shape[1]
        return torch.from_numpy(places), torch.from_numpy(are_places)
