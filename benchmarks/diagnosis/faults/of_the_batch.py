"""Faults of the data and of the batches that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor

from benchmarks.diagnosis.faults.fault import Fault, Injected, Notice, jumps_at
from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.training import Batch, Order, Split, Training, batches, shuffled

LATE = 0.6
"""When something happens once, it is after this share of the steps."""


def has_real_inputs(split: Split) -> bool:
    """Whether inputs are numbers that can be scaled, not words."""
    return split.inputs.is_floating_point()


def labels_of(split: Split) -> Tensor | None:
    """One label for each sample that is trained on, or ``None`` if there are no labels."""
    targets = split.targets
    if targets.ndim == 1 and not targets.is_floating_point():
        return targets
    is_binary = targets.is_floating_point() and bool(((targets == 0) | (targets == 1)).all())
    return targets[:, 0].long() if is_binary and targets.shape[1:] == (1,) else None


def late_step(training: Training) -> int:
    """The step at which something happens once."""
    return int(LATE * training.steps)


def batch_at(training: Training, step: int, seed: int) -> Batch:
    """The batch of a step."""
    found = islice(batches(training, training.data(seed), seed), step, None)
    return next(found)[1]


# What changes one batch.


def once(at: int, entry: str, change: Callable[[Tensor], object], step: int, batch: Batch) -> Batch:
    """The inputs or targets of one step are changed in place."""
    if step != at:
        return batch
    changed = getattr(batch, entry).clone()
    change(changed)
    return replace(batch, **{entry: changed})


def in_one_batch(
    training: Training,
    strength: float,
    seed: int,
    entry: str,
    change: Callable[[Tensor, float, Split], object],
    rows: Callable[[float, int], int] = lambda strength, size: 0,
    fits: Callable[[Split], object] = has_real_inputs,
    notice: Notice = "never",
) -> Injected | None:
    """A late batch is changed by a function of its inputs or targets, which are cloned.

    ``rows`` says how many of the batch's samples have the fault, of so many.
    """
    split = training.data(seed)
    if not fits(split):
        return None
    step = late_step(training)
    ids = batch_at(training, step, seed).ids
    changed = partial(once, step, entry, lambda values: change(values, strength, split))
    samples = frozenset(ids[: rows(strength, len(ids))].tolist())
    return Injected(replace(training, change=changed), step=step, samples=samples, notice=notice)


def one(strength: float, size: int) -> int:
    return 1


def some(share: float, size: int) -> int:
    return max(1, math.ceil(share * size))


def set_to(number: float, inputs: Tensor, share: float, split: Split) -> None:
    """A number in a share of the rows, or in one element if that is zero."""
    if share:
        inputs[: math.ceil(share * len(inputs))] = number
    else:
        inputs[0].view(-1)[0] = number


def scale_rows(count: int | None, inputs: Tensor, factor: float, split: Split) -> None:
    """The first rows times a factor."""
    inputs[:count] *= -factor


def shift_target(targets: Tensor, deviations: float, split: Split) -> None:
    """The first target, plus so many standard deviations."""
    targets[0] += deviations * split.targets.std().item()


def to_next_label(targets: Tensor, share: float, split: Split) -> None:
    """A share of the labels are replaced by the next larger label of the batch."""
    kinds, chosen = targets.unique(), slice(math.ceil(share * len(targets)))
    places = torch.searchsorted(kinds, targets[chosen].contiguous())
    targets[chosen] = kinds[(places + 1) % len(kinds)]


def are_numbers(split: Split) -> bool:
    """Whether targets are numbers that aren't labels."""
    return split.targets.is_floating_point() and labels_of(split) is None


def scaled_sample(data: Callable[[int], Split], sample: int, factor: float, seed: int) -> Split:
    """The data with one sample's input times a factor."""
    split = data(seed)
    inputs = split.inputs.clone()
    inputs[sample] *= factor
    return replace(split, inputs=inputs)


def outlier_in_data(training: Training, strength: float, seed: int) -> Injected | None:
    if not has_real_inputs(training.data(seed)):
        return None
    sample = int(batch_at(training, late_step(training), seed).ids[0])
    every_batch = batches(training, training.data(seed), seed)
    first = next(step for step, batch in every_batch if sample in batch.ids)
    data = partial(scaled_sample, training.data, sample, -strength)
    return Injected(
        replace(training, data=data),
        step=first,
        samples=frozenset({sample}),
        notice="harmless",
    )


def jumps(faulty: Outcome, healthy: Outcome) -> bool:
    """The loss jumps at the first step that differs from the healthy run's."""
    pairs = enumerate(zip(faulty.losses, healthy.losses, strict=True))
    return jumps_at(next((n for n, (a, b) in pairs if a != b), 0), faulty)


# What changes all of the data.


def mapped(
    data: Callable[[int], Split], function: Callable[[Tensor, Tensor], Tensor], seed: int
) -> Split:
    """The data with inputs mapped by a function of these and of those that are trained on."""
    split = data(seed)
    inputs, valid = (function(x, split.inputs) for x in (split.inputs, split.valid_inputs))
    return replace(split, inputs=inputs, valid_inputs=valid)


def flattened(strength: float, inputs: Tensor, all_inputs: Tensor) -> Tensor:
    """What is left of the differences between samples is one over the strength."""
    mean = all_inputs.mean(0)
    return mean + (inputs - mean) / strength


def scaled(factor: float, inputs: Tensor, all_inputs: Tensor) -> Tensor:
    """Inputs times a factor."""
    return factor * inputs


def shifted(offset: float, inputs: Tensor, all_inputs: Tensor) -> Tensor:
    """Inputs with an offset in standard deviations of all of them."""
    return inputs + offset * all_inputs.std()


def mapped_inputs(
    training: Training,
    strength: float,
    seed: int,
    function: Callable[[float, Tensor, Tensor], Tensor],
    can_be_harmless: bool = False,
) -> Injected | None:
    if not has_real_inputs(training.data(seed)):
        return None
    data = partial(mapped, training.data, partial(function, strength))
    notice: Notice = "harmless" if can_be_harmless else "never"
    return Injected(replace(training, data=data), step=0, notice=notice)


# What changes the order.


def repeated(
    interval: float, split: Split, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Each batch is used for so many steps, which may be infinitely many."""
    for ids in shuffled(split, batch_size, generator):
        while not math.isfinite(interval):
            yield ids
        yield from [ids] * int(interval)


def duplicated(
    share: float, split: Split, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """A share of each batch's samples, repeated until the batch is full."""
    for ids in shuffled(split, batch_size, generator):
        yield torch.stack([*islice(cycle(ids[: math.ceil(share * batch_size)]), batch_size)])


def reordered(
    training: Training, strength: float, seed: int, order: Callable[..., Iterator[Tensor]]
) -> Injected:
    """Another order, with a strength."""
    return Injected(replace(training, order=partial(order, strength)))


def sorted_by_label(
    noise: float, split: Split, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Always in the order of the labels; noise is in numbers of classes."""
    labels = labels_of(split)
    assert labels is not None
    drawn = torch.randn(len(labels), generator=generator)
    ids = (labels + noise * (labels.max() + 1) * drawn).argsort(stable=True)
    return cycle(ids[: len(ids) - len(ids) % batch_size].split(batch_size))


def imbalanced(
    ratio: float, split: Split, batch_size: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Samples of the first class are drawn so many times as often as those of another one."""
    labels = labels_of(split)
    assert labels is not None
    weights = 1 / labels.bincount()[labels]
    weights[labels == labels.min()] *= ratio
    while True:
        yield torch.multinomial(weights, batch_size, replacement=True, generator=generator)


def reordered_by_label(
    training: Training, strength: float, seed: int, order: Callable[..., Iterator[Tensor]]
) -> Injected | None:
    """Another order, which needs labels."""
    if labels_of(training.data(seed)) is None:
        return None
    by_label: Order = partial(order, strength)
    return Injected(replace(training, order=by_label))


# fmt: off
OF_THE_BATCH = (
    *(Fault("nonfinite_input", f"{name} in a share of one batch", (0.0, 0.01, 1.0), partial(
        in_one_batch, entry="inputs", change=partial(set_to, number), rows=some))
      for name, number in (("NaN", math.nan), ("infinity", math.inf))),
    Fault("input_constant", "1 over the spread that is left",
          (1e2, 1e4, math.inf), partial(mapped_inputs, function=flattened)),
    Fault("input_scale", "factor",
          (10, 50, 255), partial(mapped_inputs, function=scaled, can_be_harmless=True)),
    Fault("input_offset", "standard deviations",
          (4, 10, 30), partial(mapped_inputs, function=shifted, can_be_harmless=True)),
    Fault("batch_repeated", "steps with one batch",
          (10, 30, math.inf), partial(reordered, order=repeated)),
    Fault("samples_duplicated", "share that is distinct",
          (0.4, 0.2, 0.07), partial(reordered, order=duplicated)),
    Fault("class_imbalance", "times as frequent",
          (10, 20, 50), partial(reordered_by_label, order=imbalanced)),
    Fault("data_order", "sorted but for a noise",
          (0.15, 0.05, 0.0), partial(reordered_by_label, order=sorted_by_label)),
    Fault("outlier_sample", "one row of one batch times", (10, 30, 100), partial(
        in_one_batch, entry="inputs", change=partial(scale_rows, 1), rows=one, notice="harmless")),
    Fault("outlier_sample", "one row of the data times", (10, 30, 100), outlier_in_data),
    Fault("outlier_sample", "one target of one batch plus", (5, 20, 100), partial(
        in_one_batch, entry="targets", change=shift_target, rows=one, fits=are_numbers), jumps),
    Fault("corrupt_batch", "inputs times", (5, 20, 100), partial(
        in_one_batch, entry="inputs", change=partial(scale_rows, None))),
    Fault("corrupt_batch", "share of wrong labels", (0.5, 0.75, 1.0), partial(
        in_one_batch, entry="targets", change=to_next_label,
        fits=lambda split: labels_of(split) is not None), jumps),
)
