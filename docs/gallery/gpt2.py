"""A GPT-2 from the transformers library, unchanged: training, then fine-tuning on other text."""

from pathlib import Path

import torch
from sklearn import datasets
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import gradlens
from gradlens import quantities
from gradlens.quantities.bin_adaptation import GradAbsMax
from gradlens.schedules import linear

LENGTH, BATCH_SIZE = 32, 16
TRAINING, FINE_TUNING = 120, 60


def corpus() -> tuple[Tensor, Tensor]:
    """Characters of descriptions of data sets in English, and of a table of numbers."""
    loaders = (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_wine)
    prose = "".join(load().DESCR for load in loaders)
    table = "\n".join(" ".join(map(str, row)) for row in datasets.load_iris().data)
    return _encoded(prose), _encoded(table)


def _encoded(text: str) -> Tensor:
    return torch.tensor([min(ord(character), 127) for character in text])


def batch(text: Tensor) -> Tensor:
    """``[N, T]`` characters from random places."""
    starts = torch.randint(len(text) - LENGTH, (BATCH_SIZE, 1))
    return text[starts + torch.arange(LENGTH)]


def main(folder: Path) -> None:
    """The text changes after some steps; draw the run, and its layers."""
    prose, table = corpus()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128,
            n_positions=LENGTH,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seldom = linear(10)
    tracked = [
        quantities.Loss(),
        quantities.GradNorm(),
        quantities.UpdateSize(),
        quantities.NormTest(),
        quantities.InnerTest(),
        quantities.OrthoTest(),
        quantities.GradNoiseScale(),
        quantities.GradHist1d(seldom, range=(-0.1, 0.1), adapt=GradAbsMax(seldom)),
        quantities.GradCovariance(seldom),
        quantities.HessMaxEV(seldom),
    ]
    cockpit = gradlens.Cockpit(model, tracked)
    for step in range(TRAINING + FINE_TUNING):
        words = batch(prose if step < TRAINING else table)
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        with cockpit(step, loss=loss, optimizer=optimizer):
            loss.backward()
        optimizer.step()
    cockpit.close()
    plotter = gradlens.CockpitPlotter(secondary_screen=True)
    title = f"GPT-2: English up to step {TRAINING}, a table of numbers from then on"
    figure = plotter.plot(cockpit, show_plot=False, plot_title=title)
    figure.savefig(folder / "cockpit.png", dpi=150)
    if plotter.secondary_figure is not None:
        plotter.secondary_figure.savefig(folder / "layers.png", dpi=150)


if __name__ == "__main__":
    main(Path())
