"""Values in a checkpoint: of plain classes, which ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradlens.history.undefined import Undefined

UNDEFINED = "$undefined"
"""The key of the reason of an ``Undefined``, as in a run's file."""


def saveable(value: Any) -> Any:
    """A value of plain classes; tensors are detached and not copied, all else is copied.

    ``TypeError`` for what ``torch.load(weights_only=True)`` can't read.
    """
    if isinstance(value, Undefined):
        return {UNDEFINED: value.reason}
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {saveable(key): saveable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _kind(value)(map(saveable, value))
    raise TypeError(
        f"a {type(value).__name__} can't be saved: use numbers, strings and tensors (such as "
        "torch.from_numpy(array)), and lists, tuples and dicts of these"
    )


def restored(value: Any) -> Any:
    """What ``saveable`` was given."""
    if isinstance(value, Mapping):
        if value.keys() == {UNDEFINED}:
            return Undefined(value[UNDEFINED])
        return {key: restored(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return _kind(value)(map(restored, value))
    return value


def _kind(value: list[Any] | tuple[Any, ...]) -> type[list[Any]] | type[tuple[Any, ...]]:
    """``list`` or ``tuple``, of which a named tuple, say, is a subclass."""
    return list if isinstance(value, list) else tuple
