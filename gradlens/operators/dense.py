"""Per-sample gradients whose elements are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from gradlens.numerics.norms import dots, row_norms
from gradlens.numerics.precision import accumulable, double, is_small
from gradlens.operators.operator import (
    PIECE_BYTES,
    GradientOperator,
    slices,
)


class Dense(GradientOperator):
    """gₙ as a tensor ``[N, *P]``; for biases and normalisation weights, where it is small."""

    def __init__(self, gradients: Tensor, scale: float = 1.0, eps: float | None = None) -> None:
        eps = torch.finfo(gradients.dtype).eps if eps is None else eps
        gradients = accumulable(gradients)
        shape = gradients.shape[1:]
        super().__init__(len(gradients), shape, scale, gradients.dtype, gradients.device, eps)
        self._gradients = gradients.reshape(len(gradients), self._rows, self._columns)

    @property
    def elementwise(self) -> bool:
        return False

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._gradients[samples, rows]

    def _keep_only(self, samples: Tensor) -> None:
        self._gradients = self._gradients[samples]

    def _squared_norms(self) -> Tensor:
        return double(row_norms(self._gradients.flatten(1))).square()

    def _centred_gram(self) -> Tensor:
        if not is_small(self._gradients):
            return super()._centred_gram()
        mean, apart = self._mean_and_apart()
        return self._keep_centred_gram(apart @ apart.T, apart @ mean)

    def _element_deviations(self) -> tuple[Tensor, Tensor]:
        if not is_small(self._gradients):
            return super()._element_deviations()
        mean, apart = self._mean_and_apart()
        shape = self._rows, self._columns
        return mean.to(self.dtype).view(shape), apart.square_().sum(0).view(shape)

    def _mean_and_apart(self) -> tuple[Tensor, Tensor]:
        """ḡ ``[R·K]`` and gₙ − ḡ ``[N, R·K]`` in float64, in new tensors."""
        rows = double(self._gradients.flatten(1))
        mean = rows.sum(0).div_(max(self.batch_size, 1))
        return mean, rows.sub_(mean)

    def _dot_in_range(self, matrix: Tensor) -> Tensor:
        if not is_small(self._gradients):
            return super()._dot_in_range(matrix)
        return double(self._gradients.flatten(1)) @ double(matrix.flatten())

    def _dot(self, matrix: Tensor) -> Tensor:
        return dots(self._gradients.flatten(1), matrix.flatten())

    def _sum(self) -> Tensor:
        return self._gradients.sum(0)


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
