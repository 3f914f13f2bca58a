"""Rows that a model reorders and computes with before its first layer: named right, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gradlens
from tests.cases.references import (
    assert_covered,
    per_sample_gradients_of_losses,
    right_gradients,
)
from tests.cases.row_cases import Net

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "in one row": lambda x: x.flatten(1),
    "positions permuted": lambda x: x.transpose(1, 2).flatten(1),
    "scaled": lambda x: (2 * x - 1).flatten(1),
    "negative": lambda x: -x,
    "sine": lambda x: x.sin().flatten(1),
    "squares": lambda x: x.square(),
    "noise": lambda x: x + 0.3 * torch.randn_like(x),
    "dropout": lambda x: nn.functional.dropout(x, 0.3).flatten(1),
    "mean over positions": lambda x: x.mean(1),
    "other precision": lambda x: x.float().double(),
}
"""What is computed from inputs ``[N, T, D]`` without a gradient."""

ORDERS: dict[str, Callable[[int], Tensor]] = {
    "in order": torch.arange,
    "shuffled": torch.randperm,
    "reversed": lambda n: torch.arange(n).flip(0),
    "rolled": lambda n: torch.arange(n).roll(1),
    "two exchanged": lambda n: torch.tensor([1, 0, *range(2, n)]),
}


class Reordering(nn.Module):
    """A layer on rows that were reordered and changed, and another one on its means."""

    def __init__(self, change: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.change, self.layer, self.head = change, nn.Linear(width, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        hidden = self.layer(self.change(x[order])).tanh()
        output: Tensor = self.head(hidden.mean(1) if hidden.dim() > 2 else hidden)
        return output


@pytest.mark.parametrize("samples", [2, 3, 8])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_are_those_of_their_samples(name: str, order: str, samples: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(samples, 4, 6, dtype=torch.float64)
        permuted = ORDERS[order](samples)
        model = Reordering(CHANGES[name], CHANGES[name](x).shape[-1]).double()
        gradlens.extend(model)
        losses = nn.functional.cross_entropy(model(x, permuted), permuted % 3, reduction="none")
        in_order = torch.equal(permuted, torch.arange(samples))
        if in_order or samples > 2:  # two rows say little about their order
            gradients = right_gradients(model, losses, permuted.argsort())
            assert not in_order or len(gradients) == 4


@pytest.mark.parametrize("width", [2, 4, 64])
@pytest.mark.parametrize("samples", [2, 4, 16, 100])
def test_rows_that_have_nothing_in_common_with_their_input_are_in_order(
    samples: int, width: int
) -> None:
    """As those that a frozen layer has computed."""
    covered = 0
    for seed in range(10):
        torch.manual_seed(seed)
        frozen = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        model = gradlens.extend(nn.Sequential(frozen.requires_grad_(False), nn.Linear(width, 3)))
        inputs = torch.randn(samples, width)
        with gradlens.per_sample_gradients(model) as gradients:
            model(inputs).square().sum(1).mean().backward()
        covered += len(gradients) == 2
    assert covered == 10


def test_parameters_of_the_inputs_shape_compared_with_them() -> None:
    """A counterfactual example is what the network computes with, and is near the input."""

    model = Net(
        lambda net, inputs: (net.layer(net.example), net.example - inputs),
        example=nn.Parameter(torch.randn(6, 4)),
        layer=nn.Linear(4, 3),
    )
    gradlens.extend(model)
    with gradlens.per_sample_gradients(model) as gradients:
        outputs, distance = model(torch.randn(6, 4))
        loss = nn.functional.cross_entropy(outputs, torch.arange(6) % 3)
        (loss + distance.square().sum(1).mean()).backward()
    assert not len(gradients)


class Moving(nn.Module):
    """Rows in an order of its own, behind a frozen layer or not, and maybe with that order."""

    def __init__(self, is_frozen: bool, returns_order: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4).requires_grad_(False) if is_frozen else nn.Identity()
        self.layer, self.returns_order = nn.Linear(4, 3), returns_order

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        self.order = x[:, 0].argsort()
        output = self.layer(self.stem(x[self.order]))
        return (output, self.order) if self.returns_order else output


def losses_of(model: Moving, x: Tensor, y: Tensor) -> Tensor:
    """The losses of the samples in the order of the model."""
    outputs = model(x)[0] if model.returns_order else model(x)
    return nn.functional.cross_entropy(outputs, y[model.order], reduction="none")


RESTORED: dict[str, tuple[bool, bool]] = {
    "by the caller": (True, False),
    "by the caller, by what the model returns": (True, True),
    "not at all, though the model returns it": (False, True),
}
"""Whether the loss has the batch's order again, and whether the model returns its own."""


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("name", RESTORED)
def test_orders_that_autograd_does_not_see(name: str, is_frozen: bool) -> None:
    torch.manual_seed(0)
    is_restored, returns_order = RESTORED[name]
    model = gradlens.extend(Moving(is_frozen, returns_order).double())
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 2, 1, 1, 0])
    losses = losses_of(model, x, y)
    place = model.order.argsort()
    if is_restored:
        gradients = right_gradients(model, losses[place])
    else:
        gradients = right_gradients(model, losses, place)
    if is_frozen:
        with pytest.raises(KeyError, match="in another order than the batch"):
            gradients["layer.weight"]
    else:
        assert len(gradients) == 2


@pytest.mark.parametrize("rows", [1, 2])
def test_equal_rows_do_not_show_their_order(rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, 4, dtype=torch.float64).repeat_interleave(4 // rows, 0)
    order = torch.tensor([1, 0, 2, 3])
    model = Net(lambda net, x: net.layer(x[order]), layer=nn.Linear(4, 3))
    gradlens.extend(model.double())
    with gradlens.per_sample_gradients(model) as gradients:
        nn.functional.cross_entropy(model(x), torch.arange(4)[order] % 3).backward()
    with pytest.raises(KeyError, match="in another order than the batch"):
        gradients["layer.weight"]


def test_targets_that_the_model_reorders_show_the_order() -> None:
    def forward(net: Net, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        order = lengths.argsort(descending=True)
        spectra = torch.fft.rfft(x[order]).abs()
        return nn.functional.cross_entropy(net.layer(spectra), labels[order])

    torch.manual_seed(0)
    model = gradlens.extend(Net(forward, layer=nn.Linear(9, 3)))
    x, lengths, labels = torch.randn(8, 16), torch.randperm(8), torch.arange(8) % 3
    with gradlens.per_sample_gradients(model) as gradients:
        model(x, lengths, labels).backward()
    with pytest.raises(KeyError, match="in another order than the batch"):
        gradients["layer.weight"]
    with gradlens.per_sample_gradients(model) as gradients:
        model(x, 9 - torch.arange(8), labels).backward()
    assert len(gradients) == 2


def test_windows_of_one_series_are_those_of_the_losses_that_are_passed() -> None:
    """As many windows as positions, whose matrix is symmetric."""
    torch.manual_seed(0)

    def forward(net: Net, x: Tensor) -> Tensor:
        return net.head(net.memory(x[:, :, None])[0][:, -1])

    layers = {"memory": nn.GRU(1, 4, batch_first=True), "head": nn.Linear(4, 1)}
    model = gradlens.extend(Net(forward, **layers).double())
    x = torch.randn(11, dtype=torch.float64).unfold(0, 6, 1).contiguous()
    losses = model(x).square()[:, 0]
    assert_covered(model, losses, individual_losses=losses)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_norms_of_as_many_weights_as_samples_are_no_losses(frozen: int) -> None:
    """A regulariser joins the norms of weights, some of which may be frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for parameter in [*model.parameters()][:frozen]:
        parameter.requires_grad_(False)
    gradlens.extend(model)
    x = torch.randn(4, 3, dtype=torch.float64)
    trained = nn.ModuleDict({"2": model[2]}) if frozen == 2 else model
    expected = per_sample_gradients_of_losses(model(x).square().mean(1), trained)
    with gradlens.per_sample_gradients(model) as gradients:
        norms = torch.stack([p.square().sum() for p in model.parameters()])
        (model(x).square().mean() + 0.1 * norms.sum()).backward()
    for parameter in gradients:
        torch.testing.assert_close(gradients[parameter].dense(), expected[parameter])
    assert len(gradients) == 4 - frozen
