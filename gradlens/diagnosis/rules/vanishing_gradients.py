"""Gradients that become smaller from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import GRADIENTS
from gradlens.diagnosis.numbers import largest, median, ratio
from gradlens.diagnosis.rule import NO_PROGRESS, Rule, Sign, below
from gradlens.diagnosis.rules.initial_weights import gains

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


def find(evidence: Evidence) -> Iterator[Sign]:
    yield from tuple(_of_gradients(evidence)) or of_weights(evidence)


def of_weights(evidence: Evidence) -> Iterator[Sign]:
    """Signs of weights that are so small at the start that biases alone learn."""
    # The gradients of the last weights don't go through others.
    others = {*evidence.weights[:-1]}
    small = {n: gain for n, gain in gains(evidence).items() if n in others and 0 < gain < GAIN}
    signal = math.nan if evidence.is_normalised else _signal(evidence)
    if len(small) >= LAYERS and (is_stuck(evidence) or signal < SIGNAL):
        numbers = [below("rms(W) x root of fan-in, at the start", max(small.values()), GAIN)]
        if signal < SIGNAL:
            numbers.append(
                below("gradients of weights at the start, over those of biases", signal, SIGNAL)
            )
        title = "Weights are so small at the start that signals and gradients vanish"
        step = int(evidence.loss.steps[0])
        yield Sign(step, tuple(numbers), "very likely", where=tuple(small), title=title)


def _signal(evidence: Evidence) -> float:
    """The largest gradient of a weight over the largest of a bias, at the start; NaN if unknown."""
    gradients = evidence.by_name("gradient_rms")
    weights = tuple(name for name in evidence.trained if name in gradients.values)
    biases = tuple(name for name in gradients.values if name.endswith("bias"))
    if not weights or not biases or not len(gradients.steps):
        return math.nan
    of_weights, of_biases = (largest(gradients.matrix(n)[:, 0]) for n in (weights, biases))
    return of_weights / of_biases if of_biases > 0 else math.nan


def _of_gradients(evidence: Evidence) -> Iterator[Sign]:
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
        value = min(shrunk.values())
        numbers = (below("gradient of a weight, over the largest of all", value, SMALLEST),)
        with np.errstate(invalid="ignore"):
            is_small = (shares[: len(shrunk)] < SMALLEST).all(axis=0)
        step = int(gradients.steps[is_small][0]) if is_small.any() else int(gradients.steps[-1])
        advice = _advice(evidence)
        yield Sign(step, numbers, "very likely", where=tuple(shrunk), advice=advice)


def _advice(evidence: Evidence) -> str:
    kinds = sorted({"tanh", "sigmoid"} & {*evidence.setup.activations.values()})
    return f"Activations are {' and '.join(kinds)}. {ADVICE}" if kinds else ""


ADVICE = (
    "Use ReLU or GELU, residual connections, normalisation, or an initialisation that keeps the "
    "size of gradients."
)

RULE = Rule(
    fault="vanishing_gradients",
    title="Gradients vanish towards the input",
    needs=(GRADIENTS,),
    find=find,
    advice=ADVICE,
    others=("precision_underflow", "saturated_units"),
    explains=NO_PROGRESS,
    sources=("Glorot and Bengio (2010)",),
)
