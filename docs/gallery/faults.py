"""Ten trainings of one network, each with another fault: the figure, and what is found."""

import os
import warnings
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.cli.main import main as command

STEPS = 240
BATCH_SIZE = 64
CHARACTERS = 88
DIGITS = load_digits()
IMAGES = DIGITS.train_images.flatten(1) - DIGITS.train_images.mean()
LABELS = DIGITS.train_labels

Batch = tuple[Tensor, Tensor]


def perceptron(activation: type[nn.Module] = nn.ReLU, hidden: int = 3) -> nn.Sequential:
    """Hidden layers of 64 units."""
    layers = [layer for _ in range(hidden) for layer in (nn.Linear(64, 64), activation())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def dying_relus() -> nn.Sequential:
    """The biases of the second layer are so negative that its ReLUs are zero."""
    model = perceptron()
    nn.init.constant_(model.get_parameter("2.bias"), -4)
    return model


def ending_in_a_softmax() -> nn.Sequential:
    """The loss has a softmax of its own."""
    return nn.Sequential(*perceptron(), nn.Softmax(1))


def deep_sigmoids() -> nn.Sequential:
    """A sigmoid's slope is 1/4 at most."""
    return perceptron(nn.Sigmoid, 8)


def sgd(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    """With momentum."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


def far_too_fast(model: nn.Module) -> torch.optim.Optimizer:
    """A hundred times as fast."""
    return sgd(model, 5.0)


def without_a_layer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer doesn't have the third layer."""
    layers = [*model.children()]
    return sgd(nn.ModuleList(layers[:4] + layers[5:]))


def at_random(step: int) -> Batch:
    """Any images."""
    chosen = torch.randint(len(LABELS), (BATCH_SIZE,))
    return IMAGES[chosen], LABELS[chosen]


def of_bytes(step: int) -> Batch:
    """Pixels up to 255 instead of 1."""
    images, labels = at_random(step)
    return 255 * images, labels


def in_order(step: int) -> Batch:
    """All zeros, and then all ones, and so on."""
    by_label = LABELS.argsort()
    chosen = by_label[(torch.arange(BATCH_SIZE) + step * BATCH_SIZE) % len(LABELS)]
    return IMAGES[chosen], LABELS[chosen]


def with_an_outlier(step: int) -> Batch:
    """One image of one batch is far larger than all others."""
    images, labels = at_random(step)
    if step == 150:
        images[7] *= 300
    return images, labels


def mislabelled(step: int) -> Batch:
    """A tenth of the labels are those of other images."""
    images, labels = at_random(step)
    wrong = torch.rand(BATCH_SIZE) < 0.1
    return images, torch.where(wrong, torch.randint(10, labels.shape), labels)


@dataclass(frozen=True)
class Case:
    """A training whose parts are sound, but for one of them."""

    network: Callable[[], nn.Module] = perceptron
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    batch: Callable[[int], Batch] = at_random
    sets_gradients_to_zero: bool = True

    def run(self, path: Path) -> None:
        """Train, and write the run."""
        torch.manual_seed(0)
        model = self.network()
        optimizer = self.optimizer(model)
        cockpit = gradlens.Cockpit(model, tracked(), run=path)
        for step in range(STEPS):
            images, labels = self.batch(step)
            if self.sets_gradients_to_zero:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            with cockpit(step, loss=loss, optimizer=optimizer):
                loss.backward()
            optimizer.step()
        cockpit.close()


def tracked() -> list[quantities.Quantity]:
    """Four panels; the diagnosis needs none of them."""
    kinds = (
        quantities.Loss,
        quantities.GradNorm,
        quantities.UpdateSize,
        quantities.OutputActivation,
    )
    return [kind() for kind in kinds]


CASES = {
    "learning_rate": Case(optimizer=far_too_fast),
    "dead_relus": Case(dying_relus),
    "vanishing": Case(deep_sigmoids),
    "zero_grad": Case(sets_gradients_to_zero=False),
    "inputs": Case(batch=of_bytes),
    "order": Case(batch=in_order),
    "missed": Case(optimizer=without_a_layer),
    "outlier": Case(batch=with_an_outlier),
    "label_noise": Case(batch=mislabelled),
    "softmax": Case(ending_in_a_softmax),
    "healthy": Case(),
}


def main(folder: Path) -> None:
    """Train, draw each run, and write what the command line prints of it."""
    os.environ["COLUMNS"] = str(CHARACTERS)
    with TemporaryDirectory() as runs, chdir(runs):
        for name, case in CASES.items():
            with warnings.catch_warnings():
                # Of faults, such as gradients that are not set to zero.
                warnings.simplefilter("ignore", gradlens.GradlensWarning)
                case.run(Path(f"{name}.jsonl"))
            file_name = str(folder / f"{name}.png")
            if command(["plot", f"{name}.jsonl", "-o", file_name]):
                raise SystemExit(f"{file_name} can't be drawn")
            text = folder / f"{name}.txt"
            with text.open("w", encoding="utf-8") as file, redirect_stdout(file):
                print(f"$ gradlens diagnose {name}.jsonl")
                command(["diagnose", f"{name}.jsonl"])


if __name__ == "__main__":
    main(Path().absolute())
