"""A deep network whose gradient vanishes, beside the same one with weights of a better size."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import gradlens
from gradlens import quantities, schedules
from gradlens.cli.demo import load_digits
from gradlens.instruments import (
    Drawing,
    Histogram1dInstrument,
    Instrument,
    LayerHistogramsInstrument,
    LayerMapInstrument,
)
from gradlens.quantities.bin_adaptation import GradAbsMax

HIDDEN_LAYERS = 8
WIDTH = 48
SCALES = {"Vanishing: weights of scale 1": 1.0, "Healthy: weights of scale 5": 5.0}
STEPS = 100
DIGITS = load_digits()


def network(scale: float) -> nn.Sequential:
    """Layers with sigmoids, and weights of standard deviation ``scale`` over √inputs.

    A sigmoid's slope is 1/4 at most, so that with a scale of 1 each layer weakens the gradient.
    """
    sizes = [64, *[WIDTH] * HIDDEN_LAYERS]
    layers = [nn.Linear(sizes[n], sizes[n + 1]) for n in range(HIDDEN_LAYERS)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=scale / layer.in_features**0.5)
        nn.init.normal_(layer.bias, std=1.5)
        # The sigmoids before it have values about 1/2.
        layer.bias.data -= layer.weight.data.sum(1) / 2
    hidden = [module for layer in layers for module in (layer, nn.Sigmoid())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def train(scale: float) -> gradlens.History:
    """Adam, with the gradient norm at every step and histograms at every tenth."""
    torch.manual_seed(0)
    model = network(scale)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    often = schedules.linear(10)
    histogram = quantities.GradHist1d(often, bins=50, adapt=GradAbsMax(often), keep_individual=True)
    cockpit = gradlens.Cockpit(model, [quantities.GradNorm(), histogram])
    for step in range(STEPS):
        batch = torch.randint(len(DIGITS.train_labels), (128,))
        optimizer.zero_grad()
        outputs = model(DIGITS.train_images[batch].flatten(1))
        loss = loss_function(outputs, DIGITS.train_labels[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    return cockpit.history


def main(folder: Path) -> None:
    """Draw what is known of the whole network, and then of each layer, one run a column."""
    runs = {name: train(scale) for name, scale in SCALES.items()}
    for file, instrument, height in (
        ("network.png", Histogram1dInstrument(), 2.5),
        ("layers.png", LayerMapInstrument(), 3.3),
        ("histograms.png", LayerHistogramsInstrument(), 5.5),
    ):
        figure, drawings = side_by_side(runs, instrument, height)
        with_common_colours(drawings)
        figure.savefig(folder / file, dpi=150)


def side_by_side(
    runs: dict[str, gradlens.History], instrument: Instrument, height: float
) -> tuple[Figure, list[Drawing]]:
    """The same instrument for each run."""
    figure = Figure(figsize=(11, height), facecolor="white")
    grid = figure.subplots(1, len(runs))
    figure.subplots_adjust(0.06, 0.4 / height, 0.98, 1 - 0.85 / height, wspace=0.16)
    for ax, name in zip(grid, runs, strict=True):
        left, top = ax.get_position().x0, 1 - 0.25 / height
        figure.text(left, top, name, fontsize=11, fontweight="bold", va="center")
    drawings = zip(runs.values(), grid, strict=True)
    return figure, [instrument.plot(history, ax) for history, ax in drawings]


def with_common_colours(drawings: list[Drawing]) -> None:
    """Give maps the same colours for the same numbers."""
    maps = [drawing.artists["map"] for drawing in drawings if "map" in drawing.artists]
    limits = [one.get_clim() for one in maps]
    for one in maps:
        one.set_clim(min(low for low, _ in limits), max(high for _, high in limits))


if __name__ == "__main__":
    main(Path())
