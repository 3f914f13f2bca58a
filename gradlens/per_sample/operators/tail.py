"""The large elements of many outer products, found without computing the small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some elements of δₙ xₙᵀ: ``values`` ``[b, m]``, δ's index ``row`` ``[b]``, x's ``column``.

    ``opposite`` is whether the two factors have opposite signs; ``column`` is ``[b, m]``.
    """

    values: Tensor
    row: Tensor
    column: Tensor
    opposite: Tensor


@final
class Tail:
    """Elements of scale·δₙ xₙᵀ with absolute values of ``threshold`` or more, and NaN, each once.

    δ is ``[N, R]``, x ``[N, K]``. Some smaller elements are among them, and all whose sign is lost
    because they underflow. Both factors are sorted by size, so that each element of δ takes a
    leading part of x; elements of δ that take about as much form a block. ``at_most`` is a bound on
    the number of elements that is found before sorting.
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
        self._size = other_size.all
        self._rows = _longest(~(other_size.largest[:, None] < self._required))
        self._columns = _longest(~(self._size < self._required.amin(1, keepdim=True)))

    @property
    def at_most(self) -> int:
        return len(self._delta) * self._rows * self._columns

    def blocks(self, max_elements: int) -> Iterator[Block]:
        """Of about ``max_elements`` each."""
        if not self.at_most:
            return
        required, row = self._required.topk(self._rows, largest=False)
        largest, column = self._size.topk(self._columns)
        taken = torch.searchsorted(largest.neg(), required.neg(), right=True)
        delta, inputs = self._delta.gather(1, row).flatten(), self._inputs.gather(1, column)
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
                column=column[:, :length].index_select(0, sample),
                opposite=first.sign() * second < 0,
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


def _longest(mask: Tensor) -> int:
    """The most true entries that a row has."""
    return int(torch.count_nonzero(mask, 1).amax())
