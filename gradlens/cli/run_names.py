"""Short names for runs: the parts in which their paths differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ENDINGS = {".jsonl", ".json"}


def run_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """A name for each path, without the folders and the ending that all have in common.

    ``ValueError`` if a path is given twice.
    """
    whole = [path.absolute() for path in paths]
    twice = [path for place, path in enumerate(paths) if whole[place] in whole[:place]]
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    endings = {path.suffix for path in paths}
    plain = len(endings) == 1 and endings <= ENDINGS
    parts = [path.with_suffix("").parts if plain else path.parts for path in whole]
    start = _common(parts)
    parts = [one[start:] for one in parts]
    end = _common([one[::-1] for one in parts])
    return tuple("/".join(one[: len(one) - end]) for one in parts)


def _common(parts: Sequence[Sequence[str]]) -> int:
    """How many first parts all have in common, of which the last part of none is one."""
    shortest = min(map(len, parts))
    differing = (n for n in range(shortest - 1) if len({one[n] for one in parts}) > 1)
    return next(differing, shortest - 1)
