"""Random networks that chunk, mask, route, sort, fold, share and pack their samples.

A ``Recipe`` says what a network is made of: an entry, some parts, each a layer that is called in
some ways, and a loss. The same recipe always gives the same network and the same batches.
``examine`` trains it for three steps and compares per-sample gradients with one backward pass for
each sample.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import gradlens
from benchmarks.fuzz.trace import exact, of_model, of_records
from gradlens.operators.outer_products import OuterProducts
from tests.cases.random_layers import (
    COUPLINGS,
    ENTRIES,
    EXPERTS,
    FROM_WORDS,
    PER_TOKEN,
    POOLS,
    SEQUENCE_LAYERS,
    SHAPES,
    SPREADS,
    VECTOR_LAYERS,
    VOCABULARY,
    WAYS,
    WITHOUT_POSITIONS,
    Called,
    Shape,
    Sizes,
    fitting,
)
from tests.cases.random_losses import CLASSES, LOSSES, Batch, Divisors, Head
from tests.cases.references import gradients_of, stacked

RELATIVE, ABSOLUTE = 1e-9, 1e-12
ROUNDINGS = 16
"""Of products of factors, as in ``gradlens.numerics.deviations``."""
STEPS = 3

# Recipes.


@dataclass(frozen=True)
class Part:
    """A layer of some kind, called in some ways, of which the first is the outermost one."""

    kind: str
    ways: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """What a random network is made of, and how it is trained.

    Parts and ways that don't fit the state at their place are left out. The last step is on a
    batch of ``last_samples``. With ``inside`` the model returns its loss, with ``positions_first``
    it is called on positions before samples, with ``told`` the number of samples is passed on to
    gradlens, and ``calls`` are those of the model, of ``CALLS``.
    """

    seed: int
    samples: int
    positions: int
    width: int
    entry: str
    parts: tuple[Part, ...]
    loss: str
    reduction: Literal["mean", "sum"] = "mean"
    last_samples: int = 2
    inside: bool = False
    positions_first: bool = False
    told: bool = False
    calls: str = "once"

    @property
    def coupled(self) -> bool:
        return LOSSES[self.loss].coupled or any(part.kind in COUPLINGS for part in self.parts)


def draw_recipe(source: random.Random) -> Recipe:
    """A recipe from any source of random numbers."""
    samples, positions = source.randint(1, 5), source.randint(1, 5)
    if source.random() < 0.25:
        positions = samples
    coupled = source.random() < 0.1
    loss = source.choice([name for name in LOSSES if coupled or not LOSSES[name].coupled])
    parts = [draw_part(source) for _ in range(source.randint(1, 4))]
    if coupled and not LOSSES[loss].coupled:
        parts.insert(source.randint(0, len(parts)), Part(source.choice(list(COUPLINGS))))
    recipe = Recipe(
        seed=source.randrange(10**6),
        samples=samples,
        positions=positions,
        width=source.randint(2, 6),
        entry=source.choice(list(ENTRIES)),
        parts=tuple(parts),
        loss=loss,
        reduction=source.choice(["mean", "mean", "sum"]),
        last_samples=samples if source.random() < 0.75 else source.randint(1, 5),
        inside=source.random() < 0.15,
        positions_first=source.random() < 0.1,
        told=source.random() < 0.25,
        calls=source.choice(["once", "once", *CALLS]),
    )
    return sensible(recipe)


def draw_part(source: random.Random) -> Part:
    kind = source.choice([*VECTOR_LAYERS, *SEQUENCE_LAYERS, *SHAPES, *["linear"] * 10])
    ways = source.choices(list(WAYS), k=source.choice([0, 1, 1, 1, 2, 2, 3]))
    return Part(kind, tuple(ways), source.randrange(1000))


CENTRED = {"layer norm", "norm by hand", "encoder layer", "decoder layer",
           "encoder layer, positions first"}  # fmt: skip


def sensible(recipe: Recipe) -> Recipe:
    """The recipe without options that contradict each other or leave open what a sample is."""
    loss = LOSSES[recipe.loss]
    samples, last = recipe.samples, recipe.last_samples
    if recipe.coupled:
        samples, last = max(samples, 2), max(last, 2)
    inside = recipe.inside and not recipe.coupled
    # With as many positions as samples, nothing shows which come first (docs/networks.rst).
    is_open = recipe.positions in (samples, last)
    may_turn = not (inside or loss.reads or is_open) and recipe.entry in PER_TOKEN
    first = recipe.positions_first and may_turn
    multiple = any(n % recipe.positions == 0 and n != recipe.positions for n in (samples, last))
    told = recipe.told or (first and (loss.tokens or multiple))
    draws = any(part.kind == "dropout" for part in recipe.parts)
    once = inside or draws or recipe.coupled or loss.head is not Head
    calls = "once" if once else recipe.calls
    if calls == "losses of halves" and loss.tokens:  # of which a half may have no labels
        calls = "in halves"
    told = told or calls == "on other data"  # else these may be parts of the batch
    # Two numbers that are normalised are 1 and -1, whose derivatives are rounding alone.
    is_pair = recipe.width == 2 and any(part.kind in CENTRED for part in recipe.parts)
    return replace(
        recipe,
        width=3 if is_pair else recipe.width,
        samples=samples,
        last_samples=last,
        inside=inside,
        positions_first=first,
        told=told,
        calls=calls,
    )


def each_once() -> dict[str, Recipe]:
    """Recipes by the layer, the way to call it, the shape, the entry or the loss that they have.

    Every other one has as many positions as samples.
    """
    layers = (*SEQUENCE_LAYERS, *SHAPES, *COUPLINGS)
    parts = {name: (Part("linear"), Part(name)) for name in layers}
    of_vectors = zip(VECTOR_LAYERS, WAYS, strict=True)
    parts |= {f"{name}, {way}": (Part(name, (way,)),) for name, way in of_vectors}
    of_parts = ((name, "linear features", each, "cross_entropy") for name, each in parts.items())
    linear = (Part("linear"),)
    of_entries = ((f"entry: {name}", name, linear, "cross_entropy") for name in ENTRIES)
    of_losses = ((f"loss: {name}", "words", linear, name) for name in LOSSES)
    found = {
        name: sensible(Recipe(7, 4, 3 + place % 2, 4, entry, own, loss, last_samples=4))
        for place, (name, entry, own, loss) in enumerate((*of_parts, *of_entries, *of_losses))
    }
    patches = replace(found["entry: patches"], told=True)
    several = {f"calls: {name}": replace(patches, calls=name) for name in CALLS}
    return found | several


# Networks.


Parts = list[tuple[int, Batch]]
"""What the model is called on, each with the number of its first sample."""


def halves(batch: Batch) -> Parts:
    size = (len(batch["labels"]) + 1) // 2
    pieces = {name: value.split(size) for name, value in batch.items()}
    count = len(pieces["labels"])
    return [(n * size, {name: each[n] for name, each in pieces.items()}) for n in range(count)]


def on_other_data(batch: Batch) -> Parts:
    """Twice, on other inputs of the same samples."""
    other = {"features": batch["features"].sin(), "ids": batch["ids"].flip(1)}
    return [(0, batch), (0, batch | other)]


CALLS: dict[str, Callable[[Batch], Parts]] = {
    "once": lambda batch: [(0, batch)],
    "in halves": halves,
    "losses of halves": halves,
    "on other data": on_other_data,
}
"""How the model is called at a step: the mean, or sum, is of the losses of all calls, except that
outputs of ``in halves`` are joined."""


class Network(nn.Module):
    """The network of a recipe.

    ``front`` computes the state up to the layer in which samples meet, ``behind`` the rest of it;
    without such a layer everything is in ``behind`` but the entry. ``head`` follows.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe, self.loss = recipe, LOSSES[recipe.loss]
        self.sizes = Sizes(recipe.positions, recipe.width)
        self.entry = ENTRIES[recipe.entry](self.sizes)
        if recipe.entry in WITHOUT_POSITIONS:
            self.sizes = replace(self.sizes, positions=None)
        self.before, self.after = nn.ModuleList(), nn.ModuleList()
        self.known: list[nn.Module] = []
        self.seam: str | None = None
        for part in recipe.parts:
            self._add(part)
        self._fit_to_loss()
        table = self.entry.weight if recipe.entry in {"words", "padded words"} else None
        self.head = self.loss.head(recipe.width, self.loss.outputs, table)
        known_inside = self.loss.targets if recipe.inside else self.loss.reads
        source = "ids" if recipe.entry in FROM_WORDS else "features"
        self.reads = (source, *known_inside)

    def _add(self, part: Part) -> None:
        """Append the part, if it fits the state at its place."""
        source = random.Random(part.seed)
        needs_positions = part.kind in SEQUENCE_LAYERS or part.kind in SHAPES
        if needs_positions and self.sizes.positions is None:
            return
        if part.kind in COUPLINGS:
            if self.seam is None:
                self.before, self.after = self.after, nn.ModuleList()
                self.seam = part.kind
            self.after.append(COUPLINGS[part.kind](self.sizes, source))
        elif part.kind in SHAPES:
            self._reshape(SHAPES[part.kind])
        else:
            self.after.append(self._layer(part, source))

    def _layer(self, part: Part, source: random.Random) -> nn.Module:
        vectors = part.kind in VECTOR_LAYERS
        ways = tuple(fitting(part.ways, vectors, self.sizes.positions is not None))

        def make(remaining: tuple[str, ...]) -> nn.Module:
            if not remaining:
                return self._bare(part.kind, source)
            way, *others = remaining
            layers = EXPERTS if way.startswith("routed") else 1
            inner = [make(tuple(others)) for _ in range(layers)]
            return Called(way, inner, self.sizes.width, part.seed)

        return make(ways)

    def _bare(self, kind: str, source: random.Random) -> nn.Module:
        """A layer of its own, now and then one that the network has already."""
        if kind in SEQUENCE_LAYERS:
            return SEQUENCE_LAYERS[kind](self.sizes, source)
        if self.known and source.random() < 0.15:
            return source.choice(self.known)
        layer = VECTOR_LAYERS[kind](self.sizes, source)
        others = [other for other in self.known if type(other) is nn.Linear]
        if type(layer) is nn.Linear and others and source.random() < 0.15:
            layer.weight = source.choice(others).weight
        self.known.append(layer)
        return layer

    def _reshape(self, shape: Shape) -> None:
        layer, positions = shape(self.sizes)
        self.after.append(layer)
        self.sizes = replace(self.sizes, positions=positions)

    def _fit_to_loss(self) -> None:
        source = random.Random(self.recipe.seed)
        if self.loss.tokens and self.sizes.positions is None:
            self._reshape(SPREADS[source.choice(list(SPREADS))])
        if self.recipe.loss == "next token" and self.sizes.positions == 1:
            self._reshape(SHAPES["class token"])
        if not self.loss.tokens and self.sizes.positions is not None:
            self._reshape(SHAPES[source.choice(POOLS)])

    def forward(self, *inputs: Tensor) -> Any:
        """The head's outputs, or the loss."""
        batch = dict(zip(self.reads, inputs, strict=True))
        batch.setdefault("features", inputs[0])
        if self.recipe.positions_first:
            batch["features"] = inputs[0].transpose(0, 1)
        outputs = self.head(self.behind(self.front(inputs[0])), batch)
        return self.loss.function(outputs, batch, self.divisors) if self.recipe.inside else outputs

    def front(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        x = x.transpose(0, 1) if self.recipe.positions_first else x
        if self.loss.views > 1:
            x = torch.cat([x, x.flip(-1), x.sin()][: self.loss.views])
        for layer in self.before:
            x = layer(x)
        return x

    def behind(self, x: Tensor) -> Tensor:
        for layer in self.after:
            x = layer(x)
        return x

    def inputs(self, batch: Batch) -> list[Tensor]:
        first, *others = (batch[name] for name in self.reads)
        return [first.transpose(0, 1) if self.recipe.positions_first else first, *others]

    @property
    def divisors(self) -> Divisors:
        """What the batch's loss is divided by, from outside."""
        return None if self.recipe.reduction == "mean" else (1.0, 1.0)

    def batch_loss(self, batch: Batch) -> Tensor:
        """The loss that is trained."""
        parts = CALLS[self.recipe.calls](batch)
        outputs = [self(*self.inputs(part)) for _, part in parts]
        if self.recipe.inside:
            return outputs[0]
        if self.recipe.calls == "in halves":
            return self.loss.function(torch.cat(outputs), batch, self.divisors)
        pairs = zip(outputs, parts, strict=True)
        losses = [self.loss.function(output, part, self.divisors) for output, (_, part) in pairs]
        total = functools.reduce(torch.add, losses)
        return total / len(losses) if self.recipe.reduction == "mean" else total

    def in_front(self) -> set[int]:
        """Parameters whose samples meet behind them, by their identity."""
        if self.loss.coupled:
            return {id(parameter) for parameter in self.parameters()}
        if self.seam is None:
            return set()
        modules = [self.entry, *self.before]
        if self.seam == "attention across the batch":
            modules.append(self.after[0].thing1)  # the keys; each query is one sample's own
        return {id(p) for module in modules for p in module.parameters()}


def build(recipe: Recipe) -> Network:
    """The network, in double precision; random numbers go on as if nothing had been drawn."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Network(recipe).double()


def draw_batch(network: Network, step: int) -> Batch:
    """The batch of one step."""
    recipe = network.recipe
    generator = torch.Generator().manual_seed(STEPS * recipe.seed + step)
    samples = recipe.last_samples if step == STEPS - 1 else recipe.samples
    places = (samples, network.sizes.positions or 1)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    someone = int(integers(samples, 1))
    classes = integers(VOCABULARY, *places)
    words = classes.where(integers(3, *places) > 0, -100)
    words[someone, -1] = classes[someone, -1]
    chosen_ones = integers(2, *places) > 0
    chosen_ones[someone, 0] = True
    return {
        "features": normal(samples, recipe.positions, recipe.width),
        "ids": integers(VOCABULARY, samples, recipe.positions),
        "labels": integers(CLASSES, samples),
        "vectors": normal(samples, CLASSES),
        "weights": normal(samples).exp(),
        "flags": integers(2, samples) > 0,
        "classes": classes,
        "words": words,
        "chosen": chosen_ones,
    }


# References.


def reference(network: Network, batch: Batch) -> dict[str, Tensor]:
    """gₙ ``[N, *P]`` of every parameter, from one backward pass for each sample.

    The network sees each sample alone. Where samples meet, or numbers are drawn in passing, it
    sees all of the batch, and each sample's loss is taken from its own part of the state.
    """
    samples = len(batch["labels"])
    parameters = dict(network.named_parameters())
    scale = samples if network.recipe.reduction == "mean" else 1
    return stacked(gradients_of(scale * each, parameters) for each in shares(network, batch))


def shares(network: Network, batch: Batch) -> Iterator[Tensor]:
    """Each sample's share of the loss, in a graph."""
    samples = range(len(batch["labels"]))
    if not sees_all_of_the_batch(network):
        parts = [(0, batch)]
        if network.recipe.calls != "in halves":
            parts = CALLS[network.recipe.calls](batch)
        divisor = len(parts) if network.recipe.reduction == "mean" else 1
        for n in samples:
            own = [(only(b, n - at), b) for at, b in parts if 0 <= n - at < len(b["labels"])]
            found = [share_of(network, network.behind(enter(network, a)), a, b) for a, b in own]
            yield torch.stack(found).sum() / divisor
        return
    state = network.behind(enter(network, batch))
    for n in samples:
        yield share_of(network, state[n :: len(samples)], only(batch, n), batch)


def sees_all_of_the_batch(network: Network) -> bool:
    drops = any(isinstance(module, nn.Dropout) and module.p for module in network.modules())
    return network.recipe.coupled or drops


def enter(network: Network, batch: Batch) -> Tensor:
    return network.front(network.inputs(batch)[0])


def only(batch: Batch, n: int) -> Batch:
    return {name: value[n : n + 1] for name, value in batch.items()}


def share_of(network: Network, state: Tensor, sample: Batch, batch: Batch) -> Tensor:
    """One sample's share of the loss of the whole batch."""
    mean = network.recipe.reduction == "mean"
    divisors = network.loss.divisors(batch) if mean else (1.0, 1.0)
    return network.loss.function(network.head(state, sample), sample, divisors)


def really_coupled(network: Network, batch: Batch) -> bool:
    """Whether at least two samples have a share in every row at the place where samples meet."""
    if network.loss.coupled:
        return True
    seam = enter(network, batch).detach().requires_grad_()
    state, samples = network.behind(seam), len(batch["labels"])
    sizes = []
    for n in range(samples):
        share = share_of(network, state[n::samples], only(batch, n), batch)
        sizes.append(gradients_of(share, {"seam": seam})["seam"].abs().flatten(1).amax(1))
    has_share = torch.stack(sizes) > 1e-6 * torch.stack(sizes).max()
    return bool((has_share.sum(0) >= 2).all())


# Comparisons.


@dataclass
class Findings:
    """What was wrong, and how much of a network was covered."""

    problems: list[str] = field(default_factory=list)
    covered: int = 0
    elements: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


def examine(recipe: Recipe, steps: int = STEPS) -> Findings:
    """Train the network for the last ones of its steps with gradlens and without, and compare."""
    findings = Findings()
    plain, observed, slow = build(recipe), build(recipe), build(recipe)
    with torch.random.fork_rng(devices=[]):
        try:
            gradlens.extend(observed)
        except Exception as error:
            findings.problems.append(f"{type(error).__name__} in extend: {error}")
            return findings
        for step in range(STEPS - steps, STEPS):
            batch = draw_batch(plain, step)
            examine_step(plain, observed, slow, batch, step, findings)
            for network in (plain, observed):
                descend(network)
            slow.load_state_dict(plain.state_dict())
            if findings.problems:
                break
    return findings


def examine_step(
    plain: Network, observed: Network, slow: Network, batch: Batch, step: int, findings: Findings
) -> None:
    torch.manual_seed(step)
    loss = plain.batch_loss(batch)
    loss.backward()
    without = {"loss": exact(loss)} | of_model(plain)
    coupled = plain.recipe.coupled and really_coupled(slow, batch)
    slow.load_state_dict(observed.state_dict())
    torch.manual_seed(step)
    expected = {} if plain.loss.coupled else reference(slow, batch)
    problems = [*wrong_references(plain, expected)]
    torch.manual_seed(step)
    try:
        loss, gradients = observe(observed, batch)
        problems += of_records(without, {"loss": exact(loss)} | of_model(observed))
        problems += wrong_counts(gradients, batch)
        problems += wrong_gradients(observed, gradients, in_order(observed, gradients, expected))
        problems += wrong_reductions(gradients)
        problems += unexplained(observed, gradients)
        if coupled and not gradients.coupling:
            problems += wrongly_covered(observed, gradients, expected)
        count_coverage(observed, gradients, findings)
    except Exception as error:
        problems.append(f"{type(error).__name__} in {place_of(error)}: {error}")
    findings.problems += [f"step {step}: {problem}" for problem in problems]


def observe(network: Network, batch: Batch) -> tuple[Tensor, gradlens.per_sample_gradients]:
    """The batch's loss after its backward pass, and what gradlens makes of it."""
    loss = network.batch_loss(batch)
    with gradlens.per_sample_gradients(
        network,
        loss=loss,
        loss_reduction=network.recipe.reduction,
        batch_size=len(batch["labels"]) if network.recipe.told else None,
    ) as gradients:
        loss.backward()
    return loss, gradients


def place_of(error: BaseException) -> str:
    """The function of gradlens that raised the error, or called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "gradlens" in Path(frame.filename).parts] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def wrong_references(network: Network, expected: dict[str, Tensor]) -> Iterator[str]:
    """Parameters of which the references don't add up to the gradient of the batch."""
    floor = floor_of(expected)
    for name, rows in expected.items():
        gradient = network.get_parameter(name).grad
        gradient = torch.zeros_like(rows[0]) if gradient is None else gradient
        divisor = len(rows) if network.recipe.reduction == "mean" else 1
        deviation = largest(rows.sum(0) / divisor - gradient)
        if not deviation <= RELATIVE * largest(rows) + floor:
            yield f"the references of {name} don't add up: off by {deviation:.2g}"


def largest(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def floor_of(expected: dict[str, Tensor]) -> float:
    """What is rounding noise beside the largest gradient of the network."""
    return ABSOLUTE * max(map(largest, expected.values()), default=0.0)


def wrong_counts(gradients: gradlens.per_sample_gradients, batch: Batch) -> Iterator[str]:
    samples, told = len(batch["labels"]), gradients.batch_size
    if told not in (samples, None):
        yield f"wrong number of samples: {told}, not {samples}"


IN_PARTS = ("two heads",)
"""Losses of a part of the batch each, in whose order gradlens numbers the samples of raw inputs."""


def in_order(
    network: Network, gradients: gradlens.per_sample_gradients, expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The reference in the order of the losses, where all parameters agree on one."""
    samples = gradients.batch_size
    if network.recipe.loss not in IN_PARTS or not network.recipe.told or samples is None:
        return expected
    for order in itertools.permutations(range(samples)):
        permuted = {name: rows[list(order)] for name, rows in expected.items()}
        if not any(wrong_gradients(network, gradients, permuted)):
            return permuted
    return expected


def wrong_gradients(
    network: Network, gradients: gradlens.per_sample_gradients, expected: dict[str, Tensor]
) -> Iterator[str]:
    """Covered parameters whose rows aren't the reference's."""
    floor, in_front = floor_of(expected), network.in_front()
    for name, rows in expected.items():
        if name not in gradients or id(network.get_parameter(name)) in in_front:
            continue
        dense = gradients[name].dense()
        if dense.shape != rows.shape:
            yield f"wrong shape of {name}: {list(dense.shape)}, not {list(rows.shape)}"
            continue
        deviation = largest(dense - rows)
        if not deviation <= RELATIVE * largest(rows) + floor:
            yield f"wrong numbers for {name}: off by {deviation:.2g} of {largest(rows):.2g}"


def wrong_reductions(gradients: gradlens.per_sample_gradients) -> Iterator[str]:
    """Operators whose results aren't those of their dense per-sample gradients."""
    every = {name: operator.dense() for name, operator in gradients.items()}
    for name, operator in gradients.items():
        dense, floor = every[name], floor_of(every) ** 2
        factors = operator.factors() if isinstance(operator, OuterProducts) else ()
        if factors and factors[0].shape[1] > 1:  # which may cancel between positions
            sizes = [largest(factor.flatten(1).square().sum(1)) for factor in factors]
            floor += ROUNDINGS * torch.finfo(dense.dtype).eps * math.prod(sizes)
        flat = dense.reshape(len(dense), -1)
        apart = flat - flat.mean(0)
        pairs = {
            "squared_norms": (operator.squared_norms(), flat.square().sum(1)),
            "gram": (operator.gram(), flat @ flat.T),
            "centred_gram": (operator.centred_gram(), apart @ apart.T),
            "deviations": (operator.deviations().squared_norms, apart.square().sum(1)),
            "sum_of_squares": (operator.sum_of_squares(), dense.square().sum(0)),
        }
        for reduction, (one, other) in pairs.items():
            if one.shape != other.shape:
                yield f"{reduction} of {name} has shape {list(one.shape)}"
            elif not largest(one - other) <= RELATIVE * largest(flat.square().sum(1)) + floor:
                yield f"{reduction} of {name} isn't that of its dense gradients"


def wrongly_covered(
    network: Network, gradients: gradlens.per_sample_gradients, expected: dict[str, Tensor]
) -> Iterator[str]:
    """Parameters with values although their samples meet, about which nothing was said."""
    in_front, floor = network.in_front(), floor_of(expected)
    named = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    vanishing = RELATIVE * max(1.0, *map(largest, named.values()))
    for name, gradient in named.items():
        covered = name in gradients and id(network.get_parameter(name)) in in_front
        if not covered or largest(gradient) <= vanishing:
            continue
        rows = expected.get(name)
        if network.loss.coupled:
            continue  # a layer of one of several views may be behind the comparison
        if (
            rows is None
            or largest(gradients[name].dense() - rows) > RELATIVE * largest(rows) + floor
        ):
            yield f"samples meet behind {name}, which has values and no word of it"


def unexplained(network: Network, gradients: gradlens.per_sample_gradients) -> Iterator[str]:
    """Parameters without a reason, or with one whose remedy was followed."""
    for name, _ in network.named_parameters():
        reason = reason_of(gradients, name)
        if name not in gradients and not reason:
            yield f"no reason why {name} isn't covered"
        if network.recipe.told and "batch_size=... to" in reason:
            yield f"the number of samples was passed, which {name} needs: {reason}"


def count_coverage(
    network: Network, gradients: gradlens.per_sample_gradients, findings: Findings
) -> None:
    """Parameters without any gradient, and those in front of a coupling, don't count."""
    in_front = network.in_front()
    for name, parameter in network.named_parameters():
        if parameter.grad is None or id(parameter) in in_front:
            continue
        findings.elements += parameter.numel()
        if name in gradients:
            findings.covered += parameter.numel()
        else:
            findings.reasons[reason_of(gradients, name)] += parameter.numel()


def reason_of(gradients: gradlens.per_sample_gradients, name: str) -> str:
    """Why a parameter has no per-sample gradients, without its name."""
    try:
        gradients[name]
    except KeyError as error:
        return str(error.args[0]).partition(": ")[2] if error.args else ""
    return ""


def descend(network: Network) -> None:
    """One short step of gradient descent; gradients are forgotten."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad / (1 + parameter.grad.norm())
            parameter.grad = None
