"""The large elements of many outer products, found without computing the small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some elements of δₙ xₙᵀ: ``values`` ``[b, m]``, and δ's index ``row`` ``[b]``.

    ``opposite`` ``[b, m]`` is whether the two factors have opposite signs. ``columns`` ``[N, ≥ m]``
    are the indices that each sample takes of x, and ``sample`` ``[b]`` says which sample's.
    """

    values: Tensor
    row: Tensor
    opposite: Tensor
    columns: Tensor
    sample: Tensor

    def column(self) -> Tensor:
        """x's index, ``[b, m]``."""
        return self.columns[:, : self.values.shape[1]].index_select(0, self.sample)


@final
class Tail:
    """Elements of scale·δₙ xₙᵀ with absolute values of ``threshold`` or more, and NaN, each once.

    δ is ``[N, R]``, x ``[N, K]``. Some smaller elements are among them, and all whose sign is lost
    because they underflow. Of both factors, what is too small for any of them is left out. The rest
    of x is sorted by size, so that each element of δ takes a leading part of it; elements of δ that
    take about as much form a block. Where a sample has less of x than others, its part is filled up
    with zeros, whose products with finite numbers are no elements. ``at_most`` is a bound on the
    number of elements that is found before sorting.
    """

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float, threshold: float) -> None:
        self._delta, self._inputs, self._scale = delta, inputs, scale
        self._rows = self._columns = 0
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
        self._required = _required(size, other_size, scale, threshold)
        self._takes = ~(other_size.largest[:, None] < self._required)
        self._is_taken = ~(other_size.all < self._required.amin(1, keepdim=True))
        self._rows, self._columns = _longest(self._takes), _longest(self._is_taken)

    @property
    def at_most(self) -> int:
        return len(self._delta) * self._rows * self._columns

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """Of about ``max_elements`` each."""
        if not self.at_most:
            return
        row, takes = _places(self._takes, self._rows)
        column, is_taken = _places(self._is_taken, self._columns)
        inputs = self._inputs.gather(1, column).masked_fill_(~is_taken, 0.0)
        size, order = inputs.abs().sort(1, descending=True)
        inputs, column = inputs.gather(1, order), column.gather(1, order)
        delta, required = self._delta.gather(1, row).flatten(), self._required.gather(1, row)
        taken = torch.searchsorted(size.neg(), required.neg(), right=True).mul_(takes)
        taken, order = taken.flatten().sort(descending=True)
        lengths = taken[taken > 0].cpu()
        start = 0
        while start < len(lengths):
            length = int(lengths[start])
            chosen = order[start : min(start + max(max_elements // length, 1), len(lengths))]
            sample = chosen // self._rows
            first = delta[chosen, None]
            second = inputs[:, :length].index_select(0, sample)
            yield Block(
                values=(first * second).mul_(self._scale),
                row=row.flatten()[chosen],
                opposite=first.sign() * second < 0,
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


def _required(size: _Sizes, other: _Sizes, scale: float, threshold: float) -> Tensor:
    """How large x must be for δ's element to take it, ``[N, R]``; -1 where all of x is taken."""
    limits = torch.finfo(size.all.dtype)
    bound = threshold / scale * (1 - 4 * limits.eps)
    if min(bound, threshold) < 4 * limits.tiny:  # where products lose the factors' precision
        bound = 0.0
    # A number over a tensor would go through the reciprocal, which can overflow.
    required = torch.full_like(size.all, bound).div_(size.all)
    ordinary = (size.largest * other.largest).isfinite()
    ordinary &= size.smallest * other.smallest * scale > 0
    if bound > 0 and bool(ordinary.all()):
        return required
    zero = size.all == 0
    finite = size.all.isfinite() & other.largest.isfinite()[:, None]
    signed = zero | (size.all * other.smallest[:, None] * scale > 0)
    return required.masked_fill_(zero, torch.inf).masked_fill_(~(finite & signed), -1.0)


def _places(mask: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Where each row of a mask ``[N, M]`` is true, ``[N, width]``, and which of these are places.

    Sorting a row for them takes far longer than looking through it.
    """
    true = torch.count_nonzero(mask, 1)
    are_places = torch.arange(width, device=mask.device) < true[:, None]
    places = torch.zeros_like(are_places, dtype=torch.int64)
    return places.masked_scatter_(are_places, mask.nonzero()[:, 1]), are_places


def _longest(mask: Tensor) -> int:
    """The most true entries that a row has."""
    return int(torch.count_nonzero(mask, 1).amax())
