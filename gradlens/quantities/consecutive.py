"""Comparison of a step's tensors with those of the step tracked before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.norms import inner, norm, norms
from gradlens.numerics.shards import over_parts, own_part

FIRST = "there is no step before to compare with"


class Consecutive:
    """The tensors of the step tracked before, by name, and those of the present step.

    It takes as much memory as the tensors of one step, and of two while a step is computed.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._now: dict[str, Tensor] = {}

    def end_step(self) -> None:
        """Make the tensors of the present step those of the step before."""
        self._before, self._now = self._now, {}

    def before(self, name: str, tensor: Tensor) -> Tensor | Undefined:
        """The tensor of this name at the step before.

        ``tensor``, that of the present step, is kept without a copy.
        """
        self._now[name] = tensor
        before = self._before.get(name)
        if before is None:
            return Undefined(FIRST)
        if before.shape != tensor.shape:
            return Undefined("its shape differs from that at the step before")
        return before

    def correlation(self, name: str, tensor: Tensor) -> float:
        """Cosine of the angle between ``tensor`` and that of the step before, as ``before``."""
        before = self.before(name, tensor)
        if isinstance(before, Undefined):
            return before
        return cosine(before, tensor)


def cosine(first: Tensor, second: Tensor) -> float:
    """⟨a, b⟩/(‖a‖·‖b‖)."""
    lengths = norms([first, second])
    if not all(float(length) for length in lengths):
        return Undefined("one of the two steps is zero")
    units = [own_part(one).flatten().to(length.dtype) / length for one, length in
             zip((first, second), lengths, strict=True)]  # fmt: skip
    value = float(over_parts([first], [inner(*units)], lambda parts: parts.sum(0))[0])
    if math.isnan(value):
        return Undefined("one of the two steps has NaN or Inf")
    return min(max(value, -1.0), 1.0)


def geometry(
    name: str, tensor: Tensor, normalize: bool, steps: Consecutive | None
) -> dict[str, Any]:
    """``"norm"`` of a tensor, or ``"rms"`` with ``normalize``, and its ``"correlation"``.

    The correlation needs ``steps``, which keeps the tensor; without, there is none. That of complex
    numbers is computed from their real and imaginary parts.
    """
    parts = real_parts(tensor)
    size = norm(parts)
    found: dict[str, Any] = {"norm": size}
    if normalize:
        found = {"rms": size / max(tensor.numel(), 1) ** 0.5}
    return found if steps is None else found | {"correlation": steps.correlation(name, parts)}


def real_parts(tensor: Tensor) -> Tensor:
    """Real and imaginary parts of complex numbers along a new last axis; others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def mean_correlation(parts: Mapping[str, Any]) -> dict[str, float]:
    """The mean of the correlations of all layers or parameters; empty if none has an entry."""
    found = [part["correlation"] for part in parts.values() if _correlates(part)]
    if not found:
        return {}
    known = [value for value in found if not math.isnan(value)]
    return {"correlation": sum(known) / len(known) if known else found[0]}


def _correlates(part: Any) -> bool:
    return isinstance(part, Mapping) and "correlation" in part
