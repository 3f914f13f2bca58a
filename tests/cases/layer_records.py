"""Believable records of quantities of layers, for tests of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradlens import quantities
from gradlens.history.undefined import Undefined
from gradlens.history.view import View

KINDS = (
    *("OutputNorm", "ParameterNorm", "UpdateGeometry", "ClippedGradNorm", "RelativeUpdate"),
    *("OptimizerState", "OutputActivation", "AttentionLogits", "ActivationOutliers"),
    *("OutputEntropy", "WeightSpectrum", "InputCovariance", "OutputGradientCovariance"),
)
VIEWS: dict[str, View] = {
    **{kind: getattr(quantities, kind).view for kind in KINDS},
    "Aggregate": View("Output norm (epoch)", group="layers", yscale="log"),
}
"""Kinds of quantities, and how they wish to be shown."""


def layer_record(kind: str, step: int, last: int, names: Mapping[str, Any], rng: Any) -> Any:
    """One record of a run in which layers shrink and units die."""
    time = step / max(last, 1)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    sizes = {n: float((2 - time) / (p + 1) * rng.lognormal(0, 0.1)) for p, n in enumerate(layers)}
    if kind == "OutputNorm":
        return {"layers": sizes}
    if kind == "ParameterNorm":
        return {"parameters": {name: sizes[name.rpartition(".")[0]] for name in names}}
    if kind == "UpdateGeometry":
        turn = math.cos(3 * time) if step else Undefined("there is no step before")
        parts = {n: {"norm": sizes[n.rpartition(".")[0]], "correlation": turn} for n in names}
        return {"parameters": parts, "correlation": turn}
    if kind == "ClippedGradNorm":
        return {name: sizes[name.rpartition(".")[0]] for name in names}
    if kind == "RelativeUpdate":
        parts = {n: {"value": 0.01 * sizes[n.rpartition(".")[0]], "rms": 1e-3} for n in names}
        return {"parameters": parts, "value": 0.01 * (2 - time), "rms": 1e-3}
    if kind == "OptimizerState":
        entries = {"m": 0.5 + time, "cosine": math.cos(time), "root_v": 1.0, "rms": 1.2 - time}
        parts = {
            n: {k: v + sizes[n.rpartition(".")[0]] / 9 for k, v in entries.items()} for n in names
        }
        return {"parameters": parts, "cosine": math.cos(time), "largest_rms": 1.2 - time}
    if kind == "OutputActivation":
        return activation({name: 0.3 * time + 0.1 * p for p, name in enumerate(layers[:6])})
    if kind == "WeightSpectrum":
        parts = {n: {"norm": s, "residual": 0.0, "stable_rank": 9.0} for n, s in sizes.items()}
        return {"parameters": {f"{name}.weight": part for name, part in parts.items()}}
    if kind == "AttentionLogits":
        return {"layers": {n: size * np.array([1, 2000.0**time]) for n, size in sizes.items()}}
    if kind == "ActivationOutliers":
        return outliers(sizes, time)
    if kind == "OutputEntropy":
        return predictions(layers[-1], 1 - time)
    if kind == "Aggregate":
        return {"layers": {name: statistics(size) for name, size in sizes.items()}}
    return {"layers": {name: covariance(size, rng) for name, size in sizes.items()}}


def activation(dead: Mapping[str, float]) -> dict[str, Any]:
    """Shares of active and dead units."""
    layers = {
        name: {"active": 0.6 * (1 - d), "dead": d, "least": 0.0, "least_unit": 3}
        for name, d in dead.items()
    }
    return {
        "layers": layers,
        "active": float(np.mean([layer["active"] for layer in layers.values()])),
        "dead": float(np.mean([*dead.values()])),
        "worst": max(dead.values()),
    }


def outliers(sizes: Mapping[str, float], time: float) -> dict[str, Any]:
    """Largest outputs, of which those of one layer grow."""
    grown = {
        name: size * 20 ** (time * (place == 1)) for place, (name, size) in enumerate(sizes.items())
    }
    layers = {
        name: {"largest": 4 * size, "kurtosis": size**2 - 1, "channel": 7, "position": 0}
        for name, size in grown.items()
    }
    return {
        "layers": layers,
        **{n: max(one[n] for one in layers.values()) for n in ("largest", "kurtosis")},
    }


def predictions(name: str, share: float) -> dict[str, Any]:
    """A network of ten classes whose predictions become one."""
    layer = {
        "entropy": share * math.log(10), "rms": 2.0, "largest": 9.0, "top_share": 1 - 0.9 * share,
        "top_class": 3, "classes": 10,
    }  # fmt: skip
    return {"layers": {name: layer}, "entropy": share, "top_share": 1 - 0.9 * share}


def statistics(size: float) -> dict[str, float]:
    """What an epoch says of one number."""
    return {"mean": size, "std": 0.1 * size, "min": 0.8 * size, "q1": 0.95 * size,
            "median": size, "q3": 1.05 * size, "max": 1.3 * size, "iqr": 0.1 * size,
            "count": 20}  # fmt: skip


def covariance(size: float, rng: Any) -> dict[str, Any]:
    """Eigenvalues that decay, the smallest of them zero."""
    found = np.sort(size * np.exp(-np.arange(5)) * rng.lognormal(0, 0.2, 5))[::-1]
    return {
        "eigenvalues": found.tolist(),
        "trace": float(found.sum()),
        "stable_rank": float(found.sum() / found[0]),
        "condition": math.inf,
        "condition_20": float(found[0] / found[1]),
        "condition_50": float(found[0] / found[2]),
        "condition_80": float(found[0] / found[4]),
    }
