"""What each command does, after its arguments have been read."""

from __future__ import annotations

import argparse
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from gradlens.cli.diagnosis_text import (
    Diagnosis,
    as_json,
    as_text,
    samples_json,
    samples_text,
    spike_text,
    spikes_json,
    spikes_text,
)
from gradlens.cli.text import as_line
from gradlens.cli.watch import (
    Display,
    FileDisplay,
    TextDisplay,
    WindowDisplay,
    panels_format,
    summary_format,
    watch,
    width,
)
from gradlens.diagnosis.diagnose import findings, lacking
from gradlens.diagnosis.evidence import Evidence
from gradlens.diagnosis.rules import RULES
from gradlens.diagnosis.samples import rank
from gradlens.history.history import History
from gradlens.history.lines import number_lines
from gradlens.instruments import Options
from gradlens.instruments.axes import TextFigure
from gradlens.numerics.unavailable import first_line
from gradlens.plotting.animation import ANIMATIONS, animate
from gradlens.plotting.comparison import compare, left_out, run_names
from gradlens.plotting.layout import pages
from gradlens.plotting.loading import load_run
from gradlens.plotting.output import FIGURES, check_suffix, write_figure
from gradlens.plotting.plotter import up_to
from gradlens.plotting.screen import Screen
from gradlens.sinks import CSV, MLflow, Sink, TensorBoard, WandB
from gradlens.sinks.publisher import is_inside, publish
from gradlens.sinks.sink import library
from gradlens.spelling import near


def _demo(options: argparse.Namespace) -> int:
    # Imported here because this is the only command that needs torch.
    from gradlens.cli.demo import demo

    names = (Path("gradlens-demo" if n == 1 else f"gradlens-demo-{n}") for n in count(1))
    directory = options.out or next(path for path in names if not path.exists())
    run, figure = directory / "run.jsonl", directory / "cockpit.png"
    accuracy = demo(run, figure, options.steps, options.seed)
    print(f"accuracy on unseen digits: {100 * accuracy:.1f} %")
    print(f"recorded values: {run}")
    print(f"figure: {figure}")
    return 0


def _plot(options: argparse.Namespace) -> int:
    run: Path = options.run
    out = options.out or run.with_name(f"{run.stem}{'-layers' if options.layers else ''}.png")
    suffix = check_suffix(out, (*FIGURES, *ANIMATIONS))
    screen = replace(
        _screen(options, options.title),
        names=tuple(options.panel),
        size=options.width,
        options=Options(options.single_lines, options.normalise),
    )
    history = _load(run, options.until)
    with _about(run):
        if lacks := screen.lacks(history):
            raise ValueError(lacks)
        panels = screen.panels(history)
        if suffix in ANIMATIONS:
            animate(history, screen, out, options.frames)
            print(f"figure: {out}")
            return 0
        for number, page in enumerate(pages(panels) if options.layers else (panels,), 1):
            figure = TextFigure()
            screen.draw(history, figure, page)
            path = out if number == 1 else out.with_stem(f"{out.stem}_{number}")
            write_figure(figure, path)
            print(f"figure: {path}")
    return 0


def _watch(options: argparse.Namespace) -> int:
    screen = _screen(options)
    display: Display
    if options.text:
        display = TextDisplay(sys.stdout, panels_format(screen), redraws=True)
    else:
        display = FileDisplay(options.out, screen) if options.out else WindowDisplay(screen)
    with suppress(KeyboardInterrupt):
        watch([options.run], display, options.interval)
    return 0


def _summary(options: argparse.Namespace) -> int:
    is_table = not options.json and not options.csv
    text_of = summary_format(options.json, options.csv)
    display = TextDisplay(sys.stdout, text_of, redraws=options.follow and is_table)
    if options.follow:
        with suppress(KeyboardInterrupt):
            watch(options.runs, display, options.interval)
        return 0
    for number, run in enumerate(options.runs):
        if number and is_table:
            print()
        history = _load(run)
        with _about(run):
            display.show(run, history)
    return 0


def _diagnose(options: argparse.Namespace) -> int:
    for number, run in enumerate(options.runs):
        with _about(run):
            evidence = Evidence(load_run(run))
            unasked = lacking(evidence)
            asked = [rule.fault for rule in RULES if rule.fault not in unasked]
            diagnosis = Diagnosis(str(run), evidence.seen, findings(evidence), asked, unasked)
            text = as_json(diagnosis) if options.json else as_text(diagnosis, width(), options.all)
        print("\n" * bool(number and not options.json) + text)
    return 0


def _autopsy(options: argparse.Namespace) -> int:
    spikes = load_run(options.run).spikes
    name, step = str(options.run), options.step
    if step is not None and step not in spikes:
        known = ", ".join(map(str, sorted(spikes)[:20])) or "at none"
        raise ValueError(f"{name} has no jump of the loss at step {step} (it has: {known})")
    with _about(options.run):
        if options.json:
            chosen = spikes if step is None else {step: spikes[step]}
            text = spikes_json(chosen, name)
        else:
            text = spikes_text(spikes, name) if step is None else spike_text(spikes, step, name)
        print(text)
    return 0


def _samples(options: argparse.Namespace) -> int:
    samples = load_run(options.run).samples
    if samples is None:
        raise ValueError(f"{options.run} {NO_SAMPLES}")
    with _about(options.run):
        text_of = samples_json if options.json else samples_text
        print(text_of(samples, rank(samples, options.top), str(options.run)))
    return 0


NO_SAMPLES = (
    'says nothing of single samples: pass their ids to the context, as in info={"ids": numbers}, '
    "which are written after the first thousand losses and when the cockpit is closed"
)


def _compare(options: argparse.Namespace) -> int:
    if len(options.runs) < 2:
        options.wrong("a comparison needs two or more runs")
    out = options.out or Path("comparison.png")
    check_suffix(out, FIGURES)
    names = options.labels or run_names(options.runs)
    if len({*names}) != len(options.runs):
        options.wrong(f"--labels {','.join(names)}: name each of the {len(options.runs)} runs once")
    histories = [_load(run, options.until) for run in options.runs]
    runs = dict(zip(names, histories, strict=True))
    with _about(*options.runs):
        figure = compare(
            runs, options.title, options.log_steps, options.panel, options.style, options.width,
            options.colours,
        )  # fmt: skip
        write_figure(figure, out)
    print(f"figure: {out}")
    rest = left_out(runs)
    if rest and not options.panel:
        print(f"left out, for they are no single numbers: {', '.join(rest)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    kind, *places = options.to
    if kind not in DESTINATIONS:
        options.wrong(f"--to {kind}: there is no such destination{near(kind, DESTINATIONS)}")
    place = DESTINATIONS[kind]
    if len(places) > 1 or (not places and not place.startswith("[")):
        options.wrong(f"write --to {kind} {place}")
    history = _load(options.run, options.until)
    check_layers(history, options.layers or ())
    chosen = {name: getattr(options, name) for name in ("every", "histograms_every", "layers")}
    given = {name: value for name, value in chosen.items() if value is not None}
    opened = _opened(kind, options.run, *(places or [None]), **given)
    with _failing_in(kind), opened as sink:
        publish(history, [sink], _raise)
    print(f"exported {len(history)} steps to {' '.join(options.to)}")
    return 0


@contextmanager
def _failing_in(library: str) -> Iterator[None]:
    """A context whose exceptions of a library's own become ``ValueError``."""
    try:
        yield
    except (OSError, ValueError, ImportError):
        raise
    except Exception as error:
        raise ValueError(f"{library} failed: {first_line(error)}") from error


def _raise(what: str, error: Exception) -> NoReturn:
    raise ValueError(f"{what} failed: {first_line(error)}") from error


def _report(options: argparse.Namespace) -> int:
    # Imported here because no other command needs bokeh.
    from gradlens.report.page import page, write

    runs: list[Path] = options.runs
    out = options.out or (runs[0].with_suffix(".html") if len(runs) == 1 else Path("report.html"))
    names = run_names(runs)
    histories = [_load(run, options.until) for run in runs]
    with _about(*runs):
        write(page(dict(zip(names, histories, strict=True)), _title(options)), out)
    print(f"report: {out}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    from gradlens.report.serving import Following, server

    runs = dict(zip(run_names(options.runs), options.runs, strict=True))
    following = Following(runs, _title(options), options.interval)
    live = server(following, options.port, options.interval)
    address = f"http://{live.address}:{live.port}/"
    print(f"live page: {address} (Ctrl-C ends it)", flush=True)
    if options.open:
        live.io_loop.add_callback(webbrowser.open, address)
    with suppress(KeyboardInterrupt):
        live.run_until_shutdown()
    return 0


def _verify(options: argparse.Namespace) -> int:
    from gradlens.cli.verify import as_text, verify

    verdict = verify(options.script, options.arguments, options.steps or 0)
    print(as_line(verdict) if options.json else as_text(verdict, width()))
    return int(bool(verdict.difference))


def _title(options: argparse.Namespace) -> str:
    title: str | None = options.title
    return title or (options.runs[0].stem if len(options.runs) == 1 else "Comparison")


def _screen(options: argparse.Namespace, title: str | None = None) -> Screen:
    title = title or options.run.stem
    return Screen(
        title, options.layers, options.log_steps, findings=options.findings, look=options.style
    )


def _load(run: Path, until: int | None = None) -> History:
    """A run with steps; ``ValueError`` if there is none up to ``until``."""
    history = load_run(run)
    if not history.steps:
        damage = f"; {history.damage}" if history.damage else ""
        raise ValueError(f"{run} is empty: no step has been recorded{damage}")
    if until is not None and until < history.steps[0]:
        raise ValueError(f"--until {until} is before the first step of {run}, {history.steps[0]}")
    return up_to(history, until)


@contextmanager
def _about(*runs: Path) -> Iterator[None]:
    """A context for what is made of runs, whose paths come first in its errors and warnings."""
    names = ", ".join(map(str, runs))
    try:
        with warnings.catch_warnings(record=True) as caught:
            yield
    except OSError:  # of the file that is written
        raise
    except ValueError as error:
        raise ValueError(f"{names}: {error}") from error
    except Exception as error:  # as the values may be anything, so may be what they lead to
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{names}: the values can't be shown ({reason})") from error
    for each in caught:
        warnings.warn(f"{names}: {each.message}", each.category, stacklevel=2)


_COMMANDS = (_demo, _plot, _watch, _summary, _diagnose, _autopsy, _samples, _compare, _export)
COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    one.__name__.removeprefix("_"): one for one in (*_COMMANDS, _report, _serve, _verify)
}
"""By the name on the command line; each returns the exit code."""


# Where a run is exported to -------------------------------------------------------------------

DESTINATIONS = {"tensorboard": "DIR", "csv": "FILE", "wandb": "[PROJECT]", "mlflow": "[EXPERIMENT]"}
"""What is given beside each on the command line; in brackets what needn't be."""


@contextmanager
def _opened(kind: str, run: Path, place: str | None, **options: Any) -> Iterator[Sink]:
    """A sink for a run's file, with a sink's ``options``."""
    match kind:
        case "tensorboard":
            if any(Path(str(place)).glob("*tfevents*")):
                text = f"{place} has a run already, which is kept: choose another folder"
                raise FileExistsError(text)
            yield TensorBoard(str(place), **options)
        case "csv":
            yield CSV(str(place), **options)
        case "wandb":
            with library("wandb", "wandb").init(project=place, name=run.stem) as live:
                yield WandB(live, **options)
        case _:
            mlflow = library("mlflow", "mlflow")
            if place is not None:
                mlflow.set_experiment(place)
            with mlflow.start_run(run_name=run.stem):
                yield MLflow(**options)


def check_layers(history: History, layers: Sequence[str]) -> None:
    """``ValueError`` names a layer or parameter of which a run has no numbers."""
    places = {place for name in history.names for place in number_lines(history[name])}
    known = {word for place in places for word in place.split("/") if word}
    for layer in layers:
        if not any(is_inside(name, layer) for name in known):
            raise ValueError(f"the run has no numbers of {layer!r}{near(layer, known)}")
