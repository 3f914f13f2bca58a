"""What gradlens finds on many networks, beside one backward pass for each sample.

``python -m benchmarks.zoo [WORD ...] [--group G] [--mode M] [--device D] [--write]`` runs those
networks whose name or kind has one of the words in it, all if there are none, at three steps with
changing data, in eval and in train mode. A row has the number of samples that gradlens found and
how it is known, the percentage of elements with a gradient that are covered, the largest deviation
relative to the largest number of the parameter, and what is missing why. ``--write`` merges the
rows into docs/zoo.csv, so that groups that need other environments can add theirs: peft and
diffusers need these beside transformers, and no torchvision that doesn't match torch; timm needs
torchvision.

With ``--preset full`` each network is trained with the quantities of that preset and without them
instead. Parameters, buffers, gradients, losses and random numbers have to be identical, each NaN
has to have a reason, and nothing may be left on the network; the exit status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.zoo import (
    by_hand,
    diffusers_models,
    generated,
    peft_methods,
    problems,
    report,
    timm_families,
    tracked,
    transformers_families,
)
from benchmarks.zoo.check import Mode, check, first_line
from benchmarks.zoo.network import Network, NotBuiltError
from gradlens.quantities.presets import PRESETS

OUT = Path(__file__).parents[2] / "docs" / "zoo.csv"

GROUPS: dict[str, Callable[[], Sequence[Network]]] = {
    "generated": generated.networks,
    "by-hand": by_hand.networks,
    "problems": problems.networks,
    "transformers": transformers_families.networks,
    "peft": peft_methods.networks,
    "diffusers": diffusers_models.networks,
    "timm": timm_families.networks,
}
"""Networks by what they need; ``ImportError`` where that isn't installed."""

MODES: tuple[Mode, ...] = ("eval", "train")


def chosen(groups: Sequence[str], words: Sequence[str]) -> Iterator[Network]:
    """Networks of the groups that have one of the words in their name or kind."""
    for group in groups:
        try:
            networks = GROUPS[group]()
        except ImportError as error:
            print(f"{group}: not installed ({error})", flush=True)
            continue
        for network in networks:
            text = f"{network.name} {network.kind}".lower()
            if not words or any(word.lower() in text for word in words):
                yield network


R = TypeVar("R")


def rows_of(
    networks: Iterable[Network],
    modes: Sequence[Mode],
    examine: Callable[[Network, Mode], R],
    line: Callable[[R], str],
) -> tuple[list[R], dict[str, str]]:
    """The rows, each printed as it comes, and why networks or modes of them have none."""
    rows: list[R] = []
    missing: dict[str, str] = {}
    for network in networks:
        reasons: dict[str, str] = {}
        for mode in modes:
            try:
                row = examine(network, mode)
            except Exception as error:
                reasons[mode] = reason(error)
            else:
                rows.append(row)
                print(line(row), flush=True)
        whole = len(reasons) == len(modes)
        for mode, text in reasons.items():
            missing[network.name if whole else f"{network.name}, {mode}"] = text
    return rows, missing


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--every", type=int, default=1, help="take each n-th network only")
    parser.add_argument("--device", default="cpu", help="where networks and their data are")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="write docs/zoo.csv")
    action.add_argument("--preset", choices=PRESETS, help="train with a preset and without it")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_device(options.device)
    networks = islice(chosen(options.group or list(GROUPS), options.words), 0, None, options.every)
    modes = options.mode or MODES
    if options.preset:
        examine = partial(tracked.track, preset=options.preset)
        trained, missing = rows_of(networks, modes, examine, tracked.Row.line)
        print(tracked.summary(trained, missing))
        sys.exit(any(row.problems for row in trained))
    rows, missing = rows_of(networks, modes, check, report.line)
    print(report.summary(rows, list(missing.items())))
    if options.write:
        report.write(OUT, rows, list(missing.items()))


def reason(error: Exception) -> str:
    """Why a network has no row."""
    if isinstance(error, NotBuiltError):
        return str(error)
    return f"the check itself failed: {type(error).__name__}: {first_line(error)}"


if __name__ == "__main__":
    main()
