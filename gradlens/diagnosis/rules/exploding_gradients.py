"""Weights that are so large at the start that each layer magnifies what it gets."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.gains import gains
from gradlens.diagnosis.needs import WEIGHTS
from gradlens.diagnosis.numbers import largest
from gradlens.diagnosis.rule import INSTABILITY, NO_PROGRESS, Rule, Sign, above

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


def find(evidence: Evidence) -> Iterator[Sign]:
    found = gains(evidence)
    where = tuple(name for name, gain in found.items() if gain > GAIN)
    loss = evidence.first_loss / evidence.chance
    saturated = _saturated(evidence)
    is_good = not evidence.typical("input_rms") > GOOD_INPUTS
    is_classified = evidence.typical("classes") > 1 and not largest([*found.values()]) < USUAL
    if loss < PRETRAINED or not (where or (is_good and is_classified and loss > LOSS)):
        return
    numbers = [above("rms(W) x root of fan-in", largest([*found.values()]), GAIN)] if where else []
    numbers += [above("first loss, over that by chance", loss, LOSS)] if loss > LOSS else []
    if where and saturated > SATURATED:
        numbers.append(above("outputs of a tanh or sigmoid near its ends", saturated, SATURATED))
    repeats = any(_is_repeated(name) for name in where)
    is_extreme = largest([*found.values()]) > HUGE or saturated > SATURATED
    has_several = len(where) > 1 and not evidence.is_normalised
    is_alarm = loss > RISEN or repeats or is_extreme or has_several
    step = int(evidence.by_name("weight_rms").steps[0])
    yield Sign(step, tuple(numbers), "very likely", is_alarm, where)


def _saturated(evidence: Evidence) -> float:
    """The largest share of a layer's outputs that are saturated at the start; NaN if unknown."""
    return largest([shares[0] for shares in evidence.by_name("saturated").values.values()])


def _is_repeated(name: str) -> bool:
    """Whether a recurrent layer applies the weight once for each step of a sequence."""
    return name.rpartition(".")[2].startswith("weight_hh")


RULE = Rule(
    fault="exploding_gradients",
    title="Weights are large at the start",
    needs=(WEIGHTS,),
    find=find,
    advice="Use He, Glorot or orthogonal initialisation, which keep the size of activations and "
    "gradients from layer to layer; clip gradients in recurrent networks.",
    others=("input_scale", "lr_too_high"),
    explains=(*INSTABILITY, *NO_PROGRESS),
    sources=("Glorot and Bengio (2010)", "He et al. (2015), arXiv:1502.01852"),
)
