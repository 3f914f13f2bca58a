"""Instruments of layers: what they draw of which record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from matplotlib.lines import Line2D

from gradlens.history.undefined import Undefined
from gradlens.instruments import (
    ActivationInstrument,
    AggregateInstrument,
    AttentionInstrument,
    Drawing,
    Instrument,
    KurtosisInstrument,
    LayerLinesInstrument,
    LayerMapInstrument,
    LayerSpectraInstrument,
    OutputEntropyInstrument,
)
from gradlens.instruments.series import input_to_output, layout, table
from gradlens.plotting.screen import layer_parts, main_parts
from tests.instruments.test_instruments import line_data, realistic, shown_texts
from tests.instruments.test_instruments import recorded as of_one

recorded = partial(of_one, parameters={f"{n}.weight": (2, 2) for n in (0, 2, 4)})


def heights(drawing: Drawing, name: str) -> list[float]:
    return line_data(drawing.artists[name])[1]


def activation(dead: Mapping[str, float]) -> dict[str, Any]:
    """Shares of dead units, and what is shown of them."""
    layers = {name: {"active": 0.5, "dead": d} for name, d in dead.items()}
    mean = float(np.mean([*dead.values()]))
    return {"layers": layers, "active": 0.5, "dead": mean, "worst": max(dead.values())}


def predictions(name: str, share: float) -> dict[str, Any]:
    """A network of ten classes that predicts one of them."""
    layer = {"entropy": share * math.log(10), "rms": 2.0, "largest": 9.0, "classes": 10}
    return {"layers": {name: layer}, "entropy": share, "top_share": 1.0}


def statistics(size: float) -> dict[str, float]:
    """What an epoch says of one number."""
    return {"mean": size, "std": 0.1 * size, "min": 0.8 * size, "q1": 0.95 * size,
            "median": size, "q3": 1.05 * size, "max": 1.3 * size, "iqr": 0.1 * size,
            "count": 20}  # fmt: skip


def test_layers_without_parameters_keep_their_places() -> None:
    history = recorded("OutputNorm", {})
    assert input_to_output(("0", "1", "2", "3", "4"), history) == ("0", "1", "2", "3", "4")
    assert input_to_output(("4", "1", "0"), history) == ("0", "4", "1")
    record = {"layers": {"0": 1.0, "1": 2.0, "2": 3.0}}
    history = recorded("OutputNorm", {0: record})
    found = layout(history["OutputNorm"], history)
    assert table(history["OutputNorm"], found, history).names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"norm": 2.0, "correlation": 0.1}, "norm"),
        ({"rms": 2.0}, "rms"),
        ({"active": 0.5, "dead": 2.0}, "dead"),
        ({"median": 2.0, "count": 3}, "median"),
    ],
)
def test_maps_of_dicts_show_what_matters(part: dict[str, float], field: str) -> None:
    history = recorded("Mine", {0: {"layers": {"0": part}}})
    found = layout(history["Mine"], history)
    assert found.field == field
    assert table(history["Mine"], found, history).values.tolist() == [[2.0]]
    assert f"colour: {field}" in " ".join(shown_texts(LayerMapInstrument().plot(history).figure))


def test_few_layers_have_a_line_each() -> None:
    no = Undefined("why")
    records: dict[int, Any] = {
        0: {"layers": {"0": 1.0, "1": no, "2": no}}, 1: {"layers": {"0": 2.0, "1": 2.0, "2": no}}
    }  # fmt: skip
    drawing = LayerLinesInstrument().plot(recorded("OutputNorm", records, yscale="log"))
    assert heights(drawing, "0") == [1, 2]
    np.testing.assert_array_equal(heights(drawing, "1"), [math.nan, 2])
    assert "2" not in drawing.artists
    assert drawing.ax.get_yscale() == "log"
    assert "missing for a reason" in drawing.artists


def test_many_layers_are_a_band() -> None:
    records = {s: {"layers": {str(n): float(n + s) for n in range(21)}} for s in (1, 2)}
    drawing = LayerLinesInstrument().plot(recorded("OutputNorm", records))
    assert heights(drawing, "median") == [11, 12]
    paths = {
        name: drawing.artists[name].get_paths()[0] for name in ("median band", "median band 2")
    }  # type: ignore[attr-defined]
    extents = {name: path.get_extents() for name, path in paths.items()}
    assert [extents["median band"].ymin, extents["median band"].ymax] == [1, 22]
    assert [extents["median band 2"].ymin, extents["median band 2"].ymax] == [6, 17]
    assert "median of 21" in shown_texts(drawing.figure)


@pytest.mark.parametrize(("dead", "alarm"), [(0.2, False), (0.75, True)])
def test_dead_units_are_told_and_an_alarm_if_they_are_many(dead: float, alarm: bool) -> None:
    records = {s: activation({"1": 0.0, "3": dead}) for s in (0, 1)}
    drawing = ActivationInstrument().plot(recorded("OutputActivation", records))
    assert heights(drawing, "dead") == [dead / 2] * 2
    assert heights(drawing, "dead, worst") == [dead] * 2
    assert drawing.ax.get_title(loc="right") == f"worst {100 * dead:.0f} % dead"
    assert (drawing.ax._right_title.get_color() == "#b42318") == alarm  # type: ignore[attr-defined]
    assert drawing.ax.get_ylim() == (-0.02, 1.02)


@pytest.mark.parametrize("layers", [3, 20])
@pytest.mark.parametrize(("infinite", "told"), [((1,), "∞: 1"), ((1, 2), "∞: 1 +1")])
def test_layers_that_are_always_infinite_are_named(
    layers: int, infinite: tuple[int, ...], told: str
) -> None:
    values = {str(n): math.inf if n in infinite else 2.0 for n in range(layers)}
    history = recorded("ConditionNumber", {s: {"parameters": values} for s in (0, 5)}, yscale="log")
    drawing = LayerLinesInstrument().plot(history)
    assert told in shown_texts(drawing.figure)
    line = drawing.artists["always infinite"]
    assert isinstance(line, Line2D)
    assert np.asarray(line.get_xdata()).tolist() == [0, 5]
    assert heights(drawing, "always infinite") == [1, 1]
    assert not {"missing", "infinite"} & {*drawing.artists}


@pytest.mark.parametrize("layers", [2, 20])
def test_single_infinities_are_at_the_upper_edge(layers: int) -> None:
    sizes = {str(n): 2.0 for n in range(layers)}
    records = {s: {"parameters": dict.fromkeys(sizes, math.inf) if s == 3 else sizes}
               for s in range(6)}  # fmt: skip
    drawing = LayerLinesInstrument().plot(recorded("ConditionNumber", records, yscale="log"))
    assert heights(drawing, "infinite") == [1.0]
    assert not any("∞" in text for text in shown_texts(drawing.figure))


def test_nothing_but_infinity_says_so() -> None:
    records = {0: {"parameters": {"0.weight": math.inf}}}
    drawing = LayerLinesInstrument().plot(recorded("ConditionNumber", records))
    assert "infinite at every step" in shown_texts(drawing.figure)


def test_spectra_have_a_panel_for_each_layer() -> None:
    history = realistic(20, ("InputCovariance",), layers=5)
    drawing = LayerSpectraInstrument().plot(history)
    assert len(drawing.axes) == 6
    assert len({axis.get_ylim() for axis in drawing.axes[1:]}) == 1
    assert {f"layers.{n}: λ{k}" for n in range(5) for k in range(1, 6)} <= {*drawing.artists}


@pytest.mark.parametrize(
    ("kept", "low", "high"),
    [(("median", "q1", "q3"), 0.95, 1.05), (("mean", "min", "max"), 0.8, 1.3), (("mean",), 0, 0)],
)
def test_the_band_is_what_there_is(kept: tuple[str, ...], low: float, high: float) -> None:
    one = {name: value for name, value in statistics(1.0).items() if name in (*kept, "count")}
    drawing = AggregateInstrument().plot(recorded("Aggregate", {0: one, 1: one}))
    if not high:
        assert "value band" not in drawing.artists
        return
    extents = drawing.artists["value band"].get_paths()[0].get_extents()  # type: ignore[attr-defined]
    assert (extents.ymin, extents.ymax) == pytest.approx((low, high))


def test_aggregates_of_many_layers_are_like_those_of_a_step() -> None:
    layers = {str(n): {"norm": statistics(n + 1.0), "turn": statistics(0.1)} for n in range(20)}
    drawing = AggregateInstrument().plot(recorded("Aggregate", {0: {"layers": layers}}))
    assert heights(drawing, "median") == [10.5]


def heads(factor: float) -> dict[str, Any]:
    return {"layers": {"0": np.array([3.0, 20.0]) * factor, "1": np.array([np.nan, 7.0])}}


OUTLIERS = {
    "0": {"largest": 9.0, "kurtosis": 0.5, "channel": 1, "position": 0},
    "1": {"largest": 3.0, "kurtosis": 40.0, "channel": 17, "position": 2},
    "2": Undefined("why"),
}
READOUTS: list[tuple[Instrument, str, Any, tuple[str, bool]]] = [
    (KurtosisInstrument(), "ActivationOutliers", {"layers": OUTLIERS}, ("channel 17", False)),
    (AttentionInstrument(), "AttentionLogits", heads(1.0), ("0.head 1: 20", False)),
    (AttentionInstrument(), "AttentionLogits", heads(10.0), ("0.head 1: 200", True)),
    (
        AttentionInstrument(),
        "AttentionEntropy",
        {"layers": {"0": 2.5, "1": 0.5}},
        ("1: 0.5", False),
    ),
    *(
        (
            OutputEntropyInstrument(),
            "OutputEntropy",
            predictions("2", entropy),
            ("top class 100 %", is_alarm),
        )
        for entropy, is_alarm in ((0.0, True), (1.0, False))  # of one class alone, and of all
    ),
]


@pytest.mark.parametrize(("instrument", "kind", "record", "readout"), READOUTS)
def test_readouts_name_what_is_largest_and_alarm_if_it_is_too_large(
    instrument: Instrument, kind: str, record: Any, readout: tuple[str, bool]
) -> None:
    history = recorded(kind, {0: record})
    (panel,) = instrument.panels(history)
    assert panel.content.readout == readout  # type: ignore[union-attr]
    if kind == "AttentionLogits":  # each head is a line
        drawing = instrument.plot(history)
        assert heights(drawing, "0.head 1") == [record["layers"]["0"][1]]


def test_layers_are_on_the_second_screen() -> None:
    kinds = ("Loss", "OutputNorm", "OutputActivation", "UpdateGeometry", "InputCovariance")
    history = realistic(20, kinds)
    shown = [type(one).__name__ for one in layer_parts(history)]
    assert {"LayerMapInstrument", "ActivationInstrument", "LayerSpectraInstrument"} <= {*shown}
    # Their numbers are in the maps.
    assert "LayerLinesInstrument" not in shown
    names = [type(one).__name__ for one in main_parts(history)]
    assert names.count("GenericInstrument") == 0
