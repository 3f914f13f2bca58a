"""Weights of linear layers: gₙ = Σₛ δₙₛ xₙₛᵀ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradlens.numerics.deviations import (
    CLEAR,
    SampleDeviations,
    about_by_products,
    by_imprecise_products,
    by_products,
    less_mean,
)
from gradlens.numerics.histograms import CHUNK, Grid, add_weights, count, negative, positive
from gradlens.numerics.norms import (
    MODERATE,
    norm,
    products_of_pairs,
    products_of_positions,
    scale_of,
    whole_range,
)
from gradlens.numerics.precision import SMALL, accumulable, double, widest
from gradlens.operators.large_products import Tail
from gradlens.operators.operator import (
    KEPT_PAIRS,
    GradientOperator,
    centred,
    slices,
)

MOST = 0.4
"""The share of elements in a tail above which sorting them apart doesn't pay."""


AT_ONCE = 2**17
"""Elements of a tail that are binned at once.

Measured on two cores: with 2**19, the system's memory allocator returned pages in between, and
binning took three times as long; with fewer, calls took longer.
"""


PER_ELEMENT = 12
"""Products for each element of a gradient that take as long as a pass over the elements.

Measured on one core.
"""


class OuterProduct(GradientOperator):
    """gₙ = δₙ xₙᵀ with output gradients δ ``[N, R]`` and inputs x ``[N, K]``.

    Norms and products need the factors alone (Goodfellow, 2015, arXiv:1510.01799).
    """

    makes_blocks = True
    few = CHUNK
    """Elements up to which all are binned: in the cache, that takes half of the time of sorting."""

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float = 1.0) -> None:
        self._delta, self._inputs, eps = same_precision(delta, inputs)
        shape = (delta.shape[1], inputs.shape[1])
        super().__init__(len(delta), shape, scale, self._delta.dtype, delta.device, eps)

    def factors(self) -> tuple[Tensor, Tensor]:
        """δ and x, ``[N, 1, R]`` and ``[N, 1, K]``."""
        return self._delta[:, None], self._inputs[:, None]

    def transposed(self) -> OuterProduct:
        """The operator of gₙᵀ."""
        return OuterProduct(self._inputs, self._delta, self.scale)

    @property
    def elementwise(self) -> bool:
        return False

    @property
    def is_worth_storing(self) -> bool:
        # Results of few elements take fewer calls than those of the factors.
        return self.batch_size * self._rows * self._columns <= SMALL

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._delta[samples, rows, None] * self._inputs[samples, None, :]

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._delta, self._inputs

    def _keep_only(self, samples: Tensor) -> None:
        self._delta, self._inputs = self._delta[samples], self._inputs[samples]

    def _squared_norms(self) -> Tensor:
        factors, dtype = (self._delta, self._inputs), widest(self.device)
        norms = [torch.linalg.vector_norm(factor, dim=1, dtype=dtype) for factor in factors]
        return norms[0].mul_(norms[1]).square_()

    def _gram(self) -> Tensor:
        if self.batch_size > KEPT_PAIRS:
            return self._products_of_pairs()
        return self._once("gram", self._products_of_pairs)

    def _products_of_pairs(self) -> Tensor:
        delta, inputs = double(self._delta), double(self._inputs)
        return (delta @ delta.T) * (inputs @ inputs.T)

    def _centred_gram(self) -> Tensor:
        return centred(self._gram())

    def _deviations(self) -> SampleDeviations:
        if not by_gram_matrix(self, 1):
            return super()._deviations()
        if self.batch_size > KEPT_PAIRS:
            return deviations_of_gram(gram_of_factors(*self.factors(), self._piece_bytes))
        found = None if "gram" in self._kept else self._deviations_in_own_precision()
        return found or deviations_of_gram([self._gram()])

    def _deviations_in_own_precision(self) -> SampleDeviations | None:
        """With ⟨gₙ, gₘ⟩ in float32; ``None`` where that is not precise enough."""
        if self.device.type != "cpu" or self.dtype == torch.float64:
            return None
        factors = self._delta, self._inputs
        pairs = [double(whole_range(factor, products_of_pairs)) for factor in factors]
        with_mean = (pairs[0] * pairs[1]).mean(1)
        # In contrast to ``_squared_norms``, without copies of the factors in float64.
        norms = [torch.linalg.vector_norm(factor, dim=1, dtype=torch.float64) for factor in factors]
        squared_norms, eps = (norms[0] * norms[1]).square_(), torch.finfo(self.dtype).eps
        return by_imprecise_products(squared_norms, with_mean, float(with_mean.mean()), eps)

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        with_centre = torch.linalg.vecdot(
            double(self._delta) @ double(centre), double(self._inputs)
        )
        return about_by_products(self._squared_norms(), with_centre, norm(double(centre)).square())

    def _dot_in_range(self, direction: Tensor) -> Tensor:
        # The factors are smaller than the matrix.
        size = scale_of(self._delta)
        rows = (self._delta / size) @ direction.to(self.dtype)
        return double(torch.linalg.vecdot(rows, self._inputs)) * size

    def _dot(self, matrix: Tensor) -> Tensor:
        return torch.linalg.vecdot(self._delta @ matrix, self._inputs)

    def _sum(self) -> Tensor:
        return self._delta.T @ self._inputs

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        return (self._delta * weights[:, None]).T @ self._inputs

    def _sum_of_squares(self) -> Tensor:
        return double(self._delta).square().T @ double(self._inputs).square()

    def _element_deviations(self) -> tuple[Tensor, Tensor]:
        if self.device.type not in ("cpu", "mps"):
            # In float64 at once, since asking whether float32 is enough would wait for the device.
            return self._precise_element_deviations()
        n, sizes = self.batch_size, (scale_of(self._delta), scale_of(self._inputs))
        delta, inputs = self._delta / sizes[0], self._inputs / sizes[1]
        squares, total = delta.square().T @ inputs.square(), delta.T @ inputs
        found = torch.addcmul(squares, total, total, value=-1 / n)
        centre = total.mul_(sizes[0]).mul_(sizes[1] / n)
        least = squares.mul_(-CLEAR).add_(found).amin()
        known = [double(sizes[0]) * double(sizes[1]), double(least)]
        unit, smallest = torch.stack(known).tolist()
        if not smallest >= 0:
            return centre, self._precise_element_deviations()[1]
        if not 1 / MODERATE < unit < MODERATE:
            found = double(found)
        return centre, found.mul_(unit**2)

    def _precise_element_deviations(self) -> tuple[Tensor, Tensor]:
        total, n = double(self._delta).T @ double(self._inputs), self.batch_size
        return (total / n).to(self.dtype), less_mean(self._sum_of_squares(), total, n)

    def _abs_max(self) -> Tensor:
        if not self._delta.numel() or not self._inputs.numel():
            return super()._abs_max()
        large, small = _extremes(self._delta)
        other_large, other_small = _extremes(self._inputs)
        # Rounding keeps order. Zero times infinity is NaN, which shows in the small products.
        products = torch.cat([large * other_large, large * other_small, small * other_large])
        return (products * abs(self.scale)).amax()

    def _tally_1d(self, grid: Grid, max_bytes: int) -> Tensor:
        if not self._may_be_sorted:
            return super()._tally_1d(grid, max_bytes)
        tail = self._tail(grid)
        if tail.at_most > MOST * self._elements:
            return super()._tally_1d(grid, self._in_cache(max_bytes))
        table = torch.zeros(grid.size, dtype=torch.int64, device=self.device)
        number = sum(int(d.sum(1).long() @ x.sum(1).long()) for d, x in self._opposites())
        table[grid.zero] += self._elements - number
        table[grid.negative] += number
        for block in tail.blocks(min(max_bytes // self.dtype.itemsize, AT_ONCE)):
            counts = count(grid.cells(block.values()), grid.size)
            opposites = counts[: grid.zero] if tail.keeps_signs else block.opposite()
            number = int(opposites.sum())
            table += counts
            table[grid.zero] -= block.number - number
            table[grid.negative] -= number
        return table

    def _tally_2d(self, grid: Grid, companions: Tensor, size: int, max_bytes: int) -> Tensor:
        if not self._may_be_sorted:
            return super()._tally_2d(grid, companions, size, max_bytes)
        tail = self._tail(grid)
        if tail.at_most > MOST * self._elements:
            return super()._tally_2d(grid, companions, size, self._in_cache(max_bytes))
        table = torch.zeros(grid.size, size, dtype=torch.int64, device=self.device)
        delta, inputs = (torch.cat(signs) for signs in zip(*self._opposites(), strict=True))
        # Half a chunk, since cells and weights are copied to integers of eight bytes.
        at_once = min(CHUNK // 2, max_bytes // (2 * self.dtype.itemsize + 16))
        for rows in slices(self._rows, at_once // self._columns):
            add_weights(table[grid.negative], companions[rows], delta[:, rows].T @ inputs)
        companions = companions.flatten()
        table[grid.zero] += self.batch_size * count(companions, size) - table[grid.negative]
        for block in tail.blocks(min(max_bytes // self.dtype.itemsize, AT_ONCE)):
            index = block.column() + block.row[:, None] * self._columns
            others = companions.index_select(0, index.flatten()).view_as(index)
            counts = grid.joint_counts(block.values(), others, size)
            if tail.keeps_signs:
                opposites = counts[: grid.zero].sum(0)
            else:
                opposites = count(others[block.opposite() > 0], size)
            table += counts
            table[grid.zero] -= counts.sum(0) - opposites
            table[grid.negative] -= opposites
        return table

    def _opposites(self) -> list[tuple[Tensor, Tensor]]:
        """Where δ is positive and where x is negative, and the other way round; as ones.

        A pair is left out if there are no such elements, as where no input is negative behind a
        ReLU, but one pair is always given.
        """
        delta, inputs = self._delta, self._inputs
        lowest, highest = map(float, torch.aminmax(delta))
        other_lowest, other_highest = map(float, torch.aminmax(inputs))
        found = []
        # If an extreme is NaN, comparisons are false, and the factor may have both signs.
        if not (highest <= 0 or other_lowest >= 0):
            found.append((positive(delta), negative(inputs)))
        if not (lowest >= 0 or other_highest <= 0):
            found.append((negative(delta), positive(inputs)))
        return found or [(positive(delta), negative(inputs))]

    @property
    def _may_be_sorted(self) -> bool:
        """Whether finding the large elements may be cheaper than binning all.

        On another device than the processor, they would have to be waited for.
        """
        return self.device.type == "cpu" and self._elements > self.few

    def _tail(self, grid: Grid) -> Tail:
        """All elements but those whose cell follows from their factors' signs."""
        return Tail(self._delta, self._inputs, self.scale, grid.centre)

    @property
    def _elements(self) -> int:
        return self.batch_size * self._rows * self._columns

    def _in_cache(self, max_bytes: int) -> int:
        return min(max_bytes, CHUNK * self.dtype.itemsize)


class SumOfOuterProducts(GradientOperator):
    """gₙ = Σₛ δₙₛ xₙₛᵀ with δ ``[N, S, R]`` and x ``[N, S, K]``, S positions in a sequence.

    Norms and the Gram matrix go through the positions' own Gram matrices where those are smaller
    than the gradients (Li et al., 2022, arXiv:2110.05679, section 4).
    """

    makes_blocks = True

    def __init__(self, delta: Tensor, inputs: Tensor, scale: float = 1.0) -> None:
        self._delta, self._inputs, eps = same_precision(delta, inputs)
        self._positions = delta.shape[1]
        shape = (delta.shape[2], inputs.shape[2])
        super().__init__(len(delta), shape, scale, self._delta.dtype, delta.device, eps)

    def factors(self) -> tuple[Tensor, Tensor]:
        """δ and x, ``[N, S, R]`` and ``[N, S, K]``."""
        return self._delta, self._inputs

    def transposed(self) -> SumOfOuterProducts:
        """The operator of gₙᵀ."""
        return SumOfOuterProducts(self._inputs, self._delta, self.scale)

    @property
    def elementwise(self) -> bool:
        return self._positions * (self._rows + self._columns) >= self._rows * self._columns

    @property
    def is_worth_storing(self) -> bool:
        # A projection, a mean and the elements themselves take a product for each position.
        return self.elementwise or self._positions >= PER_ELEMENT

    def _block(self, samples: slice, rows: slice) -> Tensor:
        return self._delta[samples, :, rows].mT @ self._inputs[samples]

    def _write(self, to: Tensor) -> None:
        write_products(to, self._delta.mT, self._inputs, self.scale)

    @property
    def _tensors(self) -> Sequence[Tensor]:
        return self._delta, self._inputs

    def _keep_only(self, samples: Tensor) -> None:
        self._delta, self._inputs = self._delta[samples], self._inputs[samples]

    def _squared_norms(self) -> Tensor:
        if not self._has_cheap_norms:
            return super()._squared_norms()
        bytes_per_sample = 2 * self._positions**2 * torch.float64.itemsize
        parts = [
            squared_norms_by_positions(self._delta[part], self._inputs[part])
            for part in slices(self.batch_size, self._piece_bytes // max(bytes_per_sample, 1))
        ]
        return torch.cat(parts)

    def _gram(self) -> Tensor:
        if not self._has_cheap_gram:
            return super()._gram()
        return torch.cat(list(gram_of_factors(self._delta, self._inputs, self._piece_bytes)))

    def _centred_gram(self) -> Tensor:
        return centred(self._gram()) if self._has_cheap_gram else super()._centred_gram()

    @property
    def _has_cheap_norms(self) -> bool:
        """Whether norms take fewer products through positions than through elements."""
        return self.batch_size > 0 and _are_cheaper(self._positions**2, self, self._positions)

    @property
    def _has_cheap_gram(self) -> bool:
        """Whether the Gram matrix takes fewer products through positions than through elements."""
        n, s = self.batch_size, self._positions
        through_positions = (n * s) ** 2 * (self._rows + self._columns)
        through_gradients = n * (s + n) * self._rows * self._columns
        return 0 < through_positions < through_gradients

    def _deviations(self) -> SampleDeviations:
        if not by_gram_matrix(self, self._positions):
            return super()._deviations()
        return deviations_of_gram(gram_of_factors(*self.factors(), self._piece_bytes))

    def _deviations_about(self, centre: Tensor) -> SampleDeviations:
        if not self._has_cheap_norms:
            return super()._deviations_about(centre)
        bytes_per_sample = 2 * self._positions**2 * torch.float64.itemsize
        squared_norms, with_centre = [], []
        for part in slices(self.batch_size, self._piece_bytes // max(bytes_per_sample, 1)):
            delta, inputs = double(self._delta[part]), double(self._inputs[part])
            squared_norms.append(squared_norms_by_positions(delta, inputs))
            products = (delta @ double(centre)).flatten(1)
            with_centre.append(torch.linalg.vecdot(products, inputs.flatten(1)))
        found = (torch.cat(squared_norms), torch.cat(with_centre))
        return about_by_products(*found, norm(double(centre)).square())

    def _dot_in_range(self, direction: Tensor) -> Tensor:
        size = scale_of(direction)
        products = self._zeros(self.batch_size * self._positions, self._columns)
        # In parts, since a copy of the matrix can be large.
        for rows in slices(
            self._rows, self._piece_bytes // max(self._columns * self.dtype.itemsize, 1)
        ):
            part = (direction[rows] / size).to(self.dtype)
            products.addmm_(self._delta[:, :, rows].flatten(0, 1), part)
        by_sample = products.view(self.batch_size, -1)
        return double(torch.linalg.vecdot(by_sample, self._inputs.flatten(1))) * size

    def _dot(self, matrix: Tensor) -> Tensor:
        return torch.linalg.vecdot((self._delta @ matrix).flatten(1), self._inputs.flatten(1))

    def _sum(self) -> Tensor:
        return self._delta.flatten(0, 1).T @ self._inputs.flatten(0, 1)

    def _weighted_sum(self, weights: Tensor) -> Tensor:
        delta = self._delta * weights[:, None, None]
        return delta.flatten(0, 1).T @ self._inputs.flatten(0, 1)


def write_products(to: Tensor, delta: Tensor, inputs: Tensor, scale: float) -> None:
    """Write scale·δₙ xₙ from δ ``[N, R, S]`` and x ``[N, S, K]`` to ``[N, R, K]``."""
    if scale != 1.0 and delta.shape[2] < inputs.shape[2]:
        delta, scale = delta * scale, 1.0  # which are fewer numbers than the products
    torch.bmm(delta, inputs, out=to)
    if scale != 1.0:
        to.mul_(scale)


def squared_norms_by_positions(delta: Tensor, inputs: Tensor) -> Tensor:
    """‖Σₛ δₙₛ xₙₛᵀ‖² from δ ``[N, S, R]`` and x ``[N, S, K]``, by their Gram matrices, ``[N]``."""
    pairs = (double(whole_range(each, products_of_positions)) for each in (delta, inputs))
    return torch.linalg.vecdot(*(products.flatten(1) for products in pairs))


def by_gram_matrix(gradients: GradientOperator, positions: int) -> bool:
    """Whether deviations by the Gram matrix of factors are cheaper than by the elements."""
    return _are_cheaper(gradients.batch_size * positions**2, gradients, positions)


def _are_cheaper(pairs: int, gradients: GradientOperator, positions: int) -> bool:
    """Whether products of so many pairs of factors for a sample are cheaper than its elements."""
    rows, columns = gradients.shape
    return 0 < pairs * (rows + columns) <= (PER_ELEMENT + positions) * rows * columns


def gram_of_factors(delta: Tensor, inputs: Tensor, max_bytes: int) -> Iterator[Tensor]:
    """⟨gₙ, gₘ⟩ in float64 from δ ``[N, S, R]`` and x ``[N, S, K]``, in parts ``[n, N]``."""
    n, s = delta.shape[:2]
    delta, inputs = double(delta).flatten(0, 1), double(inputs).flatten(0, 1)
    bytes_per_sample = 2 * n * s**2 * delta.dtype.itemsize
    for samples in slices(n, max_bytes // max(bytes_per_sample, 1)):
        part = slice(samples.start * s, samples.stop * s)
        products = (delta[part] @ delta.T) * (inputs[part] @ inputs.T)
        yield products if s == 1 else products.reshape(-1, s, n, s).sum((1, 3))


def deviations_of_gram(parts: Iterable[Tensor]) -> SampleDeviations:
    """Deviations from ⟨gₙ, gₘ⟩, given in parts ``[n, N]``.

    In float64, where products of numbers in float32 are exact and their sums cancel little.
    """
    squared_norms, means, start = [], [], 0
    for rows in parts:
        squared_norms.append(rows.diagonal(start))
        means.append(rows.mean(1))
        start += len(rows)
    return by_products(torch.cat(squared_norms), torch.cat(means))


def same_precision(delta: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, float]:
    """Both factors in one precision, and the larger of their relative rounding errors.

    Under autocast an input can be wider than the output gradient.
    """
    eps = max(torch.finfo(delta.dtype).eps, torch.finfo(inputs.dtype).eps)
    tracked = delta.requires_grad or inputs.requires_grad
    if tracked or delta.dtype != inputs.dtype or delta.dtype.itemsize < 4:
        delta, inputs = accumulable(delta), accumulable(inputs)
        dtype = torch.promote_types(delta.dtype, inputs.dtype)
        delta, inputs = delta.to(dtype), inputs.to(dtype)
    return delta, inputs, eps


def _extremes(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Largest and smallest absolute value of each sample, ``[N]``."""
    size = factor.abs()
    return size.amax(1), size.amin(1)
