"""Draws every instrument alone, from one run in which everything is tracked."""

from collections import Counter
from pathlib import Path

import torch
from torch import nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.plotting.panels import layer_panels, main_panels
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.schedules import linear

STEPS = 200
BATCH_SIZE = 64
LEARNING_RATE = 0.1
DIGITS = load_digits()


def tracked() -> list[quantities.Quantity]:
    """All quantities: cheap ones at each step, curvature and histograms less often."""
    seldom, rarely = linear(5), linear(10)
    preset = gradlens.configuration("economy")
    return [
        *(quantity for quantity in preset if not isinstance(quantity, quantities.GradHist1d)),
        quantities.GradHist1d(rarely, adapt=GradAbsMax(rarely), keep_individual=True),
        quantities.GradHist2d(
            rarely, adapt=(GradAbsMax(rarely), ParamAbsMax(rarely)), keep_individual=True
        ),
        quantities.Parameters(),
        quantities.MeanGSNR(),
        quantities.GradCovariance(),
        quantities.GradNoiseScale(),
        quantities.EarlyStopping(),
        quantities.CABS(),
        quantities.HessMaxEV(seldom),
        quantities.HessTrace(seldom),
        quantities.TICDiag(seldom, curvature="diag_ggn_exact"),
        quantities.TICTrace(seldom, curvature="diag_ggn_exact"),
        quantities.Stability(seldom),
        quantities.HessEigenvalues(rarely),
        quantities.SpectralDensity(linear(STEPS - 1)),
        quantities.DirectionalDerivatives(seldom),
    ]


def train() -> gradlens.History:
    """A small network on handwritten digits, by plain SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    cockpit = gradlens.Cockpit(model, tracked())
    log = linear(20)
    for step in range(STEPS):
        if log(step):
            log_epoch(cockpit, step, model)
        batch = torch.randint(len(DIGITS.train_labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        loss = loss_function(model(DIGITS.train_images[batch]), DIGITS.train_labels[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


@torch.no_grad()
def log_epoch(cockpit: gradlens.Cockpit, step: int, model: nn.Module) -> None:
    """Log losses and accuracies on all data."""
    losses, accuracies = [], []
    for images, labels in (
        (DIGITS.train_images, DIGITS.train_labels),
        (DIGITS.test_images, DIGITS.test_labels),
    ):
        outputs = model(images)
        losses.append(float(nn.functional.cross_entropy(outputs, labels)))
        accuracies.append(float((outputs.argmax(1) == labels).float().mean()))
    cockpit.log(
        step,
        train_loss=losses[0],
        test_loss=losses[1],
        train_accuracy=accuracies[0],
        test_accuracy=accuracies[1],
        learning_rate=LEARNING_RATE,
    )


def main(folder: Path) -> None:
    """Write one picture for each panel, under its instrument's name."""
    history = train()
    panels = {*main_panels(history), *layer_panels(history)}
    names = [(type(panel.instrument).__name__, panel.instrument.names) for panel in panels]
    kinds = Counter(kind for kind, _ in names)
    for panel, (kind, series) in zip(panels, names, strict=True):
        several = f"-{series[0]}" if kinds[kind] > 1 else ""
        path = folder / f"{kind.removesuffix('Instrument')}{several}.png"
        panel.instrument.plot(history).figure.savefig(path)


if __name__ == "__main__":
    main(Path())
