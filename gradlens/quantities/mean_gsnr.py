"""The gradient's signal-to-noise ratio."""

from __future__ import annotations

from dataclasses import dataclass

from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.numerics.formulas import ONE_SAMPLE, gradient_signal_to_noise
from gradlens.quantities.kinds import SingleStepQuantity
from gradlens.quantities.step import Step
from gradlens.reductions import ElementDeviations


@dataclass(eq=False)
class MeanGSNR(SingleStepQuantity):
    """Mean over all elements j of ḡⱼ² / (variance of gₙⱼ over samples + ε).

    Liu et al., 2020, arXiv:2001.07384, with the population variance as there; ε is ``epsilon``.
    """

    reductions = (ElementDeviations(),)
    view = View("Mean GSNR", group="noise", yscale="log", label="mean GSNR")

    epsilon: float = 1e-5  # as in cockpit-for-pytorch

    def compute(self, step: Step) -> float:
        if step.samples < 2:
            return Undefined(ONE_SAMPLE)
        parts = list(step.by_parameter(ElementDeviations()).values())
        return gradient_signal_to_noise(parts, step.samples, self.epsilon)
