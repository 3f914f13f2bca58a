"""What was seen of layers at one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gradlens.signals.signal import Request


@dataclass(frozen=True)
class LayerSignals:
    """Reduced signals by layer and request, small ones in float64 on the host.

    A value is an ``Undefined`` where there was nothing to reduce, with the reason; layers that
    were not called, or have no such tensor, have no entry. ``remarks`` are worth a note.
    """

    modules: Mapping[str, nn.Module] = field(default_factory=dict)
    values: Mapping[str, Mapping[Request, Any]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
