"""The forms that cockpit-for-pytorch 1.0.2 gives to values, and the logs that it leaves.

Logs are the JSON files of its ``Cockpit.write``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gradlens.history.history import History
from gradlens.history.json_lines import Value, from_plain, parsed
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View

_Log: TypeAlias = dict[int, dict[str, Any]]

BROKEN = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What decoding raises on a file that isn't what it should be."""


def read_cockpit_log(path: str | Path) -> History:
    """The history in a log, with every quantity's values in the form that ours have.

    cockpit keeps no parameter names, so they are ``param_0``, ``param_1``, ...; nor shapes, which
    are ``()`` unless ``Parameters`` was tracked. What it has under names of no quantity of ours is
    left as it is. ``ValueError`` for a file that isn't a whole log.
    """
    log = _parsed(path)
    history = History(_sources(log))
    for step, values in sorted(log.items()):
        converted = {name: _converted(path, step, name, value) for name, value in values.items()}
        history.append(step, {n: value for n, value in converted.items() if value is not None})
    history.parameters = _shapes(history)
    return history


def _parsed(path: str | Path) -> _Log:
    try:
        text = Path(path).read_text("utf-8")
        log = _decoded(parsed(text))
        steps = {int(step): dict(values) for step, values in log.items()}
        for step in steps:
            from_plain(int, step, "a step")
    except BROKEN as error:
        raise ValueError(
            f"{path} is not a gradlens run, and no whole log of cockpit's either, which is a JSON "
            f"object of quantities by step: {error}"
        ) from error
    if not steps:
        raise ValueError(f"{path} has no steps: nothing was tracked, or it is no log of cockpit's")
    return steps


def _decoded(value: Any) -> Any:
    """A value whose arrays json_tricks has encoded."""
    if isinstance(value, list):
        return [_decoded(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if "__ndarray__" in value:
        # A list: json_tricks has bytes where it is asked for a compact file, as by no cockpit.
        found = np.asarray(value["__ndarray__"], np.dtype(value["dtype"])).reshape(value["shape"])
        return found if found.ndim else found.item()
    return {key: _decoded(entry) for key, entry in value.items()}


def _sources(log: _Log) -> dict[str, Source]:
    names = dict.fromkeys(name for values in log.values() for name in values)
    return {name: Source((name,), VIEWS[name]) for name in names if name in VIEWS}


def _shapes(history: History) -> dict[str, tuple[int, ...]]:
    records = [value for name in (*PARTS, "HessTrace") for value in _values(history, name)]
    blocks = (value.get("parameters", value) for value in records)
    names: Mapping[str, Any] = max(blocks, key=len, default={})
    arrays: Mapping[str, Any] = next(iter(_values(history, "Parameters")), {})
    return {name: np.shape(arrays.get(name, 0.0)) for name in names}


def _values(history: History, name: str) -> list[Any]:
    return list(history[name].values()) if name in history else []


# From cockpit's values to ours ----------------------------------------------------------------


def _converted(path: str | Path, step: int, name: str, value: Any) -> Value:
    try:
        return CONVERSIONS[name](value) if name in CONVERSIONS else value
    except BROKEN as error:
        raise ValueError(
            f"{path} has a value of {name} at step {step} that cockpit 1.0.2 doesn't write: {error}"
        ) from error


def _by_parameter(values: Sequence[Value]) -> dict[str, Value]:
    return {f"param_{index}": value for index, value in enumerate(values)}


def _exact_trace(blocks: Sequence[float]) -> dict[str, Value]:
    parts = _by_parameter([_without_error(block) for block in blocks])
    return {**_without_error(math.fsum(blocks)), "method": "exact", "parameters": parts}


def _without_error(trace: float) -> dict[str, float]:
    return {"trace": trace, "standard_error": 0.0, "low": trace, "high": trace}


def _histogram(value: Mapping[str, Any]) -> dict[str, Value]:
    record = {"hist": _counts(value), "edges": value["edges"]}
    parts = [value[f"param_{index}"] for index in range(value.get("param_groups", 0))]
    if parts:
        # Single parameters have the edges of the whole.
        record["parameters"] = _by_parameter([{"hist": _counts(part)} for part in parts])
    return record


def _counts(value: Mapping[str, Any]) -> Value:
    return np.rint(value["hist"]).astype(np.int64)


PARTS: dict[str, Callable[[Any], Value]] = {
    **dict.fromkeys(("GradNorm", "Distance", "UpdateSize"), _by_parameter),
    "Parameters": lambda values: _by_parameter([np.asarray(v, np.float64) for v in values]),
}
"""Quantities whose values are lists with an entry for each parameter."""

CONVERSIONS: dict[str, Callable[[Any], Value]] = {
    **PARTS,
    "HessTrace": _exact_trace,
    "GradHist1d": _histogram,
    "GradHist2d": _histogram,
}

VIEWS = {
    "Alpha": View("Local step size α", group="step size", label="α"),
    "CABS": View("Batch size", group="noise", yscale="log", label="batch size"),
    "Distance": View("Distance from the start", group="step size", label="‖θ − θ₀‖"),
    "EarlyStopping": View("Early stopping", group="noise", label="criterion"),
    "GradHist1d": View("Gradient elements", group="gradients", yscale="log", label="count"),
    "GradHist2d": View("Joint histogram", group="gradients"),
    "GradNorm": View("Gradient norm", group="step size", yscale="log", label="‖∇L‖"),
    "HessMaxEV": View("Largest Hessian eigenvalue", group="curvature", yscale="symlog", label="λ₁"),
    "HessTrace": View("Hessian trace", group="curvature", yscale="symlog", label="tr(H)"),
    "InnerTest": View("Inner product test", group="gradients", yscale="log", label="θ"),
    "Loss": View("Loss", group="performance", label="loss"),
    "MeanGSNR": View("Mean GSNR", group="noise", yscale="log", label="mean GSNR"),
    "NormTest": View("Norm test", group="gradients", yscale="log", label="θ"),
    "OrthoTest": View("Orthogonality test", group="gradients", yscale="log", label="ν"),
    "Parameters": View("RMS of parameters", group="layers"),
    "TICDiag": View("TIC (diagonal)", group="curvature", yscale="log", label="TIC"),
    "TICTrace": View("TIC (trace)", group="curvature", yscale="log", label="TIC"),
    "Time": View("Time per step", group="performance", label="seconds"),
    "UpdateSize": View("Update size", group="step size", yscale="log", label="‖θₙ₊₁ − θₙ‖"),
}
"""All quantities of cockpit 1.0.2, with the views of our quantities of the same names.

They are written out because our quantities need torch, and plotting a log doesn't; a test compares
the two.
"""


# From our values to cockpit's ------------------------------------------------------------------


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
    return {
        step: form(value) if isinstance(value, Mapping) else _plain(value)
        for step, value in history[name].items()
    }


def array_as_json(array: Any) -> dict[str, Any]:
    """An array as json_tricks writes it, which cockpit's logs are read by."""
    found = np.asarray(array)
    return {"__ndarray__": found.tolist(), "dtype": str(found.dtype), "shape": list(found.shape)}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Undefined) else value


def _list(value: Mapping[str, Any]) -> list[Any]:
    entries = map(_plain, value.values())
    return [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in entries]


def _blocks(value: Mapping[str, Any]) -> list[Any]:
    """The traces of the parameters' blocks; that of all where the blocks weren't computed."""
    blocks = value.get("parameters") or {"all": value}
    return [_plain(block["trace"]) for block in blocks.values()]


def _histogram_of(value: Mapping[str, Any]) -> dict[str, Any]:
    found = {"hist": value["hist"], "edges": value["edges"]}
    parts = value.get("parameters", {})
    for number, part in enumerate(parts.values()):
        found[f"param_{number}"] = {"hist": part["hist"], "edges": value["edges"]}
    return found | ({"param_groups": len(parts)} if parts else {})


FORMS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(("GradNorm", "Distance", "UpdateSize", "Parameters"), _list),
    **dict.fromkeys(("GradHist1d", "GradHist2d"), _histogram_of),
    "HessTrace": _blocks,
}
"""Quantities whose values are dicts here, and have another form in cockpit."""
