"""A ResNet-18 with batch normalisation, under two ideas of what a per-sample gradient is."""

import warnings
from itertools import pairwise
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import gradlens
from gradlens import quantities
from gradlens.cli.demo import load_digits
from gradlens.instruments.style import dress, title
from gradlens.samples.batchnorm import BatchNormPolicy

STEPS, BATCH_SIZE, WIDTH = 80, 32, 8
POLICIES: tuple[BatchNormPolicy, ...] = ("coupled", "frozen")
DIGITS = load_digits()


class Block(nn.Module):
    """Two convolutions beside a shortcut (He et al., 2016)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = 1 if inside == outside else 2
        self.residual = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, H, W]``."""
        return (self.residual(x) + self.shortcut(x)).relu_()


def resnet18() -> nn.Module:
    """For small images: no pooling in front."""
    widths = [WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH, 8 * WIDTH]
    blocks = [(Block(w, v), Block(v, v)) for w, v in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(1, WIDTH, 3, 1, 1, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(inplace=True),
        *(block for pair in blocks for block in pair),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * WIDTH, 10),
    )


def train(policy: BatchNormPolicy) -> tuple[gradlens.Cockpit, gradlens.History]:
    """The same training, whatever is tracked of it."""
    torch.manual_seed(0)
    model = resnet18()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tracked = [
        quantities.Loss(),
        quantities.GradNorm(),
        quantities.UpdateSize(),
        quantities.NormTest(),
        quantities.InnerTest(),
        quantities.OrthoTest(),
        quantities.GradCovariance(),
    ]
    cockpit = gradlens.Cockpit(model, tracked, batchnorm=policy)
    for step in range(STEPS):
        chosen = torch.randint(len(DIGITS.train_labels), (BATCH_SIZE,))
        optimizer.zero_grad()
        output = model(DIGITS.train_images[chosen])
        loss = nn.functional.cross_entropy(output, DIGITS.train_labels[chosen])
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return cockpit, cockpit.history


def main(folder: Path) -> None:
    """Draw the run, and what the two policies make of its noise."""
    warnings.filterwarnings("ignore", message=".*couples the samples")
    runs = {policy: train(policy) for policy in POLICIES}
    plotter = gradlens.CockpitPlotter(secondary_screen=True)
    figure = plotter.plot(
        runs["coupled"][0], show_plot=False, plot_title="ResNet-18 with batch normalisation"
    )
    figure.savefig(folder / "cockpit.png", dpi=150)
    draw_policies({name: history for name, (_, history) in runs.items()}).savefig(
        folder / "policies.png", dpi=150
    )


def draw_policies(runs: dict[BatchNormPolicy, gradlens.History]) -> Figure:
    """Traces of the covariance, of the first layer and of the last."""
    figure = Figure(figsize=(9, 3), facecolor="white")
    axes = figure.subplots(1, 2)
    layers = list(next(iter(runs["coupled"]["GradCovariance"].values()))["layers"])
    for ax, layer in zip(axes, (layers[0], layers[-1]), strict=True):
        dress(ax)
        title(ax, f"Trace of the gradient covariance, layer {layer}")
        ax.set_yscale("log")
        for policy, color in zip(runs, ("#0072B2", "#D55E00"), strict=True):
            records = runs[policy]["GradCovariance"]
            traces = [record["layers"][layer]["trace"] for record in records.values()]
            ax.plot(list(records), traces, color=color, label=policy)
        ax.set_xlabel("step", fontsize=8)
    axes[0].legend(frameon=False, fontsize=8)
    figure.subplots_adjust(0.06, 0.16, 0.98, 0.85, wspace=0.2)
    return figure


if __name__ == "__main__":
    main(Path())
