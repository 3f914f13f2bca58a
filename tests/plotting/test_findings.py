"""Findings wherever a run is looked at: figures, summaries, pages, notebooks and sinks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

import gradlens.plotting.summary as findings_module
from gradlens import Cockpit, CockpitPlotter, History, diagnose
from gradlens.cli.main import main
from gradlens.cli.summary_text import as_json, render
from gradlens.history.finding import Finding
from gradlens.history.json_lines import from_plain
from gradlens.history.records import LeftOutWarning, Note
from gradlens.history.undefined import Undefined
from gradlens.instruments.style import PAPER
from gradlens.plotting.animation import frames
from gradlens.plotting.screen import Screen
from gradlens.plotting.summary import findings_of, main_findings, others, summarize
from gradlens.sinks.publisher import publish
from tests.cases.steps import tracked_backward
from tests.diagnosis.runs import SETUP, STEPS, layer_columns, run
from tests.sinks.cases import Kept

LOSS = {"Loss": {step: 2.0 - step / STEPS for step in range(STEPS)}}
AT = 40


def healthy() -> History:
    return run(series=LOSS)


def faulty() -> History:
    """The optimizer lacks a layer from a step on, which is a fact."""
    missed = ("2.bias", "2.weight")
    history = run(series=LOSS, layers=layer_columns(still=missed))
    history.setups[AT] = replace(SETUP, missed=missed)
    assert [(each.fault, each.step) for each in diagnose(history)] == [("optimizer_misses", AT)]
    return history


def several(count: int, step: int = 0) -> tuple[Finding, ...]:
    """Alarms and notices by turns, at one step, and a consequence of the first."""
    found = [
        Finding(f"fault{n}", f"Fault {n}", step, "fact", is_alarm=n % 2 == 0) for n in range(count)
    ]
    return (*found, Finding("more", "It follows", step, "very likely", explained_by="fault0"))


def drawn(history: History, given: tuple[Finding, ...] | None = None) -> Figure:
    figure = Figure(dpi=100)
    Screen("A run").draw(history, figure, findings=given)
    FigureCanvasAgg(figure).draw()
    return figure


def numbers(ax: Axes) -> list[Annotation]:
    """The numbers of findings on an axis."""
    return [text for text in ax.texts if isinstance(text, Annotation) and text.get_bbox_patch()]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


# Figures ----------------------------------------------------------------------------------------


def test_a_finding_is_marked_at_its_step_and_explained() -> None:
    figure = drawn(faulty())
    (ax,) = figure.axes
    (number,) = numbers(ax)
    assert (number.get_text(), number.xy[0]) == ("1", AT)
    assert [AT, AT] in [
        [*np.asarray(line.get_xdata())]
        for line in (*ax.lines, *ax.artists)
        if isinstance(line, Line2D)
    ]
    (line,) = [text for text in texts(figure) if text.startswith("step")]
    assert line == f"step {AT}: The optimizer lacks trainable parameters (2.bias, 2.weight; fact)"


def test_a_figure_without_findings_is_as_without_diagnosis() -> None:
    images = []
    for findings in (True, False):
        figure = CockpitPlotter(findings=findings).plot(healthy(), show_plot=False)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        images.append(np.asarray(canvas.buffer_rgba()))
    np.testing.assert_array_equal(images[0], images[1])


def test_findings_can_be_left_out(tmp_path: Path) -> None:
    figure = CockpitPlotter(findings=False).plot(faulty(), show_plot=False)
    assert not numbers(figure.axes[0])
    assert not [text for text in texts(figure) if text.startswith("step")]
    path = tmp_path / "run.jsonl"
    faulty().write(path)
    images = []
    for options in ((), ("--no-findings",)):
        assert main(["plot", str(path), "-o", str(tmp_path / "run.png"), *options]) == 0
        images.append((tmp_path / "run.png").read_bytes())
    assert images[0] != images[1]


@pytest.mark.parametrize("step", [0, 80, STEPS - 1])
@pytest.mark.parametrize("has_note", [False, True])
def test_nothing_is_cut_off_or_on_top_of_something_else(step: int, has_note: bool) -> None:
    history = healthy()
    history.notes += [Note(0, "A note.")] * has_note
    figure = drawn(history, several(8, step))
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    shown = [text for text in figure.texts if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in shown]
    for box in boxes:
        assert all(figure.bbox.contains(*corner) for corner in box.get_points())
    marks = numbers(figure.axes[0])
    boxes += [mark.get_bbox_patch().get_window_extent(renderer) for mark in marks]  # type: ignore[union-attr]
    boxes.append(figure.axes[0].title.get_window_extent(renderer))
    overlaps = [(a, b) for n, a in enumerate(boxes) for b in boxes[:n] if a.overlaps(b)]
    assert not overlaps


def test_a_finding_outside_the_steps_has_no_mark() -> None:
    figure = drawn(healthy(), several(1, STEPS + 100))
    assert not numbers(figure.axes[0])
    assert any(text.startswith(f"step {STEPS + 100}: Fault 0") for text in texts(figure))


def test_an_animation_marks_a_finding_when_its_step_is_there() -> None:
    steps = (AT - 10, AT + 10)
    found = [
        (len(numbers(figure.axes[0])), len([t for t in texts(figure) if t.startswith("step")]))
        for _, figure in frames(faulty(), Screen("A run"), steps)
    ]
    assert found == [(0, 1), (1, 1)]


def test_a_run_that_cannot_be_diagnosed_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(history: History) -> list[Finding]:
        raise KeyError("nothing")

    monkeypatch.setattr(findings_module, "diagnose", fail)
    with pytest.warns(LeftOutWarning, match="can't be diagnosed .KeyError"):
        assert findings_of(faulty()) == ()


def test_main_findings_are_causes() -> None:
    assert len(main_findings(several(3))) == 3
    assert others(several(3), "run.jsonl") == "and 1 that follows: gradlens diagnose run.jsonl"
    assert others(several(3)[:3]) == ""


# Text -------------------------------------------------------------------------------------------


def test_the_summary_says_what_is_wrong() -> None:
    lines = render(summarize(faulty()), 120, "run.jsonl").splitlines()
    start = lines.index("what is wrong (gradlens diagnose run.jsonl says more)")
    assert lines[start + 1].startswith(f"  step {AT}: The optimizer lacks")
    assert start < lines.index(next(line for line in lines if line.startswith("series")))
    assert "what is wrong" not in render(summarize(healthy()), 80)


def test_a_message_is_in_front_of_the_lines_of_findings() -> None:
    history = run(series=LOSS | {"GradNorm": dict.fromkeys(range(STEPS), Undefined("no gradient"))})
    figure = drawn(history, several(1, AT))
    (text,) = [t for ax in figure.axes for t in ax.texts if t.get_text() == "no gradient"]
    (line,) = text.axes.get_lines()
    box = text.get_bbox_patch()
    assert to_rgb(box.get_facecolor()) == to_rgb(PAPER)
    assert text.get_zorder() > line.get_zorder()


def test_json_has_all_of_a_finding() -> None:
    (found,) = json.loads(as_json(summarize(faulty()), "run.jsonl"))["findings"]
    (finding,) = diagnose(faulty())
    assert from_plain(Finding, found, "it") == finding


# Elsewhere --------------------------------------------------------------------------------------


def test_notebooks_list_what_was_found() -> None:
    history = faulty()
    (finding,) = diagnose(history)
    assert "What is wrong" not in history._repr_html_()
    history.findings.append(replace(finding, title="<b>"))
    html = history._repr_html_()
    assert "What is wrong" in html
    assert f"step {AT}: &lt;b&gt; (2.bias, 2.weight; fact). {finding.advice}" in html


def test_a_cockpit_in_a_notebook_is_diagnosed() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(4, 3)
    cockpit = Cockpit(model, "economy")
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    loss = torch.nn.functional.cross_entropy(model(torch.rand(8, 4)), torch.arange(8) % 3)
    tracked_backward(cockpit, 0, loss, optimizer=optimizer)
    assert "The optimizer lacks trainable parameters (bias; fact)" in cockpit._repr_html_()
    cockpit.close()


def test_findings_of_a_run_that_is_over_are_exported() -> None:
    history = faulty()
    history.findings += diagnose(history)
    sink = Kept()
    publish(history, [sink], lambda what, error: pytest.fail(what))
    (finding,) = history.findings
    assert sink.notes == [(AT, finding.sentence)]
