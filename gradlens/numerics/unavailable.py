"""The error for results that can't be had."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

Contain = Callable[[str, Callable[[str], None]], AbstractContextManager[Any]]
"""Makes a context for a piece of work, whose exceptions become reasons passed to a function."""


def uncontained(work: str, refuse: Callable[[str], None]) -> AbstractContextManager[None]:
    """A context that raises all exceptions."""
    return nullcontext()


class UnavailableError(RuntimeError):
    """A result can't be had for these inputs; the message is the reason and, if any, the remedy."""


FREED = "backward has run already when the context was entered: call it inside the context"


def has_freed(error: Exception) -> bool:
    """Whether it is torch's error where a backward pass has freed the graph already."""
    return "backward through the graph a second time" in str(error)


def first_line(error: Exception) -> str:
    """An exception in a few words: its type, and the first line of its message."""
    message = str(error).splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
