"""Units that are always zero or saturated, and what quantities show of single layers and groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import compress

import numpy as np

from gradlens.diagnosis.course import WINDOW, is_stuck, noise, spread
from gradlens.diagnosis.evidence import ByName, Evidence
from gradlens.diagnosis.needs import DEAD, LOSS, SATURATED, quantity
from gradlens.diagnosis.numbers import (
    deviation,
    finite,
    first,
    largest,
    median,
    ratio,
    smallest,
    smooth,
)
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below
from gradlens.history.finding import Certainty
from gradlens.history.lines import Floats, field_line

SATURATED_SHARE = 0.5
"""Share of a layer's outputs within 2 % of the ends: measured about 0 at the start of healthy
runs, and 0.95 in faulty ones. Later, units of trained networks saturate as well."""


def saturated(evidence: Evidence) -> Iterator[Sign]:
    words = "share of the outputs of a tanh or sigmoid within 2 % of its ends"
    return inactive(evidence, "saturated", words, SATURATED_SHARE)


SHARE = 0.6
"""Share of a layer's units: measured at most 0.5 at the start of healthy runs (inputs in 0 to 1
that learn nothing), and 0.75 and more in faulty ones."""
RECORDS = 3
"""Records at the start, which must agree; and in a row that must be beyond a limit."""
BY_CHANCE = 0.75
"""Of a layer of n units, so much over √n more than half are dead by chance: 1.5 standard
deviations, where each unit is dead with a probability of a half."""
LEARNT, LEARNT_WELL = 0.5, 0.25
"""The late loss over that without learning, of a network that learns in spite of them: without any
unit of a layer, which isn't on the way of all signals then; and without most of them, so that it is
a notice."""
SMALLEST = 8
"""Samples of a batch: in smaller ones, a healthy unit is often zero for all of them."""


def dead(evidence: Evidence) -> Iterator[Sign]:
    # Of graphs and texts, each node or word has a label.
    if not largest([evidence.typical("samples"), evidence.typical("labels")]) >= SMALLEST:
        return
    words = "share of a ReLU's units that are zero for the whole batch"
    yield from inactive(evidence, "dead", words, SHARE)


def inactive(evidence: Evidence, kind: str, words: str, limit: float) -> Iterator[Sign]:
    """Layers with inactive units from the start, or at the end of a run that learns nothing."""
    found = evidence.by_name(kind)
    start = {n: found.values[n][:1].sum() for n in found.values}
    early = tuple(
        name
        for name, shares in found.values.items()
        if min(start[name], median(shares[:RECORDS])) > limit
        if kind != "dead" or start[name] > _by_chance(evidence, name)
        if start[name] < 1 or not evidence.progress < LEARNT
    )
    if early:
        numbers = (above(words, largest([start[n] for n in early]), limit),)
        is_alarm = not evidence.progress < LEARNT_WELL
        yield Sign(int(found.steps[0]), numbers, "very likely", is_alarm, early)
    late = tuple(
        n for n in found.values if n not in early and median(found.values[n][-RECORDS:]) > limit
    )
    if late and is_stuck(evidence) and len(found.steps) > RECORDS:
        table = found.matrix(late)
        step = int(found.steps[(table > limit).any(axis=0)][0])
        numbers = (above(words, largest(table[:, -RECORDS:]), limit),)
        yield Sign(step, numbers, "very likely", where=late)


def _by_chance(evidence: Evidence, layer: str) -> float:
    """The share of a layer's units that may be dead by chance; less than all of them."""
    units = evidence.history.parameters.get(f"{layer}.weight", (0,))[0]
    return min(0.5 + BY_CHANCE / math.sqrt(units), 0.99) if units else 0.0


def lasting(
    numbers: ByName,
    limit: float,
    words: str,
    is_above: bool = True,
    certainty: Certainty = "very likely",
    is_alarm: bool = True,
) -> Iterator[Sign]:
    """A sign with all layers that have been beyond a limit for some time, if there are any."""
    since: dict[str, int] = {}
    worst = math.nan
    for name, values in numbers.values.items():
        (places,) = np.nonzero(~np.isnan(values))
        is_beyond = values[places] > limit if is_above else values[places] < limit
        counts = np.convolve(is_beyond, np.ones(RECORDS), "valid") if len(places) else places
        at = first(counts >= RECORDS)
        if at is not None:
            since[name] = int(places[at])
            found = values[places[at:]]
            worst = np.fmax(worst, found.max()) if is_above else np.fmin(worst, found.min())
    if since:
        measured = (above if is_above else below)(words, float(worst), limit)
        step = int(numbers.steps[min(since.values())])
        yield Sign(step, (measured,), certainty, is_alarm, tuple(since))


# Updates --------------------------------------------------------------------------------------

MOVED = 0.3
"""‖update‖/‖weight‖ of a weight: measured at most 0.24 in healthy runs, and 0.15 after the first
steps. That of a weight that begins at zero falls to 0.3 in three steps."""
SETTLED, TIMES = 20, 10.0
"""In so many steps at the start, it must also be so many times that of half of the weights: all of
them may be moved far by a rate that is high at first."""


def weight_moves_far(evidence: Evidence) -> Iterator[Sign]:
    found, shapes = evidence.of_quantity("RelativeUpdate", "value"), evidence.history.parameters
    names = tuple(n for n, each in found.values.items() if len(shapes.get(n, ())) > 1)
    if names:
        table = found.matrix(names)
        usual = np.sort(table, axis=0)[(len(names) - 1) // 2]  # NaN come last
        is_late = found.steps >= found.steps[:1].sum() + SETTLED
        begins_at_zero = np.isnan(table[:, :1])
        counts = is_late | ((table > TIMES * usual) & ~begins_at_zero)
        moved = dict(zip(names, np.where(counts, table, 0.0), strict=True))
        words = "size of an update, over that of the weight"
        yield from lasting(ByName(found.steps, moved), MOVED, words)


# Attention ------------------------------------------------------------------------------------

SCORE = 100.0
"""The largest score of a head, at which QK-clip caps it: measured at most 37 in healthy runs."""


COLLAPSED = 0.1
"""The entropy of a head of attention over that at the start, or of outputs over log C: measured
0.25 and more in healthy heads. By itself, it is no fault but a notice of heads, which may look at
one key each (measured 0.03 in a run that it did no harm to), and nothing of outputs, which should
be certain in the end."""
WORSE, WIDTH = 1.1, 10
"""The latest median loss of so many steps, over the lowest one: training has become worse."""


def entropy_collapses(evidence: Evidence) -> Iterator[Sign]:
    levels = smooth(evidence.loss.values, WIDTH)
    is_worse = levels[-1:].sum() > max(WORSE, spread(evidence)) * smallest(levels)
    does_harm = is_worse or is_stuck(evidence)
    heads = evidence.of_quantity("AttentionEntropy")
    shares = {
        n: ratio(v, finite(v)[0] if finite(v).size else math.nan) for n, v in heads.values.items()
    }
    words = "entropy of attention, over that at the start"
    # Runs that learn more slowly for it can't be told from those that learn as fast without it.
    for sign in lasting(ByName(heads.steps, shares), COLLAPSED, words, False, is_alarm=does_harm):
        yield sign if does_harm else replace(sign, certainty="fact", title=SINGLE, advice=COMPARE)
    if is_stuck(evidence):
        outputs = evidence.of_quantity("OutputEntropy", "entropy")
        classes = evidence.of_quantity("OutputEntropy", "classes").values
        shares = {n: ratio(v, np.log(classes[n])) for n, v in outputs.values.items()}
        words = "entropy of outputs, over that of a guess"
        for sign in lasting(ByName(outputs.steps, shares), COLLAPSED, words, is_above=False):
            yield replace(sign, title=CERTAIN, advice=SMALLER)


SINGLE = "Heads of attention look at single keys"
COMPARE = (
    "Heads may do so on purpose, as those that look at the previous token. If training is slower "
    "than before, normalise queries and keys (QK-norm), or lower the learning rate."
)
CERTAIN = "The outputs are certain of classes, and wrong"
SMALLER = (
    "Lower the learning rate, use a warm-up or smaller weights in the last layer, or penalise "
    "(log Z)²."
)

# Old second moments ---------------------------------------------------------------------------

OLD = 2.3
"""The rms of g/√v, which spikes of the loss follow (Wortsman et al., App. D). By itself, it is no
fault: measured up to 8.6 in healthy runs with β₂ = 0.999."""
WITHIN = 8
"""Steps from there to the spike of the loss, as in that paper."""
SPIKE, SPREADS = 1.2, 5.0
"""A spike is so many times the loss before, and so many robust standard deviations of the logarithm
of a batch's loss. Where it is one at less than three steps, it may be that of a bad batch."""
USUAL = 0.95
"""A β₂ of language models, with which v is no older than 20 steps."""


def moments_are_old(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.of_quantity("OptimizerState", "rms")
    names = tuple(n for n in evidence.trained or evidence.weights if n in found.values)
    if not names or evidence.option("beta2") <= USUAL:
        return
    losses, table = evidence.loss.values, found.matrix(names)
    for place in np.flatnonzero((table > OLD).any(axis=0)).tolist():
        at = int(np.searchsorted(evidence.loss.steps, found.steps[place]))
        before, later = losses[max(at - WINDOW, 0) : at], losses[at : at + 1 + WITHIN]
        usual = median(before)
        apart = deviation(np.log(before), np.log(usual))
        least = max(SPIKE, math.exp(SPREADS * max(noise(losses), apart)))
        heights = ratio(later, usual)
        is_before = len(before) == WINDOW and heights[:1].sum() < math.sqrt(least)
        if is_before and (heights > least).sum() >= RECORDS:
            numbers = (
                above("rms of the gradient over the root of v", largest(table[:, place]), OLD),
                above(f"loss within {WITHIN} steps, over that before", largest(heights), least),
            )
            where = tuple(compress(names, table[:, place] > OLD))
            yield Sign(int(found.steps[place]), numbers, "consistent with", where=where)
            return


# Outliers -------------------------------------------------------------------------------------

KURTOSIS = 60.0
"""The excess kurtosis of a layer's outputs: measured at most 54 in small healthy networks (that of
logits, at first) and 29 in their other layers. It is 1000 and more in large transformers that
aren't trained against outliers (Bondarenko et al., 2023), and at most about three times the
number of channels if a single one is large."""


def channel_is_large(evidence: Evidence) -> Iterator[Sign]:
    found = evidence.of_quantity("ActivationOutliers", "kurtosis")
    channels = evidence.of_quantity("ActivationOutliers", "channel").values
    same: dict[str, Floats] = {}
    for name, values in found.values.items():
        for latest in channels[name][~np.isnan(values)][-1:]:
            same[f"{name}.channel {latest:.0f}"] = np.where(channels[name] == latest, values, 0)
    words = "excess kurtosis of the outputs"
    yield from lasting(ByName(found.steps, same), KURTOSIS, words, certainty="fact", is_alarm=False)


# Groups ---------------------------------------------------------------------------------------


def groups_oppose(evidence: Evidence) -> Iterator[Sign]:
    for series in evidence.history.of_kind("GroupGradients")[:1]:
        pairs = evidence.history[series].column("pairs")
        ends = {n: field_line(pairs.column(n), "high").values for n in pairs.entries}
        found = ByName(pairs.steps.astype(np.int64), ends)
        words = "upper end of the interval of the cosine"
        # Groups oppose each other at each minimum of their mean loss, too.
        yield from lasting(found, 0.0, words, is_above=False, is_alarm=False)


RULES = (
    Rule("saturated_units", "Most units of a tanh or sigmoid are saturated",
         needs=(SATURATED,), find=saturated,
         others=("exploding_gradients", "input_scale", "lr_too_high"), explains=NO_PROGRESS,
         sources=("Glorot and Bengio (2010)",),
         advice="Use smaller weights at the start (Glorot), or smaller inputs."),
    Rule("dead_units", "Most units of a ReLU are dead",
         needs=(DEAD,), find=dead, others=("lr_too_high", "input_offset", "symmetric_init"),
         explains=("no_gradient", *NO_PROGRESS),
         advice="Start with biases of zero and He initialisation; if units die while training, "
                "use a lower learning rate; or use GELU or leaky ReLU."),
    Rule("update_large", "Weights are moved far at each step",
         needs=(quantity("RelativeUpdate"),), find=weight_moves_far, others=("lr_too_high",),
         explains=("lr_edge", *INSTABILITY),
         advice="Lower the learning rate of these weights, or begin with larger ones: see "
                "whether their parameter group and their initialisation are as intended."),
    Rule("attention_logits", "Scores of attention are very large",
         needs=(quantity("AttentionLogits"),), others=("lr_too_high",),
         find=lambda evidence: lasting(
             evidence.of_quantity("AttentionLogits"), SCORE, "largest score of attention"),
         explains=("lr_edge", *(each for each in INSTABILITY if each != "attention_logits")),
         sources=("Dehghani et al. (2023), arXiv:2302.05442: scores grow before training diverges",
                  "Kimi team (2025), arXiv:2507.20534: QK-clip, at 100"),
         advice="Normalise queries and keys (QK-norm), lower the learning rate, or cap the "
                "scores: with such scores, each query looks at one key alone, and hardly has a "
                "gradient."),
    Rule("second_moment_old", "The loss spikes after gradients have outgrown Adam's second moments",
         needs=(quantity("OptimizerState"), LOSS), find=moments_are_old,
         others=("lr_edge", "corrupt_batch"), explains=("lr_edge", *INSTABILITY),
         sources=("Wortsman et al. (2023), arXiv:2304.13013, Sec. 3.4 and App. D",),
         advice="Use a beta2 of 0.99 or 0.95, or clip updates by their rms, as Adafactor does: "
                "where gradients grow faster than v, updates are far longer than the rate says."),
    Rule("entropy_collapse",
         "Heads of attention look at single keys, and training has become worse",
         needs=(quantity("AttentionEntropy", "OutputEntropy"),), find=entropy_collapses,
         others=("attention_logits", "lr_too_high"), explains=("labels_random",),
         sources=("Zhai et al. (2023), arXiv:2303.06296: entropy of attention",
                  "Wortsman et al. (2023), arXiv:2309.14322: logits of attention and of outputs"),
         advice="Normalise queries and keys (QK-norm), lower the learning rate, or use a warm-up."),
    Rule("activation_outlier", "One channel of a layer is far larger than all others",
         needs=(quantity("ActivationOutliers"),), find=channel_is_large,
         others=("exploding_gradients",),
         sources=("Dettmers et al. (2022), arXiv:2208.07339: outlier channels",
                  "Bondarenko et al. (2023), arXiv:2306.12929: kurtosis of outputs"),
         advice="If the network is to be quantised, or trained in float8 or float16, see what "
                "this channel is for: all channels share the range of the numbers."),
    Rule("groups_oppose", "The gradients of groups of samples oppose each other",
         needs=(quantity("GroupGradients"),), find=groups_oppose, others=("label_noise",),
         sources=("Yu et al. (2020), arXiv:2001.06782: gradients of tasks that conflict",),
         advice="Each step that makes one of the groups better makes the other worse. Weigh the "
                "groups, give them layers of their own, or train on them separately; where both "
                "have become as good as the network allows, nothing is wrong."),
)  # fmt: skip
