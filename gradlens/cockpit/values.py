"""Values as a history holds them: of quantities, and what a training loop logs or pushes."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlens.history.json_lines import DEEPEST, LARGEST, Value
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.messages import log
from gradlens.numerics.host import on_host
from gradlens.quantities.quantity import Quantity


def recordable(quantity: Quantity, global_step: int, value: Any) -> Value:
    """A quantity's value as a history holds it, logged if the quantity is verbose.

    ``TypeError`` names the quantity if its value can't be recorded.
    """
    try:
        plain = to_plain(on_host(value))
    except TypeError as error:
        raise TypeError(f"{quantity.name}: {error}") from error
    if quantity.verbose:
        log(f"[Step {global_step}] {quantity.name}: {plain}")
    return plain


DEEPEST_VALUE = DEEPEST - 10
"""How deep a value may be nested; the record of a step, and encoded arrays, need more levels."""


def to_plain(value: Any, depth: int = 0) -> Value:
    """Numbers, arrays, lists and dicts instead of tensors and dataclasses, all of them copies.

    ``TypeError`` for anything else, and for what a file can't hold.
    """
    if depth > DEEPEST_VALUE:
        raise _unrecordable(f"value that is nested more than {DEEPEST_VALUE} levels deep")
    if isinstance(value, Tensor):
        return _tensor_to_plain(value.detach())
    if isinstance(value, (np.ndarray, np.generic)):
        return _array_to_plain(np.asarray(value))
    if is_dataclass(value) and not isinstance(value, type):
        return to_plain(asdict(value), depth + 1)
    if isinstance(value, Mapping):
        plain = {str(key): to_plain(entry, depth + 1) for key, entry in value.items()}
        if len(plain) < len(value):
            raise TypeError(f"two keys of {list(value)} are the same as text: use strings")
        return plain
    if isinstance(value, (list, tuple)):
        return [to_plain(entry, depth + 1) for entry in value]
    if isinstance(value, int) and abs(value) > LARGEST:
        raise _unrecordable("whole number that is larger than any float")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise _unrecordable(type(value).__name__)


def _tensor_to_plain(tensor: Tensor) -> Value:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return _array_to_plain(tensor.to_dense().cpu().numpy())


def _array_to_plain(array: np.ndarray[Any, Any]) -> Value:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _unrecordable(f"array of {array.dtype}")
    return array.copy() if array.ndim else array.item()


def _unrecordable(what: str) -> TypeError:
    return TypeError(
        f"a {what} can't be recorded: return a number, a string, an array or tensor, or lists and "
        "dicts of these"
    )


PUSHED = Source(("Aggregate",), View("", group="performance"))
"""The source of all series of pushed metrics."""


def loggable(name: str, value: Any) -> Value:
    """A value as a history holds it; ``TypeError`` names what can't be logged."""
    if name == "epoch_count" and isinstance(value, Mapping):
        raise TypeError(
            f"log(step, {_in_words(value)}): pass values by name, as in log(step, **values)"
        )
    try:
        return to_plain(value)
    except TypeError as error:
        raise TypeError(f"log({name}=...): {error}") from error


def pushable(name: str, value: Any) -> float:
    """The value of a metric as a float; ``TypeError`` names the metric if it isn't a number."""
    try:
        plain = to_plain(value)
        if isinstance(plain, np.ndarray) and plain.size == 1:
            plain = plain.item()
        if isinstance(plain, (int, float)):
            return plain if isinstance(plain, Undefined) else float(plain)
    except (TypeError, OverflowError):
        pass
    raise TypeError(
        f"push({name}=...) takes a number, or a tensor or array of one element, and got "
        f"{_in_words(value)}"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return reprlib.repr(value)
