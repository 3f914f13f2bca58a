"""The rules: a module for each fault, or for some that are alike."""

from __future__ import annotations

from typing import Any

from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import (
    batch_norm,
    batch_too_small,
    clipping_always,
    corrupt_batch,
    data_order,
    expert_unused,
    exploding_gradients,
    inactive_units,
    input_constant,
    input_scale,
    label_noise,
    labels_random,
    loss_below_zero,
    loss_sum,
    lr_decayed,
    lr_edge,
    lr_too_high,
    lr_too_low,
    not_finite,
    of_labels,
    of_optimizer,
    of_samples,
    of_setup,
    optimizer_anew,
    outlier_sample,
    overfitting,
    precision_underflow,
    repetition,
    symmetric_init,
    target_scale,
    unchanged,
    unregistered_layers,
    vanishing_gradients,
    zero_grad_missing,
)

_MODULES: tuple[Any, ...] = (
    # the data
    not_finite,
    input_constant,
    repetition,
    input_scale,
    data_order,
    of_labels,
    target_scale,
    outlier_sample,
    corrupt_batch,
    # the network, the loss and the loop
    unregistered_layers,
    of_setup,
    loss_below_zero,
    lr_decayed,
    optimizer_anew,
    zero_grad_missing,
    batch_norm,
    batch_too_small,
    of_optimizer,
    symmetric_init,
    exploding_gradients,
    loss_sum,
    precision_underflow,
    clipping_always,
    # what training leads to
    inactive_units,
    unchanged,
    lr_too_high,
    lr_edge,
    vanishing_gradients,
    expert_unused,
    of_samples,
    lr_too_low,
    label_noise,
    overfitting,
    labels_random,
)

RULES: tuple[Rule, ...] = tuple(
    rule for module in _MODULES for rule in getattr(module, "RULES", None) or (module.RULE,)
)
"""All rules, so that causes come before what they cause."""
