"""Residual connections (He et al., 2016)."""

from __future__ import annotations

from torch import Tensor, nn


class Residual(nn.Module):
    """The inputs plus what layers compute of them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)
