"""What notebooks show of cockpits, histories and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import nn

import gradlens
from gradlens import History, Undefined
from gradlens.history import html
from gradlens.history.html import in_short, table
from gradlens.history.records import Note, Source
from gradlens.plotting.output import NotebookFigure
from gradlens.quantities import GradNorm, Loss, NormTest
from tests.cases.steps import tracked_backward


class Cells(NamedTuple):
    """Texts of table cells, and all others."""

    rows: list[list[str]]
    texts: list[str]


def cells_of(html: str) -> Cells:
    """What a notebook shows; the elements must be closed in their order."""
    root = ElementTree.fromstring(html)
    rows = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    others = (each.text for each in root.iter() if each.tag not in ("td", "th"))
    return Cells(rows, [text for text in others if text])


def cells(value: Any) -> Cells:
    return cells_of(value._repr_html_())


class Net(nn.Module):
    """Has a layer that isn't used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


@pytest.fixture
def cockpit() -> gradlens.Cockpit:
    torch.manual_seed(0)
    model = Net()
    tracked = [Loss(), GradNorm(gradlens.schedules.linear(2)), NormTest()]
    found = gradlens.Cockpit(model, tracked)
    with pytest.warns(UserWarning, match="unused"):
        for step in range(4):
            loss = model(torch.randn(5, 4)).square().mean()
            model.zero_grad()
            tracked_backward(found, step, loss)
    return found


def test_a_history() -> None:
    history = History(notes=[Note(3, "a <b> & more")])
    history.append(2, {"loss": 1.25, "<script>": "</table>"})
    history.append(3, {"loss": Undefined("not < 1")})
    found = cells(history)
    assert repr(history) == "History(2 series, latest step 3)"
    assert found.rows[1:] == [
        ["loss", "2", "3", "NaN: not < 1"],
        ["<script>", "1", "2", "</table>"],
    ]
    assert found.texts == [repr(history), "1 note", "step 3: a <b> & more"]


def test_times_are_those_per_step() -> None:
    history = History({"clock": Source(("Time",))})
    history.append(10, {"clock": 1.7e9})
    assert cells(history).rows[1] == ["clock", "1", "10", "needs two records"]
    history.append(20, {"clock": 1.7e9 + 5})
    assert cells(history).rows[1] == ["clock", "2", "20", "0.5 s/step"]
    history.append(30, {"clock": Undefined("no clock")})
    assert cells(history).rows[1][3] == "NaN: no clock"


def test_a_history_without_values() -> None:
    assert repr(History()) == "History(0 series, no steps)"
    assert cells(History()).rows == [["series", "values", "latest step", "latest value"]]


def test_a_cockpit(cockpit: gradlens.Cockpit) -> None:
    found = cells(cockpit)
    text = "Cockpit(Net, 3 parameters, 3 quantities, History(3 series, latest step 3))"
    assert repr(cockpit) == text
    assert found.texts[0] == text
    rows = {row[0]: row for row in found.rows}
    assert rows["GradNorm"][1:3] == ["2", "2"]
    assert rows["GradNorm"][-1] == "Linear(interval=2, offset=0)"
    assert float(rows["Loss"][3]) == pytest.approx(cockpit.history["Loss"][3], rel=1e-3)


def test_coverage(cockpit: gradlens.Cockpit) -> None:
    table = cockpit.coverage()
    assert repr(table).startswith("CoverageTable(78.95 % of the trainable parameters, N = 5, by")
    assert "\n" not in repr(table)
    rows = cells(table).rows
    assert rows[1] == ["used.weight", "12", "covered"]
    assert rows[3][2].startswith("none: ")


def test_per_sample_gradients() -> None:
    model = gradlens.extend(Net())
    found = gradlens.per_sample_gradients(model)
    assert repr(found) == "per_sample_gradients(0 of 3 parameters, N = None)"
    with found:
        model(torch.randn(5, 4)).square().mean().backward()
    assert repr(found) == "per_sample_gradients(2 of 3 parameters, N = 5)"
    rows = cells(found).rows
    assert rows[1] == ["used.weight", "3x4", repr(found["used.weight"])]
    assert rows[3][:2] == ["unused.weight", "2x2"]
    assert rows[3][2].startswith("no per-sample gradients of 'unused.weight'")


SHORT = {
    "1.25": 1.25,
    "1,795,446,789": 1795446789.4,
    "1e+20": 1e20,
    "nan": float("nan"),
    "NaN: why": Undefined("why"),
    "True": True,
    "None": None,
    "a": "a",
    "3": np.array(3),
    "array of shape [2, 3]": np.zeros((2, 3)),
    "a 1, b 2": {"a": 1, "b": 2.0},
    "a 1, b 1, c 1, ... (4)": dict.fromkeys("abcd", 1),
    "1, 2": [1, 2],
}


@pytest.mark.parametrize("expected", SHORT)
def test_values_in_short(expected: str) -> None:
    assert in_short(SHORT[expected]) == expected


def test_long_tables_and_texts_are_cut() -> None:
    found = cells_of(table("a", ("b",), [("x" * 200,)] * 100))
    assert len(found.rows) == 1 + html.MOST_ROWS
    assert len(found.rows[1][0]) == html.LONGEST
    assert found.texts == ["a", "and 60 more"]


# Figures ------------------------------------------------------------------------------------


@dataclass
class Shell:
    """What is used of IPython's shell."""

    execution_count: int = 1


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    ipython = pytest.importorskip("IPython")
    found = Shell()
    monkeypatch.setattr(ipython, "get_ipython", lambda: found)
    return found


def is_displayed(figure: object) -> bool:
    """Whether IPython, which is asked to display a figure, has something to display."""
    formatters = pytest.importorskip("IPython.core.formatters")
    data, _ = formatters.DisplayFormatter().format(figure)
    return bool(data)


def test_a_figure_is_displayed_once_in_a_cell(shell: Shell) -> None:
    figure = NotebookFigure()
    assert is_displayed(figure)
    assert not is_displayed(figure)
    assert is_displayed(NotebookFigure())
    shell.execution_count += 1
    assert is_displayed(figure)
    assert not is_displayed(figure)


def test_figures_that_are_shown_are_of_this_kind() -> None:
    history = History()
    history.append(0, {"a": 1.0})
    pyplot.close("all")
    try:
        assert isinstance(gradlens.CockpitPlotter().plot(history), NotebookFigure)
    finally:
        pyplot.close("all")
