"""Networks for robots."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.residual import Residual


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
        self.inertia = nn.Sequential(
            *(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, 4),
        )
        self.forces = nn.Sequential(
            *(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, 2),
        )

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


class GaitMixture(nn.Module):
    """Experts for gaits, of which a deeper gate knows the slope and load too."""

    def __init__(self, inputs: int = 7, width: int = 24, experts: int = 4, joints: int = 3) -> None:
        super().__init__()
        self.situation = nn.Sequential(nn.Linear(3, 16), nn.SiLU())
        self.gate = nn.Linear(16, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, joints))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.gate(self.situation(x[:, :3])), 1)
        angles = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("ne,nej->nj", weights, angles)
