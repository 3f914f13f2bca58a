"""How a command says that it has failed."""

from __future__ import annotations

import sys

FAILED = 1
"""The exit code."""


def failed(message: str) -> int:
    """Print what went wrong in one line on stderr, and return the exit code."""
    text = " ".join(message.split())
    shown = "".join(sign if sign.isprintable() else "?" for sign in text)
    print(f"gradlens: {shown}", file=sys.stderr)
    return FAILED
