"""What all questions and loops share: who watches, data, small networks and the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from benchmarks.diagnosis.development.networks import mlp as mlp  # for all modules


class Watch:
    """Whoever watches a training. This one watches nothing."""

    def follow(self, model: nn.Module) -> None:
        """Training of the model begins, before its first forward pass."""

    def step(self, step: int, loss: Tensor, optimizer: Optimizer) -> AbstractContextManager[object]:
        """The context around the backward pass."""
        return nullcontext()

    def log(self, step: int, **numbers: float) -> None:
        """Numbers that the loop has computed."""


class Data(NamedTuple):
    """A data set in two parts."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def split(x: Tensor, y: Tensor) -> Data:
    """Three quarters for training, by an order that is always the same."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[: len(x) * 3 // 4], order[len(x) * 3 // 4 :]
    return Data(x[train], y[train], x[test], y[test])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def digits(scale: bool = True) -> Data:
    """Handwritten digits, 64 pixels; from 0 to 255 without ``scale``."""
    x, y = datasets.load_digits(return_X_y=True)
    pixels = torch.tensor(x, dtype=torch.float32)
    pixels = (pixels - 4.88) / 6.02 if scale else pixels * 255 / 16
    return split(pixels, torch.tensor(y))


@cache
def images() -> Data:
    """Digits as images of one channel."""
    return Data(*(t.reshape(-1, 1, 8, 8) if t.ndim == 2 else t for t in digits()))


@cache
def tabular(scale: bool = True) -> Data:
    """Tumours with 30 features, whose raw sizes go from 0.001 to 4000."""
    x, y = datasets.load_breast_cancer(return_X_y=True)
    features = torch.tensor(x, dtype=torch.float32)
    if scale:
        features = (features - features.mean(0)) / features.std(0)
    return split(features, torch.tensor(y, dtype=torch.float32))


@cache
def friedman(noise: float = 0.1, outputs: int = 1) -> Data:
    """Regression of a smooth function of ten features, with targets ``[N, outputs]``."""
    x, y = datasets.make_friedman1(1600, noise=noise, random_state=0)
    target = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    features = torch.tensor(x * 3.46 - 1.73, dtype=torch.float32)
    return split(features, torch.cat([target, features[:, 5:6] * features[:, 6:7]], 1)[:, :outputs])


@cache
def moons(noise: float = 0.15) -> Data:
    """Two interleaved half circles."""
    x, y = datasets.make_moons(1200, noise=noise, random_state=0)
    return split(torch.tensor(x, dtype=torch.float32), torch.tensor(y))


@cache
def waves(length: int = 20) -> Data:
    """Sine waves ``[N, length, 1]`` of different frequency, and the value that follows."""
    draw = np.random.default_rng(0)
    phase, speed = draw.uniform(0, 6.28, (800, 1)), draw.uniform(0.2, 0.6, (800, 1))
    values = torch.tensor(np.sin(phase + speed * np.arange(length + 1)), dtype=torch.float32)
    return split(values[:, :-1, None], values[:, -1:])


@cache
def tokens(length: int = 12, vocabulary: int = 8) -> Data:
    """Sequences in which each token is the sum of the two before, and the token that follows."""
    start = torch.randint(vocabulary, (1200, 2), generator=torch.Generator().manual_seed(0))
    rows = [start[:, 0], start[:, 1]]
    while len(rows) < length + 1:
        rows.append((rows[-1] + rows[-2]) % vocabulary)
    return split(torch.stack(rows[:-1], 1), torch.stack(rows[1:], 1))


def cnn(norm: bool = False, classes: int = 10) -> nn.Sequential:
    """Two convolutions for images of 8 times 8."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, classes),
    )


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one on its last state."""

    def __init__(self, layer: nn.Module, hidden: int, outputs: int = 1) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


def batches(
    *tensors: Tensor, size: int = 32, steps: int = 150, shuffle: bool = True
) -> Iterator[tuple[Tensor, ...]]:
    """Mini-batches of as many epochs as the steps need; the last one of an epoch may be smaller."""
    while steps > 0:
        order = torch.randperm(len(tensors[0])) if shuffle else torch.arange(len(tensors[0]))
        for rows in order.split(size)[:steps]:
            yield tuple(t[rows] for t in tensors)
        steps -= -(-len(order) // size)


def fit(
    watch: Watch,
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[..., Tensor],
    data: Iterator[tuple[Tensor, ...]],
    update: Callable[[int], object] | None = None,
    zero: bool = True,
) -> list[float]:
    """The plain loop. ``loss`` gets the batch, ``update`` the step's number. Returns losses."""
    watch.follow(model)
    losses = []
    for step, batch in enumerate(data):
        if zero:
            optimizer.zero_grad()
        value = loss(*batch)
        with watch.step(step, value, optimizer):
            value.backward()
        if update is None:
            optimizer.step()
        else:
            update(step)
        losses.append(value.item())
    return losses


def in_turn(*actions: Callable[[], object]) -> Callable[[int], None]:
    """What the optimizer, the schedule and others do after each backward pass."""

    def update(step: int) -> None:
        for act in actions:
            act()

    return update


def usual_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy for classes, binary or not, and the squared error for numbers."""
    if y.ndim > 1:
        return (out - y).square().mean()
    if y.is_floating_point():
        return functional.binary_cross_entropy_with_logits(out[:, 0], y)
    return functional.cross_entropy(out, y)


def learn(
    watch: Watch,
    model: nn.Module,
    optimizer: Optimizer,
    data: Data,
    steps: int = 150,
    size: int = 32,
    *,
    predict: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = usual_loss,
    update: Callable[[int], object] | None = None,
    zero: bool = True,
    shuffle: bool = True,
) -> float:
    """Trains, and returns the share of wrong classes, or the misfit where targets are numbers."""
    outputs = predict or model
    batch = batches(data.x, data.y, size=size, steps=steps, shuffle=shuffle)
    fit(watch, model, optimizer, lambda x, y: loss(outputs(x), y), batch, update, zero)
    return misfit(outputs, data) if data.test_y.ndim > 1 else errors(outputs, data)


@torch.no_grad()
def errors(model: Callable[[Tensor], Tensor], data: Data) -> float:
    """The share of test samples whose class is wrong; 1 if an output isn't finite."""
    scores = model(data.test_x)
    if not scores.isfinite().all():
        return 1.0
    found = scores.argmax(1) if scores.shape[-1] > 1 else (scores[:, 0] > 0).long()
    return (found != data.test_y.long()).float().mean().item()


@torch.no_grad()
def misfit(model: Callable[[Tensor], Tensor], data: Data) -> float:
    """The mean squared error on test samples over the variance of their targets."""
    return ((model(data.test_x) - data.test_y).square().mean() / data.test_y.var()).item()


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum, **options)


def adam(model: nn.Module, lr: float = 3e-3, **options: float) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr, **options)
