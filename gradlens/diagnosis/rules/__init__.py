"""The rules: a module for each fault, or for some that are alike."""

from __future__ import annotations

from typing import Any

from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import (
    adam_epsilon,
    batch_of_one,
    batch_repeated,
    batch_too_small,
    batchnorm_eval,
    class_imbalance,
    clipping_always,
    corrupt_batch,
    data_order,
    dead_units,
    expert_unused,
    exploding_gradients,
    input_constant,
    input_offset,
    input_scale,
    label_noise,
    labels_random,
    loss_below_zero,
    loss_sum,
    lr_decayed,
    lr_edge,
    lr_too_high,
    lr_too_low,
    momentum_high,
    not_finite,
    of_samples,
    of_setup,
    optimizer_anew,
    outlier_sample,
    overfitting,
    padding_in_loss,
    precision_underflow,
    samples_duplicated,
    saturated_units,
    symmetric_init,
    target_scale,
    unchanged,
    unregistered_layers,
    vanishing_gradients,
    weight_decay_high,
    zero_grad_missing,
)

_MODULES: tuple[Any, ...] = (
    # the data
    not_finite,
    input_constant,
    batch_repeated,
    samples_duplicated,
    input_offset,
    input_scale,
    data_order,
    padding_in_loss,
    class_imbalance,
    target_scale,
    outlier_sample,
    corrupt_batch,
    # the network, the loss and the loop
    unregistered_layers,
    of_setup,
    loss_below_zero,
    lr_decayed,
    optimizer_anew,
    unchanged,
    zero_grad_missing,
    batchnorm_eval,
    batch_of_one,
    batch_too_small,
    adam_epsilon,
    weight_decay_high,
    momentum_high,
    symmetric_init,
    exploding_gradients,
    loss_sum,
    precision_underflow,
    clipping_always,
    # what training leads to
    lr_too_high,
    lr_edge,
    saturated_units,
    dead_units,
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
