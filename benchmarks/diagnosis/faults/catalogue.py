"""All faults of the suite, which of them are facts, and which can't be told apart."""

from __future__ import annotations

from benchmarks.diagnosis.faults.of_layers import OF_LAYERS
from benchmarks.diagnosis.faults.of_learning import OF_LEARNING
from benchmarks.diagnosis.faults.of_the_batch import OF_THE_BATCH
from benchmarks.diagnosis.faults.of_the_graph import OF_THE_GRAPH
from benchmarks.diagnosis.faults.of_the_loop import OF_THE_LOOP

FAULTS = (*OF_THE_LOOP, *OF_THE_BATCH, *OF_LAYERS, *OF_LEARNING, *OF_THE_GRAPH)
NAMES = tuple(dict.fromkeys(fault.name for fault in FAULTS))

SYMPTOMS = frozenset(fault.name for fault in (*OF_LAYERS, *OF_LEARNING)) | {
    "outlier_sample",
    "corrupt_batch",
    "entropy_collapse",
    "posterior_collapse",
    "target_scale",
}
"""Faults that are concluded from what they do; the others can be read off the loop or the data."""

LIKES: dict[str, frozenset[str]] = {
    "labels_random": frozenset({"input_constant"}),
    "input_constant": frozenset({"labels_random"}),
    "loss_sum": frozenset({"lr_too_high", "lr_edge"}),
    "lr_too_high": frozenset({"lr_edge", "loss_sum"}),
    "lr_edge": frozenset({"lr_too_high", "momentum_high", "zero_grad_missing"}),
    "momentum_high": frozenset({"lr_edge", "zero_grad_missing"}),
    "zero_grad_missing": frozenset({"lr_edge", "momentum_high"}),
    "vanishing_gradients": frozenset({"precision_underflow"}),
    "precision_underflow": frozenset({"vanishing_gradients"}),
    "saturated_units": frozenset({"exploding_gradients"}),
    "exploding_gradients": frozenset({"saturated_units"}),
    "outlier_sample": frozenset({"corrupt_batch"}),
    "corrupt_batch": frozenset({"outlier_sample"}),
    "optimizer_misses": frozenset({"frozen_layer"}),
    "batch_too_small": frozenset({"batch_of_one"}),
    "batch_of_one": frozenset({"batch_too_small"}),
    "entropy_collapse": frozenset({"attention_logits"}),
    "nonfinite_loss": frozenset({"nonfinite_gradient"}),
}
"""What a fault can't be told from by the curves of a run."""
