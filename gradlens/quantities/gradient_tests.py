"""Tests of whether the mini-batch gradient approximates the gradient of the expected loss."""

from __future__ import annotations

from gradlens.history.view import View
from gradlens.numerics.deviations import SampleDeviations
from gradlens.numerics.formulas import inner_test, norm_test, ortho_test
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.reductions import Deviations


class NormTest(NoiseQuantity):
    """Smallest θ for which the norm test holds (Byrd et al., 2012, Eq. 3.9)."""

    reductions = (Deviations(),)
    view = View("Norm test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return norm_test(total)


class InnerTest(NoiseQuantity):
    """Smallest θ for which the inner product test holds (Bollapragada et al., 2017, Eq. 2.6)."""

    reductions = (Deviations(),)
    view = View("Inner product test", group="gradients", yscale="log", label="θ")

    def value(self, total: SampleDeviations) -> float:
        return inner_test(total)


class OrthoTest(NoiseQuantity):
    """Smallest ν for which the orthogonality test holds (Bollapragada et al., 2017)."""

    reductions = (Deviations(),)
    view = View("Orthogonality test", group="gradients", yscale="log", label="ν")

    def value(self, total: SampleDeviations) -> float:
        return ortho_test(total)
