"""The density of a symmetric matrix's eigenvalues, by stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, starmap
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from gradlens.curvature.estimate import t_quantile
from gradlens.curvature.products import Products, Seed, SymmetricMatrix, projected_out, signs_like
from gradlens.numerics.unavailable import UnavailableError

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

    By at most ``steps`` steps of Lanczos' method, with full reorthogonalisation in float64: Paige
    (1972), variant A1; fewer where the space becomes invariant under H. Of a matrix over data, the
    steps of as many starts as fit in memory take one pass.
    """
    steps = min(steps, products.size)
    remaining = iter(starts)
    while group := list(islice(remaining, products.together(kept=steps))):
        yield from _side_by_side(products, group, steps)


def _side_by_side(products: Products, starts: Sequence[Tensor], steps: int) -> list[_Rule]:
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
    # The nodes are the eigenvalues of the tridiagonal matrices, and the weights, which sum to one,
    # the squared first entries of their eigenvectors (Golub and Welsch, 1969, Eq. 2.6).
    pairs = zip(map(np.array, diagonals), map(np.array, off_diagonals), strict=True)
    found = starmap(eigh_tridiagonal, pairs)
    return [(np.asarray(n, np.float64), np.asarray(v[0], np.float64) ** 2) for n, v in found]
