"""One network, three learning rates: stable, unstable for a while, and lost."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.instruments import AlphaInstrument, LossInstrument, StabilityInstrument

LEARNING_RATES = (0.5, 2.0, 4.0)
STEPS = 150
DIGITS = load_digits()


def train(learning_rate: float) -> gradlens.History:
    """Gradient descent on all data at once, so that there is no noise to blame."""
    inputs, labels = DIGITS.train_images[:400].flatten(1), DIGITS.train_labels[:400]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    tracked = [quantities.Loss(), quantities.Stability(), quantities.Alpha()]
    cockpit = gradlens.Cockpit(model, tracked, loss_function=loss_function)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_function(model(inputs), labels)
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


def main(folder: Path) -> None:
    """Draw the same three instruments for each run, one run a column."""
    instruments = (LossInstrument(), StabilityInstrument(), AlphaInstrument())
    figure = Figure(figsize=(11, 7.2), facecolor="white")
    grid = figure.subplots(len(instruments), len(LEARNING_RATES))
    for column, learning_rate in enumerate(LEARNING_RATES):
        history = train(learning_rate)
        for instrument, ax in zip(instruments, grid[:, column], strict=True):
            instrument.plot(history, ax)
    figure.subplots_adjust(0.05, 0.05, 0.98, 0.87, wspace=0.2, hspace=0.62)
    for learning_rate, ax in zip(LEARNING_RATES, grid[0], strict=True):
        left = ax.get_position().x0
        figure.text(left, 0.96, f"η = {learning_rate:g}", fontsize=12, fontweight="bold")
    figure.savefig(folder / "runs.png", dpi=150)


if __name__ == "__main__":
    main(Path())
