"""JSON lines that keep NaN, infinities, NaN reasons and arrays intact.

Everything is strict JSON. What JSON has no word for is an object with one marked key:
``{"$float": "nan"}``, ``{"$undefined": reason}`` or ``{"$array": [dtype, shape, data]}``,
where ``data`` is the array's little-endian bytes, deflated, in base 64. A user's own key that
begins with a dollar sign gets a second one.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradlens.history.undefined import Undefined

Value: TypeAlias = Any
"""``float``, ``int``, ``bool``, ``str``, ``None``, ``numpy.ndarray``, or lists and
string-keyed dicts of these."""


def to_line(record: Mapping[str, Value]) -> str:
    """One line of strict JSON, without the line break."""
    return json.dumps(_encode(record), allow_nan=False, separators=(",", ":"))


def from_line(line: str) -> dict[str, Value]:
    """The record that ``to_line`` was given; ``ValueError`` if the line is not one."""
    record = json.loads(line, object_hook=_decode)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    return record


def _encode(value: Value) -> Any:
    if isinstance(value, Undefined):
        return {"$undefined": value.reason}
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value) if np.ndim(value) else _encode(value.item())
    if isinstance(value, Mapping):
        return {_key(key): _encode(entry) for key, entry in value.items()}
    if isinstance(value, Sequence):
        return [_encode(entry) for entry in value]
    raise TypeError(
        f"a {type(value).__name__} can't be stored in a run: return a number, a string, an array "
        "or tensor, or lists and dicts of these"
    )


def _key(key: Any) -> str:
    if isinstance(key, str):
        return f"${key}" if key.startswith("$") else key
    raise TypeError(f"the key {key!r} can't be stored in a run: use strings")


def _encode_array(array: Any) -> Any:
    array = np.asarray(array)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"an array of {array.dtype} can't be stored in a run")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"$array": [array.dtype.str, list(array.shape), data]}


def _decode(entry: dict[str, Any]) -> Value:
    if "$float" in entry:
        return float(entry["$float"])
    if "$undefined" in entry:
        return Undefined(entry["$undefined"])
    if "$array" in entry:
        return _decode_array(*entry["$array"])
    return {key.removeprefix("$"): value for key, value in entry.items()}


def _decode_array(dtype: str, shape: list[int], data: str) -> Value:
    array = np.frombuffer(zlib.decompress(base64.b64decode(data)), dtype)
    return array.reshape(shape).astype(array.dtype.newbyteorder("="))
