"""Per-sample gradients that are computed once for several results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from gradlens.per_sample.operators.dense import Dense
from gradlens.per_sample.operators.operator import PIECE_BYTES, GradientOperator, slices


@final
class Buffer:
    """Memory for the elements of one parameter at a time, which the next one uses again.

    The system allocates a tensor of many megabytes page by page, which takes as long as computing
    its elements. Devices other than the processor reuse memory by themselves.
    """

    def __init__(self) -> None:
        self.free()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in this memory, which the next call overwrites, with any elements."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > self.nbytes:
            self.free()
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """The memory that it has."""
        return len(self._memory)

    def free(self) -> None:
        """Release the memory until it is needed again."""
        # Whatever device is the default.
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")


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


def is_to_be_stored(individual: GradientOperator, max_bytes: int) -> bool:
    """Whether storing gradients saves work, and they are small enough."""
    return individual.is_worth_storing and 0 < bytes_of_elements(individual) <= max_bytes


def stored(individual: GradientOperator, buffer: Buffer | None = None) -> Dense:
    """The same gradients with stored elements, in a buffer or in memory of their own."""
    shape = (individual.batch_size, *individual.shape)
    memory = Buffer() if buffer is None else buffer
    elements = memory.tensor(shape, individual.dtype, individual.device)
    return Dense(individual.dense(elements), eps=individual.eps)
