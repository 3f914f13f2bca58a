"""Faults of layers: how weights start, which units are alive, how gradients get through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from benchmarks.diagnosis.faults.fault import Fault, Injected, hurts, spikes, stalls, with_options
from benchmarks.diagnosis.faults.structure import (
    ACTIVATIONS,
    NORMS,
    SATURATING,
    affine,
    before,
    chain,
    consecutive,
    fan_in,
    gain,
    of_type,
    scale,
)
from benchmarks.diagnosis.networks import Attention
from benchmarks.diagnosis.training import Training, batches, model_of, trainable

EQUAL = 0.5
"""Times 1/sqrt(fan-in): the value of all weights of a layer whose units are equal."""
FAR_BELOW = -100.0
"""A bias under which a ReLU is zero for any standardised input."""


def chosen(names: list[Any], share: float) -> list[Any]:
    """The last ones of a list, at least one."""
    return names[-math.ceil(share * len(names)) :]


# How weights start.


def equalise(model: nn.Module, names: Iterable[str]) -> None:
    """All weights of a layer get the same value, and its biases zero."""
    for name in names:
        layer: Any = model.get_submodule(name)
        with torch.no_grad():
            layer.weight.fill_(EQUAL / math.sqrt(fan_in(layer.weight)))
            if layer.bias is not None:
                layer.bias.zero_()


def symmetric_init(training: Training, strength: float, seed: int) -> Injected | None:
    pairs = chosen(consecutive(model_of(training, seed)), strength)
    if not pairs:
        return None
    names = [*dict.fromkeys(name for pair in pairs for name, _ in pair)]
    symmetric = frozenset(first[0] for first, _ in pairs)
    prepared = replace(training, prepare=partial(equalise, names=names))
    return Injected(prepared, symmetric, 0)


def equalise_units(model: nn.Module, names: Iterable[str], spread: float) -> None:
    """Recurrent weights get one value, but for a share of what they were.

    Layers weigh all units equally, else their gradients would make the units different.
    """
    with torch.no_grad():
        for name in names:
            for weight in model.get_submodule(name).parameters():
                weight.mul_(spread).add_(EQUAL / math.sqrt(fan_in(weight)))
        for _, layer in of_type(model, nn.Linear):
            layer.weight.copy_(layer.weight[:, :1].expand_as(layer.weight))


def symmetric_units(training: Training, strength: float, seed: int) -> Injected | None:
    names = [name for name, _ in of_type(model_of(training, seed), nn.RNNBase)]
    if not names:
        return None
    prepare = partial(equalise_units, names=names, spread=1 / strength)
    return Injected(replace(training, prepare=prepare), frozenset(names), 0)


def set_gains(model: nn.Module, names: Iterable[str], value: float) -> None:
    """Weights get a root mean square of so many times 1/sqrt(fan-in)."""
    for name in names:
        weight = model.get_parameter(name)
        scale([weight], value / gain(weight))


def weights_of(model: nn.Module) -> list[str]:
    """The names of weights with two axes or more, without embeddings."""
    embedded = {f"{name}.weight" for name, _ in of_type(model, nn.Embedding)}
    named = model.named_parameters()
    return [n for n, p in named if p.ndim > 1 and n not in embedded and "weight" in n]


def exploding_gradients(
    training: Training, strength: float, seed: int, share: float = 1.0, kind: str = ""
) -> Injected | None:
    names = [name for name in weights_of(model_of(training, seed)) if kind in name]
    if not names:
        return None
    prepare = partial(set_gains, names=chosen(names, share), value=strength)
    return Injected(replace(training, prepare=prepare), frozenset(chosen(names, share)), 0)


def scale_weights(model: nn.Module, names: Iterable[str], factor: float) -> None:
    """Multiply the weights of layers."""
    scale([model.get_parameter(f"{name}.weight") for name in names], factor)


def small_weights(training: Training, strength: float, seed: int) -> Injected | None:
    model = model_of(training, seed)
    names = [name for name, module in chain(model) if isinstance(module, (nn.Linear, nn.Conv2d))]
    if len(names) < 3 or of_type(model, *NORMS):
        return None
    prepare = partial(scale_weights, names=names, factor=1 / strength)
    return Injected(replace(training, prepare=prepare), frozenset(names[:-1]), 0)


# How gradients get through.


def deepened(build: Callable[[], nn.Module], extra: int) -> nn.Module:
    """All activations are sigmoids, and more layers stand behind the first."""
    layers: list[nn.Module] = []
    for _, layer in chain(build()):
        is_first = not any(isinstance(each, nn.Sigmoid) for each in layers)
        if not isinstance(layer, ACTIVATIONS):
            layers.append(layer)
            continue
        layers.append(nn.Sigmoid())
        if is_first:
            for _ in range(extra):
                layers += [_square(layers), nn.Sigmoid()]
    return nn.Sequential(*layers)


def _square(layers: list[nn.Module]) -> nn.Module:
    """A layer with as many outputs as the latest has."""
    latest = next(each for each in layers[::-1] if isinstance(each, REPEATABLE))
    if isinstance(latest, nn.Linear):
        return nn.Linear(latest.out_features, latest.out_features)
    convolution = nn.Conv1d if isinstance(latest, nn.Conv1d) else nn.Conv2d
    return convolution(latest.out_channels, latest.out_channels, 3, padding=1)


REPEATABLE = (nn.Linear, nn.Conv1d, nn.Conv2d)


def _can_be_deepened(layers: list[nn.Module]) -> bool:
    """Whether there is a layer before the first activation that can be repeated."""
    first = list(takewhile(lambda each: not isinstance(each, ACTIVATIONS), layers))
    return len(first) < len(layers) and any(isinstance(each, REPEATABLE) for each in first)


def many_sigmoids(training: Training, strength: float, seed: int) -> Injected | None:
    model = model_of(training, seed)
    layers = [layer for _, layer in chain(model)]
    if len(affine(model)) < 2 or not _can_be_deepened(layers) or of_type(model, *NORMS):
        return None
    build = partial(deepened, training.build, int(strength))
    deep = replace(training, build=build)
    names = [name for name, _ in affine(model_of(deep, seed))]
    # From the input on: which of the first layers are named is a matter of degree.
    return Injected(deep, frozenset(names[: len(names) // 2]), 0)


def scaled_loss(
    loss: Callable[..., Tensor], factor: float, outputs: Tensor, targets: Tensor
) -> Tensor:
    """The loss times a factor."""
    return factor * loss(outputs, targets)


def precision_underflow(training: Training, strength: float, seed: int) -> Injected | None:
    if of_type(model_of(training, seed), nn.RNNBase, nn.TransformerEncoderLayer):
        return None  # They have no float16 on a CPU.
    loss = partial(scaled_loss, training.loss, 1 / strength)
    half = replace(training, precision=torch.float16, valid_loss=training.loss)
    if training.optimizer is not SGD:
        return Injected(replace(half, loss=loss), notice="harmless")
    # Steps and decay of the weights are the same as with the loss as it was.
    decay = training.options.get("weight_decay", 0.0) / strength
    scaled = replace(half, loss=loss, rate=training.rate * strength)
    return Injected(with_options(scaled, weight_decay=decay), notice="harmless")


# Which units are alive.


def lower(model: nn.Module, names: Iterable[str], factor: float) -> None:
    """A share of a layer's biases are set far below zero."""
    for name in names:
        bias = model.get_parameter(f"{name}.bias")
        with torch.no_grad():
            bias[: math.ceil(factor * len(bias))] = FAR_BELOW


def inactive_units(
    training: Training,
    strength: float,
    seed: int,
    types: tuple[type[nn.Module], ...],
    change: Callable[..., None],
    share: float = 1.0,
) -> Injected | None:
    """A share of the layers in front of activations of some types are changed."""
    pairs = chosen(before(model_of(training, seed), *types), share)
    if not pairs:
        return None
    prepare = partial(change, names=[layer for (layer, _), _ in pairs], factor=strength)
    named = frozenset(name for pair in pairs for name, _ in pair)
    return Injected(replace(training, prepare=prepare), named, 0)


def close_gates(model: nn.Module, count: int, below: float) -> None:
    """The gate's biases for the first experts are lowered."""
    for name, gate in of_type(model, nn.Linear):
        if name.rpartition(".")[2] == "gate":
            assert isinstance(gate, nn.Linear)
            with torch.no_grad():
                gate.bias[:count] -= below


def expert_unused(training: Training, strength: float, seed: int, count: int) -> Injected | None:
    model = model_of(training, seed)
    lists = [n for n, _ in of_type(model, nn.ModuleList) if n.rpartition(".")[2] == "experts"]
    if not lists:
        return None
    unused = frozenset(f"{name}.{number}" for name in lists for number in range(count))
    prepare = partial(close_gates, count=count, below=strength)
    return Injected(replace(training, prepare=prepare), unused)


# What quantities show of single layers.


def moved_at_first(training: Training, name: str, seed: int) -> float:
    """By which share of its norm a weight is moved by the first batch, at the full rate."""
    model = model_of(training, seed)
    weight = model.get_parameter(name)
    start = weight.detach().clone()
    make_optimizer: Any = training.optimizer
    optimizer = make_optimizer(trainable(model), lr=training.rate, **training.options)
    _, batch = next(batches(training, training.data(seed), seed))
    training.loss(model(batch.inputs), batch.targets).backward()
    optimizer.step()
    return float((weight.detach() - start).norm() / start.norm())


def with_own_rate(model: nn.Module, name: str, factor: float) -> list[dict[str, Any]]:
    """A group for one weight, whose rate is so many times that of the others."""
    own = model.get_parameter(name)
    others = [each for each in trainable(model) if each is not own]
    return [{"params": others}, {"params": [own], "factor": factor}]


def with_kept_share(model: nn.Module, name: str, share: float, factor: float) -> list[Any]:
    """A group for one weight, whose rate follows the size that its updates turn out to have."""
    others, own = with_own_rate(model, name, factor)
    weight = model.get_parameter(name)
    last = [weight.detach().clone()]

    def follow(module: nn.Module, _: object) -> None:
        moved, size = float((weight.detach() - last[0]).norm()), float(weight.detach().norm())
        if module.training and moved > 0 and size > 0:
            own["factor"] *= min(max(share * size / moved, 1 / AT_ONCE), AT_ONCE)
            last[0] = weight.detach().clone()

    model.register_forward_pre_hook(follow)
    return [others, own]


AT_ONCE = 3.0
"""A rate changes by this factor at most, where a gradient happens to be small."""


def update_large(
    training: Training, strength: float, seed: int, is_share: bool = False
) -> Injected | None:
    """A weight with a rate of its own, or whose updates are this share of it."""
    names = weights_of(model_of(training, seed))
    if len(names) < 3:
        return None
    name = names[len(names) // 2]
    trained = partial(with_own_rate, name=name, factor=strength)
    if is_share:
        factor = strength / max(moved_at_first(training, name, seed), 1e-12)
        trained = partial(with_kept_share, name=name, share=strength, factor=factor)
    return Injected(replace(training, trained=trained), frozenset({name}))


def sharpen(model: nn.Module, factor: float) -> None:
    """Multiply the weights of queries, which makes scores of attention as many times larger."""
    with torch.no_grad():
        for _, layer in of_type(model, nn.MultiheadAttention):
            layer.in_proj_weight[: layer.embed_dim] *= factor
        for _, layer in of_type(model, Attention):
            layer.queries.weight *= factor


def attention_logits(training: Training, strength: float, seed: int) -> Injected | None:
    if not of_type(model_of(training, seed), nn.MultiheadAttention, Attention):
        return None
    return Injected(replace(training, prepare=partial(sharpen, factor=strength)))


def grow_head(model: nn.Module, factor: float, steps: int) -> None:
    """The queries of the first head of each layer grow with each step, up to a factor."""
    calls = [0]

    def grow(heads: int, module: nn.Module, _: object, out: Tensor) -> Tensor:
        calls[0] += module.training
        first, others = out.tensor_split([out.shape[-1] // heads], -1)
        return torch.cat([first * factor ** min(calls[0] / steps, 1.0), others], -1)

    for _, layer in of_type(model, Attention):
        assert isinstance(layer, Attention)
        layer.queries.register_forward_hook(partial(grow, layer.heads))


def head_grows(training: Training, strength: float, seed: int) -> Injected | None:
    if not of_type(model_of(training, seed), Attention):
        return None
    prepare = partial(grow_head, factor=strength, steps=training.steps // 2)
    return Injected(replace(training, prepare=prepare))


def enlarge(model: nn.Module, name: str, factor: float) -> None:
    """Multiply what the first unit of a layer computes."""
    with torch.no_grad():
        for parameter in model.get_submodule(name).parameters(recurse=False):
            parameter[0] *= factor


WIDE = 32
"""Units of a layer: where one is all that is large, the kurtosis is about three times as much."""


def activation_outlier(training: Training, strength: float, seed: int) -> Injected | None:
    layers = affine(model_of(training, seed))[:-1]
    wide = [name for name, layer in layers if len(layer.weight) >= WIDE]  # type: ignore[arg-type]
    if not wide:
        return None
    prepare = partial(enlarge, name=wide[0], factor=strength)
    return Injected(replace(training, prepare=prepare), frozenset({wide[0]}), notice="always")


def outgrow(model: nn.Module, after: int, factor: float) -> None:
    """From a step on, gradients are so many times as large."""
    calls = [0]

    def count(module: nn.Module, inputs: object) -> None:
        calls[0] += module.training

    model.register_forward_pre_hook(count)
    for parameter in trainable(model):
        parameter.register_hook(lambda gradient: gradient * (factor if calls[0] > after else 1.0))


def second_moment_old(training: Training, strength: float, seed: int) -> Injected | None:
    if training.optimizer not in (Adam, AdamW):
        return None
    after = training.steps // 2
    prepare = partial(outgrow, after=after, factor=strength)
    return Injected(replace(training, prepare=prepare))


# fmt: off
OF_LAYERS = (
    Fault("symmetric_init", "share of pairs of layers", (0.01, 0.5, 1.0), symmetric_init),
    Fault("symmetric_init", "recurrent, 1 over spread", (1e5, 1e7, math.inf), symmetric_units),
    Fault("exploding_gradients", "gain of all weights",
          (3, 5, 10), exploding_gradients, hurts),
    Fault("exploding_gradients", "gain of the last weight",
          (5, 10, 30), partial(exploding_gradients, share=0.01), hurts),
    Fault("exploding_gradients", "gain of recurrent weights",
          (3, 6, 12), partial(exploding_gradients, kind="weight_hh"), hurts),
    Fault("vanishing_gradients", "so many more sigmoids", (3, 5, 9), many_sigmoids, stalls),
    Fault("vanishing_gradients", "1 over factor of weights", (10, 30, 100), small_weights, hurts),
    Fault("precision_underflow", "1 over factor of the loss", (1e3, 1e5, 1e7), precision_underflow),
    Fault("dead_units", "share, one layer", (0.6, 0.8, 1.0),
          partial(inactive_units, types=(nn.ReLU,), change=lower, share=0.01)),
    Fault("dead_units", "share, all layers", (0.6, 0.8, 0.95),
          partial(inactive_units, types=(nn.ReLU,), change=lower)),
    Fault("saturated_units", "factor of weights", (10, 30, 100),
          partial(inactive_units, types=SATURATING, change=scale_weights), hurts),
    Fault("expert_unused", "one, bias lowered by", (15, 30, 1000), partial(expert_unused, count=1)),
    Fault("expert_unused", "two, bias lowered by", (15, 30, 1000), partial(expert_unused, count=2)),
    Fault("update_large", "factor of one weight's rate", (30, 100, 300), update_large, hurts),
    Fault("attention_logits", "factor of queries", (30, 100, 300), attention_logits, hurts),
    Fault("update_large", "share of a weight", (0.3, 0.4, 0.6),
          partial(update_large, is_share=True)),
    Fault("attention_logits", "factor of one head", (100, 300, 1000), head_grows),
    Fault("activation_outlier", "factor of one unit", (30, 100, 300), activation_outlier),
    Fault("second_moment_old", "factor of late gradients",
          (10, 100, 1000), second_moment_old, spikes),
)
