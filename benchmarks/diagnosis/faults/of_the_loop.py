"""Faults of the loop, the optimizer and the graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from benchmarks.diagnosis.faults.fault import Fault, Injected, hurts, with_options
from benchmarks.diagnosis.faults.structure import (
    ACTIVATIONS,
    affine,
    consecutive,
    exchange,
    of_type,
)
from benchmarks.diagnosis.training import Split, Training, batches, model_of, shuffled
from gradlens.graph.loss import LossReduction

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
BIAS, LAYER, HALF = 0.0, 0.25, 0.5
"""Strengths: one bias, one layer, and half of the layers."""


def some_parameters(model: nn.Module, strength: float, from_input: bool) -> list[str]:
    """Names of parameters of affine layers: a bias, a layer's, or those of half of the layers."""
    names = [name for name, _ in affine(model)]
    names = names if from_input else names[::-1]
    chosen = names[: math.ceil(len(names) / 2)] if strength == HALF else names[:1]
    layers = {f"{name}.{key}" for name in chosen for key in ("weight", "bias")}
    found = [name for name, _ in model.named_parameters() if name in layers]
    return found[-1:] if strength == BIAS else found


def without(model: nn.Module, missed: Iterable[str]) -> list[nn.Parameter]:
    """All parameters but some."""
    return [parameter for name, parameter in model.named_parameters() if name not in missed]


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    """These parameters need no gradient."""
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def left_out(
    training: Training, strength: float, seed: int, from_input: bool, is_frozen: bool = False
) -> Injected | None:
    """Some parameters are frozen, or the optimizer doesn't get them."""
    model = model_of(training, seed)
    names = frozenset(some_parameters(model, strength, from_input))
    if len(names) in (0, len([*model.parameters()])):
        return None
    if is_frozen:
        frozen = replace(training, prepare=partial(freeze, names=names))
        return Injected(frozen, names, 0, notice="always")
    return Injected(replace(training, trained=partial(without, missed=names)), names, 0)


def every(interval: float, step: int) -> bool:
    """At step 0 and at each ``interval``-th step after it, which may be infinite."""
    return step == 0 or (math.isfinite(interval) and step % int(interval) == 0)


def zero_grad_missing(training: Training, strength: float, seed: int) -> Injected:
    return Injected(replace(training, zeroed=partial(every, strength)), step=1)


def until(end: int, step: int) -> bool:
    """At the first steps only."""
    return step < end


def no_step(training: Training, strength: float, seed: int) -> Injected:
    end = int((1 - strength) * training.steps)
    return Injected(replace(training, updated=partial(until, end)), step=end)


def factor_until(share: float, step: int, steps: int) -> float:
    """A rate that falls to zero after a share of the steps."""
    return 1.0 if step < int(share * steps) else 0.0


def no_rate(training: Training, strength: float, seed: int) -> Injected:
    end = int((1 - strength) * training.steps)
    return Injected(replace(training, schedule=partial(factor_until, 1 - strength)), step=end)


def loss_of_shares(
    shares: Callable[[Tensor], Tensor],
    loss: Callable[..., Tensor],
    factor: float,
    outputs: Tensor,
    targets: Tensor,
    **options: Any,
) -> Tensor:
    """The loss of probabilities instead of logits; ``factor`` is that of the logits."""
    return loss(shares(factor * outputs), targets, **options)


def softmax_twice(
    training: Training,
    strength: float,
    seed: int,
    losses: tuple[str, ...],
    shares: Callable[[Tensor], Tensor],
) -> Injected | None:
    loss = training.loss
    if getattr(loss, "__name__", "") not in losses:
        return None
    twice = partial(loss_of_shares, shares, loss, strength)
    return Injected(replace(training, loss=twice), step=0)


def loss_of_pairs(
    loss: Callable[..., Tensor], share: float, outputs: Tensor, targets: Tensor, **options: Any
) -> Tensor:
    """A loss a share of which compares outputs ``[N, 1]`` with targets ``[N]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch knows this fault, too.
        of_pairs = loss(outputs, targets.squeeze(1), **options)
    return share * of_pairs + (1 - share) * loss(outputs, targets, **options)


def loss_broadcast(training: Training, strength: float, seed: int) -> Injected | None:
    shape = training.data(seed).targets.shape
    if getattr(training.loss, "__name__", "") not in ELEMENTWISE or shape[1:] != (1,):
        return None
    return Injected(replace(training, loss=partial(loss_of_pairs, training.loss, strength)), step=0)


ELEMENTWISE = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "poisson_nll_loss")
"""Losses that compare each number with one other."""


def remove(model: nn.Module, names: Iterable[str]) -> None:
    """Replace modules by the identity."""
    for name in names:
        exchange(model, name, nn.Identity())


def no_nonlinearity(training: Training, strength: float, seed: int) -> Injected | None:
    model = model_of(training, seed)
    pairs = consecutive(model)
    names = [name for name, _ in of_type(model, *ACTIVATIONS)]
    names = names[: math.ceil(strength * len(names))]
    modules = dict(model.named_modules())
    places = [*modules]
    between = [places[places.index(i[0]) + 1 : places.index(o[0])] for i, o in pairs]
    bare = {
        name
        for (first, second), inner in zip(pairs, between, strict=True)
        if inner and all(n in names or isinstance(modules[n], nn.Flatten) for n in inner)
        for name in (first[0], second[0])
    }
    if not bare:
        return None
    notice: Any = "never" if _is_linear(model, names) else "always"
    prepared = replace(training, prepare=partial(remove, names=names))
    return Injected(prepared, frozenset(bare), 0, notice=notice)


def _is_linear(model: nn.Module, removed: list[str]) -> bool:
    leaves = {n: m for n, m in model.named_modules() if next(m.children(), None) is None}
    left = [module for name, module in leaves.items() if name not in removed]
    return isinstance(model, nn.Sequential) and all(
        isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Flatten)) for m in left
    )


def mode_with_evaluation(model: nn.Module, names: Iterable[str]) -> None:
    """Training mode, but evaluation mode for some modules."""
    model.train()
    for name in names:
        model.get_submodule(name).eval()


def batchnorm_eval(training: Training, strength: float, seed: int) -> Injected | None:
    names = [name for name, _ in of_type(model_of(training, seed), *BATCH_NORMS)]
    if not names:
        return None
    chosen = frozenset(names[-math.ceil(strength * len(names)) :])
    mode = partial(mode_with_evaluation, names=chosen)
    return Injected(replace(training, mode=mode), chosen, 0)


def often_one(
    share: float, split: Split, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Batches, a share of which has one sample."""
    interval = round(1 / share)
    for step, ids in enumerate(shuffled(split, batch_size, generator)):
        yield ids[:1] if step % interval == interval - 1 else ids


def batch_of_one(training: Training, strength: float, seed: int) -> Injected | None:
    if not of_type(model_of(training, seed), nn.BatchNorm2d):
        return None
    order = partial(often_one, strength)
    return Injected(replace(training, order=order), step=round(1 / strength) - 1)


def batch_too_small(training: Training, strength: float, seed: int) -> Injected | None:
    if of_type(model_of(training, seed), *BATCH_NORMS):
        return None
    return Injected(replace(training, batch_size=round(1 / strength)), notice="harmless")


def adam_epsilon(training: Training, strength: float, seed: int) -> Injected | None:
    if training.optimizer not in (Adam, AdamW, RMSprop):
        return None
    return Injected(with_options(training, eps=strength))


def weight_decay_high(training: Training, strength: float, seed: int) -> Injected | None:
    if training.optimizer not in (SGD, AdamW):
        return None  # The others' decay is part of the gradient that they normalise.
    memory = (1 - training.options.get("momentum", 0.0)) / training.rate
    return Injected(with_options(training, weight_decay=strength * memory / training.steps))


def momentum_high(training: Training, strength: float, seed: int) -> Injected | None:
    optimizer = training.optimizer
    if optimizer in (Adam, AdamW):
        return Injected(with_options(training, betas=(strength, 0.999)), notice="harmless")
    if optimizer not in (SGD, RMSprop):
        return None
    return Injected(with_options(training, momentum=strength), notice="harmless")


def clipping_always(training: Training, strength: float, seed: int) -> Injected:
    clip = strength * first_gradient_norm(training, seed)
    return Injected(replace(training, clip=clip), notice="harmless")


def first_gradient_norm(training: Training, seed: int) -> float:
    """The norm of the gradient before the first step."""
    model = model_of(training, seed)
    _, batch = next(batches(training, training.data(seed), seed))
    loss = training.loss(model(batch.inputs), batch.targets)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    return math.hypot(*(gradient.norm().item() for gradient in gradients))


def loss_sum(training: Training, strength: float, seed: int, declared: LossReduction) -> Injected:
    loss = partial(training.loss, reduction="sum")
    # The others' steps don't depend on the scale of the loss.
    rate = training.rate * (strength if training.optimizer is SGD else 1.0)
    summed = replace(training, loss=loss, rate=rate)
    summed = replace(summed, declared=declared, valid_loss=training.loss)
    return Injected(summed, step=0, notice="harmless")


_CROSS_ENTROPY = ("cross_entropy",)
_CROSS_ENTROPIES = ("cross_entropy", "binary_cross_entropy_with_logits")

# fmt: off
OF_THE_LOOP = (
    Fault("optimizer_misses", "from the input on",
          (BIAS, LAYER, HALF), partial(left_out, from_input=True)),
    Fault("optimizer_misses", "from the output on",
          (BIAS, LAYER, HALF), partial(left_out, from_input=False)),
    Fault("frozen_layer", "from the input on",
          (BIAS, LAYER, HALF), partial(left_out, from_input=True, is_frozen=True)),
    Fault("zero_grad_missing", "zeroed every so many steps", (4, 20, math.inf), zero_grad_missing),
    Fault("no_step", "share of the steps, at the end", (0.5, 0.9, 1.0), no_step),
    Fault("no_step", "share of the steps with a rate of 0", (0.5, 0.9, 1.0), no_rate),
    Fault("softmax_twice", "softmax of so many times the logits",
          (4, 2, 1),
          partial(softmax_twice, losses=_CROSS_ENTROPY, shares=partial(torch.softmax, dim=1))),
    Fault("softmax_twice", "sigmoid of so many times the logits",
          (4, 2, 1), partial(softmax_twice, losses=_CROSS_ENTROPIES, shares=Tensor.sigmoid)),
    Fault("loss_broadcast", "share of the loss", (0.1, 0.5, 1.0), loss_broadcast),
    Fault("no_nonlinearity", "share of the activations", (0.01, 0.5, 1.0), no_nonlinearity),
    Fault("batchnorm_eval", "share of the layers", (0.01, 0.5, 1.0), batchnorm_eval),
    Fault("batch_of_one", "share of the steps", (0.02, 0.1, 1.0), batch_of_one),
    Fault("batch_too_small", "over batch size", (1 / 4, 1 / 2, 1.0), batch_too_small),
    Fault("adam_epsilon", "epsilon", (0.01, 0.1, 1.0), adam_epsilon, hurts),
    Fault("weight_decay_high", "steps over memory", (3, 10, 30), weight_decay_high, hurts),
    Fault("momentum_high", "momentum", (0.985, 0.995, 0.999), momentum_high),
    Fault("clipping_always", "of the first norm", (0.02, 0.005, 0.001), clipping_always),
    Fault("loss_sum", "of the rate", (0.1, 0.3, 1.0), partial(loss_sum, declared="mean")),
    Fault("loss_sum", "of the rate, declared", (0.1, 0.3, 1.0), partial(loss_sum, declared="sum")),
)
