"""Slow references of a training loop: one backward pass for each sample, and the dense Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.fuzz.parts import per_sample
from benchmarks.fuzz.watch import Pass, Watch
from benchmarks.zoo.reference import hooks_muted
from gradlens.graph.undisturbed import buffers_kept
from tests.cases.references import gradients_of, stacked

if TYPE_CHECKING:
    from benchmarks.fuzz.loop import Loop

Tensors = dict[str, Tensor]

CURVATURE = {"HessMaxEV", "HessTrace", "HessEigenvalues", "preset: full", "preset: business"}
"""What is compared with the dense Hessian."""

MOST_ELEMENTS = 150
"""A Hessian of more parameters takes too long."""


@dataclass
class Facts:
    """What is true of one step, in float64; ``None`` where there is no reference.

    ``rows`` are gₙ ``[N, *P]`` by parameter, ``hessian`` is that of the mean loss ``[D, D]``.
    """

    samples: int | None
    loss: float
    rows: Tensors | None
    hessian: Tensor | None
    start: Tensors
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    parameters: Tensors = field(default_factory=dict)
    update: Tensors | None = None


class BrokenReferenceError(BaseException):
    """A reference has failed, which no loop may take for an exception of its own."""


class References(Watch):
    """Finds the facts of each step whose backward pass is that of its loss alone."""

    def __init__(self) -> None:
        self.facts: dict[int, Facts] = {}
        self._open: Facts | None = None
        self._before: Tensors = {}
        self._start: Tensors | None = None

    def start(self, loop: Loop) -> None:
        self.parameters = tracked_parameters(loop)
        # Where the cockpit's optimizer is one of several, the update is over at the next step.
        self._by_optimizer = "optimizer" in loop.recipe.options and len(loop.optimizers) == 1

    @contextmanager
    def step(  # type: ignore[override]
        self, loop: Loop, step: int, found: Pass | None, accumulating: bool, referenced: bool
    ) -> Iterator[None]:
        self._end_update()
        if self._start is None:
            self._start = self._values()
        self.facts.pop(step, None)
        try:
            facts = None if found is None or not referenced else self._facts(loop, found)
        except Exception as error:
            raise BrokenReferenceError(f"the reference has failed: {error!r}") from error
        before = self._values()  # parameters may be updated inside the context
        yield
        if facts is not None:
            facts.parameters = self._values()
            unscaled = loop.scaler is None or "unscaling inside" in loop.recipe.habits
            scale = 1.0 if unscaled else loop.scaler.get_scale()
            for name, parameter in self.parameters.items():
                gradient = parameter.grad
                exact = None if gradient is None else double(gradient.to_dense()) / scale
                facts.gradients[name] = exact
            self.facts[step] = self._open = facts
            self._before = before

    def _values(self) -> Tensors:
        return {name: double(parameter) for name, parameter in self.parameters.items()}

    def _facts(self, loop: Loop, found: Pass) -> Facts:
        assert self._start is not None
        with torch.random.fork_rng(devices=[]), hooks_muted(self._trained().values()):
            rows = self._rows(loop, found)
            wanted = any(one.name in CURVATURE for one in loop.recipe.tracked)
            hessian = self._hessian(loop, found) if wanted else None
        scale = unknown_scale(loop, found)
        if rows is not None:
            rows = {name: scale * each for name, each in rows.items()}
        hessian = None if hessian is None else scale * hessian
        return Facts(found.samples, scale * float(found.loss), rows, hessian, self._start)

    def _rows(self, loop: Loop, found: Pass) -> Tensors | None:
        """``None`` where the graph allows no further backward passes."""
        recipe = loop.recipe
        with loop.autocast():
            losses = per_sample(recipe.loss, found.outputs, found.targets, recipe.reduction)
        rows = []
        try:
            for loss in losses:
                gradients = self._gradients(loop, loss)
                rows.append({name: double(row) for name, row in gradients.items()})
        except (RuntimeError, IndexError):  # the latter where a function has emptied a list
            return None
        return stacked(rows) if rows else {}

    def _gradients(self, loop: Loop, value: Tensor, create_graph: bool = False) -> Tensors:
        """The model's buffers are restored.

        A checkpoint that changes them would run its layers with other ones in the next backward
        pass than in that of the training.
        """
        with buffers_kept(loop.model.modules()):
            return gradients_of(value, self._trained(), create_graph)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def _hessian(self, loop: Loop, found: Pass) -> Tensor | None:
        """``None`` where there is no second derivative, or there are too many parameters."""
        parameters = self._trained().values()
        complex_ones = any(parameter.is_complex() for parameter in parameters)
        if complex_ones or sum(parameter.numel() for parameter in parameters) > MOST_ELEMENTS:
            return None
        try:
            gradient = flat(self._gradients(loop, found.loss, create_graph=True))
            rows = [flat(self._gradients(loop, element)) for element in gradient]
        except (RuntimeError, IndexError):  # as in _rows
            return None
        divisor = (found.samples or 1) if loop.recipe.reduction == "sum" else 1
        return double(torch.stack(rows)) / divisor if rows else None

    def updated(self, loop: Loop) -> None:
        if self._by_optimizer:
            self._end_update()

    def _end_update(self) -> None:
        if self._open is not None:
            now = self._values()
            self._open.update = {name: now[name] - each for name, each in self._before.items()}
        self._open = None

    def resume(self, loop: Loop) -> None:
        self._end_update()
        self._start = None
        self.parameters = tracked_parameters(loop)

    def end_epoch(self) -> None:
        self._end_update()

    def close(self) -> None:
        self._end_update()


def tracked_parameters(loop: Loop) -> dict[str, nn.Parameter]:
    """By the names that a cockpit gives them."""
    named = dict(loop.model.named_parameters())
    if "parameters alone" in loop.recipe.options:
        named = {f"param_{n}": parameter for n, parameter in enumerate(loop.trainable)}
    return {name: p for name, p in named.items() if p.requires_grad}


def unknown_scale(loop: Loop, found: Pass) -> float:
    """The factor in the loss that nothing says to the cockpit.

    Without ``loss=`` and ``loss_scale=``, the step's loss is what backward is called on.
    """
    if found.loss_scale is None or "without loss" not in loop.recipe.options:
        return 1.0
    return found.loss_scale


def double(tensor: Tensor) -> Tensor:
    """A copy in float64, in which complex numbers are pairs of real ones."""
    detached = tensor.detach().resolve_conj()
    real = torch.view_as_real(detached) if detached.is_complex() else detached
    return real.to(torch.float64, copy=True)


def flat(tensors: Tensors) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
