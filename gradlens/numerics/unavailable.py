"""Why something can't be had."""

from __future__ import annotations


class UnavailableError(RuntimeError):
    """What was asked for can't be had; the message is the reason."""


def first_line(error: Exception) -> str:
    """An exception in a few words: its type, and the first line of its message."""
    message = str(error).splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
