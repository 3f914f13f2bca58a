"""The loss's Hessian in closed form, beside torch's derivative of the loss's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hvp
from torch.nn import functional

from gradlens.curvature import GGNOperator
from gradlens.curvature.loss_hessian import closed_form
from gradlens.graph.graph import Graph

torch.manual_seed(0)
LABELS, CLASS_WEIGHTS = torch.randint(5, (7,)), torch.rand(5, dtype=torch.float64)
IGNORED = torch.where(torch.arange(7) < 3, -100, LABELS)
NUMBERS, ROWS = torch.rand(7, 5, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
PIXELS = torch.randint(5, (7, 3, 4))

Loss = Callable[[Tensor, str], Tensor]


def cross_entropy(targets: Tensor, **options: object) -> Loss:
    return lambda z, how: functional.cross_entropy(z, targets, reduction=how, **options)  # type: ignore[arg-type]


def of_logits(**options: Tensor) -> Loss:
    return lambda z, how: functional.binary_cross_entropy_with_logits(
        z, NUMBERS, reduction=how, **options
    )


KNOWN: dict[str, tuple[Loss, tuple[int, ...]]] = {
    "cross-entropy": (cross_entropy(LABELS), (7, 5)),
    "weights of classes": (cross_entropy(LABELS, weight=CLASS_WEIGHTS), (7, 5)),
    "ignored targets": (cross_entropy(IGNORED), (7, 5)),
    "smoothed labels": (cross_entropy(LABELS, label_smoothing=0.1, weight=CLASS_WEIGHTS), (7, 5)),
    "targets that are probabilities": (cross_entropy(NUMBERS), (7, 5)),
    "many classes": (cross_entropy(torch.arange(400)), (400, 1000)),
    "a single sample": (cross_entropy(LABELS[0]), (5,)),
    "images": (cross_entropy(PIXELS), (7, 5, 3, 4)),
    "words": (lambda z, how: cross_entropy(LABELS.repeat(2))(z.view(-1, 5), how), (2, 7, 5)),
    "weights of rows": (lambda z, _: (cross_entropy(LABELS)(z, "none") * ROWS).sum(), (7, 5)),
    "squared errors": (lambda z, how: functional.mse_loss(z, NUMBERS, reduction=how), (7, 5)),
    "weighted squared errors": (
        lambda z, _: (functional.mse_loss(z, NUMBERS, reduction="none") * ROWS[:, None]).mean(),
        (7, 5),
    ),
    "logits": (of_logits(), (7, 5)),
    "weighted logits": (of_logits(weight=CLASS_WEIGHTS, pos_weight=CLASS_WEIGHTS + 1), (7, 5)),
    "a sum of two": (
        lambda z, how: cross_entropy(LABELS)(z, how) + 0.3 * of_logits()(z, how) + 2,
        (7, 5),
    ),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a square": lambda z: functional.cross_entropy(z, LABELS) ** 2,
    "another term": lambda z: functional.cross_entropy(z, LABELS) + (z**4).sum(),
    "targets from the outputs": lambda z: functional.mse_loss(z, z.sin()),
    "own labels": lambda z: functional.cross_entropy(z, z.softmax(1)),
    "a temperature": lambda z: functional.cross_entropy(z / 2, LABELS),
    "log-probabilities twice": lambda z: functional.cross_entropy(z.log_softmax(1), LABELS),
    "another axis": lambda z: functional.cross_entropy(z[:, :5].T, LABELS[:5]),
}


def check(loss: Callable[[Tensor], Tensor], shape: tuple[int, ...], is_known: bool) -> None:
    leaf = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    outputs = leaf * 1
    value = loss(outputs)
    assert (closed_form(Graph(value), outputs) is not None) == is_known
    along = torch.randn(shape, dtype=torch.float64)
    found = GGNOperator(value, outputs, {"leaf": leaf}).loss_hessian_product(along)
    torch.testing.assert_close(found, hvp(loss, leaf.detach(), along)[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", KNOWN)
def test_usual_losses_have_a_closed_form(name: str, how: str) -> None:
    loss, shape = KNOWN[name]
    check(lambda z: loss(z, how), shape, is_known=True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_differentiated_twice(name: str) -> None:
    check(OTHERS[name], (7, 5), is_known=False)
