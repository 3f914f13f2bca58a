"""What rules need of a run, and how it comes to be recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gradlens.diagnosis.evidence import Evidence


@dataclass(frozen=True)
class Need:
    """Something that must have been recorded, in words that follow "needs"."""

    words: str
    is_met: Callable[[Evidence], bool]


def column(name: str, words: str) -> Need:
    """A number of each step."""
    return Need(words, lambda evidence: bool(np.isfinite(evidence.column(name)).any()))


def of_layers(kind: str, words: str) -> Need:
    """Floats of layers or parameters."""
    return Need(words, lambda evidence: bool(evidence.by_name(kind)))


def quantity(*kinds: str) -> Need:
    """One of some quantities of layers or parameters."""
    words = f"the quantity {' or '.join(kinds)}"
    return Need(words, lambda evidence: any(evidence.history.of_kind(kind) for kind in kinds))


SETUP = Need(
    "the facts of the run, which Cockpit(..., facts=True) records",
    lambda evidence: bool(evidence.history.setups),
)
OPTIMIZER = Need(
    "the optimizer, which is passed to the context: cockpit(step, optimizer=optimizer)",
    lambda evidence: bool(evidence.setup.optimizer),
)
GRAPH = Need(
    "the loss, which is passed to the context: cockpit(step, loss=loss)",
    lambda evidence: bool(evidence.setup.order),
)
LOSS = Need(
    "the loss, which is passed to the context: cockpit(step, loss=loss)",
    lambda evidence: bool(evidence.loss.steps.size),
)
CHANCE = Need(
    "a cross-entropy or squared error, which is passed to the context: cockpit(step, loss=loss)",
    lambda evidence: bool(np.isfinite(evidence.chance)),
)
COVERAGE = Need(
    "a quantity of per-sample gradients, as in configuration('economy')",
    lambda evidence: evidence.history.latest("coverage") is not None,
)
OUTPUTS = Need(
    "the outputs that a loss such as a cross-entropy was called with, or vectors and their norms",
    lambda evidence: any(
        np.isfinite(evidence.column(name)).any() for name in ("output_std", "direction_spread")
    ),
)
CODES = column("code_nats", "a code m + s * e with noise e, as of a variational autoencoder")
LABELS = Need(
    "a cross-entropy, which is passed to the context: cockpit(step, loss=loss)",
    lambda evidence: bool(evidence.labels.size) or bool(evidence.by_name("dense_labels")),
)
DENSE_LABELS = of_layers("dense_labels", "a cross-entropy with several labels for each sample")
VALIDATION = Need(
    "a validation loss: cockpit.log(step, valid_loss=...)",
    lambda evidence: bool(evidence.valid_loss.steps.size),
)
SAMPLES = column("samples", "the batches' sizes, which the facts of a run have")
INPUTS = column("input_rms", "the model's inputs, which the facts of a run have")
BAD_ROWS = column("bad_rows", "the model's inputs, which the facts of a run have")
UPDATES = column("updates", "the optimizer, passed to the context: cockpit(step, optimizer=...)")
RATES = column("lr", "the optimizer, passed to the context: cockpit(step, optimizer=...)")
STEPS_OF_WEIGHTS = Need(
    "the weights at several steps, which the facts of a run have",
    lambda evidence: len(evidence.by_name("weight_rms").steps) > 1,
)
STALE = column("stale", "the gradients at each step, which the facts of a run have")
AT_STEP = column(
    "grad_norm_at_step", "the optimizer, passed to the context: cockpit(step, optimizer=...)"
)
SINGLE_LOSSES = column("loss_median", "the losses of single samples, as of a cross-entropy")
WEIGHTS = of_layers("weight_rms", "the sizes of the weights: facts of the run, or ParameterNorm")
GRADIENTS = of_layers("gradient_rms", "the sizes of gradients: facts of the run, or GradNorm")
UPDATE_SIZES = Need(
    "the sizes of updates and weights: facts of the run, or UpdateSize and ParameterNorm",
    lambda evidence: bool(evidence.update_ratio.finite.any()),
)
ZEROS = of_layers("zero_gradients", "the gradients, which the facts of a run have")
ROW_SPREAD = of_layers("row_spread", "the weights, which the facts of a run have")
DEAD = of_layers("dead", "a layer with a ReLU, in the facts of a run")
SATURATED = of_layers("saturated", "a layer with a tanh or sigmoid, in the facts of a run")
