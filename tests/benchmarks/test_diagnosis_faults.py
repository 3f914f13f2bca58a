"""The suite's faults can be injected, into layers and samples that there are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from benchmarks.diagnosis.development import BASICS, TRAININGS
from benchmarks.diagnosis.faults.catalogue import FAULTS, LIKES, NAMES, SYMPTOMS
from benchmarks.diagnosis.faults.fault import Fault, Injected, diverges
from benchmarks.diagnosis.loop import Outcome
from benchmarks.diagnosis.training import batches, model_of
from gradlens.diagnosis.rules import RULES

CODES = tuple(each for each in TRAININGS if each.name == "variational autoencoder")
PROBLEMS = (*BASICS, *CODES)
BY_NAME = {problem.name: problem for problem in PROBLEMS}
WAYS = {(fault.name, fault.way): fault for fault in FAULTS}
SEARCHED = {"lr_too_high": ["tanh"], "lr_edge": ["sigmoid"], "overfitting": ["sigmoid"]}
"""Problems for faults whose strengths are searched for by training."""


def test_there_are_all_faults_of_the_catalogue() -> None:
    assert {rule.fault for rule in RULES} - {*NAMES} == {"groups_oppose"}  # of users' own groups
    assert len(WAYS) == len(FAULTS)
    assert LIKES.keys() <= {*NAMES}
    assert {*NAMES} >= SYMPTOMS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}, {fault.way}")
def test_each_fault_can_be_injected_at_each_strength(fault: Fault) -> None:
    assert len(set(fault.strengths)) == 3
    problems = [BY_NAME[name] for name in SEARCHED.get(fault.name, [*BY_NAME])]
    for strength in fault.strengths:
        assert any(fault.apply(each, strength, 0) is not None for each in problems), strength


def _strongest() -> Iterator[tuple[str, Injected]]:
    for fault in FAULTS:
        if fault.name not in SEARCHED:
            found = (fault.apply(p, fault.strengths[2], 0) for p in PROBLEMS)
            yield fault.name, next(each for each in found if each is not None)


@pytest.mark.slow
def test_faults_are_in_layers_of_the_network_and_samples_of_the_step() -> None:
    for name, found in _strongest():
        training = found.training
        model = model_of(training, 0)
        modules = {*dict(model.named_modules()), *dict(model.named_parameters())}
        assert found.layers <= modules, name
        if found.samples and found.step is not None:
            run = [batch for _, batch in batches(training, training.data(0), 0)]
            assert found.samples <= {*run[found.step].ids.tolist()}, name


def outcome(*losses: float) -> Outcome:
    """A run of these losses, whose validation losses are the same."""
    return Outcome([*losses], dict(enumerate(losses)))


def test_divergence_is_a_peak_or_an_end_above_the_start() -> None:
    healthy = outcome(1.0, 0.5, 0.1)
    assert diverges(outcome(1.0, 6.0, 0.1), healthy)
    assert diverges(outcome(1.0, 0.9, math.nan), healthy)
    assert not diverges(outcome(1.0, 0.9, 0.8), healthy)
