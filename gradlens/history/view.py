"""How a quantity is to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gradlens.spelling import near

Group = Literal["performance", "step size", "gradients", "curvature", "noise", "layers", "other"]
"""In the order in which a figure has them."""
YScale = Literal["linear", "log", "symlog"]

GROUPS_OF_LOGGED: Mapping[str, Group] = {
    **dict.fromkeys(("train_loss", "valid_loss", "test_loss"), "performance"),
    **dict.fromkeys(("train_accuracy", "valid_accuracy", "test_accuracy"), "performance"),
    "learning_rate": "performance",
    "batch_size": "noise",
}
"""The groups of what training loops log under these names."""


@dataclass(frozen=True)
class View:
    """Title, place and scale of a quantity's panel; plain data, stored with a run.

    ``group`` is the heading under which the panel is drawn: ``"step size"``, ``"gradients"``,
    ``"curvature"``, ``"noise"``, ``"performance"``, ``"layers"`` or ``"other"``. ``yscale`` is
    ``"linear"``, ``"log"`` or ``"symlog"``, and ``label`` the text on the value axis.
    ``ValueError`` for other groups and scales.
    """

    title: str
    group: Group = "other"
    yscale: YScale = "linear"
    label: str = ""

    def __post_init__(self) -> None:
        if self.group not in get_args(Group):
            raise ValueError(f"there is no group {self.group!r}{near(self.group, get_args(Group))}")
        if self.yscale not in get_args(YScale):
            raise ValueError(
                f"there is no yscale {self.yscale!r}{near(self.yscale, get_args(YScale))}"
            )
