"""Who watches a training loop: nobody, or a cockpit."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import gradlens
from benchmarks.fuzz import tracked

if TYPE_CHECKING:
    from benchmarks.fuzz.loop import Loop


@dataclass
class Pass:
    """A forward pass; ``samples`` is ``None`` for a single vector.

    ``shown`` is ``loss_scale`` times the loss, if a framework shows that instead.
    """

    inputs: Tensor
    outputs: Tensor
    targets: Tensor
    loss: Tensor
    samples: int | None
    shown: Tensor | None = None
    loss_scale: float | None = None


class RefusedError(Exception):
    """gradlens has refused the cockpit of a recipe with an error for the user."""


class Watch:
    """Nobody: contexts do nothing."""

    def start(self, loop: Loop) -> None:
        """The network is made."""

    def forward(self, step: int) -> AbstractContextManager[Any]:
        """A context for forward passes of a step."""
        return nullcontext()

    def step(
        self, loop: Loop, step: int, found: Pass | None, accumulating: bool, referenced: bool
    ) -> AbstractContextManager[Any]:
        """A context for the backward pass; ``referenced`` if it is just that of the loss."""
        return nullcontext()

    def updated(self, loop: Loop) -> None:
        """Parameters were updated."""

    def evaluation(self) -> AbstractContextManager[Any]:
        """A context for an evaluation."""
        return nullcontext()

    def resume(self, loop: Loop) -> None:
        """The run is ended, and a new one continues it."""

    def end_epoch(self) -> None:
        """An epoch is over."""

    def close(self) -> None:
        """The loop is over."""


class CockpitWatch(Watch):
    """The cockpit of a recipe."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._last_step = 0
        self.histories: list[gradlens.History] = []

    def start(self, loop: Loop) -> None:
        recipe = loop.recipe
        if "run file" in recipe.options:
            self._folder = Path(tempfile.mkdtemp(prefix="gradlens-fuzz-"))
            # The history of a resumed run reads the file later.
            weakref.finalize(self, shutil.rmtree, self._folder)
        if "extended" in recipe.options:
            gradlens.extend(loop.model)
        self._build(loop)

    def _build(self, loop: Loop, resume: bool = False) -> None:
        options = loop.recipe.options
        policy: Any = next((o.split()[1] for o in options if o.startswith("batchnorm")), "coupled")
        quantities = [
            each
            for one in loop.recipe.tracked
            for each in tracked.build(one)
            if tracked.suits(each, loop.model)
        ]
        run = None if self._folder is None else self._folder / "run.jsonl"
        try:
            self.cockpit = gradlens.Cockpit(
                loop.trainable if "parameters alone" in options else loop.model,
                quantities,
                loss_reduction=loop.recipe.reduction,
                loss_function=loop.loss_module if "loss function" in options else None,
                batchnorm=policy,
                budget=0.5 if "budget" in options else None,
                run=run,
                resume=resume,
            )
        except (ValueError, TypeError) as error:
            raise RefusedError(f"{type(error).__name__}: {error}") from error

    @property
    def history(self) -> gradlens.History:
        return self.cockpit.history

    def forward(self, step: int) -> AbstractContextManager[Any]:
        return self.cockpit.forward(step)

    def step(
        self, loop: Loop, step: int, found: Pass | None, accumulating: bool, referenced: bool
    ) -> AbstractContextManager[Any]:
        options = loop.recipe.options
        self._last_step = step
        given: dict[str, Any] = {}
        if found is not None and "without loss" not in options:
            given["loss"] = found.loss if found.shown is None else found.shown
            given["loss_scale"] = found.loss_scale
        if "optimizer" in options and loop.optimizers:
            given["optimizer"] = loop.optimizers[0]
        if found is not None and "batch size" in options and found.samples is not None:
            given["batch_size"] = found.samples
        if loop.scaler is not None:
            given["scaler"] = loop.scaler
        if found is not None:
            given["closure"] = partial(loop.loss_of, found.inputs, found.targets)
        info = {}
        if found is not None:
            samples = 1 if found.samples is None else found.samples  # a single vector
            info = {"groups": [n % 2 for n in range(samples)]}
        given = {"info": {**given, **info}} if "by info" in options else {**given, "info": info}
        return self.cockpit(step, accumulating=accumulating, **given)

    def evaluation(self) -> AbstractContextManager[Any]:
        if any(tracked.needs_model(each) for each in self._quantities_of_inputs()):
            return self.cockpit.evaluation(self._last_step)
        return nullcontext()

    def _quantities_of_inputs(self) -> list[tracked.Tracked]:
        names = [q.name for q in self.cockpit.quantities]
        return [tracked.Tracked(name) for name in names if name in {"OutputNorm", "InputNorm"}]

    def resume(self, loop: Loop) -> None:
        self.cockpit.close()
        self.histories.append(self.cockpit.history)
        self._build(loop, resume=True)

    def end_epoch(self) -> None:
        self.cockpit.tick_epoch()

    def close(self) -> None:
        self.cockpit.close()
        if self._folder is not None:
            gradlens.History.load(self._folder / "run.jsonl")
