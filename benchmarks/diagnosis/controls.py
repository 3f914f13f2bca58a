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

from benchmarks.diagnosis.draws import Split
from benchmarks.diagnosis.faults.fault import with_options
from benchmarks.diagnosis.faults.of_the_batch import has_real_inputs, mapped
from benchmarks.diagnosis.faults.of_the_loop import (
    first_gradient_norm,
    freeze,
)
from benchmarks.diagnosis.faults.structure import ACTIVATIONS, affine, exchange, of_type
from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.schedules import cosine, in_steps
from benchmarks.diagnosis.training import Batch, Training

LEARNT = 0.9
"""A run has learnt if its loss ends below this share of its start."""


@dataclass(frozen=True)
class Control:
    """A healthy way to train; ``apply(training, seed)`` is ``None`` where that isn't possible."""

    way: str
    apply: Callable[[Training, int], Training | None]


def has_learnt(outcome: Outcome) -> bool:
    """Whether the losses of training and validation have fallen; by no rule of the diagnosis."""
    has_fallen = outcome.end < LEARNT * outcome.start
    return has_fallen and outcome.valid_end < LEARNT * outcome.valid_start


def as_it_is(training: Training, seed: int) -> Training:
    return training


def with_rate(factor: float, training: Training, seed: int) -> Training:
    return replace(training, rate=factor * training.rate)


def with_batch_size(factor: float, training: Training, seed: int) -> Training:
    return replace(training, batch_size=int(factor * training.batch_size))


def longer(factor: float, training: Training, seed: int) -> Training:
    return replace(training, steps=int(factor * training.steps))


def warm_up(step: int, steps: int) -> float:
    """From nearly 0 to 1 in a tenth of the steps."""
    return min(1.0, (step + 1) / (0.1 * steps))


def scheduled(schedule: Callable[[int, int], float], training: Training, seed: int) -> Training:
    return replace(training, schedule=schedule)


def mild_decay(training: Training, seed: int) -> Training:
    return with_options(training, weight_decay=1e-4 if training.optimizer is SGD else 0.01)


def mild_clipping(training: Training, seed: int) -> Training:
    return replace(training, clip=first_gradient_norm(training, seed))


def smoothed(training: Training, seed: int) -> Training | None:
    if training.loss is not functional.cross_entropy:
        return None
    return replace(training, loss=partial(functional.cross_entropy, label_smoothing=0.1))


def to_unit_interval(inputs: Tensor, all_inputs: Tensor) -> Tensor:
    """Inputs in 0 to 1, as images often are."""
    low, high = all_inputs.min(), all_inputs.max()
    return ((inputs - low) / (high - low)).clamp(0, 1)


def in_unit_interval(training: Training, seed: int) -> Training | None:
    # Tables have columns that this would make nearly constant, and targets of their own inputs.
    if not has_real_inputs(training.data(seed)) or training.data(seed).inputs.ndim < 4:
        return None
    data = partial(mapped, training.data, to_unit_interval)
    return replace(training, data=data, steps=2 * training.steps)


def accumulated(training: Training, seed: int) -> Training:
    return replace(training, micro_batches=2)


def accumulated_by_hand(training: Training, seed: int) -> Training:
    """Two contexts for each optimizer step, which the cockpit takes for steps of their own."""
    even, odd = partial(_is_multiple, 0), partial(_is_multiple, 1)
    return replace(training, zeroed=even, updated=odd)


def _is_multiple(remainder: int, step: int) -> bool:
    return step % 2 == remainder


class WithDropout(nn.Sequential):
    """An activation and dropout behind it."""


def drop_out(model: nn.Module) -> None:
    """Put dropout behind each activation but the last."""
    for name, activation in of_type(model, *ACTIVATIONS)[:-1]:
        exchange(model, name, WithDropout(activation, nn.Dropout(0.1)))


def with_dropout(training: Training, seed: int) -> Training | None:
    model = training.build()
    return replace(training, prepare=drop_out) if of_type(model, *ACTIVATIONS)[:-1] else None


def in_bfloat16(training: Training, seed: int) -> Training | None:
    if of_type(training.build(), nn.RNNBase):
        return None
    return replace(training, precision=torch.bfloat16)


def with_features_frozen(training: Training, seed: int) -> Training | None:
    """The first layer keeps its first weights, as those of a pretrained network would."""
    layers = affine(training.build())
    if len(layers) < 3:
        return None
    names = [f"{layers[0][0]}.{key}" for key, _ in layers[0][1].named_parameters()]
    return replace(training, prepare=partial(freeze, names=names))


def without_decay_of_biases(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of parameters, as many recipes have them."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def in_two_groups(training: Training, seed: int) -> Training:
    return replace(mild_decay(training, seed), trained=without_decay_of_biases)


def with_replacement(split: Split, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Each sample is drawn from all of them."""
    while True:
        yield torch.randint(len(split.inputs), (batch_size,), generator=generator)


def drawn(training: Training, seed: int) -> Training:
    return replace(training, order=with_replacement)


def jittered(step: int, batch: Batch) -> Batch:
    """Some noise is added to inputs."""
    noise = torch.randn(batch.inputs.shape, generator=torch.Generator().manual_seed(step))
    return replace(batch, inputs=batch.inputs + 0.1 * noise)


def augmented(training: Training, seed: int) -> Training | None:
    if not has_real_inputs(training.data(seed)):
        return None
    return replace(training, change=jittered)


def optimised(
    optimizer: type[Optimizer],
    rate: float,
    options: dict[str, float],
    training: Training,
    seed: int,
) -> Training | None:
    if training.optimizer is optimizer and training.options.keys() == options.keys():
        return None
    return replace(training, optimizer=optimizer, rate=rate, options=options)


CONTROLS = (
    Control("as it is", as_it_is),
    *(Control(f"rate times {x}", partial(with_rate, x)) for x in (0.4, 0.7, 1.4, 2.0)),
    *(Control(f"batch size times {x}", partial(with_batch_size, x)) for x in (0.5, 2, 3)),
    Control("1.6 times the steps", partial(longer, 1.6)),
    Control("cosine", partial(scheduled, cosine)),
    Control("warm-up", partial(scheduled, warm_up)),
    Control("stairs", partial(scheduled, in_steps)),
    Control("mild decay", mild_decay),
    Control("mild clipping", mild_clipping),
    Control("label smoothing", smoothed),
    Control("inputs in 0 to 1", in_unit_interval),
    Control("accumulation", accumulated),
    Control("accumulation without a word", accumulated_by_hand),
    Control("dropout", with_dropout),
    Control("bfloat16", in_bfloat16),
    Control("first layer frozen", with_features_frozen),
    Control("two groups", in_two_groups),
    Control("with replacement", drawn),
    Control("augmentation", augmented),
    Control("SGD", partial(optimised, SGD, 0.1, {})),
    Control("momentum", partial(optimised, SGD, 0.02, {"momentum": 0.9})),
    Control("Adam", partial(optimised, Adam, 3e-3, {})),
    Control("AdamW", partial(optimised, AdamW, 3e-3, {"weight_decay": 0.01})),
    Control("RMSprop", partial(optimised, RMSprop, 1e-3, {})),
    Control("Adagrad", partial(optimised, Adagrad, 0.03, {})),
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
