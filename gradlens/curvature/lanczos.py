"""Lanczos' method from one start vector."""

from __future__ import annotations

from dataclasses import dataclass

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


def lanczos(products: Products, start: Tensor, steps: int) -> Tridiagonal:
    """At most ``steps`` steps from ``start`` ``[D]``, with full reorthogonalisation in float64.

    Paige (1972), variant A1; stops early where the space becomes invariant.
    """
    steps = min(steps, products.size)
    basis = torch.empty(steps, products.size, dtype=torch.float64, device=products.device)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    basis[0] = start / start.norm()
    for step in range(steps):
        image = products(basis[step])
        diagonal.append(float(basis[step] @ image))
        rest = projected_out(image, basis[: step + 1])
        size = float(rest.norm())
        if step + 1 == steps or size <= products.rounding:
            break
        off_diagonal.append(size)
        rest = projected_out(rest / size, basis[: step + 1])
        basis[step + 1] = rest / rest.norm()
    return Tridiagonal(np.array(diagonal), np.array(off_diagonal))
