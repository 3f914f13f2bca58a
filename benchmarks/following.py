"""How accurate the largest Hessian eigenvalue is that the preset full follows, and at what cost.

``python -m benchmarks.following`` trains small networks on scikit-learn's digits, with batches that
differ from step to step and with a fixed one. At each step, it compares the eigenvalue with that of
a search to five digits. It prints how many steps followed, with how many products on average, how
many were searches, and the median, the 90th and the 100th percentile of the relative errors of the
eigenvalues that were followed; then the same errors with two products at each step and no searches.

``--parts`` compares the eigenvalue of a random quarter of a batch of 256 samples with that of the
batch instead, at every tenth step. It prints the mean and the range of their ratio.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.diagnosis.networks import conv, mlp, stack
from gradlens.curvature import HessianOperator, eigenpairs
from gradlens.curvature.eigenpairs import WarmStartedEigenpairs, ritz_pairs

TOLERANCE, INTERVAL, PRODUCTS = 0.03, 10, 100
"""As in the preset full."""
STEPS = 100
BATCHES = ((64, False), (256, False), (256, True))
"""Sizes, and whether the batch is fixed."""


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(64, 200, 100, 10),
    "convolutional": lambda: stack(
        nn.Unflatten(1, (1, 8, 8)),
        conv(1, 16),
        nn.MaxPool2d(2),
        conv(16, 32),
        nn.Flatten(),
        nn.Linear(512, 10),
    ),
    "normalised": lambda: mlp(64, 200, 100, 10, norm=nn.BatchNorm1d),
}


@dataclass(frozen=True)
class Found:
    """Of one step: the eigenvalue, the products it took, and whether they were a search."""

    value: float
    products: int
    searched: bool
    exact: float

    @property
    def error(self) -> float:
        return abs(self.value - self.exact) / abs(self.exact)


def batches(model: nn.Module, samples: int, fixed: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs and targets of each step of a training run; the graph is alive."""
    data, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(data / 16 - 0.3, dtype=torch.float32), torch.tensor(labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = torch.randperm(len(inputs))[:samples]
    for _ in range(STEPS):
        chosen = first if fixed else torch.randperm(len(inputs))[:samples]
        batch = model(inputs[chosen]), targets[chosen]
        yield batch
        optimizer.zero_grad()
        cross_entropy(*batch).backward()
        optimizer.step()


def followed(build: Callable[[], nn.Module], samples: int, fixed: bool) -> Iterator[Found]:
    """As in the preset full."""
    torch.manual_seed(0)
    model = build()
    following = WarmStartedEigenpairs(TOLERANCE, PRODUCTS, INTERVAL)
    for step, batch in enumerate(batches(model, samples, fixed)):
        matrix = HessianOperator(cross_entropy(*batch), dict(model.named_parameters()))
        exact = float(eigenpairs(matrix, seed=step).values[0])
        found = following(matrix, step)
        searched = following.state_dict()["followed"] == 0
        yield Found(float(found.values[0]), found.products, searched, exact)


def with_two_products(build: Callable[[], nn.Module], samples: int, fixed: bool) -> Iterator[Found]:
    """From the eigenvector of the first step on."""
    torch.manual_seed(0)
    model = build()
    guesses: Sequence[Tensor] = ()
    for step, batch in enumerate(batches(model, samples, fixed)):
        matrix = HessianOperator(cross_entropy(*batch), dict(model.named_parameters()))
        exact = ritz_pairs(matrix, 1, "largest", 1e-5, 300, (), step)
        found = ritz_pairs(matrix, 1, "largest", 0.0, 2, guesses, step, 0) if guesses else exact
        guesses = found.guesses
        yield Found(float(found.values[0]), found.products, step == 0, float(exact.values[0]))


def ratios_of_parts(build: Callable[[], nn.Module]) -> list[float]:
    """λ₁ of a quarter of the batch over λ₁ of the batch, at every tenth step."""
    torch.manual_seed(0)
    model, ratios = build(), []
    parameters = dict(model.named_parameters())
    for step, (outputs, targets) in enumerate(batches(model, 256, fixed=False)):
        if step % 10 == 0:
            losses = (cross_entropy(outputs[:samples], targets[:samples]) for samples in (256, 64))
            matrices = (HessianOperator(loss, parameters) for loss in losses)
            whole, part = (float(eigenpairs(matrix, seed=step).values[0]) for matrix in matrices)
            ratios.append(part / whole)
    return ratios


def print_parts() -> None:
    """Print a line for each network whose samples aren't coupled."""
    for name in ("mlp", "convolutional"):
        ratios = ratios_of_parts(NETWORKS[name])
        print(f"{name:14} {np.mean(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def errors(steps: Sequence[Found]) -> str:
    """The percentiles of the relative errors."""
    found = [each.error for each in steps if not each.searched]
    return ", ".join(f"{100 * e:.1f}" for e in np.quantile(found or [np.nan], [0.5, 0.9, 1]))


def print_followed() -> None:
    """Print a line for each network and batch."""
    for name, build in NETWORKS.items():
        for samples, fixed in BATCHES:
            steps = [*followed(build, samples, fixed)]
            at_most_two = [*with_two_products(build, samples, fixed)]
            following = [each.products for each in steps if not each.searched]
            print(
                f"{name:14} {samples:4} samples, {'fixed  ' if fixed else 'differ '} "
                f"{len(following):3} steps followed with {np.mean(following):.1f} products, "
                f"{STEPS - len(following):2} searches, {sum(each.products for each in steps):4} "
                f"products in all; errors in per cent: {errors(steps)}; with two products: "
                f"{errors(at_most_two)}",
                flush=True,
            )


if __name__ == "__main__":
    if "--parts" in sys.argv:
        print_parts()
    else:
        print_followed()
