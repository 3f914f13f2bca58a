"""The command line."""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from gradlens._version import __version__
from gradlens.cli.text import printable

FAILED = 1

LONGEST = 1000
"""Characters of an error, at most; it may quote a file."""

FRAMES = 60
"""Most frames of an animation: six seconds, at ten frames a second."""

INTERVAL = 2.0
"""Seconds between two readings of a file that is still written."""

EPILOG = """\
RUN is a file that was written by Cockpit(..., run="run.jsonl"), or a log of cockpit-for-pytorch
1.0.2. The training may still be running, or may have been killed. The exit code is 0, or 1 if the
command failed or lines of RUN are damaged (the others are shown), or 2 for wrong arguments.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``gradlens ...``; the exit code is 0, 1 if it failed, 2 for a wrong call."""
    parser = _parser()
    _complete(parser)
    options = parser.parse_args(arguments)
    # Imported here because --version and --help need neither numpy nor matplotlib.
    from gradlens.cli import commands
    from gradlens.history.records import LeftOutWarning

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every terminal has all characters
    try:
        with warnings.catch_warnings(record=True) as caught:
            # Of other warnings, such as those of numpy about overflows, a user of the command line
            # can make nothing.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", LeftOutWarning)
            code = commands.COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it, as head does. What is left is discarded, since
        # Python would otherwise report an error when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        is_of_file = error.filename and error.strerror
        return _failed(f"{error.filename}: {error.strerror}" if is_of_file else str(error))
    except (ValueError, ImportError) as error:
        return _failed(str(error))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _failed("interrupted; nothing that was recorded is lost")
    left_out = dict.fromkeys(str(each.message) for each in caught)
    return _failed("; ".join(left_out)) if left_out else code


def _failed(message: str) -> int:
    """Print what went wrong in one line on stderr, and return the exit code."""
    text = " ".join(message.split())
    print(f"gradlens: {printable(text[:LONGEST])}", file=sys.stderr)
    return FAILED


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that completes a command, and exit; otherwise, do nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser)


# Arguments ----------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradlens",
        description="Draw, summarise, compare and diagnose recorded trainings of PyTorch networks.",
        epilog="gradlens COMMAND --help explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"gradlens {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, (text, description, arguments) in COMMANDS.items():
        epilog = None if name in ("demo", "verify") else EPILOG
        one = commands.add_parser(name, help=text, description=description, epilog=epilog)
        one.set_defaults(wrong=one.error)
        for argument in arguments:
            # Of a list, one can be given.
            if isinstance(argument, list):
                group = one.add_mutually_exclusive_group()
                for names, options in argument:
                    group.add_argument(*names, **options)
            else:
                one.add_argument(*argument[0], **argument[1])
    return parser


def _number(kind: type[Any], what: str, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """What reads a number that is above ``low`` and at most ``high``; ``what`` says what it is."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if low < (value := kind(text)) <= high and value < math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is {what}")

    return read


_positive = _number(int, "no positive whole number", 0)
_port = _number(int, "no port: use one up to 65535", 0, 65535)
_seconds = _number(float, "no positive number of seconds", 0)
_inches = _number(float, "neither a number of inches nor column or page", -math.inf)

WIDTHS = {"column": 3.25, "page": 6.75}
"""Inches of a column and of both columns of a usual paper."""


def _names(text: str) -> tuple[str, ...]:
    """Names with commas between them; one that has a comma itself stands in quotes."""
    try:
        names = next(csv.reader([text], skipinitialspace=True)) or [""]
    except csv.Error as error:  # as of a line break
        raise argparse.ArgumentTypeError(f"{text!r}: put each name in quotes") from error
    return tuple(name.strip() for name in names)


# Commands -----------------------------------------------------------------------------------

Argument: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]
"""The names of an argument, and the options of ``add_argument``."""


def _argument(*names: str, **options: Any) -> Argument:
    return names, options


def _flag(name: str, text: str) -> Argument:
    return _argument(name, action="store_true", help=text)


def _value(
    name: str, metavar: str, text: str, kind: Callable[[str], Any] = str, default: Any = None
) -> Argument:
    """An option with a value, which ``kind`` reads."""
    return _argument(name, metavar=metavar, help=text, type=kind, default=default)


def _count(name: str, metavar: str, text: str, default: int | None = None) -> Argument:
    """An option with a positive number."""
    text = f"{text} (default: {default})" if default is not None else text
    return _value(name, metavar, text, _positive, default)


def _out(text: str) -> Argument:
    return _argument("-o", "--out", type=Path, metavar="FILE", help=text)


def _choice(name: str, choices: Sequence[str], default: str, text: str) -> Argument:
    return _argument(name, choices=choices, default=default, help=text)


def _without(name: str, dest: str, text: str) -> Argument:
    return _argument(name, dest=dest, action="store_false", help=text)


def _several(name: str, metavar: Any, text: str, **options: Any) -> Argument:
    return _argument(name, nargs="+", metavar=metavar, help=text, **options)


RUN = _argument("run", type=Path, metavar="RUN", help="file of the run")
RUNS = _several("runs", "RUN", "files of the runs", type=Path)
STEP = _argument("step", type=int, nargs="?", metavar="STEP", help="print only this step")
TITLE = _value("--title", "T", "heading (default: the name of RUN)")
JSON = _flag("--json", "print one line of JSON instead")
EACH_AS_JSON = _flag("--json", "print one line of JSON for each run instead")
UNTIL = _value("--until", "STEP", "leave out the steps after STEP", int)
LOG_STEPS = _flag("--log-steps", "make the step axis logarithmic")
PAUSE = "time between two readings of the file (default: %(default)g)"
EVERY_SECONDS = _value("--interval", "SECONDS", PAUSE, _seconds, INTERVAL)
STYLE = _choice(
    "--style", ("screen", "dark", "paper"), "screen",
    "screen: white background (default); dark: dark background; paper: only the panels, with "
    "labels on the value axes",
)  # fmt: skip
SCREEN = (
    _flag("--layers", "draw layers and parameters, not the whole network"),
    LOG_STEPS,
    _without("--no-findings", "findings", "don't mark what is wrong with the run"),
    STYLE,
)
PANEL = "draw only the panels with these titles, which are separated by commas"
WIDTH = (
    "width of the figure, or column (3.25 inches) or page (6.75 inches) for those of a paper "
    "(default: depends on the panels)"
)
PANELS = (
    _argument("--panel", action="extend", default=[], metavar="TITLES", help=PANEL, type=_names),
    _value("--width", "INCHES", WIDTH, lambda text: WIDTHS.get(text) or _inches(text)),
)
SEED = "seed of the network and the batches (default: %(default)s)"
SINGLE_LINES = "draw a line for each parameter, also if there are many, instead of quantiles"
NORMALISE = (
    "divide each row of a map by its median (row), or by the median of its kind of parameters "
    "(kind)"
)
ALL = "print all names, all faults that were looked for, and what the others need"
NEW_FOLDER = "folder to write to (default: a new folder gradlens-demo)"
COLOURS = "colours of the runs, in their order, by name or as #1f77b4"
DESTINATION = "tensorboard DIR, csv FILE, wandb [PROJECT] or mlflow [EXPERIMENT]"
EVERY = "export a number of each series at most every K steps (default: 1)"
HISTOGRAMS = "export a histogram of each series at most every K steps (default: 50)"
ARGUMENTS = "arguments of the script"
PORT = "port of 127.0.0.1; if it is taken, any free one (default: %(default)s)"

COMMANDS: dict[str, tuple[str, str, list[Argument | list[Argument]]]] = {
    "demo": (
        "train a small network on handwritten digits and draw its figure",
        "Train a small convolutional network on scikit-learn's handwritten digits, and track "
        "everything at every step. This takes less than a minute. It writes DIR/run.jsonl and "
        "DIR/cockpit.png.",
        [
            _value("--out", "DIR", NEW_FOLDER, Path),
            _count("--steps", "K", "number of training steps", 300),
            _value("--seed", "S", SEED, int, 0),
        ],
    ),
    "plot": (
        "draw a run as a figure or an animation",
        "Draw a run as an image (.png, .pdf, .svg), or as an animation over its steps (.gif, or "
        ".mp4 with ffmpeg). The axes of an animation are those of the whole run.",
        [
            *(RUN, _out("file to write (default: a .png beside RUN)"), *SCREEN, UNTIL, TITLE),
            *PANELS,
            _flag("--single-lines", SINGLE_LINES),
            _choice("--normalise", ("row", "kind"), "", NORMALISE),
            _count("--frames", "N", "largest number of frames of an animation", FRAMES),
        ],
    ),
    "watch": (
        "draw a run while it is being written",
        "Draw a run, and draw it again whenever its file has grown: in a window, to a file, or "
        "in the terminal. The command may be started before the run. To end it, close the "
        "window or press Ctrl-C.",
        [
            RUN,
            [
                _out("image to replace each time (default: draw in a window)"),
                _flag("--text", "draw in the terminal, by blocks and shades"),
            ],
            *(EVERY_SECONDS, *SCREEN),
        ],
    ),
    "summary": (
        "print a table of the latest values of runs, with trends and extremes",
        "Print a table of each run. For each series it has the latest value, a small plot of the "
        "run, the change of the median from the last but one fifth of the run to the last fifth, "
        "the extremes with their steps, and the number of steps. Norms are those of the whole "
        "network. For histograms, the table has the share of elements out of range. Above the "
        "table is what is wrong with the run, and below it are the reasons of missing values and "
        "the notes.",
        [
            RUNS,
            [EACH_AS_JSON, _flag("--csv", "print one table of all runs as CSV")],
            _flag("--follow", "print again whenever a run has changed"),
            EVERY_SECONDS,
        ],
    ),
    "diagnose": (
        "print what is wrong with runs",
        "Print the faults of each run, with the certain ones first. Consequences of a fault are "
        "listed below it. For each fault, print the first step at which it can be seen, the layers "
        "or samples, the numbers that show it with their limits, what to do, and other possible "
        "causes. Notices are about something that may be intended or harmless.",
        [RUNS, EACH_AS_JSON, _flag("--all", ALL)],
    ),
    "autopsy": (
        "print the likely causes of jumps of the loss",
        "Print the steps at which the loss jumped or wasn't finite, with the samples that had the "
        "largest gradients, what is unusual about them, the layers, the learning rate, whether the "
        "loss recovered, and the most likely cause. Without STEP, list all of these steps, and "
        "print the largest jump in full.",
        [RUN, STEP, JSON],
    ),
    "samples": (
        "rank the samples of a run: mislabelled and outlying ones come first",
        "Rank the samples of a run by their losses, or by their gradient norms if there are no "
        "losses, so that mislabelled and outlying ones come first. This needs the ids of the "
        'samples, which are passed to the context as info={"ids": ...}.',
        [RUN, _count("--top", "K", "number of samples to print", 20), JSON],
    ),
    "compare": (
        "draw several runs in one figure",
        "Draw each number of several runs in the same panel, with a colour for each run. The runs "
        "are named by the parts of their paths that differ.",
        [
            *(RUNS, _out("image to write (default: comparison.png)"), LOG_STEPS, UNTIL),
            *(*PANELS, STYLE),
            _value("--labels", "A,B", "names of the runs, in their order", _names, ()),
            _argument(
                *("--colours", "--colors"), metavar="C,D", help=COLOURS, type=_names, default=()
            ),
            _value("--title", "T", "heading", default="Comparison"),
        ],
    ),
    "export": (
        "write a finished run to TensorBoard, W&B, MLflow or a CSV file",
        "Write the numbers of a finished run, with their steps, to a new folder of TensorBoard, a "
        "new CSV file, or a new run of W&B or MLflow.",
        [
            RUN,
            _several("--to", ("KIND", "PLACE"), DESTINATION, required=True),
            _count("--every", "K", EVERY),
            _count("--histograms-every", "K", HISTOGRAMS),
            _several("--layers", "NAME", "parameters and layers whose numbers are also exported"),
            UNTIL,
        ],
    ),
    "report": (
        "write one or several runs as an interactive HTML file",
        "Write a page with all panels of a run, or of several runs over each other, that can be "
        "zoomed and needs no network. It is drawn with bokeh, which comes with gradlens[report].",
        [
            *(RUNS, TITLE),
            _out("where to write (default: a .html beside RUN, report.html of several)"),
            UNTIL,
        ],
    ),
    "serve": (
        "show the page of gradlens report in a browser while runs are being written",
        "Serve the page of gradlens report, and update it while the runs are being written. Only "
        "this machine can connect to it. From another one, use a tunnel: ssh -L "
        "5006:127.0.0.1:5006 HOST.",
        [
            *(RUNS, TITLE, EVERY_SECONDS),
            _value("--port", "P", PORT, _port, 5006),
            _without("--no-open", "open", "don't open a browser"),
        ],
    ),
    "verify": (
        "check that a training script does the same with and without tracking",
        "Run a training script with tracking and without it, each in a process of its own with the "
        "same seeds, and compare gradients, parameters, buffers and random numbers bit for bit at "
        "each step of its optimizers. Print which parameters have per-sample gradients, and what "
        "tracking costs. The exit code is 0 only if all is the same. What the script prints goes "
        "to stderr, and the files of its cockpits to a temporary folder.",
        [
            _count("--steps", "K", "end the script after K optimizer steps (default: its own end)"),
            JSON,
            _argument("script", type=Path, metavar="SCRIPT", help="the script"),
            _argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=ARGUMENTS),
        ],
    ),
}
"""By name: a line about the command, what it does, and its arguments."""
