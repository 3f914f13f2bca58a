"""Small float64 networks and losses with their dense curvature matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tests.cases import references
from tests.cases.data_cases import Tied


@dataclass(frozen=True)
class Problem:
    """A model with one batch; ``criterion(outputs, targets)`` is the loss."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    criterion: nn.Module

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    @property
    def mean_scale(self) -> float:
        """What makes the loss's curvature that of the mean loss."""
        return 1 / len(self.inputs) if self.criterion.reduction == "sum" else 1.0

    def forward(self) -> tuple[Tensor, Tensor]:
        """The loss and the outputs, with their graphs."""
        outputs = self.model(self.inputs)
        return self.loss_of(outputs), outputs

    def loss_of(self, outputs: Tensor) -> Tensor:
        return self.criterion(outputs, self.targets)


def dense_hessian(problem: Problem) -> Tensor:
    """``[D, D]``, of the loss as it is."""
    return references.dense_hessian(problem.model, problem.loss_of, problem.inputs)


def dense_ggn(problem: Problem) -> Tensor:
    """``[D, D]``, of the loss as it is."""
    return references.dense_ggn(problem.model, problem.loss_of, problem.inputs)


def _linear() -> nn.Module:
    return nn.Linear(4, 3)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 3))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)),
        nn.Conv2d(1, 2, 2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 3),
    )


class SquareOnce(torch.autograd.Function):
    """The square, which can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class _Unused(nn.Module):
    """The loss doesn't depend on ``spare``, and on ``shift`` only linearly for the Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(2, 2))
        self.layer = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + self.shift


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "perceptron": _perceptron,
    "convolutional": _convolutional,
    "unused": _Unused,
    "tied": Tied,
}

CRITERIA: dict[str, Callable[[], nn.Module]] = {
    f"{name}-{reduction}": lambda kind=kind, reduction=reduction: kind(reduction=reduction)
    for name, kind in {"mse": nn.MSELoss, "cross-entropy": nn.CrossEntropyLoss}.items()
    for reduction in ("mean", "sum")
}


def build(model: str, criterion: str, samples: int = 6, seed: int = 0) -> Problem:
    """The problem of these names, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = MODELS[model]().double()
        inputs = torch.randn(samples, 4, dtype=torch.float64)
        if criterion.startswith("mse"):
            targets = torch.randn(samples, 3, dtype=torch.float64)
        else:
            targets = torch.randint(3, (samples,))
    return Problem(network, inputs, targets, CRITERIA[criterion]())
