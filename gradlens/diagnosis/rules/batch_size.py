"""Batches that are too small, and batch normalisation that doesn't normalise with a batch."""

from __future__ import annotations

from collections.abc import Iterator

from gradlens.diagnosis.course import is_stuck
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.needs import SAMPLES, SETUP
from gradlens.diagnosis.numbers import share
from gradlens.diagnosis.rule import Rule, Sign, above, below, shown
from gradlens.diagnosis.rules.of_setup import since
from gradlens.history.coverage import Coverage
from gradlens.history.setup import Setup

BASE = "_BatchNorm"


def normalising(setup: Setup, training: bool) -> tuple[str, ...]:
    """The batch normalisations that are in training mode, or those in evaluation mode."""
    layers = setup.layers.items()
    return tuple(n for n, each in layers if BASE in each.classes and each.training == training)


def in_evaluation(evidence: Evidence, step: int) -> Sign:
    where = normalising(evidence.setup, training=False)
    frozen = {name.rpartition(".")[0] for name in evidence.setup.frozen}
    number = above("batch normalisations in evaluation mode", len(where), 0)
    return Sign(step, (number,), is_alarm=not frozen >= {*where}, where=where)


SHARE = 0.01
"""Share of the steps. If it is less, as at the end of long epochs, the finding is a notice."""


def of_one(evidence: Evidence) -> Iterator[Sign]:
    where = normalising(evidence.setup, training=True)
    samples = evidence.column("samples")
    found = share(samples == 1, samples > 0)
    if where:
        is_alarm = found > SHARE
        number = above("share of steps with one sample", found, SHARE if is_alarm else 0)
        step = evidence.step(samples == 1)
        yield from shown(Sign(step, (number,), is_alarm=is_alarm, where=where))


SMALL = 4
"""Samples of a small batch. It is an alarm if nothing is learnt."""
LABELS = 64
"""Labels of a batch of texts that isn't small, with one for each word. Those of the pixels of an
image depend on each other."""
FEWEST = 4
"""Steps; fewer are a first look at a network, and not a training."""


def too_small(evidence: Evidence) -> Iterator[Sign]:
    samples = evidence.column("samples")
    typical = evidence.typical("samples")
    coverage: Coverage | None = evidence.history.latest("coverage")
    if coverage is not None and not coverage.share(evidence.history.parameters):
        return  # what the model was called with has rows, which may be something else
    is_text = evidence.setup.input_kind == "integers" and evidence.typical("labels") >= LABELS
    is_small = typical <= SMALL and evidence.rows_are_samples
    if (samples > 0).sum() >= FEWEST and not is_text and is_small:
        number = below("samples in a batch", typical, SMALL + 1)
        yield Sign(evidence.step(samples <= SMALL), (number,), is_alarm=is_stuck(evidence))


RULES = (
    Rule("batchnorm_eval", "Batch normalisation is in evaluation mode",
         needs=(SETUP,),
         find=since(lambda setup: normalising(setup, training=False), in_evaluation),
         explains=("lr_too_high", "lr_edge", "dead_units", "constant_output", "labels_random"),
         advice="Call model.train() before training, and again after each evaluation. In "
                "fine-tuning, statistics may be frozen on purpose."),
    Rule("batch_of_one", "Batch normalisation has one sample to normalise with",
         needs=(SETUP, SAMPLES), find=of_one,
         explains=("batch_too_small", "lr_edge", "lr_too_high", "labels_random"),
         advice="Use larger batches, and drop_last=True if only the last batch of an epoch has "
                "one sample; or use GroupNorm or LayerNorm, which don't depend on the batch."),
    Rule("batch_too_small", "Batches have very few samples",
         needs=(SAMPLES,), find=too_small, others=("lr_edge",),
         explains=("clipping_always", "lr_too_high", "lr_edge", "labels_random"),
         advice="Use larger batches, or accumulate the gradients of several batches before each "
                "step; otherwise use a lower learning rate, which averages over more batches."),
)  # fmt: skip
