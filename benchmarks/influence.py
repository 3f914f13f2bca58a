"""Influence scores beside training without the sample: ``python -m benchmarks.influence``.

Prints the rows of ``docs/influence.csv``. Three networks are trained on digits to a minimum, with
weight decay, in float64. Then each of some training samples is left out and training goes on to the
next minimum, and the change of the mean test loss is compared with the score: by Spearman's rank
correlation, with a 95 % interval (Bonett and Wright, 2000), and by the slope of a line through
zero. The scores of TracIn at the minimum, gₙᵀḡ, are compared in the same way.
"""

from __future__ import annotations

import copy
import csv
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn

import gradlens

TRAIN, TEST, LEFT_OUT, DECAY = 200, 300, 50, 0.01
LOSS = nn.CrossEntropyLoss()

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic regression": lambda: nn.Linear(64, 10),
    "MLP": lambda: nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)),
    "convolutional network": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(36, 10),
    ),
}  # fmt: skip


def data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test data; of the training labels, a tenth are wrong."""
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    train, test = order[:TRAIN], order[TRAIN : TRAIN + TEST]
    labels[train[::10]] = (labels[train[::10]] + 1) % 10
    return (inputs[train], labels[train]), (inputs[test], labels[test])


def trained(model: nn.Module, inputs: Tensor, labels: Tensor, divisor: int) -> nn.Module:
    """At the minimum of the summed loss over ``divisor`` with weight decay, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=250, max_eval=500, tolerance_grad=1e-7,
        tolerance_change=0, history_size=50, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        squares = sum(p.square().sum() for p in model.parameters())
        loss = LOSS(model(inputs), labels) * len(labels) / divisor + DECAY / 2 * squares
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def interval(rho: float, n: int) -> tuple[float, float]:
    """Of 95 %, by Fisher's transformation with the standard error of Bonett and Wright."""
    half = norm.ppf(0.975) * np.sqrt((1 + rho**2 / 2) / (n - 3))
    return float(np.tanh(np.arctanh(rho) - half)), float(np.tanh(np.arctanh(rho) + half))


def row(name: str, build: Callable[[], nn.Module]) -> list[str]:
    torch.manual_seed(0)
    (inputs, labels), test = data()
    model = trained(build().double(), inputs, labels, TRAIN)
    train = [*zip(inputs.split(64), labels.split(64), strict=True)]
    start = time.process_time()
    found = gradlens.influence(model, LOSS, train, [test], damping=DECAY)
    seconds = time.process_time() - start
    with gradlens.per_sample_gradients(model) as of_train:
        LOSS(model(inputs), labels).backward()
    with gradlens.per_sample_gradients(model) as of_test:
        LOSS(model(test[0]), test[1]).backward()
    mean = {name: each.mean() for name, each in of_test.items()}
    tracin = of_train.dot(mean).numpy() / TRAIN
    with torch.no_grad():
        before = LOSS(model(test[0]), test[1])
    changes = []
    for left_out in range(LEFT_OUT):
        kept = torch.arange(TRAIN) != left_out
        without = trained(copy.deepcopy(model), inputs[kept], labels[kept], TRAIN)
        with torch.no_grad():
            changes.append(float(LOSS(without(test[0]), test[1]) - before))
    shown = [name, str(sum(p.numel() for p in model.parameters()))]
    truth = np.array(changes)
    shown += [*agreement(found.scores[:LEFT_OUT], truth), agreement(tracin[:LEFT_OUT], truth)[0]]
    return [*shown, str(found.products), f"{seconds:.2f}"]


def agreement(scores: NDArray[np.float64], truth: NDArray[np.float64]) -> tuple[str, str]:
    rho = float(spearmanr(scores, truth).statistic)
    low, high = interval(rho, len(truth))
    slope = float(scores @ truth / (scores @ scores))
    return f"{rho:.3f} ({low:.3f} to {high:.3f})", f"{slope:.2f}"


if __name__ == "__main__":
    writer = csv.writer(sys.stdout)
    for name, build in NETWORKS.items():
        writer.writerow(row(name, build))
        sys.stdout.flush()
