"""The gradient along the directions of largest curvature, and the noise in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlens.curvature.curvature import Curvature
from gradlens.history.view import View
from gradlens.quantities.quantity import CurvatureQuantity


@dataclass(eq=False)
class DirectionalDerivatives(CurvatureQuantity):
    """Gradient and curvature along the directions of largest curvature, with the noise in both.

    The directions are unit eigenvectors e of the generalised Gauss-Newton matrix, those of its
    ``k`` largest eigenvalues. A value holds these ``"eigenvalues"``, descending, and the mean
    gradient's components along e, ``"gradient"``; signs of e are chosen so that none is negative.
    ``"gradient_snr"`` and ``"curvature_snr"`` are the signal-to-noise ratios of both. ``"overlap"``
    is the share of the mean gradient's squared norm in the span of all e (Gur-Ari et al., 2018,
    arXiv:1812.04754).

    A ratio is γ̄²/(s²/N), with mean γ̄ and variance s² of the samples' first derivatives gₙᵀe, or of
    their second derivatives eᵀJₙᵀHₙJₙe. It is N times that of Dangel et al. (2022,
    arXiv:2106.02624), since it describes the mini-batch and not a sample. If the gradient consists
    of noise, the ratio is 1 on average, and above 4 about one time in twenty. With micro-batches or
    several processes, the values are those of the last part of the first process.

    Directions are exact, from Gram matrices (``LowRankGGN``). Where these would be too large, the
    value is a NaN: with more than 256 outputs for each sample, 2048 for the mini-batch, or 2 GiB.
    It is one, too, where samples are coupled, as by ``BatchNorm`` in train mode; on a ``Probe``, in
    eval mode, they are not. Entries beyond the matrix's rank are NaN. The network's outputs are
    found as for ``HessEigenvalues(matrix="ggn")``; their rows are the samples. ``ValueError`` for
    ``k`` below one.
    """

    view = View("Signal along directions", group="curvature", yscale="log", label="SNR")

    k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1:
            raise ValueError(f"{self.name}: k={self.k} selects no direction: use 1 or more")

    def compute(self, curvature: Curvature) -> dict[str, Any]:
        return vars(curvature.directions(self.k))
