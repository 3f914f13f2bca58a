"""Small networks of several kinds, all of which map ``[N, 4]`` to ``[N, 2]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


class Residual(nn.Module):
    """Two convolutions with batch normalisation around a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.branch = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x.unflatten(-1, (1, 2, 2))))
        return self.head((x + self.branch(x)).mean((-2, -1)))


class Recurrent(nn.Module):
    """Its output is that of the last step, or of each ``[N, 2, 2]``."""

    def __init__(self, at_each: bool = False) -> None:
        super().__init__()
        self.at_each = at_each
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.lstm(x.unflatten(-1, (2, 2)))[0]
        return self.head(found if self.at_each else found[:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.stack([x, x.flip(-1)], 1)).mean(1))
