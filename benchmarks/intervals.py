"""How often 95 % intervals hold the truth: ``python -m benchmarks.intervals [--seeds 400]``.

For each quantity that records an interval, for few and many probes or samples, and for easy and
hard distributions. ``open`` is the share of intervals without an upper end, and ``width`` the
median of all others' widths over the truth.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from gradlens.curvature import hutchinson, hutchinson_blocks, spectral_density
from gradlens.curvature.estimate import Estimate, estimates_of_one_draw, positive_estimates
from gradlens.numerics.noise_scales import (
    Averages,
    DualNorm,
    PartSums,
    dual_noise_scale,
    noise_between_parts,
    noise_scale,
)
from gradlens.operators.dense import Dense
from gradlens.quantities.dual_norms import dual_sums
from gradlens.quantities.group_gradients import between_groups

Array: TypeAlias = NDArray[np.float64]
Generator: TypeAlias = np.random.Generator

SIZE = 60
PARAMETERS = 30
SAMPLES = 128
SUB_BATCH = 32


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    truth: float

    @property
    def holds(self) -> bool:
        rounding = 1e-12 * abs(self.truth)
        return self.low - rounding <= self.truth <= self.high + rounding


Draw: TypeAlias = Callable[[int], Interval]
"""An interval from a seed."""


# Spectra: what is random are the probes.


def _rotated(eigenvalues: Iterable[float]) -> Array:
    """A matrix of ``SIZE`` rows with these eigenvalues, and zeros."""
    values = [*eigenvalues]
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((SIZE, SIZE)))
    columns = basis[:, : len(values)]
    return np.asarray((columns * np.array(values)) @ columns.T)


def _random_matrix() -> Array:
    matrix = np.random.default_rng(0).standard_normal((SIZE, SIZE))
    return np.asarray((matrix + matrix.T) / 2)


def _coupled_pair() -> Array:
    matrix = np.eye(SIZE)
    matrix[0, 1] = matrix[1, 0] = 1.0
    return matrix


SPECTRA: Mapping[str, Array] = {
    "random matrix": _random_matrix(),
    "decaying": _rotated(50 / np.arange(1, SIZE + 1) ** 1.5),
    "5 outliers": _rotated([20, 10, 8, 5, 3, *np.linspace(0, 0.3, SIZE - 5)]),
    "2 of either sign": _rotated([1, -0.5]),
    "1 outlier": _rotated([1]),
    "1 coupled pair": _coupled_pair(),
}


def _of_trace(method: Callable[..., Estimate], spectrum: str, probes: int, seed: int) -> Interval:
    matrix = SPECTRA[spectrum]
    return Interval(*method(matrix, probes, seed).confidence_interval(), float(np.trace(matrix)))


def _of_block(spectrum: str, probes: int, seed: int) -> Interval:
    """The block of the first third of the rows."""
    matrix, block = SPECTRA[spectrum], slice(0, SIZE // 3)
    estimate = hutchinson_blocks(matrix, {"": block}, probes, seed)[""]
    return Interval(*estimate.confidence_interval(), float(np.trace(matrix[block, block])))


@cache
def _bands(spectrum: str, probes: int, seed: int) -> tuple[Interval, Interval]:
    """The band of the density at the median and at the largest eigenvalue."""
    matrix = SPECTRA[spectrum]
    eigenvalues: Array = np.linalg.eigvalsh(matrix).astype(np.float64)
    found = spectral_density(matrix, probes, 10, points=64, seed=seed)
    low, high = found.confidence_band()

    def at(eigenvalue: float) -> Interval:
        place = int(np.abs(found.grid - eigenvalue).argmin())
        truth = stats.norm.pdf(found.grid[[place], None], eigenvalues, found.width).mean(1)
        return Interval(float(low[place]), float(high[place]), float(truth[0]))

    return at(float(np.median(eigenvalues))), at(float(eigenvalues.max()))


def _of_density(place: int, spectrum: str, probes: int, seed: int) -> Interval:
    return _bands(spectrum, probes, seed)[place]


# Noise: what is random are the samples of the batch.


def _shared(scale: Callable[[Generator, int], Array]) -> Callable[[Generator, int], Array]:
    """Normal noise times one random factor for each sample, as of samples that are hard."""

    def noise(generator: Generator, n: int) -> Array:
        each: Array = generator.standard_normal((n, PARAMETERS)) * scale(generator, n)[:, None]
        return each

    return noise


def _student(generator: Generator, shape: Any) -> Array:
    return np.asarray(generator.standard_t(3, shape) / math.sqrt(3))


def _lognormal(generator: Generator, shape: Any) -> Array:
    centred = generator.lognormal(size=shape) - math.exp(0.5)
    return np.asarray(centred / math.sqrt((math.e - 1) * math.e))


NOISE: Mapping[str, Callable[[Generator, int], Array]] = {
    "normal": lambda generator, n: generator.standard_normal((n, PARAMETERS)),
    "Student t, elements": lambda generator, n: _student(generator, (n, PARAMETERS)),
    "Student t, samples": _shared(lambda generator, n: np.sqrt(1 / generator.chisquare(3, n))),
    "lognormal, elements": lambda generator, n: _lognormal(generator, (n, PARAMETERS)),
    "lognormal, samples": _shared(lambda generator, n: generator.lognormal(size=n) / math.e),
    "1 of 20 samples": _shared(lambda g, n: np.where(g.random(n) < 0.05, math.sqrt(20), 0.0)),
    "1 of 20, mostly": _shared(lambda g, n: np.where(g.random(n) < 0.05, 4.0, math.sqrt(4 / 19))),
}
"""Noise ``[N, PARAMETERS]`` with mean 0 and variance 1."""


DEVIATIONS, GRADIENT = np.linspace(0.1, 2, PARAMETERS), np.linspace(-1, 1, PARAMETERS)


def _of_noise_scale(noise: str, n: int, seed: int) -> Interval:
    drawn = GRADIENT + DEVIATIONS * NOISE[noise](np.random.default_rng(seed), n)
    found = noise_scale(Dense(torch.from_numpy(drawn)).deviations())
    return Interval(found.low, found.high, float((DEVIATIONS**2).sum() / (GRADIENT**2).sum()))


LAYOUTS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "5 × 6": ((5, 6),),
    "15 × 2": ((15, 2),),
    "1 × 30": ((1, 30),),
    "2 × 3 × 5": ((2, 3, 5),),
    "two matrices": ((3, 5), (5, 3)),
}
"""Parameters with ``PARAMETERS`` elements together."""


def _of_dual_norm(
    norm: DualNorm, shapes: Sequence[tuple[int, ...]], together: bool, noise: str, n: int, seed: int
) -> Interval:
    """Of parameters whose elements are independent of each other, or have their noise together."""
    drawn = NOISE[noise](np.random.default_rng(seed), n)
    rows = GRADIENT + DEVIATIONS * (drawn[:, :1] if together else drawn)
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
    pieces = zip(shapes, np.split(rows, ends, axis=1), strict=True)
    each = [dual_sums(Dense(torch.from_numpy(x.reshape(n, *shape))), norm) for shape, x in pieces]
    found, sizes = dual_noise_scale(sum(each[1:], each[0])), np.zeros(2)
    of_both = (np.split(values, ends) for values in (DEVIATIONS, GRADIENT))
    for shape, deviations, gradient in zip(shapes, *of_both, strict=True):
        if norm == "l1":
            sizes += deviations.sum(), np.abs(gradient).sum()
            continue
        own, mean = (x.reshape(shape[0], -1) for x in (deviations, gradient))
        roots = np.sqrt(np.square(own).sum(1 if own.shape[0] <= own.shape[1] else 0))
        spread = np.linalg.svd(own, compute_uv=False) if together else roots
        sizes += spread.sum(), np.linalg.svd(mean, compute_uv=False).sum()
    return Interval(found.low, found.high, float((sizes[0] / sizes[1]) ** 2))


def _of_groups(entry: str, cosine: float, noise: str, n: int, seed: int) -> Interval:
    """Of two groups of n samples, whose expected gradients have this cosine."""
    generator, across = np.random.default_rng(seed), np.roll(GRADIENT, PARAMETERS // 2)
    across = across - across @ GRADIENT / (GRADIENT @ GRADIENT) * GRADIENT
    across *= np.linalg.norm(GRADIENT) / np.linalg.norm(across)
    other = 2 * (cosine * GRADIENT + math.sqrt(1 - cosine**2) * across)
    deviations = NOISY * np.linalg.norm(GRADIENT) * DEVIATIONS / np.linalg.norm(DEVIATIONS)
    rows = np.concatenate([m + deviations * NOISE[noise](generator, n) for m in (GRADIENT, other)])
    found = between_groups(rows @ rows.T, ["a"] * n + ["b"] * n)
    if entry == "norm":
        norm = found["groups"]["b"]
        return Interval(norm["low"], norm["high"], float(np.linalg.norm(other)))
    pair = found["pairs"]["a and b"]
    return Interval(pair["low"], pair["high"], cosine)


NOISY = 2.0
"""Of groups, the root of the noise's trace over the norm of the gradient."""

PARTS, OF_PART = 4, 8


def _over_steps(beta: float, noise: str, steps: int, seed: int) -> Interval:
    """From the norms of parts, averaged over steps."""
    generator, averages = np.random.default_rng(seed), Averages(beta)
    for _ in range(steps):
        drawn = GRADIENT + DEVIATIONS * NOISE[noise](generator, PARTS * OF_PART)
        parts = drawn.reshape(PARTS, OF_PART, PARAMETERS).mean(1) / PARTS
        squares, mean = PARTS * float(np.square(parts).sum()), parts.sum(0)
        zero = torch.zeros(1)
        of_parts = PartSums(zero, zero[0], 1.0, 1 / OF_PART, 1 / OF_PART / PARTS, PARTS)
        found = averages.add("", noise_between_parts(squares, float(mean @ mean), of_parts))
    return Interval(found.low, found.high, float((DEVIATIONS**2).sum() / (GRADIENT**2).sum()))


# Sampled traces: what is random are the signs, and which samples are in the sub-batch.


SHARES: Mapping[str, Callable[[Generator], Array]] = {
    "equal": lambda generator: np.ones(SAMPLES),
    "Student t": lambda generator: np.abs(generator.standard_t(3, SAMPLES)),
    "lognormal": lambda generator: generator.lognormal(size=SAMPLES),
    "1 of 20 samples": lambda g: np.where(g.random(SAMPLES) < 0.05, 20.0, 0.05),
    "1 of all samples": lambda generator: np.eye(SAMPLES)[0],
}
"""Traces ``[SAMPLES]`` of the samples' Gauss-Newton matrices, each of which has rank one."""


def _of_sampled_trace(sub_batch: int, shares: str, draws: int, seed: int) -> Interval:
    generator = np.random.default_rng(seed)
    traces = SHARES[shares](generator)
    kept = [generator.permutation(SAMPLES)[:sub_batch] for _ in range(draws)]
    norms = [traces[some] * generator.chisquare(1, sub_batch) * SAMPLES for some in kept]
    each = torch.from_numpy(np.array(norms))[..., None]
    one = draws == 1
    (found,) = estimates_of_one_draw(each[0], 1) if one else positive_estimates(each.mean(1), draws)
    return Interval(*found.confidence_interval(), float(traces.sum()))


# The table


@dataclass(frozen=True)
class Kind:
    """A quantity's interval, for each number of probes or samples and each distribution."""

    name: str
    numbers: tuple[int, ...]
    draws: Mapping[str, Callable[[int, int], Interval]]


def _over(draw: Callable[..., Interval], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Of each kind by its name."""
    return {name: partial(draw, name) for name in kinds}


KINDS: tuple[Kind, ...] = (
    Kind("hutchinson", (2, 3, 4, 10), _over(partial(_of_trace, hutchinson), SPECTRA)),
    Kind("hutchinson_blocks", (2, 3, 4, 10), _over(_of_block, SPECTRA)),
    *(
        Kind(f"spectral_density, {name}", (1, 2, 4), _over(partial(_of_density, place), SPECTRA))
        for place, name in ((1, "largest"), (0, "median"))
    ),
    Kind(
        f"sampled trace, {SAMPLES} samples",
        *((1, 2, 3, 10), _over(partial(_of_sampled_trace, SAMPLES), SHARES)),
    ),
    Kind(
        f"sampled trace, {SUB_BATCH} of {SAMPLES}",
        *((1, 2, 10), _over(partial(_of_sampled_trace, SUB_BATCH), SHARES)),
    ),
    Kind("noise scale", (3, 8, 32, 59, 64, 128, 512), _over(_of_noise_scale, NOISE)),
    *(
        Kind(
            f"{entry} of groups, {cosine}",
            (4, 16, 64),
            _over(partial(_of_groups, entry, cosine), NOISE),
        )
        for entry, cosine in (("cosine", 1.0), ("cosine", 0.5), ("cosine", -0.8), ("norm", 0.5))
    ),
    *(
        Kind(
            f"noise scale, {norm}, {layout}{', together' if together else ''}",
            *((4, 5, 16, 64, 512), _over(partial(_of_dual_norm, norm, shapes, together), NOISE)),
        )
        for norm in get_args(DualNorm)
        for layout, shapes in LAYOUTS.items()
        for together in (False, True)
        if norm == "nuclear" or layout == "5 × 6"
    ),
    Kind(
        "noise scale, smoothing 0.99", (5, 20, 100, 300), _over(partial(_over_steps, 0.99), NOISE)
    ),
)


@dataclass(frozen=True)
class Coverage:
    """Of 95 % intervals from seeds of their own; as fractions of those that aren't NaN."""

    holds: float
    open: float
    width: float


def coverage(draw: Draw, seeds: int) -> Coverage:
    drawn = [draw(seed) for seed in range(seeds)]
    # Where all samples are equal, there is a reason instead of an interval.
    found = [one for one in drawn if not math.isnan(one.low)]
    widths = [(one.high - one.low) / abs(one.truth) for one in found if one.high < math.inf]
    holds, unbounded = sum(one.holds for one in found), len(found) - len(widths)
    width = float(np.median(widths)) if widths else math.nan
    return Coverage(holds / len(found), unbounded / len(found), width)


def rows(seeds: int, only: str = "") -> Iterator[str]:
    """Lines of the table, each as soon as it is measured."""
    yield f"{'interval':44} {'distribution':20} {'number':>6} {'holds':>6} {'open':>5} {'width':>8}"
    for kind in (each for each in KINDS if only in each.name):
        for name, draw in kind.draws.items():
            for number in kind.numbers:
                one = coverage(partial(draw, number), seeds)
                yield (
                    f"{kind.name:44} {name:20} {number:6} {one.holds:6.1%} {one.open:5.0%} "
                    f"{one.width:8.3g}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--only", default="", help="a word of the names of intervals")
    options = parser.parse_args()
    for row in rows(options.seeds, options.only):
        print(row, flush=True)
