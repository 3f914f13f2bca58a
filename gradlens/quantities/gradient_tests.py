"""Tests of whether the mini-batch gradient approximates the gradient of the expected loss."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence

from gradlens.history.view import View
from gradlens.numerics.deviations import SampleDeviations
from gradlens.numerics.formulas import inner_test, norm_test, ortho_test
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import Deviations


class DeviationsQuantity(NoiseQuantity, ABC):
    """A quantity of the samples' deviations from the mean gradient."""

    reductions = (Deviations(),)

    def parts(self, step: Step) -> Mapping[str, SampleDeviations]:
        return step.on_host(Deviations())


class NormTest(DeviationsQuantity):
    """Smallest θ for which the norm test holds (Byrd et al., 2012, Eq. 3.9)."""

    view = View("Norm test", group="gradients", yscale="log", label="θ")

    def value(self, parts: Sequence[SampleDeviations]) -> float:
        return norm_test(Deviations().total(parts))


class InnerTest(DeviationsQuantity):
    """Smallest θ for which the inner product test holds (Bollapragada et al., 2017, Eq. 2.6)."""

    view = View("Inner product test", group="gradients", yscale="log", label="θ")

    def value(self, parts: Sequence[SampleDeviations]) -> float:
        return inner_test(Deviations().total(parts))


class OrthoTest(DeviationsQuantity):
    """Smallest ν for which the orthogonality test holds (Bollapragada et al., 2017)."""

    view = View("Orthogonality test", group="gradients", yscale="log", label="ν")

    def value(self, parts: Sequence[SampleDeviations]) -> float:
        return ortho_test(Deviations().total(parts))
