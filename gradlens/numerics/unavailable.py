"""The error for results that can't be had."""

from __future__ import annotations


class UnavailableError(RuntimeError):
    """A result can't be had for these inputs; the message is the reason and, if any, the remedy."""
