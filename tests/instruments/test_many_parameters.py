"""Many parameters, exact zeros, values out of range, tests that coincide, and maps."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
import pytest

from gradlens import instruments
from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.setup import Layer, Setup
from gradlens.instruments.instrument import Normalisation, Options
from gradlens.instruments.layers import normalised, row_labels
from gradlens.instruments.panel import MOST_LINES
from gradlens.instruments.scales import within_reach
from gradlens.instruments.series import LayerTable
from gradlens.plotting.plotter import CockpitPlotter
from tests.instruments.test_instruments import VIEWS, line_data, recorded, shown_texts


def by_parameter(rows: dict[str, list[float]], kind: str = "GradNorm") -> History:
    """A run with numbers by parameter."""
    source = Source((kind,), VIEWS[kind])
    history = History({kind: source}, dict.fromkeys(rows, (2,)))
    for step, values in enumerate(zip(*rows.values(), strict=True)):
        history.append(step, {kind: dict(zip(rows, values, strict=True))})
    return history


def geometric(count: int, steps: int = 5) -> dict[str, list[float]]:
    """Rows of which each is twice as large as the one before."""
    return {f"h.{n}.weight": [2.0**n * (1 + step) for step in range(steps)] for n in range(count)}


# Quantiles -------------------------------------------------------------------------------------


def test_a_dozen_parameters_have_a_line_each() -> None:
    drawing = instruments.GradNormInstrument().plot(by_parameter(geometric(MOST_LINES)))
    assert {*geometric(MOST_LINES)} <= {*drawing.artists}
    assert "median" not in drawing.artists


def test_more_parameters_are_quantiles_with_the_extremes_named() -> None:
    rows = geometric(MOST_LINES + 1)
    drawing = instruments.GradNormInstrument().plot(by_parameter(rows))
    assert not {*rows} & {*drawing.artists}
    table = np.array([*rows.values()])
    for name, values in (
        ("median", np.median(table, axis=0)),
        ("lowest", table[0]),
        ("highest", table[-1]),
    ):
        np.testing.assert_allclose(line_data(drawing.artists[name])[1], values)
    texts = shown_texts(drawing.ax)
    assert {"median of 13", "quartiles", "all"} <= texts
    assert {"lowest name", "highest name"} <= {*drawing.artists}


def test_single_lines_on_demand() -> None:
    rows = geometric(40)
    one = instruments.GradNormInstrument(options=Options(single_lines=True))
    assert {*rows} <= {*one.plot(by_parameter(rows)).artists}


@pytest.mark.parametrize("ratio", [1.0, 1.001, 1.2, 3.0])
def test_names_of_extremes_are_apart_and_beside_the_panel(ratio: float) -> None:
    rows = {f"layer.{n}.weight": [ratio**n] * 3 for n in range(20)}
    drawing = instruments.GradNormInstrument().plot(by_parameter(rows))
    drawing.figure.draw_without_rendering()
    panel = drawing.ax.get_window_extent()
    boxes = [
        drawing.artists[f"{which} name"].get_window_extent() for which in ("lowest", "highest")
    ]
    assert not boxes[0].overlaps(boxes[1])
    for box in boxes:
        assert panel.x1 <= box.x0 < box.x1 <= drawing.figure.bbox.x1
        assert panel.y0 - 1 <= box.y0 < box.y1 <= panel.y1 + 1


# Zeros -----------------------------------------------------------------------------------------


def test_names_of_extremes_cover_no_line() -> None:
    # A long name is beside many steps, and the values at these differ from the last one.
    waves = 1.5 + np.sin(np.arange(60))
    rows = {f"transformer.h.{n}.attn.c_attn.weight": list(8.0**n * waves) for n in range(13)}
    drawing = instruments.GradNormInstrument().plot(by_parameter(rows))
    drawing.figure.draw_without_rendering()
    for which in ("lowest", "highest"):
        box = drawing.artists[f"{which} name"].get_window_extent()
        for line in drawing.ax.get_lines():
            assert (
                not line.get_transform()
                .transform_path(line.get_path())
                .intersects_bbox(box, filled=False)
            )


def test_the_key_has_all_entries_in_a_column() -> None:
    with matplotlib.rc_context({"font.family": "serif"}):
        history = by_parameter({f"h.{n}.weight": [1.0 + n] * 3 for n in range(400)})
        figure = CockpitPlotter().plot(history, show_plot=False, size=3.3, style="paper")
    assert {"total", "median of 400", "quartiles", "all"} <= shown_texts(figure.axes[0])


def test_parameters_that_are_zero_are_counted_and_marked() -> None:
    rows = {f"dead.{n}": [0.0, 0.0, 0.0] for n in range(7)} | {"alive": [1.0, 2.0, 4.0]}
    drawing = instruments.GradNormInstrument().plot(by_parameter(rows))
    assert not any(name.startswith("dead") for name in drawing.artists)
    assert "zero: 7 of 8" in shown_texts(drawing.ax)
    assert drawing.ax.get_yscale() == "log"
    steps, heights = line_data(drawing.artists["zeros"])
    assert (steps, heights) == ([0, 1, 2], [0, 0, 0])


def test_rounding_errors_are_named_and_do_not_stretch_the_axis() -> None:
    rows = {"query": [1e-2, 2e-2, 1e-2], "k.bias": [1e-19, 0.0, 2e-18], "value": [1e-3, 1e-3, 2e-3]}
    drawing = instruments.GradNormInstrument().plot(by_parameter(rows))
    assert "k.bias" not in drawing.artists
    assert "≈ 0: k.bias" in shown_texts(drawing.ax)
    assert drawing.ax.get_ylim()[0] > 1e-4
    assert line_data(drawing.artists["zeros"]) == ([0, 1, 2], [0, 0, 0])


def test_distances_begin_at_zero_and_are_not_marked() -> None:
    rows = {"a": [0.0, 1.0, 2.0], "b": [0.0, 2.0, 4.0]}
    drawing = instruments.DistanceInstrument().plot(by_parameter(rows, "Distance"))
    assert "zeros" not in drawing.artists


def test_a_run_of_zeros_is_drawn() -> None:
    drawing = instruments.GradNormInstrument().plot(by_parameter({"a": [0.0] * 3, "b": [0.0] * 3}))
    assert {"a", "b"} <= {*drawing.artists}


# Intervals and values out of range ---------------------------------------------------------------


@pytest.mark.parametrize("log", [False, True])
def test_intervals_leave_the_middle_a_third_of_the_axis(log: bool) -> None:
    middle, ends = np.array([2.0, 3.0, 4.0]), np.array([-50.0, 1.5, 5.0, 1e9])
    clipped = within_reach(ends, middle, log)
    if log:
        np.testing.assert_allclose(clipped, [1.5, 5, 4 * 2])
    else:
        np.testing.assert_allclose(clipped, [0, 1.5, 5, 6])


@pytest.mark.parametrize("kind", ["TICTrace", "Alpha", "EarlyStopping"])
@pytest.mark.parametrize(("spike", "edge"), [(1e6, "above"), (-1e6, "below")])
def test_arrows_show_values_out_of_range(kind: str, spike: float, edge: str) -> None:
    values = {step: 0.5 + 0.1 * (step % 5) for step in range(100)} | {40: spike}
    (instrument,) = (one for one in instruments.BUILT_IN if kind in one.kinds)
    drawing = instrument.plot(recorded(kind, values))
    assert line_data(drawing.artists[edge])[0] == [pytest.approx(40, abs=1)]
    assert max(map(abs, drawing.axes[-1].get_ylim())) < 100


# Maps -------------------------------------------------------------------------------------------


def layered() -> History:
    """Weights and biases of two linear layers and a normalisation."""
    names = ("0.weight", "0.bias", "1.weight", "2.weight", "2.bias")
    history = by_parameter(
        {name: [10.0**place, 2 * 10.0**place, 0.0] for place, name in enumerate(names)}
    )
    linear, norm = Layer(("Linear",), True), Layer(("LayerNorm",), True)
    history.setups[0] = Setup(layers={"0": linear, "1": norm, "2": linear})
    return history


MEDIANS: dict[Normalisation, list[float]] = {
    "row": [1.5, 15, 150, 1500, 15000],
    "kind": [501, 5010, 150, 501, 5010],
}


@pytest.mark.parametrize("by", ["row", "kind"])
def test_maps_are_divided_by_medians(by: Normalisation) -> None:
    history = layered()
    values = np.array([[10.0**n, 2 * 10.0**n, 0.0] for n in range(5)])
    names = tuple(history.parameters)
    table = LayerTable(names, np.arange(3.0), values, np.ones_like(values, dtype=bool))
    expected = values / np.array(MEDIANS[by])[:, None]
    np.testing.assert_allclose(normalised(table, by, history).values, expected)
    one = instruments.LayerMapInstrument(("GradNorm",), options=Options(normalise=by))
    drawing = one.plot(history)
    mesh = drawing.artists["map"]
    shown = np.ma.filled(np.ma.asarray(mesh.get_array()), math.nan)[:, :2]
    np.testing.assert_allclose(shown, expected[:, :2])
    assert any(f"over the {by}'s median" in text for text in shown_texts(drawing.ax))


def test_only_known_normalisations() -> None:
    with pytest.raises(ValueError, match="use one of row, kind"):
        Options(normalise="column")  # type: ignore[arg-type]


def test_layers_with_a_number_have_their_class() -> None:
    labels = row_labels(tuple(layered().parameters), layered())
    assert labels == [
        "0.weight Linear", "0.bias Linear", "1.weight LayerNorm",
        "2.weight Linear", "2.bias Linear",
    ]  # fmt: skip
    history = layered()
    history.setups[0] = Setup(layers={"head": Layer(("Linear",), True)})
    assert row_labels(("0", "head"), history) == ["0", "head"]
