"""The gradient's signal-to-noise ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradlens.history.view import View
from gradlens.numerics import formulas
from gradlens.numerics.unavailable import UnavailableError
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import ElementRatios


@dataclass(eq=False)
class MeanGSNR(NoiseQuantity):
    """Mean over all elements j of ḡⱼ² / (variance of gₙⱼ over samples + ε).

    Liu et al., 2020, arXiv:2001.07384, with the population variance as there; ε is ``epsilon``.
    """

    view = View("Mean GSNR", group="noise", yscale="log", label="mean GSNR")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def __post_init__(self) -> None:
        super().__post_init__()
        self.reductions = (ElementRatios(self.epsilon),)

    def parts(self, step: Step) -> Mapping[str, formulas.ElementRatios]:
        if step.samples < 2:
            raise UnavailableError(formulas.ONE_SAMPLE)
        return super().parts(step)

    def value(self, total: formulas.ElementRatios) -> float:
        return formulas.gradient_signal_to_noise(total)
