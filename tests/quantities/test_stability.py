"""The limits of Stability against training on random quadratics, and what has no limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

from gradlens import Cockpit, quantities
from gradlens.quantities.optimizer import StabilityLimit, stability_limit
from tests.cases.steps import tracked_backward

PROBLEMS, SIZES = 200, (2, 3)
CONSTANT = 1 - 1e-15
"""A decay rate of second moments with which they stay as they are."""

OPTIMIZERS: dict[str, tuple[type[Optimizer], float, tuple[dict[str, Any], dict[str, Any]]]] = {
    "SGD": (SGD, 8.0, ({}, {})),
    "momentum": (SGD, 8.0, ({"momentum": 0.9}, {"momentum": 0.5})),
    "Nesterov": (SGD, 8.0, ({"momentum": 0.8, "nesterov": True}, {"momentum": 0.9})),
    "dampening": (SGD, 0.0, ({"momentum": 0.5, "dampening": 0.3}, {"momentum": 0.9})),
    "Adam": (Adam, 0.1, ({"betas": (0.9, CONSTANT)}, {"betas": (0.5, CONSTANT), "eps": 1e-3})),
    "AMSGrad": (Adam, 0.0, ({"betas": (0.9, CONSTANT), "amsgrad": True},) * 2),
    "AdamW": (AdamW, 30.0, ({"betas": (0.8, CONSTANT)}, {"betas": (0.95, CONSTANT)})),
    "RMSprop": (RMSprop, 0.1, ({"alpha": CONSTANT, "momentum": 0.9}, {"alpha": CONSTANT})),
    "centered": (RMSprop, 0.1, ({"alpha": CONSTANT, "momentum": 0.9, "centered": True},) * 2),
    "Adagrad": (Adagrad, 0.1, ({}, {"lr_decay": 1e-9})),
}
"""The class, the weight decay of the second group, and what else the two are set to."""


def state(like: Tensor, optimizer: str) -> dict[str, Tensor]:
    """After a million steps, of which the last ones had gradients of zero."""
    zero, root = torch.zeros_like(like), 1e-2 * (torch.rand_like(like) + 0.5)
    squares = root.square() * (1 - CONSTANT**1e6 if optimizer.startswith(("Adam", "AMS")) else 1.0)
    found = {"step": torch.tensor(1e6), "exp_avg": zero, "exp_avg_sq": squares, "sum": squares}
    found |= {"square_avg": squares, "momentum_buffer": zero.clone(), "grad_avg": root / 3}
    if optimizer == "AMSGrad":
        found |= {"exp_avg_sq": squares / 2, "max_exp_avg_sq": squares}
    return found


def largest_of(limit: StabilityLimit, hessians: Tensor) -> Tensor:
    """λmax(S(H + Λ)S) of each problem, from dense matrices ``[problems, D, D]``."""
    one = [torch.ones(PROBLEMS, size, dtype=torch.float64) for size in SIZES]
    scaling = torch.cat([s * o for s, o in zip(limit.scaling or (1.0, 1.0), one, strict=True)], 1)
    decay = torch.cat([d * o for d, o in zip(limit.decay or (0.0, 0.0), one, strict=True)], 1)
    matrix = scaling[:, :, None] * (hessians + torch.diag_embed(decay)) * scaling[:, None]
    return torch.linalg.eigvalsh(matrix)[:, -1]


def with_ratios(limit: StabilityLimit, hessians: Tensor, ratios: Tensor) -> Tensor:
    """The multiples of Hessians that have these ratios, by bisection, since decay isn't scaled."""
    low, high = torch.zeros_like(ratios), torch.full_like(ratios, 1e4)
    for _ in range(50):
        middle = (low + high) / 2
        below = largest_of(limit, middle[:, None, None] * hessians) / limit.threshold < ratios
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low[:, None, None] * hessians


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_diverges_if_and_only_if_the_ratio_exceeds_one(name: str) -> None:
    """torch's own optimizer, on 200 random quadratics at once, since it treats elements alone."""
    torch.manual_seed(len(name))
    kind, decay, settings = OPTIMIZERS[name]
    x, y = (nn.Parameter(1e-100 * torch.randn(PROBLEMS, n, dtype=torch.float64)) for n in SIZES)
    first = {"params": [x], "lr": 0.01, "weight_decay": 0.0, **settings[0]}
    second = {"params": [y], "lr": 0.03, "weight_decay": decay, **settings[1]}
    optimizer = kind([first, second])
    if kind is not SGD:
        optimizer.state.update({p: state(p, name) for p in (x, y)})
    limit = stability_limit(optimizer, {"x": x, "y": y})
    assert bool(limit.decay) == (decay > 0 and kind is not AdamW)
    roots = torch.randn(PROBLEMS, sum(SIZES), 4, dtype=torch.float64)  # one curvature is zero
    ratios = 0.98 - 0.5 * torch.rand(PROBLEMS, dtype=torch.float64)
    ratios[::2] = 2 - ratios[::2]
    hessians = with_ratios(limit, roots @ roots.mT, ratios)
    norms = []
    for _ in range(300):
        both = torch.cat([x, y], 1)
        norms.append(both.norm(dim=1))
        x.grad, y.grad = (hessians @ both[:, :, None])[:, :, 0].split(SIZES, 1)
        optimizer.step()
    assert torch.equal(norms[-1] > 10 * norms[100], ratios > 1)


@torch.no_grad()
def test_steps_of_any_momentum_are_unstable_only_above_the_limit() -> None:
    """x' = ρx − η(ag + bm')/p with m' = βm + g, whose ρ, η, a, b, β and p differ everywhere."""
    torch.manual_seed(0)
    size = sum(SIZES)

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(PROBLEMS, size, dtype=torch.float64)

    kept, momentum, step = between(-0.9, 1), between(0, 0.99), between(0.01, 0.1) / between(0.1, 3)
    gradient, sums = between(0, 1), between(0, 1)
    limits = (1 + kept) / (step * (gradient + sums / (1 + momentum)))
    roots = torch.randn(PROBLEMS, size, 4, dtype=torch.float64)
    scaled = roots / limits.sqrt()[:, :, None]
    ratios = torch.linalg.eigvalsh(scaled @ scaled.mT)[:, -1, None, None]
    for target in (1 - 1e-4, 1 + 1e-4):
        hessians = target / ratios * roots @ roots.mT
        of_x = torch.diag_embed(kept) - (step * (gradient + sums))[:, :, None] * hessians
        of_m = -torch.diag_embed(step * sums * momentum)
        rows = [[of_x, of_m], [hessians, torch.diag_embed(momentum)]]
        recursion = torch.cat([torch.cat(row, 2) for row in rows], 1)
        radius = torch.linalg.eigvals(recursion).abs().amax(1)
        assert ((radius > 1 + 1e-9) == (target > 1)).all()


UNKNOWN: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "AdamW before its first step": (
        lambda p: AdamW(p, lr=0.1),
        "AdamW has no moments of gradients to divide by before its first step: weight, bias",
    ),
    "Adagrad before its first step": (lambda p: Adagrad(p), "before its first step"),
    "a decay that is too large": (
        lambda p: AdamW(p, lr=0.1, weight_decay=30.0),
        "weight decay alone",
    ),
    "momentum that is too large": (lambda p: SGD(p, lr=0.1, momentum=1.0), "momentum of 1"),
    "maximising": (lambda p: SGD(p, lr=0.1, maximize=True), "maximising"),
    "dampening above 1": (lambda p: SGD(p, lr=0.1, momentum=0.5, dampening=1.5), "maximising"),
    "Muon": (lambda p: Muon([next(p)]), "no curvature is too large for Muon"),
    "another optimizer": (lambda p: torch.optim.Rprop(p), "no threshold is known for Rprop"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_optimizers_without_a_threshold(name: str) -> None:
    build, reason = UNKNOWN[name]
    model = nn.Linear(3, 2)
    optimizer = build(model.parameters())
    cockpit = Cockpit(model, [quantities.Stability()])
    tracked_backward(cockpit, 0, model(torch.randn(4, 3)).square().mean(), optimizer=optimizer)
    assert reason in cockpit.history["Stability"][0].reason


def adam_after_a_step(model: nn.Module, inputs: Tensor) -> Adam:
    optimizer = Adam(model.parameters(), eps=0.0)
    model(inputs).square().mean().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_moments_that_nothing_can_be_divided_by(value: float) -> None:
    model = nn.Linear(3, 2)
    optimizer = adam_after_a_step(model, torch.randn(4, 3))
    optimizer.state[model.bias]["exp_avg_sq"][0] = value
    cockpit = Cockpit(model, [quantities.Stability()])
    tracked_backward(cockpit, 0, model(torch.randn(4, 3)).square().mean(), optimizer=optimizer)
    reason = "what Adam divides gradients by is NaN or Inf somewhere in bias"
    assert cockpit.history["Stability"][0].reason == reason


def test_elements_without_a_gradient_so_far_are_not_counted() -> None:
    """As the rows of an embedding that are used for the first time, for which P is only ε."""
    model = nn.Embedding(3, 2)
    optimizer = adam_after_a_step(model, torch.tensor([0, 1]))
    cockpit = Cockpit(model, [quantities.Stability(tolerance=1e-6)])
    loss = model(torch.tensor([0, 1, 2])).square().sum(1).mean()  # whose Hessian is 2/3
    tracked_backward(cockpit, 0, loss, optimizer=optimizer)
    divisor = 0.1 * (optimizer.state[model.weight]["exp_avg_sq"][:2] / 0.001).sqrt().min().item()
    found = cockpit.history["Stability"][0]
    assert found["sharpness"] == pytest.approx(2 / 3 / divisor, rel=1e-5)
    for value in optimizer.state[model.weight].values():
        value.mul_(0).add_(value.dim() == 0)
    loss = model(torch.tensor([0, 1])).square().mean()
    tracked_backward(cockpit, 1, loss, optimizer=optimizer)
    assert "all gradients that Adam has had are zero" in cockpit.history["Stability"][1].reason


@torch.no_grad()
def test_curvature_of_any_size_is_the_same_to_muon() -> None:
    """So that it can't be what makes it diverge, unlike what the generalised sharpness says."""
    root = torch.randn(12, 12)
    start, found = torch.randn(4, 3), []
    for factor in (1.0, 2.0**20):
        weight = nn.Parameter(start.clone())
        optimizer = Muon([weight], lr=0.1)
        for _ in range(20):
            weight.grad = factor * (root @ (root.T @ weight.flatten())).reshape(4, 3)
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_decay_of_sgd_is_added_whatever_backward_is_called_on() -> None:
    found = []
    for factor, decay in ((1.0, 0.0), (1.0, 0.6), (4.0, 0.6)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = SGD(model.parameters(), lr=0.1, weight_decay=decay)
        cockpit = Cockpit(model, [quantities.Stability(tolerance=1e-6)])
        loss = model(torch.randn(4, 3)).square().mean()
        with cockpit(0, loss=loss, optimizer=optimizer):
            (factor * loss).backward()
        found.append(cockpit.history["Stability"][0])
    plain = found[0]["sharpness"]
    for (factor, decay), record in zip(((1.0, 0.6), (4.0, 0.6)), found[1:], strict=True):
        assert record["sharpness"] == pytest.approx(plain + decay / factor, rel=1e-5)
        assert record["ratio"] == pytest.approx((factor * plain + decay) / 20, rel=1e-5)
