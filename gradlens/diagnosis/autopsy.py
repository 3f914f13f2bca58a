"""What a jump of the loss most likely comes from.

The limits were set on spikes above 1.5 times the loss at the start, of one bad sample
in 13 runs, whose share of Σₙ‖gₙ‖² was 0.999 or more, and of a bad batch in 12, of which it was 0.06
to 0.49.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gradlens.history.finding import Certainty
from gradlens.history.spikes import NEVER, SampleId, Spike, Suspect

Cause: TypeAlias = Literal[
    "input", "target", "weights", "forward", "backward", "sample", "batch", "rate", "unknown"
]

OF_START = 1.5
"""Over the loss at the start: below, late steps of healthy runs look the same."""
ONE_SAMPLE = 0.8
"""Least share of Σₙ‖gₙ‖² from which on it is one sample."""
EVEN = 0.5
"""Largest share up to which it is the batch."""
FEW = 4
"""In a batch of fewer samples, one of them always has a large share."""
ODD_ROW = 10.0
"""Times the median row's root mean square, or its inverse, from which on a row is odd. Healthy rows
have 1 to 2.4."""
RAISED = 1.5
"""Times the rate before, from which on the rate was raised."""
UNSTABLE = 1.2
"""Times the threshold, from which on the sharpness is above it."""
SOON = 3
"""Steps after which the loss is back if the weights were hardly changed."""


@dataclass(frozen=True)
class Conclusion:
    """The ``cause`` of a spike, how certain it is, and why, in a sentence each.

    ``samples`` are the ids of those that it is about, or their places in the batch, and ``where``
    the layer.
    """

    cause: Cause
    certainty: Certainty
    text: str
    samples: tuple[SampleId, ...] = ()
    where: str = ""


def autopsy(spike: Spike) -> Conclusion:
    """What a spike most likely comes from."""
    return _of_jump(spike) if spike.is_finite else _of_broken(spike)


def is_large(spike: Spike) -> bool:
    """Whether the loss is far above that at the start of the run."""
    return spike.loss > OF_START * spike.start


def oddities(suspect: Suspect) -> Iterator[str]:
    """What is odd about a sample's input and target, in words."""
    for what, ratio in (("input", suspect.input_ratio), ("target", suspect.target_ratio)):
        if (what == "input" and _is_odd(ratio)) or ratio > ODD_ROW:
            yield f"its {what} is {ratio:.3g} times as large as that of the median sample"


def at_positions(suspect: Suspect) -> str:
    """Where most of a sample's loss is, if that is at few of its positions."""
    share = sum(each.share for each in suspect.positions)
    if not share > EVEN:
        return ""
    places = ", ".join(f"{each.index} (label {each.target})" for each in suspect.positions)
    return f", {share:.0%} of whose loss is at positions {places}"


def _is_odd(ratio: float) -> bool:
    return ratio > ODD_ROW or ratio < 1 / ODD_ROW


def _of_broken(spike: Spike) -> Conclusion:
    samples = tuple(each.name for each in spike.suspects)
    named = _named(spike.suspects)
    bad = "a NaN or an infinity"
    cause: Cause = "forward" if spike.origin == "jump" else spike.origin
    if cause in ("input", "target"):
        what = "what the model was called with" if cause == "input" else "the target"
        text = f"There is {bad} in {what}, in {named or 'all samples'}."
    elif cause == "weights":
        text = f"The weights of {spike.place} have {bad} already when the step begins: an update "
        text += "before it has broken them."
    elif cause == "backward":
        text = f"The loss is finite, and gradients have {bad}: the backward pass has made it, at "
        text += f"{spike.place} or between there and the loss."
        text += f" Operations whose derivative may be infinite: {spike.hint}." if spike.hint else ""
        why = spike.without_norms or "all have one"
        text += "" if samples else f" The sample isn't known: {why}."
    else:
        place = f"first at {spike.place}" if spike.place else "in an operation that saves nothing"
        places = ", in ".join(filter(None, (place, spike.hint, named)))
        text = f"The weights and the inputs are finite, and the forward pass has made {bad} of "
        text += f"them, {places}."
    return Conclusion(cause, "fact", text, () if cause == "weights" else samples, spike.place)


def _of_jump(spike: Spike) -> Conclusion:
    if not spike.suspects or math.isnan(spike.suspects[0].share):
        return _without_shares(spike)
    worst = spike.suspects[0]
    odd = [each for each in spike.suspects if any(oddities(each))]
    if len(odd) > 1 and sum(each.share for each in odd) > EVEN and spike.samples > 2 * len(odd):
        text = f"{_named(odd).capitalize()} have {sum(s.share for s in odd):.1%} of the squared "
        text += f"gradient norms, and odd inputs or targets: of the first, {next(oddities(odd[0]))}"
        names = tuple(each.name for each in odd)
        return Conclusion("sample", "very likely", f"{text}.", names)
    if worst.share > EVEN and spike.samples >= FEW:
        return _of_sample(spike, worst)
    return _of_rate(spike) or _of_batch(spike)


def _of_sample(spike: Spike, worst: Suspect) -> Conclusion:
    odd = [*oddities(worst)]
    certain = worst.share > ONE_SAMPLE and (is_large(spike) or bool(odd))
    text = f"Sample {_shown(worst.name)} has {worst.share:.1%} of the squared gradient norms"
    if odd:
        text += f", and {' and '.join(odd)}"
    text += at_positions(worst)
    if certain:
        text = f"{text}: look at it.{_without(worst)}"
        return Conclusion("sample", "very likely", text, (worst.name,))
    why = (
        "other samples have a part in it"
        if worst.share <= ONE_SAMPLE
        else "the loss has not jumped far, and late in healthy runs a hard sample has as much"
    )
    return Conclusion(
        "sample", "consistent with", f"{text}; {why}.{_without(worst)}", (worst.name,)
    )


def _without(worst: Suspect) -> str:
    """What the step would have been without a sample, in a sentence."""
    found = [
        f"{what} would have been {value:.2g}{unit}"
        for what, value, unit in (
            ("the mean loss", worst.loss_without, ""),
            ("the norm of the mean gradient", worst.norm_without, " times as large"),
        )
        if not math.isnan(value)
    ]
    return f" Without it, {' and '.join(found)}." if found else ""


def _of_rate(spike: Spike) -> Conclusion | None:
    signs = [*rate_signs(spike)]
    if not signs or any(_is_odd(each.input_ratio) for each in spike.suspects):
        return None
    certain = len(signs) > 1 and is_large(spike)
    certainty: Certainty = "very likely" if certain else "consistent with"
    text = f"No sample stands out, and {' and '.join(signs)}: a smaller rate avoids this."
    return Conclusion("rate", certainty, text)


def rate_signs(spike: Spike) -> Iterator[str]:
    """What speaks for the learning rate, in words."""
    if spike.rate > RAISED * spike.rate_before:
        yield (
            f"the learning rate was raised from {spike.rate_before:.3g} to {spike.rate:.3g} just "
            "before"
        )
    if spike.sharpness > UNSTABLE * spike.threshold:
        yield (
            f"the sharpness was {spike.sharpness:.3g} at step {spike.sharpness_step}, above the "
            f"{spike.threshold:.3g} that this rate is stable with"
        )


def _of_batch(spike: Spike) -> Conclusion:
    worst = spike.suspects[0]
    if spike.samples < FEW:
        text = f"The batch has {spike.samples} samples, of which one always has a large share."
        return Conclusion("unknown", "consistent with", text)
    text = f"No sample stands out: the largest has {worst.share:.1%} of the squared gradient norms"
    soon = spike.back is not None and 0 <= spike.back <= SOON
    if is_large(spike) and soon:
        text += ", and the loss was back at once: look at this batch as a whole."
        return Conclusion("batch", "very likely", text)
    if spike.back == NEVER:
        text += (
            ", and the loss was not back: weights that were spoiled, as by too high a learning "
            "rate, look like this, as does a change of the data."
        )
        return Conclusion("rate", "consistent with", text)
    text += ": this may be the batch as a whole, or the learning rate."
    return Conclusion("batch", "consistent with", text)


def _without_shares(spike: Spike) -> Conclusion:
    why = spike.without_norms or "nothing is known of them"
    if spike.suspects and spike.suspects[0].loss_share > ONE_SAMPLE and spike.samples >= FEW:
        worst = spike.suspects[0]
        text = f"Sample {_shown(worst.name)} has {worst.loss_share:.1%} of the loss"
        odd = [*oddities(worst)]
        text = ", and ".join([text, *odd]) + "."
        certainty: Certainty = "very likely" if odd and is_large(spike) else "consistent with"
        return Conclusion("sample", certainty, text, (worst.name,))
    text = f"The samples' gradients are unknown: {why}."
    return Conclusion("unknown", "consistent with", text)


def _named(suspects: Sequence[Suspect]) -> str:
    names = [_shown(each.name) for each in suspects]
    return f"sample{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else ""


def _shown(name: SampleId) -> str:
    return str(name) if isinstance(name, int) else repr(name)
