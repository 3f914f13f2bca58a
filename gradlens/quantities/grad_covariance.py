"""The covariance of per-sample gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import entr
from torch import Tensor

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.deviations import (
    EQUAL,
    NOT_FINITE,
    ONE_SAMPLE,
    ROUNDINGS,
    SampleDeviations,
)
from gradlens.quantities.quantity import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import CentredGram, Deviations


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
    view = View("Gradient covariance", group="noise", yscale="log", label="eigenvalue")

    k: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"{self.name}: k={self.k} selects no eigenvalue: use 1 or more")

    def compute(self, step: Step) -> dict[str, Any]:
        grams, found = step.by_layer(CentredGram()), step.by_layer(Deviations())
        layers = {
            layer: vars(covariance_spectrum(gram, found[layer], self.k))
            for layer, gram in grams.items()
        }
        whole = covariance_spectrum(step.total(CentredGram()), step.total(Deviations()), self.k)
        return {**vars(whole), "layers": layers}


@dataclass(frozen=True)
class Covariance:
    """Spectrum of the covariance of N per-sample gradients.

    ``eigenvalues`` are the k largest, descending. ``trace`` is the sum of all; ``stable_rank``
    is trace/λ₁; ``effective_rank`` is exp(−Σpᵢ log pᵢ) with pᵢ = λᵢ/trace (Roy and Vetterli, 2007).
    """

    eigenvalues: list[float]
    trace: float
    stable_rank: float
    effective_rank: float


def covariance_spectrum(gram: Tensor, found: SampleDeviations, k: int) -> Covariance:
    """Covariance (1/(N−1))·Σₙ(gₙ−ḡ)(gₙ−ḡ)ᵀ of gₙ from their centred Gram matrix ``[N, N]``.

    The non-zero eigenvalues are those of the Gram matrix over N−1, at most N−1 of them; beyond
    these, ``eigenvalues`` is filled up with the zeros that the covariance has.
    """
    n = len(gram)
    # What is lost where a Gram matrix of factors is centred.
    rounding = ROUNDINGS * torch.finfo(gram.dtype).eps * n * found.squared_norm_of_mean
    if n < 2:
        return _undefined_covariance(ONE_SAMPLE, k)
    # In numpy, whose operations on few numbers take less time.
    products = gram.cpu().numpy()
    if not np.isfinite(products).all():
        return _undefined_covariance(NOT_FINITE, k)
    if found.vanish or 0 < products.trace() <= rounding:
        return _undefined_covariance(EQUAL, k)
    spectrum = np.flip(np.linalg.eigvalsh(products)).clip(min=0) / (n - 1)
    largest = spectrum[:k].tolist() + [0.0] * max(k - n, 0)
    trace = float(spectrum.sum())
    if not trace:
        reason = "all per-sample gradients are equal: the covariance is zero"
        return Covariance(largest, trace, Undefined(reason), Undefined(reason))
    entropy = float(entr(spectrum / trace).sum())
    return Covariance(largest, trace, trace / largest[0], math.exp(entropy))


def _undefined_covariance(reason: str, k: int) -> Covariance:
    nan = Undefined(reason)
    return Covariance([nan] * k, nan, nan, nan)
