"""Every instrument against the same histories: what is drawn, where, and what is left alone."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from gradlens import instruments, quantities
from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.setup import ParameterGroup, Setup
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments import series, style
from gradlens.instruments.instrument import Instrument
from gradlens.instruments.layers import drawable
from gradlens.instruments.scales import NumberLabels, Scale, StepAxis, fit, log_ticks, number_label
from tests.cases.real_records import record, records

KINDS = (
    *("Loss", "Time", "Parameters", "GradNorm", "NormTest", "InnerTest", "OrthoTest"),
    *("GradHist1d", "UpdateSize", "Distance", "GradHist2d", "MeanGSNR", "GradCovariance", "Alpha"),
    *("HessTrace", "HessEigenvalues", "SpectralDensity", "DirectionalDerivatives", "HessMaxEV"),
    *("TICDiag", "TICTrace", "Stability", "CriticalSharpness", "StepLedger", "GradNoiseScale"),
    *("GroupGradients", "EarlyStopping", "CABS"),
)
OF_LAYERS = (
    *("OutputNorm", "ParameterNorm", "UpdateGeometry", "ClippedGradNorm", "RelativeUpdate"),
    *("OptimizerState", "OutputActivation", "AttentionLogits", "ActivationOutliers"),
    *("OutputEntropy", "WeightSpectrum", "InputCovariance", "OutputGradientCovariance"),
)
VIEWS: dict[str, View] = {
    **{kind: getattr(quantities, kind).view for kind in KINDS},
    "MyQuantity": View("Sharpness", group="curvature", yscale="log", label="my own"),
}
"""Kinds of quantities, and how they wish to be shown."""
ALL_VIEWS = VIEWS | {
    **{kind: getattr(quantities, kind).view for kind in OF_LAYERS},
    "Aggregate": View("Output norm (epoch)", group="layers", yscale="log"),
}

LOGGED: dict[str, float] = {
    "train_loss": 1.0, "valid_loss": 1.1, "test_loss": 1.2,
    "train_accuracy": 1.0, "valid_accuracy": 0.9, "test_accuracy": 0.85,
    "learning_rate": 0.1, "batch_size": 64.0,
}  # fmt: skip
"""What ``Cockpit.log`` records, which comes from no quantity, and a size for each."""


NOISE = np.random.default_rng(1).lognormal(0, 0.25, 997)
"""What every step is off by."""


def shapes(layers: int = 3) -> dict[str, tuple[int, ...]]:
    """Parameters of a small multilayer perceptron, from input to output."""
    return {f"layers.{n}.{p}": s for n in range(layers) for p, s in LAYER.items()}


LAYER: dict[str, tuple[int, ...]] = {"weight": (10, 10), "bias": (10,)}


def value(kind: str, step: int, last: int, names: Mapping[str, tuple[int, ...]]) -> Any:
    """A believable value: that of a real step, which gets smaller from step to step."""
    decay, noise = math.exp(-4 * step / max(last, 1)), float(NOISE[step % NOISE.size])
    if kind in LOGGED:
        return logged(kind, decay)
    if kind == "Time":
        return 1.7e9 + 0.031 * step + 0.004 * noise
    if kind == "MyQuantity":
        return 20 / (0.1 + decay) * noise
    return record(records((*KINDS, *OF_LAYERS))[kind], (0.02 + decay) * noise, names)


def logged(name: str, decay: float) -> float:
    """What a training loop says of itself."""
    if name in ("learning_rate", "batch_size"):
        return LOGGED[name]
    return LOGGED[name] * (decay + 0.02 if "loss" in name else 1 - 0.5 * decay)


def error_band(trace: float, error: float) -> dict[str, float]:
    """An estimate with its standard error."""
    low, high = trace - 3 * error, trace + 3 * error
    return {"trace": trace, "standard_error": error, "low": low, "high": high}


HEAVY = {"GradHist1d": 10, "GradHist2d": 10, "GradCovariance": 5, "Parameters": 2, "HessTrace": 5,
         "HessEigenvalues": 5, "HessMaxEV": 5, "Stability": 5, "SpectralDensity": 10,
         "DirectionalDerivatives": 5, "CriticalSharpness": 5, "StepLedger": 5,
         "InputCovariance": 5, "OutputGradientCovariance": 5}  # fmt: skip
"""What nobody records at every step."""


def realistic(
    steps: int = 100, kinds: tuple[str, ...] = (*VIEWS, *LOGGED), layers: int = 3, every: int = 1
) -> History:
    """A run of all kinds of quantities at ``steps`` steps, the heavy ones less often."""
    names = shapes(layers)
    history = History({k: Source((k,), ALL_VIEWS[k]) for k in kinds if k in ALL_VIEWS}, names)
    for step in range(0, steps * every, every):
        for kind in kinds:
            pace = HEAVY.get(kind, 1) * max(1, steps // 400 if kind in HEAVY else 1)
            if step // every % pace == 0:
                history.append(step, {kind: value(kind, step, steps * every, names)})
    return history


def kinds_of(one: Instrument) -> tuple[str, ...]:
    """Kinds and logged series that an instrument is shown: all if it draws them together."""
    return (*one.kinds, *one.logged) if one.together else one.kinds[:1]


CASES: dict[str, tuple[str, ...]] = {
    **{type(one).__name__: kinds_of(one) for one in instruments.BUILT_IN},
    "LayerMapInstrument": ("GradNorm",),
    "CorrelationsInstrument": ("UpdateGeometry",),
    "GenericInstrument": ("MyQuantity",),
}
"""What each instrument is shown in the tests that all of them share."""

BY_LAYER = {"LayerMapInstrument", "LayerRanksInstrument", "LayerHistogramsInstrument",
            "LayerJointHistogramsInstrument", "LayerSpectraInstrument",
            "CorrelationsInstrument", "GradientOverRootInstrument",
            "MomentCosinesInstrument"}  # fmt: skip
NOT_OVER_STEPS = {
    "Histogram1dInstrument",
    "Histogram2dInstrument",
    "LayerHistogramsInstrument",
    "LayerJointHistogramsInstrument",
    "SpectralDensityInstrument",
}
REASON = "one sample has no spread"
NONE = Undefined(REASON)


def instrument(name: str) -> Instrument:
    """The instrument of a case; the generic one has to be told its series."""
    return getattr(instruments, name)(CASES[name] if name == "GenericInstrument" else ())


def same(history: History, change: Callable[[int, Any], Any]) -> History:
    """The history with other values at the same steps."""
    changed = History(history.sources, history.parameters)
    for name in history.names:
        for step, old in history[name].items():
            changed.append(step, {name: change(step, old)})
    return changed


def twice(history: History) -> History:
    """The history with a second quantity of each kind."""
    more = {f"{k} 2": Source((k,), source.view) for k, source in history.sources.items()}
    double = History({**history.sources, **more}, history.parameters)
    for name in (*double.names, *(name for name in history.names if name not in history.sources)):
        for step, old in history[name.removesuffix(" 2")].items():
            double.append(step, {name: old})
    return double


def shown_texts(artist: Artist) -> set[str]:
    """All words on an axis or a figure."""
    return {text.get_text() for text in artist.findobj(Text)} - {""}


every_case = pytest.mark.parametrize("case", CASES)


def test_every_instrument_is_exported_and_built_in_once() -> None:
    exported = {name for name in instruments.__all__ if name.endswith("Instrument")}
    listed = [type(one).__name__ for one in instruments.BUILT_IN]
    assert exported == {*listed, "Instrument", "GenericInstrument"}
    assert len({*listed}) == len(listed)


def settings_of_matplotlib() -> object:
    return (
        dict(matplotlib.rcParams),
        matplotlib.is_interactive(),
        "matplotlib.pyplot" in sys.modules,
    )


@every_case
def test_draws_on_the_axis_of_the_caller(case: str) -> None:
    """And nowhere else, be it one step; the same each time; matplotlib's settings stay."""
    history, before = realistic(1, CASES[case]), settings_of_matplotlib()
    found = []
    for _ in range(2):
        figure = Figure()
        left, right = figure.subplots(1, 2)
        drawing = instrument(case).plot(history, right)
        assert drawing.ax is right
        assert right.get_title(loc="left")
        assert {artist.axes for artist in drawing.artists.values()} <= {*drawing.axes}
        assert not left.has_data()
        assert figure.axes == [left, right]
        found.append(([*drawing.artists], shown_texts(figure)))
    figure.draw_without_rendering()
    assert found[0] == found[1]
    assert found[0][0]
    assert settings_of_matplotlib() == before


@pytest.mark.parametrize("history", [History(), realistic(0)], ids=["no names", "no steps"])
def test_says_that_nothing_was_recorded(history: History) -> None:
    for one in map(instrument, CASES):
        assert not one.series(history)
        assert one.panels(history) == ()
    drawing = one.plot(history)
    assert "nothing recorded yet" in shown_texts(drawing.ax)
    drawing.figure.draw_without_rendering()


HISTORIES: dict[str, Callable[[tuple[str, ...]], History]] = {
    "gaps": lambda kinds: same(
        realistic(80, kinds), lambda step, old: NONE if step % 20 == 0 and step else old
    ),
    "many steps": lambda kinds: realistic(3_000, kinds),
    "many layers": lambda kinds: realistic(11, kinds, layers=40),
}


@every_case
@pytest.mark.parametrize("history", HISTORIES)
def test_histories_of_any_kind_are_drawn(history: str, case: str) -> None:
    """Many steps on a logarithmic axis, the others on a linear one."""
    recorded, log_step = HISTORIES[history](CASES[case]), history == "many steps"
    assert instrument(case).series(recorded)
    drawing = instrument(case).plot(recorded, log_step=log_step)
    assert all(np.size(line.get_xdata()) < 2500 for line in drawing.figure.findobj(Line2D))
    if case not in NOT_OVER_STEPS:
        over_steps = drawing.axes[-1]  # which may be one inside
        assert over_steps.get_xscale() == ("symlog" if log_step else "linear")
        assert not log_step or over_steps.get_xlim()[0] == 0
    drawing.figure.draw_without_rendering()


@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_LAYER])
def test_gives_the_reason_if_nothing_is_a_number(case: str) -> None:
    undefined = same(realistic(20, CASES[case]), lambda step, old: Undefined(REASON))
    assert instrument(case).series(undefined)
    drawing = instrument(case).plot(undefined)
    assert REASON in " ".join(" ".join(shown_texts(drawing.figure)).split())
    drawing.figure.draw_without_rendering()


@pytest.mark.parametrize("case", sorted(BY_LAYER))
def test_has_no_data_without_layers(case: str) -> None:
    one = instrument(case)
    whole = same(
        realistic(20, CASES[case]),
        lambda step, old: {k: v for k, v in old.items() if k != one.part and not one.by_layer},
    )
    assert not one.series(whole)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] not in LOGGED])
def test_two_quantities_of_a_kind(case: str) -> None:
    single = realistic(20, CASES[case])
    double = twice(single)
    one = getattr(instruments, case)((*double.names,) if case == "GenericInstrument" else ())
    assert {*one.series(double)} == {*double.names}
    assert len(one.panels(double)) == (1 if one.together else 2)
    drawing = one.plot(double)
    for name in double.sources:
        apart = {other.replace(f"{name} 2", "") for other in drawing.artists}
        assert any(name in other for other in apart)
    drawing.figure.draw_without_rendering()


# Single instruments -------------------------------------------------------------------------


def recorded(
    kind: str, values: Mapping[int, Any] | Iterable[Any], parameters: Any = (), **view: Any
) -> History:
    """A history of one quantity of a network."""
    history = History({kind: Source((kind,), View(kind, **view))}, dict(parameters))
    steps = values.items() if isinstance(values, Mapping) else enumerate(values)
    for step, entry in steps:
        history.append(step, {kind: entry})
    return history


def line_data(artist: Artist) -> tuple[list[float], list[float]]:
    """What a line goes through."""
    return list(map(float, artist.get_xdata())), list(map(float, artist.get_ydata()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "values", "lines"),
    [
        ("Parameters", [{"w": np.full((2, 3), 2.0 * s), "b": np.ones(3)} for s in (1, 2)],
         {"w": [2, 4], "b": [1, 1]}),
        ("GradNorm", [{"w": 3.0, "b": 4.0}, {"w": 3.0}, {"w": 3.0, "b": math.nan}],
         {"total": [5, 3, math.nan], "w": [3, 3, 3]}),
        *((kind, [{"w": 3.0, "b": 4.0}, {"w": 6.0, "b": 8.0}], {"total": [5, 10], "w": [3, 6]})
          for kind in ("GradNorm", "UpdateSize", "Distance")),
    ],
)  # fmt: skip
def test_sizes_of_parameters_have_a_line_each_and_norms_a_total(
    kind: str, values: list[Any], lines: dict[str, list[float]]
) -> None:
    history = recorded(kind, values, yscale=VIEWS[kind].yscale)
    drawing = getattr(instruments, f"{kind}Instrument")().plot(history)
    for name, line in lines.items():
        np.testing.assert_allclose(line_data(drawing.artists[name])[1], line)
    assert drawing.ax.get_yscale() == VIEWS[kind].yscale
    total = lines.get("total", [math.nan])[-1]
    assert math.isnan(total) or drawing.ax.get_title(loc="right") == f"{total}"


def trace(value: float, error: float, **more: Any) -> dict[str, Any]:
    """A record of ``HessTrace``."""
    return {**error_band(value, error), "parameters": {}, **more}


def of_optimizer(optimizer: str, **more: object) -> Setup:
    """What is recorded of a run with one parameter group."""
    options = {k: v for k, v in more.items() if isinstance(v, float)}
    others: dict[str, Any] = {k: v for k, v in more.items() if not isinstance(v, float)}
    return Setup(optimizer, **{"groups": (ParameterGroup(options, ("w",)),)} | others)


THRESHOLDS = {
    "descent": (of_optimizer("SGD", momentum=0.0), "2/η", [4.0, 20.0]),
    "momentum": (of_optimizer("SGD", momentum=0.9), "(2+2β)/η", [7.6, 38.0]),
    "Nesterov": (
        of_optimizer("SGD", momentum=0.9, nesterov=1.0),
        "(2+2β)/(η+2ηβ)",
        [7.6 / 2.8, 38 / 2.8],
    ),
    "dampening": (of_optimizer("SGD", momentum=0.5, dampening=0.5), "(2+2β)/η", [12.0, 60.0]),
}
NO_THRESHOLD = {
    "Adam": of_optimizer("Adam", beta1=0.9, beta2=0.999),
    "weight decay": of_optimizer("SGD", momentum=0.0, weight_decay=0.1),
    "a sum loss": of_optimizer("SGD", momentum=0.0, declared_reduction="sum"),
    "several groups": of_optimizer("SGD", groups=(ParameterGroup({}, ("v",)),) * 2),
    "no optimizer": Setup(),
}


def with_rates(setup: Setup | None) -> History:
    """Eigenvalues of a run whose training loop has logged its learning rate."""
    history = recorded("HessMaxEV", {0: 3.0, 10: 5.0, 20: 30.0})
    for step, rate in ((5, 0.5), (20, 0.1)):
        history.append(step, {"learning_rate": rate})
    if setup is not None:
        history.setups[0] = setup
    return history


@pytest.mark.parametrize("case", THRESHOLDS)
def test_largest_eigenvalue_has_the_threshold_of_the_optimizer(case: str) -> None:
    setup, name, values = THRESHOLDS[case]
    drawing = instruments.HessMaxEVInstrument().plot(with_rates(setup))
    steps, found = line_data(drawing.artists[name])
    assert steps == [10, 20]
    assert found == pytest.approx(values)


@pytest.mark.parametrize("case", [*NO_THRESHOLD, "unknown"])
def test_largest_eigenvalue_has_no_threshold_where_none_is_known(case: str) -> None:
    drawing = instruments.HessMaxEVInstrument().plot(with_rates(NO_THRESHOLD.get(case)))
    assert [*drawing.artists] == ["λ₁", "subtitle"]
    assert "η" not in " ".join(shown_texts(drawing.ax))


def test_a_threshold_is_at_the_rates_that_the_optimizer_had() -> None:
    history = with_rates(THRESHOLDS["descent"][0])
    for step, rate in ((0, 0.5), (10, 0.25), (20, 0.125)):
        history.add_facts(step, {"steps": {"lr": rate}})
    drawing = instruments.HessMaxEVInstrument().plot(history)
    assert line_data(drawing.artists["2/η"]) == ([0, 10, 20], [4, 8, 16])


def test_undefined_eigenvalues_have_a_reason_despite_a_threshold() -> None:
    history = recorded("HessMaxEV", {0: Undefined(REASON)})
    history.append(0, {"learning_rate": 0.1})
    assert REASON in shown_texts(instruments.HessMaxEVInstrument().plot(history).ax)


@pytest.mark.parametrize(("latest", "stop"), [(-0.5, False), (0.1, True), (math.nan, True)])
def test_early_stopping_is_an_alarm_above_zero(latest: float, stop: bool) -> None:
    history = recorded("EarlyStopping", {0: -1.0, 1: -0.3, 2: latest})
    drawing = instruments.EarlyStoppingInstrument().plot(history)
    words = drawing.ax.get_title(loc="right")
    (readout,) = (text for text in drawing.ax.findobj(Text) if text.get_text() == words)
    assert (readout.get_color() == style.ALARM) == stop
    tinted = drawing.artists["danger"]
    extents = tinted.get_paths()[0].get_extents()  # type: ignore[attr-defined]
    bottom, top = extents.ymin, extents.ymax
    assert bottom == pytest.approx(0, abs=1e-9)
    assert top == pytest.approx(drawing.ax.get_ylim()[1])


def test_batch_size_in_use_is_beside_the_suggested_one() -> None:
    history = recorded("CABS", {0: 10.0, 10: 20.0, 20: 40.0})
    alone = instruments.BatchSizeInstrument().plot(history)
    assert "suggested by CABS" in shown_texts(alone.ax)
    history.append(0, {"batch_size": 64})
    history.append(15, {"batch_size": 128})
    drawing = instruments.BatchSizeInstrument().plot(history)
    assert line_data(drawing.artists["in use"]) == ([0, 10, 20], [64, 64, 128])
    assert drawing.ax.get_title(loc="right") == "40"


def test_batch_size_that_was_only_logged() -> None:
    history = History()
    history.append(0, {"batch_size": 64})
    drawing = instruments.BatchSizeInstrument().plot(history)
    assert "in use" in shown_texts(drawing.ax)


def test_gradient_tests_are_a_circle_and_two_bands() -> None:
    history = realistic(5, ("NormTest", "InnerTest", "OrthoTest"))
    artists = instruments.GradientTestsInstrument().plot(history).artists
    circle, inner, ortho = (artists[n] for n in ("norm circle", "inner band", "ortho band"))
    assert isinstance(circle, Line2D)
    x, y = (np.asarray(one, dtype=np.float64) for one in circle.get_data())
    np.testing.assert_allclose(np.hypot(x - 1, y), history["NormTest"][4])
    extents = [one.get_paths()[0].get_extents() for one in (inner, ortho)]  # type: ignore[attr-defined]
    assert extents[0].width == pytest.approx(2 * history["InnerTest"][4])
    assert extents[1].height == pytest.approx(2 * history["OrthoTest"][4])


def test_histogram_states_what_is_clipped_and_nan() -> None:
    value: dict[str, Any] = {"hist": np.array([30, 0, 70]), "edges": np.linspace(-1, 1, 4)}
    value |= {"below": 20, "above": 0, "nan": 100}
    drawing = instruments.Histogram1dInstrument().plot(recorded("GradHist1d", {3: value}))
    assert {"20 % clipped", "step 3"} <= shown_texts(drawing.ax)
    assert drawing.ax.get_title(loc="right") == "50 % NaN"
    assert "below" in drawing.artists
    assert "above" not in drawing.artists
    assert drawing.ax.get_yscale() == "log"


@pytest.mark.parametrize("case", ["LayerHistogramsInstrument", "LayerJointHistogramsInstrument"])
def test_layer_histograms_go_from_input_to_output_on_one_range(case: str) -> None:
    history = realistic(1, CASES[case], layers=4)
    parts = instrument(case).plot(history).axes[1:]
    assert [ax.get_title(loc="left") for ax in parts] == [*history.parameters]
    assert len({ax.get_xlim() for ax in parts}) == 1


@pytest.mark.slow
def test_joint_histograms_of_very_many_parameters_are_the_first_ones() -> None:
    counts = {"hist": np.ones((2, 2), int), "below": [0, 0], "above": [0, 0], "nan": 0}
    names = {f"{n}.weight": (3,) for n in range(60)}
    edges = [np.arange(3.0), np.arange(3.0)]
    parts = dict.fromkeys(names, counts)
    history = recorded("GradHist2d", {0: counts | {"edges": edges, "parameters": parts}})
    history.parameters = names
    drawing = instruments.LayerJointHistogramsInstrument().plot(history)
    assert len(drawing.axes) == 1 + 48
    assert any("first 48 of 60" in text for text in shown_texts(drawing.ax))


def test_spectrum_may_change_its_length() -> None:
    values = {
        0: {"eigenvalues": np.array([2.0, 1.0]), "trace": 3.0},
        1: {"eigenvalues": np.array([2.0]), "trace": 2.0},
        2: {"eigenvalues": np.array([]), "trace": math.nan},
    }
    drawing = instruments.CovarianceSpectrumInstrument().plot(recorded("GradCovariance", values))
    np.testing.assert_allclose(line_data(drawing.artists["λ2"])[1], [1, math.nan, math.nan])


@pytest.mark.parametrize(
    "value",
    [
        1.5,
        True,
        np.float32(2),
        np.array(3.0),
        np.arange(4.0),
        [1.0, 2.0],
        {"a": 1.0, "b": 2.0},
        {f"layer {n}": float(n) for n in range(30)},
        {"a": np.arange(3.0), "b": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("yscale", ["linear", "log", "symlog"])
def test_generic_draws_numbers_arrays_and_dicts(value: Any, yscale: str) -> None:
    history = recorded("Mine", {0: value, 2: value, 3: math.nan}, yscale=yscale)
    drawing = instruments.GenericInstrument(("Mine",)).plot(history)
    assert drawing.ax.get_title(loc="left") == "Mine"
    assert any(isinstance(artist, Line2D) for artist in drawing.artists.values())
    drawing.figure.draw_without_rendering()


def test_generic_follows_the_view() -> None:
    history = recorded("Mine", {0: 1.0, 1: 10.0}, yscale="log", label="per step")
    drawing = instruments.GenericInstrument(("Mine",)).plot(history)
    assert drawing.ax.get_yscale() == "log"
    assert "per step" in shown_texts(drawing.ax)


@pytest.mark.parametrize("value", [None, "text", {"a": {"b": 1.0}}, {"a": "b"}, [], ["a"]], ids=str)
def test_generic_leaves_out_what_it_cannot_draw(value: Any) -> None:
    assert not drawable({0: value})


def test_a_missing_value_is_an_alarm_unless_its_own_reason_is_known() -> None:
    history = recorded("Mine", {0: 1.0, 1: math.nan, 2: 2.0, 3: Undefined("why"), 4: 3.0})
    artists = instruments.GenericInstrument(("Mine",)).plot(history).artists
    marked = {name: artists[name] for name in ("missing", "missing for a reason")}
    assert all(isinstance(one, Line2D) for one in marked.values())
    assert [[*one.get_xdata()] for one in marked.values()] == [[1.0], [3.0]]  # type: ignore[attr-defined]


# Arrays -------------------------------------------------------------------------------------


def test_thinning_keeps_extremes_and_gaps() -> None:
    steps, values = np.arange(50_000.0), np.sin(np.arange(50_000.0))
    values[[123, 40_000]] = 99, -99
    values[20_000:30_000] = np.nan
    x, y = series.thin(steps, values)
    assert x.size < 1300
    assert np.nanmax(y) == 99
    assert np.nanmin(y) == -99
    inside = (x >= 20_000) & (x < 30_000)
    assert inside.any()
    assert np.isnan(y[inside]).all()
    assert (np.diff(x) > 0).all()
    assert (x[0], x[-1]) == (0, 49_999)


@pytest.mark.parametrize("warp", [None, StepAxis(0, 1, log=True).warp])
def test_trend_follows_a_line_and_ignores_spikes(warp: series.Warp | None) -> None:
    steps = np.arange(2000.0)
    values = 1 + steps / 1000
    values[1::50] = 1e6
    found = series.trend(series.Line(steps, values), warp)
    expected = 1 + found.steps / 1000
    late = found.steps > 100
    np.testing.assert_allclose(found.values[late], expected[late], rtol=0.1)


def test_trend_has_the_gaps_of_its_line() -> None:
    values = np.ones(1000)
    values[300:600] = np.nan
    found = series.trend(series.Line(np.arange(1000.0), values))
    inside = (found.steps >= 300) & (found.steps < 600)
    assert np.isnan(found.values[inside]).all()
    np.testing.assert_allclose(found.values[~inside], 1)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1, 1.2), (0.9, 3), (1e-3, 1e-2), (2e-5, 3e-3), (1e-12, 1e9), (3, 3.0001), (2.9, 9.6),
        (0.11, 9.9), (1.3, 4.3e3),
    ],
)  # fmt: skip
def test_logarithmic_axes_have_a_few_different_labels(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    labels = NumberLabels().format_ticks(ticks)
    assert 2 <= len(ticks) <= 7
    assert len({*labels}) == len(labels)


@pytest.mark.parametrize(
    ("number", "label"),
    [
        (0.0, "0"), (0.25, "0.25"), (-2.5e-5, "−2.5e−5"), (3e6, "3e6"), (12345.0, "12345"),
        (999.99, "1000"), (-9999.96, "−10000"), (99999.9, "1e5"), (0.0009999, "1e−3"),
    ],
)  # fmt: skip
def test_number_labels_are_short(number: float, label: str) -> None:
    assert number_label(number) == label


@pytest.mark.parametrize("wish", ["linear", "log", "symlog"])
@pytest.mark.parametrize("values", [[0.0], [5.0], [0.0, 1e-9], [-1e5, 1e-5], [1e300, 1e-300], []])
def test_any_values_have_an_axis(values: list[float], wish: Scale) -> None:
    figure = Figure()
    ax = figure.subplots()
    fit(ax, [np.array(values)], wish)
    low, high = ax.get_ylim()
    assert low < high
    figure.savefig(io.BytesIO())
