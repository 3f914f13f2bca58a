"""The networks, data and losses of the problems that the diagnosis is developed with."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development import TRAININGS
from benchmarks.diagnosis.training import Split, Training
from benchmarks.zoo.network import Batch, Network, labelled

KIND = "problems of the diagnosis"
SAMPLES = 4
OTHERS = {"metric learning", "variational autoencoder"}
"""One whose loss compares samples, so that one alone has none, and one whose network draws."""
RARE = 6.0
"""What a sample of the second class counts in ``losses.weighted_classes``."""


def networks() -> list[Network]:
    """All of them whose samples can be run one by one."""
    return [_network(each) for each in TRAININGS if each.name not in OTHERS]


def _network(problem: Training) -> Network:
    @cache
    def split() -> Split:
        return problem.data(0)

    def batch() -> Batch:
        chosen = torch.randint(len(split().inputs), (SAMPLES,))
        return {"x": _precise(split().inputs[chosen]), "y": _precise(split().targets[chosen])}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return problem.loss(model(batch["x"]), batch["y"])

    units = {"masked melodies": lambda batch: labelled(batch["y"]), "rare frauds": _weight}
    return Network(
        f"problem: {problem.name}",
        KIND,
        problem.build,
        batch,
        loss,
        SAMPLES,
        units=units.get(problem.name),
    )


def _weight(batch: Batch) -> float:
    """What the samples of a batch count together, of two classes."""
    return float((1 + (RARE - 1) * batch["y"]).sum())


def _precise(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
