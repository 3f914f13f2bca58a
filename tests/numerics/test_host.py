"""Values whose tensors are moved to the host together, on a simulated device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradlens.numerics.host import on_host
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
