"""The loss around a trained network: along lines, and on planes."""

import copy
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

from gradlens.cli.demo import load_digits
from gradlens.curvature import HessianOperator, Probe
from gradlens.instruments.style import title
from gradlens.landscape import (
    direction_between,
    eigenvector_directions,
    loss_along,
    loss_on_plane,
    principal_directions,
    random_direction,
)

STEPS = 200
BATCH_SIZE = 64
DIGITS = load_digits()
INPUTS, LABELS = DIGITS.train_images.flatten(1), DIGITS.train_labels
LOSS = nn.CrossEntropyLoss()


def train(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    """SGD with momentum; the states before the first step and after every tenth."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = [copy.deepcopy(model.state_dict())]
    for step in range(1, STEPS + 1):
        batch = torch.randint(len(LABELS), (BATCH_SIZE,))
        optimizer.zero_grad()
        LOSS(model(INPUTS[batch]), LABELS[batch]).backward()
        optimizer.step()
        if step % 10 == 0:
            states.append(copy.deepcopy(model.state_dict()))
    return states


def main(folder: Path) -> None:
    """Draw three lines and three planes through the trained network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    states = train(model)
    data = [(INPUTS, LABELS)]
    probe = Probe(data, LOSS)
    random = random_direction(model, seed=0), random_direction(model, seed=1)
    sharpest = eigenvector_directions(HessianOperator.over_data(model, LOSS, data), k=2)
    whole = direction_between(states[0], states[-1], "from the start to the end", "the end")
    principal = principal_directions(model, states)
    wide = np.linspace(-2, 2, 51)
    lines = {
        "Along a random direction": loss_along(model, probe, random[0]),
        "Along the sharpest direction": loss_along(model, probe, sharpest[0], wide),
        "From the start to the end": loss_along(
            model, probe, whole, np.linspace(-0.25, 1.5, 51), origin=states[0]
        ),
    }
    planes = {
        "On two random directions": loss_on_plane(model, probe, random),
        "On the two sharpest directions": loss_on_plane(
            model, probe, sharpest, (wide[::2], wide[::2])
        ),
        "On the plane of the training": loss_on_plane(model, probe, principal, trajectory=states),
    }
    figure = Figure(figsize=(11, 6.6), facecolor="white")
    axes = figure.subplots(2, 3)
    for ax, (text, found) in zip(axes.flat, (lines | planes).items(), strict=True):
        found.plot(ax)
        title(ax, text)
    figure.subplots_adjust(0.055, 0.07, 0.99, 0.915, wspace=0.24, hspace=0.38)
    figure.savefig(folder / "landscapes.png", dpi=150)


if __name__ == "__main__":
    main(Path())
