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
from gradlens.numerics.unavailable import UnavailableError

_Map: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map, sample by sample, of tensors of the outputs' shape."""


def drawing(ggn: GGNOperator, generator: np.random.Generator) -> Callable[[], Tensor]:
    """A function that draws sₙ ``[N, *C]`` with E[sₙsₙᵀ] = Hₙ: a root of Hₙ times random signs.

    Squared errors and cross-entropy have roots in closed form, up to a factor. Whether Hₙ is of
    that form is checked by its product with a random vector, which is wrong with probability zero.
    For other losses of few outputs the root is computed. Of many outputs, such as those for each
    word of a text or each pixel of an image, it has a closed form for cross-entropy with a weight
    for each word, or without some of them, and for losses that are a sum over single outputs.
    ``UnavailableError`` as raised by ``roots`` otherwise.
    """
    outputs = ggn.outputs.detach()
    probe = normal_like(outputs, generator)
    curved = ggn.loss_hessian_product(probe)
    for hessian, root in _closed_forms(outputs):
        factor = _factor(curved, hessian(probe))
        if factor is not None:
            return partial(_signed, root, factor**0.5, outputs, generator)
    try:
        columns = roots(ggn, generator)
    except UnavailableError:
        diagonal = _diagonal(ggn, generator)
        if diagonal is not None:
            return partial(_signed, lambda u: u, diagonal.sqrt(), outputs, generator)
        for axis in dict.fromkeys([1, outputs.dim() - 1]):
            weights = _weights_of_rows(ggn, axis, generator) if outputs.dim() > 2 else None
            if weights is not None:
                _, root = _of_cross_entropy(outputs.softmax(axis), axis)
                return partial(_signed, root, weights.sqrt(), outputs, generator)
        raise

    def draw() -> Tensor:
        return signed_sum(columns, _signs(columns.new_empty(columns.shape[:2]), generator))

    return draw


def _diagonal(ggn: GGNOperator, generator: np.random.Generator) -> Tensor | None:
    """h ≥ 0 of the outputs' shape, where the loss's Hessian is diag(h).

    ``None`` if it isn't, by its product with a random vector.
    """
    outputs = ggn.outputs.detach()
    diagonal = ggn.loss_hessian_product(torch.ones_like(outputs))
    probe = normal_like(outputs, generator)
    difference = ggn.loss_hessian_product(probe) - diagonal * probe
    close = torch.finfo(probe.dtype).eps ** 0.5 * (diagonal * probe).norm()
    is_diagonal = bool(difference.norm() <= close) and not bool((diagonal < 0).any())
    return diagonal if is_diagonal else None


def _weights_of_rows(ggn: GGNOperator, axis: int, generator: np.random.Generator) -> Tensor | None:
    """The weights w ≥ 0 ``[N, ..., 1, ...]`` of a sum of cross-entropies, with classes on an axis.

    ``None`` if the loss isn't one, by products with two random vectors that must agree on them.
    """
    outputs = ggn.outputs.detach()
    hessian, _ = _of_cross_entropy(outputs.softmax(axis), axis)
    found: list[Tensor] = []
    for probe in (normal_like(outputs, generator) for _ in range(2)):
        curved, expected = ggn.loss_hessian_product(probe), hessian(probe)
        size = expected.square().sum(axis, keepdim=True)
        weights = (curved * expected).sum(axis, keepdim=True) / size
        found.append(weights)
        if _factor(curved, weights * expected) is None or bool((weights < 0).any()):
            return None
    return found[0] if _factor(*found) is not None else None


def _closed_forms(outputs: Tensor) -> list[tuple[_Map, _Map]]:
    """Products with the Hessians of squared errors and of cross-entropy, and with their roots."""
    forms: list[tuple[_Map, _Map]] = [(lambda u: u, lambda u: u)]
    if outputs.dim() > 1:
        forms.append(_of_cross_entropy(outputs.softmax(1), 1))
    return forms


def _of_cross_entropy(p: Tensor, axis: int) -> tuple[_Map, _Map]:
    """diag(p) − ppᵀ = RRᵀ with R = diag(√p) − p√pᵀ, for the probabilities p of an axis.

    In place, since outputs for each word of a text and of a vocabulary are large.
    """

    def hessian(u: Tensor) -> Tensor:
        return less_sums(p * u)

    def root(u: Tensor) -> Tensor:
        return less_sums(p.sqrt().mul_(u))

    def less_sums(products: Tensor) -> Tensor:
        return products.sub_(p * products.sum(axis, keepdim=True))

    return hessian, root


def _factor(curved: Tensor, expected: Tensor) -> float | None:
    """c ≥ 0 with ``curved`` = c·``expected`` to half of the digits; ``None`` if there is none."""
    factor = float((curved * expected).sum() / expected.square().sum())
    difference = (curved - factor * expected).norm()
    agrees = difference <= torch.finfo(curved.dtype).eps ** 0.5 * curved.norm()
    return factor if bool(agrees) and factor >= 0 else None


def _signed(
    root: _Map, size: float | Tensor, like: Tensor, generator: np.random.Generator
) -> Tensor:
    return root(_signs(like, generator)) * size


def _signs(like: Tensor, generator: np.random.Generator) -> Tensor:
    drawn = torch.from_numpy(generator.integers(0, 2, tuple(like.shape), dtype=np.int8))
    return drawn.to(like.device, like.dtype).mul_(2).sub_(1)
