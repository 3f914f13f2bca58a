"""Spectra of covariances: of per-sample gradients, and of what goes through layers."""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.special import entr
from torch import Tensor, nn

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import EQUAL, NOT_FINITE, ONE_SAMPLE, ROUNDINGS, SampleDeviations
from gradlens.numerics.shards import has_whole_rows
from gradlens.numerics.singular_values import Subspace, largest, subspace
from gradlens.numerics.tensors import on_device, on_host
from gradlens.quantities.layer_quantity import LayerQuantity
from gradlens.quantities.parameter_quantity import DIVIDED, ZERO, OfParameters
from gradlens.quantities.quantity import SingleStepQuantity, UpdateQuantity
from gradlens.quantities.step import EMPTY, NO_ELEMENTS, NO_FEATURES, NOT_CONVERGED, Step
from gradlens.quantities.update import Update
from gradlens.reductions import CentredGram, Deviations
from gradlens.signals.predicates import is_affine
from gradlens.signals.reductions import Gram, Products
from gradlens.signals.selection import Selection
from gradlens.signals.signal import Signal


@dataclass(eq=False)
class GradCovariance(SingleStepQuantity):
    """Spectrum of the covariance (1/(N−1))·Σₙ(gₙ−ḡ)(gₙ−ḡ)ᵀ of per-sample gradients.

    A value holds the ``k`` largest ``"eigenvalues"``, descending, the ``"trace"``, the
    ``"stable_rank"`` trace/λ₁ and the ``"effective_rank"`` exp(entropy of the eigenvalues' shares)
    (Roy and Vetterli, 2007), for the whole network, and under ``"layers"`` the same for each layer
    by name. They are computed from the centred N×N Gram matrix, which has the same eigenvalues.
    ``ValueError`` for ``k`` below one.
    """

    reductions = (CentredGram(), Deviations())
    least: ClassVar = {"k": 1}
    view = View("Gradient covariance", group="noise", yscale="log", label="eigenvalue")

    k: int = 5

    def compute(self, step: Step) -> dict[str, Any]:
        grams, found = step.by_layer(CentredGram()), step.by_layer(Deviations())
        layers = {n: covariance_spectrum(gram, found[n], self.k) for n, gram in grams.items()}
        whole = covariance_spectrum(step.total(CentredGram()), step.total(Deviations()), self.k)
        return {**whole, "layers": layers}


def covariance_spectrum(gram: Tensor, found: SampleDeviations, k: int) -> dict[str, Any]:
    """Covariance (1/(N−1))·Σₙ(gₙ−ḡ)(gₙ−ḡ)ᵀ of gₙ from their centred Gram matrix ``[N, N]``.

    The non-zero eigenvalues are those of the Gram matrix over N−1, at most N−1 of them; beyond
    these, ``"eigenvalues"`` is filled up with the zeros that the covariance has.
    """
    n = len(gram)
    # What is lost where a Gram matrix of factors is centred.
    rounding = ROUNDINGS * torch.finfo(gram.dtype).eps * n * found.squared_norm_of_mean
    # In numpy, whose operations on few numbers take less time.
    products = gram.cpu().numpy()
    undefined = ""
    if n < 2:
        undefined = ONE_SAMPLE
    elif not np.isfinite(products).all():
        undefined = NOT_FINITE
    elif found.vanish or 0 < products.trace() <= rounding:
        undefined = EQUAL
    if undefined:
        nan = Undefined(undefined)
        return _covariance([nan] * k, nan, nan, nan)
    spectrum = np.flip(np.linalg.eigvalsh(products)).clip(min=0) / (n - 1)
    largest = spectrum[:k].tolist() + [0.0] * max(k - n, 0)
    trace = float(spectrum.sum())
    stable: float = Undefined("all per-sample gradients are equal: the covariance is zero")
    effective = stable
    if trace:
        # The exponential of the entropy of the eigenvalues' shares (Roy and Vetterli, 2007).
        effective = math.exp(float(entr(spectrum / trace).sum()))
        stable = trace / largest[0]
    return _covariance(largest, trace, stable, effective)


def _covariance(
    eigenvalues: Sequence[float], trace: float, stable_rank: float, effective_rank: float
) -> dict[str, Any]:
    return {
        "eigenvalues": eigenvalues,
        "trace": trace,
        "stable_rank": stable_rank,
        "effective_rank": effective_rank,
    }


SHARES = {"condition_20": 0.2, "condition_50": 0.5, "condition_80": 0.8}
"""Condition numbers by name, with the share of the descending eigenvalues that precede the divisor.
The shares are those of Huang et al., 2020."""

EPSILON = 1e-7
"""Added to the shares in ``RankMe``, as in its paper (Garrido et al., 2023)."""


@dataclass(eq=False)
class _CovarianceSpectrum(LayerQuantity, ABC):
    reduction = Gram(centred=True)
    default_layers = Selection((is_affine,))
    least: ClassVar = {"k": 1}

    k: int = 5

    def layer_value(self, layer: str, module: nn.Module, reduced: Products) -> Any:
        return covariance_record(reduced, self.k)


class InputCovariance(_CovarianceSpectrum):
    """Spectrum of the covariance of each layer's input features, over samples and positions.

    For each layer, ``"eigenvalues"`` are the ``k`` largest, descending, ``"trace"`` is the sum of
    all, ``"stable_rank"`` trace/λ₁, and ``"condition"`` λ₁ over the smallest one. In
    ``"condition_20"``, ``"condition_50"`` and ``"condition_80"``, the divisor is the eigenvalue
    that 20, 50 or 80 % of the eigenvalues, descending, precede (Huang et al., 2020,
    arXiv:2002.10801). There are as many eigenvalues as features, which are channels in a
    convolution. A condition number is infinite if its divisor is zero up to rounding errors. The
    eigenvalues are computed from the smaller of the two Gram matrices; no data is stored.
    ``ValueError`` for ``k`` below one.
    """

    signal = Signal.INPUT
    view = View("Input covariance", group="layers", yscale="log", label="eigenvalue")


class OutputGradientCovariance(_CovarianceSpectrum):
    """Spectrum of the covariance of the gradient at each layer's output: as ``InputCovariance``."""

    signal = Signal.OUTPUT_GRADIENT
    view = View("Output gradient covariance", group="layers", yscale="log", label="eigenvalue")


class RankMe(LayerQuantity):
    """Effective rank of each layer's output, a matrix of samples and positions by features.

    It is exp(−Σₖ (pₖ + ε) log(pₖ + ε)) with pₖ = σₖ/‖σ‖₁ and ε = 1e-7 (Garrido et al., 2023,
    arXiv:2210.02885). σₖ are the singular values of the matrix, which is not centred.
    """

    signal = Signal.OUTPUT
    reduction = Gram()
    default_layers = Selection((is_affine,))
    view = View("RankMe", group="layers", label="effective rank")

    def layer_value(self, layer: str, module: nn.Module, reduced: Products) -> float:
        nothing = _nothing(reduced)
        if nothing is not None:
            return nothing
        values = _eigenvalues(reduced.matrix)
        if isinstance(values, float):
            return values
        # Rounding errors of eigenvalues that are zero would be large after the square root.
        values[values <= _precision(reduced) * values[-1]] = 0
        singular = values.sqrt()
        total = float(singular.sum())
        if not total:
            return Undefined("the output is zero")
        shares = singular / total + EPSILON
        return math.exp(-float((shares * shares.log()).sum()))


def _nothing(products: Products) -> Undefined | None:
    """The reason why there is no matrix; ``None`` if there is one."""
    if not products.positions:
        return Undefined(EMPTY)
    return None if products.features else Undefined(NO_FEATURES)


def _eigenvalues(matrix: Tensor) -> Tensor | float:
    """Eigenvalues, ascending; NaN if the matrix is not finite."""
    if not bool(matrix.isfinite().all()):
        return math.nan
    try:
        return torch.linalg.eigvalsh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return Undefined(NOT_CONVERGED)


def covariance_record(products: Products, k: int) -> Any:
    """The record of the spectrum of a covariance, or a NaN."""
    nothing = _nothing(products)
    if nothing is not None:
        return nothing
    if products.positions < 2:
        return Undefined("there is one sample: a covariance needs two")
    values = _eigenvalues(products.matrix)
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


def _rounding(products: Products) -> float:
    """Bound for the absolute value at which an eigenvalue of zero is computed."""
    scale = float(products.matrix.trace()) / (products.positions - 1)
    # Each mean is right to a rounding for each of the numbers that are added up.
    of_means = float(products.centre.square().sum()) * _precision(products)
    return _precision(products) * (scale + of_means)


def _precision(products: Products) -> float:
    """Error of eigenvalues relative to the largest one, by LAPACK's bound: dimension times eps."""
    precision = torch.finfo(products.matrix.dtype).eps
    return max(products.positions, products.features) * precision


def _ratio(spectrum: Tensor, place: int, rounding: float) -> float:
    value = float(spectrum[place])
    return float(spectrum[0]) / value if value > rounding else math.inf


# Of weights and updates ------------------------------------------------------------------------


@dataclass(eq=False)
class _LargestSingularValue(OfParameters, ABC):
    state = ("kept",)  # vectors, which are never changed in place

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kept: dict[str, Tensor] = {}

    def suits(self, parameter: nn.Parameter) -> bool:
        return parameter.dim() >= 2

    def spectra(self, matrices: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
        """The record of some matrices; the program waits for a device once for all of them."""
        generator = torch.Generator("cpu").manual_seed(seed)
        found: dict[str, Any] = {}
        for name, matrix in matrices.items():
            if not matrix.numel():
                found[name] = Undefined(NO_ELEMENTS)
            elif not has_whole_rows(matrix):
                found[name] = Undefined(DIVIDED)
            else:
                found[name] = subspace(matrix, self._kept.get(name), generator)
        spaces = {name: each for name, each in found.items() if isinstance(each, Subspace)}
        known = on_host({name: (each.products, each.norm) for name, each in spaces.items()})
        for name, (products, norm) in known.items():
            found[name], kept = self._value(spaces[name], products, float(norm))
            self._kept[name] = kept
        return self.record(found)

    def _value(self, space: Subspace, products: Tensor, norm: float) -> tuple[Any, Tensor]:
        """The record of a matrix, and the vectors to begin with at the next step."""
        none = space.vectors[:, :0]
        if not norm:
            return Undefined(ZERO.format(part=self.part.removesuffix(" of"))), none
        try:
            top = largest(products, space.rounding)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return Undefined(NOT_CONVERGED), none
        if top is None:
            return math.nan, none
        value = {
            "norm": norm * top.share,
            "residual": norm * top.residual,
            "stable_rank": top.share**-2,
        }
        chosen = on_device(top.combinations, space.vectors.device, space.vectors.dtype)
        return value, space.vectors @ chosen


class WeightSpectrum(_LargestSingularValue, SingleStepQuantity):
    """Largest singular value and stable rank of each parameter with two axes or more.

    The first axis is that of the rows; all others together are that of the columns. For each,
    ``"norm"`` is σ₁, ``"residual"`` an error bound, and ``"stable_rank"`` ‖W‖_F²/σ₁². No matrix is
    decomposed: products with W and Wᵀ give σ₁ in a block Krylov subspace (Musco and Musco, 2015,
    arXiv:1504.05477), which begins with the vectors of the step tracked before, three for each
    matrix, and a random one. W has a singular value within the residual of ``"norm"``, which is
    never above σ₁ by more than rounding; where the spectrum is flat, it is below by some 1e-3 at
    the first step and 1e-5 later. Random vectors are seeded with the step.
    """

    view = View("Weight spectrum", group="layers", yscale="log", label="σ₁")

    def compute(self, step: Step) -> dict[str, Any]:
        weights = {name: step.parameters[name].detach() for name in self.present(step)}
        return self.spectra(weights, step.global_step)


class UpdateSpectrum(_LargestSingularValue, UpdateQuantity):
    """Largest singular value and stable rank of the update pₙ₊₁ − pₙ: as ``WeightSpectrum``."""

    part = "update of"
    view = View("Update spectrum", group="layers", yscale="log", label="σ₁ of θₙ₊₁ − θₙ")

    def compute(self, step: Step, update: Update) -> dict[str, Any]:
        updates = {name: update.direction[name] for name in self.present(step)}
        return self.spectra(updates, step.global_step)
