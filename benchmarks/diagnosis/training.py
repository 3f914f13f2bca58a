"""All that a training run consists of; faults and controls replace parts of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlens.graph.loss import LossReduction

# How samples are drawn and divided into those to train on and those to validate on.


Samples: TypeAlias = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and targets ``[n, ...]``."""


@dataclass(frozen=True)
class Split:
    """Samples to train on, and others to validate on; samples are rows."""

    inputs: Tensor
    targets: Tensor
    valid_inputs: Tensor
    valid_targets: Tensor


def divided(draw: Callable[[int], Samples], trained: int, seed: int) -> Split:
    """``trained`` samples of ``draw(n)`` to train on, and a quarter of that number to validate on.

    ``draw`` uses torch's global random numbers, whose state is restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs, targets = draw(trained + trained // 4)
    return Split(inputs[:trained], targets[:trained], inputs[trained:], targets[trained:])


def fixed(seed: int, *shape: int) -> Tensor:
    """Normal numbers that belong to a task and are the same for each seed of the data."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uniform(low: float, high: float, *shape: int) -> Tensor:
    """Numbers between ``low`` and ``high``."""
    return low + (high - low) * torch.rand(shape)


def noisy(values: Tensor, deviation: float) -> Tensor:
    """The values plus normal noise."""
    return values + deviation * torch.randn_like(values)


def standardised(values: Tensor) -> Tensor:
    """Values whose mean over the samples is 0 and whose standard deviation is 1."""
    return (values - values.mean(0)) / values.std(0)


def pixels(side: int) -> tuple[Tensor, Tensor]:
    """Row and column of each pixel, ``[side, side]`` each, from -1 to 1."""
    axis = torch.linspace(-1, 1, side)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    return rows, columns


@dataclass(frozen=True)
class Batch:
    """Some samples: their indices among those that are trained on, inputs and targets."""

    ids: Tensor
    inputs: Tensor
    targets: Tensor


Order: TypeAlias = Callable[[Split, int, torch.Generator], Iterator[Tensor]]
"""Endless batches of indices, from the samples, the batch size and a source of random numbers."""


def shuffled(split: Split, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Epochs in random order, without the last batch if it isn't full."""
    samples = len(split.inputs)
    while True:
        order = torch.randperm(samples, generator=generator)
        yield from order[: samples - samples % batch_size].split(batch_size)


def unchanged(step: int, batch: Batch) -> Batch:
    """The batch as it is."""
    return batch


def nothing(model: nn.Module) -> None:
    """The network stays as it is."""


def training_mode(model: nn.Module) -> None:
    """All of the network is in training mode."""
    model.train()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer is passed: all parameters that need a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def always(step: int) -> bool:
    """At every step."""
    return True


def constant(step: int, steps: int) -> float:
    """The rate stays what it is."""
    return 1.0


@dataclass(frozen=True)
class Training:
    """A problem of the suite: a network, data, a loss, and how they are usually trained.

    ``build()`` gives the network, drawn from torch's global seed, and ``data(seed)`` the samples.
    ``loss(outputs, targets, reduction="mean")`` is a function like those of
    ``torch.nn.functional``; ``options`` are those of the ``optimizer`` besides its ``rate``. In
    ``steps`` steps the training loss falls below 0.7 of its start and the validation loss doesn't
    rise. ``unfit`` names the faults that make no sense here although they could be injected.

    Faults are injected into modules: activations are modules such as ``nn.ReLU``, consecutive
    layers stand in an ``nn.Sequential`` where they can, and experts in an ``nn.ModuleList`` called
    ``experts`` with an ``nn.Linear`` called ``gate`` beside it, which has an output for each.

    ``prepare`` changes the new network, ``mode`` sets its modules' modes before each forward pass,
    and ``trained`` gives the optimizer's parameters, or groups of them, which may have a ``factor``
    of the rate. ``order`` gives the batches' indices and
    ``change`` what becomes of a batch. ``schedule`` is the factor of the rate by step and number
    of steps. Gradients are zeroed before the steps for which ``zeroed`` says so, and the optimizer
    takes a step where ``updated`` says so. ``micro_batches`` is in how many parts a batch is
    passed through the network; ``precision`` is that of autocast. ``declared`` is the reduction
    that the cockpit is given. ``valid_loss`` is the loss of the validation, where it is another.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Split]
    loss: Callable[..., Tensor]
    optimizer: type[Optimizer]
    rate: float
    options: Mapping[str, Any] = field(hash=False)
    batch_size: int
    steps: int
    unfit: frozenset[str] = frozenset()
    prepare: Callable[[nn.Module], None] = nothing
    mode: Callable[[nn.Module], None] = training_mode
    trained: Callable[[nn.Module], Iterable[nn.Parameter]] = trainable
    order: Order = shuffled
    change: Callable[[int, Batch], Batch] = unchanged
    schedule: Callable[[int, int], float] = constant
    zeroed: Callable[[int], bool] = always
    updated: Callable[[int], bool] = always
    clip: float = math.inf
    micro_batches: int = 1
    precision: torch.dtype | None = None
    declared: LossReduction = "mean"
    valid_loss: Callable[..., Tensor] | None = None


def trained(
    name: str,
    build: Callable[[], nn.Module],
    draw: Callable[[int], Samples],
    samples: int,
    loss: Callable[..., Tensor],
    optimizer: type[Optimizer],
    rate: float,
    batch_size: int,
    steps: int,
    schedule: Callable[[int, int], float] = constant,
    *,
    order: Order = shuffled,
    clip: float = math.inf,
    unfit: frozenset[str] = frozenset(),
    **options: Any,
) -> Training:
    """A row of a table of problems: how one is usually trained.

    ``draw(n)`` draws samples with torch's global random numbers; ``options`` are the optimizer's.
    """
    data = partial(divided, draw, samples)
    return Training(name, build, data, loss, optimizer, rate, options, batch_size, steps, unfit,
                    order=order, schedule=schedule, clip=clip)  # fmt: skip


def model_of(training: Training, seed: int) -> nn.Module:
    """The network as it is before the first step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = training.build()
        training.prepare(model)
    return model


def batches(training: Training, split: Split, seed: int) -> Iterator[tuple[int, Batch]]:
    """The batches of the run with their steps."""
    generator = torch.Generator().manual_seed(seed)
    order = training.order(split, training.batch_size, generator)
    for step, ids in zip(range(training.steps), order, strict=False):
        batch = Batch(ids, split.inputs[ids], split.targets[ids])
        yield step, training.change(step, batch)


# Factors of the learning rate, by step and number of steps.


def cosine(step: int, steps: int) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter, 2017)."""
    return 0.5 + 0.5 * math.cos(math.pi * step / steps)


WARM_UP = 0.15
"""Share of the steps in which the rate rises."""
SHORT_WARM_UP = 0.1
"""The same of ``warmed_up_linear`` (Devlin et al., 2019)."""


def warmed_up_cosine(step: int, steps: int) -> float:
    """A straight line up to 1, then half a cosine."""
    first = WARM_UP * steps
    return (step + 1) / (first + 1) if step < first else cosine(int(step - first), steps)


def exponential(step: int, steps: int) -> float:
    """The same factor at each step, down to a tenth."""
    return 0.1 ** (step / steps)


def linear(step: int, steps: int) -> float:
    """A straight line from 1 to 0."""
    return 1 - step / steps


def warmed_up_linear(step: int, steps: int) -> float:
    """A straight line up to 1, then one down to 0 (Devlin et al., 2019)."""
    first = SHORT_WARM_UP * steps
    return (step + 1) / (first + 1) if step < first else (steps - step) / (steps - first)


def in_steps(step: int, steps: int) -> float:
    """A tenth of the rate in the last third of the steps."""
    return 1.0 if 3 * step < 2 * steps else 0.1


def polynomial(step: int, steps: int) -> float:
    """The power 0.9 of the share of steps that are left (Chen et al., 2018)."""
    return (1 - step / steps) ** 0.9


# Losses, made of functions of outputs and targets that give the losses of samples.


def by_sample(losses: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A loss with the reductions of PyTorch's, of ``losses`` ``[N, ...]`` whose means count."""

    @wraps(losses)
    def loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        found = losses(outputs, targets)
        of_samples = found.flatten(1).mean(1) if found.ndim > 1 else found
        return of_samples.mean() if reduction == "mean" else of_samples.sum()

    return loss


def of_errors(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """The mean of a function of each error, ``outputs - targets``."""
    return by_sample(lambda outputs, targets: function(outputs - targets))
