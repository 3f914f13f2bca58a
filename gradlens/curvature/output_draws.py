"""Random gradients of each sample's outputs whose second moments are the loss's Hessian there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.ggn import GGNOperator
from gradlens.curvature.ggn_diagonal import normal_like, roots, signed_sum

_Map: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map, sample by sample, of tensors of the outputs' shape."""


def drawing(ggn: GGNOperator, generator: np.random.Generator) -> Callable[[], Tensor]:
    """A function that draws sₙ ``[N, *C]`` with E[sₙsₙᵀ] = Hₙ: a root of Hₙ times random signs.

    Squared errors and cross-entropy have roots in closed form, up to a factor. Whether Hₙ is of
    that form is checked by its product with a random vector, which is wrong with probability zero.
    For all other losses the root is computed; ``UnavailableError`` as raised by ``roots``.
    """
    outputs = ggn.outputs.detach()
    probe = normal_like(outputs, generator)
    curved = ggn.loss_hessian_product(probe)
    for hessian, root in _closed_forms(outputs):
        factor = _factor(curved, hessian(probe))
        if factor is not None:
            return partial(_signed, root, factor**0.5, outputs, generator)
    columns = roots(ggn, generator)

    def draw() -> Tensor:
        return signed_sum(columns, _signs(columns.new_empty(columns.shape[:2]), generator))

    return draw


def _closed_forms(outputs: Tensor) -> list[tuple[_Map, _Map]]:
    """Products with the Hessians of squared errors and of cross-entropy, and with their roots."""
    forms: list[tuple[_Map, _Map]] = [(lambda u: u, lambda u: u)]
    if outputs.dim() > 1:
        forms.append(_of_cross_entropy(outputs.softmax(1)))
    return forms


def _of_cross_entropy(p: Tensor) -> tuple[_Map, _Map]:
    """diag(p) − ppᵀ = RRᵀ with R = diag(√p) − p√pᵀ, for the probabilities p of axis 1."""
    roots_of_p = p.sqrt()

    def hessian(u: Tensor) -> Tensor:
        return p * u - p * (p * u).sum(1, keepdim=True)

    def root(u: Tensor) -> Tensor:
        return roots_of_p * u - p * (roots_of_p * u).sum(1, keepdim=True)

    return hessian, root


def _factor(curved: Tensor, expected: Tensor) -> float | None:
    """c ≥ 0 with ``curved`` = c·``expected`` to half of the digits; ``None`` if there is none."""
    factor = float((curved * expected).sum() / expected.square().sum())
    difference = (curved - factor * expected).norm()
    agrees = difference <= torch.finfo(curved.dtype).eps ** 0.5 * curved.norm()
    return factor if bool(agrees) and factor >= 0 else None


def _signed(root: _Map, size: float, like: Tensor, generator: np.random.Generator) -> Tensor:
    return root(_signs(like, generator)) * size


def _signs(like: Tensor, generator: np.random.Generator) -> Tensor:
    drawn = torch.from_numpy(generator.integers(0, 2, tuple(like.shape), dtype=np.int8))
    return 2 * drawn.to(like.device, like.dtype) - 1
