"""What a run consists of at a step, from the model, the optimizer and the loss's graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from torch import nn

from gradlens.facts.batch import Rows
from gradlens.facts.network import Network
from gradlens.facts.parameters import groups
from gradlens.gradients.gradients import Setting
from gradlens.graph.loss import Loss
from gradlens.history.setup import Layer, ParameterGroup, Setup
from gradlens.torch_private import ChannelNorm

NORMALISATIONS = (ChannelNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def setup_of(
    setting: Setting,
    info: Mapping[str, Any],
    network: Network | None,
    loss: Loss | None,
    rows: Sequence[Rows],
) -> Setup:
    """The setup; the ``network`` is what the ``loss`` was computed by."""
    optimizer = info.get("optimizer")
    names = {id(p): name for name, p in setting.parameters.items()}
    found = () if optimizer is None else groups(optimizer, names)
    scaler = info.get("scaler")
    return Setup(
        optimizer="" if optimizer is None else type(optimizer).__name__,
        groups=found,
        missed=_missed(setting, found) if found else (),
        frozen=_frozen(setting),
        loss="" if loss is None else loss.name,
        loss_reduction="" if loss is None else loss.reduction,
        loss_weighted=loss is not None and loss.is_weighted,
        declared_reduction=setting.loss_reduction,
        layers={} if setting.model is None else _layers(setting.model),
        activations={} if network is None else {a.layer: a.kind for a in network.activations},
        order=() if network is None else network.order,
        transformed=() if network is None else network.transformed,
        before_loss="" if network is None else network.before_loss,
        broadcast="" if network is None or loss is None else network.broadcast(loss.samples),
        linear_pairs=() if network is None else network.linear_pairs,
        is_linear=network is not None and loss is not None and network.is_linear(loss),
        half=network is not None and network.has_half,
        scaler=scaler is not None and scaler.is_enabled(),
        dtypes=tuple(sorted({_dtype(p) for p in setting.parameters.values()})),
        input_kind=("real" if rows[-1].is_real else "integers") if rows else "",
        input_normalised=setting.model is not None and _begins_normalised(setting.model),
    )


def _missed(setting: Setting, found: Sequence[ParameterGroup]) -> tuple[str, ...]:
    """Trainable parameters that are in no group."""
    held = {name for group in found for name in group.parameters}
    return tuple(n for n, p in setting.parameters.items() if p.requires_grad and n not in held)


def _frozen(setting: Setting) -> tuple[str, ...]:
    parameters = {} if setting.model is None else dict(setting.model.named_parameters())
    return tuple(name for name, p in parameters.items() if not p.requires_grad)


def _layers(model: nn.Module) -> dict[str, Layer]:
    """Modules with parameters of their own, and normalisations without any."""
    found = {}
    for name, module in model.named_modules():
        if (
            isinstance(module, ChannelNorm)
            or next(module.parameters(recurse=False), None) is not None
        ):
            found[name] = Layer(_classes(module), module.training, _fan_in(module))
    return found


def _classes(module: nn.Module) -> tuple[str, ...]:
    classes = takewhile(lambda cls: cls is not nn.Module, type(module).__mro__)
    return tuple(cls.__name__ for cls in classes)


def _fan_in(module: nn.Module) -> int:
    """The number of inputs of one output of a layer; 0 without a weight of rows."""
    # Reading a parametrised weight would compute it, and may change the layer's buffers.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() < 2 or not len(weight) or isinstance(module, LOOKUPS):
        return 0
    return weight[0].numel()


LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Layers whose rows are chosen rather than multiplied."""


def _begins_normalised(model: nn.Module) -> bool:
    """Whether the first module without children is a normalisation."""
    leaves = (module for module in model.modules() if next(module.children(), None) is None)
    first = next((each for each in leaves if not isinstance(each, PASSIVE)), None)
    return isinstance(first, NORMALISATIONS)


PASSIVE = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)


def _dtype(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
