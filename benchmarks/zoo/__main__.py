"""What gradlens finds on many networks, beside one backward pass for each sample.

``python -m benchmarks.zoo [WORD ...] [--group G] [--mode M] [--write]`` runs those networks
whose name or kind has one of the words in it, all if there are none, at three steps with changing
data, in eval and in train mode. A row has the number of samples that gradlens found and how it is
known, the percentage of elements with a gradient that are covered, the largest deviation relative
to the largest number of the parameter, and what is missing why. ``--write`` merges the rows into
docs/zoo.csv, so that groups that need other environments can add theirs: peft and diffusers need
these beside transformers, and no torchvision that doesn't match torch; timm needs torchvision.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.zoo import (
    by_hand,
    diffusers_models,
    peft_methods,
    report,
    timm_families,
    transformers_families,
)
from benchmarks.zoo.check import Mode, Row, check, first_line
from benchmarks.zoo.network import Network, NotBuiltError

OUT = Path(__file__).parents[2] / "docs" / "zoo.csv"

GROUPS: dict[str, Callable[[], Sequence[Network]]] = {
    "by-hand": by_hand.networks,
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


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--group", action="append", choices=GROUPS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--write", action="store_true", help="write docs/zoo.csv")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    missing: dict[str, str] = {}
    modes = options.mode or MODES
    for network in chosen(options.group or list(GROUPS), options.words):
        reasons: dict[str, str] = {}
        for mode in modes:
            try:
                row = check(network, mode)
            except Exception as error:
                reasons[mode] = reason(error)
            else:
                rows.append(row)
                print(report.line(row), flush=True)
        whole = len(reasons) == len(modes)
        for mode, text in reasons.items():
            missing[network.name if whole else f"{network.name}, {mode}"] = text
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
