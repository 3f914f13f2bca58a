"""Results of several values that are computed at once, group by group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Value = TypeVar("Value")
Result = TypeVar("Result")


def in_groups(
    values: Sequence[Value],
    keys: Iterable[Hashable | None],
    compute: Callable[[list[Value]], Iterable[Result]],
) -> list[Result]:
    """The values' results in their order; ``compute`` gets those with the same key.

    A value whose key is ``None`` is computed alone.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault((place,) if key is None else key, []).append(place)
    found: dict[int, Result] = {}
    for places in groups.values():
        found |= zip(places, compute([values[place] for place in places]), strict=True)
    return [found[place] for place in range(len(values))]
