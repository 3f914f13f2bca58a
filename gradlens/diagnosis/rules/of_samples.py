"""Samples that the network doesn't tell apart, or that it mixes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gradlens.diagnosis.course import LONG_ENOUGH, is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import CODES, COVERAGE, OUTPUTS
from gradlens.diagnosis.numbers import largest
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above, below
from gradlens.history.lines import Floats

MEETING = "samples meet"
"""How a reason begins for which parameters have no per-sample gradients: it is in the network, and
not in the loss, if it says between which layers."""
BETWEEN = "between it and"
UNCERTAIN = "more than one agrees", "it can't be followed which sample"
"""Parts of reasons where it isn't certain which axis counts the samples, or which rows are whose: a
view that mixes them hides even how many there are."""


def mixed(evidence: Evidence) -> Iterator[Sign]:
    """Samples that meet on their way to the loss, aside from normalisations over the batch."""
    found = evidence.history.latest("coverage")
    if found is None or found.coupled:
        return
    for reason, names in found.by_reason().items():
        is_meeting = reason.startswith(MEETING)
        if not (is_meeting or any(words in reason for words in UNCERTAIN)):
            continue
        where = tuple(names)
        number = above("parameters without per-sample gradients", len(where), 0)
        is_certain = is_meeting and BETWEEN in reason
        yield Sign(
            int(evidence.loss.steps[0]) if evidence.loss.steps.size else 0,
            (number,),
            "very likely" if is_certain else "consistent with",
            is_stuck(evidence),
            where,
            title="" if is_meeting else "It isn't certain which rows belong to which sample",
        )
        return


SAME = 1e-3
"""The standard deviation of the outputs over the samples, or that over the targets' if these have a
smaller one than 1. Networks of the usual initialisations have 0.1 to 1."""
RECORDS = 3
"""Records at the end, at all of which outputs are the same."""
SMALLEST = 4
"""Samples of a batch; of smaller ones, nothing is said."""


def constant(evidence: Evidence) -> Iterator[Sign]:
    """The same output for every input, at the end of a run that learns nothing."""
    words = "spread of the directions of the vectors"
    for sign in ends_below(evidence, evidence.column("direction_spread"), ONE_DIRECTION, words):
        yield replace(sign, title=DIRECTION, advice=APART)
    variance = evidence.typical("target_variance")
    spreads = evidence.column("output_std") / (math.sqrt(variance) if 0 < variance < 1 else 1)
    if evidence.typical("samples") >= SMALLEST and is_stuck(evidence):
        words = "spread of the outputs over the samples"
        for sign in ends_below(evidence, spreads, SAME, words):
            yield replace(sign, certainty="very likely")


ONE_DIRECTION = 0.02
"""How far the directions of a loss's vectors are apart, from 0 to 1."""


def ends_below(evidence: Evidence, values: Floats, limit: float, words: str) -> Iterator[Sign]:
    """A sign if the last records ``[K]`` are all below a limit, in a run that is long enough.

    Its step is the one from which on they are.
    """
    known = np.isfinite(values)
    steps, values = evidence.steps[known], values[known]
    most = largest(values[-RECORDS:])
    if len(values) > RECORDS and evidence.length >= LONG_ENOUGH and most < limit:
        since = np.flatnonzero(np.append(True, values >= limit))[-1]
        yield Sign(int(steps[since]), (below(words, most, limit),))


DIRECTION = "The vectors of all samples point in the same direction"
APART = (
    "Keep samples apart: by negative pairs, by a predictor and a target without gradient, or by "
    "terms for variance and covariance. Without these, one direction for all is the best solution."
)

NATS = 0.05
"""What a code says of its sample at most, in nats (of which a bit has 0.7): measured 1 and more in
healthy autoencoders."""


def collapsed(evidence: Evidence) -> Iterator[Sign]:
    """A code that is drawn from nearly the same distribution for each sample."""
    words = "nats that the code says of its sample at most"
    return ends_below(evidence, evidence.column("code_nats"), NATS, words)


RULES = (
    Rule("samples_mixed", "Samples of the batch meet on their way to the loss",
         needs=(COVERAGE,), find=mixed, others=("labels_random",), explains=NO_PROGRESS,
         advice="Look at permute, view, reshape and transpose: reshape(n, -1) after a permute "
                "mixes samples, and recurrent layers take [steps, samples, features] unless "
                "batch_first=True. Layers that compare samples on purpose, as in contrastive "
                "learning, are right."),
    Rule("posterior_collapse", "The code of the variational autoencoder says nothing of its sample",
         needs=(CODES,), find=collapsed,
         explains=("constant_output", "no_gradient", "vanishing_gradients", "labels_random"),
         sources=("Bowman et al. (2016), arXiv:1511.06349, Sec. 3.1",),
         advice="Give the divergence a smaller weight, or let it grow from 0 (annealing), and "
                "sum reconstruction errors over the elements of a sample, rather than averaging "
                "them; a decoder that sees its targets, as in a text, needs a code least."),
    Rule("constant_output", "The network has the same output for every input",
         needs=(OUTPUTS,), find=constant,
         others=("lr_too_high", "dead_units", "vanishing_gradients"),
         explains=("label_noise", "labels_random"),
         advice="Compare the outputs of each layer for two inputs: where they become the same, "
                "units are dead, inputs are out of scale, or a rate that was too high has left "
                "only the last bias. Start anew with a lower rate."),
)  # fmt: skip
