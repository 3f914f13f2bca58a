"""The largest eigenvalue of matrices that change abruptly, beside that of the dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.linalg import block_diag

from gradlens.curvature.eigenpairs import MARGIN, Eigenpairs, WarmStartedEigenpairs

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


def searches(tolerance: float) -> Iterator[tuple[Eigenpairs, float, float]]:
    """What each search finds, the largest eigenvalue, and the largest magnitude."""
    for seed in range(SEQUENCES):
        search = WarmStartedEigenpairs(tolerance, max_products=100)
        matrices = changing_matrices(np.random.default_rng(seed))
        for step, matrix in enumerate(matrices):
            values = np.linalg.eigvalsh(matrix)
            yield search(matrix, STEPS * seed + step), values[-1], np.abs(values).max()


@pytest.mark.parametrize("tolerance", [1e-3, 0.03])
@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("interval", "changes", "expected"),
    [
        # The last eigenvector still is one, of an eigenvalue that is not the largest any more.
        (1, [{0: 0.0, 1: 5.0}], [5.0]),
        # A value that falls behind the next one is searched for at once.
        (1000, [{0: 4.0}], [5.0]),
        # One that overtakes is found by the next search.
        (3, [{1: 12.0}, {}, {}], [8.0, 8.0, 12.0]),
    ],
)
def test_eigenvalues_that_change_places(
    interval: int, changes: list[dict[int, float]], expected: list[float]
) -> None:
    follow = WarmStartedEigenpairs(0.03, max_products=100, search_interval=interval)
    values = np.concatenate([[8.0, 5.0], np.linspace(0, 1, 58)])
    assert follow(np.diag(values), 0).values[0] == pytest.approx(8.0, rel=0.01)
    found = []
    for step, change in enumerate(changes, 1):
        values[[*change]] = [*change.values()]
        found.append(follow(np.diag(values), step).values[0])
    assert found == pytest.approx(expected, rel=0.01)


# Following


def turned(matrix: Block, angle: float) -> Block:
    """The matrix in a basis that is turned a little in each plane of neighbouring axes."""
    sine, cosine = np.sin(angle), np.cos(angle)
    rotation = np.eye(len(matrix))
    for i in range(len(matrix) - 1):
        plane = np.eye(len(matrix))
        plane[i : i + 2, i : i + 2] = [[cosine, -sine], [sine, cosine]]
        rotation = rotation @ plane
    return rotation @ matrix @ rotation.T


def test_following_takes_a_few_products() -> None:
    """The largest eigenvalue of a slowly turning, growing matrix, in a third of the products."""
    generator = np.random.default_rng(0)
    matrix = np.diag(np.concatenate([[8.0, 6.0, 4.0], 0.1 * generator.standard_normal(97)]))
    follow = WarmStartedEigenpairs(0.03, max_products=100, search_interval=10)
    products = []
    for step in range(40):
        found = follow(matrix, step)
        assert found.converged
        assert found.values[0] == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=0.005)
        products.append(found.products)
        matrix = 1.02 * turned(matrix, 0.005)
    assert all(count >= 10 for count in products[::10])
    assert max(np.delete(products, range(0, 40, 10))) == 1


@pytest.mark.slow
def test_what_is_followed_is_an_eigenvalue_whatever_the_jump() -> None:
    """Close to one, and never above the largest, even where another is the largest.

    Those that have become larger are found by the next search: it may take ``search_interval``. The
    gap to the next eigenvalue may be another one after a jump, so that a few errors are larger than
    the tolerance; the residual is bounded nevertheless.
    """
    errors = []
    for seed in range(SEQUENCES):
        follow = WarmStartedEigenpairs(0.03, max_products=100, search_interval=3)
        for step, matrix in enumerate(changing_matrices(np.random.default_rng(seed))):
            found = follow(matrix, STEPS * seed + step)
            values = np.linalg.eigvalsh(matrix)
            rounding = 1e-9 * np.abs(values).max()
            if not found.converged:
                assert found.reason
                continue
            assert found.values[0] <= values[-1] + rounding
            nearest = np.abs(values - found.values[0]).min()
            assert nearest <= found.residuals[0] + rounding
            assert found.residuals[0] <= (0.03 / MARGIN) ** 0.5 * abs(found.values[0]) + rounding
            if abs(found.values[0]) > rounding:
                errors.append(nearest / abs(found.values[0]))
    assert np.mean(np.array(errors) > 0.03) < 0.01


def test_a_search_continues_from_its_state() -> None:
    matrix = turned(np.diag(np.linspace(0, 3, 60)), 0.1)
    whole, half = (WarmStartedEigenpairs(0.03, 100, search_interval=4) for _ in range(2))
    for step in range(2):
        whole(matrix, step), half(matrix, step)
    resumed = WarmStartedEigenpairs(0.03, 100, search_interval=4)
    resumed.load_state_dict(half.state_dict())
    for step in range(2, 6):
        one, other = whole(matrix, step), resumed(matrix, step)
        assert (one.values, one.products) == (other.values, other.products)
