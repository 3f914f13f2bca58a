"""The large elements of many outer products, found without computing the small ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Some elements of δₙ xₙᵀ: ``values`` ``[b, m]``, δ's index ``row`` ``[b]``, x's ``column``.

    ``opposite`` tells whether the two factors have opposite signs; ``column`` is ``[b, m]``.
    """

    values: Tensor
    row: Tensor
    column: Tensor
    opposite: Tensor


def tail_of_outer_products(
    delta: Tensor, inputs: Tensor, scale: float, threshold: float, max_elements: int
) -> Iterator[Block]:
    """Elements of scale·δₙ xₙᵀ with absolute values of ``threshold`` or more, and NaN, each once.

    δ is ``[N, R]``, x ``[N, K]``. Some smaller elements are among them, and all whose sign is lost
    because they underflow. Both factors are sorted by size, so that each element of δ takes a
    leading part of x; elements of δ that take about as much form a block.
    """
    if not delta.numel() or not inputs.numel():
        return
    concerned = _concerned(delta, inputs, scale, threshold).nonzero()[:, 0]
    if not len(concerned):
        return
    delta, inputs = delta.index_select(0, concerned), inputs.index_select(0, concerned)
    required = _required(delta.abs(), inputs.abs(), scale, threshold)
    largest = inputs.abs().amax(1, keepdim=True)
    rows_at_most = _longest(~(largest < required))
    if not rows_at_most:
        return
    required, row = required.topk(rows_at_most, largest=False)
    columns_at_most = _longest(~(inputs.abs() < required[:, :1]))
    largest, column = inputs.abs().topk(columns_at_most)
    taken = torch.searchsorted(largest.neg(), required.neg(), right=True)

    delta, inputs = delta.gather(1, row).flatten(), inputs.gather(1, column)
    taken, order = taken.flatten().sort(descending=True)
    lengths = taken[taken > 0].cpu()
    start = 0
    while start < len(lengths):
        length = int(lengths[start])
        chosen = order[start : min(start + max(max_elements // length, 1), len(lengths))]
        sample = chosen // rows_at_most
        first = delta[chosen, None]
        second = inputs[:, :length].index_select(0, sample)
        yield Block(
            values=(first * second).mul_(scale),
            row=row.flatten()[chosen],
            column=column[:, :length].index_select(0, sample),
            opposite=first.sign() * second < 0,
        )
        start += len(chosen)


def _concerned(delta: Tensor, inputs: Tensor, scale: float, threshold: float) -> Tensor:
    """Samples with any such elements, ``[N]``; at little cost, since often there are few."""
    largest = delta.abs().amax(1) * inputs.abs().amax(1) * scale
    smallest = _smallest(delta) * _smallest(inputs) * scale
    return ~((largest < threshold) & (smallest > 0))  # so a NaN concerns its sample


def _smallest(factor: Tensor) -> Tensor:
    """Each sample's smallest absolute value but zero, ``[N]``; huge where there is none."""
    size = factor.abs()
    return size.sign().sub_(1).mul_(-torch.finfo(size.dtype).max).add_(size).amin(1)


def _required(size: Tensor, other_size: Tensor, scale: float, threshold: float) -> Tensor:
    """How large x must be for δ's element to take it, ``[N, R]``; -1 where all of x is taken."""
    limits = torch.finfo(size.dtype)
    bound = threshold / scale * (1 - 4 * limits.eps)
    if min(bound, threshold) < 4 * limits.tiny:  # where products lose the factors' precision
        bound = 0.0
    # A number over a tensor would go through the reciprocal, which can overflow.
    required = torch.full_like(size, bound).div_(size).masked_fill_(size == 0, torch.inf)
    finite = size.isfinite() & other_size.amax(1, keepdim=True).isfinite()
    smallest = _smallest(other_size)[:, None]
    signed = (size == 0) | (size * smallest * scale > 0)
    return required.masked_fill_(~(finite & signed), -1.0)


def _longest(mask: Tensor) -> int:
    """The most true entries that a row has."""
    return int(torch.count_nonzero(mask, 1).amax())
