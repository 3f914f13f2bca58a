"""What rules read of a run: its facts and its series, and what follows from them directly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gradlens.diagnosis.numbers import (
    finite,
    first,
    largest,
    median,
    medians,
    ratio,
    since,
    smallest,
)
from gradlens.history.history import History
from gradlens.history.lines import Floats, Line, head_lines, line, lines
from gradlens.history.records import OF_SAMPLES
from gradlens.history.series import Series
from gradlens.history.setup import Layer, Setup
from gradlens.history.spikes import Suspect

Steps = NDArray[np.int64]


@dataclass(frozen=True)
class ByName:
    """Floats of layers or parameters at some steps: ``values`` ``[K]`` by name."""

    steps: Steps
    values: Mapping[str, Floats]

    def matrix(self, names: tuple[str, ...]) -> Floats:
        """``[len(names), K]``, NaN where there is no number."""
        nothing = np.full(len(self.steps), np.nan)
        rows = [self.values.get(name, nothing) for name in names]
        return np.array(rows, dtype=np.float64).reshape(len(names), len(self.steps))

    def __bool__(self) -> bool:
        return bool(self.values) and bool(len(self.steps))


SERIES = {"gradient_rms": "GradNorm", "weight_rms": "ParameterNorm", "update_rms": "UpdateSize"}
"""Quantities whose norms stand in for a column of the facts where there are no facts."""

VALIDATION = ("valid_loss", "val_loss", "validation_loss", "eval_loss")
"""Names under which training loops log a validation loss."""

LOOKUPS = frozenset({"Embedding", "EmbeddingBag"})
"""Layers with a table, of which a batch uses some rows only."""

NORMALISATIONS = frozenset({"_NormBase", "LayerNorm", "GroupNorm", "RMSNorm"})

LATE = 0.75
"""The last quarter of a run is late."""

SUMMED = 2.0
"""Times log C: a loss that never comes below is taken for a sum over several labels."""

FEW_SAMPLES, ENOUGH_SAMPLES, FEWEST_LEVELS = 32, 64, 4
"""Batches of fewer samples are averaged until there are so many as the second, whose mean squared
error has a standard deviation of a fifth; but a run has so many separate means at least."""

TERMS = 2.0
"""The loss over the mean of single losses, or its inverse: more than weights of classes, smoothed
labels and small penalties make of it at the start."""

SMALL_UPDATE, BEYOND_REACH = 0.1, 10.0
"""‖update‖/‖θ‖ of updates between which the gradient doesn't change its size, and how many times
further than the weights can have raised it a loss must have risen: measured at most 2 in runs that
a rate makes diverge, and 300 and more where an adversary does."""

FIRST_STEPS = 5
"""A median over so many steps doesn't depend on one or two of them."""


@dataclass(frozen=True)
class Evidence:
    """A run as rules read it: what wasn't recorded is NaN or empty."""

    history: History
    _columns: dict[str, Floats] = field(default_factory=dict, repr=False)
    _kinds: dict[str, ByName] = field(default_factory=dict, repr=False)

    # What the run consists of ------------------------------------------------------------------

    @cached_property
    def setup(self) -> Setup:
        """The latest one; one without anything if none was recorded."""
        return self.history.latest("setup") or Setup()

    def since(self, holds: Callable[[Setup], bool]) -> int | None:
        """The step from which on something has held of all setups; ``None`` if it doesn't now."""
        found = None
        for step, setup in sorted(self.history.setups.items()):
            if not holds(setup):
                found = None
            elif found is None:
                found = step
        return found

    def option(self, name: str) -> float:
        """The largest value of an option in the optimizer's groups; NaN if none has it."""
        return largest([group.options.get(name, math.nan) for group in self.setup.groups])

    @property
    def is_adaptive(self) -> bool:
        """Whether the optimizer's updates hardly depend on the scale of the gradients."""
        by_options = any({"eps", "beta2"} & group.options.keys() for group in self.setup.groups)
        return by_options or self.setup.optimizer in ("Adafactor", "Rprop", "Lion")

    @property
    def is_normalised(self) -> bool:
        """Whether a layer is a normalisation."""
        return any(NORMALISATIONS & {*layer.classes} for layer in self.setup.layers.values())

    def layer_of(self, parameter: str) -> Layer | None:
        """The layer that a parameter belongs to; ``None`` if it isn't known."""
        return self.setup.layers.get(parameter.rpartition(".")[0])

    @cached_property
    def weights(self) -> tuple[str, ...]:
        """Parameters with two axes or more, from input to output, that are no embeddings."""
        shapes = self.history.parameters
        classes = {n: {*layer.classes} for n, layer in self.setup.layers.items()}
        return tuple(
            name
            for name in dict.fromkeys([*self.setup.order, *shapes])
            if len(shapes.get(name, ())) > 1
            if not LOOKUPS & classes.get(name.rpartition(".")[0], set())
        )

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The weights that the optimizer has."""
        left_out = {*self.setup.missed, *self.setup.frozen}
        return tuple(name for name in self.weights if name not in left_out)

    # Facts of steps ----------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Steps:
        """Those that have facts ``[K]``."""
        return self.history.facts["steps"].steps.astype(np.int64)

    def column(self, name: str) -> Floats:
        """A number of each of these steps ``[K]``."""
        if name not in self._columns:
            self._columns[name] = self.history.facts["steps"].column(name).numbers()
        return self._columns[name]

    def of_data(self, name: str) -> Floats:
        """A size of what the first layers get, or of the inputs, where that isn't known.

        Models may scale their inputs themselves. The former is recorded at some steps.
        """
        found = self.column(f"first_{name}")
        return found if np.isfinite(found).any() else self.column(f"input_{name}")

    def typical(self, name: str) -> float:
        """The median of a column."""
        return median(self.column(name))

    @cached_property
    def rows_are_samples(self) -> bool:
        """Whether nothing says that the rows that the model was called with are something else.

        They may be steps where layers count samples along the second axis, and N isn't as large.
        """
        known = {each.samples for each in self.history.coverages.values()}
        return not self.setup.positions_first or self.typical("samples") in known

    def step(self, holds: NDArray[np.bool_]) -> int:
        """The first one with facts at which something holds ``[K]``; 0 if there is none."""
        return int(self.steps[holds][:1].sum())

    @cached_property
    def start_step(self) -> int:
        """The first one with a loss; 0 if there is none."""
        return int(self.loss.steps[:1].sum())

    @cached_property
    def length(self) -> int:
        """The number of steps from the first to the last that was recorded."""
        steps = self._recorded
        return int(steps[-1] - steps[0]) + 1 if len(steps) else 0

    @property
    def seen(self) -> int:
        """How many of these were recorded: under a budget, few of them are."""
        return len(self._recorded)

    @property
    def _recorded(self) -> Floats | Steps:
        return self.loss.steps if self.loss.steps.size else self.steps

    # The loss ----------------------------------------------------------------------------------

    @cached_property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over the samples."""
        return is_summed(self.setup)

    @cached_property
    def loss(self) -> Line:
        """The loss of a sample, on average over the batch, at each step."""
        values = self.column("loss")
        if not np.isfinite(values).any():
            return line(self.records("Loss"))
        if self.is_sum:
            counts = self.column("labels")
            counts = np.where(np.isfinite(counts), counts, self.column("samples"))
            values = np.where(np.isfinite(values), ratio(values, counts), values)
        return Line(self.steps.astype(np.float64), values)

    def at_loss(self, name: str) -> Floats:
        """A number of each step of the loss; NaN where there are no facts of these."""
        found, count = self.column(name), len(self.loss.values)
        return found if len(found) == count else np.full(count, math.nan)

    @cached_property
    def is_of_samples(self) -> bool:
        """Whether the loss may be the mean of the single losses.

        It is about their mean at first, whatever weights and smoothing change later, unless there
        are other terms, or factors. Their median is at most twice their mean (Markov's inequality,
        since they aren't negative), and their largest is no less than it. The latter is asked of
        the first steps alone: with smoothed labels, the loss stays above single losses, which are
        recorded without smoothing.
        """
        over_mean, over_median, over_largest = (
            finite(ratio(self.loss.values, self.at_loss(name)))
            for name in ("loss_mean", "loss_median", "loss_max")
        )
        if len(over_mean) and not 1 / TERMS < median(over_mean[:FIRST_STEPS]) < TERMS:
            return False
        return not (median(over_median) < 1 / 2 or median(over_largest[:FIRST_STEPS]) > 1)

    @cached_property
    def labels(self) -> Floats:
        """How often each class was a label so far, in descending order."""
        counts = [largest(each) for each in self.by_name("labels").values.values()]
        return np.sort(finite(counts))[::-1]

    @cached_property
    def label_entropy(self) -> float:
        """That of all labels so far, in nats; NaN if they aren't known."""
        if not self.labels.size:
            return math.nan
        shares = self.labels / self.labels.sum()
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum())

    @cached_property
    def chance(self) -> float:
        """The loss without any information about the sample; NaN if it isn't known.

        It is that of samples alone, but isn't known where the loss is negative, or no mean of the
        single losses, as where these are weighted by rewards, or where they aren't known and it
        stays far above, as a sum over the pixels of an image does.
        """
        if not self.is_of_samples or self.is_signed:
            return math.nan
        has_single_losses = bool(np.isfinite(self.column("loss_median")).any())
        uniform = math.log(max(self.typical("classes"), 1)) or math.inf
        if not has_single_losses and smallest(self.loss.values) > SUMMED * uniform:
            return math.nan
        return self.chance_of_samples

    @cached_property
    def chance_of_samples(self) -> float:
        """The mean of single losses without any information about the sample, or NaN.

        It is the entropy of the labels, but no less than half of log C, so that it isn't zero where
        one class alone was seen; and the variance of the targets, of squared errors.
        """
        if self.setup.loss.startswith("Mse"):
            variance = self.typical("target_variance")
            return variance if variance > 0 else math.nan
        classes = self.typical("classes")
        if not classes > 1:
            return math.nan
        uniform, entropy = math.log(classes), self.label_entropy
        return uniform if math.isnan(entropy) else max(entropy, uniform / 2)

    @cached_property
    def target_square(self) -> float:
        """The mean square of the targets, which outputs of zero have as their squared error."""
        return self.typical("target_variance") + self.typical("target_mean") ** 2

    @cached_property
    def start(self) -> float:
        """The loss that rises are compared with: the first one, or chance if that is more.

        NaN if neither is known, or is positive; or if others than the weights move it, such as an
        adversary. A loss with a sign has no size that others could be compared with.
        """
        if self.is_moved_by_others or self.is_signed:
            return math.nan
        known = [each for each in (self._early(FIRST_STEPS), self.chance) if each > 0]
        return max(known) if known else math.nan

    @cached_property
    def is_signed(self) -> bool:
        """Whether the loss is negative at times, or its samples have weights that are.

        As rewards over their mean are, whose loss is small at first since its terms cancel out.
        """
        return smallest(self.loss.values) < 0 or largest(self.column("negative_weights")) > 0

    def _early(self, steps: int) -> float:
        """The first loss; of batches too small for a mean, not less than the median of a few."""
        few = median(self.loss.values[: min(self.width, steps)])
        return float(np.fmax(self.first_loss, few)) if self.width > 1 else self.first_loss

    @cached_property
    def first_loss(self) -> float:
        """NaN if it isn't finite."""
        return float(self.loss.values[0]) if self.loss.finite[:1].any() else math.nan

    @cached_property
    def late_loss(self) -> float:
        """The median over the last quarter."""
        return median(self.loss.values[self.is_late(self.loss.steps)])

    @cached_property
    def present_loss(self) -> float:
        """The median since the validation before the last one; of the last ten steps without any.

        The validation loss is compared with it.
        """
        validated = self.valid_loss.steps[self.valid_loss.finite][-2:]
        recent = self.loss.values[self.loss.steps >= validated[0]] if validated.size else []
        found = median(recent)
        return found if math.isfinite(found) else median(finite(self.loss.values)[-10:])

    @cached_property
    def over_chance(self) -> Floats:
        """The loss over that by chance at each step; that of samples alone, if it is less.

        A penalty that grows while samples are learnt, as on the way from earlier weights, may keep
        the whole loss above chance.
        """
        losses, of_samples = self.loss.values, self.at_loss("loss_mean")
        return np.where(self.loss.finite, np.fmin(losses, of_samples), losses) / self.chance

    @cached_property
    def progress(self) -> float:
        """The late loss over that without any learning: below 1 if something was learnt.

        That is chance, or the first loss if chance isn't known; single batches vary.
        """
        if self.is_moved_by_others:
            return math.nan
        if math.isfinite(self.chance):
            return median(self.over_chance[self.is_late(self.loss.steps)])
        reference = self._early(self.width)
        return self.late_loss / reference if reference > 0 else math.nan

    @cached_property
    def ends_badly(self) -> bool:
        """Whether the loss ends as a number that isn't finite."""
        return bool(self.loss.values.size) and not bool(self.loss.finite[-1])

    @cached_property
    def has_adversary(self) -> bool:
        """Whether others train weights behind the loss, as a discriminator's: they change."""
        count, new, same = self.by_name("strangers").matrix(("all", "new", "same"))
        return bool((count > np.nan_to_num(new) + np.nan_to_num(same)).any())

    @cached_property
    def is_moved_by_others(self) -> bool:
        """Whether the loss rises by others than the weights, as an adversary's or a detached term.

        What an adversary is to take for real is one class; its parameters may need no gradient.
        """
        is_generated = self.setup.loss.startswith("BinaryCrossEntropy") and len(self.labels) == 1
        return self.has_adversary or is_generated or self.is_out_of_reach

    @cached_property
    def is_out_of_reach(self) -> bool:
        """Whether the loss rises further than the way of the weights times the steepest gradient.

        Updates must be so small that gradients aren't steeper in between.
        """
        if not (self.typical("updates") >= 1 and len(self.loss.values)):
            return False
        shapes, updates = self.history.parameters, self.by_name("update_rms")
        squares = [np.square(v) * math.prod(shapes.get(n, ())) for n, v in updates.values.items()]
        way = largest(np.sqrt(np.sum(squares, axis=0))) * self.length
        rise = largest(self.level) - self.first_loss
        reach = BEYOND_REACH * way * largest(self.column("grad_norm"))
        is_small = largest(self.update_ratio.values) < SMALL_UPDATE
        return is_small and rise > max(reach, abs(self.first_loss))  # batches differ by less

    def is_late(self, steps: NDArray[np.generic]) -> NDArray[np.bool_]:
        """Which steps are in the last quarter of those."""
        if not len(steps):
            return np.zeros(0, dtype=np.bool_)
        found: NDArray[np.bool_] = steps >= steps[0] + LATE * (steps[-1] - steps[0])
        return found

    @cached_property
    def batch_size(self) -> float:
        """How many samples a batch has; of a bag of rows with one label, or a few, its labels."""
        return smallest([self.typical("samples"), self.typical("labels") or math.nan])

    @cached_property
    def width(self) -> int:
        """How many steps have enough samples for a mean loss."""
        samples = self.batch_size
        width = math.ceil(ENOUGH_SAMPLES / samples) if 1 <= samples < FEW_SAMPLES else 1
        return max(1, min(width, len(self.loss.values) // FEWEST_LEVELS))

    @cached_property
    def level(self) -> Floats:
        """The loss, averaged over so many of the latest steps.

        That of a few samples varies by half. Where a loss isn't finite, it isn't either. A single
        loss is in as many neighbouring means, so that rises must last longer.
        """
        known, width = self.loss.finite, self.width
        sums, counts = (
            np.convolve(np.append(each, 0.0), np.ones(width))[: len(known)]  # none may be empty
            for each in (np.where(known, self.loss.values, 0.0), known)
        )
        return np.where(known, ratio(sums, counts), np.nan)

    def first_rise(self, low: float, high: float) -> int:
        """The first step of the rise that leads above ``high`` times the loss at the start.

        The rise is of steps above ``low`` times that loss. What isn't finite is above both. Without
        any, it is the first step.
        """
        is_above = (self.level > low * self.start) | ~self.loss.finite
        place = first((self.level > high * self.start) | ~self.loss.finite)
        return int(self.loss.steps[since(is_above[: place or 0])])

    # Single samples ----------------------------------------------------------------------------

    def suspects(self, step: int) -> tuple[Suspect, ...]:
        """The samples with the largest gradients, where the loss has jumped at this step."""
        spike = self.history.spikes.get(step)
        return () if spike is None else spike.suspects

    def sample(self, step: int, index: float) -> tuple[str, ...]:
        """What a sample of a step's batch is called: by the user, or otherwise by its place."""
        if not 0 <= index < np.inf:
            return ()
        at_step = self.steps == step
        own = [
            str(int(number))
            for name in OF_SAMPLES
            for place, number in zip(
                self.column(name)[at_step], self.column(f"{name}_id")[at_step], strict=True
            )
            if place == index and np.isfinite(number)
        ]
        spike = self.history.spikes.get(step)
        is_whole = spike is not None and not spike.part  # else places are those in a micro-batch
        suspects = self.suspects(step) if is_whole else ()
        names = [str(each.name) for each in suspects if each.index == index]
        return (*own, *names, f"{int(index)} of the batch")[:1]

    # Layers and parameters ---------------------------------------------------------------------

    def by_name(self, kind: str) -> ByName:
        """The facts of layers or parameters of a kind; the history's norms where there are none."""
        if kind not in self._kinds:
            self._kinds[kind] = self._by_name(kind)
        return self._kinds[kind]

    def _by_name(self, kind: str) -> ByName:
        facts = self.history.facts["layers"].column(kind)
        if facts.entries or kind not in SERIES:
            return _by_name(facts.steps, lines(facts))
        # Root mean squares from norms, where the shapes are known.
        records, shapes = self.records(SERIES[kind]), self.history.parameters
        records = records.having("parameters") or records
        norms = {n: one.values for n, one in lines(records).items() if n in shapes}
        roots = {n: math.sqrt(max(math.prod(shapes[n]), 1)) for n in norms}
        return ByName(records.steps.astype(np.int64), {n: norms[n] / roots[n] for n in norms})

    @cached_property
    def update_ratio(self) -> Line:
        """The median over weights of the update's rms over that of the weight, at some steps."""
        names = self.trained or tuple(self.history.parameters)
        updates, weights = self.by_name("update_rms"), self.by_name("weight_rms")
        steps, ours, theirs = np.intersect1d(updates.steps, weights.steps, return_indices=True)
        found = ratio(updates.matrix(names)[:, ours], weights.matrix(names)[:, theirs])
        return Line(steps.astype(np.float64), medians(found))

    # Series ------------------------------------------------------------------------------------

    def records(self, kind: str) -> Series:
        """The first series of a kind of quantity; an empty one if there is none."""
        return next((self.history[name] for name in self.history.of_kind(kind)), Series.of({}))

    def of_quantity(self, kind: str, entry: str = "") -> ByName:
        """A number of each layer or parameter in the first series of a kind of quantity.

        It is an ``entry`` of dicts, or the number itself, or each number of an array of heads.
        """
        records, found = self.records(kind), dict[str, Line]()
        for group in ("layers", "parameters") if len(records) else ():
            parts = records.column(group)
            found |= lines(parts, entry) if entry else head_lines(parts)
        return _by_name(records.steps, found)

    @cached_property
    def valid_loss(self) -> Line:
        """The validation loss that the training loop has logged; an empty line without one."""
        known = (self.history[name] for name in VALIDATION if name in self.history.names)
        return line(next(known, Series.of({})))


def is_summed(setup: Setup) -> bool:
    """Whether a loss is a sum over the samples, as its function or the user says."""
    return (setup.loss_reduction or setup.declared_reduction) == "sum"


def _by_name(steps: Floats, found: Mapping[str, Line]) -> ByName:
    return ByName(steps.astype(np.int64), {name: one.values for name, one in found.items()})
