"""The interface of curvature matrices, which are given by their products with vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import linalg
from torch import Tensor

from gradlens.curvature.flat_vectors import (
    accumulation_dtype,
    check_parameters,
    flat,
    numpy_dtype,
    parameter_slices,
    placed,
    shaped,
)

if TYPE_CHECKING:
    LinearOperator = linalg.LinearOperator[np.floating[Any]]
else:
    LinearOperator = linalg.LinearOperator


class CurvatureOperator(LinearOperator, ABC):
    """A symmetric matrix ``[D, D]`` over the concatenated, flattened parameters.

    To scipy it is a ``LinearOperator``; ``product`` and ``multiply`` do the same in torch, on the
    parameters' device. ``scale`` multiplies the matrix: 1/N turns the curvature of a sum loss
    over N samples into that of the mean loss. Numbers are of the parameters' dtype, in float32
    for half precisions. ``joint`` says that several products together take less than one by one.

    The operator of a loss keeps its graph alive, and works until a parameter changes or the graph
    is freed. One over data computes each batch's loss anew. ``slices`` maps each parameter's name
    to its part of the flat vector.

    Raises ``ValueError`` without parameters, and for one that doesn't require a gradient;
    ``UnavailableError`` for complex ones.
    """

    joint: ClassVar[bool] = False

    def __init__(self, parameters: Mapping[str, Tensor], scale: float) -> None:
        check_parameters(parameters)
        self.parameters = dict(parameters)
        self.scale = scale
        self.slices = parameter_slices(self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self.torch_dtype = accumulation_dtype(self.parameters.values())
        size = sum(p.numel() for p in self.parameters.values())
        # The stubs have only the constructor from functions.
        super().__init__(numpy_dtype(self.torch_dtype), (size, size))  # type: ignore[call-arg]

    @final
    def product(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Matrix times a vector that is given as one tensor for each parameter, of its shape."""
        found = self._product(placed(vectors, self.parameters))
        parts = [part.to(self.torch_dtype) for part in found]
        return parts if self.scale == 1.0 else [part * self.scale for part in parts]

    def products(self, many: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The products with several vectors, each as by ``product``."""
        return [self.product(vectors) for vectors in many]

    @final
    def multiply(self, vector: Tensor) -> Tensor:
        """Matrix times a flat vector ``[D]``, of which a flat vector ``[D]`` comes out."""
        return flat(self.product(shaped(vector, self.parameters)), self.device)

    @final
    def multiply_many(self, vectors: Tensor) -> Tensor:
        """Matrix times each of the flat vectors ``[k, D]``, ``[k, D]``."""
        many = self.products([shaped(vector, self.parameters) for vector in vectors])
        return torch.stack([flat(parts, self.device) for parts in many])

    @abstractmethod
    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        """The unscaled product, one detached tensor for each parameter."""

    def _matvec(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.multiply(torch.tensor(x.reshape(-1))).cpu().numpy()

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        return self.multiply_many(torch.tensor(X.T)).cpu().numpy().T

    def _adjoint(self) -> CurvatureOperator:
        return self

    def _transpose(self) -> CurvatureOperator:
        return self
