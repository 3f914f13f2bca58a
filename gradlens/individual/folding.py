"""Layers to which samples come folded with another axis: frames, windows, the halves of a pair.

A layer sees N·k rows then, and nothing in them tells which sample a row belongs to. There are two
ways to fold (``Order``); which one it was is tried out (``gradlens.individual.attribution``).
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from gradlens.individual.operator import GradientOperator
from gradlens.individual.rules import Operators, operators_of, takes_positions
from gradlens.individual.tap import LayerCall


class Order(Enum):
    """How rows count samples and what they are folded with.

    ``SAMPLES_FIRST``: row n·k + j is part of sample n, as in ``x.flatten(0, 1)``;
    ``SAMPLES_LAST``: row j·N + n is, as in ``torch.cat([first, second])``.
    """

    SAMPLES_FIRST = "samples first"
    SAMPLES_LAST = "samples last"


def folded_operators(call: LayerCall, scale: float, samples: int, order: Order) -> Operators:
    """One operator of N samples for each trainable parameter of a module called with N·k rows."""
    if takes_positions(call.module):
        return operators_of(_unfolded(call, samples, order), scale)
    operators = operators_of(call, scale)
    return {name: Folded(operator, samples, order) for name, operator in operators.items()}


def _unfolded(call: LayerCall, samples: int, order: Order) -> LayerCall:
    def unfold(leaf: Any) -> Any:
        return by_sample(leaf, samples, order) if isinstance(leaf, Tensor) else leaf

    args, kwargs, grad_outputs = tree_map(unfold, (call.args, call.kwargs, call.grad_outputs))
    return replace(call, args=args, kwargs=kwargs, grad_outputs=grad_outputs)


def by_sample(rows: Tensor, samples: int, order: Order) -> Tensor:
    """``[N·k, ...]`` as ``[N, k, ...]``."""
    if order is Order.SAMPLES_FIRST:
        return rows.unflatten(0, (samples, -1))
    return rows.unflatten(0, (-1, samples)).transpose(0, 1)


class Folded(GradientOperator):
    """gₙ = Σⱼ of the gradients of the k rows that are part of sample n."""

    def __init__(self, by_row: GradientOperator, samples: int, order: Order) -> None:
        super().__init__(samples, by_row.shape, by_row.scale, by_row.dtype, by_row.device)
        self._by_row = by_row
        self._order = order
        self._folds = by_row.batch_size // samples

    def outlive_update(self) -> None:
        self._by_row.outlive_update()

    @property
    def elementwise(self) -> bool:
        return self._by_row.elementwise

    def _workspace(self) -> int:
        return self._folds * (self._rows * self._columns + self._by_row._workspace())

    def _block(self, samples: slice, rows: slice) -> Tensor:
        if self._order is Order.SAMPLES_FIRST:
            together = slice(samples.start * self._folds, samples.stop * self._folds)
            block = self._by_row._block(together, rows)
            return block.unflatten(0, (-1, self._folds)).sum(1)
        block = self._by_row._block(samples, rows)
        for shift in range(self.batch_size, self._by_row.batch_size, self.batch_size):
            part = slice(samples.start + shift, samples.stop + shift)
            block = block + self._by_row._block(part, rows)
        return block

    def _dot(self, matrix: Tensor) -> Tensor:
        return by_sample(self._by_row._dot(matrix), self.batch_size, self._order).sum(1)

    def _sum(self) -> Tensor:
        return self._by_row._sum()

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        if self._order is Order.SAMPLES_FIRST:
            return self._by_row._weighted_sum(weights.repeat_interleave(self._folds))
        return self._by_row._weighted_sum(weights.repeat(self._folds))
