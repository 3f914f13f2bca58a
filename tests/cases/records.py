"""Records of a history compared: numbers, arrays and reasons inside of dicts and lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlens import History
from gradlens.history.undefined import Undefined

Path = tuple[Any, ...]


def leaves(record: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What is inside of dicts, lists and tuples, and the keys and places that lead to it."""
    if isinstance(record, (Mapping, list, tuple)):
        for key, part in record.items() if isinstance(record, Mapping) else enumerate(record):
            yield from leaves(part, (*path, key))
    else:
        yield path, record


def unnamed(record: Any) -> Any:
    """The record with lists in place of dicts, in the order of their keys, which may differ."""
    if isinstance(record, Mapping):
        return [unnamed(record[key]) for key in sorted(record)]
    return [*map(unnamed, record)] if isinstance(record, (list, tuple)) else record


def pairs(found: Any, expected: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """The leaves of two records, of which the dicts and lists must be the same."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), path
        for key, part in expected.items():
            yield from pairs(found[key], part, (*path, key))
    elif isinstance(expected, (list, tuple)):
        assert isinstance(found, (list, tuple)), path
        assert len(found) == len(expected), path
        for place, part in enumerate(expected):
            yield from pairs(found[place], part, (*path, place))
    else:
        yield path, found, expected


def assert_identical(found: Any, expected: Any) -> None:
    """The same types, the same numbers bit for bit, and the same reasons where there are none."""
    for path, one, other in pairs(found, expected):
        assert type(one) is type(other), path
        if isinstance(other, (np.ndarray, Tensor)):
            assert one.dtype == other.dtype, path
            np.testing.assert_array_equal(one, other, str(path))
        else:
            assert repr(one) == repr(other), path


def assert_same_records(found: Any, expected: Any, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    """The same texts and counts, and numbers that are the same but for rounding.

    Where one has no number, the other has none either. Series are records by step.
    """
    for path, one, other in pairs(found, expected):
        if other is None or isinstance(other, str):
            assert one == other, path
        elif isinstance(other, np.ndarray) and other.dtype.kind in "iub":
            np.testing.assert_array_equal(one, other, str(path))
        else:
            numbers = (torch.as_tensor(each, dtype=torch.float64).numpy() for each in (one, other))
            np.testing.assert_allclose(*numbers, rtol, atol, err_msg=str(path))


def assert_same_histories(found: History, expected: History, rtol: float = 1e-9) -> None:
    """The same series, with the same records at the same steps."""
    assert found.names == expected.names
    for name in expected.names:
        assert_same_records(found[name], expected[name], rtol)


def assert_same_searches(found: Any, expected: Any) -> None:
    """Values of ``CriticalSharpness`` that can be the same: rounding decides which rates it tries.

    Series are records by step.
    """
    for step, other in expected.items():
        one = found[step]
        assert repr(one["threshold"]) == repr(other["threshold"])
        if isinstance(other["ratio"], Undefined):
            assert one["ratio"].reason == other["ratio"].reason
        else:
            assert one["low"] <= other["high"]
            assert other["low"] <= one["high"]
