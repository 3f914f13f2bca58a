"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from gradlens._version import __version__

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``gradlens ...``; the exit code is 0, 1 if it failed, 2 for a wrong call."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (OSError, ValueError, ImportError) as error:
        print(f"gradlens: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ngradlens: interrupted; what was recorded so far is kept", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradlens", description="A look inside the training of PyTorch networks."
    )
    parser.add_argument("--version", action="version", version=f"gradlens {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits and draw its cockpit",
        description="Train a small convolutional network on scikit-learn's handwritten digits with "
        "everything tracked at every step, in less than a minute. Writes DIR/run.jsonl and "
        "DIR/cockpit.png.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write (default: a new gradlens-demo)"
    )
    demo.add_argument("--steps", type=_positive, default=300, metavar="K", help="training steps")
    demo.add_argument("--seed", type=int, default=0, metavar="S", help="of network and batches")
    demo.set_defaults(command=_demo)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from gradlens.demo import demo  # torch takes a while to import

    directory = _new_directory() if options.out is None else options.out
    outcome = demo(directory, options.steps, options.seed)
    print(f"accuracy on unseen digits: {100 * outcome.accuracy:.1f} %")
    print(f"recorded values: {outcome.run}")
    print(f"figure: {outcome.figure}")
    return 0


def _new_directory() -> Path:
    names = (Path("gradlens-demo" if n == 1 else f"gradlens-demo-{n}") for n in count(1))
    return next(path for path in names if not path.exists())


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
