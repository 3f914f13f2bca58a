"""The interface of curvature matrices, which are given by their products with vectors."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import linalg
from torch import Tensor

from gradlens.numerics.unavailable import UnavailableError

if TYPE_CHECKING:
    _LinearOperator = linalg.LinearOperator[np.floating[Any]]
else:
    _LinearOperator = linalg.LinearOperator


class CurvatureOperator(_LinearOperator, ABC):
    """A symmetric matrix ``[D, D]`` over the concatenated, flattened parameters.

    To scipy it is a ``LinearOperator``; ``product`` and ``multiply`` do the same in torch, on the
    parameters' device. ``scale`` multiplies the matrix: 1/N turns the curvature of a sum loss
    over N samples into that of the mean loss. Numbers are of the parameters' dtype, in float32
    for half precisions.

    The operator keeps the loss's graph alive, and works until a parameter changes or the graph is
    freed. ``slices`` maps each parameter's name to its part of the flat vector.

    Raises ``ValueError`` without parameters, and for one that doesn't require a gradient;
    ``UnavailableError`` for complex ones.
    """

    def __init__(self, parameters: Mapping[str, Tensor], scale: float) -> None:
        _check(parameters)
        self.parameters = dict(parameters)
        self.scale = scale
        self.slices = parameter_slices(self.parameters)
        self.device = next(iter(self.parameters.values())).device
        self.torch_dtype = _accumulation_dtype(self.parameters.values())
        size = sum(p.numel() for p in self.parameters.values())
        dtype = torch.empty(0, dtype=self.torch_dtype).numpy().dtype
        # The stubs have only the constructor from functions.
        super().__init__(dtype, (size, size))  # type: ignore[call-arg]

    @final
    def block(self, which: str | int) -> slice:
        """The part of the flat vector that belongs to a parameter, by name or by position."""
        if isinstance(which, int):
            return list(self.slices.values())[which]
        if which not in self.slices:
            near = difflib.get_close_matches(which, self.slices, n=3, cutoff=0.3)
            raise KeyError(f"no parameter is called {which!r}; similar names: {near}")
        return self.slices[which]

    @final
    def product(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Matrix times a vector that is given as one tensor for each parameter, of its shape."""
        shapes = [p.shape for p in self.parameters.values()]
        if [v.shape for v in vectors] != shapes:
            raise ValueError(
                f"the vector's parts have shapes {[list(v.shape) for v in vectors]}, the "
                f"parameters have {[list(shape) for shape in shapes]}"
            )
        placed = [
            v.detach().to(p.device, p.dtype)
            for v, p in zip(vectors, self.parameters.values(), strict=True)
        ]
        parts = [part.to(self.torch_dtype) for part in self._product(placed)]
        return parts if self.scale == 1.0 else [part * self.scale for part in parts]

    @final
    def multiply(self, vector: Tensor) -> Tensor:
        """Matrix times a flat vector ``[D]``, of which a flat vector ``[D]`` comes out."""
        parameters = self.parameters.values()
        parts = vector.split([p.numel() for p in parameters])
        shaped = [part.reshape(p.shape) for part, p in zip(parts, parameters, strict=True)]
        return torch.cat(
            [part.to_dense().flatten().to(self.device) for part in self.product(shaped)]
        )

    @abstractmethod
    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        """The unscaled product, one detached tensor for each parameter."""

    def _matvec(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.multiply(torch.tensor(x.reshape(-1))).cpu().numpy()

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        return np.stack([self._matvec(column) for column in X.T], axis=1)

    def _adjoint(self) -> CurvatureOperator:
        return self

    def _transpose(self) -> CurvatureOperator:
        return self


def parameter_slices(parameters: Mapping[str, Tensor]) -> dict[str, slice]:
    """The part of the flat vector that belongs to each parameter, in their order."""
    stops = np.cumsum([p.numel() for p in parameters.values()]).tolist()
    starts = [0, *stops[:-1]]
    bounds = zip(starts, stops, strict=True)
    return {name: slice(*bound) for name, bound in zip(parameters, bounds, strict=True)}


def _check(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise ValueError("there are no parameters: pass a dict of names and parameters")
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen:
        raise ValueError(f"{frozen} don't require a gradient: pass only parameters that do")
    complex_ones = [name for name, p in parameters.items() if p.is_complex()]
    if complex_ones:
        raise UnavailableError(
            f"curvature is that of real parameters, and {complex_ones} are complex"
        )


def _accumulation_dtype(tensors: Any) -> torch.dtype:
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
