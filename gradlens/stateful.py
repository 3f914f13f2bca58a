"""Objects whose state is saved in checkpoints; needs neither torch nor the rest of gradlens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

State: TypeAlias = dict[str, Any]


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved, such as a schedule that draws random numbers."""

    def state_dict(self) -> State:
        """The state, as nested dicts, lists and tuples of tensors, numbers and strings."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state_dict`` has returned."""


def state_of(value: object) -> State:
    """The state of an object; empty if it has none."""
    return value.state_dict() if isinstance(value, Stateful) else {}


def load_state(value: object, state: Mapping[str, Any]) -> None:
    """Let an object continue from its state, if it has one."""
    if isinstance(value, Stateful) and state:
        value.load_state_dict(state)
