"""Spectra of what flows through layers."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.quantities.explained import EMPTY, NO_FEATURES, NOT_CONVERGED
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.signals.predicates import is_affine
from gradlens.signals.reductions import Gram, Products
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal

SHARES = {"condition_20": 0.2, "condition_50": 0.5, "condition_80": 0.8}
"""Condition numbers that leave out all eigenvalues behind this share of them."""


@dataclass(eq=False)
class _CovarianceSpectrum(LayerQuantity, ABC):
    reduction = Gram()
    default_layers = Selection((is_affine,))

    k: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"{self.name}: k={self.k} asks for no eigenvalue: use 1 or more")

    def layer_value(self, layer: str, module: nn.Module, seen: Products) -> Any:
        return covariance_record(seen, self.k)


class InputCovariance(_CovarianceSpectrum):
    """Spectrum of the covariance of each layer's input features, over samples and positions.

    For each layer, ``"eigenvalues"`` are the ``k`` largest, descending, ``"trace"`` is the sum of
    all, ``"stable_rank"`` trace/λ₁, ``"condition"`` λ₁ over the smallest one, and
    ``"condition_20"``, ``"condition_50"`` and ``"condition_80"`` are λ₁ over the one that 20, 50
    or 80 % of them are in front of (Huang et al., 2020, arXiv:2002.10801). There are as many as
    features, which are channels in a convolution; one that is zero to rounding makes a condition
    number infinite. They come from the smaller of the two Gram matrices, and no data is stored.
    """

    signal = Signal.INPUT
    view = View("Input covariance", group="layers", yscale="log", label="eigenvalue")


class OutputGradientCovariance(_CovarianceSpectrum):
    """Spectrum of the covariance of the gradient at each layer's output: as ``InputCovariance``."""

    signal = Signal.OUTPUT_GRADIENT
    view = View("Output gradient covariance", group="layers", yscale="log", label="eigenvalue")


class RankMe(LayerQuantity):
    """Effective rank of each layer's output, a matrix of samples and positions by features.

    exp(−Σₖ (pₖ + ε) log(pₖ + ε)) with pₖ = σₖ/‖σ‖₁ and ε = 1e-7 (Garrido et al., 2023,
    arXiv:2210.02885); σₖ are the singular values of the matrix, which is not centred.
    """

    signal = Signal.OUTPUT
    reduction = Gram()
    default_layers = Selection((is_affine,))
    view = View("RankMe", group="layers", label="effective rank")

    def layer_value(self, layer: str, module: nn.Module, seen: Products) -> float:
        nothing = _nothing(seen)
        if nothing is not None:
            return nothing
        values = _eigenvalues(seen.matrix)
        if isinstance(values, float):
            return values
        # The root of rounding would be large.
        values[values <= _precision(seen) * values[-1]] = 0
        singular = values.sqrt()
        total = float(singular.sum())
        if not total:
            return Undefined("the output is zero")
        shares = singular / total + 1e-7
        return math.exp(-float((shares * shares.log()).sum()))


def _nothing(products: Products) -> Undefined | None:
    """Why there is no matrix, if there is none."""
    if not products.positions:
        return Undefined(EMPTY)
    return None if products.features else Undefined(NO_FEATURES)


def _eigenvalues(matrix: Tensor) -> Tensor | float:
    """Ascending; a NaN if something isn't finite."""
    if not bool(matrix.isfinite().all()):
        return math.nan
    try:
        return torch.linalg.eigvalsh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return Undefined(NOT_CONVERGED)


def covariance_record(products: Products, k: int) -> Any:
    """What is recorded of the spectrum of a covariance."""
    nothing = _nothing(products)
    if nothing is not None:
        return nothing
    if products.positions < 2:
        return Undefined("there is one sample: a covariance needs two")
    values = _eigenvalues(_centred(products))
    if isinstance(values, float):
        return values
    known = values.flip(0).clamp(min=0) / (products.positions - 1)
    spectrum = torch.cat([known, known.new_zeros(products.features)])[: products.features]
    rounding = _rounding(products)
    trace, largest = float(spectrum.sum()), float(spectrum[0])
    record: dict[str, Any] = {"eigenvalues": spectrum[:k].tolist(), "trace": trace}
    if largest <= rounding:
        nothing = Undefined("all samples are equal: the covariance is zero")
        return record | dict.fromkeys(["stable_rank", "condition", *SHARES], nothing)
    record |= {"stable_rank": trace / largest, "condition": _ratio(spectrum, -1, rounding)}
    places = {name: int(share * len(spectrum)) for name, share in SHARES.items()}
    return record | {name: _ratio(spectrum, place, rounding) for name, place in places.items()}


def _centred(products: Products) -> Tensor:
    matrix, total = products.matrix, products.total
    if total is not None:
        return matrix - torch.outer(total, total) / products.positions
    return matrix - matrix.mean(0) - matrix.mean(1, keepdim=True) + matrix.mean()


def _rounding(products: Products) -> float:
    """How far from zero an eigenvalue of zero may be found."""
    scale = float(products.matrix.diagonal().sum()) / (products.positions - 1)
    return _precision(products) * scale


def _precision(products: Products) -> float:
    """Relative error of eigenvalues, of the size of the largest one."""
    precision = torch.finfo(products.matrix.dtype).eps
    return max(products.positions, products.features) * precision


def _ratio(spectrum: Tensor, place: int, rounding: float) -> float:
    value = float(spectrum[place])
    return float(spectrum[0]) / value if value > rounding else math.inf
