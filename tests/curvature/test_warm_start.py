"""The largest eigenvalue of matrices that change abruptly, beside that of the dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.linalg import block_diag

from gradlens.curvature.eigenpairs import RitzPairs
from gradlens.curvature.warm_start import WarmStartedEigenpairs

SEQUENCES, STEPS = 40, 6

Block = NDArray[np.float64]


def low_rank(generator: Generator, size: int) -> NDArray[np.float64]:
    values = np.zeros(size)
    values[: min(size, 5)] = generator.exponential(3.0, min(size, 5))
    return values


SPECTRA: dict[str, Callable[[Generator, int], NDArray[np.float64]]] = {
    "bulk": lambda generator, size: generator.standard_normal(size),
    "low rank": low_rank,
    "outliers": lambda generator, size: (
        0.1 * generator.standard_normal(size) + low_rank(generator, size)
    ),
    "decaying": lambda generator, size: np.exp(-generator.uniform(0, 8, size)),
    "multiple": lambda generator, size: np.full(size, generator.standard_normal()),
    "zero": lambda generator, size: np.zeros(size),
}


def drawn(generator: Generator, size: int) -> Block:
    """A symmetric matrix with one of the spectra, in a random basis."""
    basis, _ = np.linalg.qr(generator.standard_normal((size, size)))
    kind = generator.choice(list(SPECTRA))
    matrix = (basis * SPECTRA[kind](generator, size)) @ basis.T
    return (matrix + matrix.T) / 2


JUMPS: dict[str, Callable[[Generator, Block], Block]] = {
    "nothing": lambda generator, block: block,
    "a little": lambda generator, block: block + 0.01 * drawn(generator, len(block)),
    "another matrix": lambda generator, block: drawn(generator, len(block)),
    "the other sign": lambda generator, block: -block,
    "another scale": lambda generator, block: 3 * block,
    "another basis": lambda generator, block: block[::-1, ::-1],
    "nothing left": lambda generator, block: np.zeros_like(block),
}


def changing_matrices(generator: Generator) -> Iterator[Block]:
    """Block-diagonal matrices ``[D, D]``: what becomes of one block is not seen in another one.

    An eigenvector of a block is often still one at the next step, of another eigenvalue.
    """
    sizes = generator.integers(2, 60, generator.integers(1, 5))
    blocks = [drawn(generator, size) for size in [33, *sizes]]  # larger than those solved densely
    for _ in range(STEPS):
        yield block_diag(*blocks)
        blocks = [JUMPS[generator.choice(list(JUMPS))](generator, block) for block in blocks]


def searches(tolerance: float) -> Iterator[tuple[RitzPairs, float, float]]:
    """What each search finds, the largest eigenvalue, and the largest magnitude."""
    for seed in range(SEQUENCES):
        search = WarmStartedEigenpairs(tolerance, max_products=100)
        matrices = changing_matrices(np.random.default_rng(seed))
        for step, matrix in enumerate(matrices):
            values = np.linalg.eigvalsh(matrix)
            yield search(matrix, STEPS * seed + step), values[-1], np.abs(values).max()


@pytest.mark.parametrize("tolerance", [1e-3, 0.03])
def test_matrices_that_jump(tolerance: float) -> None:
    """Searches from the last vectors alone would be far too small at one step of twelve.

    A Krylov space of ten vectors can lack an eigenvector that lies close to the last one it has.
    """
    far = 0
    for found, largest, size in searches(tolerance):
        if not found.converged:  # such as to a value of nearly zero
            assert found.reason
            far += 1
            continue
        rounding = 1e-9 * size
        assert found.values[0] <= largest + rounding
        assert found.values[0] >= largest - 0.2 * abs(largest) - rounding
        far += found.values[0] < largest - 2 * tolerance * abs(largest) - rounding
    assert far <= 0.02 * SEQUENCES * STEPS


def test_an_eigenvector_of_another_eigenvalue() -> None:
    """The last eigenvector still is one, of an eigenvalue that is not the largest any more."""
    search = WarmStartedEigenpairs(0.03, max_products=100)
    falling, rising = np.linspace(0, 1, 60), np.linspace(0, 1, 60)
    falling[0], rising[:2] = 8.0, (0.0, 5.0)
    assert search(np.diag(falling), 0).values[0] == pytest.approx(8.0, rel=0.01)
    assert search(np.diag(rising), 1).values[0] == pytest.approx(5.0, rel=0.01)
