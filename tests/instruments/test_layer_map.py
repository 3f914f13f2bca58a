"""Maps of layers × steps: which series they draw, what their colours say, what they leave out."""

from __future__ import annotations

import io
import itertools
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure

from gradlens.history.history import History
from gradlens.history.undefined import Undefined
from gradlens.instruments import Drawing, LayerMapInstrument
from gradlens.instruments.layers import DECADES, colour_norm
from gradlens.instruments.scales import Scale
from gradlens.instruments.series import layout
from gradlens.instruments.shapes import COLUMNS
from tests.instruments.test_instruments import recorded as of_one

PARAMETERS = {"in.weight": (2, 2), "in.bias": (2,), "out.weight": (1, 2), "out.bias": (1,)}
REASON = "the gradient is gone"


def recorded(
    values: dict[int, Any], kind: str = "Mine", parameters: Any = PARAMETERS, **view: Any
) -> History:
    """A history of one quantity of a network."""
    return of_one(kind, values, parameters, **view)


def drawn(history: History, **options: Any) -> Drawing:
    """The map of a history's only series."""
    drawing = LayerMapInstrument().plot(history, **options)
    drawing.figure.savefig(io.BytesIO())
    return drawing


def cells(drawing: Drawing) -> Any:
    """Numbers behind the colours ``[R, K]``, masked where there are none."""
    mesh = drawing.artists["map"]
    array = mesh.get_array()
    return np.ma.asarray(array).reshape(mesh.get_coordinates().shape[0] - 1, -1)


def labels(drawing: Drawing) -> list[str]:
    """Words beside the rows."""
    return [text.get_text() for text in drawing.axes[-1].get_yticklabels()]


def test_rows_go_from_input_to_output() -> None:
    value = {"out.bias": 4.0, "in.bias": 2.0, "out.weight": 3.0, "in.weight": 1.0}
    drawing = drawn(recorded({0: value, 5: {n: 10 * v for n, v in value.items()}}))
    assert labels(drawing) == [*PARAMETERS]
    np.testing.assert_array_equal(cells(drawing), [[1, 10], [2, 20], [3, 30], [4, 40]])
    assert drawing.axes[-1].get_ylim() == (4, 0)
    assert drawing.ax.get_title(loc="left") == "Mine by parameter"


@pytest.mark.parametrize(
    ("value", "noun", "rows"),
    [
        ({"in.weight": 1.0, "in.bias": 2}, "parameter", 2),
        ({"out": 1.0, "in": 2.0}, "layer", 2),
        ({"out": {"value": 1.0, "low": 0.0}}, "layer", 1),
        ({"trace": 3.0, "parameters": {"in.bias": {"trace": 1.0}}}, "parameter", 1),
        ({"layers": {"in": {"eigenvalues": [1.0], "trace": 2.0}, "out": {"trace": 1.0}}},
         "layer", 2),
        ({"layers": {"anything": 1.0}}, "layer", 1),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_by_parameter_or_layer_have_a_map(value: Any, noun: str, rows: int) -> None:
    drawing = drawn(recorded({0: value, 1: value}))
    assert drawing.ax.get_title(loc="left") == f"Mine by {noun}"
    assert cells(drawing).shape == (rows, 2)
    assert not cells(drawing).mask.any()


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        {"sharpness": 1.0, "threshold": 2.0},
        {"in.weight": 1.0, "total": 2.0},
        {"in.weight": np.ones(3)},
        {"in.weight": "text"},
        {"layers": {"in": {"rank": 1.0}}},
        {"parameters": {"in.bias": {"hist": np.ones(3), "below": 0}}},
        {"parameters": {}},
        {},
        [1.0, 2.0],
        Undefined(REASON),
    ],
    ids=str,
)
def test_other_series_have_none(value: Any) -> None:
    history = recorded({0: value})
    assert LayerMapInstrument().panels(history) == ()
    assert layout(history["Mine"], history) is None


def test_layers_are_ordered_by_their_parameters() -> None:
    drawing = drawn(recorded({0: {"layers": {"out": 2.0, "in": 1.0, "unknown": 3.0}}}))
    assert labels(drawing) == ["in", "out", "unknown"]


def test_what_is_no_number_is_hatched_and_what_is_not_recorded_is_blank() -> None:
    values = {
        0: {"in.weight": 1.0, "in.bias": 2.0},
        1: {"in.weight": Undefined(REASON), "in.bias": math.inf},
        2: {"in.weight": 3.0},
    }
    drawing = drawn(recorded(values))
    np.testing.assert_array_equal(cells(drawing).mask, [[0, 1, 0], [0, 1, 1]])
    hatched = drawing.artists["undefined"].get_paths()  # type: ignore[attr-defined]
    boxes = [tuple(path.get_extents().extents) for path in hatched]
    assert boxes == [(0.5, 0, 1.5, 1), (0.5, 1, 1.5, 2)]
    assert "missing for a reason" in drawing.artists
    assert any("hatched: no finite number" in text.get_text() for text in drawing.ax.texts)


def test_nothing_but_undefined_says_why() -> None:
    drawing = drawn(recorded({0: {"in.weight": Undefined(REASON)}, 1: Undefined(REASON)}))
    assert drawing.artists["message"].get_text() == REASON  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("log", [False, True])
def test_many_steps_keep_the_largest_of_each_column(log: bool) -> None:
    rng = np.random.default_rng(0)
    norms = rng.lognormal(0, 1, (20_000, 2))
    norms[[7, 12_345], [0, 1]] = 1e3, 1e4
    values = {s: {"in.weight": a, "out.weight": b} for s, (a, b) in enumerate(norms.tolist())}
    drawing = drawn(recorded(values, yscale="log"), log_step=log)
    found = cells(drawing)
    assert found.shape[1] <= COLUMNS
    assert found.shape[1] > 0.5 * COLUMNS
    np.testing.assert_array_equal(found.max(axis=1), norms.max(axis=0))
    edges = drawing.artists["map"].get_coordinates()[0, :, 0]  # type: ignore[attr-defined]
    assert (np.diff(edges) > 0).all()
    spike = np.searchsorted(edges, 12_345) - 1
    assert found[1, spike] == 1e4


@pytest.mark.parametrize(
    ("values", "wish", "kind", "limits"),
    [
        ([1e-6, 1.0], "log", LogNorm, (1e-6, 1)),
        ([0.9, 1.0], "log", LogNorm, (0.1, 1)),
        ([0.0, 1e-3, 1.0], "log", LogNorm, (1e-4, 1)),
        ([1e-300, 1.0], "log", LogNorm, (10**-DECADES, 1)),
        ([1e-3, 1.0], "linear", LogNorm, (1e-3, 1)),
        ([0.5, 1.0, math.nan], "linear", Normalize, (0.5, 1)),
        ([2.0, 2.0], "linear", Normalize, (0, 2)),
        ([0.0, 0.0], "log", Normalize, (0, 1)),
        ([-1.0, 0.5], "linear", Normalize, (-1, 1)),
        ([-1e-2, 100.0], "symlog", SymLogNorm, (-100, 100)),
        ([-3.0, -1.0], "log", SymLogNorm, (-3, 3)),
    ],
)
def test_scale_of_colours(
    values: list[float], wish: Scale, kind: type, limits: tuple[float, float]
) -> None:
    norm = colour_norm(np.array(values), wish)
    assert type(norm) is kind
    assert (norm.vmin, norm.vmax) == pytest.approx(limits)
    assert norm(norm.vmin) == pytest.approx(0)
    assert norm(norm.vmax) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "view", "value", "linear"),
    [
        ("OutputActivation", {"label": "share"}, {"active": 0.5, "dead": 1e-3}, True),
        ("GradientActivation", {"label": "share"}, {"active": 1.0, "dead": 0.0}, True),
        ("DeadNeurons", {"label": "share of features"}, 1e-4, True),
        ("Mine", {"label": "share"}, 40.0, False),
        ("Mine", {"label": "size"}, 1e-4, False),
    ],
)
def test_shares_are_linear_from_none_to_all(
    kind: str, view: dict[str, Any], value: Any, linear: bool
) -> None:
    drawing = drawn(recorded({0: {"layers": {"in": value, "out": value}}}, kind, **view))
    mesh = drawing.artists["map"]
    assert type(mesh.norm) is Normalize
    assert ((mesh.norm.vmin, mesh.norm.vmax) == (0, 1)) == linear
    assert ("100 %" in [text.get_text() for text in drawing.axes[1].get_yticklabels()]) == linear


def test_zero_is_below_the_smallest_sizes() -> None:
    drawing = drawn(recorded({0: {"in.weight": 0.0, "out.weight": 1.0}}, yscale="log"))
    assert not cells(drawing).mask.any()
    mesh = drawing.artists["map"]
    assert mesh.norm.vmin == pytest.approx(0.1)
    assert cells(drawing)[0, 0] < mesh.norm.vmin


@pytest.mark.parametrize("count", [1, 14, 40, 400])
def test_rows_are_labelled_where_there_is_room(count: int) -> None:
    parameters = {f"very.long.path.to.blocks.{n}.attention.weight": (1,) for n in range(count)}
    history = recorded(
        {s: dict.fromkeys(parameters, 1.0 + s) for s in range(9)}, "Mine", parameters
    )
    drawing = drawn(history)
    renderer = FigureCanvasAgg(drawing.figure).get_renderer()
    boxes = [t.get_window_extent(renderer) for t in drawing.axes[-1].get_yticklabels()]
    tops = sorted(box.y0 for box in boxes)
    height = boxes[0].height
    assert all(b - a >= 0.9 * height for a, b in itertools.pairwise(tops))
    assert min(box.x0 for box in boxes) >= 0
    assert len(boxes) == count if count <= 40 else len(boxes) < count


def test_maps_of_several_runs_can_have_the_same_colours() -> None:
    figure = Figure()
    for ax, size in zip(figure.subplots(1, 2), (1.0, 1e-3), strict=True):
        history = recorded({0: {"in.weight": size, "out.weight": size / 5}}, yscale="log")
        mesh = LayerMapInstrument().plot(history, ax).artists["map"]
        mesh.set_clim(1e-4, 1)
        bar = ax.child_axes[0]
        figure.savefig(io.BytesIO())
        assert bar.get_ylim() == pytest.approx((1e-4, 1))
