"""A single sample, or a whole batch, that is far out of scale, or whose loss is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import (
    MOST,
    OVER_CHANCE,
    SMALLEST,
    Jump,
    is_stuck,
    jumps,
    jumps_of_one_sample,
    largest_share,
    shares_of_loss,
)
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import INPUTS, LOSS
from gradlens.diagnosis.numbers import Truths, deviation, first, median, ratio, share
from gradlens.diagnosis.rule import Rule, Sign, above, below, beyond

TIMES, CERTAIN = 6.0, 20.0
"""The largest sample's rms over the median one's: measured 1 to 7 in healthy runs, and 79 to 118
in faulty ones. In between, it is a notice unless the sample has most of the batch's loss, too."""
USUAL_TIMES = 3.0
"""The same over its median of the run, which heavy tails make large at most steps."""
HEIGHT = 0.7
"""A jump to so many times the loss at the start is an alarm if one sample has most of it: measured
at most 0.03 in healthy runs. Lower ones are notices."""
MOST_STEPS = 0.25
"""Share of the steps: what happens more often is how the data are."""


def outlier(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.input_kind != "integers" and evidence.rows_are_samples:
        yield from _of_inputs(evidence)
    high = [jump for jump in jumps(evidence) if jump.share > MOST]
    of_batches = evidence.steps[np.isfinite(batches_out_of_scale(evidence))]
    found = [j for j in high or jumps_of_one_sample(evidence) if j.step not in of_batches]
    if found:
        yield _of_jump(evidence, max(found, key=lambda jump: jump.height), len(found))


def out_of_scale(evidence: Evidence) -> np.ndarray:
    """``[K]``, the largest sample's rms over the median one's where it is an outlier; else NaN."""
    found = ratio(evidence.column("row_rms_max"), evidence.column("row_rms_median"))
    return _rare(found, found > max(TIMES, USUAL_TIMES * median(found)))


def _rare(found: np.ndarray, holds: Truths) -> np.ndarray:
    """Where something holds of known numbers ``[K]``, if that is rare; NaN elsewhere."""
    is_rare = share(holds, np.isfinite(found)) < MOST_STEPS
    return np.where(holds & is_rare, found, np.nan)


BATCH_TIMES, SPREADS = 3.0, 5.0
"""A batch's rms over the run's median, from which on it is the batch that is out of scale, and so
many robust standard deviations of its logarithm, which is large where batches are small."""


def batches_out_of_scale(evidence: Evidence) -> np.ndarray:
    """``[K]``, a batch's rms over the median one's where no single sample explains it; else NaN."""
    sizes = evidence.column("input_rms")
    found = ratio(sizes, median(sizes))
    limit = max(BATCH_TIMES, float(np.exp(SPREADS * deviation(np.log(found), 0.0))))
    return _rare(found, (found > limit) & np.isnan(out_of_scale(evidence)))


def _of_inputs(evidence: Evidence) -> Iterator[Sign]:
    found = out_of_scale(evidence)
    certain = first(found > CERTAIN)
    place = first(np.isfinite(found)) if certain is None else certain
    if place is not None:
        sample = evidence.column("row_largest")[place]
        has_loss = (
            evidence.column("loss_largest")[place] == sample
            and largest_share(evidence, place) > MOST
        )
        numbers = (
            above("rms of this sample, over that of the median one", found[place], TIMES),
            above("steps with such a sample", np.isfinite(found).sum(), 0),
        )
        is_alarm = found[place] > CERTAIN or has_loss
        step = int(evidence.steps[place])
        yield Sign(step, numbers, is_alarm=is_alarm, samples=evidence.sample(step, sample))


def _of_jump(evidence: Evidence, jump: Jump, count: int) -> Sign:
    numbers = beyond(
        above("loss over that at the start", jump.height, HEIGHT),
        above("share of one sample in the batch's gradients or loss", jump.share, MOST),
        above("steps with such a jump", count, 0),
    )
    by_gradient = tuple(str(each.name) for each in evidence.suspects(jump.step)[:1])
    by_loss = evidence.column("loss_largest")[evidence.steps == jump.step].tolist()
    has_loss = shares_of_loss(evidence)[jump.place] > MOST
    of_loss = evidence.sample(jump.step, [*by_loss, math.nan][0])
    samples = of_loss if has_loss else by_gradient or of_loss
    is_high = jump.height > HEIGHT
    return Sign(jump.step, numbers, "very likely", is_high, samples=samples, title=OF_SAMPLE)


def corrupt_batch(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.input_kind != "integers":
        yield from _inputs_of_batch(evidence)
    yield from _losses_of_batch(evidence)


def _inputs_of_batch(evidence: Evidence) -> Iterator[Sign]:
    found = batches_out_of_scale(evidence)
    place = first(np.isfinite(found))
    if place is not None:
        numbers = (
            above("rms of the batch, over that of the median one", found[place], BATCH_TIMES),
            above("steps with such a batch", np.isfinite(found).sum(), 0),
        )
        yield Sign(int(evidence.steps[place]), numbers, where=("the inputs",))


def _losses_of_batch(evidence: Evidence) -> Iterator[Sign]:
    found = [jump for jump in jumps(evidence) if not jump.share > MOST]  # NaN: it isn't known
    if not found or is_stuck(evidence):  # without learning, an instability is more likely
        return
    highest = max(found, key=lambda jump: jump.height)
    height = above("loss over that by chance", highest.height, OVER_CHANCE)
    if not height.is_beyond:
        usual = evidence.column("loss_median")[highest.place] / evidence.chance
        height = above("loss of the median sample, over that by chance", usual, 1.0)
    name = "largest share of one sample in the batch's gradients or loss"
    share_of_one = beyond(below(name, highest.share, MOST))
    numbers = (height, above("steps with such a jump", len(found), 0), *share_of_one)
    # What takes longer to come back may be a change of the weights or of the task.
    after = evidence.loss.values[highest.place + 1 : highest.place + 2].sum()
    is_over = after < BACK * evidence.loss.values[highest.place]
    # Losses of few samples differ by as much where nothing is wrong.
    is_small = evidence.batch_size < SMALLEST
    is_alarm = bool(is_over and not is_small)
    yield Sign(highest.step, numbers, "consistent with", is_alarm, title=OF_LOSS)


BACK = 0.5
"""The next loss over that of the batch; above, it is a notice."""
OF_SAMPLE = "The loss of one sample is far above that of all others"
OF_LOSS = "The loss of one batch is far above that of all others"


RULES = (
    Rule("outlier_sample", "The input of one sample is far larger than that of the median one",
         needs=(INPUTS,), find=outlier, others=("corrupt_batch", "lr_edge"),
         explains=("corrupt_batch", "dead_units", "lr_too_high", "lr_edge"),
         advice="Look at this sample of the batch, and correct it or leave it out."),
    Rule("corrupt_batch", "The inputs of one batch are far larger than those of all others",
         needs=(LOSS,), find=corrupt_batch, others=("outlier_sample", "lr_edge"),
         explains=("dead_units", "lr_too_high", "lr_edge"),
         advice="Look at the inputs and targets of this batch."),
)  # fmt: skip
