"""Recorded values beside their slow references."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gradlens
from benchmarks.fuzz import parts
from benchmarks.fuzz.recipe import Recipe
from benchmarks.fuzz.references import Facts, References
from gradlens import quantities
from gradlens.history.undefined import Undefined
from tests.cases.layer_cases import Array
from tests.quantities.test_quantities import (
    grad_noise_scale,
    inner_test,
    norm_test,
    ortho_test,
)

TOLERANCES = {"float64": 1e-7, "float32": 1e-3}
"""Relative tolerances of values computed from per-sample gradients, by the precision."""

EXACT = 1e-5
"""Relative tolerance of norms, which gradlens computes in single precision at the least."""

ROUNDED = 1e-2
"""Relative tolerance of norms of differences, which are rounded to the parameters' precision."""

AT_ONCE = (quantities.Phase.BEFORE_BACKWARD, quantities.Phase.AFTER_BACKWARD)
"""Phases after which a step's value is recorded when its context is left."""


def missing_values(
    recipe: Recipe, cockpit: gradlens.Cockpit, references: References
) -> Iterator[str]:
    """Quantities without a record of a step at which they are scheduled."""
    if "budget" in recipe.options or "resumed" in recipe.between:
        return
    raw = {one.name for one in recipe.tracked if not one.over}
    due = [q for q in cockpit.quantities if q.name in raw and q.phases[-1] in AT_ONCE]
    for step in references.facts:
        for quantity in due:
            if quantity.should_compute(step) and step not in cockpit.history[quantity.name]:
                yield f"missing: {quantity.name} at step {step}"


def wrong_values(
    recipe: Recipe, history: gradlens.History, references: References
) -> Iterator[str]:
    """Values that differ from their references, unless a whole value is a NaN with its reason."""
    loose = any(
        one.name == "preset: full" or "tolerance" in dict(one.options) for one in recipe.tracked
    )
    checks = CHECKS | {"HessMaxEV": an_eigenvalue} if loose else CHECKS
    for step, facts in references.facts.items():
        samples = SampleFacts.of(recipe, history, step, facts)
        for kind, check in checks.items():
            for name in history.of_kind(kind):
                found = history[name].get(step)
                aggregated = history.sources[name].kind.startswith("Agg")
                if not (found is None or aggregated or isinstance(found, Undefined)):
                    yield from (f"wrong {kind}: {p}" for p in check(found, facts, samples))
        known = history.coverages.get(step)
        found_samples = None if known is None else known.samples
        if found_samples is not None and found_samples not in (facts.samples, facts.samples or 1):
            yield f"wrong N: {found_samples} by {known.known_by}, not {facts.samples}"


@dataclass(frozen=True)
class SampleFacts:
    """Per-sample gradients of the covered parameters together ``[N, D]``, and what they allow."""

    rows: Array
    tolerance: float

    @classmethod
    def of(
        cls, recipe: Recipe, history: gradlens.History, step: int, facts: Facts
    ) -> SampleFacts | None:
        """``None`` without a reference: samples meet, or the precision is low."""
        coupled = any(one.partition(" | ")[0] in parts.COUPLED for one in recipe.parts)
        low = "half precision inside" in " ".join(recipe.parts)
        known = [at for at in history.coverages if at <= step]
        if coupled or low or "batch norm" in recipe.entry or not known or not facts.rows:
            return None
        if recipe.precision not in TOLERANCES:
            return None
        coverage = history.coverages[max(known)]
        rows = [
            each.reshape(len(each), -1)
            for name, each in facts.rows.items()
            if name not in coverage.missing
        ]
        if not rows or coverage.coupled:
            return None
        mixed = any("single" in one for one in recipe.parts)
        return cls(torch.cat(rows, 1).numpy(), TOLERANCES["float32" if mixed else recipe.precision])

    @property
    def size(self) -> float:
        """Σₙ‖gₙ‖²."""
        return float(np.square(self.rows).sum())

    @property
    def mean_squared_norm(self) -> float:
        return float(np.square(self.rows.mean(0)).sum())

    @property
    def has_mean(self) -> bool:
        """Whether the mean isn't rounding noise beside the single gradients."""
        least = self.tolerance**0.5 * self.size / len(self.rows)
        return bool(np.isfinite(self.rows).all() and self.mean_squared_norm > least)


def differs(found: Any, expected: Any, relative: float, floor: float = 0.0) -> bool:
    """Whether a number isn't the reference, nor a NaN with a reason, nor that of a NaN."""
    if isinstance(found, Undefined) and found.reason:
        return False
    one, other = float(found), float(expected)
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) and math.isfinite(other)
    return abs(one - other) > relative * abs(other) + floor + 1e-30


def norms(found: Any, expected: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Norms by parameter."""
    for name, value in found.get("parameters", found).items():
        reference = expected.get(name)
        if reference is None:
            if not isinstance(value, Undefined):
                yield f"{name} has a value {value}, and no reference"
        elif not isinstance(value, Mapping | list) and differs(value, reference.norm(), EXACT):
            yield f"{name}: {value} instead of {float(reference.norm())}"


Check = Callable[[Any, Facts, SampleFacts | None], Iterator[str]]


def loss(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    if differs(found, facts.loss, EXACT):
        yield f"{found} instead of {facts.loss}"


def grad_norm(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    yield from norms(found, facts.gradients)


def parameter_norm(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    sizes = {name: value.norm() for name, value in facts.parameters.items()}
    for name, value in found["parameters"].items():
        elements = max(facts.parameters[name].numel(), 1)
        rms = sizes[name] / elements**0.5
        complex_rms = rms * 2**0.5
        if all(differs(value, each, EXACT) for each in (sizes[name], rms, complex_rms)):
            yield f"{name}: {value} instead of {float(sizes[name])}"


def distance(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    floors = {name: 1e-6 * float(value.norm()) for name, value in facts.start.items()}
    for name, value in found.items():
        expected = (facts.parameters[name] - facts.start[name]).norm()
        if differs(value, expected, ROUNDED, floors[name]):
            yield f"{name}: {value} instead of {float(expected)}"


def update_size(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    for name, value in found.items():
        if facts.update is not None:
            expected = facts.update[name].norm()
            floor = 1e-6 * float(facts.parameters[name].norm())
            if differs(value, expected, ROUNDED, floor):
                yield f"{name}: {value} instead of {float(expected)}"


def of_test(reference: Callable[[Any], float], along: bool = False) -> Check:
    """A test of noise over the mean, compared as squares, whose errors are those of a difference.

    They are relative to the size of gradients, or of their products ``along`` the mean.
    """

    def check(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
        if samples is None or len(samples.rows) < 2 or not samples.has_mean:
            return
        n, m, size = len(samples.rows), samples.mean_squared_norm, samples.size
        if along:
            size = float(np.square(samples.rows @ samples.rows.mean(0)).sum()) / m
        expected, floor = reference(samples), samples.tolerance * size / ((n - 1) * n * m)
        if differs(found**2, expected**2, 10 * samples.tolerance, 10 * floor):
            yield f"{found} instead of {expected}"

    return check


def of_noise(least: int, *entries: str) -> Check:
    """Entries of a noise scale of at least so many samples."""

    def check(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
        if samples is None or len(samples.rows) < least or isinstance(found["trace"], Undefined):
            return
        if "squared_norm" in entries and not samples.has_mean:
            return
        expected, floor = grad_noise_scale(samples), 10 * samples.tolerance * samples.size
        for name in entries:
            if differs(found[name], expected[name], 10 * samples.tolerance, floor):
                yield f"{name} {found[name]} instead of {expected[name]}"

    return check


LARGE = 1e3
"""The variance of larger gradients is all rounding beside the ε of a quantity."""


def early_stopping(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    if samples is None or len(samples.rows) < 2 or samples.tolerance > 1e-6:
        return
    rows = samples.rows
    if float(np.abs(rows).max()) > LARGE:
        return
    mean, variance = rows.mean(0), rows.var(0, ddof=1)
    expected = [1 - len(rows) * float((mean**2 / (variance + e)).mean()) for e in (1e-5, 1e-3)]
    if all(differs(found, each, 1e-4, 1e-4) for each in expected):
        yield f"{found} instead of {expected[0]}"


def hess_max_ev(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    values = eigenvalues(facts)
    if values is not None and differs(found, values[-1], 0.1, 1e-3 * float(values.abs().max())):
        yield f"{found} instead of {float(values[-1])}"


def an_eigenvalue(found: Any, facts: Facts, samples: SampleFacts | None) -> Iterator[str]:
    """With a loose tolerance, searches may stop at another eigenvalue than the largest one."""
    values = eigenvalues(facts)
    if values is None:
        return
    nearest = values[(values - float(found)).abs().argmin()]
    if differs(found, nearest, 0.1, 1e-3 * float(values.abs().max())):
        yield f"{found}, where the nearest eigenvalue is {float(nearest)}"


def eigenvalues(facts: Facts) -> Tensor | None:
    """Of the Hessian, ascending; ``None`` without a reference."""
    if facts.hessian is None or not bool(facts.hessian.isfinite().all()):
        return None
    return torch.linalg.eigvalsh((facts.hessian + facts.hessian.mT) / 2)


CHECKS: dict[str, Check] = {
    "Loss": loss,
    "GradNorm": grad_norm,
    "ParameterNorm": parameter_norm,
    "Distance": distance,
    "UpdateSize": update_size,
    "NormTest": of_test(norm_test),
    "InnerTest": of_test(inner_test, along=True),
    "OrthoTest": of_test(ortho_test),
    "GradNoiseScale": of_noise(3, "trace", "squared_norm"),
    "GradCovariance": of_noise(2, "trace"),
    "EarlyStopping": early_stopping,
    "HessMaxEV": hess_max_ev,
}
"""Checks of the values of quantities, by their class."""
