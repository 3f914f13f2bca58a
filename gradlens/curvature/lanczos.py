"""Lanczos' method from several start vectors, each by itself."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from gradlens.curvature.orthogonal import projected_out
from gradlens.curvature.products import Products


@dataclass(frozen=True)
class Tridiagonal:
    """H in the Krylov space of a start vector: ``diagonal`` ``[m]``, ``off_diagonal`` ``[m - 1]``.

    Where m is below the number of steps requested, the space is invariant under H.
    """

    diagonal: NDArray[np.float64]
    off_diagonal: NDArray[np.float64]

    def quadrature(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Nodes and weights ``[m]`` of Gauss' rule for vᵀf(H)v, v the unit start vector.

        The nodes are the eigenvalues, the weights the squared first entries of the eigenvectors
        (Golub and Welsch, 1969, Eq. 2.6); the weights sum to one.
        """
        nodes, vectors = eigh_tridiagonal(self.diagonal, self.off_diagonal)
        return np.asarray(nodes, np.float64), np.asarray(vectors[0], np.float64) ** 2


def lanczos(products: Products, starts: Iterable[Tensor], steps: int) -> Iterator[Tridiagonal]:
    """At most ``steps`` steps from each start ``[D]``, with full reorthogonalisation in float64.

    Paige (1972), variant A1; stops early where the space becomes invariant. Of a matrix over data,
    the steps of as many starts as fit in memory take one pass.
    """
    steps = min(steps, products.size)
    remaining = iter(starts)
    while group := list(islice(remaining, products.together(kept=steps))):
        yield from _side_by_side(products, [_steps(products, each, steps) for each in group])


_Steps = Generator[Tensor, Tensor, Tridiagonal]
"""Yields a vector for each step, and is sent its product."""


def _side_by_side(products: Products, runs: list[_Steps]) -> list[Tridiagonal]:
    """The results of the runs, whose next vectors are multiplied together."""
    found: dict[int, Tridiagonal] = {}
    waiting = {place: next(run) for place, run in enumerate(runs)}
    while waiting:
        images = products.each([*waiting.values()])
        for place, (_, image) in zip([*waiting], images, strict=True):
            try:
                waiting[place] = runs[place].send(image)
            except StopIteration as ended:
                found[place] = ended.value
                del waiting[place]
    return [found[place] for place in range(len(runs))]


def _steps(products: Products, start: Tensor, steps: int) -> _Steps:
    basis = torch.empty(steps, products.size, dtype=torch.float64, device=products.device)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    basis[0] = start / start.norm()
    for step in range(steps):
        image = yield basis[step]
        diagonal.append(float(basis[step] @ image))
        rest = projected_out(image, basis[: step + 1])
        size = float(rest.norm())
        if step + 1 == steps or size <= products.rounding:
            break
        off_diagonal.append(size)
        rest = projected_out(rest / size, basis[: step + 1])
        basis[step + 1] = rest / rest.norm()
    return Tridiagonal(np.array(diagonal), np.array(off_diagonal))
