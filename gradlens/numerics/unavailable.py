"""Why something can't be had."""

from __future__ import annotations


class UnavailableError(RuntimeError):
    """What was asked for can't be had; the message is the reason."""
