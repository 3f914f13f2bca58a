"""The parameters that a matrix is taken over, flat vectors over them, and these vectors' parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradlens.numerics.unavailable import UnavailableError
from gradlens.spelling import near


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
    dtype = reduce(torch.promote_types, {t.dtype for t in tensors})
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of numpy that a dtype of torch is."""
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
