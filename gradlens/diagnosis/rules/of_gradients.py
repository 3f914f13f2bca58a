"""Gradients that become too small: layer by layer, in float16, by clipping, or without samples."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import AT_STEP, GRADIENTS, SETUP, ZEROS
from gradlens.diagnosis.numbers import finite, largest, median, ratio, share
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, above, below, beyond
from gradlens.diagnosis.rules.initial_weights import gains
from gradlens.history.lines import Floats

# Layer by layer -------------------------------------------------------------------------------

SMALLEST = 3e-4
"""Gradient rms of a weight over the largest of all: measured 0.07 and more in healthy runs, and at
most 4e-7 in faulty ones. (Their geometric mean is 2e-4.)"""
LAYERS = 2
"""Weights, from the input on: single weights may have small gradients, as those of queries and
keys."""
GAIN = 0.15
"""rms(W)·√fan-in at the start: 0.58 and more in healthy runs, but for initialisations that make up
for it elsewhere (0.1, as of sines and embeddings)."""
SIGNAL = 0.2
"""The largest gradient of a weight over that of a bias, at the start, which is about the size of
what the weight is multiplied with: measured 0.6 in healthy runs whose weights are that small, as
those of sines, and at most 0.06 in faulty ones, in which biases alone learn at first."""


def vanish(evidence: Evidence) -> Iterator[Sign]:
    yield from tuple(_shrinking(evidence)) or begins_small(evidence)


def begins_small(evidence: Evidence) -> Iterator[Sign]:
    """Signs of weights that are so small at the start that biases alone learn."""
    # The gradients of the last weights don't go through others.
    others = {*evidence.weights[:-1]}
    small = {n: gain for n, gain in gains(evidence).items() if n in others and 0 < gain < GAIN}
    signal = math.nan if evidence.is_normalised else _signal(evidence)
    if len(small) >= LAYERS and (is_stuck(evidence) or signal < SIGNAL):
        numbers = beyond(
            below("rms(W) x root of fan-in, at the start", max(small.values()), GAIN),
            below("gradients of weights at the start, over those of biases", signal, SIGNAL),
        )
        where = tuple(small)
        yield Sign(evidence.start_step, numbers, "very likely", where=where, title=TOO_SMALL)


TOO_SMALL = "Weights are so small at the start that signals and gradients vanish"


def _signal(evidence: Evidence) -> float:
    """The largest gradient of a weight over the largest of a bias, at the start; NaN if unknown."""
    gradients = evidence.by_name("gradient_rms")
    biases = tuple(name for name in gradients.values if name.endswith("bias"))
    of_weights, of_biases = (
        largest(gradients.matrix(names)[:, :1]) for names in (evidence.trained, biases)
    )
    return of_weights / of_biases if of_biases > 0 else math.nan


def _shrinking(evidence: Evidence) -> Iterator[Sign]:
    gradients = evidence.by_name("gradient_rms")
    names = tuple(n for n in evidence.trained if n in gradients.values)
    if len(names) <= LAYERS or not len(gradients.steps):
        return
    sizes = gradients.matrix(names)
    most = np.nan_to_num(sizes, posinf=0.0).max(axis=0)
    shares = ratio(sizes, np.broadcast_to(most, sizes.shape))
    found = [median(row) for row in shares]
    shrunk = dict(takewhile(lambda each: each[1] < SMALLEST, zip(names, found, strict=True)))
    layers = {name.rpartition(".")[0] for name in shrunk}
    if len(layers) >= LAYERS and min(shrunk.values()) > 0:
        name = "gradient of a weight, over the largest of all"
        numbers = (below(name, min(shrunk.values()), SMALLEST),)
        is_small = (shares[: len(shrunk)] < SMALLEST).all(axis=0)
        step = int(gradients.steps[is_small][0] if is_small.any() else gradients.steps[-1])
        kinds = sorted({"tanh", "sigmoid"} & {*evidence.setup.activations.values()})
        advice = f"Activations are {' and '.join(kinds)}. {KEEP_SIZE}" if kinds else ""
        yield Sign(step, numbers, "very likely", where=tuple(shrunk), advice=advice)


KEEP_SIZE = (
    "Use ReLU or GELU, residual connections, normalisation, or an initialisation that keeps the "
    "size of gradients."
)

# In float16 -----------------------------------------------------------------------------------

HALF_ZEROS = 0.1
"""Exact zeros of a weight's gradient, in float16 without a scaler: measured 0.1 and more."""
LEARNT = 0.5
"""The late loss over that without learning, of a network that learns in spite of them."""
ZEROS_ANYWAY = 0.9
"""Exact zeros in other cases: measured at most 0.33 in healthy runs with ReLU."""
DEAD = 0.5
"""Share of dead units in a layer, which make zeros by themselves."""


def underflow(evidence: Evidence) -> Iterator[Sign]:
    step = evidence.since(lambda setup: setup.half and not setup.scaler)
    zeros = evidence.by_name("zero_gradients")
    shares = {n: median(zeros.values[n]) for n in evidence.trained if n in zeros.values}
    limit = ZEROS_ANYWAY if step is None else HALF_ZEROS
    where = tuple(name for name, found in shares.items() if found > limit)
    most = above("exact zeros of a weight's gradient", largest([*shares.values()]), limit)
    dead = largest([median(each) for each in evidence.by_name("dead").values.values()])
    is_half = evidence.setup.half or "float16" in evidence.setup.dtypes
    if step is not None:
        is_alarm = bool(where) and not evidence.progress < LEARNT
        yield Sign(step, (most,) if where else (), is_alarm=is_alarm, where=where)
    elif where and is_half and not dead > DEAD:
        yield Sign(int(zeros.steps[0]), (most,), "very likely", where=where)


# By clipping ----------------------------------------------------------------------------------

KEPT = 0.1
"""The gradient's norm at the step over that after backward: measured 1 in healthy runs, and at most
0.005 in faulty ones."""
SHARE = 0.9
"""Share of the steps at which gradients are clipped so much."""
FEWEST = 10
"""Steps; with fewer, nothing is said, because the first gradients may be larger than later ones."""
VARIES = 1e-3
"""Relative range of what is kept. A constant factor is a change of units, as a scaler's, and no
clipping."""
FEW_NORMS = 4
"""Distinct norms at the steps, but for the scaler's changes, of gradients that are clipped while
they are scaled."""


def clipped(evidence: Evidence) -> Iterator[Sign]:
    norms = evidence.column("grad_norm_at_step")
    kept = ratio(norms, evidence.column("grad_norm"))
    known = np.isfinite(kept)
    if known.sum() < FEWEST or not share(kept < KEPT, known) > SHARE:
        return
    low, high = np.quantile(kept[known], (0.1, 0.9))
    if not high - low > VARIES * high:
        return
    number = below("share of the gradient's norm that is kept", median(kept), KEPT)
    sign = Sign(evidence.step(known), (number,))
    if evidence.setup.scaler and len(np.unique(np.log2(finite(norms)).round(1))) <= FEW_NORMS:
        sign = replace(sign, title=SCALED, advice=UNSCALE)
    elif evidence.is_adaptive:
        sign = replace(sign, is_alarm=False, advice=HARMLESS)
    yield sign


SCALED = "Gradients are clipped before the scaler has unscaled them"
UNSCALE = (
    "Call scaler.unscale_(optimizer) before clip_grad_norm_: otherwise, the limit is compared with "
    "gradients that are thousands of times as large as they are."
)
HARMLESS = (
    "Adam and its like hardly depend on the scale of gradients, so that this has little effect "
    "but that all gradients count the same; clip at a larger norm to have single ones clipped."
)

# Without samples ------------------------------------------------------------------------------

NAME = re.compile(r"(.*experts?.*?)\.(\d+)\.(.*)")
"""The name of an expert's parameter: the list of experts, the number of this one, and the rest."""
RARE, OFTEN = 1e-3, 0.5
"""An expert's gradient over the median of those in use at the same step, and at how many of the
steps after the first fifth of the run it is so small."""
OF_ALL = 0.01
"""The root mean square of all of these gradients, over that of those in use: measured 0.002 where
an expert has got its first few samples late in the run. One that is used rarely has gradients of
the others' size at some steps, and 0.03 or more in all."""
FIRST, RECORDS, OTHERS = 0.2, 5, 2
"""The first part of the run, which isn't looked at; and recorded gradients of each expert, and
other experts: with fewer, nothing is said."""


def without_samples(evidence: Evidence) -> Iterator[Sign]:
    gradients = evidence.by_name("gradient_rms")
    if not len(gradients.steps):
        return
    later = gradients.steps > gradients.steps[0] + FIRST * np.ptp(gradients.steps)
    if later.sum() < RECORDS:
        return
    siblings: dict[tuple[str, str], list[str]] = {}
    for match in filter(None, map(NAME.fullmatch, gradients.values)):
        siblings.setdefault((match[1], match[3]), []).append(match[0])
    unused: dict[str, float] = {}
    for experts in siblings.values():
        if len(experts) > OTHERS:
            unused |= _unused(experts, np.nan_to_num(gradients.matrix(tuple(experts))[:, later]))
    where = tuple(dict.fromkeys(name.rpartition(".")[0] for name in unused))
    if where:
        name = "gradients of an expert, over those of the others"
        numbers = (below(name, max(unused.values()), OF_ALL),)
        yield Sign(int(gradients.steps[later][0]), numbers, "very likely", where=where)


def _unused(experts: Sequence[str], table: Floats) -> dict[str, float]:
    """The gradients of unused experts over those of the ones in use; ``table`` is by expert."""
    sizes = np.sqrt((table**2).mean(axis=1))
    in_use = sizes > OF_ALL * sizes.max()
    if not in_use.any():
        return {}
    shares = sizes / np.median(sizes[in_use])
    is_rare = (table <= RARE * np.median(table[in_use], axis=0)).mean(axis=1) >= OFTEN
    unused = np.flatnonzero(is_rare & (shares < OF_ALL)).tolist()
    return {experts[n]: float(shares[n]) for n in unused}


RULES = (
    Rule("precision_underflow", "float16 is used without a gradient scaler",
         needs=(SETUP, ZEROS), find=underflow, others=("vanishing_gradients", "dead_units"),
         explains=("nonfinite_loss", "nonfinite_gradient", "nonfinite_weights", "overfitting",
                   *NO_PROGRESS),
         advice="Scale the loss with torch.amp.GradScaler, and pass it to the context by "
                "scaler=scaler; or use bfloat16, which has the range of float32."),
    Rule("clipping_always",
         "Gradients are clipped to a small part of their norm at almost every step",
         needs=(AT_STEP,), find=clipped, others=("lr_too_low",),
         explains=("lr_too_low", "labels_random"),
         advice="Clip at a larger norm, or find out why gradients are large: with this clipping, "
                "the learning rate is effectively many times lower than it was set to."),
    Rule("vanishing_gradients", "Gradients vanish towards the input",
         needs=(GRADIENTS,), find=vanish, others=("precision_underflow", "saturated_units"),
         explains=NO_PROGRESS, sources=("Glorot and Bengio (2010)",),
         advice=KEEP_SIZE),
    Rule("expert_unused", "Experts are not used",
         needs=(GRADIENTS,), find=without_samples,
         sources=("Shazeer et al. (2017), arXiv:1701.06538, Sec. 4",),
         advice="Add a loss that balances the experts, or noise to the gate: an expert that no "
                "sample is sent to has no gradient, and stays unused."),
)  # fmt: skip
