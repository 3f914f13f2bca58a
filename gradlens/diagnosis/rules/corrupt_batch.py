"""A whole batch that is out of scale, or whose loss is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.course import MOST, OVER_CHANCE, is_stuck, jumps
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import LOSS
from gradlens.diagnosis.numbers import first
from gradlens.diagnosis.rule import Rule, Sign, above, below
from gradlens.diagnosis.rules.outlier_sample import BATCH_TIMES, batches_out_of_scale


def find(evidence: Evidence) -> Iterator[Sign]:
    if evidence.setup.input_kind != "integers":
        yield from _of_inputs(evidence)
    yield from _of_losses(evidence)


def _of_inputs(evidence: Evidence) -> Iterator[Sign]:
    found = batches_out_of_scale(evidence)
    place = first(np.isfinite(found))
    if place is not None:
        numbers = (
            above("rms of the batch, over that of the median one", found[place], BATCH_TIMES),
            above("steps with such a batch", np.isfinite(found).sum(), 0),
        )
        yield Sign(int(evidence.steps[place]), numbers, where=("the inputs",))


def _of_losses(evidence: Evidence) -> Iterator[Sign]:
    found = [jump for jump in jumps(evidence) if not jump.share > MOST]  # NaN: it isn't known
    if not found or is_stuck(evidence):  # without learning, an instability is more likely
        return
    highest = max(found, key=lambda jump: jump.height)
    usual = evidence.column("loss_median")[highest.place] / evidence.chance
    numbers = [
        above("loss over that by chance", highest.height, OVER_CHANCE)
        if highest.height > OVER_CHANCE
        else above("loss of the median sample, over that by chance", usual, 1.0),
        above("steps with such a jump", len(found), 0),
    ]
    if highest.share < MOST:
        name = "largest share of one sample in the batch's gradients or loss"
        numbers.append(below(name, highest.share, MOST))
    # What takes longer to come back may be a change of the weights or of the task.
    after = evidence.loss.values[highest.place + 1 : highest.place + 2].sum()
    is_over = after < BACK * evidence.loss.values[highest.place]
    yield Sign(highest.step, tuple(numbers), "consistent with", bool(is_over), title=OF_LOSS)


BACK = 0.5
"""The next loss over that of the batch; above, it is a notice."""
OF_LOSS = "The loss of one batch is far above that of all others"


RULE = Rule(
    fault="corrupt_batch",
    title="The inputs of one batch are far larger than those of all others",
    needs=(LOSS,),
    find=find,
    advice="Look at the inputs and targets of this batch.",
    others=("outlier_sample", "lr_edge"),
    explains=("dead_units", "lr_too_high", "lr_edge"),
)
