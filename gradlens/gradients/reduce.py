"""Reduces each parameter's per-sample gradients during a backward pass, once they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlens.gradients.collect import Collector
from gradlens.numerics.unavailable import Contain, uncontained
from gradlens.operators.dense import Buffer, is_to_be_stored
from gradlens.operators.operator import GradientOperator
from gradlens.reductions import STORED_BYTES, ParameterGradients, Reduction
from gradlens.torch_private import backward_pass_id, unseen

RETAINED_BYTES = 16 * 2**20
"""Memory that stored per-sample gradients may take until the update, beyond that of the factors
that they are computed from."""


class Reducer:
    """Reduces a collector's operators when a parameter's gradient is complete, and frees them.

    A parameter's gradient is complete when autograd accumulates it, since all its uses have been
    passed then. ``values`` are by reduction and parameter name, ``failed`` are the reasons why
    reductions have none, and ``covered`` are the parameters that have gradients. ``kept`` are the
    operators: with ``retain``, for projections, and otherwise what ``keep`` makes of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        collector: Collector,
        reductions: Iterable[Reduction],
        retain: bool = False,
        keep: Callable[[GradientOperator], GradientOperator] | None = None,
        contain: Contain = uncontained,
        buffer: Buffer | None = None,
    ) -> None:
        self.collector = collector
        self.failed: dict[Reduction, str] = {}
        self.values: dict[Reduction, dict[str, Any]] = {reduction: {} for reduction in reductions}
        self.covered: set[str] = set()
        self.kept: dict[str, GradientOperator] = {}
        self._retain = retain
        self._copies = False
        self._shared = sum(each.passes for each in self.values) + retain > 1
        self._may_retain = RETAINED_BYTES
        self._keep = keep
        self._contain = contain
        self._buffer = buffer
        self._leaves = parameters
        self._handles: list[RemovableHandle] = []
        self._pending: set[str] = set()

    def start(self, leaves: Mapping[str, nn.Parameter]) -> None:
        """Set hooks that reduce a parameter's gradients as soon as they are complete.

        ``leaves`` are what a loss's graph has for the parameters. Called again, it does nothing.
        """
        if self._handles:
            return
        self._leaves = leaves
        for name, leaf in leaves.items():
            if leaf.is_leaf and leaf.requires_grad:
                self._pending.add(name)
                hook = partial(self._accumulated, name)
                self._handles.append(leaf.register_post_accumulate_grad_hook(hook))

    def copy_what_lasts(self) -> None:
        """Copy the operators that are needed after the backward pass.

        Code of others may overwrite their memory by then, and not every way to do so shows.
        """
        self._copies = True

    @property
    def has_seen_all(self) -> bool:
        """Whether autograd has accumulated the gradients of all parameters."""
        return not self._pending

    def _accumulated(self, name: str, _: Tensor) -> None:
        self._pending.discard(name)
        self._complete(name, backward_pass_id())

    def _complete(self, name: str, backward_pass: int) -> None:
        try:
            individual = self.collector.take(name, backward_pass)
            if individual is None:
                return
            if name in self.covered:
                self._refuse(name, SEVERAL_PASSES)
                self._fail(self.values, SEVERAL_PASSES)
                return
            with unseen(), torch.no_grad():
                self._reduce(name, individual)
        except Exception:
            # Entering a context for each parameter would take longer than many reductions.
            with self._contain(f"the gradients of {name}", partial(self._refuse, name)):
                raise

    def _reduce(self, name: str, individual: GradientOperator) -> None:
        lasts = self._retain and self._fits(individual)
        buffer = None if lasts else self._buffer
        leaf = self._leaves[name]
        gradients = ParameterGradients(name, leaf, individual, self._shared, buffer=buffer)
        apart = self._reduce_rows(gradients) if gradients.are_apart else {}
        for reduction, values in self.values.items():
            if reduction in self.failed or not reduction.is_of(name):
                continue
            try:
                values[name] = (
                    reduction.total(apart[reduction])
                    if reduction in apart
                    else reduction.reduce(gradients)
                )
            except Exception:
                with self._containing(reduction, name):
                    raise
        gradients.elements.forget()
        self.covered.add(name)
        if lasts and gradients.elements is not individual:
            self.kept[name] = gradients.elements
        elif self._retain or self._keep is not None:
            lasting = individual.copied() if self._copies else individual
            self.kept[name] = lasting if self._keep is None else self._keep(lasting)

    def _reduce_rows(self, gradients: ParameterGradients) -> Mapping[Reduction, Sequence[Any]]:
        """Values of rows, whose gradients are computed once for several reductions."""
        of_rows = (reduction for reduction in self.values if reduction.from_rows)
        reductions = [reduction for reduction in of_rows if reduction.is_of(gradients.name)]
        if sum(reduction.passes for reduction in reductions) < 2:
            return {}
        found: dict[Reduction, list[Any]] = {reduction: [] for reduction in reductions}
        for part in gradients.apart():
            for reduction in reductions:
                if reduction not in self.failed:
                    with self._containing(reduction, gradients.name):
                        found[reduction].append(reduction.reduce(part))
        return found

    def _containing(self, reduction: Reduction, name: str) -> AbstractContextManager[Any]:
        # The name of its class, since its own text has all numbers of its tensors.
        work = f"{type(reduction).__name__} of {name}"
        return self._contain(work, partial(self._fail, [reduction]))

    def _refuse(self, name: str, reason: str) -> None:
        self.collector.refuse([name], reason)
        self.covered.discard(name)
        self.kept.pop(name, None)

    def _fail(self, reductions: Iterable[Reduction], reason: str) -> None:
        """Without one of the parameters, a reduction would be that of others."""
        for reduction in reductions:
            self.failed.setdefault(reduction, reason)

    def _fits(self, individual: GradientOperator) -> bool:
        """Whether elements may be retained, which give projections at less cost than factors."""
        are_stored = self._shared and is_to_be_stored(individual, STORED_BYTES)
        size = individual.bytes_of_elements if are_stored else 0
        more = max(size - individual.nbytes, 0)
        fits = more <= self._may_retain
        self._may_retain -= more if fits else 0
        return fits

    def finish(self) -> None:
        """Reduce what autograd didn't accumulate (``torch.autograd.grad``), and remove hooks."""
        for name in self.collector.names:
            if name in self.covered:
                self.collector.drop(name)
            else:
                self._complete(name, self.collector.latest_pass(name))
        for name in self.covered & self.collector.unavailable.keys():
            # Refused since then, as where a hook has changed gradients: the others are as before.
            self._refuse(name, self.collector.unavailable[name])
            for values in self.values.values():
                values.pop(name, None)
        self._remove_hooks()

    def stop(self) -> None:
        """Remove hooks and release all gradients."""
        self._remove_hooks()
        self.collector.clear()
        self.kept = {}

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


SEVERAL_PASSES = (
    "it got gradients from two backward passes inside one context: add the losses and call "
    "backward once"
)
