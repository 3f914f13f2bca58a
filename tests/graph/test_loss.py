"""How losses are reduced over the batch, and what single rows contribute to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradlens.graph.loss import read_loss

SAMPLES = 6
OUTPUTS = torch.linspace(-1, 1, 18).reshape(SAMPLES, 3)
LABELS = torch.arange(SAMPLES) % 3


def entropy(x: Tensor, how: str, **options: float) -> Tensor:
    return functional.cross_entropy(x, LABELS, reduction=how, **options)


def reduced(losses: Tensor, how: str) -> Tensor:
    return losses.mean() if how == "mean" else losses.sum()


TERMS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "a function": entropy,
    "times a weight": lambda x, how: 3 * entropy(x, how) / 2,
    "smoothed": lambda x, how: entropy(x, how, label_smoothing=0.1),
    "of pixels": lambda x, how: reduced(entropy(x, "none") + x.exp().sum(1), how),
    "weighted": lambda x, how: entropy(x, how) + 0.01 * reduced(x.square().mean(1), how),
    "of two outputs": lambda x, how: torch.stack([entropy(x, how), entropy(-x, how)]).sum(),
    "its own": lambda x, how: reduced(torch.maximum(x, -2 * x), how),
    "a margin": lambda x, how: functional.soft_margin_loss(x, x.detach().sign(), reduction=how),
    "by axes": lambda x, how: reduced(x.square(), how) if how == "sum" else x.square().mean((0, 1)),
    "with a penalty": lambda x, how: entropy(x, how) + torch.ones(4, requires_grad=True).sum(),
    "a part": lambda x, how: entropy(x, how) / 1.5,
}


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", TERMS)
def test_of_all_terms(name: str, how: str) -> None:
    x = OUTPUTS.clone().requires_grad_()
    assert read_loss(TERMS[name](x, how), SAMPLES).reduction == how


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda x: entropy(x, "sum") / SAMPLES, "mean"),
        (lambda x: x.square().sum() / x.numel(), "mean"),
        (lambda x: x.exp().sum() / x.square().sum(), ""),
        (lambda x: entropy(x, "mean") + x.square().sum(), ""),
        (lambda x: x[0, 0].exp(), ""),
    ],
)
def test_of_divided_and_mixed_terms(loss: Callable[[Tensor], Tensor], expected: str) -> None:
    assert read_loss(loss(OUTPUTS.clone().requires_grad_()), SAMPLES).reduction == expected


def test_of_a_part_of_a_step() -> None:
    """The division by the number of parts is none by the number of samples."""
    loss = entropy(OUTPUTS.clone().requires_grad_(), "sum") / 8
    assert read_loss(loss, SAMPLES).reduction == "mean"
    assert read_loss(loss, SAMPLES, scale=1 / 8).reduction == "sum"


def test_without_a_number_of_samples() -> None:
    x = OUTPUTS.clone().requires_grad_()
    for loss in (entropy(x, "sum"), x.sum()):
        assert read_loss(loss).reduction == "sum"


def test_of_a_term_beside_a_deep_network() -> None:
    x = deep = OUTPUTS.clone().requires_grad_()
    for _ in range(100):
        deep = deep + deep.tanh()
    assert read_loss(entropy(x, "sum") + deep.mean(), SAMPLES).reduction == ""


MULTIPLES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "itself": (lambda x: entropy(x, "mean"), True),
    "a sum": (lambda x: entropy(x, "sum"), True),
    "scaled": (lambda x: -3 * entropy(x, "none").mean() / 2, True),
    "squares": (lambda x: functional.mse_loss(x, x.detach() + 1), True),
    "two classes": (lambda x: functional.binary_cross_entropy(x.sigmoid(), 0.5 + 0 * x), True),
    "with a penalty": (lambda x: entropy(x, "mean") + x.square().mean(), False),
    "with a constant": (lambda x: entropy(x, "mean") + 1, False),
    "its inverse": (lambda x: 1 / entropy(x, "mean"), False),
    "weighted rows": (lambda x: (entropy(x, "none") * torch.arange(SAMPLES)).mean(), False),
    "some rows": (lambda x: entropy(x, "none")[:2].mean(), False),
    "its own": (lambda x: x.exp().mean(), False),
}


@pytest.mark.parametrize("name", MULTIPLES)
def test_rows_of_a_multiple_of_a_loss_function_add_up_to_it(name: str) -> None:
    function, is_multiple = MULTIPLES[name]
    loss = function(OUTPUTS.clone().requires_grad_())
    rows = read_loss(loss).rows("mean", scale=0.5)
    assert (rows is not None) == is_multiple
    if rows is not None:
        assert len(rows) == SAMPLES
        torch.testing.assert_close(rows.sum(1).mean(), loss.detach() / 0.5)
