"""Names that every tracker accepts."""

from __future__ import annotations

import string
import unicodedata

ALLOWED = frozenset(string.ascii_letters + string.digits + "_-./")
"""TensorBoard, W&B and MLflow take all of these, and MLflow takes few others."""

WORDS = {"s/step": "seconds_per_step", "λ": "lambda"}
"""What names of scalars have instead of signs that aren't allowed."""


def tag(prefix: str, series: str, part: str = "") -> str:
    """``prefix/series`` or ``prefix/series_part`` in ASCII."""
    name = "_".join(filter(None, (_ascii(series), _ascii(part))))
    return "/".join(filter(None, (prefix, name)))


def is_inside(name: str, layer: str) -> bool:
    """Whether a name is that of a layer or parameter, or of one inside it."""
    return f"{name}.".startswith(f"{layer}.")


def _ascii(text: str) -> str:
    for sign, word in WORDS.items():
        text = text.replace(sign, word)
    return "".join(map(_plain, unicodedata.normalize("NFKD", text)))


def _plain(sign: str) -> str:
    if sign in ALLOWED:
        return sign
    if unicodedata.combining(sign) or sign in "()[]{}":
        return ""
    return "_" if sign.isascii() else f"u{ord(sign):04x}"
