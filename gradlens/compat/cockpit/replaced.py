"""Names and modules of cockpit that gradlens doesn't have, or has elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def replaced(module: str, name: str, replacements: Mapping[str, str]) -> Exception:
    """What a module raises for a name; of known ones, it says what takes their place.

    It is an ``ImportError`` then, since Python would replace the text of an ``AttributeError``.
    """
    if name not in replacements:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module}.{name} isn't there: use {replacements[name]}")


def add_modules(package: str, modules: Mapping[str, Callable[[str], Any]]) -> None:
    """Let modules without a file be imported from a package; a function finds their names."""
    for name, find in modules.items():
        module = ModuleType(f"{package}.{name}")
        vars(module)["__getattr__"] = find
        sys.modules[module.__name__] = module
