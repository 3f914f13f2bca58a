"""Comparison of a step's tensors with those of the step tracked before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.numerics.host import on_host
from gradlens.numerics.norms import inner, norms
from gradlens.numerics.shards import over_parts, own_part
from gradlens.stateful import State, Stateful

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
        return before.to(tensor.device)

    def state_dict(self) -> State:
        """The tensors, which are never changed in place."""
        return {"before": dict(self._before), "now": dict(self._now)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self._before, self._now = dict(state["before"]), dict(state["now"])

    def correlations(self, tensors: Mapping[str, Tensor]) -> dict[str, float]:
        """Cosines of the angles between tensors and those of the step before, as ``before``."""
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        unknown: dict[str, float] = {}
        for name, tensor in tensors.items():
            before = self.before(name, tensor)
            if isinstance(before, Undefined):
                unknown[name] = before
            else:
                pairs[name] = (before, tensor)
        return unknown | dict(zip(pairs, cosines([*pairs.values()]), strict=True))


class ComparesSteps:
    """A quantity that compares tensors of each step with those of the step tracked before."""

    keeps: Stateful | None

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        self.steps = self.keeps = Consecutive()

    def end_step(self) -> None:
        self.steps.end_step()


def cosines(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """⟨a, b⟩/(‖a‖·‖b‖) of each pair of tensors, which may be distributed."""
    lengths = norms([one for pair in pairs for one in pair])
    both = [*zip(lengths[::2], lengths[1::2], strict=True)]
    places = [place for place, each in enumerate(on_host(both)) if all(map(float, each))]
    own = [_product_of_units(pairs[place], both[place]) for place in places]
    found = over_parts([pairs[place][0] for place in places], own, lambda parts: parts.sum(0))
    values: list[float] = [Undefined("one of the two steps is zero")] * len(pairs)
    for place, value in zip(places, on_host(found), strict=True):
        values[place] = _within_one(float(value))
    return values


def _product_of_units(pair: tuple[Tensor, Tensor], lengths: tuple[Tensor, Tensor]) -> Tensor:
    """The part of this process in the product of two tensors that are divided by their lengths."""
    dtype = torch.promote_types(*(length.dtype for length in lengths))
    first, second = (own_part(tensor).flatten().to(dtype) for tensor in pair)
    return inner(first / lengths[0], second / lengths[1])


def _within_one(value: float) -> float:
    if math.isnan(value):
        return Undefined("one of the two steps has NaN or Inf")
    return min(max(value, -1.0), 1.0)


def geometries(
    tensors: Mapping[str, Tensor], normalize: bool, steps: Consecutive | None
) -> dict[str, dict[str, Any]]:
    """``"norm"`` of each tensor, or ``"rms"`` with ``normalize``, and its ``"correlation"``.

    The correlation needs ``steps``, which keeps the tensors; without, there is none. That of
    complex numbers is computed from their real and imaginary parts.
    """
    parts = {name: real_parts(tensor) for name, tensor in tensors.items()}
    found: dict[str, dict[str, Any]] = {}
    for (name, tensor), size in zip(tensors.items(), norms([*parts.values()]), strict=True):
        root = max(tensor.numel(), 1) ** 0.5
        found[name] = {"rms": size / root} if normalize else {"norm": size}
    correlations = {} if steps is None else steps.correlations(parts)
    for name, correlation in correlations.items():
        found[name]["correlation"] = correlation
    return found


def real_parts(tensor: Tensor) -> Tensor:
    """Real and imaginary parts of complex numbers along a new last axis; others unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def mean_correlation(parts: Mapping[str, Any]) -> dict[str, float]:
    """The mean of the correlations of all layers or parameters; empty if none has an entry."""
    records = [part for part in parts.values() if isinstance(part, Mapping)]
    found = [record["correlation"] for record in records if "correlation" in record]
    if not found:
        return {}
    known = [value for value in found if not math.isnan(value)]
    return {"correlation": sum(known) / len(known) if known else found[0]}
