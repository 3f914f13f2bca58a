"""What a random training loop is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.fuzz import parts, tracked
from benchmarks.fuzz.habits import BETWEEN, HABITS
from benchmarks.fuzz.optimizers import OPTIMIZERS
from benchmarks.fuzz.parts import LOSSES, WITHOUT_LOW_PRECISION
from benchmarks.fuzz.tracked import Tracked
from benchmarks.fuzz.ways import WAYS

SINGLE = -1
"""The size of a batch that is one vector without an axis of samples."""

PRECISIONS = ("float64", "float32", "bfloat16", "autocast bfloat16", "autocast float16, scaler")

OPTIONS = (
    "parameters alone",
    "loss function",
    "without loss",
    "optimizer",
    "batch size",
    "by info",
    "run file",
    "budget",
    "batchnorm frozen",
    "batchnorm skip",
    "forward context",
    "extended",
    "extended by BackPACK",
    "irregular steps",
)
"""How a cockpit is made, and what its contexts are given."""


@dataclass(frozen=True)
class Recipe:
    """A network, what it is trained on, how, and what is tracked.

    The network is an entry, layers and a linear head. ``sizes`` are the numbers of samples of the
    steps, and ``ways`` are the ways in which these are trained. ``habits`` hold for the whole loop,
    ``between`` is what happens after the second step. ``options`` are the cockpit's.
    """

    seed: int
    entry: str = "vectors"
    parts: tuple[str, ...] = ()
    loss: str = "squared error"
    reduction: Literal["mean", "sum"] = "mean"
    precision: str = "float64"
    sizes: tuple[int, ...] = (3, 3, 3)
    ways: tuple[str, ...] = ("plain", "plain", "plain")
    optimizer: str = "sgd"
    habits: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    tracked: tuple[Tracked, ...] = ()
    options: tuple[str, ...] = ()


def some(source: random.Random, names: object, *counts: int) -> tuple[str, ...]:
    """Some of the names, as many as one of the counts."""
    listed = sorted(names)  # type: ignore[call-overload]
    return tuple(source.sample(listed, source.choice(counts)))


def draw_recipe(source: random.Random) -> Recipe:
    """A recipe from any source of random numbers."""
    steps = source.randint(2, 6)
    usual = source.randint(2, 5)
    sizes = [usual] * steps
    if source.random() < 0.5:
        sizes[-1] = source.randint(1, usual)
    if source.random() < 0.2:
        sizes = [source.choice([0, 1, 1, 2, 3, 4]) for _ in range(steps)]
    if source.random() < 0.03:
        sizes = [SINGLE] * steps
    unusual = source.choice([0.0, 0.3, 0.6])
    ways = [
        source.choice(list(WAYS)) if source.random() < unusual else "plain" for _ in range(steps)
    ]
    return sensible(
        Recipe(
            seed=source.randrange(10**6),
            entry=source.choice(list(parts.ENTRIES)),
            parts=tuple(parts.draw(source) for _ in range(source.randint(0, 3))),
            loss=source.choice(list(LOSSES)),
            reduction=source.choice(["mean", "mean", "sum"]),  # type: ignore[arg-type]
            precision=source.choices(PRECISIONS, [5, 5, 1, 1, 1])[0],
            sizes=tuple(sizes),
            ways=tuple(ways),
            optimizer=source.choice(["sgd", "adam", *OPTIMIZERS, *OPTIMIZERS]),
            habits=some(source, HABITS, 0, 0, 1, 1, 2),
            between=some(source, BETWEEN, 0, 0, 1, 1, 2),
            tracked=tracked.draw(source),
            options=some(source, OPTIONS, 0, 1, 2, 3, 4, 5),
        )
    )


def recipe_of(seed: int) -> Recipe:
    return draw_recipe(random.Random(seed))


def sensible(recipe: Recipe) -> Recipe:
    """The recipe without what contradicts itself, or what gradlens refuses with an error."""
    entry_kind, _ = parts.ENTRIES[recipe.entry]
    sizes = recipe.sizes
    if entry_kind != "vectors":
        sizes = tuple(1 if size == SINGLE else size for size in sizes)
    if recipe.loss == "margin":  # of no samples, torch gives what is in memory
        sizes = tuple(size or 1 for size in sizes)
    options = recipe.options
    if "parameters alone" in options and "extended by BackPACK" not in options:
        options = (*(o for o in options if o != "extended"), "extended")
    chosen = recipe.tracked
    if "without loss" in options or "forward inside" in recipe.ways:
        unknown = {"loss", "closure", "groups"}
        chosen = tuple(t for t in chosen if unknown.isdisjoint(tracked.needs(t)))
    if "optimizer" not in options or recipe.optimizer == "none":
        chosen = tuple(t for t in chosen if "optimizer" not in tracked.needs(t))
    if "parameters alone" in options:
        chosen = tuple(t for t in chosen if not tracked.needs_model(t))
    optimizer, entry = recipe.optimizer, recipe.entry
    if "sparse" in entry and optimizer not in {"sgd", "adagrad", "sparse adam", "own", "none"}:
        entry = entry.removeprefix("sparse ")
    low_or_mixed = recipe.precision == "bfloat16" or "precision inside" in " ".join(recipe.parts)
    if optimizer == "fused sgd" and low_or_mixed:
        optimizer = "sgd"  # torch's momenta are what is in memory (pytorch/pytorch#191763)
    if optimizer == "sparse adam" and "sparse" not in entry:
        optimizer = "adam"
    precision = recipe.precision
    if recipe.loss in WITHOUT_LOW_PRECISION and "float16" in precision:
        precision = "float32"
    chosen_parts = recipe.parts
    if "tied" in recipe.habits and "autocast" in precision:
        # Code compiled by aot_eager converts the weight again, so that its gradients are added up
        # in single precision; uncompiled code adds them up in half precision.
        chosen_parts = tuple(part.replace("aot_eager", "eager") for part in recipe.parts)
    return replace(
        recipe,
        parts=chosen_parts,
        sizes=sizes,
        options=options,
        tracked=chosen,
        optimizer=optimizer,
        entry=entry,
        precision=precision,
    )


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes that lack something of this one."""
    for name in ("parts", "habits", "between", "tracked", "options"):
        found = getattr(recipe, name)
        if len(found) > 3:
            middle = len(found) // 2
            yield replace(recipe, **{name: found[middle:]})
            yield replace(recipe, **{name: found[:middle]})
    for name in ("parts", "habits", "between", "tracked", "options"):
        found = getattr(recipe, name)
        for place in range(len(found)):
            yield replace(recipe, **{name: found[:place] + found[place + 1 :]})
    for place in range(len(recipe.sizes)):
        if len(recipe.sizes) > 1:
            yield replace(
                recipe,
                sizes=recipe.sizes[:place] + recipe.sizes[place + 1 :],
                ways=recipe.ways[:place] + recipe.ways[place + 1 :],
            )
        ways = (*recipe.ways[:place], "plain", *recipe.ways[place + 1 :])
        yield replace(recipe, ways=ways)
        yield replace(recipe, sizes=(*recipe.sizes[:place], 3, *recipe.sizes[place + 1 :]))
    for place, one in enumerate(recipe.tracked):
        for plain in (replace(one, schedule="every step"), replace(one, options=()),
                      replace(one, over="")):  # fmt: skip
            others = (*recipe.tracked[:place], plain, *recipe.tracked[place + 1 :])
            yield replace(recipe, tracked=others)
    for place, part in enumerate(recipe.parts):
        before, after = recipe.parts[:place], recipe.parts[place + 1 :]
        yield replace(recipe, parts=(*before, part.partition(" | ")[0], *after))
        yield replace(recipe, parts=(*before, "linear", *after))
    standard = Recipe(recipe.seed)
    for name in ("entry", "loss", "reduction", "precision", "optimizer"):
        yield replace(recipe, **{name: getattr(standard, name)})
