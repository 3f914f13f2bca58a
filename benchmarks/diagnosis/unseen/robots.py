"""Problems for robots.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import SGD, Adam, NAdam

from benchmarks.diagnosis.development.networks import Mixture, columns, mlp
from benchmarks.diagnosis.draws import Samples, noisy, pixels, uniform
from benchmarks.diagnosis.layers import Residual
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential
from benchmarks.diagnosis.training import Training, trained


def chords(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Distances between directions on the circle, and how far outputs are from its length."""
    length = outputs.norm(dim=1)
    away = (F.normalize(outputs, dim=1) - targets).norm(dim=1)
    return reduced(away + 0.1 * (length - 1).square(), reduction)


def scans(n: int, rays: int = 48) -> Samples:
    """How far walls are before and after a turn, ``[2, rays]``; its sine and cosine, ``[2]``."""
    angle = 2 * math.pi * torch.arange(rays) / rays
    turn = uniform(-0.8, 0.8, n, 1)
    sizes, phases = uniform(0.15, 0.45, n, 4, 1), uniform(0, 2 * math.pi, n, 4, 1)
    waves = torch.arange(1, 5)[:, None]

    def seen(heading: torch.Tensor) -> torch.Tensor:
        return (sizes * (waves * heading[:, None] + phases).sin()).sum(1)

    both = torch.stack([seen(angle.expand(n, -1)), seen(angle + turn)], 1)
    return noisy(both, 0.03) / 0.43, torch.cat([turn.sin(), turn.cos()], 1)


def grips(n: int, side: int = 16) -> Samples:
    """Heights ``[1, side, side]``; where a gripper that opens sideways can hold, the same shape.

    It holds narrow things, and slips from wide ones.
    """
    rows, columns = pixels(side)
    height, holds = torch.zeros(n, side, side), torch.zeros(n, side, side)
    for row, column in ((-0.5, -0.5), (0.5, -0.45), (-0.45, 0.5), (0.5, 0.5)):
        there = torch.rand(n, 1, 1) < 0.75
        narrow = torch.rand(n, 1, 1) < 0.5
        south, east = (uniform(-0.1, 0.1, n, 1, 1) for _ in range(2))
        wide = torch.where(narrow, 0.14, 0.36)
        tall = torch.where(narrow, uniform(0.2, 0.36, n, 1, 1), uniform(0.12, 0.36, n, 1, 1))
        inside = ((rows - row - south).abs() < tall) & ((columns - column - east).abs() < wide)
        height = torch.where(inside & there, uniform(0.7, 1.3, n, 1, 1), height)
        holds = torch.where(inside & there & narrow, 1.0, holds)
    return noisy((height - 0.15) / 0.35, 0.3)[:, None], holds[:, None]


def arms(n: int) -> Samples:
    """Angles, speeds and accelerations of an arm with two joints, ``[6]``; its torques, ``[2]``."""
    angles, speeds, gains = uniform(-2, 2, n, 2), torch.randn(n, 2), torch.randn(n, 2)
    first, second = angles.unbind(1)
    coupled, turned = second.cos(), second.sin()
    own = (2 + coupled) * gains[:, 0] + (0.5 + 0.5 * coupled) * gains[:, 1]
    own = own - 0.5 * turned * (2 * speeds[:, 0] + speeds[:, 1]) * speeds[:, 1]
    other = (0.5 + 0.5 * coupled) * gains[:, 0] + 0.7 * gains[:, 1]
    other = other + 0.5 * turned * speeds[:, 0].square()
    weight = (first + second).cos()
    torques = torch.stack([own + 2 * first.cos() + weight, other + weight], 1)
    inputs = torch.cat([angles / 1.15, speeds, gains], 1)
    return inputs, noisy(torques / torch.tensor([2.9, 1.2]), 0.05)


def ground(n: int, length: int = 64) -> Samples:
    """Accelerations ``[3, length]`` of a robot that walks; on which of five grounds it does.

    Grounds differ in how hard steps are, how long they ring, and how much the robot sways.
    """
    kind = torch.randint(5, (n,))
    hard = torch.tensor([2.5, 1.2, 2.0, 0.8, 1.6])[kind][:, None]
    ring = torch.tensor([0.6, 0.15, 0.15, 0.3, 0.5])[kind][:, None]
    tone = torch.tensor([2.4, 1.0, 1.7, 0.6, 1.2])[kind][:, None]
    sway = torch.tensor([0.2, 0.8, 0.4, 1.2, 0.9])[kind][:, None]
    time = torch.arange(length)
    period, phase = uniform(12, 18, n, 1), torch.rand(n, 1)
    since = (time + phase * period) % period
    step = hard * (-ring * since).exp() * (tone * since).cos() * uniform(0.8, 1.2, n, 1)
    swing = (math.pi * (time / period + phase)).sin()
    motion = torch.stack([step, 0.4 * step + sway * swing, sway * swing.square()], 1)
    return noisy(motion - 0.1, 0.35) / 0.7, kind


def gaits(n: int) -> Samples:
    """Speed, slope, load and two phases, ``[7]``; angles of three joints, ``[3]``.

    A robot creeps, walks or trots by its speed.
    """
    speed, slope, load = uniform(-1.7, 1.7, n), torch.randn(n), torch.randn(n)
    first, second = uniform(0, 2 * math.pi, n), uniform(0, 2 * math.pi, n)
    creep = torch.stack([first.sin(), 0.5 * slope, -first.cos()], 1)
    walk = torch.stack([second.cos() + 0.3 * load, -second.sin(), 0.5 * load], 1)
    trot = torch.stack([-first.cos(), second.sin() + 0.3 * slope, second.cos()], 1)
    fast, slow = (speed > 0.6)[:, None], (speed < -0.6)[:, None]
    angles = torch.where(fast, trot, torch.where(slow, creep, walk))
    waves = [1.4 * wave for wave in (first.sin(), first.cos(), second.sin(), second.cos())]
    return torch.stack([speed, slope, load, *waves], 1), noisy(1.3 * angles, 0.1)


class TurnNetwork(nn.Module):
    """Each scan by the same convolutions, and how alike the two are after each turn."""

    def __init__(self, rays: int = 48, width: int = 12, outputs: int = 2) -> None:
        super().__init__()
        self.look = nn.Sequential(
            *(nn.Conv1d(1, width, 5, padding=2, padding_mode="circular"), nn.LeakyReLU(0.1)),
            nn.Conv1d(width, width, 5, padding=2, padding_mode="circular"),
        )
        self.head = nn.Sequential(
            *(nn.LayerNorm(rays), nn.Linear(rays, 48), nn.LeakyReLU(0.1), nn.Linear(48, outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        before, after = (torch.fft.rfft(self.look(x[:, i : i + 1])) for i in range(2))
        alike = torch.fft.irfft((before * after.conj()).sum(1), x.shape[2])
        return self.head(alike / x.shape[2])


def grip_network(width: int = 12) -> nn.Module:
    """Convolutions to a coarser picture and back (Morrison et al., 2018)."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, 2, 1)),
        *(nn.ReLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU()),
        *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU()),
        *(nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)),
    )


class ArmNetwork(nn.Module):
    """A matrix of inertia and other forces by angles (Lutter et al., 2019)."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.inertia = mlp(2, width, width, 4, activation=nn.SiLU)
        self.forces = mlp(4, width, width, 2, activation=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.inertia(x[:, :2]).unflatten(1, (2, 2))
        return (matrix @ x[:, 4:, None])[..., 0] + self.forces(x[:, :4])


def ground_network(width: int = 24, classes: int = 5) -> nn.Module:
    """Residual blocks with a convolution of each channel and one of all of them."""
    return nn.Sequential(
        *(nn.Conv1d(3, width, 5, 2, 2), nn.BatchNorm1d(width), nn.GELU()),
        *(
            Residual(
                *(nn.Conv1d(width, width, 9, padding=4, groups=width), nn.BatchNorm1d(width)),
                *(nn.GELU(), nn.Conv1d(width, width, 1), nn.BatchNorm1d(width), nn.GELU()),
            )
            for _ in range(2)
        ),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(width, classes)),
    )


def gait_mixture(inputs: int = 7, width: int = 24, experts: int = 4, joints: int = 3) -> nn.Module:
    """Experts for gaits, of which a deeper gate knows the slope and load too."""
    look = nn.Sequential(columns(0, 3), nn.Linear(3, 16), nn.SiLU())
    return Mixture(16, experts, lambda: mlp(inputs, width, joints, activation=nn.SiLU), look)


# fmt: off
ROBOTS: tuple[Training, ...] = (
    trained("turns", TurnNetwork, scans, 5000, chords,
        Adam, 3e-3, 64, 160, cosine),
    trained("grips", grip_network, grips, 2400, F.binary_cross_entropy_with_logits,
        Adam, 4e-3, 16, 140),
    trained("arms", ArmNetwork, arms, 8000, F.mse_loss,
        NAdam, 4e-3, 64, 180, exponential),
    trained("ground", ground_network, ground, 4000, F.cross_entropy,
        SGD, 0.05, 32, 150, cosine, momentum=0.9, weight_decay=1e-4),
    trained("experts for gaits", gait_mixture, gaits, 10000, F.smooth_l1_loss,
        Adam, 1e-2, 64, 200, cosine),
)
