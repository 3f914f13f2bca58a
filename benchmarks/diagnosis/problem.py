"""What a problem of the suite is: a network, data, a loss and an optimizer that train together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer


@dataclass(frozen=True)
class Split:
    """Samples to train on, and others to validate on; samples are rows."""

    inputs: Tensor
    targets: Tensor
    valid_inputs: Tensor
    valid_targets: Tensor


@dataclass(frozen=True)
class Problem:
    """A network and its data, with settings that train.

    ``build()`` gives the network, drawn from torch's global seed, and ``data(seed)`` the samples.
    ``loss(outputs, targets, reduction="mean")`` is a function like those of
    ``torch.nn.functional``; ``options`` are those of the ``optimizer`` besides its ``rate``. In
    ``steps`` steps the training loss falls below 0.7 of its start and the validation loss doesn't
    rise. ``unfit`` names the faults that make no sense here although they could be injected.

    Faults are injected into modules: activations are modules such as ``nn.ReLU``, consecutive
    layers stand in an ``nn.Sequential`` where they can, and experts in an ``nn.ModuleList`` called
    ``experts`` with an ``nn.Linear`` called ``gate`` beside it, which has an output for each.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[int], Split]
    loss: Callable[..., Tensor] = functional.cross_entropy
    optimizer: type[Optimizer] = SGD
    rate: float = 0.1
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    batch_size: int = 32
    steps: int = 150
    unfit: frozenset[str] = frozenset()
