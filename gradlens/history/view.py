"""How a quantity is to be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Group = Literal["step size", "gradients", "curvature", "noise", "performance", "layers", "other"]
YScale = Literal["linear", "log", "symlog"]


@dataclass(frozen=True)
class View:
    """Title, place and scale of a quantity's panel; plain data, stored with a run.

    ``group`` is the column of the cockpit that the panel belongs to, ``label`` the text on
    the value axis.
    """

    title: str
    group: Group = "other"
    yscale: YScale = "linear"
    label: str = ""
