"""The covariance of per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlens.history.view import View
from gradlens.numerics.formulas import covariance_spectrum
from gradlens.quantities.kinds import SingleStepQuantity
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
