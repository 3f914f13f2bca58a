"""The interface of matrices over parameters, which are given by their products with vectors.

A vector has the elements of all parameters one after the other: it is flat, or one part for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import linalg
from torch import Tensor, nn

from gradlens.numerics.unavailable import UnavailableError
from gradlens.spelling import near

if TYPE_CHECKING:
    LinearOperator = linalg.LinearOperator[np.floating[Any]]
else:
    LinearOperator = linalg.LinearOperator


class ParameterOperator(LinearOperator, ABC):
    """A matrix ``[R, D]`` whose columns are those of the concatenated, flattened parameters.

    ``multiply`` and ``multiply_transposed`` do in torch what ``matvec`` and ``rmatvec`` do. R is D
    without ``rows``. Raises as ``CurvatureOperator`` does.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rows: int | None = None) -> None:
        _check(parameters)
        self.parameters = dict(parameters)
        self.device = next(iter(self.parameters.values())).device
        dtype = reduce(torch.promote_types, {p.dtype for p in self.parameters.values()})
        self.torch_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        size = sum(p.numel() for p in self.parameters.values())
        kind = torch.empty(0, dtype=self.torch_dtype, device="cpu").numpy().dtype
        # The stubs have only the constructor from functions.
        super().__init__(kind, (size if rows is None else rows, size))  # type: ignore[call-arg]

    @abstractmethod
    def multiply(self, vector: Tensor) -> Tensor:
        """The matrix times a flat vector ``[D]``, ``[R]``."""

    @abstractmethod
    def multiply_transposed(self, vector: Tensor) -> Tensor:
        """The transposed matrix times a vector ``[R]``, a flat vector ``[D]``."""

    def _matvec(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.multiply(torch.tensor(x.reshape(-1), device="cpu")).cpu().numpy()

    def _rmatvec(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.multiply_transposed(torch.tensor(x.reshape(-1), device="cpu")).cpu().numpy()


class CurvatureOperator(ParameterOperator):
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
        super().__init__(parameters)
        self.scale = scale
        self.slices = parameter_slices(self.parameters)

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
    def multiply_transposed(self, vector: Tensor) -> Tensor:
        """The same, since the matrix is symmetric."""
        return self.multiply(vector)

    @final
    def multiply_many(self, vectors: Tensor) -> Tensor:
        """Matrix times each of the flat vectors ``[k, D]``, ``[k, D]``."""
        many = self.products([shaped(vector, self.parameters) for vector in vectors])
        return torch.stack([flat(parts, self.device) for parts in many])

    @abstractmethod
    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        """The unscaled product, one detached tensor for each parameter."""

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        return self.multiply_many(torch.tensor(X.T, device="cpu")).cpu().numpy().T

    def _adjoint(self) -> CurvatureOperator:
        return self

    def _transpose(self) -> CurvatureOperator:
        return self


def selected_parameters(
    model: nn.Module, names: Sequence[str] | None = None
) -> dict[str, nn.Parameter]:
    """Parameters by name, in the model's order; by default all that require a gradient.

    A name is that of a parameter, or of a module, for all of its parameters that require a
    gradient. Raises ``ValueError`` for a name that the model doesn't have, a module without such
    parameters, and a single string.
    """
    named = dict(model.named_parameters())
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if names is None:
        return trainable
    if isinstance(names, str):
        raise ValueError(f"parameters={names!r} is one string: pass a list, [{names!r}]")
    chosen: set[str] = set()
    for name in names:
        found = {one for one in trainable if one.startswith(f"{name}.")}
        found |= {name} & named.keys()
        if not found:
            modules = [module for module, _ in model.named_modules() if module]
            if name in modules:
                raise ValueError(f"the module {name!r} has no parameters that require a gradient")
            raise ValueError(
                f"the model has no parameter or module {name!r}{near(name, [*named, *modules])}"
            )
        chosen |= found
    return {name: p for name, p in named.items() if name in chosen}


def shaped(vector: Tensor, parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The parts of a flat vector ``[D]``, one for each parameter, of its shape."""
    parts = vector.split([p.numel() for p in parameters.values()])
    return [part.reshape(p.shape) for part, p in zip(parts, parameters.values(), strict=True)]


def flat(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The flat vector ``[D]`` of these parts."""
    return torch.cat([part.to_dense().flatten().to(device) for part in parts])


def placed(vectors: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """The parts on the parameters' devices and in their dtypes; ``ValueError`` for other shapes."""
    shapes = [p.shape for p in parameters.values()]
    if [v.shape for v in vectors] != shapes:
        raise ValueError(
            f"the vector's parts have shapes {[list(v.shape) for v in vectors]}, the "
            f"parameters have {[list(shape) for shape in shapes]}"
        )
    pairs = zip(vectors, parameters.values(), strict=True)
    return [v.detach().to(p.device, p.dtype) for v, p in pairs]


def parameter_slices(parameters: Mapping[str, Tensor]) -> dict[str, slice]:
    """The part of the flat vector that belongs to each parameter, in their order."""
    sizes = [p.numel() for p in parameters.values()]
    return dict(zip(parameters, consecutive_slices(sizes), strict=True))


def consecutive_slices(sizes: Sequence[int]) -> list[slice]:
    """The parts of these sizes, one after the other."""
    stops = np.cumsum(sizes).tolist()
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _check(parameters: Mapping[str, Tensor]) -> None:
    """Raises ``ValueError`` or ``UnavailableError`` for what isn't a curvature matrix's."""
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
