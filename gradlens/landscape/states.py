"""State dicts of a model at several times of its training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradlens.spelling import near

StateDict: TypeAlias = Mapping[str, Any]
"""A state dict, or any mapping of names to tensors. Entries that aren't tensors are left out."""

SHOWN = 4
"""Entries that an error message names, at most."""

OTHER_ENTRIES = "{which} has other entries than {other}: {differences}"
OTHER_SHAPE = "{name!r} has the shape {found} in {which}, and {expected} in {other}"
NOT_REAL = (
    "{name!r} is {dtype} and differs between the states: only real floating-point numbers can be "
    "interpolated"
)


def checked(state: StateDict, like: StateDict, which: str, other: str) -> dict[str, Tensor]:
    """The tensors of a state; ``ValueError`` unless names and shapes are those of another."""
    found, expected = _tensors(state), _tensors(like)
    differences = [f"{name!r} is missing" for name in expected.keys() - found.keys()]
    unknown = sorted(found.keys() - expected.keys())
    differences = sorted(differences) + [f"{name!r}{near(name, expected)}" for name in unknown]
    if differences:
        more = len(differences) - SHOWN
        shown = ", ".join(differences[:SHOWN]) + (f", and {more} more" if more > 0 else "")
        raise ValueError(OTHER_ENTRIES.format(which=which, other=other, differences=shown))
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            shapes = {"found": [*tensor.shape], "expected": [*expected[name].shape]}
            raise ValueError(OTHER_SHAPE.format(name=name, which=which, other=other, **shapes))
    return found


def difference(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each floating-point entry moves from the first state to the second.

    In single precision at least, and on the devices of the first state. Integers of one element,
    which count something, are left out. Raises ``ValueError`` for other entries that differ and
    aren't real floating-point numbers.
    """
    found: dict[str, Tensor] = {}
    for name, start in first.items():
        end = second[name].detach().to(start.device)
        if start.is_floating_point() and end.is_floating_point():
            dtype = torch.promote_types(start.dtype, torch.float32)
            found[name] = end.to(dtype) - start.detach().to(dtype)
        elif start.numel() > 1 and not torch.equal(start, end):
            raise ValueError(NOT_REAL.format(name=name, dtype=start.dtype))
    return found


def _tensors(state: StateDict) -> dict[str, Tensor]:
    return {name: entry for name, entry in state.items() if isinstance(entry, Tensor)}
