"""What a network of the zoo is: how to build it, its data, its loss, and its samples one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch: TypeAlias = dict[str, Any]
"""Inputs and labels by name; tensors have samples along their first axis, unless it says so."""

Losses: TypeAlias = Callable[[nn.Module, Batch], Tensor]


class NotBuiltError(Exception):
    """The network can't be built here, or can't be trained by itself; its text says why."""


@dataclass(frozen=True)
class Network:
    """A network, its data and its loss.

    ``batch()`` gives new random data for ``samples`` samples and ``one(batch, n)`` those of sample
    n alone. ``loss`` is an average over as many terms as ``units`` counts in a batch, over samples
    if it is ``None``, so that sample n contributes its own loss times its share of the units.
    Where a sample's contribution is something else, ``contribution`` gives it. ``told`` networks
    pass ``batch_size=``, and in those that ``meet`` samples meet in the network or in its loss.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Losses
    samples: int = 4
    axes: Mapping[str, int | None] = field(default_factory=dict)
    units: Callable[[Batch], float] | None = None
    one: Callable[[Batch, int], Batch] | None = None
    contribution: Callable[[nn.Module, Batch, int], Tensor] | None = None
    dtype: torch.dtype = torch.float64
    told: bool = False
    meet: bool = False

    def part(self, model: nn.Module, batch: Batch, n: int, copies: int = 1) -> Tensor | None:
        """What sample n contributes to the loss of the batch; ``None`` if nothing."""
        if self.contribution is not None:
            return self.contribution(model, batch, n)
        alone = self.alone(batch, n)
        share = 1 / self.samples if self.units is None else self.units(alone) / self.units(batch)
        if copies > 1 and self.one is None:
            alone = {key: self._repeated(key, value, copies) for key, value in alone.items()}
        return share * self.loss(model, alone) if share else None

    def alone(self, batch: Batch, n: int) -> Batch:
        """The batch that has sample n alone."""
        if self.one is not None:
            return self.one(batch, n)
        return {key: self._row(key, value, n) for key, value in batch.items()}

    def _repeated(self, key: str, value: Any, copies: int) -> Any:
        axis = self.axes.get(key, 0)
        if axis is None:
            return value
        if isinstance(value, Tensor):
            return torch.cat([value] * copies, axis)
        return value * copies

    def _row(self, key: str, value: Any, n: int) -> Any:
        axis = self.axes.get(key, 0)
        if axis is None:
            return value
        if isinstance(value, Tensor):
            return value.narrow(axis, n, 1)
        return value[n : n + 1]


def also_told(network: Network) -> list[Network]:
    """The network, and once more with its number of samples passed to gradlens."""
    return [network, replace(network, name=f"{network.name}, told N", told=True)]


def labelled(labels: Tensor) -> float:
    """How many labels there are that aren't to be ignored."""
    return float((labels != -100).sum())


def some_of(labels: Tensor, fraction: float = 0.5) -> Tensor:
    """Labels ``[N, T]`` of which each sample keeps another number, at random; at least one is."""
    kept = torch.rand(labels.shape) < fraction
    kept[0, -1] = True
    return labels.masked_fill(~kept, -100)


def first_come(networks: Sequence[Network]) -> list[Network]:
    """The networks in their order; ``ValueError`` if two have the same name."""
    names = [network.name for network in networks]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two networks are called {', '.join(sorted(twice))}")
    return list(networks)


# Losses and data that many networks share.


CLASSES = 3
WORDS = 13


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of ``model`` of all others ``[N, K]`` and labels ``y`` ``[N]``."""
    inputs = (value for key, value in batch.items() if key != "y")
    return cross_entropy(model(*inputs), batch["y"])


def drawn(**draws: Callable[[], Any]) -> Callable[[], Batch]:
    """Each draw under its name."""
    return lambda: {name: draw() for name, draw in draws.items()}


def normal(*shape: int) -> Callable[[], Tensor]:
    """Draws of normal numbers."""
    return partial(torch.randn, *shape, dtype=torch.float64)


def integers(below: int, *shape: int) -> Callable[[], Tensor]:
    """Draws of integers from zero."""
    return partial(torch.randint, below, shape)


def numbers(samples: int, *shape: int) -> Callable[[], Batch]:
    """Random numbers ``[N, *shape]`` with a label for each sample."""
    return drawn(x=normal(samples, *shape), y=integers(CLASSES, samples))
