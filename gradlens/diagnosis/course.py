"""The course of a run's loss: rises, jumps, and none of the progress that there should be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.numbers import Truths, deviation, finite, largest, median, ratio
from gradlens.history.lines import Floats

SETTLING = 5
"""Steps at the start, in which losses of healthy runs rise as well."""
PERSISTENT = 3
"""Steps that a rise takes, so that it isn't one batch."""
STUCK = 0.95
"""The late loss over that without learning, of a network that has learnt nothing."""
PLATEAU = 0.9
"""The loss in the second eighth of a run over that at the start, of learning that begins late:
measured 0.93 to 0.99 where inputs are nearly constant. It is a sign with such inputs alone, since
some healthy runs begin late, too (up to 0.94)."""
LONG_ENOUGH = 50
"""Steps after which a network should have learnt something."""
PAST_PLATEAU = 100
"""Steps of a run; a shorter one may be before the end of a plateau."""
RISE, SMALL_RISE = 1.5, 1.3
"""The loss over that at the start: measured 1 to 1.8 for single steps of healthy runs. The small
one counts with large updates besides."""
WARM_UP = 1.5
"""The latest learning rates over the earlier ones."""
SHRUNK = 0.7
"""The weights' sizes over those at the start: measured 1 and more in healthy runs, and at most 0.56
where decay is too strong."""
LARGE_UPDATE = 0.03
"""‖update‖/‖θ‖: about 1e-3 is usual, and 1e-2 is common early in training."""


def rise(evidence: Evidence, losses: Floats | None = None) -> float:
    """The loss over that at the start, exceeded by three steps of those; NaN if it isn't known."""
    of = calm(evidence)[SETTLING:] if losses is None else losses
    found, count = np.sort(finite(of)), PERSISTENT * evidence.width
    return float(found[-count]) / evidence.start if len(found) >= count else math.nan


def is_stuck(evidence: Evidence) -> bool:
    """Whether a run that is long enough has learnt nothing."""
    return evidence.ends_badly or (evidence.length >= LONG_ENOUGH and evidence.progress > STUCK)


def warms_up(evidence: Evidence) -> bool:
    """Whether the learning rate still grows, so that what isn't learnt yet is no sign."""
    rates, half = evidence.column("lr"), len(evidence.steps) // 2
    return largest(rates[half:]) > WARM_UP * median(rates[: half + 1])


def starts_late(evidence: Evidence) -> bool:
    """Whether the loss has hardly fallen after the first eighth of the run."""
    start, end = (part * len(evidence.loss.values) // 8 for part in (1, 2))
    return evidence.length >= LONG_ENOUGH and bool(
        median(evidence.loss.values[start:end]) > PLATEAU * evidence.start
    )


def growth(evidence: Evidence, steps: float = math.inf) -> float:
    """The size of the weights after so many steps over that before; NaN if it isn't known."""
    sizes = evidence.by_name("weight_rms")
    table = sizes.matrix(evidence.trained)[:, sizes.steps <= sizes.steps[:1].sum() + steps]
    return median(ratio(table[:, -1:], table[:, :1]))


def update_ratio(evidence: Evidence) -> float:
    """‖update‖/‖θ‖ of weights: the median after the first steps; NaN if it isn't known.

    Of weights that have shrunk, as by a penalty, it says nothing about the rate.
    """
    if growth(evidence) < SHRUNK:
        return math.nan
    found = evidence.update_ratio
    return median(found.values[found.steps > (found.steps[:1].sum() + SETTLING - 1)])


def moves_far(evidence: Evidence) -> bool:
    """Whether an update is large, so that a rise may be the learning rate's; or none is known.

    Measured 0.08 and more where the rate makes the loss rise, and at most 0.05 where outliers do,
    or what the loss compares with, such as a codebook that is trained as well.
    """
    return not 0 < largest(evidence.update_ratio.values) <= LARGE_UPDATE


def is_high(evidence: Evidence) -> bool:
    """Whether there are signs of a learning rate that is too high for this loss."""
    highest, update = rise(evidence), update_ratio(evidence)
    return highest > RISE or (
        update > LARGE_UPDATE and (highest > SMALL_RISE or is_stuck(evidence))
    )


LAGS = 1, 4
"""Steps between which losses are compared: those of episodes or phases go up and down slowly."""


def noise(values: Floats) -> float:
    """How far apart values are, but for a trend: a robust standard deviation of their logarithms.

    0 if there are none. That of a loss says how much those of two batches differ.
    """
    logs = np.log(values)
    changes = [logs[lag:] - logs[:-lag] for lag in LAGS]
    found = largest([deviation(each, median(each)) for each in changes])
    return found / math.sqrt(2) if math.isfinite(found) else 0.0


APART = 2.0
"""Standard deviations of the logarithm of a batch's loss, by which the first one may be low."""


def spread(evidence: Evidence) -> float:
    """By what factor the loss of a batch differs from another one's, and often more.

    Those of single samples, or of batches that are tasks of their own, rise so far by chance.
    """
    later = evidence.loss.values[len(evidence.loss.values) // 2 :]  # after it has blown up, if so
    return float(np.exp(APART * noise(later)))


# Jumps -----------------------------------------------------------------------------------------

WINDOW = 12
"""Steps before a jump that it is compared with."""
DEVIATIONS = 9.0
"""A jump is so many median absolute deviations above the median of the steps before."""
SPREADS = 5.0
"""And so many robust standard deviations of the logarithm of the loss of two batches."""
OVER_CHANCE = 1.5
"""A jump is to so many times the loss by chance, which healthy runs don't come back to."""
TWICE = 2.0
"""Times the loss of the median sample of the steps around it, of a batch in which it is above
chance: measured at most 0.65 of chance in healthy runs that have learnt, and 1.2 and more where
most labels are wrong."""
SUDDEN, JUST_BEFORE = 0.25, 2
"""The share of a jump that the two steps before it may have: a bad sample or batch comes suddenly
(measured at most 0.1), and an instability builds up (0.5)."""
MOST = 0.5
"""The share of one sample in the batch's loss or squared gradient norms: measured 0.999 and more of
the latter with one bad sample, and 0.06 to 0.49 with a bad batch."""
MOST_JUMPS = 0.05
"""Share of the steps: what happens more often is no jump."""


@dataclass(frozen=True)
class Jump:
    """A step at which the loss was much higher than before, and came back afterwards.

    ``place`` is that in the loss. ``height`` is the loss over that by chance, and ``share`` that of
    one sample (``largest_share``).
    """

    place: int
    step: int
    height: float
    share: float


def jumps(evidence: Evidence) -> tuple[Jump, ...]:
    """The jumps of the loss above chance; none where there are so many that it is unstable."""
    is_high = evidence.loss.values > OVER_CHANCE * evidence.start
    return _jumps_among(evidence, is_high | _of_most_samples(evidence))


def jumps_of_one_sample(evidence: Evidence) -> tuple[Jump, ...]:
    """The jumps of the loss, however high, of which one sample has most.

    Its own loss, where it is known, is above that at the start: of losses that are nearly zero, one
    has most by chance.
    """
    has_jumped = np.isin(evidence.loss.steps, [*evidence.history.spikes])
    is_low = evidence.at_loss("loss_max") < evidence.start
    found = _jumps_among(evidence, (has_jumped | (shares_of_loss(evidence) > MOST)) & ~is_low)
    return tuple(jump for jump in found if jump.share > MOST)


def _jumps_among(evidence: Evidence, holds: Truths) -> tuple[Jump, ...]:
    values = evidence.loss.values
    # The last batch of an epoch may have so few samples that its loss differs more.
    is_rest = evidence.at_loss("samples") < evidence.typical("samples") / 2
    known = holds & evidence.loss.finite & ~is_rest
    factor = float(np.exp(SPREADS * noise(values)))
    places = [int(n) for n in np.flatnonzero(known) if _is_jump(values, int(n), factor)]
    if len(places) > max(MOST_JUMPS * len(values), 1):
        return ()
    return tuple(
        Jump(place, int(evidence.loss.steps[place]), values[place] / evidence.start,
             largest_share(evidence, place))
        for place in places
    )  # fmt: skip


def _of_most_samples(evidence: Evidence) -> Truths:
    """At which steps most samples have a loss above chance, unlike just before and after."""
    values = evidence.at_loss("loss_median")
    found = np.zeros(len(values), dtype=np.bool_)
    limit = np.maximum(evidence.chance, TWICE * np.maximum(values[:-2], values[2:]))
    found[1:-1] = values[1:-1] > limit
    return found


def _is_jump(values: Floats, place: int, factor: float) -> bool:
    before, after = values[max(place - WINDOW, 0) : place], finite(values[place + 1 :][:WINDOW])
    if len(before) < WINDOW:
        return False
    middle = median(before)
    deviation = median(np.abs(before - middle))
    height = values[place] - middle
    is_sudden = largest(before[-JUST_BEFORE:]) < middle + SUDDEN * height
    comes_back = not after.size or float(after.min()) < middle + height / 2
    least = max(DEVIATIONS * deviation, (factor - 1) * middle)
    return is_sudden and comes_back and bool(height > least)


SMALLEST = 8
"""Samples of a batch: in a smaller one, a single sample often has most of the loss."""


def calm(evidence: Evidence) -> Floats:
    """The levels of the loss without jumps that are over at the next step: a rate's are not."""
    found, losses = evidence.level.copy(), evidence.loss.values
    places = [jump.place for jump in jumps(evidence)]
    found[[n for n in places if losses[n + 1 : n + 2].sum() < SMALL_RISE * evidence.start]] = np.nan
    return found


def largest_share(evidence: Evidence, place: int) -> float:
    """The share of one sample in a batch's squared gradient norms, or in its loss if that is more.

    Some losses have gradients that large errors don't make larger. It is NaN if neither is known,
    or if the batch is small.
    """
    if evidence.batch_size < SMALLEST:
        return math.nan
    suspects = evidence.suspects(int(evidence.loss.steps[place]))
    of_gradients = suspects[0].share if suspects else math.nan
    return float(np.fmax(of_gradients, shares_of_loss(evidence)[place]))


def shares_of_loss(evidence: Evidence) -> Floats:
    """The share of one sample in the loss of each batch ``[K]``; NaN where it isn't known."""
    losses, samples = evidence.loss.values, evidence.at_loss("samples")
    of_samples = evidence.at_loss("loss_mean")  # whatever else the loss is made of, or divided by
    losses = np.where(np.isfinite(of_samples), of_samples, losses)
    found = ratio(evidence.at_loss("loss_max"), losses * samples)
    return np.where((losses > 0) & (samples > 1), found, math.nan)
