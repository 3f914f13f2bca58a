"""Where in a network something can be injected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.ELU, nn.SiLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid)
SATURATING = (nn.Tanh, nn.Sigmoid)

Named = tuple[str, nn.Module]


def chain(model: nn.Module) -> list[Named]:
    """The leaf modules of a network that is nothing but nested ``nn.Sequential``, else nothing."""
    if not isinstance(model, nn.Sequential):
        return []
    found: list[Named] = []
    for name, child in model.named_children():
        if isinstance(child, nn.Sequential):
            found += [(f"{name}.{inner}", leaf) for inner, leaf in chain(child)]
        elif next(child.children(), None) is None:
            found.append((name, child))
        else:
            return []
    return found


def sequences(model: nn.Module) -> Iterator[list[Named]]:
    """The direct children of each ``nn.Sequential`` of a network, with their full names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            prefix = f"{name}." if name else ""
            yield [(prefix + key, child) for key, child in module.named_children()]


def affine(model: nn.Module) -> list[Named]:
    """Linear and convolutional layers, in the order in which they are registered."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, AFFINE)]


def of_type(model: nn.Module, *types: type[nn.Module]) -> list[Named]:
    """The modules of some types."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, types)]


def before(model: nn.Module, *types: type[nn.Module]) -> list[tuple[Named, Named]]:
    """Layers with weights that stand right before an activation of some types, with that."""
    found = []
    for children in sequences(model):
        for layer, activation in pairwise(children):
            if isinstance(activation[1], types) and isinstance(layer[1], (*AFFINE, *NORMS)):
                found.append((layer, activation))
    return found


def consecutive(model: nn.Module) -> list[tuple[Named, Named]]:
    """Pairs of affine layers with nothing but activations, norms and pooling between them."""
    found = []
    for children in sequences(model):
        if all(next(child.children(), None) is None for _, child in children):
            found += [*pairwise((n, m) for n, m in children if isinstance(m, AFFINE))]
    for name, module in of_type(model, nn.TransformerEncoderLayer):
        assert isinstance(module, nn.TransformerEncoderLayer)
        found.append(((f"{name}.linear1", module.linear1), (f"{name}.linear2", module.linear2)))
    return found


def fan_in(weight: Tensor) -> int:
    """Inputs of each output of a linear or convolutional layer."""
    return weight[0].numel()


def gain(weight: Tensor) -> float:
    """The root mean square of a weight times the square root of its fan-in."""
    return weight.detach().square().mean().sqrt().item() * math.sqrt(fan_in(weight))


def scale(weights: list[Tensor], factor: float) -> None:
    """Multiply weights in place."""
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)


def exchange(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put another module in the place of one."""
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, module)
