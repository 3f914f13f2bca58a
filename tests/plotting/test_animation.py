"""Animations: which steps, on which axes, in which files."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from PIL import Image, ImageSequence

from gradlens.history.history import History
from gradlens.history.records import Source
from gradlens.history.undefined import Undefined
from gradlens.history.view import View
from gradlens.instruments.style import ALARM
from gradlens.plotting.animation import LAST, animate, frame_steps, frames
from gradlens.plotting.screen import Screen
from tests.instruments.test_instruments import realistic, same

KINDS = ("Loss", "GradNorm", "Alpha", "NormTest", "GradHist1d", "HessTrace", "learning_rate")


def every_axis(ax: Axes) -> Iterator[Axes]:
    """An axis and those inside it."""
    yield ax
    for child in ax.child_axes:
        yield from every_axis(child)


def limits(figure: Figure) -> list[list[tuple[object, ...]]]:
    """Range and scale of all axes, panel by panel."""
    return [
        [(ax.get_xscale(), ax.get_xlim(), ax.get_yscale(), ax.get_ylim()) for ax in every_axis(one)]
        for one in figure.axes
    ]


def grown(steps: int = 40) -> History:
    """A run whose scales change on the way: its loss falls far, a histogram was wider once."""
    history = realistic(steps, KINDS)
    for step in range(steps):
        history.append(step, {"Loss": 10.0 ** (-step / 5), "HessTrace": {"trace": float(step - 9)}})
    return history


def latest_data(figure: Figure) -> float:
    """The last step that the line of the first panel shows."""
    return max(float(np.max(line.get_xdata())) for line in figure.axes[0].get_lines())


# Axes ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("log_steps", [False, True])
@pytest.mark.parametrize("layers", [False, True])
def test_all_frames_have_the_same_axes(layers: bool, log_steps: bool) -> None:
    history = grown()
    screen = Screen("A run", layers, log_steps)
    steps = [0, 3, 39]
    found, sizes = {}, set()
    for step, figure in frames(history, screen, steps):
        found[step] = limits(figure)
        sizes.add(tuple(figure.get_size_inches()))
        figure.canvas.draw()
        assert limits(figure) == found[step]
    assert [*found] == steps
    assert len(sizes) == 1
    assert found[3] == found[39]
    # At step 0 a panel may have nothing to show yet, and no axes inside.
    same_axes = [a == b for a, b in zip(found[0], found[39], strict=True) if len(a) == len(b)]
    assert all(same_axes)
    assert len(same_axes) >= len(found[0]) - 1


def test_frames_show_the_run_up_to_their_step() -> None:
    history = realistic(40, ("Loss",))
    shown = {step: latest_data(one) for step, one in frames(history, Screen("A run"), [4, 17])}
    assert shown == {4: 4.0, 17: 17.0}


def test_there_is_room_for_all_histograms() -> None:
    """The middle one is the widest; neither the first nor the last step shows that."""
    history = History({"GradHist1d": Source(("GradHist1d",), View("Elements"))})
    for step, width in enumerate((1.0, 8.0, 1.0)):
        counts = {"hist": np.array([1, 2, 1]), "edges": np.linspace(-width, width, 4)}
        history.append(step, {"GradHist1d": counts})
    ranges = [one.axes[0].get_xlim() for _, one in frames(history, Screen("A run"), [0, 1, 2])]
    assert len({*ranges}) == 1
    assert ranges[0][0] <= -8
    assert ranges[0][1] >= 8


def test_colours_stay() -> None:
    """A map of layers has one scale of colours in all frames, and its bar says so."""
    names = {"first": (2,), "last": (2,)}
    history = History({"GradNorm": Source(("GradNorm",), View("Norm", yscale="log"))}, names)
    for step in range(6):
        history.append(step, {"GradNorm": {"first": 10.0**step, "last": 1.0}})
    seen = []
    for _, figure in frames(history, Screen("A run", layers=True), [1, 5]):
        figure.canvas.draw()
        axes = [*every_axis(figure.axes[0])]
        (mesh,) = [m for ax in axes for m in ax.collections if isinstance(m, QuadMesh)][:1]
        ranges = [ax.get_ylim() for ax in axes if ax.get_yscale() == "log"]
        seen.append((mesh.norm.vmin, mesh.norm.vmax, ranges))
    assert seen[0] == seen[1]
    assert seen[0][:2] == (1.0, 1e5)
    assert seen[0][2] == [pytest.approx((1.0, 1e5))]


def test_a_run_of_reasons() -> None:
    history = same(realistic(5, KINDS), lambda step, old: Undefined("no reason"))
    assert [step for step, _ in frames(history, Screen("A run"), [0, 4])] == [0, 4]


# Steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 7, 60])
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("count", [1, 2, 30, 500])
def test_steps_of_frames(most: int, log: bool, count: int) -> None:
    history = realistic(count, ("Loss",), every=3)
    found = frame_steps(history, most, log)
    assert found == sorted({*found})
    assert {*found} <= {*history.steps}
    assert found[-1] == history.steps[-1]
    assert found[0] == history.steps[0] or most == 1
    assert len(found) == min(most, count) or log or len(found) < most < count


def test_frames_are_even_on_the_step_axis() -> None:
    history = realistic(1000, ("Loss",))
    assert set(np.diff(frame_steps(history, 10))) == {111}
    early = frame_steps(history, 10, log=True)
    assert early[5] < 50
    ratios = np.array(early[5:]) / np.array(early[4:-1])
    assert ratios == pytest.approx([ratios[-1]] * 5, rel=0.1)


# Files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gif(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "run.gif"
    history = same(realistic(12, ("Loss",)), lambda step, old: math.nan if step > 9 else old)
    animate(history, Screen("A run"), path, most=4)
    with Image.open(path) as image:
        assert image.n_frames == 4
        assert image.info["loop"] == 0
        images = [one.convert("RGB") for one in ImageSequence.Iterator(image)]
        durations = []
        for place in range(4):
            image.seek(place)
            durations.append(image.info["duration"])
    assert durations == [100, 100, 100, 100 * LAST]
    assert len({one.size for one in images}) == 1
    arrays = [np.asarray(one).astype(int) for one in images]
    assert all((a != b).any() for a, b in itertools.pairwise(arrays))
    red = np.array([int(ALARM[n : n + 2], 16) for n in (1, 3, 5)])
    assert np.abs(arrays[-1] - red).max(axis=2).min() < 30
    assert [one.name for one in path.parent.iterdir()] == ["run.gif"]
    progress = capsys.readouterr().err
    assert "frames" in progress
    assert "4/4" in progress


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="there is no ffmpeg")
def test_video(tmp_path: Path) -> None:
    animate(realistic(5, ("Loss",)), Screen("A run"), tmp_path / "a.mp4", most=3)
    assert (tmp_path / "a.mp4").read_bytes()[4:8] == b"ftyp"


def test_without_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match=r"needs ffmpeg.*use \.gif"):
        animate(realistic(5, ("Loss",)), Screen("A run"), tmp_path / "a.mp4", most=3)
    assert not [*tmp_path.iterdir()]


def test_ffmpeg_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\ncat > /dev/null\necho first >&2\necho no such codec >&2\nexit 3\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    with pytest.raises(OSError, match=r"ffmpeg can't write the video \(no such codec\)"):
        animate(realistic(3, ("Loss",)), Screen("A run"), tmp_path / "a.mp4", most=3)
    assert not [*tmp_path.glob("*.mp4")]
