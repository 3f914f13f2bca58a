"""The reduced signals of all layers at one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradlens.history.undefined import Undefined
from gradlens.signals.signal import Request


@dataclass(frozen=True)
class LayerSignals:
    """Reduced signals by layer and request, small ones in float64 on the host.

    A value is an ``Undefined`` with its reason where there was nothing to reduce; layers that were
    not called, or have no such tensor, have no entry. ``notes`` are for the user.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    values: Mapping[str, Mapping[Request, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def and_also(self, other: LayerSignals) -> LayerSignals:
        """These and those of further calls together, with the notes of the others."""
        values = {layer: dict(found) for layer, found in self.values.items()}
        for layer, found in other.values.items():
            known = values.setdefault(layer, {})
            for request, value in found.items():
                known[request] = merged(request, [*_several(known.get(request)), value])
        return LayerSignals(other.modules, values, other.notes)


def merged(request: Request, values: Sequence[Any]) -> Any:
    """One value for several; the reason why there is none, if one of them has one."""
    undefined = next((value for value in values if isinstance(value, Undefined)), None)
    return request.reduction.merge(values) if undefined is None else undefined


def _several(value: Any) -> list[Any]:
    return [] if value is None else [value]
