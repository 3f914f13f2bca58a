"""A real training run under the cockpit: handwritten digits, a small convolutional network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradlens.cockpit.cockpit import Cockpit
from gradlens.plotting.output import progress
from gradlens.plotting.plotter import CockpitPlotter
from gradlens.quantities import GradHist1d, GradHist2d, HessMaxEV, HessTrace, Quantity, TICTrace
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.quantities.presets import configuration
from gradlens.schedules import linear

BATCH_SIZE = 64
TEST_SAMPLES = 297


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits: images ``[N, 1, 8, 8]`` between 0 and 1, labels ``[N]``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def demo(run: Path, figure: Path, steps: int = 300, seed: int = 0) -> float:
    """Train with everything tracked, and write run and figure; the accuracy on unseen digits."""
    digits = load_digits()
    torch.manual_seed(seed)
    model = network()
    loss_function = nn.CrossEntropyLoss()
    cockpit = Cockpit(model, tracked(), loss_function=loss_function, run=run)
    train(model, loss_function, cockpit, digits, steps)
    cockpit.close()
    title = "A small convolutional network on handwritten digits"
    CockpitPlotter().plot(cockpit, show_plot=False, plot_title=title).savefig(figure, dpi=150)
    return accuracy(model.eval(), digits)


def network() -> nn.Module:
    """About 55,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )


def tracked() -> list[Quantity]:
    """The full preset, curvature now and then, histograms whose ranges follow the gradients."""
    often = linear(10)
    changed: list[Quantity] = [
        GradHist1d(adapt=GradAbsMax(often)),
        GradHist2d(adapt=(GradAbsMax(often), ParamAbsMax(often))),
        TICTrace(often),
        HessTrace(often),
        HessMaxEV(often),
    ]
    replaced = {quantity.name: quantity for quantity in changed}
    return [replaced.get(quantity.name, quantity) for quantity in configuration("full")]


def train(
    model: nn.Module, loss_function: nn.Module, cockpit: Cockpit, digits: Digits, steps: int
) -> None:
    """Plain training with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in progress(range(steps), "training"):
        batch = torch.randint(len(digits.train_labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        loss = loss_function(model(digits.train_images[batch]), digits.train_labels[batch])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of unseen digits that the network gets right."""
    predicted = model(digits.test_images).argmax(1)
    return (predicted == digits.test_labels).float().mean().item()


def load_digits() -> Digits:
    """scikit-learn's data, the last samples held out; ``ImportError`` without scikit-learn."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the demo's data comes with scikit-learn: pip install 'gradlens[demo]'"
        ) from error
    data = datasets.load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(data.target)
    return Digits(
        images[:-TEST_SAMPLES],
        labels[:-TEST_SAMPLES],
        images[-TEST_SAMPLES:],
        labels[-TEST_SAMPLES:],
    )
