"""A network whose ReLUs die in a few long steps, beside the same one with shorter steps."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.instruments import (
    ActivationInstrument,
    Instrument,
    LayerMapInstrument,
    LossInstrument,
)

LEARNING_RATES = {"Dying: learning rate 0.3": 0.3, "Healthy: learning rate 0.03": 0.03}
HIDDEN_LAYERS = 5
WIDTH = 48
STEPS = 150
BATCH_SIZE = 256
DIGITS = load_digits()


def network() -> nn.Sequential:
    """A perceptron with weights of the size that keeps signals alive (He et al., 2015)."""
    sizes = [64, *[WIDTH] * HIDDEN_LAYERS, 10]
    layers = [nn.Linear(*sizes[n : n + 2]) for n in range(HIDDEN_LAYERS + 1)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    hidden = [module for layer in layers[:-1] for module in (layer, nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, layers[-1])


def train(learning_rate: float) -> gradlens.History:
    """SGD with momentum, with the activation of all ReLUs at every step."""
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
    cockpit = gradlens.Cockpit(model, [quantities.Loss(), quantities.OutputActivation()])
    for step in range(STEPS):
        batch = torch.randint(len(DIGITS.train_labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        outputs = model(DIGITS.train_images[batch])
        loss = nn.functional.cross_entropy(outputs, DIGITS.train_labels[batch])
        with cockpit(step, loss=loss):
            loss.backward()
        optimizer.step()
    return cockpit.history


def main(folder: Path) -> None:
    """Draw the loss, the units, and the units layer by layer, one run a column."""
    runs = {name: train(rate) for name, rate in LEARNING_RATES.items()}
    for file, instrument, height in (
        ("loss.png", LossInstrument(), 2.5),
        ("units.png", ActivationInstrument(), 2.5),
        ("layers.png", LayerMapInstrument(("OutputActivation",)), 2.8),
    ):
        side_by_side(runs, instrument, height).savefig(folder / file, dpi=150)


def side_by_side(
    runs: dict[str, gradlens.History], instrument: Instrument, height: float
) -> Figure:
    """The same instrument for each run."""
    figure = Figure(figsize=(11, height), facecolor="white")
    grid = figure.subplots(1, len(runs))
    figure.subplots_adjust(0.06, 0.4 / height, 0.98, 1 - 0.85 / height, wspace=0.16)
    for ax, (name, history) in zip(grid, runs.items(), strict=True):
        left, top = ax.get_position().x0, 1 - 0.25 / height
        figure.text(left, top, name, fontsize=11, fontweight="bold", va="center")
        drawing = instrument.plot(history, ax)
        if "map" in drawing.artists:
            drawing.artists["map"].set_clim(0, 1)
    return figure


if __name__ == "__main__":
    main(Path())
