"""The training loop of a recipe."""

from __future__ import annotations

import copy
import io
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import backpack
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.fuzz import parts
from benchmarks.fuzz.habits import BETWEEN, HABITS, contexts
from benchmarks.fuzz.optimizers import OPTIMIZERS
from benchmarks.fuzz.parts import CLASSES, LOSSES, draw_targets
from benchmarks.fuzz.recipe import SINGLE, Recipe
from benchmarks.fuzz.trace import (
    Record,
    Trace,
    comparable,
    exact,
    inventory,
    of_exception,
    of_model,
    settings,
)
from benchmarks.fuzz.watch import Pass, RefusedError, Watch
from benchmarks.fuzz.ways import WAYS


class Model(nn.Module):
    """An entry, some parts, and a head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.entry = parts.ENTRIES[recipe.entry][1]()
        layers = [parts.make(name, recipe.seed + n) for n, name in enumerate(recipe.parts)]
        self.parts = nn.ModuleList(layers)
        self.head = nn.Linear(parts.WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = self.entry(x)
        for part in self.parts:
            state = part(state)
        return self.head(state)


DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}
"""The data types of networks by the precision of a recipe; float32 for all others."""


class Loop:
    """A training loop, and its trace.

    ``trainable`` are the parameters that the optimizers were given, and ``kept`` what the loop
    holds on to.
    """

    def __init__(self, recipe: Recipe, watch: Watch) -> None:
        self.recipe, self.watch, self.trace = recipe, watch, Trace()
        self.dtype = DTYPES.get(recipe.precision, torch.float32)
        self.counts: Counter[str] = Counter()
        self.kept: list[Any] = []
        self.step = 0
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=1024.0) if "scaler" in recipe.precision else None
        )
        self._gradients: dict[str, Tensor | None] = {}

    def build(self) -> None:
        self.model = Model(self.recipe).to(self.dtype)
        self.loss_module = LOSSES[self.recipe.loss].module(self.recipe.reduction)
        self.trainable = list(self.model.parameters())
        for habit in self.recipe.habits:
            HABITS[habit](self)
        self.trainable = [p for p in self.model.parameters() if p.requires_grad]
        if "extended by BackPACK" in self.recipe.options:
            backpack.extend(self.model)
            backpack.extend(self.loss_module)
        self.optimizers: list[Optimizer] = OPTIMIZERS[self.recipe.optimizer](self.trainable)

    # What ways and habits are made of.

    def draw(self, samples: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a batch, from random numbers of their own."""
        generator = torch.Generator().manual_seed(1000 * self.recipe.seed + self.step)
        rows = 1 if samples == SINGLE else samples
        x = parts.inputs(parts.ENTRIES[self.recipe.entry][0], rows, generator)
        y = draw_targets(LOSSES[self.recipe.loss].targets, rows, generator)
        x, y = (each.to(self.dtype) if each.is_floating_point() else each for each in (x, y))
        return (x[0], y[0]) if samples == SINGLE else (x, y)

    def autocast(self) -> AbstractContextManager[Any]:
        if not self.recipe.precision.startswith("autocast"):
            return nullcontext()
        dtype = torch.bfloat16 if "bfloat16" in self.recipe.precision else torch.float16
        return torch.autocast("cpu", dtype)

    def outputs(self, samples: int, model: nn.Module | None = None) -> Tensor:
        """Of a batch of its own."""
        with self.autocast():
            return (self.model if model is None else model)(self.draw(samples)[0])

    def forward(self, step: int, zeroing: bool = True, inputs_need_gradients: bool = False) -> Pass:
        samples = self.recipe.sizes[self.step]
        x, y = self.draw(samples)
        if inputs_need_gradients and x.is_floating_point():
            x.requires_grad_()
        if zeroing:
            self.zero_grad()
        forward = "forward context" in self.recipe.options
        with self.watch.forward(step) if forward else nullcontext(), self.autocast():
            outputs = self.model(x)
            loss = self.loss_module(outputs, y)
        return Pass(x, outputs, y, loss, None if samples == SINGLE else samples)

    def zero_grad(self) -> None:
        if "gradients never zeroed" in self.recipe.habits:
            return
        to_none = "gradients set to zero" not in self.recipe.habits
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        if not self.optimizers:
            self.model.zero_grad(set_to_none=to_none)

    @contextmanager
    def watched(
        self, step: int, found: Pass | None, accumulating: bool = False, referenced: bool = True
    ) -> Iterator[None]:
        with self.watch.step(self, step, found, accumulating, referenced):
            yield
        if found is not None:
            self.remember("loss", found.loss)
        self.take_stock("after backward")

    def backward(self, loss: Tensor, **options: Any) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**options)
        if self.scaler is not None and "unscaling inside" in self.recipe.habits:
            self._unscale()

    def _unscale(self) -> None:
        """Once for each optimizer and update, as before clipping inside the context."""
        assert self.scaler is not None
        for optimizer in self.optimizers:
            state = self.scaler._per_optimizer_states[id(optimizer)]
            if state["stage"].name == "READY":
                self.scaler.unscale_(optimizer)

    def update(self, closure: Callable[[], Tensor] | None = None) -> None:
        if self.recipe.optimizer == "lbfgs" and closure is None:
            closure = self._closure
        for optimizer in self.optimizers:
            if self.scaler is not None and closure is None:
                self.scaler.step(optimizer)
            else:
                optimizer.step(closure)  # type: ignore[arg-type]
        if self.scaler is not None and closure is None:
            self.scaler.update()
        if not self.optimizers:
            self._descend(closure)
        self.watch.updated(self)

    def _closure(self) -> Tensor:
        """For an optimizer that takes further passes."""
        self.zero_grad()
        loss = self.loss_of(*self.draw(self.recipe.sizes[self.step]))
        self.backward(loss)
        return loss

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        """Of a batch, computed again."""
        with self.autocast():
            loss: Tensor = self.loss_module(self.model(x), y)
        return loss

    def _descend(self, closure: Callable[[], Tensor] | None) -> None:
        if closure is not None:
            closure()
        with torch.no_grad():
            for parameter in self.trainable:
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad

    def remember(self, what: str, value: Any) -> None:
        self.trace.add(f"step {self.step}: {what}", {what: exact(value)})

    def count(self, what: str) -> None:
        self.counts[what] += 1

    # The loop itself.

    def run(self) -> Trace:
        with ExitStack() as stack:
            for context in contexts(self.recipe.habits):
                stack.enter_context(context)
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.manual_seed(self.recipe.seed)
            random.seed(self.recipe.seed)
            try:
                self._attempt("build", self.build)
                if not self.trace.records:
                    self._run()
            except RefusedError as error:
                self.trace.excused = str(error)
        return self.trace

    def _run(self) -> None:
        self.watch.start(self)
        self.take_stock("start")
        irregular = "irregular steps" in self.recipe.options
        for step, way in enumerate(self.recipe.ways):
            self.step = step
            self._attempt(way, partial(WAYS[way], self, 3 * step + 1 if irregular else step))
            self.take_stock("after the step")
            if step == 1:
                for name in self.recipe.between:
                    self._attempt(name, partial(BETWEEN[name], self))
                self.take_stock("between")
        self._attempt("close", self.watch.close)
        saved = self._saved()
        self.take_stock("end")
        self.trace.left = settings() | inventory(self.model, self.loss_module, self.optimizers)
        self.trace.left |= {f"module pickle: {what}": found for what, found in saved.items()}

    def _attempt(self, what: str, function: Callable[[], None]) -> None:
        """Exceptions are caught outside of everything, and the loop goes on."""
        try:
            function()
        except RefusedError:
            raise
        except Exception as error:
            self.trace.add(f"step {self.step}: {what}", {"exception": of_exception(error)})

    def _saved(self) -> Record:
        """Whether the model can be copied, pickled and saved, as it can without gradlens.

        What BackPACK has stored on an extended model may prevent it: see ``HOOKS_THAT_STAY``.
        """
        buffer = io.BytesIO()
        try:
            copy.deepcopy(self.model)
            torch.save(self.model, buffer)
        except Exception as error:
            return {"exception": of_exception(error)}
        return {"mentions gradlens": b"gradlens" in buffer.getvalue()}

    def take_stock(self, what: str) -> None:
        """All that training has made so far, bit by bit."""
        found = of_model(self.model)
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            found[f"gradient {name} is the same object"] = gradient is self._gradients.get(name)
            self._gradients[name] = gradient
            found[f"{name} is trained"] = parameter.requires_grad
        found |= {f"mode of {name}": m.training for name, m in self.model.named_modules()}
        for number, optimizer in enumerate(self.optimizers):
            found[f"state of optimizer {number}"] = exact(optimizer.state_dict())
        found |= dict(self.counts) | settings()
        self.trace.add(f"step {self.step}: {what}", found)


def run(recipe: Recipe, watch: Watch) -> Trace:
    """Run the loop of a recipe with its warnings recorded."""
    state = random.getstate()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        try:
            trace = Loop(recipe, watch).run()
        finally:
            random.setstate(state)
    # Anomaly mode appends the traceback of the forward pass.
    lines = [(one.category.__name__, str(one.message).partition("\n")[0]) for one in given]
    texts = [f"{category}: {comparable(line)}" for category, line in lines]
    trace.warnings = list(dict.fromkeys(texts))
    return trace
