"""Whether a network trains the same, bit by bit, while the quantities of a preset are tracked."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradlens
from benchmarks.fuzz.trace import (
    Trace,
    differences,
    exact,
    inventory,
    leaves,
    of_model,
    of_records,
    settings,
    unexplained,
)
from benchmarks.zoo.check import Mode, first_line
from benchmarks.zoo.network import Network, NotBuiltError

STEPS = 3

LEARNING_RATE = 0.01

FAILED = " failed: "
"""Words of notes on exceptions that gradlens itself has raised and caught."""


@dataclass(frozen=True)
class Row:
    """A network in one mode: how many ``quantities`` have values, and what is wrong.

    A quantity has a value if one of its numbers at one of the steps isn't NaN.
    """

    network: Network
    mode: Mode
    tracked: int = 0
    quantities: int = 0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A line, and one more for each problem."""
        first = (
            f"{self.network.name[:44]:44} {self.network.kind[:22]:22} {self.mode:5} "
            f"{self.quantities:2} of {self.tracked} quantities "
            f"{'WRONG' if self.problems else 'the same'}"
        )
        return "\n".join([first, *(f"      {problem[:400]}" for problem in self.problems)])


def track(network: Network, mode: Mode, preset: str) -> Row:
    """Three steps with the preset and three without; ``NotBuiltError`` if the latter fail."""
    try:
        plain, _ = _train(network, mode)
    except NotBuiltError:
        raise
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {first_line(error)}") from error
    try:
        observed, cockpit = _train(network, mode, preset)
    except Exception as error:
        return Row(network, mode, problems=[f"{type(error).__name__}: {first_line(error)}"])
    problems = list(_problems(plain, observed))
    if problems and any(_problems(plain, _train(network, mode)[0])):
        raise NotBuiltError("two runs without gradlens differ")
    assert cockpit is not None  # a preset was given
    history = cockpit.history
    problems += dict.fromkeys(unexplained(history))
    problems += [note.text for note in history.notes if FAILED in note.text]
    found = sum(_has_values(history, quantity.name) for quantity in cockpit.quantities)
    return Row(network, mode, len(cockpit.quantities), found, problems)


def summary(rows: list[Row], missing: dict[str, str]) -> str:
    """How many networks there are and what became of them."""
    wrong = [f"{row.network.name} ({row.mode})" for row in rows if row.problems]
    full = sum(row.quantities == row.tracked for row in rows)
    found, tracked = sum(row.quantities for row in rows), sum(row.tracked for row in rows)
    lines = [
        f"{len({row.network.name for row in rows})} networks, {len(rows)} rows",
        f"{full} rows have values of all quantities; {found} of {tracked} quantities have values",
        f"{len(wrong)} rows are wrong{': ' if wrong else ''}{', '.join(wrong)}",
        f"{len(missing)} not built",
    ]
    return "\n".join([*lines, *(f"  {name}: {reason}" for name, reason in missing.items())])


def _train(
    network: Network, mode: Mode, preset: str | None = None
) -> tuple[Trace, gradlens.Cockpit | None]:
    """SGD on new data at each step, and the trace of all states."""
    _seed(zlib.crc32(network.name.encode()))
    model = network.build().to(network.dtype).train(mode == "train")
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE
    )
    trace = Trace()
    cockpit = None
    if preset is not None:
        cockpit = gradlens.Cockpit(model, gradlens.configuration(preset))
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    for step in range(STEPS):
        outputs.clear()
        optimizer.zero_grad()
        loss = network.loss(model, network.batch())
        given: dict[str, Any] = {"loss": loss, "optimizer": optimizer, **_outputs(outputs)}
        if network.told:
            given["batch_size"] = network.samples
        with nullcontext() if cockpit is None else cockpit(step, info=given):
            loss.backward()
        trace.add(f"step {step}: after backward", {"loss": exact(loss), **of_model(model)})
        optimizer.step()
        trace.add(f"step {step}: after the update", of_model(model))
    hook.remove()
    if cockpit is not None:
        cockpit.close()
    trace.left = settings() | inventory(model, nn.Module(), [optimizer])
    return trace, cockpit


def _outputs(outputs: list[Any]) -> dict[str, Tensor]:
    """What the generalised Gauss-Newton matrix takes, of a model that was called once."""
    found = [getattr(output, "logits", output) for output in outputs]
    return {"outputs": found[0]} if len(found) == 1 and isinstance(found[0], Tensor) else {}


def _seed(seed: int) -> None:
    """Of all generators that networks and their data may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _problems(plain: Trace, observed: Trace) -> Iterator[str]:
    yield from differences(plain, observed)
    yield from (f"left: {left}" for left in of_records(plain.left, observed.left))


def _has_values(history: gradlens.History, name: str) -> bool:
    """Whether there is anything but NaN."""
    numbers = (number for value in history[name].values() for _, number in leaves(value))
    return any(not isinstance(number, float) or number == number for number in numbers)
