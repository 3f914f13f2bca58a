"""Per-sample gradients of the parts of a batch, kept until all parts are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradlens.numerics.strata import Strata, Stratum
from gradlens.operators.dense import Dense
from gradlens.operators.joined import Joined
from gradlens.operators.operator import GradientOperator

MAX_BYTES = 16 * 2**20
"""Default memory of the gradients that are kept for a whole batch.

A trade-off: it is that of 64 samples of 3c3d, of which the preset economy, with 16 micro-batches of
64 samples each, then takes at most 1.5 times the memory that it takes with one
(``benchmarks/scaling.py``). As many samples as the largest micro-batch has are kept in any case.
"""


@dataclass(frozen=True)
class KeptGradients:
    """Operators by parameter name, of all samples or of a part drawn at random."""

    operators: Mapping[str, GradientOperator] = field(default_factory=dict)
    strata: Strata = ()


@dataclass(frozen=True)
class _Part:
    """What is kept of one part, whose loss has a ``weight``, and how many samples it had."""

    operators: Mapping[str, GradientOperator]
    priorities: Tensor
    weight: float
    samples: int

    def some(self, chosen: Tensor) -> _Part:
        if bool(chosen.all()):
            return self
        places = chosen.nonzero()[:, 0]
        operators = {n: each.some(places.to(each.device)) for n, each in self.operators.items()}
        return replace(self, operators=operators, priorities=self.priorities[chosen])


class KeptSamples:
    """The samples of a process's parts, as many as fit ``max_bytes``.

    Each sample has a random priority, and those with the smallest ones are kept: as many as fit,
    but at least as many as the largest part has. Their number depends on the parts' sizes alone, so
    that all samples are kept with the same probability. Random numbers come from a generator of its
    own.
    ``needed_bytes`` is the memory of all samples.
    """

    def __init__(self, max_bytes: int, seed: int) -> None:
        self._max_bytes = max_bytes
        self._generator = torch.Generator().manual_seed(seed)
        self._parts: list[_Part] = []
        self._largest_part = 0
        self._sample_bytes = 0.0
        self.samples = 0
        self.needed_bytes = 0
        self._was_changed = False

    def add(
        self,
        operators: Mapping[str, GradientOperator],
        samples: int,
        weight: float,
    ) -> None:
        """Keep a part's samples, and draw among all samples where they don't fit."""
        if not samples or not operators:
            return
        self._was_changed = not self.are_unchanged
        priorities = torch.rand(
            samples, generator=self._generator, dtype=torch.float64, device="cpu"
        )
        self._parts.append(_Part(operators, priorities, weight, samples))
        nbytes = sum(operator.nbytes for operator in operators.values())
        self.samples += samples
        self.needed_bytes += nbytes
        self._sample_bytes = max(self._sample_bytes, nbytes / samples)
        self._largest_part = max(self._largest_part, samples)
        self._draw()

    def _draw(self) -> None:
        fitting = int(self._max_bytes / self._sample_bytes) if self._sample_bytes else self.samples
        most = max(fitting, self._largest_part)
        priorities = torch.cat([part.priorities for part in self._parts])
        if most < len(priorities):
            highest = priorities.kthvalue(most).values
            self._parts = [part.some(part.priorities <= highest) for part in self._parts]

    @property
    def are_unchanged(self) -> bool:
        """Whether no part's gradients were overwritten after its backward pass."""
        operators = (each for part in self._parts for each in part.operators.values())
        return not self._was_changed and all(each.is_unchanged for each in operators)

    @property
    def strata(self) -> Strata:
        """How many of the samples are kept."""
        drawn = sum(len(part.priorities) for part in self._parts)
        return (Stratum(self.samples, drawn),) if self.samples else ()

    def joined(self, weight: float | None, samples: int) -> KeptGradients:
        """What is kept, as gradients of a batch with so many samples, in all processes.

        ``weight`` is that of its loss, ``None`` under a sum loss.
        """
        parts = [part for part in self._parts if len(part.priorities)]
        if not parts:
            return KeptGradients()
        factors = [part_factor(p.weight, p.samples, weight, samples) for p in parts]
        names = [n for n in parts[0].operators if all(n in part.operators for part in parts)]
        operators = {n: _joined([part.operators[n] for part in parts], factors) for n in names}
        return KeptGradients(operators, self.strata)


def part_factor(
    weight: float, samples: int, whole_weight: float | None, whole_samples: int
) -> float:
    """gₙ in the whole batch over gₙ in the part: N·wᵢ/(Nᵢ·w), one under a sum loss (no weight).

    It is also one where no part has a weight, and thus no gradients.
    """
    if not whole_weight or not samples:
        return 1.0
    factor = (whole_samples * weight) / (samples * whole_weight)
    return 1.0 if abs(factor - 1) < ROUNDING else factor


ROUNDING = 1e-12
"""The most by which a factor of 1 is off, computed from weights in double precision."""


def smaller(operator: GradientOperator) -> GradientOperator:
    """The same gradients as elements where these take less memory than factors."""
    takes_less = operator.bytes_of_elements < operator.nbytes
    return Dense(operator.dense(), eps=operator.eps) if takes_less else operator


def _joined(parts: list[GradientOperator], factors: list[float]) -> GradientOperator:
    return parts[0] if len(parts) == 1 and factors == [1.0] else Joined(parts, factors)
