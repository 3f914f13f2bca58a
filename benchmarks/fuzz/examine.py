"""A training loop with gradlens and without: what differs, what is wrong, what is left."""

from __future__ import annotations

import re
from collections.abc import Iterator

from benchmarks.fuzz.loop import run
from benchmarks.fuzz.reasons import unexplained
from benchmarks.fuzz.recipe import Recipe, sensible, simpler
from benchmarks.fuzz.references import References
from benchmarks.fuzz.trace import Trace, differences, of_records
from benchmarks.fuzz.values import missing_values, wrong_values
from benchmarks.fuzz.watch import CockpitWatch, Watch

NOTES = "GradlensWarning: gradlens, step "
"""How warnings begin that are notes for the user."""


def examine(recipe: Recipe) -> list[str]:
    """What is wrong, in words; nothing, if a cockpit is refused with an error for the user."""
    plain = run(recipe, Watch())
    watch = CockpitWatch()
    observed = run(recipe, watch)
    if observed.excused:
        return []
    problems = list(differences(plain, observed))
    if problems:
        differs_from_itself = any(differences(plain, run(recipe, Watch())))
        return [] if differs_from_itself else problems
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
    kind = next(map(kind_of, examine(recipe)), "")
    for candidate in map(sensible, simpler(recipe)):
        if candidate == recipe:
            continue
        problems = examine(candidate)
        if problems and kind_of(problems[0]) == kind:
            return simplest(candidate)
    return recipe
