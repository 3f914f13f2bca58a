"""Small float64 networks with data in unequal batches, and dense matrices over all of the data.

The references compute the losses of all samples at once, or of one sample at a time, by torch.func.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import jacrev

from tests.cases import references

Reduction = Literal["mean", "sum"]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DataProblem:
    """A model, the data in batches, and the loss by its reduction."""

    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    loss_of: Callable[[Reduction], Loss]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def inputs(self) -> Tensor:
        return torch.cat([inputs for inputs, _ in self.batches])

    @property
    def targets(self) -> Tensor:
        return torch.cat([targets for _, targets in self.batches])


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

LOSSES: dict[str, type[nn.Module]] = {
    "cross-entropy": nn.CrossEntropyLoss,
    "mse": nn.MSELoss,
    "bce": nn.BCEWithLogitsLoss,
}

SIZES = (3, 1, 4)


def build(model: str, loss: str, seed: int = 0) -> DataProblem:
    """The problem of these names, the same every time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = MODELS[model]().double()
        samples = sum(SIZES)
        inputs = torch.randn(samples, 4, dtype=torch.float64)
        targets = {
            "cross-entropy": torch.randint(3, (samples,)),
            "mse": torch.randn(samples, 3, dtype=torch.float64),
            "bce": torch.randint(2, (samples, 3)).double(),
        }[loss]
    batches = list(zip(inputs.split(SIZES), targets.split(SIZES), strict=True))
    return DataProblem(network, batches, lambda reduction: LOSSES[loss](reduction=reduction))


def dense_jacobian(problem: DataProblem) -> Tensor:
    """``[N, C, D]``."""
    flat, outputs = references.as_function(problem.model, problem.inputs)
    return jacrev(outputs)(flat)


def dense_hessian(problem: DataProblem, reduction: Reduction) -> Tensor:
    loss, targets = problem.loss_of(reduction), problem.targets
    return references.dense_hessian(problem.model, lambda o: loss(o, targets), problem.inputs)


def dense_ggn(problem: DataProblem, reduction: Reduction) -> Tensor:
    loss, targets = problem.loss_of(reduction), problem.targets
    return references.dense_ggn(problem.model, lambda o: loss(o, targets), problem.inputs)


def sample_gradients(problem: DataProblem, reduction: Reduction) -> Tensor:
    """Gradients of single samples' losses ``[N, D]``, by one backward pass for each."""
    flat, outputs = references.as_function(problem.model, problem.inputs)
    loss = problem.loss_of(reduction)

    def losses(each: Tensor) -> Tensor:
        rows = zip(outputs(each).split(1), problem.targets.split(1), strict=True)
        return torch.stack([loss(row, target) for row, target in rows])

    return jacrev(losses)(flat)


def dense_empirical_fisher(problem: DataProblem, reduction: Reduction) -> Tensor:
    gradients = sample_gradients(problem, reduction)
    return gradients.T @ gradients / (len(gradients) if reduction == "mean" else 1)


def dense_covariance(problem: DataProblem, reduction: Reduction) -> Tensor:
    return torch.cov(sample_gradients(problem, reduction).T, correction=0)
