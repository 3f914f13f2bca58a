"""What processes exchange arrives as it was, and nothing else can."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch

import gradlens
from gradlens.numerics.exchange import from_bytes, to_bytes
from gradlens.operators.composed import Composed, Grouped, Joined, Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OfFactors, OuterProducts
from gradlens.operators.table_rows import IndexedRows
from gradlens.parts.part import BatchPart, Results
from gradlens.parts.processes import OPERATORS as OPERATOR_CLASSES

CPU = torch.device("cpu")

PLAIN: list[Any] = [
    None,
    True,
    3,
    -2.5,
    math.inf,
    "‖θ‖",
    [1, (2, [3.0])],
    {"a": {(1, "b"): frozenset({"c"})}},
    torch.Size([2, 3]),
    torch.bfloat16,
    CPU,
]


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values(value: Any) -> None:
    found = from_bytes(to_bytes(value, ()), (), CPU)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (4, 3)], ids=str)
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    odd = torch.ones(3, dtype=torch.uint8)
    tensor = (10 * torch.rand(shape[::-1])).permute([*range(len(shape))][::-1]).to(dtype)
    one, found, again = from_bytes(to_bytes((odd, tensor, tensor), ()), (), CPU)
    assert torch.equal(one, odd)
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found, tensor)
    assert again is found


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.float64)


OPERATORS: list[GradientOperator] = [
    Dense(rand(4, 3, 2), 0.5),
    OuterProducts(rand(4, 1, 3), rand(4, 1, 2)),
    OuterProducts(rand(4, 5, 3), rand(4, 5, 2), 2.0),
    Grouped(OuterProducts(rand(8, 1, 3), rand(8, 1, 2)), 2),
    Summed([Dense(rand(4, 3, 2)), OuterProducts(rand(4, 1, 3), rand(4, 1, 2))]),
    Joined([Dense(rand(1, 3, 2)), OuterProducts(rand(3, 1, 3), rand(3, 1, 2))], [0.5, 2.0]),
    IndexedRows(torch.tensor([0, 2, 2]), rand(3, 2), torch.tensor([0, 1, 3]), 4, 3),
    Convolution(rand(4, 3, 3, 3), rand(4, 2, 5, 5), Geometry((3, 3), (1, 1), (1, 1), 1)),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: type(each).__name__)
def test_operators(operator: GradientOperator) -> None:
    other = from_bytes(to_bytes({"w": operator}, OPERATOR_CLASSES), OPERATOR_CLASSES, CPU)["w"]
    assert repr(other) == repr(operator)
    assert torch.equal(other.dense(), operator.dense())
    assert torch.equal(other.squared_norms(), operator.squared_norms())


def test_every_operator_can_be_sent() -> None:
    bases = (GradientOperator, Composed, OfFactors)
    kinds = {kind for base in bases for kind in base.__subclasses__()} - {*bases}
    assert kinds <= {*OPERATOR_CLASSES}
    assert {type(operator) for operator in OPERATORS} == kinds


def test_parts() -> None:
    part = BatchPart(
        4,
        loss=0.5,
        individual_losses=torch.ones(4),
        results=Results({"a": {"w": 1.0}}, {"b": "why"}, frozenset("c")),
        missing={"b": "why"},
        coupling=frozenset({"bn"}),
        are_kept=False,
    )
    classes = (BatchPart, Results)
    found = from_bytes(to_bytes(part, classes), classes, CPU)
    assert torch.equal(found.individual_losses, torch.ones(4))
    assert replace(found, individual_losses=None) == replace(part, individual_losses=None)


@dataclass
class Other:
    """No class that processes exchange."""


def test_other_classes_are_refused() -> None:
    with pytest.raises(TypeError, match="a Other can't be sent to other processes"):
        to_bytes([Other()], OPERATOR_CLASSES)
    message = to_bytes([Other()], [Other])
    with pytest.raises(UnpicklingError, match="Other"):
        from_bytes(message, OPERATOR_CLASSES, CPU)


@pytest.mark.slow
def test_nothing_is_unpickled() -> None:
    words = re.compile(r"\bpickle\b|\bload$|_object$|_object_list$")
    found = set()
    for path in Path(gradlens.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        called = {
            ast.unparse(node.func)
            for node in nodes
            # torch's own way of reading tensors alone.
            if isinstance(node, ast.Call)
            and "weights_only=True" not in map(ast.unparse, node.keywords)
        }
        imported = {
            alias.name
            for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        names = (called | imported) - {"History.load"}  # which reads lines of JSON
        found |= {(path.name, name) for name in names if words.search(name)}
    assert not found
