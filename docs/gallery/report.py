"""Interactive pages of two runs."""

from pathlib import Path

import torch
from torch import nn

import gradlens
from gradlens.cli.demo import load_digits, network, tracked, train
from gradlens.report.page import page, write

STEPS = 200


def trained(seed: int, dropout: bool) -> gradlens.History:
    """The demo's network with everything tracked."""
    torch.manual_seed(seed)
    model = network() if dropout else without_dropout(network())
    loss_function = nn.CrossEntropyLoss()
    cockpit = gradlens.Cockpit(model, tracked(), loss_function=loss_function)
    train(model, loss_function, cockpit, load_digits(), STEPS)
    return cockpit.history


def without_dropout(model: nn.Module) -> nn.Module:
    """The same layers, none of which drops outputs."""
    return nn.Sequential(*(one for one in model.children() if not isinstance(one, nn.Dropout)))


def main(folder: Path) -> None:
    """Train twice, and write a page of the first run and one of both."""
    runs = {"dropout": trained(0, True), "no dropout": trained(0, False)}
    title = "A small convolutional network on handwritten digits"
    write(page({"dropout": runs["dropout"]}, title), folder / "one.html")
    write(page(runs, "With and without dropout"), folder / "both.html")


if __name__ == "__main__":
    main(Path())
