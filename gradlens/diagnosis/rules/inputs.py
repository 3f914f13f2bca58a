"""Inputs that hardly differ, are large, or are far from zero; and the order of samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import entr
from scipy.stats import binom, rankdata

from gradlens.diagnosis.course import is_high, is_stuck, starts_late
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS, SAMPLES
from gradlens.diagnosis.numbers import Truths, finite, largest, mean, median, ratio, share
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below, shown
from gradlens.diagnosis.rules.of_layers import saturated
from gradlens.history.lines import Floats

SPREAD = 0.02
"""The rms of the samples' difference from their mean, over that of the samples: 0.3 and more of
images, and in single precision about 1e-4 where samples are equal."""
SMALL = 0.05
"""The same without the division: of inputs that are so small, layers with biases learn little. It
is a notice if learning begins early nevertheless, as of normalised rows with many elements."""
SHARE = 0.9
"""Share of the steps whose inputs are so similar."""


def constant(evidence: Evidence) -> Iterator[Sign]:
    spread = np.where(evidence.column("input_rms") == 0, 0, evidence.column("input_spread"))
    known = np.isfinite(spread) & (evidence.column("samples") > 1)
    spread, size = np.fmax(spread, evidence.typical("first_spread")), _differences(evidence)
    is_real = evidence.setup.input_kind != "integers" and not evidence.setup.input_normalised
    if share((spread < SPREAD) & ~_differ(evidence), known) > SHARE:
        number = below("spread of the samples, over their size", median(spread[known]), SPREAD)
        yield Sign(evidence.step(known), (number,))
    elif is_real and share(size < SMALL, known) > SHARE:
        number = below("spread of the samples", median(size[known]), SMALL)
        does_harm = is_stuck(evidence) or starts_late(evidence)
        yield Sign(evidence.step(known), (number,), "very likely", does_harm, title=SIMILAR)


def _differ(evidence: Evidence) -> Truths:
    """At which steps samples differ, however small that is beside what they have in common.

    A year or a time among the features has a large mean, beside which all the rest is small.
    """
    return (_differences(evidence) > SMALL) & (evidence.column("distinct_rows") > 1)


def _differences(evidence: Evidence) -> Floats:
    """The rms of the samples' difference from their mean, of inputs or of what layers get of them.

    The larger one, since the latter may be of a few constants.
    """
    first = median(evidence.column("first_spread") * evidence.column("first_rms"))
    return np.fmax(_spread(evidence) * evidence.column("input_rms"), first)


def _spread(evidence: Evidence) -> Floats:
    """That of the samples, as far as single precision tells it."""
    return np.fmax(evidence.column("input_spread"), ROUNDED)


SIMILAR = "Inputs hardly differ between samples"
LEARNT = 0.25
"""The late loss over that without learning, of a network that learns in spite of its inputs."""
HARMLESS = "This is harmless, since the model begins with a normalisation."


FAR = 3.5, 6.0
"""The mean over the standard deviation: measured at most 3.1 in healthy runs (inputs in 0 to 1),
and 30 in faulty ones. In between, it is a notice unless training is unstable or learns nothing."""
ROUNDED = 1e-4
"""What is left of the spread of equal samples in single precision."""
LARGE = 5.0, 20.0
"""The rms of the inputs: measured 0.3 to 1 in healthy runs, and 110 to 140 in faulty ones. In
between, it is a notice unless training is unstable or learns nothing."""


def offset(evidence: Evidence) -> Iterator[Sign]:
    offsets = ratio(np.abs(evidence.of_data("mean")), evidence.of_data("std"))
    spread = np.maximum(evidence.of_data("spread"), ROUNDED)
    of_features = np.where((spread < SPREAD) & _differ(evidence), 1 / spread, np.nan)
    offsets = np.fmax(offsets, of_features)
    words = f"mean of {_data(evidence)}, over the standard deviation"
    return _beyond(evidence, words, offsets, FAR)


def scale(evidence: Evidence) -> Iterator[Sign]:
    sizes = evidence.of_data("rms")
    return _beyond(evidence, f"root mean square of {_data(evidence)}", sizes, LARGE)


def _data(evidence: Evidence) -> str:
    """Whose sizes ``evidence.of_data`` gives."""
    is_known = np.isfinite(evidence.column("first_rms")).any()
    return "what the first layers get" if is_known else "the inputs"


def _beyond(
    evidence: Evidence, name: str, values: Floats, limits: tuple[float, float]
) -> Iterator[Sign]:
    """A sign if the median over steps of a number ``[K]`` of the inputs is above the first limit.

    Up to the second one, it is a notice unless training is unstable, learns nothing, or has
    saturated units. So it is in any case where the network learns nevertheless, or begins with a
    normalisation.
    """
    (limit, certain), is_normalised = limits, evidence.setup.input_normalised
    found = median(values)
    if evidence.setup.input_kind != "integers" and found > limit:
        does_harm = is_high(evidence) or is_stuck(evidence) or any(saturated(evidence))
        is_alarm = found > certain or does_harm
        is_alarm = is_alarm and not (is_normalised or evidence.progress < LEARNT)
        step, advice = evidence.step(np.isfinite(values)), HARMLESS if is_normalised else ""
        yield Sign(step, (above(name, found, limit),), is_alarm=is_alarm, advice=advice)


SAME = 0.5
"""Share of the pairs of consecutive steps that have the same batch."""
GAP = 1.5
"""The late validation loss over that of training. The batch of all steps may be the whole data set,
and a policy takes several steps with each of its rollouts: it is a notice unless this shows harm.
"""
FEWEST = 8
"""Pairs of consecutive steps; with fewer, nothing is said."""


def repeated(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    known = np.isfinite(sums[1:]) & np.isfinite(sums[:-1]) & (np.diff(evidence.steps) == 1)
    same = known & (sums[1:] == sums[:-1])
    found, valid = share(same, known), evidence.valid_loss
    if known.sum() >= FEWEST:
        number = above("share of steps with the batch of the step before", found, SAME)
        has_gap = median(valid.values[evidence.is_late(valid.steps)]) > GAP * evidence.late_loss
        step, title = evidence.step(np.append(False, same)), "" if found == 1 else OF_BEFORE
        advice = "" if has_gap else WHOLE if found == 1 else SEVERAL_STEPS
        yield from shown(Sign(step, (number,), is_alarm=has_gap, advice=advice, title=title))


OF_BEFORE = "Most steps have the same batch as the step before"
SEVERAL_STEPS = (
    "If several steps with each batch are on purpose, as those of a policy with each of its "
    "rollouts, nothing is wrong; otherwise, look at what the loader returns."
)
WHOLE = (
    "If it is the whole data set, nothing is wrong; otherwise, make the loader's iterator once for "
    "each epoch, since next(iter(loader)) restarts it."
)

DISTINCT = 0.5
"""Share of a batch's rows that differ: measured 1 in healthy runs, and at most 0.08 in faulty
ones."""
FEW_STATES, FEWEST_STEPS = 1.0, 4
"""The different sizes of the batches' median rows, over the distinct rows of a batch: where there
are no more, batches have the same few rows, as of a small space of states or a small data set, and
these are all that there are. With fewer different sizes than the second, nothing is said."""
SMALLEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def duplicated(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    shares = np.where(samples >= SMALLEST, ratio(evidence.column("distinct_rows"), samples), np.nan)
    sizes = np.unique(evidence.column("row_rms_median"))
    few = FEW_STATES * largest(evidence.column("distinct_rows"))
    if np.isfinite(sizes).sum() > max(few, FEWEST_STEPS):
        number = below("share of a batch's samples that differ", median(shares), DISTINCT)
        yield from shown(Sign(evidence.step(shares < DISTINCT), (number,)))


ENTROPY = 0.8
"""The entropy of a batch's labels, over that of batches drawn at random: measured 0.99 and more in
healthy runs, and up to 0.69 in faulty ones, of data that are sorted but for some noise."""
FEWEST_SAMPLES = 8
"""Samples of a batch; of smaller ones, nothing is said."""
FEWEST_BATCHES = 10
"""Steps; with fewer, nothing is said."""
LARGEST = 64
"""The entropy of larger random batches is at least that of a batch of this size."""
RANK_RATIO, CERTAIN = 1.3, 4.0
"""Bartels's rank ratio of the batches' mean inputs, and how many standard deviations it is below 2,
which is its mean where batches are random, whatever they are drawn from: measured 1.55 and more
in healthy runs, and 0.1 to 1.2 in half of the faulty ones."""
ALTERNATING = 3.0
"""The same ratio of the batches' mean labels, of batches that alternate on purpose, as those of
real and generated samples do: 4 where each is followed by one of the other kind."""
BATCHES = 40
"""Distinct batches; with fewer, nothing is said of the inputs."""


def unshuffled(evidence: Evidence) -> Iterator[Sign]:
    """By labels where these are known, and by inputs otherwise."""
    yield from _by_labels(evidence) if evidence.labels.size else _by_inputs(evidence)


def _by_inputs(evidence: Evidence) -> Iterator[Sign]:
    sums = evidence.column("checksum")
    batches = np.unique(sums, return_index=True)[1]
    places = np.sort(batches[np.isfinite(sums[batches])])
    if len(places) < BATCHES:
        return
    means = evidence.column("input_mean"), ratio(sums, evidence.column("samples"))
    found = min(rank_ratio(each[places]) for each in means)
    limit = min(RANK_RATIO, 2 - CERTAIN * 2 / math.sqrt(len(places)))
    number = below("rank ratio of the batches' mean inputs", found, limit)
    # Of one pass, it isn't known: inputs may be made by what is trained, or by a curriculum.
    is_alarm = len(places) < len(sums[np.isfinite(sums)])
    step, advice = int(evidence.steps[places[0]]), "" if is_alarm else ONE_PASS
    sign = Sign(step, (number,), "consistent with", is_alarm, title=GRADUAL, advice=advice)
    yield from shown(sign)


GRADUAL = "Inputs change gradually from batch to batch"
ONE_PASS = (
    "Shuffle the training data: DataLoader(..., shuffle=True). Of a buffer that is filled while "
    "training, a curriculum, or inputs that are made by what is trained, nothing is wrong."
)


def rank_ratio(values: Floats) -> float:
    """The sum of squared differences of consecutive ranks, over that of ranks from their mean.

    It is 2 on average for values in random order, with a standard deviation of about 2/√K, and less
    where neighbours are alike (Bartels, 1982, J. Am. Stat. Assoc. 77, 40).
    """
    ranks = rankdata(values)
    spread = np.square(ranks - ranks.mean()).sum()
    return float(np.square(np.diff(ranks)).sum() / spread) if spread > 0 else math.nan


def _by_labels(evidence: Evidence) -> Iterator[Sign]:
    entropies = evidence.column("label_entropy")
    known = np.isfinite(entropies)
    samples = evidence.typical("samples")
    if known.sum() < FEWEST_BATCHES or not samples >= FEWEST_SAMPLES:
        return
    expected = random_entropy(evidence.labels, int(min(samples, LARGEST)))
    found = mean(entropies) / expected if expected > 0 else math.nan
    means = finite(evidence.column("label_mean"))
    if len({*means[len(means) // 2 :]}) == 1:  # all labels are of one class, in whatever order
        return
    if not (len(means) and rank_ratio(means) > ALTERNATING):
        number = below("entropy of a batch's labels, over that of random ones", found, ENTROPY)
        yield from shown(Sign(evidence.step(known), (number,)))


def random_entropy(counts: Floats, size: int) -> float:
    """The expected entropy of the labels of a random batch, in nats, given all labels' counts."""
    shares = counts / counts.sum()
    drawn = np.arange(size + 1)
    return float((binom.pmf(drawn, size, shares[:, None]) * entr(drawn / size)).sum())


RULES = (
    Rule("input_constant", "All samples of a batch have the same input",
         needs=(INPUTS,), find=constant,
         explains=("samples_duplicated", "batch_repeated", "input_offset", "dead_units",
                   "symmetric_init", "no_gradient", *NO_PROGRESS),
         advice="Look at what the loader returns: the inputs have no information about the "
                "targets."),
    Rule("input_offset", "Inputs are far from zero, compared with their spread",
         needs=(INPUTS,), find=offset,
         explains=("input_scale", "loss_sum", "exploding_gradients", *INSTABILITY, *NO_PROGRESS),
         sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
         advice="Subtract the mean of the training set from the inputs."),
    Rule("input_scale", "Inputs are large",
         needs=(INPUTS,), find=scale, explains=("loss_sum", *INSTABILITY, *NO_PROGRESS),
         sources=("LeCun et al. (1998), Efficient BackProp, Sec. 4.3",),
         advice="Normalise inputs to mean 0 and variance 1; divide pixels by 255 at least."),
    Rule("batch_repeated", "Every step has the same batch",
         needs=(INPUTS,), find=repeated,
         explains=("class_imbalance", "data_order", "overfitting", "label_noise"),
         advice="Make the loader's iterator once for each epoch: next(iter(loader)) restarts it. "
                "If you train on one batch on purpose, as a test or because it is the whole data "
                "set, nothing is wrong."),
    Rule("samples_duplicated", "Batches have the same samples several times",
         needs=(INPUTS,), find=duplicated, explains=("overfitting",),
         advice="Look at the sampler and the dataset: indices may be repeated."),
    Rule("data_order", "Batches have few of the classes each: the data aren't shuffled",
         needs=(SAMPLES,), find=unshuffled,
         explains=("class_imbalance", "overfitting", *INSTABILITY, *NO_PROGRESS),
         advice="Shuffle the training data: DataLoader(..., shuffle=True)."),
)  # fmt: skip
