"""Draws each panel of a healthy training, and beside it that of a training with a fault."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.quantities.bin_adaptation import GradAbsMax, ParamAbsMax
from gradlens.schedules import linear

STEPS = 200
BATCH_SIZE = 128
FEW = 100
"""Images, from which a network can't learn what digits look like."""
DIGITS = load_digits()
IMAGES, LABELS = DIGITS.train_images, DIGITS.train_labels

Batch = tuple[Tensor, Tensor]


# Networks ---------------------------------------------------------------------------------


def convolutional() -> nn.Sequential:
    """The network of the healthy training."""
    convolution = nn.Conv2d(1, 8, 3, stride=2, padding=1)
    hidden = nn.Linear(8 * 4 * 4, 32)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), hidden, nn.ReLU(), nn.Linear(32, 10))


def of_tiny_weights() -> nn.Sequential:
    """The same with parameters of a fiftieth of their size."""
    model = convolutional()
    for parameter in model.parameters():
        parameter.data /= 50
    return model


def perceptron(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    """Fully connected layers."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in zip((64, *widths[:-1]), widths, strict=True):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def small() -> nn.Sequential:
    """One hidden layer."""
    return perceptron(nn.ReLU, 32)


def wide() -> nn.Sequential:
    """One hidden layer with far more parameters than a few images need."""
    return perceptron(nn.ReLU, 256)


def deep_sigmoids() -> nn.Sequential:
    """A sigmoid's slope is 1/4 at most, so that gradients shrink from layer to layer."""
    return perceptron(nn.Sigmoid, *[32] * 5)


def deep_relus() -> nn.Sequential:
    """Weights have the size that keeps signals alive (He et al., 2015)."""
    model = perceptron(nn.ReLU, *[48] * 5)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.kaiming_normal_(parameter)
    return model


# Batches ----------------------------------------------------------------------------------


def at_random() -> Batch:
    """Any images."""
    chosen = torch.randint(len(LABELS), (BATCH_SIZE,))
    return IMAGES[chosen], LABELS[chosen]


def eight() -> Batch:
    """Eight of them."""
    images, labels = at_random()
    return images[:8], labels[:8]


def of_few() -> Batch:
    """Always some of the same images."""
    chosen = torch.randint(FEW, (BATCH_SIZE // 2,))
    return IMAGES[chosen], LABELS[chosen]


def always_the_same() -> Batch:
    """One large batch, so that the loss has no noise."""
    return IMAGES[:400], LABELS[:400]


def with_an_outlier() -> Batch:
    """One image of each batch is twenty times as bright."""
    images, labels = at_random()
    images[0] *= 20
    return images, labels


def at_times_bright() -> Batch:
    """One batch in fifty is ten times as bright."""
    images, labels = at_random()
    return images * (10 if torch.rand(()) < 1 / 50 else 1), labels


def mixed_up() -> Batch:
    """Images and labels are drawn separately."""
    return at_random()[0], at_random()[1]


# Trainings --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training, which is sound unless its parts say otherwise.

    It tracks the quantities of the classes ``tracks``, or all. After each step, the learning rate
    is multiplied by ``decay``. The optimizer doesn't have the first ``missed`` parameters. If it
    ``looks_back``, each step computes the singular values of all images so far. With ``beta2``, it
    trains by Adam. Gradients are clipped to the norm ``clip``.
    """

    tracks: str = ""
    network: Callable[[], nn.Sequential] = convolutional
    batch: Callable[[], Batch] = at_random
    learning_rate: float = 0.2
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 1.0
    missed: int = 0
    looks_back: bool = False
    beta2: float | None = None
    clip: float | None = None

    def run(self) -> gradlens.History:
        """Train, and return what was recorded."""
        torch.manual_seed(0)
        model = self.network()
        loss_function = gradlens.extend(nn.CrossEntropyLoss())
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            [*model.parameters()][self.missed :],
            self.learning_rate,
            self.momentum,
            weight_decay=self.weight_decay,
        )
        if self.beta2 is not None:
            betas = (0.9, self.beta2)
            optimizer = torch.optim.Adam(model.parameters(), self.learning_rate, betas)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        cockpit = gradlens.Cockpit(model, tracked(self.tracks))
        seen = torch.empty(0, 64)
        log = linear(20)
        for step in range(STEPS):
            cockpit.log(step, learning_rate=schedule.get_last_lr()[0])
            if log(step):
                log_epoch(cockpit, step, model, FEW if self.batch is of_few else len(LABELS))
            images, labels = self.batch()
            if self.looks_back:
                seen = torch.cat([seen, images.flatten(1)])
                torch.linalg.svdvals(seen)
            optimizer.zero_grad()
            closure = partial(loss_of, loss_function, model, images, labels)
            loss = closure()
            with cockpit(step, loss=loss, optimizer=optimizer, closure=closure):
                loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            schedule.step()
        cockpit.close()
        return cockpit.history


def loss_of(loss: nn.Module, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch."""
    found: Tensor = loss(model(images), labels)
    return found


def tracked(names: str) -> list[quantities.Quantity]:
    """The quantities of these classes, or all: curvature and histograms at some steps only."""
    seldom, rarely = linear(10), linear(20)
    largest, economy = GradAbsMax(rarely), gradlens.configuration("economy")
    every = [
        *(one for one in economy if not isinstance(one, quantities.GradHist1d)),
        *(quantities.ClippedGradNorm(), quantities.OptimizerState(), quantities.RelativeUpdate()),
        quantities.GradHist1d(rarely, adapt=largest, keep_individual=True),
        quantities.GradHist2d(rarely, adapt=(largest, ParamAbsMax(rarely)), keep_individual=True),
        quantities.Parameters(),
        quantities.OutputActivation(),
        quantities.MeanGSNR(),
        quantities.GradCovariance(),
        quantities.GradNoiseScale(),
        quantities.EarlyStopping(),
        quantities.CABS(),
        quantities.HessMaxEV(seldom),
        quantities.HessTrace(seldom),
        quantities.TICDiag(seldom, curvature="diag_ggn_exact"),
        quantities.Stability(seldom),
        *(quantities.CriticalSharpness(linear(3)), quantities.StepLedger(linear(3))),
        quantities.HessEigenvalues(rarely),
        quantities.SpectralDensity(linear(STEPS - 1)),
        quantities.DirectionalDerivatives(seldom),
    ]
    return [one for one in every if not names or type(one).__name__ in names.split()]


@torch.no_grad()
def log_epoch(cockpit: gradlens.Cockpit, step: int, model: nn.Module, count: int) -> None:
    """Log losses and accuracies on the first ``count`` images of training, and on those of test."""
    training = IMAGES[:count], LABELS[:count]
    test = DIGITS.test_images, DIGITS.test_labels
    for name, (images, labels) in {"train": training, "test": test}.items():
        outputs = model(images)
        loss = nn.functional.cross_entropy(outputs, labels)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        cockpit.log(step, **{f"{name}_loss": float(loss), f"{name}_accuracy": float(accuracy)})


TRAININGS = {
    "healthy": Training(),
    "too fast": Training(
        "Loss Alpha Stability CriticalSharpness StepLedger HessMaxEV HessTrace",
        small,
        always_the_same,
        learning_rate=2.0,
    ),
    "too slow": Training("Alpha", small, always_the_same, learning_rate=0.1),
    "schedule": Training("Loss", decay=0.9),
    "slow": Training("Time", looks_back=True),
    "overfitting": Training("MeanGSNR EarlyStopping", wide, of_few, learning_rate=0.5),
    "vanishing": Training("GradNorm GradHist1d GradHist2d", deep_sigmoids),
    "dead": Training("OutputActivation", deep_relus, learning_rate=0.3, momentum=0.9),
    "missed": Training("UpdateSize Distance", missed=2),
    "decayed": Training("Parameters", weight_decay=0.15),
    "small batches": Training("CABS DirectionalDerivatives", batch=eight, learning_rate=0.5),
    "mixed up": Training("NormTest InnerTest OrthoTest GradNoiseScale TICDiag", batch=mixed_up),
    "outlier": Training("GradCovariance", wide, with_an_outlier, learning_rate=0.003),
    "tiny weights": Training("HessEigenvalues SpectralDensity", of_tiny_weights),
    "clipped": Training("GradNorm ClippedGradNorm", clip=1.5),
    "always clipped": Training("GradNorm ClippedGradNorm", clip=0.1),
    "Adam": Training("OptimizerState RelativeUpdate", learning_rate=0.003, beta2=0.999),
    "Adam, at times bright": Training(
        "OptimizerState", batch=at_times_bright, learning_rate=0.003, beta2=0.999
    ),
    "Adam, too fast": Training("RelativeUpdate", learning_rate=0.05, beta2=0.999),
}
HEALTHY = {
    "Gradient clipping": "clipped",
    "Relative update": "Adam",
    "Optimizer state": "Adam",
    "Gradient over √v": "Adam",
    "Gradient and momentum": "Adam",
}
"""Trainings without a fault of panels that the usual one has nothing for."""


# Pictures ---------------------------------------------------------------------------------

NARROW = {
    "Loss": "too fast",
    "Losses": "overfitting",
    "Accuracy": "overfitting",
    "Learning rate": "schedule",
    "Time per step": "slow",
    "Gradient norm": "vanishing",
    "Gradient clipping": "always clipped",
    "Update size": "missed",
    "Relative update": "Adam, too fast",
    "Gradient over √v": "Adam, at times bright",
    "Distance from the start": "missed",
    "Gradient elements": "vanishing",
    "Joint histogram": "vanishing",
    "Edge of stability": "too fast",
    "Critical sharpness": "too fast",
    "Step ledger": "too fast",
    "Largest Hessian eigenvalue": "too fast",
    "Curvature eigenvalues": "tiny weights",
    "Hessian spectral density": "tiny weights",
    "Hessian trace": "too fast",
    "TIC": "mixed up",
    "Mean GSNR": "overfitting",
    "Gradient noise scale": "mixed up",
    "Batch size": "small batches",
    "Early stopping": "overfitting",
    "Gradient covariance": "outlier",
    "Covariance rank": "outlier",
    "RMS of parameters": "decayed",
    "Active and dead units": "dead",
}
WIDE = {
    "Local step size α": "too slow",
    "Gradient tests": "mixed up",
    "Signal along directions": "small batches",
    "Gradient norm by parameter": "vanishing",
    "Gradient covariance by layer": "outlier",
    "Effective rank by layer": "outlier",
    "Gradient elements by parameter": "vanishing",
    "Joint histogram by parameter": "vanishing",
}
"""Titles of panels that are half as wide as the page, and of wider ones, each with the training
whose fault it shows."""


def main(folder: Path) -> None:
    """Train, and draw each panel twice, in the style of a paper."""
    histories = {name: training.run() for name, training in TRAININGS.items()}
    for width, panels in ((2.7, NARROW), (5.4, WIDE)):
        for title, fault in panels.items():
            for kind, name in (("healthy", HEALTHY.get(title, "healthy")), ("sick", fault)):
                draw(histories[name], title, width, folder / f"{file_name(title)}-{kind}.png")
    for title in ("Gradient in top directions", "Optimizer state", "Gradient and momentum"):
        history = histories[HEALTHY.get(title, "healthy")]  # no fault is read off these
        draw(history, title, 2.7, folder / f"{file_name(title)}.png")


def draw(history: gradlens.History, title: str, width: float, path: Path) -> None:
    """Write one panel, ``width`` inches wide."""
    plotter = gradlens.CockpitPlotter(findings=False)
    figure = plotter.plot(history, show_plot=False, panels=[title], size=width, style="paper")
    figure.savefig(path, dpi=250)


def file_name(title: str) -> str:
    """The words of a title, in Latin letters, with hyphens between them."""
    return "-".join(re.findall("[a-z]+", title.lower()))


if __name__ == "__main__":
    main(Path())
