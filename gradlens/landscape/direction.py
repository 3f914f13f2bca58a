"""Directions in the space of a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Direction:
    """How far each parameter moves over a distance of one.

    ``parts`` are tensors of the parameters' shapes, by name; what isn't named stays where it is.
    Floating-point buffers have names, too. ``label`` says what the direction is, and ``unit`` what
    a distance of one is: both are in the labels of axes.
    """

    parts: Mapping[str, Tensor] = field(repr=False)
    label: str = "direction"
    unit: str = ""

    @property
    def axis(self) -> str:
        """The label of an axis along the direction."""
        return f"{self.label} (1 = {self.unit})" if self.unit else self.label
