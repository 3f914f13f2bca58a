"""How a quantity is to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Group = Literal["step size", "gradients", "curvature", "noise", "performance", "layers", "other"]
YScale = Literal["linear", "log", "symlog"]

GROUPS_OF_LOGGED: Mapping[str, Group] = {
    "train_loss": "performance",
    "valid_loss": "performance",
    "test_loss": "performance",
    "train_accuracy": "performance",
    "valid_accuracy": "performance",
    "test_accuracy": "performance",
    "learning_rate": "performance",
    "batch_size": "noise",
}
"""The groups of what training loops log under these names."""


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
