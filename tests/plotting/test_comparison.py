"""Several runs in one figure."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from gradlens.cli.main import main
from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.instruments.style import CATEGORICAL, categorical_colors, sequence_colors
from gradlens.plotting.comparison import (
    compare,
    left_out,
    numbers,
    ordered_values,
    run_colors,
    run_names,
    short_run_names,
)
from gradlens.plotting.plotter import CockpitPlotter
from tests.instruments.test_instruments import VIEWS, realistic, recorded, same
from tests.plotting.test_plotter import OVER_STEPS, clashes, titles, words

KINDS = ("Loss", "GradNorm", "NormTest", "GradHist1d", "SpectralDensity", "train_loss")


def losses(*values: float, start: int = 0) -> History:
    """A run with one number per step."""
    return recorded("Loss", dict(enumerate(values, start)), group="performance")


def lines(figure: Figure, title: str) -> dict[tuple[float, ...], tuple[np.ndarray, np.ndarray]]:
    """Steps and values of a panel's lines by colour."""
    (ax,) = [one for one in figure.axes if one.get_title(loc="left") == title]
    data = {to_rgb(one.get_color()): one for one in ax.get_lines()}
    return {c: (np.asarray(o.get_xdata()), np.asarray(o.get_ydata())) for c, o in data.items()}


# The figure ---------------------------------------------------------------------------------


def test_runs_lie_over_each_other_in_their_colours() -> None:
    runs = {"slow": losses(3.0, 2.0, 1.0), "fast": losses(3.0, 0.5, start=4)}
    figure = compare(runs, "Two runs")
    found = lines(figure, "Loss")
    assert [*found] == [to_rgb(CATEGORICAL[0]), to_rgb(CATEGORICAL[1])]
    slow, fast = found.values()
    assert slow[0].tolist() == [0, 1, 2]
    assert slow[1].tolist() == [3.0, 2.0, 1.0]
    assert fast[0].tolist() == [4, 5]
    told = {"slow (last loss 1)", "fast (last loss 0.5)"}
    assert {"Two runs", "slow", "fast"} | told <= words(figure)


def legend(figure: Figure) -> list[str]:
    """The names in the legend."""
    shown = [text.get_text() for text in figure.texts]
    return [text.split(" (last loss ")[0] for text in shown if " (last loss " in text]


def test_each_line_has_the_name_of_its_run() -> None:
    runs = {name: realistic(20, KINDS) for name in ("lr=0.1", "lr=0.01", "lr=1")}
    figure = compare(runs)
    for ax in figure.axes:
        shown = [text.get_text() for text in ax.findobj(Text)]
        assert [shown.count(name) for name in ("0.1", "0.01", "1")] == [1, 1, 1]


ORDERS: dict[str, tuple[tuple[str, ...], list[float] | None]] = {
    "learning rates": (("lr=0.1", "lr=1e-3", "lr=1"), [0.1, 0.001, 1]),
    "batch sizes": (("b64.json", "b8.json", "b128.json"), [64, 8, 128]),
    "one of two numbers": (("lr0.1-wd3", "lr0.2-wd3", "lr0.4-wd3"), [0.1, 0.2, 0.4]),
    "words": (("adam", "sgd", "lion"), None),
    "counted runs": (("run1", "run2", "run3"), None),
    "seeds": (("lr=1 seed=1", "lr=1 seed=2", "lr=1 seed=3"), None),
    "two numbers": (("lr1-wd3", "lr2-wd3", "lr2-wd4"), None),
    "two runs": (("lr1", "lr2"), None),
    "numbers alone": (("1", "2", "3"), None),
}


@pytest.mark.parametrize("case", ORDERS)
def test_runs_are_ordered_by_the_value_in_their_names(case: str) -> None:
    names, values = ORDERS[case]
    assert ordered_values(names) == (
        None if values is None else dict(zip(names, values, strict=True))
    )
    colors = [*run_colors(names).values()]
    if values is None:
        assert colors == categorical_colors(len(names))
    else:
        ascending = [colors[place] for place in np.argsort(values)]
        assert ascending == sequence_colors(len(names))


def test_a_legend_of_ordered_runs_is_ascending() -> None:
    names = ("lr=0.1", "lr=0.01", "lr=1")
    figure = compare({name: realistic(5, ("Loss",)) for name in names})
    assert legend(figure) == ["lr=0.01", "lr=0.1", "lr=1"]


SHORT = {
    "values": (("lr=0.1", "lr=0.2"), ["0.1", "0.2"]),
    "folders": (("runs/a/x", "runs/b/x"), ["a/x", "b/x"]),
    "nothing in common": (("adam", "sgd"), ["adam", "sgd"]),
    "one": (("lr=0.1",), ["lr=0.1"]),
}


@pytest.mark.parametrize("case", SHORT)
def test_names_at_lines_lack_what_all_have(case: str) -> None:
    names, expected = SHORT[case]
    assert [*short_run_names(names).values()] == expected


def test_panels() -> None:
    figure = compare({"a": realistic(20, KINDS), "b": realistic(20, ("Loss", "Stability"))})
    assert sorted(titles(figure)) == [
        "Edge of stability: ratio",
        "Edge of stability: sharpness",
        "Gradient elements: clipped",
        "Gradient norm",
        "Loss",
        "Losses: train",
        "Norm test",
    ]


def test_a_panel_of_one_run_keeps_its_colour() -> None:
    figure = compare({"a": losses(1.0), "b": realistic(20, ("Loss", "NormTest"))})
    assert [*lines(figure, "Norm test")] == [to_rgb(CATEGORICAL[1])]


def test_a_unit_is_no_part_of_a_name() -> None:
    history = realistic(5, ("Time",))
    (one,) = numbers({"a": history, "b": history})
    assert (one.title, one.words) == (VIEWS["Time"].title, "s/step")


@pytest.mark.parametrize("kind", [*VIEWS])
def test_each_panel_has_a_name_of_its_own(kind: str) -> None:
    history = realistic(5, (kind,))
    found = [one.title for one in numbers({"a": history, "b": history})]
    assert len({*found}) == len(found)


def test_quantities_of_one_class_are_told_apart() -> None:
    history = realistic(5, ("NormTest",))
    history.sources["second"] = Source(("NormTest",), VIEWS["NormTest"])
    history.append(3, {"second": 1.0})
    assert {"NormTest", "second"} <= {*titles(compare({"a": history, "b": history}))}


def test_a_run_of_reasons() -> None:
    runs = {"a": losses(Undefined("too noisy")), "b": losses(math.nan)}
    assert "too noisy" in words(compare(runs))


def test_epochs_are_no_panel() -> None:
    runs = {name: losses(1.0, 2.0) for name in ("a", "b")}
    for history in runs.values():
        history.append(1, {"epoch_count": 1.0})
    assert "epoch_count" not in titles(compare(runs))


def test_several_runs_are_plotted_over_each_other() -> None:
    runs = {name: realistic(20, KINDS) for name in ("a", "b")}
    plotter = CockpitPlotter()
    figure = plotter.plot(runs, show_plot=False, panels=["Loss", "NormTest"], style="paper")
    assert titles(figure) == ["Loss", "Norm test"]
    assert figure is plotter.figure
    assert legend(figure) == []
    figure = plotter.plot([*runs.values()], show_plot=False, plot_title="Both")
    assert legend(figure) == ["run 1", "run 2"]
    assert "Both" in words(figure)
    with pytest.raises(ValueError, match="no panel 'Los': did you mean Loss"):
        plotter.plot(runs, show_plot=False, panels=["Los"])
    with pytest.raises(ValueError, match="no style 'papr'"):
        plotter.plot(runs, show_plot=False, style="papr")  # type: ignore[arg-type]


def test_colours_of_runs_can_be_chosen() -> None:
    runs = {name: losses(1.0, 2.0) for name in ("a", "b")}
    figure = compare(runs, colors=("red", "#00ff00"))
    assert [*lines(figure, "Loss")] == [(1, 0, 0), (0, 1, 0)]
    with pytest.raises(ValueError, match="1 colours for 2 runs"):
        compare(runs, colors=("red",))


def test_comparisons_for_papers(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    for path in paths:
        realistic(20, KINDS).write(path)
    out = str(tmp_path / "out.svg")
    chosen = ["--panel", "Loss", "--style", "paper", "--width", "column", "--labels", "x,y"]
    assert main(["compare", *paths, "-o", out, *chosen, "--colours", "red,blue"]) == 0
    text = Path(out).read_text()
    assert {"Loss", "x", "y"} <= {*re.findall(r"<text[^>]*>([^<]*)</text>", text)}
    assert f'width="{3.25 * 72:g}pt"' in text
    with pytest.raises(SystemExit):
        main(["compare", *paths, "-o", out, "--labels", "x"])


def test_what_is_left_out() -> None:
    runs = {"a": realistic(20, KINDS), "b": realistic(20, ("Loss",))}
    runs["b"].append(3, {"remark": "hm"})
    assert left_out(runs) == ("SpectralDensity", "remark")
    assert not {"SpectralDensity", "remark"} & {one.scalar.name for one in numbers(runs)}


SCENES = {
    "two": lambda: {name: realistic(60) for name in ("lr0.1", "lr0.01")},
    "long": lambda: {"a": realistic(300, OVER_STEPS), "b": realistic(200, OVER_STEPS)},
    "one panel": lambda: {name: losses(1.0, 2.0) for name in "ab"},
    "many": lambda: {
        f"a folder with a long name/seed {n}/and more of it": losses(n, 2.0) for n in range(16)
    },
    "undefined": lambda: {
        name: same(realistic(20), lambda step, old: Undefined("no reason " * 20)) for name in "ab"
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("log_steps", "scene"), [*zip(itertools.cycle([False, True]), SCENES)])
def test_no_texts_overlap(scene: str, log_steps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = compare(SCENES[scene](), "A comparison", log_steps)
    assert clashes(figure, monkeypatch) == []


# Names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.jsonl", "b.jsonl"], ("a", "b")),
        (["lr0.1/run.jsonl", "lr0.01/run.jsonl"], ("lr0.1", "lr0.01")),
        (["x/lr0.1/seed1/run.jsonl", "x/lr0.2/seed1/run.jsonl"], ("lr0.1", "lr0.2")),
        (["x/a/1/run.jsonl", "x/b/2/run.jsonl"], ("a/1", "b/2")),
        (["x/run.jsonl", "x/y/run.jsonl"], ("run", "y/run")),
        (["x/run.jsonl", "y/other.jsonl"], ("x/run", "y/other")),
        (["x/run.jsonl", "x/run.json"], ("run.jsonl", "run.json")),
        (["a0.1", "b0.1"], ("a0.1", "b0.1")),
        (["/top.jsonl", "/else/top.jsonl"], ("top", "else/top")),
        (["x/a.jsonl", "x/b.jsonl", "x/c.jsonl"], ("a", "b", "c")),
    ],
)
def test_names_tell_paths_apart(paths: list[str], names: tuple[str, ...]) -> None:
    assert run_names([Path(path) for path in paths]) == names
