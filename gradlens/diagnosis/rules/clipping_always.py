"""Gradients are clipped to a small part at almost every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import AT_STEP
from gradlens.diagnosis.numbers import median, ratio, share
from gradlens.diagnosis.rule import Rule, Sign, below

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


def find(evidence: Evidence) -> Iterator[Sign]:
    kept = ratio(evidence.column("grad_norm_at_step"), evidence.column("grad_norm"))
    known = np.isfinite(kept)
    if known.sum() < FEWEST or not share(kept < KEPT, known) > SHARE:
        return
    low, high = np.quantile(kept[known], (0.1, 0.9))
    if high - low > VARIES * high:
        numbers = (below("share of the gradient's norm that is kept", median(kept), KEPT),)
        harmless = "" if not evidence.is_adaptive else HARMLESS
        step = int(evidence.steps[known][0])
        is_scaled = evidence.setup.scaler and _is_limit(evidence)
        if is_scaled:
            yield Sign(step, numbers, title=SCALED, advice=UNSCALE)
        else:
            yield Sign(step, numbers, is_alarm=not harmless, advice=harmless)


def _is_limit(evidence: Evidence) -> bool:
    """Whether gradients are clipped to a norm that is constant but for the scaler's changes."""
    norms = evidence.column("grad_norm_at_step")
    norms = np.sort(norms[np.isfinite(norms)])
    return len(np.unique(np.round(np.log2(norms), 1))) <= FEW_NORMS


FEW_NORMS = 4
"""Distinct norms at the steps, of gradients that are clipped while they are scaled."""
SCALED = "Gradients are clipped before the scaler has unscaled them"
UNSCALE = (
    "Call scaler.unscale_(optimizer) before clip_grad_norm_: otherwise, the limit is compared with "
    "gradients that are thousands of times as large as they are."
)


HARMLESS = (
    "Adam and its like hardly depend on the scale of gradients, so that this has little effect "
    "but that all gradients count the same; clip at a larger norm to have single ones clipped."
)

RULE = Rule(
    fault="clipping_always",
    title="Gradients are clipped to a small part of their norm at almost every step",
    needs=(AT_STEP,),
    find=find,
    advice="Clip at a larger norm, or find out why gradients are large: with this clipping, the "
    "learning rate is effectively many times lower than it was set to.",
    others=("lr_too_low",),
    explains=("lr_too_low", "labels_random"),
)
