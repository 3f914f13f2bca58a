"""A healthy run with everything in view."""

from pathlib import Path

import torch
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import accuracy, load_digits, network
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.schedules import linear

STEPS = 200
BATCH_SIZE = 64
LEARNING_RATE = 0.05
OVERVIEW = [
    "Loss",
    "Accuracy",
    "Local step size α",
    "Gradient norm",
    "Gradient tests",
    "Largest Hessian eigenvalue",
]
"""Panels of the home page's picture."""


def tracked() -> list[quantities.Quantity]:
    """What the full preset tracks, but curvature and histograms at every fifth step only."""
    seldom = linear(5)
    cheap = gradlens.configuration("economy")
    return [
        *(quantity for quantity in cheap if not isinstance(quantity, quantities.GradHist1d)),
        quantities.MeanGSNR(),
        quantities.GradCovariance(),
        quantities.GradHist1d(seldom, adapt=GradAbsMax(seldom), keep_individual=True),
        quantities.GradHist2d(seldom, adapt=(GradAbsMax(seldom), ParamAbsMax(seldom))),
        quantities.HessMaxEV(seldom),
        quantities.HessTrace(seldom),
        quantities.TICDiag(seldom, curvature="diag_ggn_exact"),
    ]


def main(folder: Path) -> None:
    """Train the demo's network with momentum, and draw both screens."""
    digits = load_digits()
    torch.manual_seed(0)
    model = network()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    cockpit = gradlens.Cockpit(model, tracked(), loss_function=loss_function)
    for step in range(STEPS):
        batch = torch.randint(len(digits.train_labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        loss = loss_function(model(digits.train_images[batch]), digits.train_labels[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
        if step % 10 == 0:
            model.eval()
            cockpit.log(step, test_accuracy=accuracy(model, digits), learning_rate=LEARNING_RATE)
            model.train()
    cockpit.close()
    plotter = gradlens.CockpitPlotter(secondary_screen=True)
    title = "A small convolutional network on handwritten digits"
    figure = plotter.plot(cockpit, show_plot=False, plot_title=title)
    figure.savefig(folder / "cockpit.png", dpi=150)
    if plotter.secondary_figure is not None:
        plotter.secondary_figure.savefig(folder / "layers.png", dpi=150)
    overview = gradlens.CockpitPlotter().plot(
        cockpit, show_plot=False, panels=OVERVIEW, size=9, style="paper"
    )
    overview.savefig(folder / "overview.png", dpi=150)


if __name__ == "__main__":
    main(Path())
