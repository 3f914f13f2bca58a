"""Predicates of modules, which may be used as selectors."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import activation

from gradlens.torch_private import BatchNorm, ChannelNorm, Convolution, Dropout

_ACTIVATIONS = tuple(
    kind
    for kind in vars(activation).values()
    if isinstance(kind, type)
    and issubclass(kind, nn.Module)
    and kind.__module__ == activation.__name__
    and kind is not nn.MultiheadAttention
)
_NORMALIZATIONS = (
    ChannelNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)


def is_activation(module: nn.Module) -> bool:
    """Whether it is one of torch's activation functions, such as ReLU or Softmax."""
    return isinstance(module, _ACTIVATIONS)


def is_no_activation(module: nn.Module) -> bool:
    """Whether it is any other module than an activation function."""
    return not is_activation(module)


def is_dropout(module: nn.Module) -> bool:
    """Whether it is one of torch's dropout layers."""
    return isinstance(module, Dropout)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear or bilinear layer."""
    return isinstance(module, (nn.Linear, nn.Bilinear))


def is_convolution(module: nn.Module) -> bool:
    """Whether it is a convolution, transposed or not."""
    return isinstance(module, Convolution)


def is_affine(module: nn.Module) -> bool:
    """Whether it multiplies by a matrix of weights: a linear layer or a convolution."""
    return is_linear(module) or is_convolution(module)


def is_normalization(module: nn.Module) -> bool:
    """Whether it normalises over the batch, the layer, groups of channels or an instance."""
    return isinstance(module, _NORMALIZATIONS)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it normalises over the batch."""
    return isinstance(module, BatchNorm)


def is_recurrent(module: nn.Module) -> bool:
    """Whether it is an RNN, LSTM or GRU, or a cell of one."""
    return isinstance(module, (nn.RNNBase, nn.RNNCellBase))


def is_attention(module: nn.Module) -> bool:
    """Whether it is torch's multi-head attention."""
    return isinstance(module, nn.MultiheadAttention)


def computes_attention(module: nn.Module) -> bool:
    """Whether its class is called attention, and that of no module inside of it is."""
    inside = [each for each in module.modules() if _is_called_attention(each)]
    return inside == [module]


def _is_called_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def is_embedding(module: nn.Module) -> bool:
    """Whether it looks up vectors by index."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def has_parameters(module: nn.Module) -> bool:
    """Whether it has parameters of its own."""
    return any(True for _ in module.parameters(recurse=False))
