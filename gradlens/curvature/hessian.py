"""Products with the Jacobian of a network's outputs, the Hessian of a loss, and the GGN of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.loss_hessian import closed_form
from gradlens.curvature.operator import (
    ParameterOperator,
    consecutive_slices,
    flat,
    normal_like,
    placed,
    shaped,
)
from gradlens.curvature.over_data import (
    BatchLoss,
    BatchOutputs,
    LossOperator,
    LossOverData,
    NetworkOverData,
    OfBatch,
    Split,
    as_pair,
)
from gradlens.graph.graph import Graph
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
            model,
            data,
            parameters,
            split,
            lambda batch: sizes.append(batch.output.numel()),
            joined=False,
        )
        return JacobianOverData(network, sizes)

    def product(self, vectors: Sequence[Tensor]) -> Tensor:
        """Jv, of the outputs' shape; v is one tensor for each parameter, of its shape."""
        cotangent, pulled_back = self._transposed
        # What depends on the cotangent is known here alone. Functions in Python may run any code.
        by_engine = not self.graph.python_functions
        return derivative(pulled_back, [cotangent], vectors, by_engine=by_engine)[0]

    def transposed_product(self, cotangent: Tensor) -> list[Tensor]:
        """Jᵀu, one tensor for each parameter; u is of the outputs' shape."""
        graph = None if self.outputs.is_leaf else self.graph
        return derivative([self.outputs], list(self.parameters.values()), [cotangent], graph)

    def multiply(self, vector: Tensor) -> Tensor:
        vectors = placed(shaped(vector, self.parameters), self.parameters)
        return self.product(vectors).flatten().to(self.device, self.torch_dtype)

    def multiply_transposed(self, vector: Tensor) -> Tensor:
        cotangent = vector.reshape(self.outputs.shape).to(self.outputs)
        return flat(self.transposed_product(cotangent), self.device).to(self.torch_dtype)

    @cached_property
    def graph(self) -> Graph:
        """That of the outputs."""
        return Graph(self.outputs)

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


LINEAR_IN_OUTPUTS = (
    "the loss is linear in what the model returned, such as log-probabilities, so that the "
    "generalised Gauss-Newton matrix is zero: pass a model that returns the logits, and the loss "
    "that is computed from these"
)


@final
class HessianOperator(LossOperator):
    """The Hessian ``[D, D]`` of a scalar loss, times ``scale``.

    The loss's graph must be alive. Its gradient is built once; each product costs one backward
    pass through both (Pearlmutter, 1994, Eq. 6.1). Parameters that the loss doesn't depend on
    have zero rows and columns.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``,
    here or with the first product, where an operation can't be differentiated twice.
    """

    def __init__(self, loss: Tensor, parameters: Mapping[str, Tensor], scale: float = 1.0) -> None:
        super().__init__(parameters, scale)
        check_loss(loss)
        self._gradients = differentiable_gradient(loss, list(self.parameters.values()))

    @classmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        return lambda each: cls(each.loss, whole.parameters)

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return derivative(self._gradients, list(self.parameters.values()), vectors)


@final
class GGNOperator(LossOperator):
    """The generalised Gauss-Newton matrix Jᵀ(∇²ℓ)J ``[D, D]``, times ``scale``.

    J is the Jacobian of the network's ``outputs``, of any shape, ∇²ℓ the loss's Hessian with
    respect to them (Schraudolph, 2002, Sec. 3). That of cross-entropy, of squared errors and of
    binary cross-entropy from logits is known in closed form. Of several outputs, none may be
    computed from another; those that the loss doesn't depend on don't count. Both graphs must be
    alive. Terms of the loss that don't depend on the outputs, such as a regulariser, don't enter.
    Over data, products raise ``UnavailableError`` where the loss is linear in the outputs, so that
    the matrix is zero.

    Raises ``ValueError`` for a loss that is not a scalar or has no graph, and ``UnavailableError``
    for outputs that have no graph, that it doesn't depend on or that depend on each other, and,
    here or with the first product, where an operation can't be differentiated twice.
    """

    def __init__(
        self,
        loss: Tensor,
        outputs: Tensor | Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        scale: float = 1.0,
    ) -> None:
        super().__init__(parameters, scale)
        graph, self._each = split_at(loss, outputs)
        self.outputs = joined(self._each)
        self.jacobian = JacobianOperator(self.outputs, parameters)
        self._loss = loss
        self._closed = closed_form(graph, self.outputs) if len(self._each) == 1 else None
        self._loss_gradient = (
            differentiable_gradient(loss, self._each) if self._closed is None else []
        )

    @classmethod
    def _of_batches(cls, whole: LossOverData) -> OfBatch:
        def of_batch(each: BatchLoss) -> GGNOperator:
            operator = cls(each.loss, each.tensors, whole.parameters)
            if each.index == 0 and operator.is_zero():
                raise UnavailableError(LINEAR_IN_OUTPUTS)
            return operator

        return of_batch

    @property
    def loss_gradient(self) -> Tensor:
        """∇ℓ at the outputs, of their shape, without the ``scale``.

        Raises ``UnavailableError`` for a loss that is linear in them.
        """
        if self._closed is None and all(gradient is None for gradient in self._loss_gradient):
            raise UnavailableError(LINEAR_IN_OUTPUTS)
        return joined(derivative([self._loss], self._each, [torch.ones_like(self._loss)]))

    def loss_hessian_product(self, direction: Tensor) -> Tensor:
        """(∇²ℓ)u without the ``scale``; u and the result are of the outputs' shape."""
        if self._closed is not None:
            return self._closed(direction)
        directions = [direction]
        if len(self._each) > 1:
            parts = direction.split([each.shape[1:].numel() for each in self._each], 1)
            directions = [part.reshape(o.shape) for part, o in zip(parts, self._each, strict=True)]
        return joined(derivative(self._loss_gradient, self._each, directions))

    def is_zero(self, seed: int = 0) -> bool:
        """Whether the loss is linear in the outputs, by a product with a random vector."""
        if self._closed is not None:
            return False
        vector = normal_like(self.outputs, np.random.default_rng(seed))
        return not bool(self.loss_hessian_product(vector).any())

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        curved = self.loss_hessian_product(self.jacobian.product(vectors))
        return self.jacobian.transposed_product(curved)


def check_loss(loss: Tensor) -> None:
    """Raises ``ValueError`` for a loss that can't be differentiated."""
    if loss.numel() != 1:
        raise ValueError(f"the loss has shape {list(loss.shape)}: pass a scalar")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it with gradients enabled")


def split_at(loss: Tensor, outputs: Tensor | Iterable[Tensor]) -> tuple[Graph, Sequence[Tensor]]:
    """The graph of a loss, and the outputs that it depends on.

    Raises ``ValueError`` for a loss that can't be differentiated, and ``UnavailableError`` if there
    are no such outputs, if one is computed from another, so that the loss can't be split at both,
    or if they have different numbers of rows.
    """
    check_loss(loss)
    given = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    each_once = {id(each): each for each in given if each.requires_grad}.values()
    if given and not each_once:
        raise UnavailableError("the outputs have no graph: compute them with gradients enabled")
    graph = None if loss.is_leaf else Graph(loss)
    found = [each for each in each_once if graph is not None and graph.number_of(each) >= 0]
    if graph is None or not found:
        raise UnavailableError(
            "the loss doesn't depend on the outputs: pass the tensor that it is given, or all of "
            "them"
        )
    for one in found if len(found) > 1 else ():
        below = Graph(one)
        if any(below.number_of(other) >= 0 for other in found if other is not one):
            raise UnavailableError(DEPENDENT)
    if len(found) > 1 and len({each.shape[:1] or id(each) for each in found}) > 1:
        shapes = ", ".join(str([*each.shape]) for each in found)
        raise UnavailableError(f"outputs of shapes {shapes} have different numbers of samples")
    return graph, found


def joined(outputs: Sequence[Tensor]) -> Tensor:
    """All elements of each row of several outputs, ``[N, K]``; a single one unchanged."""
    if len(outputs) == 1:
        return outputs[0]
    with torch.enable_grad():
        return torch.cat([each.reshape(len(each), -1) for each in outputs], 1)


DEPENDENT = (
    "one of the outputs is computed from another one, and the loss can't be split at both: pass "
    "those from which the loss is computed, such as the logits without hidden states"
)


def check_rows(outputs: Tensor) -> None:
    """Raises ``UnavailableError`` for outputs without an axis of samples, or without samples."""
    if outputs.dim() == 0 or outputs.numel() == 0:
        raise UnavailableError(f"outputs of shape {list(outputs.shape)} have no samples")
