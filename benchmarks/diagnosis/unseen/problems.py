"""The table of unseen problems: a network, data, a loss, and how it is usually trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, AdamW, NAdam, RMSprop

from benchmarks.diagnosis.training import (
    Training,
    by_sample,
    cosine,
    exponential,
    linear,
    of_errors,
    polynomial,
    trained,
    warmed_up_cosine,
    warmed_up_linear,
)
from benchmarks.diagnosis.unseen import data

# fmt: off
from benchmarks.diagnosis.networks import (  # isort: skip
    Added, Apply, Attention, Beside, Codes, Each, Gated, Memory, Mixture, Residual, SelfAttention,
    bn1, bn2, columns, conv, largest, last, leaky, mean, mlp, pooled, repeat, stack, turned,
)
# fmt: on

OF_INPUTS = frozenset({"input_scale", "input_offset", "input_constant",
                       "outlier_sample", "corrupt_batch", "nonfinite_input"})  # fmt: skip
"""Faults that change numbers, where some of the inputs are codes."""

# Losses.


@by_sample
def bounded_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Labels above zero and the others below it, by log-sum-exp (Su et al., 2022)."""
    present = torch.where(targets > 0, -outputs, -torch.inf)
    absent = torch.where(targets > 0, -torch.inf, outputs)
    return F.pad(present, (1, 0)).logsumexp(1) + F.pad(absent, (1, 0)).logsumexp(1)


@by_sample
def gamma_deviance(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the deviance of gamma regression, of the mean's logarithm."""
    ratio = targets.log() - outputs
    return ratio.exp() - ratio - 1


@by_sample
def quasi_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of a variance by its logarithm, in parts of squared returns (Patton, 2011)."""
    return outputs + targets * (-outputs).exp()


late_costs_more = of_errors(lambda e: (-e).clamp(max=5).exp() + e - 1)
"""Exponential where it gets later than said, linear where it doesn't (Varian, 1975)."""


@by_sample
def exponential_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each pair that is in the wrong order (Freund et al., 2003)."""
    is_better = (targets[:, :, None] > targets[:, None]).to(outputs.dtype)
    pairs = torch.exp((outputs[:, None] - outputs[:, :, None]).clamp(max=5))
    return (is_better * pairs).sum((1, 2)) / is_better.sum((1, 2))


@by_sample
def angle(outputs: Tensor, targets: Tensor) -> Tensor:
    """One less the cosine of the angle to the true direction."""
    return 1 - F.cosine_similarity(outputs, targets, 1)


@by_sample
def laplace_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of medians and the logarithms of their scales, up to a constant."""
    median, scale = outputs.chunk(2, 1)
    return ((targets - median).abs() * (-scale).exp() + scale).sum(1)


@by_sample
def generalised_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Between cross-entropy and the mean absolute error, for wrong labels (Zhang et al., 2018)."""
    shares = outputs.softmax(1).gather(1, targets[:, None])[:, 0]
    return (1 - (shares + 1e-8) ** 0.5) / 0.5


@by_sample
def circular(outputs: Tensor, targets: Tensor) -> Tensor:
    """Distances between directions on the circle, and how far outputs are from its length."""
    length = outputs.norm(dim=1)
    return (F.normalize(outputs, dim=1) - targets).norm(dim=1) + 0.1 * (length - 1).square()


# Parts of networks.


def pitches(inside: int, outside: int) -> nn.Module:
    """Each pitch sees all others by their distance on the circle of pitches."""
    around = Apply(lambda x: torch.cat([x, x[:, :, :11]], 2))
    layer = nn.Conv2d(inside, outside, (12, 3), padding=(0, 1), bias=False)
    return stack(around, nn.Sequential(layer, bn2(outside), nn.ReLU()))


def autocorrelation(x: Tensor) -> Tensor:
    """How alike a series ``[N, T]`` is to itself 1 to 48 steps later."""
    length = x.shape[1]
    spectrum = torch.fft.rfft(x, 2 * length).abs().square()
    return torch.fft.irfft(spectrum, 2 * length)[:, 1:49] / length


def over_spans(x: Tensor) -> Tensor:
    """Logarithms of the mean squares over the latest days, weeks and months (Corsi, 2009)."""
    means = [x[:, -span:].square().mean(1) for span in (3, 6, 12, 24, 48)]
    return (torch.stack(means, 1) + 1e-3).log()


def spread(x: Tensor) -> Tensor:
    """Means and standard deviations over time of ``[N, C, T]``."""
    average = x.mean(2)
    return torch.cat([average, ((x - average[..., None]).square().mean(2) + 1e-5).sqrt()], 1)


def with_moves(x: Tensor) -> Tensor:
    """Places ``[N, T, 2]`` beside ten times the way to them from the last one."""
    return torch.cat([x, 10 * torch.diff(x, dim=1, prepend=x[:, :1])], 2)


class Galerkin(nn.Module):
    """Gates that see the inputs again at each layer (Sirignano and Spiliopoulos, 2018)."""

    def __init__(self, inputs: int, width: int, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(inputs, width), nn.Tanh())
        gates: Any = (nn.Sigmoid, nn.Sigmoid, nn.Tanh)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(inputs + width, width), act()) for act in gates)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        state = self.enter(x)
        for layer in self.layers:
            keep, reset, mix = layer  # type: ignore[misc]
            both = torch.cat([x, state], 1)
            kept, mixed = keep(both), mix(torch.cat([x, reset(both) * state], 1))
            state = (1 - kept) * mixed + kept * state
        return state


class Pointer(nn.Module):
    """Half the score of each place, by a look at all of them (Kool et al., 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.glimpse = Attention(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        query = self.glimpse(x.mean(1, keepdim=True), x)
        return (query * x).sum(2) / x.shape[2] ** 0.5 / 2


class Modulated(nn.Module):
    """Codes scale and shift the hidden units of the numbers behind them (Perez et al., 2018)."""

    def __init__(self, counts: tuple[int, ...], inputs: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, 2 * width) for count in counts)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.3)
        self.numbers = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (table(x[:, k].long()) for k, table in enumerate(self.tables))
        scale, shift = (first + second).chunk(2, 1)
        return (1 + scale) * self.numbers(x[:, 2:]) + shift


class Alike(nn.Module):
    """How alike two series ``[N, 2, T]`` are after each turn, to the same layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.look = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        before, after = (torch.fft.rfft(self.look(x[:, i : i + 1])) for i in range(2))
        return torch.fft.irfft((before * after.conj()).sum(1), x.shape[2]) / x.shape[2]


class Arm(nn.Module):
    """A matrix of inertia and other forces by angles (Lutter et al., 2019)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.inertia = mlp(2, width, width, 4, activation=nn.SiLU)
        self.forces = mlp(4, width, width, 2, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.inertia(x[:, :2]).unflatten(1, (2, 2))
        return (matrix @ x[:, 4:, None])[..., 0] + self.forces(x[:, :4])


def weighted(width: int) -> nn.Module:
    """Multiplies each channel by a weight that depends on those beside it (Wang et al., 2020)."""
    layer = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Sigmoid())
    weights = stack(mean(2, 3), nn.Unflatten(1, (1, width)), layer)
    return Gated(stack(weights, Apply(lambda x: x[:, 0, :, None, None])), nn.Identity())


def couriers() -> nn.Module:
    """Experts on normalised hidden units, beside a linear layer."""
    hidden, direct = nn.Sequential(nn.Linear(6, 32), bn1(32), nn.LeakyReLU()), nn.Linear(6, 1)
    experts = Mixture(32, 3, lambda: mlp(32, 24, 1, activation=nn.LeakyReLU))
    return Added(stack(hidden, experts), direct)


silu, gelu = partial(mlp, activation=nn.SiLU), partial(mlp, activation=nn.GELU)
both = partial(conv, norm=bn2, activation=leaky)
ce, bce, mse = F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss

# fmt: off
TRAININGS: tuple[Training, ...] = (
    # Music.
    trained("chords", lambda: stack(pitches(1, 12), pitches(12, 12), mean(3), turned(),
                                    nn.Linear(12, 3), nn.Flatten()),
            data.chords, 4000, ce, SGD, 0.05, 32, 150, cosine, momentum=0.9, weight_decay=1e-4),
    trained("tempos", lambda: stack(Apply(autocorrelation), nn.LayerNorm(48), gelu(48, 64, 64, 1)),
            data.tempos, 5000, F.l1_loss, Adam, 2e-3, 64, 180, exponential),
    trained("transcription",
            lambda: stack(turned(), nn.Conv1d(36, 32, 3, padding=1), bn1(32), nn.ReLU(),
                          nn.Conv1d(32, 32, 3, padding=1), bn1(32), nn.ReLU(), turned(),
                          Beside(nn.Identity(), Memory(nn.GRU, 32, 16, bidirectional=True), axis=2),
                          nn.Linear(64, 12)),
            data.notes, 2400, bce, Adam, 4e-3, 16, 150, clip=3.0),
    trained("drums", lambda: stack(Memory(nn.LSTM, 4, 48), nn.LayerNorm(48),
                                   mlp(48, 48, 4, activation=nn.Tanh)),
            data.drums, 3000, bce, RMSprop, 3e-3, 32, 160, linear, clip=1.0),
    trained("tagged sounds",  # tall filters for timbre beside wide ones for rhythm
            lambda: stack(Beside(stack(nn.Conv2d(1, 12, (12, 3), (2, 1), (0, 1)),
                                       nn.GroupNorm(3, 12), nn.SiLU(), nn.MaxPool2d((7, 1))),
                                 stack(nn.AvgPool2d((6, 1)),
                                       nn.Conv2d(1, 12, (1, 11), padding=(0, 5)),
                                       nn.GroupNorm(3, 12), nn.SiLU(), nn.MaxPool2d((4, 1)))),
                          nn.Flatten(2), nn.Conv1d(24, 24, 3, padding=1), nn.GroupNorm(4, 24),
                          nn.SiLU(), Beside(mean(2), largest(2)), silu(48, 32, 5)),
            data.tagged_sounds, 3000, bounded_pairs,
            AdamW, 4e-3, 32, 160, warmed_up_cosine, weight_decay=0.01),
    trained("experts for synthesisers",
            lambda: stack(Mixture(6, 4, lambda: mlp(6, 24, 24).append(nn.ReLU())),
                          nn.Linear(24, 3)),
            data.synthesisers, 8000, mse, Adam, 1e-2, 64, 200, cosine),
    # Finance and insurance.
    trained("options", lambda: stack(Galerkin(4, 32), nn.Linear(32, 1)),
            data.options, 6000, mse, Adam, 3e-3, 64, 160, exponential),
    trained("repairs", lambda: stack(Codes((data.MAKES, data.REGIONS), 4),
                                     Added(nn.Linear(12, 1), mlp(12, 32, 32, 1, norm=bn1))),
            data.repairs, 6000, gamma_deviance,
            AdamW, 5e-3, 64, 180, cosine, clip=5.0, weight_decay=0.01),
    trained("volatilities", lambda: stack(Apply(over_spans), silu(5, 24, 24, 1)),
            data.volatilities, 6000, quasi_likelihood, NAdam, 3e-3, 64, 150, clip=5.0),
    trained("order books",
            lambda: stack(nn.Unflatten(1, (2, 5)), nn.Conv2d(2, 12, (5, 1)), bn2(12),
                          nn.LeakyReLU(), nn.Conv2d(12, 12, (1, 4), (1, 2)), bn2(12),
                          nn.LeakyReLU(), nn.Conv2d(12, 12, (1, 3)), bn2(12), nn.LeakyReLU(),
                          nn.Flatten(1, 2), turned(), Memory(nn.LSTM, 12, 24), last(),
                          nn.Linear(24, 3)),
            data.order_books, 4000, ce, Adam, 3e-3, 32, 160, clip=2.0),
    trained("experts for mortgages", lambda: Mixture(24, 5, lambda: gelu(7, 24, 1),
                                                     nn.Sequential(nn.Linear(7, 24), nn.Tanh())),
            data.mortgages, 10000, bce, Adam, 8e-3, 64, 200, cosine),
    # Logistics.
    trained("tours",
            lambda: stack(nn.Linear(4, 32), Residual(SelfAttention(32, 4)), turned(), bn1(32),
                          turned(), Residual(*mlp(32, 64, 32)), turned(), bn1(32), turned(),
                          Pointer(32), nn.Tanh(), Apply(lambda x: 10 * x)),
            data.tours, 6000, ce, Adam, 2e-3, 64, 180, cosine, clip=1.0),
    trained("bicycles", lambda: nn.Sequential(nn.Conv3d(2, 12, 3, padding=(0, 1, 1)),
                                              nn.GroupNorm(3, 12), nn.GELU(),
                                              nn.Conv3d(12, 12, 3, padding=(0, 1, 1)),
                                              nn.GroupNorm(3, 12), nn.GELU(),
                                              nn.Conv3d(12, 1, (2, 3, 3), padding=(0, 1, 1)),
                                              nn.Flatten(1, 3)),
            data.bicycles, 1600, mse, AdamW, 4e-3, 16, 120, cosine, weight_decay=0.01),
    trained("lorries",
            lambda: stack(Codes((data.HAULIERS, data.DEPOTS), 4), nn.Linear(14, 32),
                          repeat(2, lambda: Residual(bn1(32), *mlp(32, 64, 32, dropout=0.1))),
                          bn1(32), nn.ReLU(), nn.Linear(32, 1)),
            data.lorries, 8000, late_costs_more,
            AdamW, 3e-3, 64, 180, warmed_up_linear, clip=2.0, weight_decay=0.01),
    trained("stacks",
            lambda: stack(nn.Unflatten(2, (5, 1)),
                          Each(stack(Memory(nn.GRU, 1, 32), last(),
                                     mlp(32, 32, 1, activation=leaky))),
                          Apply(lambda x: x.sum(1))),
            data.stacks, 6000, F.smooth_l1_loss, Adam, 4e-3, 64, 180, exponential, clip=1.0),
    trained("warehouses",
            lambda: stack(nn.Linear(6, 32), nn.LayerNorm(32), nn.ReLU(),
                          Beside(nn.Identity(),
                                 Apply(lambda x: x.mean(1, keepdim=True).expand_as(x)), axis=2),
                          mlp(64, 32, 1, norm=nn.LayerNorm), nn.Flatten()),
            data.warehouses, 4000, exponential_pairs, Adam, 3e-3, 32, 150, clip=5.0),
    trained("experts for couriers", couriers,
            data.couriers, 8000, F.l1_loss, RMSprop, 3e-3, 64, 200, linear),
    # Oceans.
    trained("eddies",
            lambda: stack(Beside(both(2, 12, 12),
                                 stack(both(2, 12, 24, stride=2), both(24, 12),
                                       nn.Upsample(scale_factor=4, mode="bilinear"))),
                          both(24, 12), nn.Conv2d(12, 3, 1)),
            data.eddies, 1600, ce,
            SGD, 0.05, 16, 120, polynomial, momentum=0.9, weight_decay=1e-4),
    trained("buoys", lambda: stack(nn.Conv1d(3, 24, 5), nn.GroupNorm(4, 24), nn.SiLU(),
                                   nn.Conv1d(24, 24, 5, dilation=2), nn.GroupNorm(4, 24), nn.SiLU(),
                                   Apply(spread), silu(48, 48, 2)),
            data.buoys, 5000, angle, AdamW, 4e-3, 64, 160, cosine, weight_decay=0.01),
    trained("mixed layers",
            lambda: stack(conv(2, 8, size=5, dims=1, activation=nn.Tanh), nn.AvgPool1d(2),
                          conv(8, 16, size=5, dims=1, activation=nn.Tanh), nn.AvgPool1d(2),
                          nn.Flatten(), mlp(160, 32, 1, activation=nn.Tanh)),
            data.layers, 5000, F.huber_loss, Adam, 3e-3, 64, 150),
    trained("plankton",
            lambda: stack(nn.Conv2d(1, 12, 3, padding=1), bn2(12), nn.ReLU(), weighted(12),
                          nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), bn2(24), nn.ReLU(),
                          weighted(24), nn.MaxPool2d(2), nn.Conv2d(24, 24, 3), bn2(24), nn.ReLU(),
                          nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 5)),
            data.plankton, 4000, ce, AdamW, 3e-3, 32, 150, cosine, weight_decay=0.01),
    trained("floats", lambda: stack(Apply(with_moves), nn.Linear(4, 32), nn.GELU(),
                                    Memory(nn.LSTM, 32, 32, num_layers=2), last(), gelu(32, 32, 4)),
            data.floats, 5000, laplace_likelihood, Adam, 3e-3, 64, 160, exponential, clip=1.0),
    # Security.
    trained("hosts",
            lambda: stack(nn.Embedding(data.LETTERS, 16),
                          Beside(nn.Identity(), Memory(nn.GRU, 16, 24, bidirectional=True), axis=2),
                          nn.Linear(64, 48), nn.Tanh(), largest(1), nn.Linear(48, 4)),
            data.hosts, 5000, ce, Adam, 4e-3, 32, 160, exponential, clip=1.0),
    trained("logs",  # light convolutions over the lines before (Wu et al., 2019)
            lambda: stack(nn.Embedding(data.EVENTS, 32),
                          repeat(2,
                                 lambda: stack(Residual(nn.LayerNorm(32), nn.Linear(32, 32),
                                                        turned(), nn.ConstantPad1d((6, 0), 0.0),
                                                        nn.Conv1d(32, 32, 7, groups=32), turned()),
                                               Residual(nn.LayerNorm(32),
                                                        *silu(32, 64, 32, dropout=0.1)))),
                          nn.LayerNorm(32), nn.Linear(32, data.EVENTS), turned()),
            data.logs, 4000, ce, AdamW, 3e-3, 32, 150, warmed_up_cosine, clip=1.0,
            weight_decay=0.01),
    trained("power traces",
            lambda: stack(bn1(1), nn.Conv1d(1, 8, 7, padding=3), nn.ELU(), nn.AvgPool1d(2),
                          nn.Conv1d(8, 16, 7, padding=3), bn1(16), nn.ELU(), nn.AvgPool1d(4),
                          nn.Flatten(), mlp(192, 24, 5, activation=nn.ELU)),
            data.power_traces, 5000, ce, Adam, 2e-3, 32, 160),
    trained("connections", lambda: stack(Modulated((3, 10), 7, 48), nn.ReLU(),
                                         mlp(48, 48, 5, dropout=0.1)),
            data.connections, 8000, generalised_cross_entropy, Adam, 3e-3, 64, 160,
            unfit=OF_INPUTS),
    trained("experts for packets",
            lambda: stack(Mixture(28, 4, lambda: nn.Sequential(nn.Linear(28, 48), nn.LayerNorm(48),
                                                               nn.ReLU())), mlp(48, 32, 6)),
            data.packets, 10000, ce, AdamW, 4e-3, 64, 180, cosine, weight_decay=0.01),
    # Robots.
    trained("turns",
            lambda: stack(Alike(nn.Conv1d(1, 12, 5, padding=2, padding_mode="circular"), leaky(),
                                nn.Conv1d(12, 12, 5, padding=2, padding_mode="circular")),
                          nn.LayerNorm(48), mlp(48, 48, 2, activation=leaky)),
            data.scans, 5000, circular, Adam, 3e-3, 64, 160, cosine),
    trained("grips",
            lambda: stack(conv(1, 12, size=5, stride=2), conv(12, 24, stride=2), conv(24, 24),
                          nn.ConvTranspose2d(24, 12, 4, 2, 1), nn.ReLU(),
                          nn.ConvTranspose2d(12, 12, 4, 2, 1), nn.ReLU(),
                          nn.Conv2d(12, 1, 3, padding=1)),
            data.grips, 2400, bce, Adam, 4e-3, 16, 140),
    trained("arms", Arm,
            data.arms, 8000, mse, NAdam, 4e-3, 64, 180, exponential),
    trained("ground",
            lambda: stack(nn.Conv1d(3, 24, 5, 2, 2), bn1(24), nn.GELU(),
                          repeat(2,
                                 lambda: Residual(nn.Conv1d(24, 24, 9, padding=4, groups=24),
                                                  bn1(24), nn.GELU(), nn.Conv1d(24, 24, 1), bn1(24),
                                                  nn.GELU())),
                          pooled(1, most=True), nn.Linear(24, 5)),
            data.ground, 4000, ce, SGD, 0.05, 32, 150, cosine, momentum=0.9, weight_decay=1e-4),
    trained("experts for gaits",
            lambda: Mixture(16, 4, lambda: silu(7, 24, 3),
                            stack(columns(0, 3), nn.Linear(3, 16), nn.SiLU())),
            data.gaits, 10000, F.smooth_l1_loss, Adam, 1e-2, 64, 200, cosine),
)
"""How they are usually trained."""
