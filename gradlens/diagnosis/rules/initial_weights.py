"""Weights at the start: units that are all the same, and layers that magnify what they get."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import ROW_SPREAD, WEIGHTS
from gradlens.diagnosis.numbers import largest, median
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above, below, beyond
from gradlens.diagnosis.rules.unchanged import changes

SPREAD = 1e-3
"""The spread of a weight's rows over its size: measured 0.7 and more in healthy runs, and 0 in
faulty ones."""
STEPS = 10
"""Last layers and residual branches may be zero at the start, but not after some updates. Weights
that aren't zero have different rows at the start, too."""


def symmetric(evidence: Evidence) -> Iterator[Sign]:
    spreads, sizes = evidence.by_name("row_spread"), evidence.by_name("weight_rms")
    names = tuple(n for n in evidence.trained if n in spreads.values)
    if not names or not any(changes(evidence, name) for name in sizes.values):
        return
    table = spreads.matrix(names)
    if sizes.steps.shape == spreads.steps.shape:
        # Of a weight that is zero, the spread is 0/0.
        table = np.where(sizes.matrix(names) == 0, 0.0, table)
    late = spreads.steps >= spreads.steps[0] + STEPS
    if not late.any():
        return
    later = np.asarray((table[:, late] < SPREAD).all(axis=1))
    # Noise such as dropout may part equal units slowly.
    has_units = np.array([_has_units(evidence, name) for name in names])
    first = np.asarray(spreads.matrix(names)[:, 0] < SPREAD) & has_units
    where = tuple(name for name, is_equal in zip(names, later | first, strict=True) if is_equal)
    if where:
        spread = largest(table[later][:, late]) if later.any() else largest(table[first][:, 0])
        numbers = (below("spread of rows, over the weight's size", spread, SPREAD),)
        yield Sign(int(spreads.steps[0]), numbers, where=where)


def _has_units(evidence: Evidence, name: str) -> bool:
    """Whether its rows are those of units whose gradients are as equal as they are.

    Those of the last layer's units aren't, nor are those of units with inputs of their own, as of
    depthwise convolutions. Parameters of other kinds may begin as equals.
    """
    inputs = evidence.history.parameters.get(name, (0, 0))[1]
    return is_weight(name) and inputs > 1 and name != evidence.weights[-1]


def gains(evidence: Evidence) -> dict[str, float]:
    """rms(W)·√fan-in of each weight that is used as it is, if the first step was recorded.

    PyTorch's defaults have 0.58 to 0.71, and He's initialisation has 1.41. Parameters of other
    names, such as tables of positions, are added to what flows through the network, and the input
    weights of recurrent layers are drawn by the number of hidden units rather than of inputs.
    """
    sizes = evidence.by_name("weight_rms")
    shapes = evidence.history.parameters
    found = {}
    if sizes.steps[:1].tolist() == [evidence.start_step]:
        for name in evidence.weights:
            is_input = name.rpartition(".")[2].startswith("weight_ih")
            is_used = is_weight(name) and not is_input and name not in evidence.setup.transformed
            layer = evidence.layer_of(name)
            fan_in = (layer.fan_in if layer is not None else 0) or math.prod(shapes[name][1:])
            if is_used and name in sizes.values:
                found[name] = float(sizes.values[name][0]) * math.sqrt(fan_in)
    return found


def is_weight(name: str) -> bool:
    """Whether a parameter has the name of one that inputs are multiplied with."""
    return "weight" in name.rpartition(".")[2]


GAIN = 2.5
"""rms(W)·√fan-in at the start: measured 0.58 to 0.71 (PyTorch's defaults) and 1.41 (He) in healthy
runs, and 2.3 to 7 in faulty ones."""
USUAL = 1.5
"""The gain of He's initialisation is below. If no weight's is above, the first loss is large for
another reason, such as targets out of range."""
LOSS = 3.0
"""The first loss over log C."""
RISEN = 1.5
"""The first loss over chance, which a large gain alone needs besides to be an alarm where layers
are normalised."""
PRETRAINED = 0.9
"""The first loss over chance, of a network that has been trained before."""
HUGE = 8.0
"""The gain of a single weight that is an alarm by itself: five times that of He."""
SATURATED = 0.5
"""Share of the outputs of a tanh or sigmoid at the start, which large weights saturate."""
GOOD_INPUTS = 5.0
"""The inputs' rms; of larger ones, the first loss is no sign of weights."""


def explodes(evidence: Evidence) -> Iterator[Sign]:
    found = gains(evidence)
    where = tuple(name for name, gain in found.items() if gain > GAIN)
    start, most = evidence.first_loss, largest([*found.values()])
    loss = start / evidence.chance
    saturated = largest([s[0] for s in evidence.by_name("saturated").values.values()])
    is_good = not median(evidence.of_data("rms")) > GOOD_INPUTS
    # A first error may also be large since the targets are.
    is_of_outputs = evidence.typical("classes") > 1 or start > LOSS * evidence.target_square
    is_large = is_good and most > USUAL and is_of_outputs and loss > LOSS
    if loss < PRETRAINED or not (where or is_large):
        return
    numbers = beyond(
        above("rms(W) x root of fan-in", most, GAIN),
        above("first loss, over that by chance", loss, LOSS),
        above("outputs of a tanh or sigmoid near its ends", saturated, SATURATED),
    )
    # A recurrent layer applies such a weight once for each step of a sequence.
    repeats = any(name.rpartition(".")[2].startswith("weight_hh") for name in where)
    has_several = len(where) > 1 and not evidence.is_normalised
    is_alarm = loss > RISEN or repeats or most > HUGE or saturated > SATURATED or has_several
    step = int(evidence.by_name("weight_rms").steps[0])
    yield Sign(step, numbers if where else numbers[:1], "very likely", is_alarm, where)


RULES = (
    Rule("symmetric_init", "All units of a layer have the same weights",
         needs=(ROW_SPREAD,), find=symmetric,
         explains=("no_gradient", "saturated_units", "dead_units", *NO_PROGRESS),
         advice="Draw the weights at random: units that begin as equals have equal gradients, "
                "and stay equal."),
    Rule("exploding_gradients", "Weights are large at the start",
         needs=(WEIGHTS,), find=explodes, others=("input_scale", "lr_too_high"),
         explains=("target_scale", *INSTABILITY, *NO_PROGRESS),
         sources=("Glorot and Bengio (2010)", "He et al. (2015), arXiv:1502.01852"),
         advice="Use He, Glorot or orthogonal initialisation, which keep the size of activations "
                "and gradients from layer to layer; clip gradients in recurrent networks."),
)  # fmt: skip
