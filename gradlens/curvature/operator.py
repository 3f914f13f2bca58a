"""Matrices over parameters, given by their products with vectors, and vectors for them.

A vector has the elements of all parameters one after the other: it is flat, or one part for each.
Products of a symmetric matrix are counted and checked.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import linalg
from torch import Tensor, nn

from gradlens.numerics.norms import inner, norm
from gradlens.numerics.tensors import on_device
from gradlens.numerics.unavailable import UnavailableError
from gradlens.spelling import near

if TYPE_CHECKING:
    LinearOperator = linalg.LinearOperator[np.floating[Any]]
else:
    LinearOperator = linalg.LinearOperator


class SymmetricOperator(LinearOperator):
    """A symmetric matrix, which is its own transpose."""

    def _transpose(self) -> SymmetricOperator:
        return self

    _adjoint = _transpose


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


class CurvatureOperator(ParameterOperator, SymmetricOperator):
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

    joint: bool = False

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
        rows = vectors.contiguous()  # parts of strided rows would be copied number by number
        many = self.products([shaped(vector, self.parameters) for vector in rows])
        return torch.stack([flat(parts, self.device) for parts in many])

    @final
    def block(self, names: Collection[str]) -> CurvatureOperator:
        """The diagonal block of some of the parameters; ``KeyError`` for others."""
        return _Block(self, {name: self.parameters[name] for name in names})

    @abstractmethod
    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        """The unscaled product, one detached tensor for each parameter."""

    def _matmat(self, X: NDArray[Any]) -> NDArray[Any]:  # noqa: N803 (scipy's name)
        return self.multiply_many(torch.tensor(X.T, device="cpu")).cpu().numpy().T


@final
class _Block(CurvatureOperator):
    """A diagonal block, whose products are those of the ``whole`` matrix with zeros elsewhere."""

    def __init__(self, whole: CurvatureOperator, parameters: Mapping[str, Tensor]) -> None:
        super().__init__(parameters, 1.0)
        self.joint = whole.joint
        self._whole = whole

    def products(self, many: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        zeros = {n: torch.zeros_like(p) for n, p in self._whole.parameters.items()}
        padded = [zeros | dict(zip(self.parameters, each, strict=True)) for each in many]
        found = self._whole.products([[*each.values()] for each in padded])
        of_all = (dict(zip(zeros, each, strict=True)) for each in found)
        return [[each[name] for name in self.parameters] for each in of_all]

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return self.products([vectors])[0]


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
    if not (isinstance(parameters, Mapping) and parameters):
        raise ValueError(
            "there are no parameters by name: pass a dict, such as dict(model.named_parameters())"
        )
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if frozen:
        raise ValueError(f"{frozen} don't require a gradient: pass only parameters that do")
    complex_ones = [name for name, p in parameters.items() if p.is_complex()]
    if complex_ones:
        raise UnavailableError(
            f"curvature is that of real parameters, and {complex_ones} are complex"
        )


# Products of any symmetric matrix --------------------------------------------------------------

SymmetricMatrix: TypeAlias = "linalg.LinearOperator[Any] | NDArray[Any]"
"""A curvature operator, any other symmetric linear operator, or a matrix ``[D, D]``."""

JOINT_BYTES = 192 * 2**20
"""Memory of products that take one pass through data together.

A trade-off of memory against passes: that of the subspace in which eigenvalues are searched for.
"""

VECTOR_BYTES = 48
"""Memory that each element of these vectors takes at most.

Six float64 numbers: of the vector, its copy in a stack and what it is computed from; and of the
product, the sum over batches, the flat vector and its copy in a stack.
"""

Seed: TypeAlias = int | np.random.Generator
"""A number, or a generator, which continues from its state. Draws are the same on every device."""

NOT_FINITE = "a product of the matrix with a finite vector contains NaN or Inf"
_WITHOUT_FLOAT64 = ("mps",)

_NEGLIGIBLE = 1e-10
"""A remainder that is smaller, relative to the vector, counts as rounding.

Below it, float64 leaves fewer than six right digits of the direction; rounding itself is about
1e-16 for each row of the basis. In lower precisions the bound is ``_ROUNDING`` times theirs.
"""

_ROUNDING = 64.0
"""Rounding errors that count as rounding: one for each row, of which a basis of ``eigenpairs``
has at most 20, or 3·(k + 1)."""

_CANCELLED = 0.7
"""A remainder that is smaller, relative to the vector, is orthogonalised a second time.

It is about 1/√2 (Daniel et al., 1976): below, more than half of the vector's square has cancelled.
"""


class Products:
    """Products of a symmetric matrix with vectors ``[D]``, both tensors of ``dtype`` on ``device``.

    The device is the matrix's own where it has one. The dtype is float64, or with ``own_precision``
    that of a curvature operator. ``count`` is the number of products so far, ``norm`` the largest
    ‖Hv‖/‖v‖ of them, ``eps`` the relative rounding error of the numbers that the products are
    computed in. A call raises ``UnavailableError`` for a product with NaN or Inf.
    """

    def __init__(self, matrix: SymmetricMatrix, own_precision: bool = False) -> None:
        self.dtype, self.device = torch.float64, torch.device("cpu")
        self._multiply: Callable[[Tensor], Tensor]
        self._joint: CurvatureOperator | None = None
        if isinstance(matrix, CurvatureOperator):
            self._multiply, self.size = matrix.multiply, matrix.shape[0]
            self.eps = torch.finfo(matrix.torch_dtype).eps
            self.device = float64_device(matrix.device)
            self._joint = matrix if matrix.joint else None
            if own_precision:
                self.dtype, self.device = matrix.torch_dtype, matrix.device
        else:
            self._multiply, self.size, self.eps = _adapted(matrix)
        self.count = 0
        self.norm = 0.0

    def __call__(self, vector: Tensor) -> Tensor:
        return self._checked(vector, self._multiply(vector))

    def each(self, vectors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each vector ``[D]`` with its product, in their order.

        Of a matrix over data, as many as ``JOINT_BYTES`` hold take one pass, but at least one.
        """
        remaining = iter(vectors)
        while several := list(islice(remaining, self.together())):
            if self._joint is None or len(several) == 1:
                yield from ((vector, self(vector)) for vector in several)
                continue
            found = self._joint.multiply_many(torch.stack(several))
            for vector, product in zip(several, found, strict=True):
                yield vector, self._checked(vector, product)

    def together(self, kept: int = 0) -> int:
        """How many vectors of a matrix over data ``JOINT_BYTES`` hold, and one of any other matrix.

        ``kept`` vectors in float64 are kept for each of them.
        """
        bytes_each = (VECTOR_BYTES + 8 * kept) * self.size
        return 1 if self._joint is None else max(1, JOINT_BYTES // bytes_each)

    def _checked(self, vector: Tensor, product: Tensor) -> Tensor:
        product = product.to(self.device, self.dtype)
        self.count += 1
        size, product_size = float(norm(vector)), float(norm(product))
        if not math.isfinite(product_size):
            raise UnavailableError(NOT_FINITE)
        if size > 0:
            self.norm = max(self.norm, product_size / size)
        return product

    @property
    def rounding(self) -> float:
        """A residual whose norm is at most this is nothing but rounding: 16·``eps``·``norm``.

        Products and combinations of m vectors have errors of about √m roundings, 4.5 for the 20 of
        a search; the rest is a margin.
        """
        return 16 * self.eps * self.norm

    @property
    def like(self) -> Tensor:
        """A tensor ``[D]`` of ``dtype`` on ``device``, whose numbers take no memory."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.size)


def signs_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent signs ±1 of another tensor's shape, dtype and device."""
    drawn = torch.from_numpy(generator.integers(0, 2, tuple(like.shape), dtype=np.int8))
    return on_device(drawn, like.device, like.dtype).mul_(2).sub_(1)


def normal_like(like: Tensor, generator: np.random.Generator) -> Tensor:
    """Independent standard normal numbers of another tensor's shape, dtype and device.

    As a flat vector, any direction is as likely as any other.
    """
    drawn = torch.from_numpy(generator.standard_normal(tuple(like.shape)))
    return on_device(drawn.to(like.dtype), like.device)


def projected_out(vector: Tensor, basis: Iterable[Tensor]) -> Tensor:
    """``vector`` ``[D]`` without its components along the orthonormal rows of ``basis``.

    By the modified Gram-Schmidt method, row by row. What is left is orthogonal to rounding relative
    to what is taken away.
    """
    rest = vector.clone()
    for row in basis:
        rest.addcmul_(row, inner(row, rest), value=-1)
    return rest


def direction(vector: Tensor, basis: Sequence[Tensor] | Tensor) -> Tensor | None:
    """Unit vector along the part of ``vector`` ``[D]`` that ``basis`` doesn't span.

    ``None`` where that part is nothing but rounding, or not finite. Orthogonalising twice is enough
    for orthogonality to rounding, and once where nothing cancels (Parlett, 1998, Sec. 6.9).
    """
    rest, size = vector, norm(vector)
    left = size
    if len(basis):
        rest = projected_out(vector, basis)
        left = norm(rest)
    least = max(_NEGLIGIBLE, _ROUNDING * torch.finfo(vector.dtype).eps) * size
    if not least < left < torch.inf:
        return None
    if left < _CANCELLED * size:
        rest = projected_out(rest / left, basis)
        left = norm(rest)
    return rest / left


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or the CPU if it has no float64."""
    return torch.device("cpu") if device.type in _WITHOUT_FLOAT64 else device


def _adapted(matrix: SymmetricMatrix) -> tuple[Callable[[Tensor], Tensor], int, float]:
    """The product with a vector on the CPU, the size, and the relative rounding error."""
    if isinstance(matrix, np.ndarray):
        matrix = matrix.astype(np.float64)
    operator: Any = linalg.aslinearoperator(cast("Any", matrix))
    rows, columns = operator.shape
    if rows != columns or rows == 0:
        raise ValueError(f"the matrix has shape {[rows, columns]}: pass a square one")
    kind = np.dtype(operator.dtype or np.float64)
    eps = float(np.finfo(kind if kind.kind == "f" else np.float64).eps)
    return lambda vector: torch.tensor(operator.matvec(vector.numpy()), device="cpu"), rows, eps
