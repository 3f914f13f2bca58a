"""JSON lines that keep NaN, infinities, NaN reasons and arrays intact.

Everything is strict JSON. What JSON has no word for is an object with one marked key:
``{"$float": "nan"}``, ``{"$undefined": reason}`` or ``{"$array": [dtype, shape, data]}``,
where ``data`` is the array's little-endian bytes, deflated, in base 64. A user's own key that
begins with a dollar sign gets a second one.

A line may come from anywhere: whatever it holds, reading it gives a record of bounded depth, whose
arrays take at most a thousand times the memory of their text, or a ``ValueError``.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradlens.history.undefined import Undefined

Value: TypeAlias = Any
"""``float``, ``int``, ``bool``, ``str``, ``None``, ``numpy.ndarray``, or lists and
string-keyed dicts of these."""

DEEPEST = 50
"""Records may be nested so deep, which is far from Python's limit of recursion (1000)."""

LARGEST = int(math.ldexp(1, 1023))
"""Whole numbers have at most this size, which a float can have, too."""

DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""What an array's elements may be."""

FLOATS = ("nan", "inf", "-inf")

MARKS = ("$float", "$undefined", "$array")
"""Keys of what JSON has no word for."""


def to_line(record: Mapping[str, Value]) -> str:
    """One line of strict JSON, without the line break; ``TypeError`` for what can't be stored."""
    return line_of(encoded(record))


def line_of(stored: Mapping[str, Any]) -> str:
    """One line of strict JSON with a record that has been ``encoded``."""
    return json.dumps(stored, allow_nan=False, separators=(",", ":"))


def parsed(text: str, constant: Callable[[str], Any] = float) -> Any:
    """What a JSON text holds; ``ValueError`` for one that is too deep, or numbers too large.

    ``constant`` makes a value of NaN, Infinity and -Infinity, which strict JSON doesn't have.
    """
    found = _parsed(text, json.JSONDecoder(parse_constant=constant))
    _check(found, 0)
    return found


def stored_record(line: str) -> dict[str, Any]:
    """A record as JSON has it; ``ValueError`` if it is none."""
    record = _parsed(line, _STRICT)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    # The numbers and the depth of a step's values are checked where their forms are found
    # (``gradlens.history.series``). Looking for a character first is much faster.
    if [*record] != ["step", "values"] or "\\" in line:
        _check(record, 0)
    return record


def _parsed(text: str, decoder: json.JSONDecoder) -> Any:
    try:
        return decoder.decode(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from error
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


TOO_DEEP = f"it is nested more than {DEEPEST} levels deep"


def _check(value: Any, depth: int) -> None:
    """``ValueError`` if a part of a value is none of a record."""
    kind = type(value)
    if kind is str:
        _check_text(value)
    elif kind is int:
        check_size(value)
    if kind is not list and kind is not dict:
        return
    if depth == DEEPEST:
        raise ValueError(TOO_DEEP)
    for entry in value if kind is list else (*value, *value.values()):
        _check(entry, depth + 1)


def check_size(number: int) -> None:
    """``ValueError`` for a whole number that is larger than any float."""
    if not -LARGEST <= number <= LARGEST:
        raise ValueError("a whole number is larger than any float")


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a text has half a character (a lone surrogate)") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


def encoded(value: Value, depth: int = 0) -> Any:
    """A value as JSON has it; ``TypeError`` for what can't be stored."""
    if depth > DEEPEST - 3:  # an array has three levels
        raise TypeError(f"{TOO_DEEP}, which can't be stored in a run")
    if isinstance(value, Undefined):
        return {"$undefined": _text(value.reason)}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise TypeError("a whole number that is larger than any float can't be stored in a run")
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(value) if np.ndim(value) else encoded(value.item())
    if isinstance(value, Mapping):
        return {
            # Most keys are such, and most values numbers: calls take longer than these checks.
            key if type(key) is str and key.isascii() and key[:1] != "$" else _key(key): entry
            if type(entry) is float and math.isfinite(entry)
            else encoded(entry, depth + 1)
            for key, entry in value.items()
        }
    if isinstance(value, Sequence):
        return [encoded(entry, depth + 1) for entry in value]
    raise TypeError(
        f"a {type(value).__name__} can't be stored in a run: return a number, a string, an array "
        "or tensor, or lists and dicts of these"
    )


def _text(text: str) -> str:
    """A text as it is, with half a character (as in names of files) written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(f"${key}" if key.startswith("$") else key)
    raise TypeError(f"the key {key!r} can't be stored in a run: use strings")


def _encode_array(array: Any) -> Any:
    array = np.asarray(array)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise TypeError(f"an array of {array.dtype} can't be stored in a run")
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"$array": [array.dtype.str, list(array.shape), data]}


def value_of(value: Any) -> Value:
    """The value that JSON has in this form; ``ValueError`` if there is none."""
    kind = type(value)
    if kind is list:
        return [value_of(entry) for entry in value]
    if kind is not dict:
        return value
    if len(value) == 1:
        ((key, entry),) = value.items()
        if key == "$float":
            if type(entry) is not str or entry not in FLOATS:
                raise ValueError("a $float is none of " + ", ".join(FLOATS))
            return float(entry)
        if key == "$undefined":
            if type(entry) is not str:
                raise ValueError("the reason of an $undefined is no text")
            return Undefined(entry)
        if key == "$array":
            size = array_bytes(entry)
            dtype, shape, text = entry
            return array_of(dtype, shape, inflated(text, size))
    return {unmarked(key): value_of(entry) for key, entry in value.items()}


def unmarked(key: str) -> str:
    """A key of a user's dict from that of the file."""
    return key.removeprefix("$")


def array_bytes(entry: Any) -> int:
    """Size of the array in an ``$array``; ``ValueError`` if it isn't one."""
    if type(entry) is not list or len(entry) != 3 or type(entry[2]) is not str:
        raise ValueError("an $array is no list of dtype, shape and data")
    dtype, shape, _ = entry
    return array_size(dtype, shape) * np.dtype(dtype).itemsize


def array_of(dtype: str, shape: Sequence[int], content: bytes) -> NDArray[Any]:
    """An array from its bytes."""
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="))


def array_size(dtype: Any, shape: Any) -> int:
    """Number of elements; ``ValueError`` for no dtype of ``DTYPES``, and impossible shapes."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError("the dtype of an $array is none of " + ", ".join(DTYPES))
    lengths = type(shape) is list and all(type(n) is int and n >= 0 for n in shape)
    if not lengths or len(shape) > 32:
        raise ValueError("the shape of an $array is no list of at most 32 lengths")
    return math.prod(shape)


def inflated(data: str | bytes, size: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """The ``size`` bytes that were deflated and are given in base 64; else ``ValueError``."""
    try:
        inflater = zlib.decompressobj(wbits)
        # A byte more than there should be, so that no more than that is ever inflated.
        content = inflater.decompress(base64.b64decode(data, validate=True), size + 1)
    except (zlib.error, ValueError, OverflowError) as error:
        raise ValueError(f"the data of an array is damaged ({error})") from error
    if len(content) != size or not inflater.eof:
        raise ValueError("the data of an array has not the length that its shape has")
    return content
