"""Flat vectors over all parameters, and their parts of the parameters' shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradlens.numerics.unavailable import UnavailableError


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
    stops = np.cumsum([p.numel() for p in parameters.values()]).tolist()
    starts = [0, *stops[:-1]]
    bounds = zip(starts, stops, strict=True)
    return {name: slice(*bound) for name, bound in zip(parameters, bounds, strict=True)}


def check_parameters(parameters: Mapping[str, Tensor]) -> None:
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


def accumulation_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The dtype of products, which is single precision for half precisions."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of numpy that a dtype of torch is."""
    return torch.empty(0, dtype=dtype).numpy().dtype
