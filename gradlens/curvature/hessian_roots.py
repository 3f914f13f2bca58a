"""Roots of the loss's Hessian at each sample's outputs, and random vectors from them.

Sample n's part of the generalised Gauss-Newton matrix is JₙᵀHₙJₙ, with the Jacobian Jₙ of the
network's outputs and the loss's Hessian Hₙ there. With a root Hₙ = Σₖ sₙₖsₙₖᵀ its diagonal is
Σₖ(Jₙᵀsₙₖ)².
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradlens.curvature.hessian import GGNOperator, check_rows
from gradlens.numerics.precision import accumulable
from gradlens.numerics.unavailable import UnavailableError

_Map: TypeAlias = Callable[[Tensor], Tensor]
"""A linear map, sample by sample, of tensors of the outputs' shape."""

MAX_OUTPUTS = 256
"""Outputs K of each sample up to which a root of the loss's Hessian is computed.

A trade-off: the diagonal takes K backward passes, where Hutchinson's method estimates it from
``samples`` products, and the Hessians of N samples take N·K² numbers: 64 MiB in float64 at N = 128.
"""


def roots(ggn: GGNOperator, generator: np.random.Generator) -> Tensor:
    """Columns sₙₖ ``[K, N, *C]`` of a root of the loss's Hessian at the outputs ``[N, *C]``.

    Raises ``UnavailableError`` if the loss isn't a sum over samples or isn't convex, for more than
    ``MAX_OUTPUTS`` outputs of each sample, and for a Hessian with NaN or Inf.
    """
    outputs = ggn.outputs
    check_rows(outputs)
    n, size = len(outputs), outputs[0].numel()
    if size > MAX_OUTPUTS:
        raise UnavailableError(f"{size} outputs for each sample are more than {MAX_OUTPUTS}")

    def product(direction: Tensor) -> Tensor:
        found = ggn.loss_hessian_product(direction.reshape(outputs.shape).to(outputs.dtype))
        return accumulable(found).reshape(n, size)

    units = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    hessians = torch.stack([product(unit.expand(n, size)) for unit in units], dim=1)
    if not bool(hessians.isfinite().all()):
        raise UnavailableError("the loss's Hessian at the network's outputs contains NaN or Inf")
    values, vectors = torch.linalg.eigh((hessians + hessians.mT) / 2)
    rounding = torch.finfo(outputs.dtype).eps ** 0.5 * values.abs().max()
    probe = accumulable(normal_like(outputs, generator)).reshape(n, size)
    coupled = product(probe) - (hessians.mT @ probe[:, :, None])[:, :, 0]
    if bool((coupled.abs() > rounding).any()):
        raise UnavailableError("the loss is not a sum over samples")
    if bool((values < -rounding).any()):
        raise UnavailableError("the loss is not convex in the network's outputs")
    columns = (vectors * values.clamp(min=0).sqrt()[:, None, :]).permute(2, 0, 1)
    return columns.reshape(size, *outputs.shape).to(outputs.dtype)


def signed_sum(columns: Tensor, signs: Tensor) -> Tensor:
    """Σₖ ±sₙₖ ``[N, *C]`` of columns ``[K, N, *C]`` and their signs ``[K, N]``."""
    shape = (*signs.shape, *[1] * (columns.dim() - 2))
    return (columns * signs.to(columns).reshape(shape)).sum(0)


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


def normal_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers of another tensor's shape, dtype and device."""
    drawn = torch.from_numpy(generator.standard_normal(tuple(like.shape)))
    return drawn.to(like.device, like.dtype)
