"""The edge of stability on a full data set, and how it looks from mini-batches."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import gradlens
from gradlens import quantities, schedules
from gradlens.cli.demo import load_digits
from gradlens.curvature import Probe
from gradlens.history.lines import field_line, line
from gradlens.instruments.style import (
    FAINT,
    INK,
    MUTED,
    TICK_SIZE,
    dress,
    sequence_colors,
    title,
)

LEARNING_RATES = (1.5, 2.0, 3.0)
STEPS = 1500
BATCH_SIZE = 20
DIGITS = load_digits()
INPUTS = DIGITS.train_images.flatten(1) - DIGITS.train_images.flatten(1).mean(0)
TARGETS = nn.functional.one_hot(DIGITS.train_labels, 10).float()


def train(learning_rate: float, batch_size: int) -> gradlens.History:
    """Plain gradient descent, with the sharpness of all data and that of the step's own batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    )
    loss_function = nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    often = schedules.linear(15)
    probe = Probe([(INPUTS, TARGETS)], loss_function)
    tracked = [
        quantities.Loss(often),
        quantities.Stability(often, on=probe, tolerance=1e-2, name="of all data"),
    ]
    if batch_size < len(INPUTS):
        tracked.append(quantities.Stability(often, tolerance=1e-2, name="of the batch"))
    cockpit = gradlens.Cockpit(model, tracked)
    for step in range(STEPS):
        batch = torch.randperm(len(INPUTS))[:batch_size]
        optimizer.zero_grad()
        loss = loss_function(model(INPUTS[batch]), TARGETS[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


def main(folder: Path) -> None:
    """Draw losses and sharpness of full-batch runs, and the sharpness of one with mini-batches."""
    figure = Figure(figsize=(11, 3.2), facecolor="white")
    losses, sharpness, batches = figure.subplots(1, 3)
    for ax, text in (
        (losses, "Loss of all data, full batch"),
        (sharpness, "Sharpness of all data, full batch"),
        (batches, f"Sharpness, batches of {BATCH_SIZE}"),
    ):
        dress(ax)
        title(ax, text)
        ax.set_xlabel("step", loc="right", fontsize=TICK_SIZE, color=MUTED)
    losses.set_yscale("log")
    colors = sequence_colors(len(LEARNING_RATES))
    for learning_rate, color in zip(LEARNING_RATES, colors, strict=True):
        history = train(learning_rate, len(INPUTS))
        loss = line(history["Loss"])
        losses.plot(loss.steps, loss.values, color=color, label=f"η = {learning_rate:g}")
        found = field_line(history["of all data"], "sharpness")
        sharpness.plot(found.steps, found.values, color=color)
        sharpness.axhline(2 / learning_rate, color=color, linestyle=":", linewidth=1)
    losses.legend(frameon=False, fontsize=7)
    history = train(LEARNING_RATES[0], BATCH_SIZE)
    for name, color in (("of the batch", FAINT), ("of all data", INK)):
        found = field_line(history[name], "sharpness")
        batches.plot(found.steps, found.values, color=color, label=name)
    batches.axhline(2 / LEARNING_RATES[0], color=INK, linestyle=":", linewidth=1)
    batches.legend(frameon=False, fontsize=7)
    figure.subplots_adjust(0.05, 0.13, 0.98, 0.82, wspace=0.2)
    figure.savefig(folder / "sharpness.png", dpi=150)


if __name__ == "__main__":
    main(Path())
