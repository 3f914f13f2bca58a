"""What all questions and loops share: who watches, data, networks, the plain loop, the lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.diagnosis.networks import mlp as mlp  # for all modules
from benchmarks.diagnosis.networks import stack as stack


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


Recipe: TypeAlias = Callable[[nn.Module], Optimizer]
"""What makes a model's optimizer."""


def always(step: int) -> bool:
    return True


def fit(
    watch: Watch,
    model: nn.Module,
    optimizer: Optimizer | Recipe,
    loss: Callable[..., Tensor],
    data: Iterator[tuple[Tensor, ...]],
    *,
    zero: bool = True,
    every: int = 1,
    clip: float = math.inf,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
    when: Callable[[int], object] = always,
    update: Callable[[Optimizer, int], object] | None = None,
) -> list[float]:
    """The plain loop. ``loss`` gets the batch. Returns losses.

    The optimizer takes a step after ``every`` so many backward passes, or ``update`` does it; the
    ``schedule`` takes one behind that at the steps ``when`` it should.
    """
    watch.follow(model)
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model)
    scheduler = None if schedule is None else schedule(made)
    losses = []
    for step, batch in enumerate(data):
        if zero and step % every == 0:
            made.zero_grad()
        value = loss(*batch)
        with watch.step(step, value, made):
            value.backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if update is not None:
            update(made, step)
        elif step % every == every - 1:
            made.step()
        if scheduler is not None and when(step):
            scheduler.step()
        losses.append(value.item())
    return losses


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
    optimizer: Optimizer | Recipe,
    data: Data,
    steps: int = 150,
    size: int = 32,
    *,
    predict: Callable[[Tensor], Tensor] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = usual_loss,
    shuffle: bool = True,
    **options: Any,
) -> float:
    """Trains as ``fit`` does with its options, and returns how bad the model is in evaluation mode.

    That is the share of wrong classes, or the misfit where targets are numbers.
    """
    outputs = predict or model
    batch = batches(data.x, data.y, size=size, steps=steps, shuffle=shuffle)
    fit(watch, model, optimizer, lambda x, y: loss(outputs(x), y), batch, **options)
    was_training = model.training
    model.eval()
    found = misfit(outputs, data) if data.test_y.ndim > 1 else errors(outputs, data)
    model.train(was_training)
    return found


def mean_of_last(losses: list[float]) -> float:
    return sum(losses[-20:]) / 20


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


def sgd(lr: float = 0.1, momentum: float = 0.9, **options: float) -> Recipe:
    return lambda model: torch.optim.SGD(model.parameters(), lr, momentum, **options)


def adam(lr: float = 3e-3, **options: float) -> Recipe:
    return lambda model: torch.optim.Adam(model.parameters(), lr, **options)


def begun(
    model: nn.Module, weight: Callable[[Tensor], object] | None = None, bias: float | None = None
) -> nn.Module:
    """The model, whose linear layers begin with other weights and biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            if weight is not None:
                weight(layer.weight)
            if bias is not None:
                nn.init.constant_(layer.bias, bias)
    return model


def normal(deviation: float) -> Callable[[Tensor], object]:
    """Normal numbers for ``begun``."""
    return partial(nn.init.normal_, std=deviation)


Change: TypeAlias = Callable[[Tensor], Tensor]


def altered(data: Data, x: Change = lambda x: x, y: Change = lambda y: y) -> Data:
    """The data with other inputs and targets."""
    return Data(x(data.x), y(data.y), x(data.test_x), y(data.test_y))


def of_itself(data: Data) -> Data:
    """The data whose targets are the inputs."""
    return data._replace(y=data.x, test_y=data.test_x)


def real_points(spread: float = 0.3, centre: tuple[float, float] = (2.0, -1.0)) -> Tensor:
    """Points of a normal distribution in a plane, which a generator is to make."""
    return drawn(640, 2) * spread + torch.tensor(centre)


def critic_loss(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Cross-entropy of what is real and what isn't."""
    scores = critic(torch.cat([real, fake]))
    truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
    return functional.binary_cross_entropy_with_logits(scores, truth)


def generate(watch: Watch, answer: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> float:
    """Trains a GAN whose generator is watched; ``answer`` is the loss of what it has made.

    Returns how far the mean of what it makes is from that of the real points.
    """
    generator, critic, real = mlp(8, 32, 2), mlp(2, 32, 1), real_points()
    other = adam(5e-3)(critic)

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8))
        other.zero_grad()
        critic_loss(critic, x, fake.detach()).backward()
        other.step()
        return answer(critic, fake)

    fit(watch, generator, adam(), loss, batches(real, steps=400))
    return distance_of_means(generator, real)


def distance_of_means(generator: nn.Module, real: Tensor) -> float:
    """Between what is generated and what is real."""
    return (generator(torch.randn(500, 8)).mean(0) - real.mean(0)).norm().item()


def values_of_a_chain(
    watch: Watch, model: nn.Module, target: nn.Module, ends: bool = True, **options: Any
) -> float:
    """Trains Q-values of six states in a row, the last of which ``ends`` an episode.

    Returns the mean error of the values.
    """
    state = torch.eye(6)
    place = torch.randint(6, (800,), generator=torch.Generator().manual_seed(0))

    def loss(here: Tensor) -> Tensor:
        with torch.no_grad():
            later = target(state[(here + 1).clamp(max=5)])[:, 0]
        goal = 1 + 0.95 * later * (1 - (here == 5).float() * ends)
        return functional.smooth_l1_loss(model(state[here])[:, 0], goal)

    fit(watch, model, adam(0.01), loss, batches(place, steps=400), **options)
    truth = torch.tensor([sum(0.95**k for k in range(6 - i)) for i in range(6)])
    return (model(state)[:, 0] - truth).abs().mean().item()


# What was asked, where, and how it is trained.


Form = Callable[[bool, Watch], float]


@dataclass(frozen=True)
class Question:
    """``train(fixed, watch)`` trains the twin or the faulty form, and returns how bad it is.

    The twin is at most as bad as ``limit``, the faulty form more than 1.5 times that, or NaN.
    ``cause`` says what the mistake is. A fault of those that are ``right`` names it, and the ones
    that are ``true`` are so without being the cause: that nothing is learnt, for example. Where no
    rule has a name for the cause, none is right, and an alarm about something else is wrong. A
    healthy loop has only the fixed form.
    """

    name: str
    source: str
    limit: float
    right: tuple[str, ...]
    true: tuple[str, ...]
    cause: str
    train: Form

    def hurts(self, faulty: float, fixed: float) -> bool:
        """Whether the mistake does harm, and the twin trains."""
        return fixed <= self.limit and not faulty <= 1.5 * self.limit


QUESTIONS: list[Question] = []
LOOPS: list[Question] = []

DIVERGES = "lr_too_high lr_edge"
FLAT = "labels_random constant_output"
DEAD = f"{FLAT} dead_units no_gradient lr_too_low"
NAN = "nonfinite_loss nonfinite_gradient"


def ask(
    name: str, source: str, limit: float, right: str, true: str, cause: str, train: Form
) -> None:
    """Adds a question."""
    rights, trues = tuple(right.split()), tuple(true.split())
    QUESTIONS.append(Question(name, source, limit, rights, trues, cause, train))


def question(source: str, limit: float, right: str, true: str) -> Callable[[Form], Form]:
    """Adds a function to the questions, whose docstring is the cause."""

    def add(train: Form) -> Form:
        cause = " ".join((train.__doc__ or "").split())
        ask(train.__name__, source, limit, right, true, cause, train)
        return train

    return add


def healthy(limit: float) -> Callable[[Callable[[Watch], float]], Callable[[Watch], float]]:
    """Adds a function to the healthy loops."""

    def add(train: Callable[[Watch], float]) -> Callable[[Watch], float]:
        run(train.__name__, limit, train)
        return train

    return add


def run(name: str, limit: float, train: Callable[[Watch], float]) -> None:
    """Adds a healthy loop."""
    LOOPS.append(Question(name, "", limit, (), (), "", lambda fixed, watch: train(watch)))


def github(place: str) -> str:
    """The address of an issue: ``owner/name#number``."""
    repository, number = place.split("#")
    return f"https://github.com/{repository}/issues/{number}"


def pull(place: str) -> str:
    """The address of a pull request: ``owner/name#number``."""
    return github(place).replace("/issues/", "/pull/")
