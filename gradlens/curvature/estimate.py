"""Estimates with errors: of a matrix's trace, diagonal, norm, determinant, density of eigenvalues.

They come from its products with vectors of random signs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, starmap
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal, solve_banded
from scipy.special import stdtrit
from torch import Tensor

from gradlens.curvature.operator import Products, Seed, SymmetricMatrix, projected_out, signs_like
from gradlens.history.undefined import Undefined
from gradlens.numerics.unavailable import UnavailableError

ONE_SAMPLE = "one sample has no standard error: take two or more"

LARGEST_EXPONENT = math.log(sys.float_info.max) / 2
"""Of e, so that its power times a number of any usual size is in the range."""


class RunningMean:
    """Mean of independent samples of any one shape, without keeping them (Welford, 1962).

    Equal samples have a standard error of exactly zero.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.mean = torch.zeros((), device="cpu")
        self._squares = torch.zeros((), device="cpu")

    def add(self, sample: Tensor) -> None:
        """Add one sample, of the same shape as those before."""
        if self.samples == 0:
            self.mean, self._squares = torch.zeros_like(sample), torch.zeros_like(sample)
        self.samples += 1
        n = self.samples
        deviation = sample - self.mean
        self.mean += deviation / n
        self._squares += deviation.square_().mul_((n - 1) / n)

    def standard_error(self) -> Tensor:
        """Standard error of the mean, of a sample's shape; NaN for fewer than two samples."""
        if self.samples < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.samples * (self.samples - 1))).sqrt()


@dataclass(frozen=True)
class Estimate:
    """An unbiased estimate, and the standard error of its random part.

    ``degrees_of_freedom`` are those of Student's t for the interval, and ``products`` is the number
    of products with the matrix. ``positive`` says that the estimated number can't be negative. A
    value that can't be had is an ``Undefined``, a NaN with its reason.
    """

    value: float
    standard_error: float
    degrees_of_freedom: float
    products: int
    positive: bool = False

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Bounds that hold the true value with probability ``level``, approximately.

        Student's t; of a number that can't be negative, for its logarithm. Raises ``ValueError``
        for a level outside (0, 1). Without a value or an error, both are NaN with the same reason.
        """
        for number in (self.value, self.standard_error):
            if isinstance(number, Undefined):
                return number, number
        half = self.standard_error * float(t_quantile(self.degrees_of_freedom, level))
        if self.positive and half > 0:
            factor = math.exp(min(half / self.value, LARGEST_EXPONENT))
            return self.value / factor, self.value * factor
        return self.value - half, self.value + half


def weighted_sum(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Σᵢ wᵢ times independent estimates, with weights above zero.

    Degrees of freedom are those of a sum of variances (Satterthwaite, 1946). Without one of the
    errors, there is none of the sum, for the same reason.
    """
    pairs = list(zip(weights, estimates, strict=True))
    variances = [(weight * each.standard_error) ** 2 for weight, each in pairs]
    squares = [v**2 / each.degrees_of_freedom for v, each in zip(variances, estimates, strict=True)]
    errors = (each.standard_error for each in estimates)
    unknown = next((error for error in errors if isinstance(error, Undefined)), None)
    return Estimate(
        sum(weight * each.value for weight, each in pairs),
        unknown or math.sqrt(sum(variances)),
        sum(variances) ** 2 / sum(squares) if sum(squares) else 1,
        sum(each.products for each in estimates),
        all(each.positive for each in estimates),
    )


def positive_estimates(draws: Tensor, products: int) -> list[Estimate]:
    """Means of independent draws ``[S, K]`` of numbers that can't be negative."""
    return _positive(draws, torch.full_like(draws[0], max(len(draws) - 1, 1)), products)


def estimates_of_one_draw(samples: Tensor, products: int) -> list[Estimate]:
    """Means over the batch's samples ``[N, K]`` of numbers that can't be negative.

    Degrees of freedom are those of a sum of variances with one each (Satterthwaite, 1946): a sample
    that dominates the sum leaves one.
    """
    squares = (samples - samples.mean(0)).square()
    freedom = squares.sum(0).square() / squares.square().sum(0)
    return _positive(
        samples, freedom.nan_to_num(nan=1.0).clamp(1, max(len(samples) - 1, 1)), products
    )


def _positive(samples: Tensor, degrees_of_freedom: Tensor, products: int) -> list[Estimate]:
    nan = torch.full_like(samples[0], torch.nan)
    errors = samples.std(0) / math.sqrt(len(samples)) if len(samples) > 1 else nan
    rows = torch.stack([samples.mean(0), errors, degrees_of_freedom], dim=1).tolist()
    return [
        Estimate(mean, defined(error), freedom, products, positive=True)
        for mean, error, freedom in rows
    ]


def undefined_estimate(products: int, reason: str) -> Estimate:
    """NaNs with their reason, in place of an estimate."""
    nan = Undefined(reason)
    return Estimate(nan, nan, nan, products)


def defined(standard_error: float) -> float:
    """The error itself, or if it is NaN, that of a single sample, with its reason."""
    return Undefined(ONE_SAMPLE) if math.isnan(standard_error) else standard_error


def t_quantile(degrees_of_freedom: float | NDArray[np.float64], level: float) -> NDArray[Any]:
    """Half the width of a confidence interval of Student's t, in standard errors.

    Of the shape of the degrees of freedom. Raises ``ValueError`` for a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ValueError(f"the level is {level}: pass a probability between 0 and 1")
    return np.asarray(stdtrit(degrees_of_freedom, (1 + level) / 2))


# By Hutchinson's method ---------------------------------------------------------------------


def hutchinson(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """Trace as the mean of zᵀHz over random signs z (Hutchinson, 1990, Prop. 1).

    A diagonal matrix's is exact. Raises ``ValueError`` for fewer than one sample.
    """
    return hutchinson_blocks(matrix, {"": slice(None)}, samples, seed)[""]


def hutchinson_blocks(
    matrix: SymmetricMatrix, blocks: Mapping[str, slice], samples: int, seed: Seed = 0
) -> dict[str, Estimate]:
    """Traces of diagonal blocks, all from the same probes.

    The mean of Σᵢ zᵢ(Hz)ᵢ over the rows i of a block, in which the coupling to other blocks has
    mean zero. ``blocks`` maps names to slices of the flat vector (``operator.slices``), which may
    overlap. Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        diagonal = probed_diagonal(products, samples, seed)
    except UnavailableError as error:
        return dict.fromkeys(blocks, undefined_estimate(products.count, str(error)))
    traces = hutchinson_estimates(diagonal, blocks.values(), products.count)
    return dict(zip(blocks, traces, strict=True))


def hutchinson_estimates(
    diagonal: RunningMean, blocks: Iterable[slice], products: int
) -> list[Estimate]:
    """Traces of diagonal blocks from the elements z∘Hz ``[D]`` of each probe z.

    The variance of zᵀHz is 2·Σᵢ≠ⱼHᵢⱼ² (Hutchinson, 1990, Prop. 1), twice the sum of the
    elements' variances Σⱼ≠ᵢHᵢⱼ². That sum is known far better than the variance of a few numbers
    zᵀHz. If one eigenvalue dominates, it has one degree of freedom for each probe, and otherwise
    more. Of a block's trace, it is an upper bound, up to √2 too large: where the block's rows are
    coupled to other blocks, each of their elements' variances counts once.
    """
    variances = 2 * diagonal.standard_error().square()
    return [
        Estimate(
            float(diagonal.mean[block].sum()),
            defined(float(variances[block].sum().sqrt())),
            diagonal.samples,
            products,
        )
        for block in blocks
    ]


@dataclass(frozen=True)
class DiagonalEstimate:
    """Unbiased estimates ``diagonal`` ``[D]`` with their ``standard_error`` ``[D]``.

    All are from the same ``samples`` probes, so that an element's error has one degree of freedom
    less. The standard error is NaN for one probe; where the diagonal is NaN too, ``reason`` says
    why.
    """

    diagonal: NDArray[np.float64]
    standard_error: NDArray[np.float64]
    samples: int
    reason: str = ""


def hutchinson_diagonal(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> DiagonalEstimate:
    """Diagonal as the mean of z∘Hz over random signs z (Bekas et al., 2007, Eq. 2).

    A diagonal matrix's is exact. Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        mean = probed_diagonal(products, samples, seed)
    except UnavailableError as error:
        nan = np.full(products.size, np.nan)
        return DiagonalEstimate(nan, nan.copy(), samples, str(error))
    return DiagonalEstimate(mean.mean.cpu().numpy(), mean.standard_error().cpu().numpy(), samples)


def frobenius_norm(matrix: SymmetricMatrix, samples: int, seed: Seed = 0) -> Estimate:
    """√(Σᵢⱼ Hᵢⱼ²) as the root of the mean of ‖Hz‖² over random signs z.

    The mean is an unbiased estimate of the square, the trace of H² (Hutchinson, 1990, Prop. 1). The
    root's standard error is that of the mean over twice the root. Exact for a diagonal matrix.
    Raises ``ValueError`` for fewer than one sample.
    """
    products = Products(matrix)
    try:
        squares = [image.square().sum() for _, image in _probed(products, samples, seed)]
    except UnavailableError as error:
        return undefined_estimate(products.count, str(error))
    (square,) = positive_estimates(torch.stack(squares)[:, None], products.count)
    norm = math.sqrt(square.value)
    if isinstance(square.standard_error, Undefined) or norm == 0:
        return replace(square, value=norm)
    return replace(square, value=norm, standard_error=square.standard_error / (2 * norm))


def probed_diagonal(products: Products, samples: int, seed: Seed) -> RunningMean:
    """Mean of z∘Hz ``[D]`` over random signs z, which estimates the diagonal.

    Raises ``ValueError`` for fewer than one sample.
    """
    mean = RunningMean()
    for probe, image in _probed(products, samples, seed):
        mean.add(probe * image)
    return mean


def _probed(products: Products, samples: int, seed: Seed) -> Iterator[tuple[Tensor, Tensor]]:
    """Random signs z ``[D]`` with Hz; ``ValueError`` for fewer than one sample."""
    if samples < 1:
        raise ValueError(f"{samples} samples: take one at least, two for a standard error")
    generator = np.random.default_rng(seed)
    return products.each(signs_like(products.like, generator) for _ in range(samples))


# The density of eigenvalues, by stochastic Lanczos quadrature ----------------------------------

Array: TypeAlias = NDArray[np.float64]
_Rule: TypeAlias = tuple[Array, Array]

RESOLUTION = 1.5
"""Default width of the Gaussian in units of the spectrum's range over the steps.

A Gauss rule of m nodes is exact to degree 2m − 1. On the range R the Chebyshev coefficients of a
Gaussian of width 1.5·R/m have decayed to about 1e-8 there, so the rule's own error is negligible
beside that of the probes.
"""

MARGIN = 6.0
"""The grid reaches this many widths beyond the outermost node, where a Gaussian is 1.5e-8 high."""


@dataclass(frozen=True)
class SpectralDensity:
    """Density of the eigenvalues, smoothed by a Gaussian of standard deviation ``width``.

    ``density`` ``[G]`` at the points ``grid`` ``[G]`` estimates (1/D)·Σᵢ N(grid; λᵢ, width²)
    with ``standard_error`` ``[G]``, whose ``degrees_of_freedom`` ``[G]`` are those of Student's t
    for the band; it integrates to one. ``probes`` is the number of random vectors, and ``products``
    counts the products with H. Where NaN, ``reason`` says why.
    """

    grid: Array
    density: Array
    standard_error: Array
    degrees_of_freedom: Array
    width: float
    probes: int
    products: int
    reason: str = ""

    def confidence_band(self, level: float = 0.95) -> tuple[Array, Array]:
        """Bounds low ``[G]`` and high ``[G]`` that hold the truth with probability ``level``.

        At each grid point by itself, approximately: Student's t, cut off at zero. Raises
        ``ValueError`` for a level outside (0, 1).
        """
        half = self.standard_error * t_quantile(self.degrees_of_freedom, level)
        return np.maximum(self.density - half, 0.0), self.density + half


def spectral_density(
    matrix: SymmetricMatrix,
    probes: int = 10,
    steps: int = 50,
    *,
    points: int = 512,
    relative_width: float | None = None,
    seed: Seed = 0,
) -> SpectralDensity:
    """Smoothed density of the eigenvalues (Lin, Saad and Yang, 2016, Sec. 3.2.2).

    The mean over random signs z of Σⱼ wⱼ·N(t; θⱼ, width²), with the nodes θⱼ and weights wⱼ of
    ``steps`` Lanczos steps from z (Ghorbani et al., 2019, Alg. 1 and 2). ``relative_width`` is
    the Gaussian's width over the range of all nodes, by default 1.5/steps; much narrower ones show
    the nodes instead of the spectrum, which the standard error does not show.

    Raises ``ValueError`` for fewer than one probe or step, and a grid coarser than the width.
    """
    if probes < 1 or steps < 1:
        raise ValueError(f"{probes} probes of {steps} steps: take one of each at least")
    relative_width = RESOLUTION / steps if relative_width is None else relative_width
    needed = math.ceil(1 / relative_width + 2 * MARGIN) + 1
    if points < needed:
        raise ValueError(f"{points} points are further apart than the width: take {needed}")
    generator = np.random.default_rng(seed)
    products = Products(matrix)
    try:
        starts = (signs_like(products.like, generator) for _ in range(probes))
        rules = [*lanczos(products, starts, steps)]
    except UnavailableError as error:
        nan = np.full(points, np.nan)
        return SpectralDensity(nan, nan, nan, nan, math.nan, probes, products.count, str(error))
    return _smoothed(rules, points, relative_width, products)


def _smoothed(
    rules: list[_Rule], points: int, relative_width: float, products: Products
) -> SpectralDensity:
    nodes = np.concatenate([nodes for nodes, _ in rules])
    weights = np.concatenate([weights for _, weights in rules]) / len(rules)
    width = relative_width * _extent(nodes)
    low, high = float(nodes.min()), float(nodes.max())
    grid = np.linspace(low - MARGIN * width, high + MARGIN * width, points)
    # N(t; θⱼ, width²) for each grid point t and node θⱼ, [G, nodes].
    kernels = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2)
    kernels /= width * math.sqrt(2 * math.pi)
    error, freedom = _standard_error(kernels, weights, len(rules), products.size)
    return SpectralDensity(
        grid, kernels @ weights, error, freedom, width, len(rules), products.count
    )


def _standard_error(kernels: Array, weights: Array, probes: int, size: int) -> tuple[Array, Array]:
    """Standard error ``[G]`` of the mean of all probes' kernels, and its degrees of freedom.

    At each grid point, a probe's density is zᵀFz/D, F being a Gaussian of the matrix. Its variance
    2·Σᵢ≠ⱼFᵢⱼ²/D² (Hutchinson, 1990, Prop. 1) is at most 2/D times the variance of the Gaussian over
    all eigenvalues, which the rules estimate, too. The degrees of freedom are those of a sum of
    squares (Satterthwaite, 1946): one for each probe if one eigenvalue dominates, otherwise more.
    """
    squares = (kernels - (kernels @ weights)[:, None]) ** 2
    variance, fourth = squares @ weights, squares**2 @ weights
    counted = np.divide(size * variance**2, fourth, out=np.ones_like(variance), where=fourth > 0)
    return np.sqrt(2 * variance / (size * probes)), probes * np.maximum(counted, 1.0)


def _extent(nodes: Array) -> float:
    """The nodes' range; where they are all equal, their size, or 1 if that is zero too."""
    size = float(np.abs(nodes).max())
    extent = float(np.ptp(nodes))
    if extent > 1e-12 * size:
        return extent
    return size if size > 0 else 1.0


def lanczos(products: Products, starts: Iterable[Tensor], steps: int) -> Iterator[_Rule]:
    """Nodes and weights ``[m]`` of Gauss' rule for vᵀf(H)v, v being each start ``[D]`` as a unit.

    The nodes are the eigenvalues of the tridiagonal matrices, and the weights, which sum to one,
    the squared first entries of their eigenvectors (Golub and Welsch, 1969, Eq. 2.6).
    """
    return starmap(_gauss, tridiagonal(products, starts, steps))


def _gauss(diagonal: Array, off_diagonal: Array) -> _Rule:
    nodes, vectors = eigh_tridiagonal(diagonal, off_diagonal)
    return np.asarray(nodes, np.float64), np.asarray(vectors[0], np.float64) ** 2


def tridiagonal(
    products: Products, starts: Iterable[Tensor], steps: int
) -> Iterator[tuple[Array, Array]]:
    """H on the Krylov space of each start, as a diagonal ``[m]`` and what is beside it ``[m − 1]``.

    By at most ``steps`` steps of Lanczos' method, with full reorthogonalisation in float64: Paige
    (1972), variant A1; fewer where the space becomes invariant under H. Of a matrix over data, the
    steps of as many starts as fit in memory take one pass.
    """
    steps = min(steps, products.size)
    remaining = iter(starts)
    while group := list(islice(remaining, products.together(kept=steps))):
        yield from _side_by_side(products, group, steps)


def _side_by_side(
    products: Products, starts: Sequence[Tensor], steps: int
) -> list[tuple[Array, Array]]:
    """Those of all starts, whose vectors are multiplied together at each step."""
    bases = [[start / start.norm()] for start in starts]
    diagonals: list[list[float]] = [[] for _ in starts]
    off_diagonals: list[list[float]] = [[] for _ in starts]
    growing = list(range(len(starts)))
    for step in range(steps):
        images = products.each([bases[run][-1] for run in growing])
        for run, (unit, image) in zip([*growing], images, strict=True):
            diagonals[run].append(float(unit @ image))
            rest = projected_out(image, bases[run])
            size = float(rest.norm())
            if step + 1 == steps or size <= products.rounding:
                growing.remove(run)
                continue
            off_diagonals[run].append(size)
            rest = projected_out(rest / size, bases[run])
            bases[run].append(rest / rest.norm())
    return [*zip(map(np.array, diagonals), map(np.array, off_diagonals), strict=True)]


# The determinant, by the same quadrature --------------------------------------------------------


@dataclass(frozen=True)
class LogDeterminant:
    """An estimate of log det(H + damping·I), between ``lower`` and ``upper``.

    Both are from the same probes. Their expectations are a lower and an upper bound of the true
    value, so that their difference is what further steps would change.
    """

    lower: Estimate
    upper: Estimate

    @property
    def value(self) -> float:
        """The middle of both; a NaN with its reason if there is none."""
        known = isinstance(self.lower.value, Undefined)
        return self.lower.value if known else (self.lower.value + self.upper.value) / 2

    def confidence_interval(self, level: float = 0.95) -> tuple[float, float]:
        """Bounds that hold the true value with probability ``level``, approximately."""
        return self.lower.confidence_interval(level)[0], self.upper.confidence_interval(level)[1]


def log_determinant(
    matrix: SymmetricMatrix, damping: float, probes: int = 10, steps: int = 50, *, seed: Seed = 0
) -> LogDeterminant:
    """log det(H + ``damping``·I) of a positive semidefinite H, by stochastic Lanczos quadrature.

    It is the trace of the logarithm: the mean of zᵀlog(H + damping·I)z over ``probes`` random signs
    z (Ubaru, Chen and Saad, 2017, Alg. 1), each by ``steps`` products. Gauss' rule is an upper
    bound of each of these, and Gauss-Radau's with a node at the smallest possible eigenvalue a
    lower one (Bai and Golub, 1996, Sec. 3).

    Raises ``ValueError`` unless there are a positive damping, a probe and a step. NaN with their
    reason if an eigenvalue is negative, or if the damping is within the products' rounding errors.
    """
    if not 0 < damping < math.inf:
        raise ValueError(f"damping={damping}: pass a positive number")
    if probes < 1 or steps < 1:
        raise ValueError(f"{probes} probes of {steps} steps: take one of each at least")
    generator, products = np.random.default_rng(seed), Products(matrix)
    try:
        starts = (signs_like(products.like, generator) for _ in range(probes))
        found = [*tridiagonal(products, starts, steps)]
        upper = [_gauss(*each) for each in found]
        least = min(float(nodes.min()) for nodes, _ in upper)
        if least < -products.rounding:
            raise UnavailableError(NEGATIVE.format(least=least))
        if damping < products.rounding:
            raise UnavailableError(WITHIN_ROUNDING.format(damping=damping, least=products.rounding))
    except UnavailableError as error:
        unknown = undefined_estimate(products.count, str(error))
        return LogDeterminant(unknown, unknown)
    whole = min(steps, products.size)
    lower = [
        _gauss(*each)  # exact
        if len(each[0]) < whole or whole == products.size
        else _radau(*each, least=-products.rounding)
        for each in found
    ]
    return LogDeterminant(*(_of_logarithm(each, damping, products) for each in (lower, upper)))


def _radau(diagonal: Array, off_diagonal: Array, least: float) -> _Rule:
    """The rule of as many nodes, of which ``least`` is one (Golub, 1973, Sec. 4)."""
    changed, last = diagonal.copy(), np.zeros(len(off_diagonal))
    changed[-1] = least
    if len(last):
        last[-1], beside = off_diagonal[-1] ** 2, off_diagonal[:-1]
        band = np.array([[0.0, *beside], diagonal[:-1] - least, [*beside, 0.0]])
        changed[-1] += solve_banded((1, 1), band, last)[-1]
    return _gauss(changed, off_diagonal)


def _of_logarithm(rules: Sequence[_Rule], damping: float, products: Products) -> Estimate:
    """The trace of a logarithm, from rules for the quadratic forms of all probes."""
    logarithms = np.log(np.concatenate([np.maximum(n, 0.0) for n, _ in rules]) + damping)
    weights = np.concatenate([weights for _, weights in rules]) / len(rules)
    error, freedom = _standard_error(logarithms[None], weights, len(rules), products.size)
    size = products.size
    value = size * float(logarithms @ weights)
    return Estimate(value, size * float(error[0]), float(freedom[0]), products.count)


NEGATIVE = (
    "the matrix has an eigenvalue of at most {least:.3g}, and must be positive semidefinite, as "
    "GGNOperator is"
)
WITHIN_ROUNDING = (
    "damping={damping:g} is within the rounding errors of products, which hide eigenvalues below "
    "{least:.2g}: take a larger damping, or a model in float64"
)
