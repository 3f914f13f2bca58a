"""Backward passes of gradlens's own leave no trace, and what goes wrong in them is a reason."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import gradlens
from tests.cases.references import assert_covered, per_sample_gradients_of_losses
from tests.cases.row_cases import C, D, H, N, Net, classes, randn


def test_a_loss_that_is_a_parameter() -> None:
    weight = nn.Parameter(torch.ones(()))
    model = Net(lambda net, _: net.weight, weight=weight)
    with gradlens.per_sample_gradients(model) as gradients:
        model(torch.ones(3)).backward()
    assert not gradients
    with pytest.raises(KeyError, match="is a leaf of the graph"):
        gradients["weight"]


@pytest.mark.parametrize("samples", [N, 70])
def test_gradients_that_do_not_scale_have_no_labels(samples: int) -> None:
    torch.manual_seed(0)

    def compute(net: Any, x: Tensor) -> Tensor:
        features = net.inner(x).tanh()
        features.register_hook(torch.sign)
        return net.head(features)

    model = Net(compute, inner=nn.Linear(D, H), head=nn.Linear(H, C)).double()
    gradlens.extend(model)
    with gradlens.per_sample_gradients(model) as gradients:
        F.cross_entropy(model(randn(samples, D)), classes(samples)).backward()
    assert set(gradients) == {"head.weight", "head.bias"}


BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another reduction": lambda _, losses: losses.sum(),
    "other weights": lambda _, losses: (losses * torch.arange(N)).sum(),
    "another term": lambda loss, losses: loss / 2 + losses.square().mean(),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_what_backward_reaches_beside_the_loss_is_refused(name: str) -> None:
    torch.manual_seed(0)
    model = gradlens.extend(nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)).double())
    losses = F.cross_entropy(model(randn(N, D)), classes(N), reduction="none")
    loss = losses.mean()
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=N) as gradients:
        BACKWARD[name](loss, losses).backward()
    assert not gradients
    with pytest.raises(KeyError, match="in other ways than by the loss that was passed"):
        gradients["0.weight"]


def test_a_regulariser_beside_the_loss() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, C)).double())
    losses = F.cross_entropy(model(randn(N, D)), classes(N), reduction="none")
    expected = per_sample_gradients_of_losses(losses, model)
    loss = losses.mean()
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=N) as gradients:
        (loss / 3 + sum(p.square().sum() for p in model.parameters())).backward()
    assert gradients.keys() == expected.keys()
    for name in expected:
        assert_close(gradients[name].dense(), expected[name])


def test_bias_of_the_rows_of_a_product() -> None:
    """As many rows as features."""
    torch.manual_seed(0)
    model = Net(
        lambda net, x: torch.addmm(net.bias, x, net.weight).tanh(),
        bias=nn.Parameter(torch.randn(C, 1)),
        weight=nn.Parameter(torch.randn(D, C)),
    ).double()
    gradlens.extend(model)
    assert_covered(model, model(randn(C, D)).square().mean(1))


class Running(nn.Module):
    """Scales with a buffer, which each call then changes in place, or replaces."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.inner = nn.Linear(D, H)
        self.register_buffer("scale", torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x) * self.scale.clone()
        change = 1 + 0.1 * found.detach().abs().mean(0)
        if self.replaces:
            self.scale = self.scale * change
        else:
            self.scale.mul_(change)
        return found


WITH_BUFFERS: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(D, H)),
    "changed in place": lambda: Running(replaces=False),
    "replaced": lambda: Running(replaces=True),
}


def test_an_encoder_is_evaluated_as_with_any_hook() -> None:
    """Torch's fast path is for encoder layers without hooks, and takes no notice of autocast."""
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))

    def evaluated(prepare: Callable[[nn.Module], object]) -> Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        prepare(layer)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    usual = evaluated(lambda layer: layer.register_forward_hook(lambda *_: None))
    assert_close(evaluated(gradlens.extend), usual, rtol=0, atol=0)


@pytest.mark.parametrize("layer", WITH_BUFFERS)
def test_gradients_inside_a_checkpoint_that_changes_buffers(layer: str) -> None:
    """They are those of the backward pass, and not of a layer that has run more often."""
    torch.manual_seed(0)
    model = Net(
        lambda net, x: net.head(checkpoint(net.inner, x, use_reentrant=False)),
        inner=WITH_BUFFERS[layer](),
        head=nn.Linear(H, C),
    ).double()
    loss = F.cross_entropy(model(randn(N, D)), classes(N))
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=N) as gradients:
        loss.backward()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert_close(gradients[name].mean(), parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Tanh])
def test_hooks_of_saved_tensors_run_as_often(loss: Any, activation: Any) -> None:
    """Facts read no tensor that hooks of the user have stored elsewhere."""

    def unpacked(is_tracked: bool) -> int:
        torch.manual_seed(0)
        counts: list[None] = []
        model = nn.Sequential(nn.Linear(D, C), activation())
        cockpit = gradlens.Cockpit(model, [])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, lambda tensor: [counts.append(None), tensor][1]
        )
        for step in range(3):
            with hooks:
                value = loss(model(torch.randn(N, D)), torch.rand(N, C))
            with cockpit(step, loss=value) if is_tracked else nullcontext():
                value.backward()
        return len(counts)

    assert unpacked(is_tracked=True) == unpacked(is_tracked=False) > 0
