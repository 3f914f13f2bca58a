"""Small float64 networks with data in unequal batches, and dense matrices over all of the data.

The references compute the losses of all samples at once, or of one sample at a time, by torch.func.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import jacrev

from tests.cases import references

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Problem:
    """A model, the data in batches, and the loss by its reduction, or that of its own."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss_of: Callable[[Reduction], nn.Module]
    reduction: Reduction = "mean"

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def inputs(self) -> Tensor:
        return torch.cat([inputs for inputs, _ in self.batches])

    @property
    def targets(self) -> Tensor:
        return torch.cat([targets for _, targets in self.batches])

    @property
    def criterion(self) -> nn.Module:
        return self.loss_of(self.reduction)

    @property
    def mean_scale(self) -> float:
        """What makes the loss's curvature that of the mean loss."""
        return 1 / len(self.inputs) if self.reduction == "sum" else 1.0

    def forward(self) -> tuple[Tensor, Tensor]:
        """The loss of all data and the outputs, with their graphs."""
        outputs = self.model(self.inputs)
        return self.criterion(outputs, self.targets), outputs


class LastOutput(nn.Module):
    """The outputs of a recurrent network's last step."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 2, batch_first=True)
        self.readout = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.recurrent(x.reshape(len(x), 2, 2))[0][:, -1])


class Tied(nn.Module):
    """A network that uses its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))[:, :3]


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


class Unused(nn.Module):
    """The loss doesn't depend on ``spare``, and on ``shift`` only linearly for the Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(2, 2))
        self.layer = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) + self.shift


def pooled() -> nn.Module:
    convolution = nn.Conv2d(1, 2, 2, padding=1)
    rest = (nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), convolution, *rest)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    convolution = nn.Conv2d(1, 2, 2, padding=1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), convolution, nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    )


def piecewise_linear() -> nn.Module:
    convolution = nn.Conv2d(1, 2, 2, padding=1)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), convolution, nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    )


def normalised() -> nn.Module:
    """BatchNorm in eval mode, with running statistics that aren't the initial ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    model(torch.randn(8, 4, dtype=torch.float64))
    return model.eval()


def frozen() -> nn.Module:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "piecewise linear": piecewise_linear,
    "recurrent": LastOutput,
    "normalised": normalised,
    "tied": Tied,
    "frozen": frozen,
}
OF_ONE_BATCH: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "pooled": pooled,
    "unused": Unused,
    **{name: MODELS[name] for name in ("perceptron", "tied")},
}
"""Those of which the matrices of one loss are compared."""

LOSSES: dict[str, type[nn.Module]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "mse": nn.MSELoss,
    "bce": nn.BCEWithLogitsLoss,
}

SIZES = (3, 1, 4)


def build(model: str, loss: str, reduction: Reduction = "mean") -> Problem:
    """The problem of these names, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = (MODELS | OF_ONE_BATCH)[model]().double()
        samples = sum(SIZES)
        inputs = torch.randn(samples, 4, dtype=torch.float64)
        targets = {
            "cross-entropy": torch.randint(3, (samples,)),
            "mse": torch.randn(samples, 3, dtype=torch.float64),
            "bce": torch.randint(2, (samples, 3)).double(),
        }[loss]
    batches = list(zip(inputs.split(SIZES), targets.split(SIZES), strict=True))
    return Problem(network, batches, lambda kind: LOSSES[loss](reduction=kind), reduction)


def dense_jacobian(problem: Problem) -> Tensor:
    """``[N, C, D]``."""
    flat, outputs = references.as_function(problem.model, problem.inputs)
    return jacrev(outputs)(flat)


def dense_hessian(problem: Problem, reduction: Reduction | None = None) -> Tensor:
    """``[D, D]``."""
    loss, targets = problem.loss_of(reduction or problem.reduction), problem.targets
    return references.dense_hessian(problem.model, lambda o: loss(o, targets), problem.inputs)


def dense_ggn(problem: Problem, reduction: Reduction | None = None) -> Tensor:
    """``[D, D]``."""
    loss, targets = problem.loss_of(reduction or problem.reduction), problem.targets
    return references.dense_ggn(problem.model, lambda o: loss(o, targets), problem.inputs)


def sample_gradients(problem: Problem, reduction: Reduction) -> Tensor:
    """Gradients of single samples' losses ``[N, D]``, by one backward pass for each."""
    flat, outputs = references.as_function(problem.model, problem.inputs)
    loss = problem.loss_of(reduction)

    def losses(each: Tensor) -> Tensor:
        rows = zip(outputs(each).split(1), problem.targets.split(1), strict=True)
        return torch.stack([loss(row, target) for row, target in rows])

    return jacrev(losses)(flat)


def dense_empirical_fisher(problem: Problem, reduction: Reduction) -> Tensor:
    gradients = sample_gradients(problem, reduction)
    return gradients.T @ gradients / (len(gradients) if reduction == "mean" else 1)


def dense_covariance(problem: Problem, reduction: Reduction) -> Tensor:
    return torch.cov(sample_gradients(problem, reduction).T, correction=0)
