"""The same training with batches of different size, beside the gradient's noise scale."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import gradlens
from gradlens import quantities, schedules
from gradlens.cli.demo import load_digits
from gradlens.instruments import GradNoiseScaleInstrument
from gradlens.instruments.style import MUTED, TICK_SIZE, dress, sequence_colors, title

BATCH_SIZES = (4, 16, 64, 256)
STEPS = 300
DIGITS = load_digits()


def train(batch_size: int) -> gradlens.History:
    """Plain SGD; the loss of all data is logged at every fifth step."""
    inputs, labels = DIGITS.train_images.flatten(1), DIGITS.train_labels
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    cockpit = gradlens.Cockpit(model, [quantities.GradNoiseScale()])
    log = schedules.linear(5)
    for step in range(STEPS):
        if log(step):
            with torch.no_grad():
                cockpit.log(step, train_loss=float(loss_function(model(inputs), labels)))
        batch = torch.randint(len(labels), (batch_size,))
        optimizer.zero_grad()
        loss = loss_function(model(inputs[batch]), labels[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    return cockpit.history


def main(folder: Path) -> None:
    """Draw the losses by step and by sample, and the noise scale of the run that knows it best."""
    runs = {batch_size: train(batch_size) for batch_size in BATCH_SIZES}
    figure = Figure(figsize=(11, 3.2), facecolor="white")
    by_step, by_sample, noise = figure.subplots(1, 3)
    for ax, name in ((by_step, "step"), (by_sample, "sample")):
        dress(ax)
        title(ax, f"Loss of all data by {name}")
        ax.set_xlabel(name, loc="right", fontsize=TICK_SIZE, color=MUTED)
        ax.set_yscale("log")
    for (batch_size, history), color in zip(runs.items(), sequence_colors(4), strict=True):
        steps, losses = zip(*history["train_loss"].items(), strict=True)
        by_step.plot(steps, losses, color=color, label=f"batches of {batch_size}")
        by_sample.plot([step * batch_size for step in steps[1:]], losses[1:], color=color)
    by_step.legend(frameon=False, fontsize=7)
    by_sample.set_xscale("log")
    GradNoiseScaleInstrument().plot(runs[256], noise)
    figure.subplots_adjust(0.05, 0.13, 0.98, 0.82, wspace=0.25)
    figure.savefig(folder / "batch_sizes.png", dpi=150)


if __name__ == "__main__":
    main(Path())
