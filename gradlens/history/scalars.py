"""What each series of a run says in single numbers, one per step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from gradlens.history.histograms import histogram
from gradlens.history.lines import (
    PLAIN,
    Line,
    durations,
    line,
    line_through,
    number,
    quantiles,
    rms,
)
from gradlens.history.records import NOUNS, Source
from gradlens.history.series import Series
from gradlens.history.undefined import Undefined
from gradlens.history.view import GROUPS_OF_LOGGED, View

FEW = 6
"""Up to so many entries of a dict are numbers of their own."""

SIZES = {*PLAIN, np.ndarray}
"""Types of values that a number describes."""


@dataclass(frozen=True)
class Scalar:
    """One number per step, taken from the series ``series``.

    ``part`` says what was taken; it is empty where the series itself is one of numbers.
    """

    series: str
    part: str
    line: Line
    kinds: tuple[str, ...]
    view: View

    @property
    def name(self) -> str:
        """Series and part, as short as they can be said."""
        return f"{self.series} {self.part}".rstrip()


def scalars_of(
    name: str, records: Series, source: Source | None, parameters: Collection[str]
) -> tuple[Scalar, ...]:
    """All numbers per step of a series; see ``History.scalars``.

    ``source`` is ``None`` for what the training loop has logged; ``parameters`` are the names of
    the network's.
    """
    logged = View(name, group=GROUPS_OF_LOGGED.get(name, "other"))
    kinds, view = (source.kinds, source.view) if source else ((), logged)
    parts = _parts(kinds, records, {*parameters})
    return tuple(Scalar(name, part, one, kinds, view) for part, one in parts.items())


# From a series to its parts -----------------------------------------------------------------

Reader = Callable[[Any], float]


@dataclass(frozen=True)
class Part:
    """What to read of a series of dicts: an entry, or what ``read`` makes of each record.

    ``read`` needs records that have the entry ``key``, if it has one.
    """

    name: str = ""
    key: str = ""
    read: Reader | None = None


def _parts(kinds: Sequence[str], records: Series, parameters: set[str]) -> dict[str, Line]:
    if "Time" in kinds:
        return {"s/step": durations(line(records))} if records else {}
    found = records.entries
    known = next((KNOWN[kind] for kind in kinds if found and kind in KNOWN), None)
    parts = _of_each(records, parameters) if known is None else known
    chosen = [part for part in parts if not part.key or part.key in found]
    fitting = Mapping if found else object
    return {part.name: _read(records, part, fitting) for part in chosen}


def _of_each(records: Series, parameters: set[str]) -> tuple[Part, ...]:
    named = [name for name in records.entries if records.having(name).kinds & SIZES]
    if len(named) > FEW or parameters & {*named}:
        return (
            Part("least", read=partial(_over_all, min)),
            Part("most", read=partial(_over_all, max)),
        )
    if named:
        return tuple(Part(name, name) for name in named)
    if np.ndarray in records.kinds:
        return (Part("median", read=lambda value: float(quantiles(value, (0.5,))[0])),)
    return (Part(read=number),) if records.kinds & SIZES else ()


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _read(records: Series, part: Part, fitting: type) -> Line:
    if part.read is None:
        numbers = records.column(part.key)
        if np.ndarray not in numbers.kinds:
            return line(numbers)
    read = part.read or (lambda value: _size(value.get(part.key)))

    def number_of(value: Any) -> Any:
        """What doesn't fit is a NaN, which may have a reason."""
        is_fit = isinstance(value, fitting) and not isinstance(value, Undefined)
        return read(value) if is_fit else value

    return line_through(records.steps, [*map(number_of, records.values())])


# From a record to a number ------------------------------------------------------------------


def _size(value: Any) -> float:
    """A number as it is, with the reason of a NaN, and an array's root mean square."""
    if isinstance(value, float):
        return value
    return rms(value) if _is_array(value) and value.ndim else number(value)


def _over_all(reduce: Callable[[list[float]], Any], value: Mapping[str, Any]) -> float:
    """One number for all entries that are numbers or arrays; NaN if one is, or if there is none."""
    numbers = (v for v in value.values() if isinstance(v, (int, float)) or _is_array(v))
    sizes = [_size(each) for each in numbers]
    missing = [size for size in sizes if math.isnan(size)]
    if missing or not sizes:
        return next((size for size in missing if isinstance(size, Undefined)), math.nan)
    return float(reduce(sizes))


def _norm_of_elements(value: Mapping[str, Any]) -> float:
    norms = [np.linalg.norm(array) for array in value.values() if _is_array(array)]
    return float(np.linalg.norm(norms))


def _first_eigenvalue(value: Mapping[str, Any]) -> float:
    if not value.get("converged", True):
        return Undefined(str(value.get("reason")))
    return number(next(iter(value.get("eigenvalues", ())), None))


def _median(found: Sequence[float]) -> float:
    """The median of those that are numbers; the first of them, with its reason, if none is."""
    known = [one for one in found if not math.isnan(one)]
    return float(np.median(known)) if known else next(iter(found), math.nan)


def _typical(fields: tuple[str, ...], value: Mapping[str, Any]) -> float:
    """The median over layers or parameters; NaN if none of them has a number.

    Of a dict for each of them, the first of ``fields`` that it has counts.
    """
    by_name = (value[noun] for noun in NOUNS if isinstance(value.get(noun), Mapping))
    return _median([_size(_first(part, fields)) for part in [*next(by_name, {}).values()]])


def _first(part: Any, fields: tuple[str, ...]) -> Any:
    if not isinstance(part, Mapping):
        return part
    return next((part[field] for field in fields if field in part), None)


_CLIPPED = (Part("clipped", "below", lambda value: histogram(0, value).clipped),)
_NORM = (Part(read=partial(_over_all, np.linalg.norm)),)
_MEDIAN = (Part("median", read=partial(_typical, ())),)
_GEOMETRY = (
    Part("median", read=partial(_typical, ("norm", "rms"))),
    Part("correlation", "correlation"),
)
_COVARIANCE = (
    Part("median trace", read=partial(_typical, ("trace",))),
    Part("median stable rank", read=partial(_typical, ("stable_rank",))),
)
_SPECTRUM = (
    Part("median σ₁", read=partial(_typical, ("norm",))),
    Part("median stable rank", read=partial(_typical, ("stable_rank",))),
)

OF_LAYERS: Mapping[str, tuple[Part, ...]] = {
    **dict.fromkeys(("OutputNorm", "InputNorm", "InputMean", "InputStd", "DeadNeurons"), _MEDIAN),
    **dict.fromkeys(("RankMe", "MeanTID", "VarTID", "ParameterNorm"), _MEDIAN),
    **dict.fromkeys(("ConditionNumber", "WeightSignFlips"), _MEDIAN),
    **dict.fromkeys(("OutputGradientGeometry", "InputGradientGeometry"), _GEOMETRY),
    **dict.fromkeys(("GradientGeometry", "UpdateGeometry"), _GEOMETRY),
    **dict.fromkeys(("InputCovariance", "OutputGradientCovariance"), _COVARIANCE),
    **dict.fromkeys(("WeightSpectrum", "UpdateSpectrum"), _SPECTRUM),
    "Aggregate": (Part("mean", "mean"), Part("median", "median")),
}
"""What is worth telling of records by layer, and of aggregates."""

KNOWN: Mapping[str, tuple[Part, ...]] = {
    **OF_LAYERS,
    **dict.fromkeys(("GradNorm", "ClippedGradNorm", "Distance", "UpdateSize"), _NORM),
    "OptimizerState": (Part("largest RMS", "largest_rms"), Part("cosine", "cosine")),
    "RelativeUpdate": (Part("", "value"), Part("RMS", "rms")),
    "Parameters": (Part("norm", read=_norm_of_elements),),
    **dict.fromkeys(("GradHist1d", "GradHist2d"), _CLIPPED),
    "GradCovariance": (Part("trace", "trace"), Part("rank", "effective_rank")),
    "HessTrace": (Part("", "trace"),),
    "HessEigenvalues": (Part("λ1", "eigenvalues", _first_eigenvalue),),
    "SpectralDensity": (),
    "DirectionalDerivatives": (
        Part("overlap", "overlap"),
        Part("median SNR", "gradient_snr", lambda value: _median(value["gradient_snr"])),
    ),
    **dict.fromkeys(
        ("Stability", "CriticalSharpness"), (Part("sharpness", "sharpness"), Part("ratio", "ratio"))
    ),
    "StepLedger": (Part("change", "change"), Part("rest", "rest")),
    "GroupGradients": (Part("smallest cosine", "value"),),
    **dict.fromkeys(
        ("GradNoiseScale", "NormTest", "InnerTest", "OrthoTest", "MeanGSNR"), (Part("", "value"),)
    ),
}
"""What is worth telling of the records of known quantities."""
