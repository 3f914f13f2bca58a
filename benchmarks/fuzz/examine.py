"""A training loop with gradlens and without: what differs, what is wrong, what is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from benchmarks.fuzz.loop import run
from benchmarks.fuzz.recipe import Recipe, sensible, simpler
from benchmarks.fuzz.references import References
from benchmarks.fuzz.trace import Trace, differences, of_records, unexplained
from benchmarks.fuzz.values import missing_values, wrong_values
from benchmarks.fuzz.watch import CockpitWatch, Watch

NOTES = "GradlensWarning: gradlens, step "
"""How warnings begin that are notes for the user."""


REPEATS = 20
"""Runs of the plain loop, in memory with other contents, before a difference is gradlens's.

What torch reads from memory that nobody has written often is the same in two runs.
"""


def examine(recipe: Recipe) -> list[str] | None:
    """What is wrong, in words; nothing, if a cockpit is refused with an error for the user.

    ``None`` where the loop can't be compared, since it differs from itself without gradlens.
    """
    plain = run(recipe, Watch())
    watch = CockpitWatch()
    observed = run(recipe, watch)
    if observed.excused:
        return []
    problems = list(differences(plain, observed))
    if problems:
        return problems if is_reproducible(recipe, plain) else None
    problems += [f"left: {left}" for left in left_behind(recipe, plain, observed)]
    problems += [
        f"warned: {text}"
        for text in observed.warnings
        if text not in plain.warnings and not text.startswith(NOTES)
    ]
    if not hasattr(watch, "cockpit"):
        return problems
    problems += unexplained(watch.history)
    references = References()
    slow = run(recipe, references)
    if not any(differences(plain, slow)):
        problems += wrong_values(recipe, watch.history, references)
        problems += missing_values(recipe, watch.cockpit, references)
    return problems


def is_reproducible(recipe: Recipe, plain: Trace) -> bool:
    """Whether the loop does the same without gradlens, whatever was in its memory before."""
    for repeat in range(REPEATS):
        # Some are freed at once, and the others held, so that tensors get other places, too.
        tensors = [torch.full((size,), 1.5 + repeat) for size in range(1, 200)]
        del tensors[repeat % 3 :: 3]
        if any(differences(plain, run(recipe, Watch()))):
            return False
    return True


HOOKS_THAT_STAY = ("extended", "extended by BackPACK")
"""Options with which hooks on layers stay on purpose."""


def left_behind(recipe: Recipe, plain: Trace, observed: Trace) -> Iterator[str]:
    for difference in of_records(plain.left, observed.left):
        of_modules = difference.startswith("module ")
        if not (of_modules and set(HOOKS_THAT_STAY) & set(recipe.options)):
            yield difference


def kind_of(problem: str) -> str:
    """The problem without its step, names and numbers."""
    words = re.sub(r"^step \d+: ", "", problem)
    words = re.sub(
        r"^.*the loop went on otherwise: step \d+: .*?(?=\w+(Error|Exception)\b)", "", words
    )
    words = re.sub(r"\S*\d\S*|\S*\b(entry|parts|head|param_)\S*", "…", words)
    return re.sub(r"(… ?)+", "… ", words)[:110]


def simplest(recipe: Recipe) -> Recipe:
    """The recipe without everything that it doesn't need in order to fail in the same way."""
    kind = next(map(kind_of, examine(recipe) or []), "")
    for candidate in map(sensible, simpler(recipe)):
        if candidate == recipe:
            continue
        problems = examine(candidate)
        if problems and kind_of(problems[0]) == kind:
            return simplest(candidate)
    return recipe
