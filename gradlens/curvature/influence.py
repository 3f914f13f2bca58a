"""What leaving out a training sample changes on test data, to first order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradlens.curvature.factors import MAX_BYTES, SamplesJacobians
from gradlens.curvature.hessian import GGNOperator
from gradlens.curvature.inverse import VECTORS, InverseOperator
from gradlens.curvature.operator import Products, flat, shaped
from gradlens.curvature.over_data import (
    BatchLoss,
    LossFunction,
    LossOverData,
    Split,
    SumOverData,
    as_pair,
)
from gradlens.graph.loss import LossReduction
from gradlens.numerics.tensors import double
from gradlens.samples.plan import Plans

RANK = 20
"""The rank of the preconditioner, whose products take one pass together, or some.

A trade-off: for networks of a thousand parameters, it halved the products of a system with a
damping of 0.01 or less, and 40 saved another sixth.
"""

BYTES_OF_RANK = 4 * torch.float64.itemsize
"""Memory of the preconditioner for each parameter and rank, while it is made."""


@dataclass(frozen=True)
class Influence:
    """By how much the loss of test data rises if a training sample is left out, approximately.

    ``scores`` are ``[N]`` for the mean loss of all test data, or ``[N, M]`` for each of M test
    samples, in the order of the data. Those of samples that help are positive. ``residuals``
    ``[1]`` or ``[M]`` are those of the linear systems, relative to their right sides, and
    ``products`` the number of products with the matrix. Scores are NaN where a system wasn't solved
    to the tolerance; ``reason`` says why.
    """

    scores: NDArray[np.float64]
    residuals: NDArray[np.float64]
    products: int
    reason: str = ""


def influence(
    model: nn.Module,
    loss: LossFunction,
    train: Iterable[Any],
    test: Iterable[Any],
    *,
    damping: float,
    by_sample: bool = False,
    parameters: Sequence[str] | None = None,
    loss_reduction: LossReduction = "mean",
    split: Split = as_pair,
    tolerance: float = 1e-6,
    max_products: int = 300,
) -> Influence:
    """The change of the test loss if each training sample is left out, to first order.

    For training sample n it is (1/N) ḡᵀ(G + damping·I)⁻¹gₙ (Koh and Liang, 2017, Eq. 2, for a
    weight of −1/N), with its gradient gₙ, the gradient ḡ of the mean test loss and the generalised
    Gauss-Newton matrix G of the mean training loss in place of the Hessian, which needn't be
    positive definite (Bae et al., 2022, Sec. 3). Units are those of the loss. ``damping`` is the
    weight of ½‖θ‖² beside the mean training loss, that is the weight decay of SGD, or more.

    ``loss(outputs, targets)`` is called with ``model(inputs)`` of each batch; it must be the mean
    or the sum over the batch's samples, as ``loss_reduction`` says. ``train`` and ``test`` are
    iterables of batches, such as lists or DataLoaders without shuffling, and ``split`` makes
    ``(inputs, targets)`` of batches that aren't such pairs. With ``by_sample``, each test sample
    has scores of its own, which takes a linear system for each. ``parameters`` are names of
    parameters, or of modules for all of theirs; by default, all that require a gradient.

    The system is solved by conjugate gradients to a residual of ``tolerance``, with at most
    ``max_products`` passes through the training data. They are preconditioned where that takes no
    more than 2 GiB, up to three million parameters. Beside that, memory is that of one batch and of
    some vectors of all parameters, whatever N and M are. The model runs in its present mode, and is
    left as it was. Of a model that several processes train, each must have all of the data.

    Raises ``ValueError`` as ``GGNOperator.over_data`` does for the model, the loss and the data,
    and for a negative damping; ``UnavailableError`` where samples are coupled, as by ``BatchNorm``
    in train mode, and where a parameter has no per-sample gradients.
    """
    train_loss, test_loss = (
        LossOverData(model, loss, data, parameters, loss_reduction, split, joined=False)
        for data in (train, test)
    )
    matrix = SumOverData(train_loss, GGNOperator._of_batches(train_loss))
    inverse = InverseOperator(
        matrix,
        damping * train_loss.divisor,
        tolerance=tolerance,
        max_products=max_products,
        rank=RANK if RANK * matrix.shape[0] * BYTES_OF_RANK <= MAX_BYTES else 0,
    )
    if not by_sample:
        mean = flat(test_loss.mean_gradient(), matrix.device)[None]
        found = _of_gradients(mean, inverse, train_loss, model)
        return Influence(found.scores[:, 0], found.residuals, found.products, found.reason)
    together = Products(matrix).together(kept=VECTORS)
    groups = (range(start, start + together) for start in range(0, test_loss.samples, together))
    parts = [
        _of_gradients(test_loss.gradients_of(group), inverse, train_loss, model) for group in groups
    ]
    return Influence(
        np.concatenate([part.scores for part in parts], axis=1),
        np.concatenate([part.residuals for part in parts]),
        sum(part.products for part in parts),
        next((part.reason for part in parts if part.reason), ""),
    )


def _of_gradients(
    gradients: Tensor, inverse: InverseOperator, train_loss: LossOverData, model: nn.Module
) -> Influence:
    """The scores ``[N, k]`` of test losses with these gradients ``[k, D]``."""
    found = inverse.solve_many(gradients.cpu().double().numpy())
    parameters, plans = train_loss.parameters, Plans()
    vectors = [
        shaped(torch.tensor(each.vector, dtype=torch.float64, device="cpu"), parameters)
        for each in found
    ]
    directions = [dict(zip(parameters, parts, strict=True)) for parts in vectors]
    scores: list[Tensor] = []

    def add(batch: BatchLoss) -> None:
        ggn = GGNOperator(batch.loss, batch.tensors, parameters)
        factor = batch.samples if train_loss.loss_reduction == "mean" else 1
        jacobians = SamplesJacobians(ggn.jacobian, model, plans)
        operators = jacobians.operators(ggn.loss_gradient * factor)
        along = double(torch.zeros(batch.samples, len(found), device="cpu"))
        for name, each in operators.items():
            placed = (direction[name].to(each.device, each.dtype) for direction in directions)
            along += torch.stack([each.dot(v) for v in placed], dim=1).cpu()
        scores.append(along)

    train_loss.each(add)
    along = torch.cat(scores).numpy() * train_loss.divisor / train_loss.samples
    solved = np.array([each.converged for each in found])
    return Influence(
        np.where(solved, along, np.nan),
        np.array([each.residual for each in found]),
        sum(each.products for each in found),
        next((each.reason for each in found if not each.converged), ""),
    )
