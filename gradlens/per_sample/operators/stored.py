"""Per-sample gradients that are computed once for several results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from gradlens.per_sample.operators.dense import Dense
from gradlens.per_sample.operators.operator import PIECE_BYTES, GradientOperator, slices


@final
class Stored(GradientOperator):
    """Another operator's gₙ, as the pieces of whole samples that it computes them in.

    Pieces rather than one tensor, since memory of their size is used again, while that of a large
    tensor is allocated by the system page by page, which takes longer than the computation.
    """

    def __init__(self, individual: GradientOperator, piece_bytes: int = PIECE_BYTES) -> None:
        n, shape = individual.batch_size, individual.shape
        super().__init__(n, shape, 1.0, individual.dtype, individual.device, individual.eps)
        self._of_pieces = individual._workspace()
        with torch.no_grad():
            self._parts = [
                individual._scaled_block(*piece) for piece in individual._partition(piece_bytes)
            ]

    @property
    def elementwise(self) -> bool:
        return False

    def _workspace(self) -> int:
        # It isn't needed any more, but pieces are cut by it.
        return self._of_pieces

    def _block(self, samples: slice, rows: slice) -> Tensor:
        size = len(self._parts[0])
        first, last = samples.start // size, -(-samples.stop // size)
        parts = [part[:, rows] for part in self._parts[first:last]]
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together[samples.start - first * size : samples.stop - first * size]

    def _keep_only(self, samples: Tensor) -> None:
        size = len(self._parts[0])
        self._parts = list(torch.cat(self._parts)[samples].split(size))


def bytes_of_elements(individual: GradientOperator) -> int:
    """Memory of all elements."""
    return individual.batch_size * individual.shape.numel() * individual.dtype.itemsize


def stored_rows(
    individual: GradientOperator, piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[slice, GradientOperator]]:
    """Stored gradients of a parameter that isn't a scalar, for some of its rows at a time."""
    everyone = slice(0, individual.batch_size)
    row_bytes = bytes_of_elements(individual) // max(individual.shape[0], 1)
    for rows in slices(individual.shape[0], piece_bytes // max(row_bytes, 1)):
        with torch.no_grad():
            values = individual._scaled(individual._rows_of(everyone, rows))
        yield rows, Dense(values.unflatten(2, individual.shape[1:]), eps=individual.eps)


def stored(individual: GradientOperator, max_bytes: int) -> GradientOperator:
    """The same gradients, stored if that saves work and they are small enough."""
    needed = bytes_of_elements(individual)
    if not individual.is_worth_storing or not 0 < needed <= max_bytes:
        return individual
    _, rows = next(individual._partition(PIECE_BYTES))
    whole_samples = rows == slice(0, individual._rows)
    return Stored(individual) if whole_samples else Dense(individual.dense(), eps=individual.eps)
