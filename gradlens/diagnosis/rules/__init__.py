"""The rules: a module for each fault, or for some that are alike."""

from __future__ import annotations

from typing import Any

from gradlens.diagnosis.rule import Rule
from gradlens.diagnosis.rules import (
    batch_size,
    initial_weights,
    inputs,
    learning_rate,
    not_finite,
    of_gradients,
    of_labels,
    of_layers,
    of_learning,
    of_loss,
    of_optimizer,
    of_setup,
    outliers,
    unchanged,
)

_MODULES: tuple[Any, ...] = (
    # the data and the weights at the start
    *(not_finite, inputs, of_labels, initial_weights, outliers),
    # the network, the loss and the loop
    *(of_setup, of_loss, of_optimizer, batch_size),
    # what training leads to
    *(of_layers, unchanged, learning_rate, of_gradients, of_learning),
)

RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
"""All rules, so that causes come before what they cause."""
