"""Healthy ways to train, in which any alarm is false."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from benchmarks.diagnosis.faults.of_the_batch import has_real_inputs, mapped
from benchmarks.diagnosis.faults.of_the_loop import (
    first_gradient_norm,
    freeze,
)
from benchmarks.diagnosis.faults.structure import ACTIVATIONS, affine, exchange, of_type
from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.training import Batch, Split, Training, cosine, in_steps

LEARNT = 0.9
"""A run has learnt if its loss ends below this share of its start."""


@dataclass(frozen=True)
class Control:
    """A healthy way to train: other entries of a training, where it ``fits`` that and a seed."""

    way: str
    entries: Callable[[Training, int], dict[str, Any]]
    fits: Callable[[Training, int], object] = lambda training, seed: True

    def apply(self, training: Training, seed: int) -> Training | None:
        """``None`` where it isn't possible."""
        fits = self.fits(training, seed)
        return replace(training, **self.entries(training, seed)) if fits else None


def has_learnt(outcome: Outcome) -> bool:
    """Whether the losses of training and validation have fallen; by no rule of the diagnosis."""
    has_fallen = outcome.end < LEARNT * outcome.start
    return has_fallen and outcome.valid_end < LEARNT * outcome.valid_start


def times(entry: str, factor: float) -> Control:
    """A number of the training times a factor."""

    def entries(training: Training, seed: int) -> dict[str, Any]:
        number = getattr(training, entry)
        return {entry: type(number)(factor * number)}

    return Control(f"{entry.replace('_', ' ')} times {factor}", entries)


def fixed(way: str, **entries: Any) -> Control:
    """Entries that are the same for each training."""
    return Control(way, lambda training, seed: entries)


def warm_up(step: int, steps: int) -> float:
    """From nearly 0 to 1 in a tenth of the steps."""
    return min(1.0, (step + 1) / (0.1 * steps))


def mild_decay(training: Training, seed: int) -> dict[str, Any]:
    decay = 1e-4 if training.optimizer is SGD else 0.01
    return {"options": {**training.options, "weight_decay": decay}}


def to_unit_interval(inputs: Tensor, all_inputs: Tensor) -> Tensor:
    """Inputs in 0 to 1, as images often are."""
    low, high = all_inputs.min(), all_inputs.max()
    return ((inputs - low) / (high - low)).clamp(0, 1)


def in_unit_interval(training: Training, seed: int) -> dict[str, Any]:
    data = partial(mapped, training.data, to_unit_interval)
    return {"data": data, "steps": 2 * training.steps}


def has_images(training: Training, seed: int) -> bool:
    # Tables have columns that become nearly constant in 0 to 1, and targets of their own inputs.
    return has_numbers(training, seed) and training.data(seed).inputs.ndim > 3


def has_numbers(training: Training, seed: int) -> bool:
    return has_real_inputs(training.data(seed))


class WithDropout(nn.Sequential):
    """An activation and dropout behind it."""


def drop_out(model: nn.Module) -> None:
    """Put dropout behind each activation but the last."""
    for name, activation in of_type(model, *ACTIVATIONS)[:-1]:
        exchange(model, name, WithDropout(activation, nn.Dropout(0.1)))


def with_features_frozen(training: Training, seed: int) -> dict[str, Any]:
    """The first layer keeps its first weights, as those of a pretrained network would."""
    name, layer = affine(training.build())[0]
    names = [f"{name}.{key}" for key, _ in layer.named_parameters()]
    return {"prepare": partial(freeze, names=names)}


def without_decay_of_biases(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, as many recipes have them."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def with_replacement(split: Split, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Each sample is drawn from all of them."""
    while True:
        yield torch.randint(len(split.inputs), (batch_size,), generator=generator)


def jittered(step: int, batch: Batch) -> Batch:
    """Some noise is added to inputs."""
    noise = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(step))
    return replace(batch, inputs=batch.inputs + 0.1 * noise)


def optimised(
    way: str, optimizer: type[Optimizer], rate: float, options: dict[str, float] | None = None
) -> Control:
    """Another optimizer, or one with options of other names."""
    given = options or {}
    entries = {"optimizer": optimizer, "rate": rate, "options": given}

    def fits(training: Training, seed: int) -> bool:
        return training.optimizer is not optimizer or training.options.keys() != given.keys()

    return Control(way, lambda training, seed: entries, fits)


CONTROLS = (
    fixed("as it is"),
    *(times("rate", x) for x in (0.4, 0.7, 1.4, 2.0)),
    *(times("batch_size", x) for x in (0.5, 2, 3)),
    replace(times("steps", 1.6), way="1.6 times the steps"),
    fixed("cosine", schedule=cosine),
    fixed("warm-up", schedule=warm_up),
    fixed("stairs", schedule=in_steps),
    Control("mild decay", mild_decay),
    Control("mild clipping", lambda each, seed: {"clip": first_gradient_norm(each, seed)}),
    Control(
        "label smoothing",
        lambda each, seed: {"loss": partial(functional.cross_entropy, label_smoothing=0.1)},
        lambda each, seed: each.loss is functional.cross_entropy,
    ),
    Control("inputs in 0 to 1", in_unit_interval, has_images),
    fixed("accumulation", micro_batches=2),
    # Two contexts for each optimizer step, which the cockpit takes for steps of their own.
    fixed(
        "accumulation without a word",
        zeroed=lambda step: step % 2 == 0,
        updated=lambda step: step % 2 == 1,
    ),
    replace(
        fixed("dropout", prepare=drop_out),
        fits=lambda each, seed: of_type(each.build(), *ACTIVATIONS)[:-1],
    ),
    replace(
        fixed("bfloat16", precision=torch.bfloat16),
        fits=lambda each, seed: not of_type(each.build(), nn.RNNBase),
    ),
    Control(
        "first layer frozen",
        with_features_frozen,
        lambda each, seed: len(affine(each.build())) > 2,
    ),
    Control(
        "two groups",
        lambda each, seed: {**mild_decay(each, seed), "trained": without_decay_of_biases},
    ),
    fixed("with replacement", order=with_replacement),
    replace(fixed("augmentation", change=jittered), fits=has_numbers),
    optimised("SGD", SGD, 0.1),
    optimised("momentum", SGD, 0.02, {"momentum": 0.9}),
    optimised("Adam", Adam, 3e-3),
    optimised("AdamW", AdamW, 3e-3, {"weight_decay": 0.01}),
    optimised("RMSprop", RMSprop, 1e-3),
    optimised("Adagrad", Adagrad, 0.03),
)


def pairs(problems: Sequence[Training], count: int) -> list[tuple[str, str]]:
    """So many ways and problems, of which each comes about as often as any other."""
    ways = [control.way for control in CONTROLS]
    everything = [
        (ways[(number + turn) % len(ways)], problems[number % len(problems)].name)
        for turn in range(len(ways))
        for number in range(len(problems))
    ]
    # A step that shares no factor with their number takes them evenly from all turns.
    stride = next(
        s for s in range(len(everything) // 3, 0, -1) if math.gcd(s, len(everything)) == 1
    )
    found = [everything[stride * number % len(everything)] for number in range(len(everything))]
    return found[:count]
