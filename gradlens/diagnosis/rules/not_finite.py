"""Numbers that are NaN or infinite: where the first one of a run came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gradlens.diagnosis.autopsy import autopsy
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import BAD_ROWS, LOSS
from gradlens.diagnosis.numbers import first
from gradlens.diagnosis.rule import Rule, Sign, above
from gradlens.history.spikes import Origin, Spike


def inputs(evidence: Evidence) -> Iterator[Sign]:
    """Of the inputs, all are looked at, whether the loss shows it or not."""
    bad = evidence.column("bad_rows")
    place = first(bad > 0)
    if place is None:
        yield from of_origin("input")(evidence)
        return
    numbers = (
        above("samples with a NaN or infinite input, in this batch", bad[place], 0),
        above("steps with such samples", (bad > 0).sum(), 0),
    )
    step = int(evidence.steps[place])
    spike = evidence.history.spikes.get(step)
    named = autopsy(spike).samples if spike is not None and spike.origin == "input" else ()
    samples = tuple(map(str, named)) or evidence.sample(step, evidence.column("bad_row")[place])
    where = _part(spike)
    # A model may know what is missing, and replace it.
    does_harm = not evidence.loss.finite[
        np.isin(evidence.loss.steps, evidence.steps[bad > 0])
    ].all()
    yield Sign(step, numbers, is_alarm=does_harm, where=where, samples=samples)


def of_origin(origin: Origin) -> Callable[[Evidence], Iterator[Sign]]:
    """Finds the first step at which numbers of this origin weren't finite, by its autopsy."""

    def find(evidence: Evidence) -> Iterator[Sign]:
        spikes = evidence.history.spikes
        steps = [step for step in sorted(spikes) if spikes[step].origin == origin]
        if steps:
            spike = spikes[steps[0]]
            found = autopsy(spike)
            places = (spike.place,) if spike.place else ()
            yield Sign(
                steps[0],
                (above("steps at which this began", len(steps), 0),),
                where=(*places, *_part(spike)),
                samples=tuple(map(str, found.samples)),
                advice=f"{found.text} {ADVICE[origin]}",
            )

    return find


def _part(spike: Spike | None) -> tuple[str, ...]:
    return (f"micro-batch {spike.part}",) if spike is not None and spike.part else ()


def losses(evidence: Evidence) -> Iterator[Sign]:
    """Losses that aren't finite, also where nothing has looked for the origin."""
    yield from of_origin("forward")(evidence)
    spikes = evidence.history.spikes.values()
    if (evidence.column("bad_rows") > 0).any() or not all(each.is_finite for each in spikes):
        return  # the origin is known
    values = evidence.loss.values
    # A loss that was passed as NaN, since it isn't known, is one at all steps.
    place = first(~np.isfinite(values))
    if place is not None and np.isfinite(values).any():
        numbers = (above("steps at which the loss isn't finite", (~np.isfinite(values)).sum(), 0),)
        step = int(evidence.loss.steps[place])
        yield Sign(step, numbers, advice=UNKNOWN)


ADVICE = {
    "input": "",
    "target": "Clean or leave out the sample: one such number makes all parameters NaN in one "
    "step.",
    "forward": "Keep the argument of logarithms, roots and divisions away from 0, as by "
    "clamp(min=1e-6), and take no mean of an empty selection; leave out what isn't finite before "
    "the backward pass.",
    "backward": "Keep the argument of roots and logarithms away from 0, as by sqrt(x + 1e-8), "
    "also where torch.where leaves the result out: 0 times an infinite derivative is NaN.",
    "weights": "Look at the step before: a learning rate that is too high, an optimizer whose eps "
    "is 0 in float16, or a gradient that wasn't finite.",
}
UNKNOWN = (
    "Pass autopsy=True to the cockpit, so that it looks for the first layer and sample with such "
    "a number at that step."
)
CONSEQUENCES = (
    "nonfinite_weights",
    "precision_underflow",
    "dead_units",
    "lr_too_high",
    "lr_edge",
    "labels_random",
)

RULES = (
    Rule("nonfinite_input", "A sample has a NaN or infinite input",
         needs=(BAD_ROWS,), find=inputs,
         explains=("nonfinite_loss", "nonfinite_gradient", *CONSEQUENCES),
         advice=ADVICE["target"]),
    Rule("nonfinite_target", "A sample has a NaN or infinite target",
         needs=(LOSS,), find=of_origin("target"),
         explains=("nonfinite_loss", "nonfinite_gradient", *CONSEQUENCES),
         advice=ADVICE["target"]),
    Rule("nonfinite_loss", "A NaN or an infinity first appears in the forward pass",
         needs=(LOSS,), find=losses,
         others=("lr_too_high", "exploding_gradients", "precision_underflow"),
         explains=("nonfinite_gradient", *CONSEQUENCES),
         advice=ADVICE["forward"]),
    Rule("nonfinite_gradient", "The backward pass makes a NaN or an infinity, of a finite loss",
         needs=(LOSS,), find=of_origin("backward"),
         others=("precision_underflow", "exploding_gradients"),
         explains=("nonfinite_loss", *CONSEQUENCES),
         advice=ADVICE["backward"]),
    Rule("nonfinite_weights", "An update has made weights NaN or infinite",
         needs=(LOSS,), find=of_origin("weights"), others=("lr_too_high", "adam_epsilon"),
         explains=("nonfinite_loss", "dead_units", "lr_edge", "labels_random"),
         advice=ADVICE["weights"]),
)  # fmt: skip
