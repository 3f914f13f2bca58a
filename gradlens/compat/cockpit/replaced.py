"""The error for names of cockpit that gradlens doesn't have."""

from __future__ import annotations

from collections.abc import Mapping


def replaced(module: str, name: str, replacements: Mapping[str, str]) -> Exception:
    """What a module raises for a name; of known ones, it says what takes their place.

    It is an ``ImportError`` then, since Python would replace the text of an ``AttributeError``.
    """
    if name not in replacements:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module}.{name} isn't there: use {replacements[name]}")
