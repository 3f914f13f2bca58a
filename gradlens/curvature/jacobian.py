"""Products with the Jacobian of a network's outputs and with its transpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.network_over_data import BatchOutputs, NetworkOverData, Split, as_pair
from gradlens.curvature.operator import ParameterOperator, consecutive_slices, flat, placed, shaped
from gradlens.numerics.unavailable import UnavailableError


@final
class JacobianOperator(ParameterOperator):
    """The Jacobian ``[R, D]`` of a network's ``outputs``, of any shape, which are flattened.

    Their graph must be alive. A product Jv is the derivative of Jᵀu with respect to u, times v, so
    that it takes two backward passes instead of a forward one.

    Raises ``ValueError`` for parameters as ``CurvatureOperator`` does, and ``UnavailableError`` for
    outputs without graph, and where an operation can't be differentiated twice.
    """

    def __init__(self, outputs: Tensor, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, outputs.numel())
        if not outputs.requires_grad:
            raise UnavailableError("the outputs have no graph: compute them with gradients enabled")
        self.outputs = outputs

    @classmethod
    def over_data(
        cls,
        model: nn.Module,
        data: Iterable[Any],
        *,
        parameters: Sequence[str] | None = None,
        split: Split = as_pair,
    ) -> JacobianOverData:
        """The Jacobian of the outputs for all of the data, whose rows are those of its batches.

        The arguments are those of ``HessianOperator.over_data``.
        """
        sizes: list[int] = []
        network = NetworkOverData(
            model, data, parameters, split, lambda batch: sizes.append(batch.output.numel())
        )
        return JacobianOverData(network, sizes)

    def product(self, vectors: Sequence[Tensor]) -> Tensor:
        """Jv, of the outputs' shape; v is one tensor for each parameter, of its shape."""
        cotangent, pulled_back = self._transposed
        (pushed_forward,) = derivative(pulled_back, [cotangent], vectors)
        return pushed_forward

    def transposed_product(self, cotangent: Tensor) -> list[Tensor]:
        """Jᵀu, one tensor for each parameter; u is of the outputs' shape."""
        return derivative([self.outputs], list(self.parameters.values()), [cotangent])

    def multiply(self, vector: Tensor) -> Tensor:
        vectors = placed(shaped(vector, self.parameters), self.parameters)
        return self.product(vectors).flatten().to(self.device, self.torch_dtype)

    def multiply_transposed(self, vector: Tensor) -> Tensor:
        cotangent = vector.reshape(self.outputs.shape).to(self.outputs)
        return flat(self.transposed_product(cotangent), self.device).to(self.torch_dtype)

    @cached_property
    def _transposed(self) -> tuple[Tensor, list[Tensor | None]]:
        """u and Jᵀu, linear in u, with respect to which its derivative times v is Jv."""
        cotangent = torch.zeros_like(self.outputs, requires_grad=True)
        parameters = list(self.parameters.values())
        return cotangent, differentiable_gradient(self.outputs, parameters, cotangent)


@final
class JacobianOverData(ParameterOperator):
    """The Jacobian ``[R, D]`` of a network's outputs for all batches, in the order of the data.

    ``sizes`` are the numbers of outputs of each batch.
    """

    def __init__(self, network: NetworkOverData, sizes: Sequence[int]) -> None:
        super().__init__(network.parameters, sum(sizes))
        self._network = network
        self._rows = consecutive_slices(sizes)

    def multiply(self, vector: Tensor) -> Tensor:
        found: list[Tensor] = []
        self._network.each_outputs(lambda batch: found.append(self._of(batch).multiply(vector)))
        return torch.cat(found)

    def multiply_transposed(self, vector: Tensor) -> Tensor:
        total = torch.zeros(self.shape[1], dtype=self.torch_dtype, device=self.device)

        def add(batch: BatchOutputs) -> None:
            total.add_(self._of(batch).multiply_transposed(vector[self._rows[batch.index]]))

        self._network.each_outputs(add)
        return total

    def _of(self, batch: BatchOutputs) -> JacobianOperator:
        return JacobianOperator(batch.output, self.parameters)
