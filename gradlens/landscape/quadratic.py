"""The first two derivatives of a loss along a direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradlens.curvature.hessian import HessianOperator
from gradlens.curvature.loss_over_data import LossOverData, SumOverData
from gradlens.history.undefined import Undefined
from gradlens.numerics.norms import inner
from gradlens.numerics.unavailable import UnavailableError


def slope_and_curvature(loss: LossOverData, parts: Sequence[Tensor]) -> tuple[float, float]:
    """gᵀd and dᵀHd, with gradient g and Hessian H of the mean loss at the model's present values.

    ``parts`` of d have the shapes of the loss's parameters. Takes two passes through the data. The
    curvature is ``Undefined`` where the loss can't be differentiated twice.
    """
    vectors = [part.to(p.device) for part, p in zip(parts, loss.parameters.values(), strict=True)]
    slope = _inner(loss.mean_gradient(), vectors)
    hessian = SumOverData(loss, lambda batch: HessianOperator(batch.loss, loss.parameters))
    try:
        image = hessian.product(vectors)
    except UnavailableError as error:
        return slope, Undefined(str(error))

    return slope, _inner(image, vectors) / loss.divisor


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    pairs = zip(one, other, strict=True)
    return sum(float(inner(*(_accurate(part) for part in pair))) for pair in pairs)


def _accurate(part: Tensor) -> Tensor:
    return part.flatten().to(torch.promote_types(part.dtype, torch.float32))
