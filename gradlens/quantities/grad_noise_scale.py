"""The gradient noise scale, an estimate of the critical batch size."""

from __future__ import annotations

from dataclasses import asdict

from gradlens.history.view import View
from gradlens.numerics.deviations import SampleDeviations
from gradlens.numerics.formulas import noise_scale
from gradlens.quantities.noise_quantity import NoiseQuantity
from gradlens.reductions import Deviations


class GradNoiseScale(NoiseQuantity):
    """Simple gradient noise scale tr(Σ)/‖G‖² (McCandlish et al., 2018, arXiv:1812.06162).

    A value holds the ``"value"``, the ends ``"low"`` and ``"high"`` of its 95 % confidence
    interval, and the unbiased estimates ``"trace"`` of tr(Σ) and ``"squared_norm"`` of ‖G‖².
    ``"high"`` is infinite if ‖G‖² can't be distinguished from zero, for fewer than 59 samples, and
    if one sample has more than 15 % of the estimates' spread: other batches may have more noise.
    """

    reductions = (Deviations(),)
    view = View("Gradient noise scale", group="noise", yscale="log", label="samples")

    def value(self, total: SampleDeviations) -> dict[str, float]:
        return asdict(noise_scale(total))
