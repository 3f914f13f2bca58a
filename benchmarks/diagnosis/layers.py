"""Layers that networks of several problems consist of."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere


class Residual(nn.Module):
    """The inputs plus what layers compute of them (He et al., 2016)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Attention(nn.Module):
    """Queries ``[N, Q, D]`` attend to a context ``[N, K, D]`` (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Linear(width, width)
        self.keys_and_values = nn.Linear(width, 2 * width)
        self.merge = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None = None) -> Tensor:
        """``bias`` is added to the scores ``[N, heads, Q, K]``."""
        queries = self.queries(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        pairs = self.keys_and_values(context).unflatten(2, (2, self.heads, -1))
        keys, values = pairs.permute(2, 0, 3, 1, 4)
        typed = None if bias is None else bias.to(queries.dtype)
        mixed = F.scaled_dot_product_attention(queries, keys, values, typed)
        return self.merge(mixed.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """Each place ``[N, T, D]`` attends to all of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x)
