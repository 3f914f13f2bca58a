"""Faults that make no sense for some of the problems."""

from __future__ import annotations

OF_INPUTS = frozenset(
    (
        *("input_scale", "input_offset", "input_constant"),
        *("outlier_sample", "corrupt_batch", "nonfinite_input"),
    )
)
"""They change numbers, where some of the inputs are codes or the edges of a graph."""

OF_TARGETS = frozenset(("labels_random", "label_noise"))
"""They change targets, where the loss has no use for these."""
