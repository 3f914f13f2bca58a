"""Networks for equations, codes, densities and control."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.diagnosis.development.trades.mechanics import data


class SpectralConvolution(nn.Module):
    """A matrix for each of the lowest frequencies (Li et al., 2021), as real and imaginary part."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(modes, width, width, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x.float())[..., : self.modes]
        mixed = torch.einsum("nim,mio->nom", waves, torch.view_as_complex(self.weight))
        return torch.fft.irfft(mixed, x.shape[2])


class FourierLayer(nn.Module):
    """A convolution over all places, plus one at each place."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.everywhere = SpectralConvolution(width, modes)
        self.here = nn.Conv1d(width, width, 1)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.everywhere(x) + self.here(x))


def fourier_operator(width: int = 16, modes: int = 8) -> nn.Module:
    """Li et al., 2021, with two layers, for functions ``[1, POINTS]``."""
    return nn.Sequential(
        *(nn.Conv1d(1, width, 1), FourierLayer(width, modes), FourierLayer(width, modes)),
        *(nn.Conv1d(width, 32, 1), nn.GELU(), nn.Conv1d(32, 1, 1)),
    )


class Kick(nn.Module):
    """Adds the gradient of a function of the one half to the other (Jin et al., 2020)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.inside = nn.Linear(1, units)
        self.activation = nn.Tanh()
        self.outside = nn.Linear(units, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The halves are exchanged, too, so that the next kick is that of the other one."""
        first, second = x.chunk(2, 1)
        return torch.cat([second + self.outside(self.activation(self.inside(first))), first], 1)


def symplectic_network(units: int = 16, kicks: int = 6) -> nn.Module:
    """Maps places and momenta so that areas stay what they are."""
    return nn.Sequential(*(Kick(units) for _ in range(kicks)))


class Levels(nn.Module):
    """Numbers rounded to a few levels, with the gradient of others (Mentzer et al., 2024)."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.bound = (levels - 1) / 2

    def forward(self, x: Tensor) -> Tensor:
        bounded = x.tanh() * self.bound
        return (bounded + (bounded.round() - bounded).detach()) / self.bound


def quantised_autoencoder(size: int = 40, width: int = 48, codes: int = 8) -> nn.Module:
    """An autoencoder whose codes have nine levels."""
    return nn.Sequential(
        *(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, codes), Levels(9)),
        *(nn.Linear(codes, width), nn.SiLU(), nn.Linear(width, size)),
    )


class NoiseContrast(nn.Module):
    """How likely a point isn't noise, by an unnormalised density (Gutmann and Hyvärinen, 2010).

    The energy is that of the density relative to the noise's, which is a normal one.
    """

    def __init__(self, width: int = 48, deviation: float = 1.6) -> None:
        super().__init__()
        self.deviation = deviation
        self.energy = nn.Sequential(
            *(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        noise = 1 - (x / self.deviation).square().sum(1, keepdim=True) / 2
        return -self.energy(x) - noise


def pilot(width: int = 32) -> nn.Module:
    """What to do, between -1 and 1."""
    return nn.Sequential(
        *(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        *(nn.Linear(width, 2), nn.Tanh()),
    )


class LearntShrinkage(nn.Module):
    """Steps of iterative shrinkage whose matrices are learnt (Gregor and LeCun, 2010)."""

    def __init__(self, steps: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(data.MEASURED, data.SIZE, bias=False)
        self.inhibit = nn.ModuleList(
            nn.Linear(data.SIZE, data.SIZE, bias=False) for _ in range(steps)
        )
        self.threshold = nn.Parameter(torch.full((steps + 1, data.SIZE), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        codes = self._shrunk(entered, 0)
        for step, layer in enumerate(self.inhibit, 1):
            codes = self._shrunk(entered + layer(codes), step)
        return codes

    def _shrunk(self, x: Tensor, step: int) -> Tensor:
        threshold = self.threshold[step]
        return nn.functional.relu(x - threshold) - nn.functional.relu(-x - threshold)


class KoopmanNetwork(nn.Module):
    """Coordinates in which all that happens is linear (Lusch et al., 2018); the next times."""

    def __init__(self, width: int = 32, size: int = 8) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *(nn.Linear(2, width), nn.ELU(), nn.Linear(width, width), nn.ELU()),
            nn.Linear(width, size),
        )
        self.advance = nn.Linear(size, size, bias=False)
        nn.init.orthogonal_(self.advance.weight)
        self.decode = nn.Sequential(nn.Linear(size, width), nn.ELU(), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        state, states = self.encode(x), list[Tensor]()
        for _ in range(data.AHEAD):
            state = self.advance(state)
            states.append(state)
        return self.decode(torch.stack(states, 1))
