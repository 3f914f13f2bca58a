"""Spikes of the loss, and samples worth a look, as text and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

from gradlens.cli.text import aligned, as_line, in_short, printable
from gradlens.diagnosis.autopsy import autopsy
from gradlens.diagnosis.samples import Ranked, have_losses
from gradlens.history.records import Samples
from gradlens.history.spikes import NEVER, SampleId, Spike
from gradlens.instruments.scales import number_label

LAYERS = 8
"""So many layers are shown, those with the largest ratios."""
LISTED = 40
"""So many of the latest spikes are listed."""


def spikes_text(spikes: Mapping[int, Spike], name: str) -> str:
    """A list of all spikes, and the largest in full."""
    if not spikes:
        return f"{name}: {NONE}"
    count = "1 step" if len(spikes) == 1 else f"{len(spikes)} steps"
    lines = [f"{name}: the loss has jumped, or wasn't finite, at {count}", ""]
    if len(spikes) > LISTED:
        lines.append(f"The latest {LISTED}:")
    rows: list[tuple[str, ...]] = [("step", "loss", "before", "back", "most likely")]
    rows += [_row(step, spikes[step]) for step in sorted(spikes)[-LISTED:]]
    numbers = aligned([row[:-1] for row in rows])
    lines += [f"{each}  {row[-1]}" for each, row in zip(numbers, rows, strict=True)]
    return _joined([*lines, "", *_whole(largest(spikes), spikes)])


def spike_text(spikes: Mapping[int, Spike], step: int, name: str) -> str:
    """One spike in full."""
    return _joined([f"{name}:", *_whole(step, spikes)])


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines))


def spikes_json(spikes: Mapping[int, Spike], name: str) -> str:
    """All spikes with what they most likely come from, as one line of strict JSON."""
    found = [
        {"step": step, **asdict(spike), "conclusion": autopsy(spike)}
        for step, spike in sorted(spikes.items())
    ]
    return as_line({"run": name, "spikes": found})


def largest(spikes: Mapping[int, Spike]) -> int:
    """The step of the first spike that isn't finite, or otherwise of the highest one."""
    broken = [step for step in sorted(spikes) if not spikes[step].is_finite]
    return broken[0] if broken else max(spikes, key=lambda step: spikes[step].jump)


def _row(step: int, spike: Spike) -> tuple[str, ...]:
    found = autopsy(spike)
    about = ", ".join(map(str, found.samples[:3])) or found.where
    words = f"{CAUSES[found.cause]}{f' ({about})' if about else ''}, {found.certainty}"
    before = _number(spike.median)
    return str(step), number_label(spike.loss), before, _back(spike, "not", "?"), words


def _back(spike: Spike, never: str, unknown: str) -> str:
    if spike.back is None:
        return unknown
    return never if spike.back == NEVER else f"after {spike.back}"


def _whole(step: int, spikes: Mapping[int, Spike]) -> Iterator[str]:
    spike = spikes[step]
    found = autopsy(spike)
    yield f"Step {step}{f', micro-batch {spike.part}' if spike.part else ''}: {_height(spike)}"
    yield f"{found.certainty.capitalize()}: {found.text}"
    yield from _again(step, spikes)
    if spike.suspects:
        yield ""
        yield from _table(spike)
    ratios = sorted(spike.ratios.items(), key=lambda each: -each[1])[:LAYERS]
    if ratios:
        words = ", ".join(f"{name} {_number(ratio)}" for name, ratio in ratios)
        yield ""
        yield f"Squared gradient norms over those of the last tracked steps: {words}"
    elif spike.layers:
        yield ""
        yield "Squared gradient norms can't be compared: no tracked step before had some."
    elif spike.is_finite and spike.without_norms:
        yield ""
        yield f"Gradient norms are unknown: {spike.without_norms}."
    if not math.isnan(spike.rate):
        has_changed = not math.isnan(spike.rate_before) and spike.rate != spike.rate_before
        before = f", and {_number(spike.rate_before)} before" if has_changed else ""
        yield f"Learning rate: {_number(spike.rate)}{before}"
    if not math.isnan(spike.sharpness):
        yield (
            f"Largest eigenvalue of the Hessian at step {spike.sharpness_step}: "
            f"{_number(spike.sharpness)}; stable below {_number(spike.threshold)}"
        )


def _height(spike: Spike) -> str:
    loss = f"the loss was {number_label(spike.loss)}"
    if not math.isnan(spike.median):
        loss += f", and the median before it {_number(spike.median)}"
    if spike.is_finite and spike.deviation:
        loss += f" ({_number(spike.jump / spike.deviation)} median absolute deviations lower)"
    if spike.back is None:
        return f"{loss}. Whether it was back isn't known."
    if spike.back == NEVER:
        return f"{loss}. It was not back."
    return f"{loss}. It was back after {spike.back} step{'' if spike.back == 1 else 's'}."


def _again(step: int, spikes: Mapping[int, Spike]) -> Iterator[str]:
    """Samples that have ids and are suspects of other spikes, too."""
    own = {each.id for each in spikes[step].suspects if each.id is not None}
    others: dict[SampleId, list[int]] = {}
    for other in sorted(spikes):
        for each in spikes[other].suspects if other != step else ():
            if each.id is not None and each.id in own:
                others.setdefault(each.id, []).append(other)
    for name, steps in others.items():
        yield f"Sample {name} is among those of step {', '.join(map(str, steps[:5]))}, too."


def _table(spike: Spike) -> Iterator[str]:
    yield from aligned(
        [
            ("sample", "index", "share of squared norms", "loss", "share of loss",
             "input over median", "target over median"),
            *(
                (
                    "" if each.id is None else in_short(str(each.id)),
                    str(each.index),
                    _percent(each.share),
                    _number(each.loss),
                    _percent(each.loss_share),
                    _number(each.input_ratio),
                    _number(each.target_ratio),
                )
                for each in spike.suspects
            ),
        ]
    )  # fmt: skip


def _number(value: float) -> str:
    return "" if math.isnan(value) else number_label(value)


def _percent(share: float) -> str:
    return "" if math.isnan(share) else f"{share:.1%}"


CAUSES: Mapping[str, str] = {
    "input": "NaN in the input",
    "target": "NaN in the target",
    "weights": "NaN in the weights",
    "forward": "NaN from the forward pass",
    "backward": "NaN from the backward pass",
    "sample": "a sample",
    "batch": "the batch",
    "rate": "the learning rate",
    "unknown": "unknown",
}
NONE = (
    "the loss has not jumped at any step. (It is read where loss=... is passed to the context, on "
    "the CPU, or with Cockpit(..., autopsy=True).)"
)


# Samples ------------------------------------------------------------------------------------

HEADINGS = ("sample", "score", "visits", "mean loss", "last loss", "norm", "label", "network says")


def samples_text(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """A table of the samples that were ranked highest."""
    lines = aligned([HEADINGS, *map(_ranked_row, ranked)])
    left_out = f", besides {samples.left_out} without room" if samples.left_out else ""
    head = f"{name}: {len(samples)} samples until step {samples.until}{left_out}"
    return "\n".join([head, "", *lines, "", _legend(samples, ranked)])


def samples_json(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """The same as one line of strict JSON."""
    counts = {"step": samples.until, "samples": len(samples), "left_out": samples.left_out}
    return as_line({"run": name, **counts, "ranked": [*ranked]})


def _ranked_row(ranked: Ranked) -> tuple[str, ...]:
    numbers = (ranked.mean_loss, ranked.last_loss, ranked.norm)
    said = ranked.predicted if ranked.is_contradicted else None
    return (
        in_short(str(ranked.id)),
        _finite(ranked.score),
        str(ranked.visits),
        *map(_finite, numbers),
        "" if ranked.label is None else str(ranked.label),
        "" if said is None else str(said),
    )


def _finite(value: float) -> str:
    return number_label(value) if math.isfinite(value) else ""


def _legend(samples: Samples, ranked: Sequence[Ranked]) -> str:
    """What the columns are."""
    has_norms = any(not math.isnan(each.norm) for each in ranked)
    score = OF_LOSSES if have_losses(samples) else OF_NORMS
    return textwrap.fill(" ".join([score, *([NORM] if has_norms else []), LOOK]), WIDTH)


WIDTH = 90
OF_LOSSES = (
    "The score is how far the mean of a sample's losses, above the medians of their batches, is "
    "from that of the median sample, in robust standard deviations."
)
OF_NORMS = (
    "No losses of single samples are known: the score is how far a sample's norm is from that of "
    "the median sample, in robust standard deviations."
)
NORM = "The norm is that of its gradient over the root mean square of its batch."
LOOK = "Mislabelled, ambiguous and hard samples all have high scores: look at them."
