"""JSON lines that keep NaN, infinities, NaN reasons and arrays intact.

Everything is strict JSON. What JSON has no word for is an object with one marked key:
``{"$float": "nan"}``, ``{"$undefined": reason}`` or ``{"$array": [dtype, shape, data]}``,
where ``data`` is the array's little-endian bytes, deflated, in base 64. A user's own key that
begins with a dollar sign gets a second one.

Dataclasses come back from plain data by the types of their fields. Such a type may be a dataclass,
``Mapping[str, T]``, ``tuple[T, ...]``, a union, a ``Literal``, an array, or one of ``str``,
``float``, ``int`` and ``bool``.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from gradlens.history.undefined import Undefined

Value: TypeAlias = Any
"""``float``, ``int``, ``bool``, ``str``, ``None``, ``numpy.ndarray``, or lists and
string-keyed dicts of these."""

LARGEST = int(math.ldexp(1, 1023))
"""Whole numbers have at most this size, which a float can have, too."""

DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
"""What an array's elements may be."""

MARKS = ("$float", "$undefined", "$array")
"""Keys of what JSON has no word for."""


DEEPEST = 40
"""How deep a value may be nested, which is far from Python's limit of recursion."""


def to_line(record: Mapping[str, Value]) -> str:
    """One line of strict JSON, without the line break; ``TypeError`` as in ``encoded``."""
    return line_of(encoded(record))


def line_of(stored: Mapping[str, Any]) -> str:
    """One line of strict JSON with a record that has been ``encoded``."""
    return json.dumps(stored, allow_nan=False, separators=(",", ":"))


def parsed(text: str, decoder: json.JSONDecoder | None = None) -> Any:
    """What a JSON text holds; ``ValueError`` if it is none."""
    try:
        return (decoder or json.JSONDecoder()).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos}") from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def stored_record(line: str) -> dict[str, Any]:
    """A record as JSON has it; ``ValueError`` if it is none."""
    record = parsed(line, _STRICT)
    if not isinstance(record, dict):
        raise ValueError("a record is a JSON object")
    return record


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)


@dataclass(frozen=True)
class Encoded:
    """A value that was ``encoded`` before."""

    content: Any


def refused(value: object) -> Any:
    """``TypeError`` for a value that can't be recorded."""
    raise _unrecordable(f"a {type(value).__name__}")


def encoded(value: Any, other: Callable[[Any], Any] = refused, depth: int = 0) -> Any:
    """A value as JSON has it; dataclasses are dicts, tuples are lists, and keys are texts.

    What ``other`` makes of a value of another type is taken in its place. ``TypeError`` for what
    can't be recorded.
    """
    if isinstance(value, Undefined):
        return {"$undefined": _text(value.reason)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise _unrecordable("a whole number that is larger than any float")
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_array(np.asarray(value))
    if isinstance(value, Encoded):
        return value.content
    if depth > DEEPEST:
        raise _unrecordable(f"a value that is nested more than {DEEPEST} levels deep")
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        found = {
            # Most keys are such, and most values numbers: calls take longer than these checks.
            key if type(key) is str and key.isascii() and key[:1] != "$" else _key(key): entry
            if type(entry) is float and math.isfinite(entry)
            else encoded(entry, other, depth + 1)
            for key, entry in value.items()
        }
        if len(found) < len(value):
            raise TypeError(f"two keys of {list(value)} are the same as text: use strings")
        return found
    if isinstance(value, (list, tuple)):
        return [encoded(entry, other, depth + 1) for entry in value]
    return encoded(other(value), depth=depth)


def _unrecordable(what: str) -> TypeError:
    return TypeError(
        f"{what} can't be recorded: return a number, a string, an array or tensor, or lists and "
        "dicts of these"
    )


def _text(text: str) -> str:
    """A text as it is, with half a character (as in names of files) written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _key(key: Any) -> str:
    text = str(key)
    return _text(f"${text}" if text.startswith("$") else text)


def _encode_array(array: NDArray[Any]) -> Any:
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise _unrecordable(f"an array of {array.dtype}")
    if not array.ndim:
        return encoded(array.item())
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode("ascii")
    return {"$array": [array.dtype.str, list(array.shape), data]}


def marked(mark: str, entry: Any) -> float:
    """The number that stands behind a mark; ``ValueError`` or ``TypeError`` if there is none."""
    return Undefined(entry) if mark == "$undefined" else float(entry)


def unmarked(key: str) -> str:
    """A key of a user's dict from that of the file."""
    return key.removeprefix("$")


def array_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Size of an array; ``ValueError`` for no dtype of ``DTYPES``."""
    if dtype not in DTYPES:
        raise ValueError("the dtype of an $array is none of " + ", ".join(DTYPES))
    return math.prod(shape) * np.dtype(dtype).itemsize


def array_of(dtype: str, shape: Sequence[int], content: bytes) -> NDArray[Any]:
    array = np.frombuffer(content, dtype).reshape(shape)
    return array.astype(array.dtype.newbyteorder("="))


def inflated(data: str | bytes, size: int) -> bytes:
    """The ``size`` bytes that were deflated and are given in base 64; else ``ValueError``."""
    try:
        inflater = zlib.decompressobj()
        # A byte more than there should be, so that no more than that is ever inflated.
        content = inflater.decompress(base64.b64decode(data, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(f"the data of an array is damaged ({error})") from error
    if len(content) != size or not inflater.eof:
        raise ValueError("the data of an array has not the length that its shape has")
    return content


# Dataclasses from plain data ------------------------------------------------------------------

SHOWN = 60
"""So many characters of a wrong value are quoted in an error."""


def from_plain(kind: Any, found: Any, where: str) -> Any:
    """A value of a type from plain data; ``ValueError`` names ``where`` and data of another form.

    What a dataclass has no field for is left out.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        others = [each for each in arguments if each is not NoneType]
        if found is None and NoneType in arguments:
            return None
        simple = [each for each in others[:-1] if each is type(found)]
        return from_plain([*simple, others[-1]][0], found, where)
    if origin is Literal:
        if found not in arguments:
            raise _wrong(found, where, f"one of {', '.join(map(repr, arguments))}")
        return found
    if origin is tuple:
        entries = _of_kind(list, found, where)
        kinds = arguments[:1] * len(entries) if arguments[-1] is Ellipsis else arguments
        places = enumerate(zip(kinds, entries, strict=True))
        return tuple(from_plain(each, entry, f"{where}[{n}]") for n, (each, entry) in places)
    if origin is Mapping:
        entries = _of_kind(dict, found, where)
        return {k: from_plain(arguments[1], entry, f"{where}.{k}") for k, entry in entries.items()}
    types, content = _types(kind), {}
    if not types:
        return _of_kind(kind, found, where)
    for name, each in types.items():
        if name not in _of_kind(dict, found, where):
            raise ValueError(f"{where} has no {name!r}")
        content[name] = from_plain(each, found[name], f"{where}.{name}")
    return kind(**content)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; empty for other types."""
    if not is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _of_kind(kind: Any, found: Any, where: str) -> Any:
    if type(found) is not kind:
        raise _wrong(found, where, f"of the type {kind.__name__}")
    return found


def _wrong(found: Any, where: str, expected: str) -> ValueError:
    return ValueError(f"{where} is {repr(found)[:SHOWN]}, not {expected}")
