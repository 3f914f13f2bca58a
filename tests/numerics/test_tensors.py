"""Values whose tensors are moved to the host together, on a simulated device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gradlens.numerics.checksums import sums_of_bits
from gradlens.numerics.exchange import from_bytes, to_bytes
from gradlens.numerics.tensors import on_host
from tests.cases.simulated_device import SimulatedDevice


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass
class WithMore:
    given: Tensor
    name: str
    made: int = field(default=0, init=False)


def test_values_of_every_kind_are_moved_at_once() -> None:
    found = Pair(torch.tensor(1.0), torch.tensor([2.0, 3.0]))
    value = {"pair": found, "more": [WithMore(torch.tensor([[4.0]]), "x")], "none": None}
    with SimulatedDevice() as device:
        moved = on_host(value)
        assert moved["pair"][0].device.type == moved["more"][0].given.device.type == "cpu"
    assert device.waits.total() == 1
    assert [one.tolist() for one in moved["pair"]] == [1.0, [2.0, 3.0]]
    assert (moved["more"][0].given.tolist(), moved["more"][0].name) == ([[4.0]], "x")
    assert moved["none"] is None


@pytest.mark.parametrize("elements", [0, 1, 3, 4, 101])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64, torch.complex64])
def test_vectors_with_gaps_between_their_elements(elements: int, dtype: torch.dtype) -> None:
    """Some elements of a vector or matrix, or none, are moved, and their bits added up."""
    matrix = (10 * torch.rand(elements + 1, 4)).to(dtype)
    column, every = matrix[:elements, 1], matrix.flatten()[: 2 * elements : 2]
    with SimulatedDevice():
        moved = on_host([column, every, column[None].T, matrix])
    for found, given in zip(moved, [column, every, column[None].T, matrix], strict=True):
        assert torch.equal(found, given)
    gaps, packed = (sums_of_bits({"w": each}) for each in (every, every.clone()))
    assert gaps == packed
    assert torch.equal(from_bytes(to_bytes(every, ()), (), torch.device("cpu")), every)
