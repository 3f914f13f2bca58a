"""Per-sample gradients whose elements are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    ElementDeviations,
    SampleDeviations,
    deviations_in_double,
)
from gradlens.numerics.histograms import Companions, Grid, tally
from gradlens.numerics.norms import row_norms
from gradlens.numerics.tensors import accumulable, double, is_small
from gradlens.operators.operator import GradientOperator, slices

REUSED_BYTES = 2**20
"""Memory of elements from which on a buffer pays: the system has smaller pieces at hand."""


class Dense(GradientOperator):
    """gₙ as a tensor ``[N, *P]``; for biases and normalisation weights, where it is small.

    They are multiplied by ``scale``.
    """

    def __init__(self, gradients: Tensor, scale: float = 1.0, eps: float | None = None) -> None:
        eps = torch.finfo(gradients.dtype).eps if eps is None else eps
        gradients = accumulable(gradients)
        if scale != 1.0:
            gradients = gradients * scale
        shape = gradients.shape[1:]
        super().__init__(len(gradients), shape, gradients.dtype, gradients.device, eps)
        flat = (len(gradients), shape.numel())
        self._gradients = gradients if gradients.shape == flat else gradients.reshape(flat)

    @property
    def is_worth_storing(self) -> bool:
        return False

    def _block(self, samples: slice, rows: slice) -> Tensor:
        shape = (self.batch_size, self._rows, self._columns)
        return self._gradients.view(shape)[samples, rows]

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return (self._gradients,)

    def _keep_only(self, samples: Tensor) -> None:
        self._gradients = self._gradients[samples]

    def squared_norms(self) -> Tensor:
        if is_small(self._gradients):
            norms = torch.linalg.vector_norm(self._gradients, dim=1, dtype=torch.float64)
            return norms.square_()
        return double(row_norms(self._gradients)).square()

    def centred_gram(self) -> Tensor:
        if not is_small(self._gradients):
            return super().centred_gram()
        apart, _ = self._about_mean()
        return apart @ apart.T

    def deviations(self) -> SampleDeviations:
        if not is_small(self._gradients):
            return super().deviations()
        return deviations_in_double(*self._about_mean(), self._noise)

    def element_deviations(self) -> ElementDeviations:
        if not is_small(self._gradients):
            return super().element_deviations()
        apart, mean = self._about_mean()
        return self._element_deviations(mean, apart.square().sum(0))

    def _about_mean(self) -> tuple[Tensor, Tensor]:
        """gₙ − ḡ ``[N, R·K]`` and ḡ ``[R·K]`` in float64; not to be written to."""
        kept = self._kept
        if "mean" not in kept:
            # In a tensor of its own: a difference of two dtypes takes five times as long.
            apart = self._gradients.to(torch.float64, copy=True)
            mean = apart.mean(0) if self.batch_size else apart.sum(0)
            kept |= {"mean": mean, "apart": apart.sub_(mean)}
        return kept["apart"], kept["mean"]

    def _dot(self, direction: Tensor) -> Tensor:
        if not is_small(self._gradients):
            return super()._dot(direction)
        return self._gradients.double() @ direction.flatten().double()

    def sum(self) -> Tensor:
        return self._gradients.sum(0).view(self.shape)

    def _tally(self, grid: Grid, beside: Companions | None, max_bytes: int) -> Tensor:
        if beside is not None or self.bytes_of_elements > max_bytes:
            return super()._tally(grid, beside, max_bytes)
        return tally(self._gradients, grid)


@final
class Buffer:
    """Memory for the elements of one parameter at a time, which the next one uses again.

    The system allocates a tensor of many megabytes page by page, which takes as long as computing
    its elements. Devices other than the processor reuse memory by themselves.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor in this memory, which the next call overwrites, with any elements."""
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._memory is None or size > self.nbytes:
            self.free()
            # Whatever device is the default.
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """The memory that it has."""
        return 0 if self._memory is None else len(self._memory)

    def free(self) -> None:
        """Release the memory until it is needed again."""
        self._memory = None


def stored_rows(
    individual: GradientOperator, max_bytes: int | None = None
) -> Iterator[tuple[slice, GradientOperator]]:
    """Stored gradients of a parameter that isn't a scalar, for some of its rows at a time."""
    everyone = slice(0, individual.batch_size)
    row_bytes = individual.bytes_of_elements // max(individual.shape[0], 1)
    most = individual._piece_bytes if max_bytes is None else max_bytes
    for rows in slices(individual.shape[0], most // max(row_bytes, 1)):
        values = individual._rows_of(everyone, rows)
        shape = (*values.shape[:2], *individual.shape[1:])
        yield rows, Dense(values.reshape(shape), eps=individual.eps)


def is_to_be_stored(individual: GradientOperator, max_bytes: int) -> bool:
    """Whether storing gradients saves work, and they are small enough."""
    return 0 < individual.bytes_of_elements <= max_bytes and individual.is_worth_storing


def stored(individual: GradientOperator, buffer: Buffer | None = None) -> Dense:
    """The same gradients with stored elements, in a buffer or in memory of their own."""
    elements = None
    if buffer is not None and individual.bytes_of_elements > REUSED_BYTES:
        shape = (individual.batch_size, *individual.shape)
        elements = buffer.tensor(shape, individual.dtype, individual.device)
    return Dense(individual.dense(elements), eps=individual.eps)
