"""Large gradients are reduced by some rows of a parameter after others, with the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlens import reductions
from gradlens.gradients.collect import Collector
from gradlens.gradients.reduce import Reducer
from gradlens.numerics.unavailable import Contain, uncontained
from gradlens.operators.composed import Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense, stored_rows
from gradlens.operators.operator import PIECE_BYTES, GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows
from gradlens.reductions import ParameterGradients, Reduction

ROWS, COLUMNS = 7, 5


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def sequence() -> OuterProducts:
    return OuterProducts(normal(3, 20, ROWS), normal(3, 20, COLUMNS), 3.0)


def embedding() -> IndexedRows:
    indices, owners = torch.tensor([0, 6, 6, 2, 3, 3, 3]), torch.tensor([0, 0, 0, 1, 2, 2, 1])
    return IndexedRows(indices, normal(7, COLUMNS), owners, 3, ROWS, 3.0)


OPERATORS: dict[str, Callable[[], GradientOperator]] = {
    "vector": lambda: Dense(normal(3, ROWS), 3.0),
    "sequence": sequence,
    "tied": lambda: Summed([sequence(), embedding()]),
    "tied, the other way round": lambda: Summed([embedding(), sequence()]),
    "tied to a stored one": lambda: Summed([Dense(normal(3, ROWS, COLUMNS), 3.0), embedding()]),
    "convolution": lambda: Convolution(
        normal(3, ROWS, 4, 4), normal(3, 2, 6, 6), Geometry((3, 3), (1, 1), (1, 1), 1), 3.0
    ),
    "convolution in groups": lambda: Convolution(
        normal(3, 8, 4, 4), normal(3, 4, 6, 6), Geometry((3, 3), (1, 1), (1, 1), 2), 3.0
    ),
}
FROM_ROWS = (
    reductions.SquaredNorms(),
    reductions.Deviations(),
    reductions.Deviations(frozenset("w")),
    reductions.Gram(),
    reductions.CentredGram(),
    reductions.ElementRatios(1e-5),
    reductions.ElementRatios(1e-5, ddof=1),
    reductions.AbsMax(),
    reductions.Histogram1d(10, (-3.0, 3.0)),
    reductions.Histogram2d((10, 4), ((-3.0, 3.0), (-1.0, 1.0))),
)
WHOLE = (*(reductions.Mean(), reductions.SumOfSquares(), reductions.ElementDeviations()),)


def of_update(operator: GradientOperator) -> reductions.DirectionDots:
    return reductions.DirectionDots({"w": normal(*operator.shape)})


def numbers(value: Any) -> list[Tensor]:
    parts = astuple(value) if is_dataclass(value) else (value,)
    return [part for part in parts if isinstance(part, Tensor)]


def reduced(
    operator: GradientOperator, wanted: list[Reduction], contain: Contain = uncontained
) -> Reducer:
    weight = nn.Parameter(normal(*operator.shape) / 3)
    collector = Collector({})
    reducer = Reducer({"w": weight}, collector, wanted, contain=contain)
    collector.receive("w", 0, operator)
    reducer.finish()
    return reducer


@pytest.mark.parametrize("piece_bytes", [1, PIECE_BYTES])
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("made", OPERATORS.values(), ids=OPERATORS)
def test_rows_and_pieces_have_the_same_values(
    made: Callable[[], GradientOperator],
    rows_at_once: int,
    piece_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator = made()
    wanted = [*FROM_ROWS, *WHOLE, of_update(operator)]
    expected = reduced(Dense(operator.dense()), wanted).values
    bytes_of_row = operator.dense()[:, 0].numel() * 8

    def by_rows(individual: GradientOperator) -> Any:
        return stored_rows(individual, rows_at_once * bytes_of_row)

    monkeypatch.setattr(reductions, "STORED_BYTES", 0)
    monkeypatch.setattr(reductions, "stored_rows", by_rows)
    monkeypatch.setattr("gradlens.operators.operator.PIECE_BYTES", piece_bytes)
    found = reduced(made(), wanted).values
    for reduction in wanted:
        pairs = zip(numbers(found[reduction]["w"]), numbers(expected[reduction]["w"]), strict=True)
        for value, reference in pairs:
            torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-11)


def test_a_reduction_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(reductions.AbsMax):
        def reduce(self, gradients: ParameterGradients) -> Tensor:
            raise ValueError("no largest element")

    @contextmanager
    def contained(_: str, refuse: Callable[[str], None]) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            refuse(str(error))

    monkeypatch.setattr(reductions, "STORED_BYTES", 0)
    fine, failing, operator = reductions.SquaredNorms(), Failing(), sequence()
    reducer = reduced(operator, [failing, fine], contained)
    assert reducer.failed == {failing: "no largest element"}
    torch.testing.assert_close(reducer.values[fine]["w"], operator.squared_norms())
