"""Samples worth a look as text and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gradlens.cli.text import aligned, as_line, in_short
from gradlens.diagnosis.samples import Ranked, have_losses
from gradlens.history.records import Samples
from gradlens.instruments.scales import number_label

HEADINGS = ("sample", "score", "visits", "mean loss", "last loss", "norm", "label", "network says")


def samples_text(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """A table of the samples that were ranked highest."""
    lines = aligned([HEADINGS, *map(_row, ranked)])
    left_out = f", besides {samples.left_out} without room" if samples.left_out else ""
    head = f"{name}: {len(samples)} samples until step {samples.until}{left_out}"
    return "\n".join([head, "", *lines, "", _legend(samples, ranked)])


def samples_json(samples: Samples, ranked: Sequence[Ranked], name: str) -> str:
    """The same as one line of strict JSON."""
    found: dict[str, Any] = {
        "run": name,
        "step": samples.until,
        "samples": len(samples),
        "left_out": samples.left_out,
        "ranked": [asdict(each) for each in ranked],
    }
    return as_line(found)


def _row(ranked: Ranked) -> tuple[str, ...]:
    numbers = (ranked.mean_loss, ranked.last_loss, ranked.norm)
    said = ranked.predicted if ranked.is_contradicted else None
    return (
        in_short(str(ranked.id)),
        _number(ranked.score),
        str(ranked.visits),
        *map(_number, numbers),
        "" if ranked.label is None else str(ranked.label),
        "" if said is None else str(said),
    )


def _number(value: float) -> str:
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
