"""The gradient's signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradlens.history.view import View
from gradlens.numerics.formulas import (
    ONE_SAMPLE,
    ElementRatios,
    element_ratios,
    gradient_signal_to_noise,
)
from gradlens.numerics.host import on_host
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import ElementDeviations


@dataclass(eq=False)
class MeanGSNR(NoiseQuantity):
    """Mean over all elements j of ḡⱼ² / (variance of gₙⱼ over samples + ε).

    Liu et al., 2020, arXiv:2001.07384, with the population variance as there; ε is ``epsilon``.
    """

    reductions = (ElementDeviations(),)
    view = View("Mean GSNR", group="noise", yscale="log", label="mean GSNR")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def parts(self, step: Step) -> Mapping[str, ElementRatios]:
        if step.samples < 2:
            raise UnavailableError(ONE_SAMPLE)
        found = step.by_parameter(ElementDeviations())
        return on_host(
            {n: element_ratios(each, step.samples, self.epsilon) for n, each in found.items()}
        )

    def value(self, parts: Sequence[ElementRatios]) -> float:
        return gradient_signal_to_noise(parts)
