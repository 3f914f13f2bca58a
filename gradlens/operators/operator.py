"""The interface of structured per-sample gradients.

Throughout, a parameter of shape ``P`` is taken as a matrix of R rows (its first axis) and K columns
(all other axes together); scalars and vectors have K = 1.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    CLEAR,
    FAR,
    ROUNDINGS,
    ElementDeviations,
    SampleDeviations,
    apart_from,
    coarsest,
    deviations_from,
    parts_of,
)
from gradlens.numerics.histograms import (
    Counts,
    Grid,
    JointTally,
    Range,
    comparable,
    grid_of,
    tally_1d,
)
from gradlens.numerics.norms import (
    dots,
    norm,
    products_of_pairs,
    row_norms,
    scale_of,
    sums_of_squares,
    whole_range,
)
from gradlens.numerics.precision import double
from gradlens.torch_private import storage_number, versions

PIECE_BYTES = 16 * 2**20
"""Default bound of the memory of one piece on a processor, whose caches hold less than larger ones.

A result takes a few times as much for the time that it is computed.
"""

DEVICE_PIECE_BYTES = 128 * 2**20
"""The same on devices, where each operation that is launched takes as long as its many elements.

On an H100, all per-sample gradients of a ResNet-14 in pieces of 16 MiB took ten plain steps.
"""


KEPT_PAIRS = 1024
"""The most samples whose Gram matrix is kept for other results: it takes 8 MiB in float64."""


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
    loss; ``scale`` is this factor, so callers get no other scaling. Gradients and their sums are of
    the operator's ``dtype``: that of the factors, except that half precisions accumulate in
    float32. Squares and products are in float64, whose range they don't leave. ``eps`` is the
    relative rounding error of the factors, which is larger in half precisions. All elements
    together would take ``bytes_of_elements``.

    A subclass defines ``_block``. Everything else follows from it piece by piece; a subclass may
    override the other private methods where its structure allows something cheaper. They compute
    with unscaled gradients as ``[N, R, K]``. With ``makes_blocks``, results of ``_block`` are new
    tensors each time, and are scaled in place.
    """

    makes_blocks: ClassVar[bool] = False

    def __init__(
        self,
        batch_size: int,
        shape: torch.Size | tuple[int, ...],
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        eps: float | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.shape = torch.Size(shape)
        self.scale = scale
        self.dtype = dtype
        self.eps = torch.finfo(dtype).eps if eps is None else eps
        self.device = device
        self._piece_bytes = PIECE_BYTES if device.type == "cpu" else DEVICE_PIECE_BYTES
        self._held: tuple[Tensor | None, ...] = ()
        self._seen: list[int] = []
        self._kept: dict[str, Tensor] = {}
        self._rows = self.shape[0] if self.shape else 1
        self._columns = math.prod(self.shape[1:])
        self.bytes_of_elements = batch_size * self._rows * self._columns * dtype.itemsize

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

    @final
    def squared_norms(self) -> Tensor:
        """‖gₙ‖² of every sample, ``[N]``."""
        return times(self._squared_norms(), self.scale**2)

    @final
    def norms(self) -> Tensor:
        """‖gₙ‖ of every sample, ``[N]``."""
        return self.squared_norms().sqrt()

    @final
    def gram(self) -> Tensor:
        """⟨gₙ, gₘ⟩ of every pair of samples, ``[N, N]``."""
        return times(self._gram(), self.scale**2)

    @final
    def dot(self, direction: Tensor) -> Tensor:
        """⟨gₙ, direction⟩ of every sample, ``[N]``; ``direction`` has shape ``[*P]``."""
        if direction.shape != self.shape:
            raise ValueError(
                f"the direction has shape {list(direction.shape)}, the parameter has "
                f"{list(self.shape)}: pass one number per parameter element"
            )
        direction = direction.detach() if direction.requires_grad else direction
        return times(self._dot_in_range(direction), self.scale)

    @final
    def sum(self) -> Tensor:
        """Σₙ gₙ, ``[*P]``."""
        return self._sum_times(self.scale)

    @final
    def mean(self) -> Tensor:
        """ḡ = (1/N)·Σₙ gₙ, ``[*P]``."""
        return self._sum_times(self.scale / self.batch_size if self.batch_size else math.nan)

    @final
    def deviations(self) -> SampleDeviations:
        """‖gₙ − ḡ‖² and ⟨gₙ − ḡ, ḡ⟩ of every sample, and ‖ḡ‖²."""
        return self._complete(self._deviations())

    @final
    def deviations_about(self, mean: Tensor) -> SampleDeviations:
        """The same about another ḡ ``[*P]``: that of a batch that these samples are a part of."""
        centre = mean.detach().to(self.dtype).reshape(self._rows, self._columns)
        return self._complete(self._deviations_about(centre / self.scale))

    @final
    def _complete(self, found: SampleDeviations) -> SampleDeviations:
        return found.times(self.scale, self._noise)

    @final
    def element_deviations(self) -> ElementDeviations:
        """ḡ and Σₙ(gₙ − ḡ)² for each element, ``[*P]``."""
        centre, squares = self._element_deviations()
        noise = max(self._noise, ROUNDINGS * torch.finfo(centre.dtype).eps)
        found = ElementDeviations(self._shaped(centre), self._shaped(squares), noise)
        return found if self.scale == 1.0 else found.times(self.scale)

    @final
    def _shaped(self, matrix: Tensor) -> Tensor:
        """``[R, K]`` to ``[*P]``."""
        return matrix if matrix.shape == self.shape else matrix.reshape(self.shape)

    @final
    def centred_gram(self) -> Tensor:
        """⟨gₙ − ḡ, gₘ − ḡ⟩ of every pair of samples, ``[N, N]``."""
        return times(self._centred_gram(), self.scale**2)

    @final
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σₙ wₙ gₙ with weights ``[N]``, ``[*P]``."""
        total = self._weighted_sum(weights.detach().to(self.device, self.dtype))
        return (total * self.scale).reshape(self.shape)

    @final
    def sum_of_squares(self) -> Tensor:
        """Σₙ gₙ² for each element, ``[*P]``."""
        return (self._sum_of_squares() * self.scale**2).reshape(self.shape)

    @final
    def pieces(self, max_bytes: int | None = None) -> Iterator[Piece]:
        """All elements of all gₙ, each once, in pieces of at most ``max_bytes`` of memory.

        One row of one sample is the smallest piece, however small ``max_bytes`` is.
        """
        for samples, rows in self._partition(max_bytes):
            values = self._block(samples, rows) * self.scale
            kept = (rows.stop - rows.start, *self.shape[1:]) if self.shape else ()
            yield Piece(samples, rows, values.reshape(len(values), *kept))

    @final
    def dense(self, out: Tensor | None = None) -> Tensor:
        """gₙ themselves, ``[N, *P]``: N times the parameter's memory, or that of ``out``."""
        shape = (self.batch_size, *self.shape)
        if self.makes_blocks and out is None and self._is_one_piece:
            everyone, rows = slice(0, self.batch_size), slice(0, self._rows)
            return self._scaled(self._block(everyone, rows)).view(shape)
        dense = torch.empty(shape, dtype=self.dtype, device=self.device) if out is None else out
        self._write(dense.view(self.batch_size, self._rows, self._columns))
        return dense

    @final
    def abs_max(self) -> Tensor:
        """The largest absolute value of any element of any gₙ, a scalar; NaN if there is one."""
        return self._abs_max()

    @final
    def histogram_1d(self, bins: int, range_: Range, max_bytes: int | None = None) -> Counts:
        """Counts of the elements of all gₙ in equal bins.

        Elements are computed in pieces of at most ``max_bytes`` of memory.
        """
        grid = grid_of(bins, range_, self.dtype, self.device)
        return Counts(self._tally_1d(grid, max_bytes or self._piece_bytes))

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
        cells = second.compact_cells(companions)
        return Counts(self._tally_2d(grid, cells, second.size, max_bytes or self._piece_bytes))

    # Defined, or overridden, by subclasses.

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
        """Write all gradients, scaled, to a tensor ``[N, R, K]``."""
        for samples, rows in self._partition():
            torch.mul(self._block(samples, rows), self.scale, out=to[samples, rows])

    @abstractmethod
    def _keep_only(self, samples: Tensor) -> None:
        """Keep some samples alone; called on a new copy, whose tensors aren't written to."""

    @property
    def elementwise(self) -> bool:
        """Whether results take all elements, rather than what they are computed from."""
        return True

    @property
    def is_worth_storing(self) -> bool:
        """Whether storing all elements pays for more than one result."""
        return self.elementwise

    def _workspace(self) -> int:
        """Elements of temporary memory that ``_block`` needs for each sample beyond its result."""
        return 0

    def _squared_norms(self) -> Tensor:
        squared_norms = self._double_zeros(self.batch_size)
        for samples, rows in self._partition():
            norms = row_norms(self._block(samples, rows).flatten(1))
            squared_norms[samples] += double(norms).square()
        return squared_norms

    def _gram(self) -> Tensor:
        gram = self._double_zeros(self.batch_size, self.batch_size)
        for _, block in self._blocks_of_rows():
            gram += whole_range(block, products_of_pairs)
        return gram

    def _centred_gram(self) -> Tensor:
        centre = self._centre()
        found = self._centred_by_few_passes(centre) if self.device.type == "cpu" else None
        gram, along = found or self._products_about(centre)
        return self._keep_centred_gram(gram, along)

    @final
    def _keep_centred_gram(self, gram: Tensor, along: Tensor) -> Tensor:
        """⟨gₙ − ḡ, gₘ − ḡ⟩ ``[N, N]``, kept with ⟨gₙ − ḡ, ḡ⟩ ``[N]`` for ``_deviations``."""
        if self.batch_size <= KEPT_PAIRS:
            self._kept |= {"centred gram": gram, "dots with mean": along}
        return gram

    @final
    def _centred_by_few_passes(self, centre: Tensor) -> tuple[Tensor, Tensor] | None:
        """As ``_products_about``, from ⟨gₙ, gₘ⟩; ``None`` where these are not precise enough."""
        gram, with_centre = self._gram_and_dots(centre)
        apart = centred(gram)
        if not FAR * float(gram.trace()) < float(apart.trace()) < math.inf:
            return None
        return apart, with_centre - double(norm(centre)).square()

    @final
    def _gram_and_dots(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """⟨gₙ, gₘ⟩ ``[N, N]`` and ⟨gₙ, c⟩ ``[N]`` with c ``[R, K]``, in float64."""
        gram, along = (self._double_zeros(*[self.batch_size] * axes) for axes in (2, 1))
        unit = scale_of(centre)
        for rows, block in self._blocks_of_rows():
            gram += whole_range(block, products_of_pairs)
            along += double(dots(block, (centre[rows] / unit).flatten()))
        return gram, along * unit

    @final
    def _products_about(self, centre: Tensor) -> tuple[Tensor, Tensor]:
        """⟨gₙ − ḡ, gₘ − ḡ⟩ ``[N, N]`` and ⟨gₙ − ḡ, ḡ⟩ ``[N]`` with ḡ ``[R, K]``, in float64."""
        gram, along = (self._double_zeros(*[self.batch_size] * axes) for axes in (2, 1))
        unit = scale_of(centre)
        for rows, block in self._blocks_of_rows():
            own = centre[rows].flatten()
            for part, apart in apart_from(block, own):
                gram += whole_range(apart, products_of_pairs)
                along += double(dots(apart, own[part] / unit))
        return centred(gram), along * unit

    @final
    def _blocks_of_rows(self) -> Iterator[tuple[slice, Tensor]]:
        """Rows that fit into a piece, and their gradients ``[N, r·K]`` of all samples."""
        bytes_per_row = self.batch_size * self._columns * self.dtype.itemsize
        for rows in slices(self._rows, self._piece_bytes // max(bytes_per_row, 1)):
            yield rows, self._rows_of(slice(0, self.batch_size), rows).flatten(1)

    def _deviations(self) -> SampleDeviations:
        """About the mean as it is rounded, which is closer than what rounding in gₙ is."""
        if "centred gram" not in self._kept:
            return self._deviations_of_elements(self._centre())
        squared_norms, along = self._kept["centred gram"].diagonal(), self._kept["dots with mean"]
        squared_mean = double(norm(self._centre())).square()
        # Twice that of squares that are added up in parts: a processor's library adds up more.
        rounding = 2 * ROUNDINGS * torch.finfo(self.dtype).eps
        return SampleDeviations(squared_norms, along, squared_mean, of_sum=rounding)

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        """With c ``[R, K]`` in place of the mean."""
        return self._deviations_of_elements(centre)

    @final
    def _deviations_of_elements(self, centre: Tensor) -> SampleDeviations:
        found: list[tuple[slice, SampleDeviations]] = []
        for samples, rows in self._partition():
            block = self._block(samples, rows).flatten(1)
            found.append((samples, deviations_from(block, centre[rows].flatten())))
        if len(found) == 1:
            return found[0][1]
        squared_norms, along = (self._double_zeros(self.batch_size) for _ in range(2))
        for samples, part in found:
            squared_norms[samples] += part.squared_norms
            along[samples] += part.dots
        squared_mean, bounds = double(norm(centre)).square(), coarsest([each for _, each in found])
        return SampleDeviations(squared_norms, along, squared_mean, *bounds)

    def _element_deviations(self) -> tuple[Tensor, Tensor]:
        """ḡ, and a new tensor of Σₙ(gₙ − ḡ)² for each element; unscaled, ``[R, K]``."""
        centre = self._centre()
        found = self._squares_by_few_passes(centre) if self.device.type == "cpu" else None
        return centre, self._squares_about(centre) if found is None else found

    @final
    def _squares_by_few_passes(self, centre: Tensor) -> Tensor | None:
        """As ``_squares_about``, from Σₙgₙ²; ``None`` where these are not precise enough."""
        squares = self._zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            for part, block in parts_of(self._block(samples, rows).flatten(1)):
                own = whole_range(block, sums_of_squares)
                squares = squares.to(torch.promote_types(squares.dtype, own.dtype))
                squares[rows].view(-1)[part].add_(own)
        found = torch.addcmul(squares, *[centre.to(squares.dtype)] * 2, value=-self.batch_size)
        if not float(squares.mul_(-CLEAR).add_(found).amin()) >= 0:
            return None
        return found

    def _squares_about(self, centre: Tensor) -> Tensor:
        """Σₙ(gₙ − c)² with c ``[R, K]``, in float64 ``[R, K]``."""
        total = self._double_zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            squares = total[rows].view(-1)
            block = self._block(samples, rows).flatten(1)
            for part, apart in apart_from(block, centre[rows].flatten()):
                squares[part] += whole_range(apart, sums_of_squares)
        return total

    def _centre(self) -> Tensor:
        """ḡ, ``[R, K]``, unscaled; not to be written to."""
        return self._once("centre", lambda: self._sum() / max(self.batch_size, 1))

    @final
    def _once(self, what: str, compute: Callable[[], Tensor]) -> Tensor:
        """What several results need, kept until ``forget``; not to be written to."""
        if what not in self._kept:
            self._kept[what] = compute()
        return self._kept[what]

    @property
    def _noise(self) -> float:
        """Bound for ‖gₙ − ḡ‖²/‖ḡ‖² that comes from rounding alone."""
        return (ROUNDINGS * self.eps) ** 2

    @final
    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @final
    def _double_zeros(self, *shape: int) -> Tensor:
        return double(torch.zeros(shape, device=self.device))

    def _dot_in_range(self, direction: Tensor) -> Tensor:
        """⟨gₙ, direction⟩ in float64 ``[N]``, where products of small numbers would vanish."""
        size = scale_of(direction)
        matrix = (direction / size).to(self.dtype).reshape(self._rows, self._columns)
        return double(self._dot(matrix)) * size

    def _dot(self, matrix: Tensor) -> Tensor:
        dot = self._zeros(self.batch_size)
        for samples, rows in self._partition():
            dot[samples] += dots(self._block(samples, rows).flatten(1), matrix[rows].flatten())
        return dot

    def _sum(self) -> Tensor:
        total = self._zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            total[rows] += self._block(samples, rows).sum(0)
        return total

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._zeros(self._rows, self._columns)
        for samples, rows in self._partition():
            total[rows] += torch.tensordot(weights[samples], self._block(samples, rows), 1)
        return total

    def _sum_of_squares(self) -> Tensor:
        return self._squares_about(self._zeros(self._rows, self._columns))

    def _abs_max(self) -> Tensor:
        largest = [torch.zeros((), dtype=self.dtype, device=self.device)]
        for samples, rows in self._partition():
            block = self._scaled_block(samples, rows)
            if block.numel():
                largest.append(block.abs().amax())
        return torch.stack(largest).amax()

    def _tally_1d(self, grid: Grid, max_bytes: int) -> Tensor:
        """Counts by ``grid``'s cells."""
        blocks = (self._scaled_block(*piece) for piece in self._partition(max_bytes))
        tables = [tally_1d(block, grid) for block in blocks]
        empty = torch.zeros(grid.size, dtype=torch.int64, device=self.device)
        return sum(tables[1:], start=tables[0]) if tables else empty

    def _tally_2d(self, grid: Grid, companions: Tensor, size: int, max_bytes: int) -> Tensor:
        """Joint counts by ``grid``'s cells and ``companions`` ``[R, K]``, cells below ``size``."""
        tally = JointTally(companions, grid, size)
        for samples, rows in self._partition(max_bytes):
            tally.add(self._scaled_block(samples, rows), rows)
        return tally.table()

    # Shared by the above.

    def _scaled_block(self, samples: slice, rows: slice) -> Tensor:
        """As ``_block``, scaled; not to be written to."""
        return self._scaled(self._block(samples, rows))

    @final
    def _scaled(self, block: Tensor) -> Tensor:
        if self.scale == 1.0:
            return block
        return block.mul_(self.scale) if self.makes_blocks else block * self.scale

    @final
    def _sum_times(self, factor: float) -> Tensor:
        # Often 1, and one pass over memory takes as long as a part of the product.
        return self._shaped(times(self._sum(), factor))

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


def times(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times a factor, itself where that is one."""
    return tensor if factor == 1.0 else tensor * factor


def centred(gram: Tensor) -> Tensor:
    """The Gram matrix ``[N, N]`` of vectors less their mean."""
    return gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()


def slices(length: int, step: int) -> list[slice]:
    """Consecutive slices that cover ``range(length)``, ``step`` (at least one) long each."""
    step = max(int(step), 1)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
