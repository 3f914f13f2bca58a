"""The interface of structured per-sample gradients.

Throughout, a parameter of shape ``P`` is taken as a matrix of R rows (its first axis) and K columns
(all other axes together); scalars and vectors have K = 1.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    ROUNDINGS,
    ElementDeviations,
    SampleDeviations,
    apart_from,
    coarsest,
    deviations_from,
)
from gradlens.numerics.histograms import (
    Companions,
    Counts,
    Grid,
    Range,
    comparable,
    grid_of,
    tally,
)
from gradlens.numerics.norms import (
    dots,
    norm,
    products_of_pairs,
    row_norms,
    scale_of,
    whole_range,
)
from gradlens.numerics.tensors import double
from gradlens.torch_private import storage_number, versions

PIECE_BYTES = 16 * 2**20
"""Default bound of the memory of one piece on a processor, whose caches hold less than larger ones.

A result takes a few times as much for the time that it is computed.
"""

DEVICE_PIECE_BYTES = 128 * 2**20
"""The same on devices, where each operation that is launched takes as long as its many elements.

On an H100, all per-sample gradients of a ResNet-14 in pieces of 16 MiB took ten plain steps.
"""


@dataclass(frozen=True)
class Piece:
    """Some rows of some samples' per-sample gradients.

    ``values`` has shape ``[len(samples), len(rows), *P[1:]]``, for a scalar parameter
    ``[len(samples)]``; ``samples`` and ``rows`` index the batch and the parameter's first axis.
    """

    samples: slice
    rows: slice
    values: Tensor


class GradientOperator(ABC):
    """Per-sample gradients gₙ ``[N, *P]`` of one parameter, without building them.

    gₙ is N times sample n's contribution to a mean loss, or that contribution itself under a sum
    loss; what an operator is made of is multiplied by this factor, its ``scale``, at once.
    Gradients and their sums are of the operator's ``dtype``: that of the factors, except that half
    precisions accumulate in float32. Squares and products are in float64, whose range they don't
    leave. ``eps`` is the relative rounding error of the factors, which is larger in half
    precisions. All elements together would take ``bytes_of_elements``.

    A subclass defines ``_block``. Everything else follows from it piece by piece; a subclass may
    override other methods where its structure allows something cheaper. With ``makes_blocks``,
    results of ``_block`` are new tensors each time.
    """

    makes_blocks: ClassVar[bool] = False

    def __init__(
        self,
        batch_size: int,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        eps: float | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.eps = torch.finfo(dtype).eps if eps is None else eps
        self._piece_bytes = PIECE_BYTES if device.type == "cpu" else DEVICE_PIECE_BYTES
        self._held: tuple[Tensor | None, ...] = ()
        self._seen: list[int] = []
        self._kept: dict[str, Tensor] = {}
        self._rows = self.shape[0] if self.shape else 1
        self._columns = math.prod(self.shape[1:])
        self._noise = (ROUNDINGS * self.eps) ** 2
        """Bound for ‖gₙ − ḡ‖²/‖ḡ‖² that comes from rounding alone."""
        self.bytes_of_elements = batch_size * self._rows * self._columns * dtype.itemsize

    @property
    def device(self) -> torch.device:
        """Where its tensors are, also after another process has sent them."""
        return self._tensors[0].device

    def __repr__(self) -> str:
        shape = [self.batch_size, *self.shape]
        return f"{type(self).__name__}({shape}, dtype={self.dtype}, device='{self.device}')"

    @final
    def hold(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Keep references to the gradients that the operator is made of, as they are now.

        Autograd makes a gradient that has the parameter's shape, and no other references, its own
        ``grad``, which the user may change. Other changes show in ``is_unchanged``.
        """
        elements = self.shape.numel()
        if any(each is not None and each.numel() == elements for each in gradients):
            self._held = gradients
        self._seen = versions(self._tensors)

    @property
    def is_unchanged(self) -> bool:
        """Whether no tensor has changed in place since ``hold`` was called.

        A model's input may be overwritten by the next one, and a backward function of the user's
        own may write into the gradient that it gets.
        """
        return not self._seen or versions(self._tensors) == self._seen

    @final
    def some(self, samples: Tensor) -> GradientOperator:
        """gₙ of some samples, by their ascending indices ``[n]``; nothing else is kept."""
        found = copy.copy(self)
        found._keep_only(samples)
        found.batch_size, found._held, found._kept, found._seen = len(samples), (), {}, []
        found.bytes_of_elements = len(samples) * self._rows * self._columns * self.dtype.itemsize
        return found

    @final
    def copied(self) -> GradientOperator:
        """The same gradients, in memory of their own."""
        return self.some(torch.arange(self.batch_size, device=self.device))

    @final
    def forget(self) -> None:
        """Free what several results need, which is kept from when it is first computed."""
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Memory of the tensors that the operator is made of."""
        sizes = dict[int, int]()
        for tensor in self._tensors:
            number, size = storage_number(tensor), tensor.numel() * tensor.dtype.itemsize
            # A view may have fewer elements than its memory, and an expanded tensor has more.
            most = tensor.untyped_storage().nbytes()
            sizes[number] = min(sizes.get(number, 0) + size, most)
        return sum(sizes.values())

    # Results; subclasses override those that take less than all elements.

    def squared_norms(self) -> Tensor:
        """‖gₙ‖² of every sample, ``[N]``."""
        squared_norms = self._double_zeros(self.batch_size)
        for samples, rows in self._partition():
            norms = row_norms(self._block(samples, rows).flatten(1))
            squared_norms[samples] += double(norms).square()
        return squared_norms

    @final
    def norms(self) -> Tensor:
        """‖gₙ‖ of every sample, ``[N]``."""
        return self.squared_norms().sqrt()

    @final
    def gram(self, other: GradientOperator | None = None, max_bytes: int | None = None) -> Tensor:
        """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``, from at most ``max_bytes`` at once.

        With an ``other`` operator, of M samples' gradients of the same parameter in another batch,
        each pair has one of them, ``[N, M]``.
        """
        if not isinstance(other, GradientOperator | None):
            raise TypeError(f"other is a {type(other).__name__}: pass an operator, such as g[name]")
        if other is not None and other.shape != self.shape:
            raise ValueError(
                f"the other gradients are of a parameter of shape {list(other.shape)}, and these "
                f"of one of {list(self.shape)}: pass those of the same parameter"
            )
        return self._gram(self if other is None else other, max_bytes)

    def _gram(self, other: GradientOperator, max_bytes: int | None = None) -> Tensor:
        """⟨gₙ, gₘ⟩ with each of the other's gₘ, which may be the same, in float64 ``[N, M]``."""
        batches = [self] if other is self else [self, other]
        dtype = torch.promote_types(self.dtype, other.dtype)
        gram = self._double_zeros(self.batch_size, other.batch_size)
        gradients = sum(each.batch_size for each in batches)
        bytes_per_row = max(gradients * self._columns * dtype.itemsize, 1)
        for rows in slices(self._rows, (max_bytes or self._piece_bytes) // bytes_per_row):
            blocks = [each._rows_of(slice(0, each.batch_size), rows) for each in batches]
            flat = [block.flatten(1).to(self.device, dtype) for block in blocks]
            gram += whole_range(products_of_pairs, *flat)
        return gram

    def centred_gram(self) -> Tensor:
        """⟨gₙ − ḡ, gₘ − ḡ⟩ of every pair of samples, ``[N, N]``."""
        centre = self._centre()
        gram = self._double_zeros(self.batch_size, self.batch_size)
        bytes_per_row = max(self.batch_size * self._columns * self.dtype.itemsize, 1)
        for rows in slices(self._rows, self._piece_bytes // bytes_per_row):
            block = self._rows_of(slice(0, self.batch_size), rows).flatten(1)
            for _, apart in apart_from(block, centre[rows].flatten()):
                gram += whole_range(products_of_pairs, apart)
        return centred(gram)

    @final
    def dot(self, direction: Tensor) -> Tensor:
        """⟨gₙ, direction⟩ of every sample, ``[N]``; ``direction`` has shape ``[*P]``."""
        if direction.shape != self.shape:
            raise ValueError(
                f"the direction has shape {list(direction.shape)}, the parameter has "
                f"{list(self.shape)}: pass one number per parameter element"
            )
        return self._dot(direction.detach() if direction.requires_grad else direction)

    def _dot(self, direction: Tensor) -> Tensor:
        """``dot`` in float64, where products of small numbers would vanish."""
        size = scale_of(direction)
        matrix = (direction / size).to(self.dtype).reshape(self._rows, self._columns)
        found = self._zeros(self.batch_size)
        for samples, rows in self._partition():
            found[samples] += dots(self._block(samples, rows).flatten(1), matrix[rows].flatten())
        return double(found) * size

    def sum(self) -> Tensor:
        """Σₙ gₙ, ``[*P]``."""
        total = self._zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            total[rows] += self._block(samples, rows).sum(0)
        return total.reshape(self.shape)

    @final
    def mean(self) -> Tensor:
        """ḡ = (1/N)·Σₙ gₙ, ``[*P]``."""
        return self.sum() / self.batch_size

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σₙ wₙ gₙ with weights ``[N]``, ``[*P]``."""
        total = self._zeros(self._rows, self._columns)
        weights = weights.detach().to(self.device, self.dtype)
        for samples, rows in self._partition():
            total[rows] += torch.tensordot(weights[samples], self._block(samples, rows), 1)
        return total.reshape(self.shape)

    def sum_of_squares(self) -> Tensor:
        """Σₙ gₙ² for each element, ``[*P]``."""
        return self._squares_about(self._zeros(self._rows, self._columns))

    def deviations(self) -> SampleDeviations:
        """‖gₙ − ḡ‖² and ⟨gₙ − ḡ, ḡ⟩ of every sample, and ‖ḡ‖².

        About the mean as it is rounded, which is closer than what rounding in gₙ is.
        """
        return self._deviations_about(self._centre())

    @final
    def deviations_about(self, mean: Tensor) -> SampleDeviations:
        """The same about another ḡ ``[*P]``: that of a batch that these samples are a part of."""
        return self._deviations_about(
            mean.detach().to(self.dtype).reshape(self._rows, self._columns)
        )

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        """With c ``[R, K]`` in place of the mean."""
        found: list[tuple[slice, SampleDeviations]] = []
        for samples, rows in self._partition():
            block = self._block(samples, rows).flatten(1)
            found.append((samples, deviations_from(block, centre[rows].flatten(), self._noise)))
        if len(found) == 1:
            return found[0][1]
        squared_norms, along = (self._double_zeros(self.batch_size) for _ in range(2))
        for samples, part in found:
            squared_norms[samples] += part.squared_norms
            along[samples] += part.dots
        # Without samples, no part has bounds.
        bounds = coarsest((0.0, 0.0, 0.0), *(part.bounds for _, part in found))
        return SampleDeviations(squared_norms, along, double(norm(centre)).square(), bounds)

    def element_deviations(self) -> ElementDeviations:
        """ḡ and Σₙ(gₙ − ḡ)² for each element, ``[*P]``."""
        centre = self._centre()
        return self._element_deviations(centre, self._squares_about(centre))

    @final
    def _element_deviations(self, mean: Tensor, squares: Tensor) -> ElementDeviations:
        """Of a mean and squares with as many elements as the parameter."""
        mean = mean.reshape(self.shape)
        noise = max(self._noise, ROUNDINGS * torch.finfo(mean.dtype).eps)
        return ElementDeviations(mean, squares.reshape(self.shape), noise)

    @final
    def _element_deviations_by_sums(self, total: Tensor, squares: Tensor) -> ElementDeviations:
        """From Σₙgₙ and Σₙgₙ² in float64 ``[R, K]``, which are overwritten."""
        squares.addcmul_(total, total, value=-1 / max(self.batch_size, 1)).clamp_(min=0)
        return self._element_deviations(total.div_(self.batch_size), squares)

    @final
    def _squares_about(self, centre: Tensor) -> Tensor:
        """Σₙ(gₙ − c)² with c ``[R, K]``, in float64 ``[*P]``."""
        total = self._double_zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            squares = total[rows].view(-1)
            block = self._block(samples, rows).flatten(1)
            for part, apart in apart_from(block, centre[rows].flatten()):
                squares[part] += whole_range(lambda rows: rows.square().sum(0), apart)
        return total.reshape(self.shape)

    @final
    def pieces(self, max_bytes: int | None = None) -> Iterator[Piece]:
        """All elements of all gₙ, each once, in pieces of at most ``max_bytes`` of memory.

        One row of one sample is the smallest piece, however small ``max_bytes`` is.
        """
        for samples, rows in self._partition(max_bytes):
            block = self._block(samples, rows)
            values = block if self.makes_blocks else block.clone()
            kept = (rows.stop - rows.start, *self.shape[1:]) if self.shape else ()
            yield Piece(samples, rows, values.reshape(len(values), *kept))

    @final
    def dense(self, out: Tensor | None = None) -> Tensor:
        """gₙ themselves, ``[N, *P]``: N times the parameter's memory, or that of ``out``."""
        shape = (self.batch_size, *self.shape)
        if self.makes_blocks and out is None and self._is_one_piece:
            block = self._block(slice(0, self.batch_size), slice(0, self._rows))
            return block if block.shape == shape else block.view(shape)
        dense = torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out
        self._write(dense.view(self.batch_size, self._rows, self._columns))
        return dense

    def abs_max(self) -> Tensor:
        """The largest absolute value of any element of any gₙ, a scalar; NaN if there is one."""
        largest = [torch.zeros((), dtype=self.dtype, device=self.device)]
        for samples, rows in self._partition():
            block = self._block(samples, rows)
            if block.numel():
                largest.append(block.abs().amax())
        return torch.stack(largest).amax()

    @final
    def histogram_1d(self, bins: int, range_: Range, max_bytes: int | None = None) -> Counts:
        """Counts of the elements of all gₙ in equal bins.

        Elements are computed in pieces of at most ``max_bytes`` of memory.
        """
        grid = grid_of(bins, range_, self.dtype, self.device)
        return Counts(self._tally(grid, None, max_bytes or self._piece_bytes))

    @final
    def histogram_2d(
        self,
        companions: Tensor,
        bins: tuple[int, int],
        range_: tuple[Range, Range],
        max_bytes: int | None = None,
    ) -> Counts:
        """Joint counts of the elements of all gₙ and of their ``companions`` ``[*P]``."""
        companions = comparable(companions.detach()).reshape(self._rows, self._columns)
        grid = grid_of(bins[0], range_[0], self.dtype, self.device)
        second = grid_of(bins[1], range_[1], companions.dtype, self.device)
        beside = Companions(second.compact_cells(companions), second.size)
        return Counts(self._tally(grid, beside, max_bytes or self._piece_bytes))

    def _tally(self, grid: Grid, beside: Companions | None, max_bytes: int) -> Tensor:
        """Counts by ``grid``'s cells, and by those of companions ``[R, K]``."""
        tables = [
            tally(self._block(samples, rows), grid, None if beside is None else beside[rows])
            for samples, rows in self._partition(max_bytes)
        ]
        if len(tables) == 1:
            return tables[0]
        return sum(tables, start=grid.zeros(self.device, beside))

    # What results are computed from.

    @property
    @abstractmethod
    def _tensors(self) -> Sequence[Tensor]:
        """The tensors that the gradients are computed from."""

    @abstractmethod
    def _block(self, samples: slice, rows: slice) -> Tensor:
        """Some samples' gradients with respect to some rows, ``[n, r, K]``."""

    def _add_block(self, block: Tensor, samples: slice, rows: slice) -> None:
        """Add what ``_block`` returns to a tensor."""
        block += self._block(samples, rows)

    def _write(self, to: Tensor) -> None:
        """Write all gradients to a tensor ``[N, R, K]``."""
        for samples, rows in self._partition():
            to[samples, rows] = self._block(samples, rows)

    @abstractmethod
    def _keep_only(self, samples: Tensor) -> None:
        """Keep some samples alone; called on a new copy, whose tensors aren't written to."""

    @property
    def is_worth_storing(self) -> bool:
        """Whether storing all elements pays for more than one result."""
        return True

    def _workspace(self) -> int:
        """Elements of temporary memory that ``_block`` needs for each sample beyond its result."""
        return 0

    @final
    def _centre(self) -> Tensor:
        """ḡ, ``[R, K]``, kept until ``forget``; not to be written to."""
        if "centre" not in self._kept:
            total = self.sum() / max(self.batch_size, 1)
            self._kept["centre"] = total.reshape(self._rows, self._columns)
        return self._kept["centre"]

    @final
    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @final
    def _double_zeros(self, *shape: int) -> Tensor:
        return double(torch.zeros(shape, device=self.device))

    @final
    def _rows_of(self, samples: slice, rows: slice) -> Tensor:
        """As ``_block``, with the workspace bounded."""
        per_sample = max(self._workspace() * self.dtype.itemsize, 1)
        parts = slices(samples.stop - samples.start, self._piece_bytes // per_sample) or [
            slice(0, 0)
        ]
        shifted = [slice(samples.start + p.start, samples.start + p.stop) for p in parts]
        blocks = [self._block(part, rows) for part in shifted]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    @property
    def _is_one_piece(self) -> bool:
        """Whether all elements can be computed at once."""
        workspace = self._workspace() * self.batch_size * self.dtype.itemsize
        return 0 < self.bytes_of_elements + workspace <= self._piece_bytes

    @final
    def _partition(self, max_bytes: int | None = None) -> Iterator[tuple[slice, slice]]:
        """Slices of samples and rows whose blocks fit into ``max_bytes``."""
        max_bytes = self._piece_bytes if max_bytes is None else max_bytes
        size = self.dtype.itemsize
        row_bytes = max(self._columns * size, 1)
        workspace = self._workspace() * size
        sample_bytes = max(self._rows * row_bytes + workspace, 1)
        if sample_bytes <= max_bytes:
            yield from (
                (samples, slice(0, self._rows))
                for samples in slices(self.batch_size, max_bytes // sample_bytes)
            )
            return
        # A workspace that alone is too large would be needed again for each slice of rows.
        rows_at_once = max(max_bytes - workspace, max_bytes // 2) // row_bytes
        for sample in range(self.batch_size):
            for rows in slices(self._rows, rows_at_once):
                yield slice(sample, sample + 1), rows


def centred(gram: Tensor) -> Tensor:
    """The Gram matrix ``[N, N]`` of vectors less their mean."""
    return gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()


def slices(length: int, step: int) -> list[slice]:
    """Consecutive slices that cover ``range(length)``, ``step`` (at least one) long each."""
    step = max(int(step), 1)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
