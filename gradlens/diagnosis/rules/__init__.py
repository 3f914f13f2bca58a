"""The rules: a module for each fault, or for some that are alike."""

from __future__ import annotations

from typing import Any

from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import (
    batch_size,
    clipping_always,
    expert_unused,
    inactive_units,
    initial_weights,
    inputs,
    label_noise,
    labels_random,
    lr_edge,
    lr_too_high,
    lr_too_low,
    not_finite,
    of_labels,
    of_loss,
    of_optimizer,
    of_samples,
    of_setup,
    order,
    outliers,
    overfitting,
    precision_underflow,
    target_scale,
    unchanged,
    unregistered_layers,
    vanishing_gradients,
)

_MODULES: tuple[Any, ...] = (
    # the data and the weights at the start
    not_finite,
    inputs,
    order,
    of_labels,
    initial_weights,
    target_scale,
    outliers,
    # the network, the loss and the loop
    unregistered_layers,
    of_setup,
    of_loss,
    of_optimizer,
    batch_size,
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
