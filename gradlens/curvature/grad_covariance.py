"""Products with the covariance matrix of per-sample gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor, nn

from gradlens.curvature.empirical_fisher import sample_gradients, sample_products
from gradlens.curvature.jacobian import JacobianOperator
from gradlens.curvature.loss_over_data import BatchLoss, LossFunction, LossOverData
from gradlens.curvature.network_over_data import Split, as_pair
from gradlens.curvature.operator import CurvatureOperator
from gradlens.curvature.sum_over_data import SumOverData
from gradlens.graph.loss import LossReduction


@final
class GradCovarianceOperator(CurvatureOperator):
    """The covariance matrix (1/N)·Σₙ (gₙ − ḡ)(gₙ − ḡ)ᵀ ``[D, D]`` of per-sample gradients.

    It is the second moment (1/N)·Σₙ gₙgₙᵀ less ḡḡᵀ, and the same for a mean loss as for a sum loss.
    The arguments are those of ``EmpiricalFisherOperator``. ``mean_gradient`` is ḡ, one tensor for
    each parameter; by default, that of these samples. It is another one where they are a part of
    those that the covariance is taken over.

    ``scale`` multiplies the matrix. Raises as ``EmpiricalFisherOperator`` does.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor,
        parameters: Mapping[str, Tensor],
        loss_reduction: LossReduction = "mean",
        mean_gradient: Sequence[Tensor] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(parameters, scale)
        self._gradients = sample_gradients(loss, outputs, loss_reduction)[None]
        self._jacobian = JacobianOperator(outputs, parameters)
        self._samples = len(outputs)
        own = self._jacobian.transposed_product(self._gradients[0] / self._samples)
        self._mean = own if mean_gradient is None else list(mean_gradient)

    @classmethod
    def over_data(
        cls,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        *,
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
    ) -> SumOverData:
        """The covariance over all samples of the data; arguments as ``HessianOperator.over_data``.

        Their mean gradient takes one pass through the data, and is that of the parameters' values
        then: make a new operator when these have changed.
        """
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        mean = whole.mean_gradient()

        def of_batch(each: BatchLoss) -> GradCovarianceOperator:
            # A covariance is a mean over samples, whatever the loss is.
            scale = each.batch.samples / whole.samples / each.weight
            output = each.batch.output
            return cls(each.loss, output, whole.parameters, loss_reduction, mean, scale)

        return SumOverData(whole, of_batch)

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        """(1/N)·Σₙ (gₙ − ḡ)aₙ with aₙ = (gₙ − ḡ)ᵀv."""
        along_mean = sum((m * v).sum() for m, v in zip(self._mean, vectors, strict=True))
        along = self._jacobian.product(vectors)
        deviations = sample_products(self._gradients, along) - along_mean
        weighted = (self._gradients * deviations)[0] / self._samples
        found = self._jacobian.transposed_product(weighted)
        average = deviations.mean()
        return [part - average * m for part, m in zip(found, self._mean, strict=True)]
