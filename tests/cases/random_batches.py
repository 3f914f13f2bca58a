"""Random programs in which it isn't obvious how many samples there are, or which axis counts them.

A ``Program`` says how inputs are prepared, what the network computes, how it is called, and what
its loss is. ``examine`` compares per-sample gradients with one backward pass for each sample,
without and with ``batch_size=``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

import gradlens
from tests.cases.references import per_sample_gradients_of_losses

D, H, C = 5, 4, 3
"""Features, hidden features and classes."""


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Inputs: how to draw them, and what the network does with them first.

Prepare = Callable[[Tensor], Tensor]
INPUTS: dict[str, tuple[Callable[..., Tensor], Prepare]] = {
    "as they are": (normal, lambda x: x),
    "bytes": (lambda *shape: torch.randint(256, shape, dtype=torch.uint8), lambda x: x / 255.0),
    "single precision": (lambda *shape: torch.randn(shape), lambda x: x),
    "standardised": (normal, lambda x: (x - 0.1) / 0.5),
    "one-hot": (lambda *shape: torch.randint(D, shape[:-1]), lambda x: F.one_hot(x, D)),
    "one-hot before the call": (
        lambda *shape: F.one_hot(torch.randint(D, shape[:-1]), D).double(),
        lambda x: x,
    ),
    "normalised": (normal, lambda x: x / x.norm(dim=-1, keepdim=True)),
    "transposed and scaled": (normal, lambda x: 2 * x),
}


# Networks on [N, T, D], or [T, N, D] with positions first.


class Positions(nn.Module):
    """Each position alone."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.axis = 0 if first else 1
        self.inner = nn.Linear(D, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Coupled(Positions):
    """With a normalisation over the batch that is written by hand."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden - hidden.mean(1 - self.axis, keepdim=True)


class Loop(Positions):
    """A recurrence, position by position."""

    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.again = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        hidden, found = torch.zeros((), dtype=x.dtype), []
        for row in x.unbind(self.axis):
            hidden = (self.inner(row) + self.again(hidden.expand(len(row), H))).tanh()
            found.append(hidden)
        return torch.stack(found, self.axis)


class Recurrent(Positions):
    """One of torch's recurrences."""

    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self.inner = nn.GRU(D, H, batch_first=not first)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Tensor:
        return self.inner(x, state)[0]


class WithState(Recurrent):
    """It is called with a state ``[1, N, H]``, as in truncated backpropagation through time."""


NETWORKS = {kind.__name__: kind for kind in (Positions, Coupled, Loop, Recurrent, WithState)}


class Model(nn.Module):
    """Prepares its inputs, and has several heads."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.prepare = INPUTS[program.inputs][1]
        self.transposes = program.inputs.startswith("transposed")
        first = program.positions_first != self.transposes
        self.body = NETWORKS[program.network](first)
        self.heads = nn.ModuleList(nn.Linear(H, C) for _ in range(program.copies))

    def forward(self, x: Tensor, *state: Tensor) -> list[Tensor]:
        x = self.prepare(x).double()
        hidden = self.body(x.transpose(0, 1) if self.transposes else x, *state)
        return [head(hidden.transpose(0, 1) if self.transposes else hidden) for head in self.heads]


# Losses: that of the batch, and those of its samples.

Losses = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Program:
    """What a program is made of.

    With ``positions_first``, inputs are ``[T, N, D]``; with ``keeps_inputs``, they are held until
    the backward pass. ``copies`` are heads or passes, as the loss needs them.
    """

    inputs: str
    network: str
    loss: str
    samples: int
    positions: int
    copies: int
    positions_first: bool = False
    keeps_inputs: bool = True
    seed: int = 0

    @property
    def samples_axis(self) -> int:
        return 1 if self.positions_first else 0

    def draw(self) -> tuple[Tensor, ...]:
        """Inputs of the model."""
        draw, shape = INPUTS[self.inputs][0], [self.samples, self.positions, D]
        x = draw(*(shape[:2][::-1] if self.positions_first else shape[:2]), D)
        return (x, normal(1, self.samples, H)) if self.network == "WithState" else (x,)


def in_order(program: Program, output: Tensor) -> Tensor:
    """``[N, T, C]``."""
    return output.movedim(program.samples_axis, 0)


def pooled(program: Program, output: Tensor) -> Tensor:
    """``[N, C]``."""
    return output.mean(1 - program.samples_axis)


def targets(length: int) -> Tensor:
    return torch.arange(length) % C


def one_each(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets(len(outputs)), reduction="none")


def of_pooled(program: Program, model: Any, inputs: Any) -> Losses:
    losses = one_each(pooled(program, model(*inputs)[0]))
    return losses.mean(), losses


def of_one_number(program: Program, model: Any, inputs: Any) -> Losses:
    """A loss of shape [1]."""
    outputs = pooled(program, model(*inputs)[0])[:, :1].square()
    return outputs.mean(0), outputs[:, 0]


def of_elements(program: Program, model: Any, inputs: Any) -> Losses:
    outputs = model(*inputs)[0]
    return outputs.square().mean(), in_order(program, outputs).square().mean((1, 2))


def of_matrix(program: Program, model: Any, inputs: Any) -> Losses:
    """Losses ``[N, T]`` or ``[T, N]``."""
    outputs = model(*inputs)[0][..., 0]
    return F.mse_loss(outputs, outputs.detach() + 1), (
        in_order(program, outputs[..., None]) - in_order(program, outputs[..., None]).detach() - 1
    ).square().mean((1, 2))


def of_tokens(program: Program, model: Any, inputs: Any) -> Losses:
    rows = model(*inputs)[0].flatten(0, 1)
    losses = one_each(rows)
    shape = (program.samples, program.positions)
    matrix = losses.view(*(shape[::-1] if program.positions_first else shape))
    return losses.mean(), matrix.mean(1 - program.samples_axis)


def of_masked(program: Program, model: Any, inputs: Any) -> Losses:
    """Some of the losses ``[N, T]``."""
    losses = in_order(program, model(*inputs)[0]).square().sum(-1)
    mask = torch.rand(losses.shape) < 0.6
    mask[0, 0] = True
    share = program.samples / int(mask.sum())
    return losses[mask].mean(), (losses * mask).sum(1) * share


def of_entities(program: Program, model: Any, inputs: Any) -> Losses:
    """Of as many positions as there are samples, from samples of any numbers."""
    outputs = in_order(program, model(*inputs)[0])
    own = torch.randint(program.samples, (program.samples,)).sort().values
    places = torch.randint(program.positions, (program.samples,))
    chosen = [outputs[n, t] for n, t in zip(own, places, strict=True)]
    losses = one_each(torch.stack(chosen))
    return losses.mean(), torch.stack([losses[own == n].sum() for n in range(program.samples)])


def heads_added(program: Program, model: Any, inputs: Any) -> Losses:
    losses = [one_each(pooled(program, output)) for output in model(*inputs)]
    return torch.stack([each.mean() for each in losses]).sum(), sum(losses)


def heads_stacked(program: Program, model: Any, inputs: Any) -> Losses:
    """``[K, N]``."""
    losses = torch.stack([one_each(pooled(program, output)) for output in model(*inputs)])
    return losses.mean(), losses.mean(0)


def heads_on_elements(program: Program, model: Any, inputs: Any) -> Losses:
    """``[K, N, C]``."""
    outputs = torch.stack([pooled(program, output) for output in model(*inputs)])
    return outputs.square().mean(), outputs.square().mean((0, 2))


def passes_stacked(program: Program, model: Any, inputs: Any) -> Losses:
    """``[K, N]`` of several calls on other data for the same samples."""
    calls = [inputs, *(program.draw() for _ in range(program.copies - 1))]
    losses = torch.stack([one_each(pooled(program, model(*each)[0])) for each in calls])
    return losses.mean(), losses.mean(0)


def passes_on_the_same(program: Program, model: Any, inputs: Any) -> Losses:
    """The sum of several calls' losses."""
    calls = range(program.copies)
    losses = [one_each((k + 1) * pooled(program, model(*inputs)[0])) for k in calls]
    return torch.stack([each.mean() for each in losses]).sum(), sum(losses)


def parts(program: Program, inputs: Any) -> list[tuple[Tensor, ...]]:
    """Inputs of parts of the batch, each of half of the samples."""
    x, *state = (
        each.chunk(2, axis) for each, axis in zip(inputs, (program.samples_axis, 1), strict=False)
    )
    return list(zip(x, *state, strict=True))


def parts_together(program: Program, model: Any, inputs: Any) -> Losses:
    outputs = [pooled(program, model(*each)[0]) for each in parts(program, inputs)]
    losses = one_each(torch.cat(outputs))
    return losses.mean(), losses


def parts_stacked(program: Program, model: Any, inputs: Any) -> Losses:
    """The mean over the losses of all parts."""
    found = [one_each(pooled(program, model(*each)[0])) for each in parts(program, inputs)]
    size = [len(inputs[0].movedim(program.samples_axis, 0)) / len(found) / len(f) for f in found]
    losses = torch.cat([s * f for s, f in zip(size, found, strict=True)])
    return torch.stack([each.mean() for each in found]).mean(), losses


def of_pairs(program: Program, model: Any, inputs: Any) -> Losses:
    """Two calls, whose outputs are compared."""
    one, other = (pooled(program, model(*each)[0]) for each in (inputs, program.draw()))
    losses = (one - other).square().sum(1)
    return losses.mean(), losses


def positions_stacked(program: Program, model: Any, inputs: Any) -> Losses:
    """A call for each position, of networks that see them alone."""
    rows = inputs[0].unbind(1 - program.samples_axis)
    outputs = torch.stack([model(row.unsqueeze(1))[0][:, 0] for row in rows])
    return outputs.square().mean(), outputs.square().mean((0, 2))


LOSSES: dict[str, Callable[[Program, Any, Any], Losses]] = {
    each.__name__: each for each in (
        of_pooled, of_one_number, of_elements, of_matrix, of_tokens, of_masked, of_entities,
        heads_added, heads_stacked, heads_on_elements, passes_stacked, passes_on_the_same,
        parts_together, parts_stacked, of_pairs, positions_stacked,
    )
}  # fmt: skip


def draw_program(source: random.Random) -> Program:
    """A program from any source of random numbers."""
    samples = source.randint(2, 4)
    sizes = [samples if source.random() < 0.4 else source.randint(1, 5) for _ in range(2)]
    program = Program(
        source.choice(list(INPUTS)),
        source.choice(list(NETWORKS)),
        source.choice(list(LOSSES)),
        samples,
        sizes[0],
        max(sizes[1], 2),
        source.random() < 0.35,
        source.random() < 0.5,
        source.randrange(10**6),
    )
    if program.network in {"Positions", "Coupled"} or program.positions == 1:
        # Nothing shows that positions come first.
        program = replace(program, positions_first=False)
    if program.loss == "positions_stacked":
        return replace(program, network="Positions", positions_first=False)
    return program


@dataclass
class Findings:
    """What was wrong, and what share of the parameters was covered, without and with N passed."""

    problems: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    covered: list[float] = field(default_factory=list)


def examine(program: Program) -> Findings:
    """Compare with one backward pass for each sample; what refusals advise is done."""
    findings = Findings()
    with torch.random.fork_rng(devices=[]):
        for told in (False, True):
            torch.manual_seed(program.seed)
            model = gradlens.extend(Model(program).double())
            inputs = program.draw()
            loss, losses = LOSSES[program.loss](program, model, inputs)
            if not program.keeps_inputs:
                del inputs
            expected = per_sample_gradients_of_losses(losses, model)
            batch_size = program.samples if told else None
            with gradlens.per_sample_gradients(model, batch_size=batch_size) as gradients:
                loss.backward()
            used = [name for name, rows in expected.items() if bool(rows.any())]
            findings.covered.append(sum(name in gradients for name in used) / max(len(used), 1))
            findings.problems += problems(gradients, expected, program, told)
            findings.reasons.update(reasons(gradients, expected, told))
    return findings


def problems(
    gradients: gradlens.per_sample_gradients,
    expected: dict[str, Tensor],
    program: Program,
    told: bool,
) -> list[str]:
    """What is wrong."""
    where = "with N passed" if told else "without N"
    if gradients and gradients.batch_size != program.samples:
        return [f"{where}: N = {gradients.batch_size} by {gradients.batch.known_by}"]
    wrong = [
        f"{where}: {name}"
        for name in gradients
        if not torch.allclose(gradients[name].dense(), expected[name], rtol=1e-8, atol=1e-10)
    ]
    if told and "batch_size=... to" in "".join(reasons(gradients, expected, told)):
        wrong.append("the remedy was followed, and is advised again")
    return wrong


def reasons(
    gradients: gradlens.per_sample_gradients, expected: dict[str, Tensor], told: bool
) -> list[str]:
    """Why parameters that the loss depends on aren't covered."""
    found = []
    for name, rows in expected.items():
        if name not in gradients and bool(rows.any()):
            try:
                gradients[name]
            except KeyError as error:
                reason = str(error.args[0]).partition(": ")[2]
                found.append(f"{told}: {reason or 'EMPTY'}")
    return found
