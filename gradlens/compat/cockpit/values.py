"""Values in the forms that cockpit's quantities give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gradlens.history.history import History
from gradlens.history.undefined import Undefined


def output_of(history: History) -> dict[int, dict[str, Any]]:
    """All values of a history in cockpit's forms: global step -> name -> value."""
    series = {name: series_of(history, name) for name in history.names}
    return {
        step: {name: one[step] for name, one in series.items() if step in one}
        for step in history.steps
    }


def series_of(history: History, name: str) -> dict[int, Any]:
    """The values of one series in cockpit's form, by global step."""
    source = history.sources.get(name)
    kind = next((k for k in source.kinds if k in FORMS), "") if source is not None else ""
    form = FORMS.get(kind, _plain)
    return {step: form(value) for step, value in history[name].items()}


def array_as_json(array: Any) -> dict[str, Any]:
    """An array as json_tricks writes it, which cockpit's logs are read by."""
    found = np.asarray(array)
    return {"__ndarray__": found.tolist(), "dtype": str(found.dtype), "shape": list(found.shape)}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Undefined) else value


def _list(value: Any) -> Any:
    return [*map(_plain, value.values())] if isinstance(value, Mapping) else _plain(value)


def _nested_lists(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _plain(value)
    return [np.asarray(array).tolist() for array in value.values()]


def _blocks(value: Any) -> Any:
    """The traces of the parameters' blocks; that of all where the blocks weren't computed."""
    if not isinstance(value, Mapping):
        return _plain(value)
    blocks = value.get("parameters") or {"all": value}
    return [_plain(block["trace"]) for block in blocks.values()]


def _histogram(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _plain(value)
    found = {"hist": value["hist"], "edges": value["edges"]}
    parts = value.get("parameters", {})
    for number, part in enumerate(parts.values()):
        found[f"param_{number}"] = {"hist": part["hist"], "edges": value["edges"]}
    return found | ({"param_groups": len(parts)} if parts else {})


FORMS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("GradNorm", "Distance", "UpdateSize"), _list),
    **dict.fromkeys(("GradHist1d", "GradHist2d"), _histogram),
    "Parameters": _nested_lists,
    "HessTrace": _blocks,
}
"""Quantities whose values have another form in cockpit."""
