"""Sees where hooks of others change a gradient on its way, in the user's own backward pass.

A hook on a tensor isn't in the graph. But a node hands on a gradient, and the next node gets one:
without a hook in between, both are the same, or the sum of what several nodes have handed on. That
takes no pass of gradlens's own, and runs nobody's code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlens.graph.graph import Edge, Graph
from gradlens.graph.passes import Gradients, as_engine, nodes_above
from gradlens.numerics.host import on_host
from gradlens.torch_private import unseen, version

_Handed = tuple[Tensor, int]
"""A gradient that a node has handed on, and its version."""


class ChangingHooks:
    """Calls ``found(number)`` for each node whose gradient is another one than was handed on.

    Only the ways to some nodes are watched. The node's own hooks that come later see the same
    gradient, so that what is computed from it can be refused.
    """

    def __init__(
        self, graph: Graph, numbers: Collection[int], found: Callable[[int], None]
    ) -> None:
        self._graph = graph
        self._numbers = numbers
        self._found = found
        self._watched: frozenset[int] = frozenset()
        self._handed: dict[Edge, list[_Handed]] = {}
        self._handles: list[RemovableHandle] = []
        self._sums: list[tuple[int, Tensor]] = []

    def start(self) -> None:
        """Set hooks on all nodes between the graph's root and the watched ones."""
        above = nodes_above(self._graph, self._numbers)
        self._watched = frozenset(above.union(self._numbers) - {self._graph.root[0]})
        for number in above:
            hook = partial(self._hand_on, number)
            self._handles.append(self._graph.nodes[number].register_hook(hook))
        for number in self._watched:
            prehook = partial(self._arrive, number)
            self._handles.append(self._graph.nodes[number].register_prehook(prehook))

    def stop(self) -> None:
        """Remove the hooks, and wait once for what all sums of gradients were compared with."""
        for handle in self._handles:
            handle.remove()
        with unseen():
            flags = on_host([flag for _, flag in self._sums])
            for (number, _), is_sum in zip(self._sums, flags, strict=True):
                if not bool(is_sum):
                    self._found(number)
        self._handles, self._handed, self._sums = [], {}, []

    def _hand_on(self, number: int, handed: Gradients, arrived: Gradients) -> None:
        edges = zip(self._graph.children[number], handed, strict=True)
        # The gradients of parameters and of what isn't watched aren't held or made dense.
        watched = [(edge, each) for edge, each in edges if edge and edge[0] in self._watched]
        with unseen(), torch.no_grad():
            for edge, gradient in watched:
                try:
                    if gradient is not None:
                        dense = as_engine(self._graph, edge, gradient)
                        self._handed.setdefault(edge, []).append((dense, version(dense)))
                except Exception:  # such as of a nested tensor, which can't be compared
                    self._found(edge[0])

    def _arrive(self, number: int, gradients: Gradients) -> None:
        for output, gradient in enumerate(gradients):
            handed = self._handed.pop((number, output), [])
            try:
                if not handed or (gradient is not None and self._is_what(handed, number, gradient)):
                    continue
            except Exception:  # they can't be compared, and the user's backward pass goes on
                pass
            self._found(number)
            return

    def _is_what(self, handed: list[_Handed], number: int, gradient: Tensor) -> bool:
        """Whether a gradient is what was handed on, or may be its sum, which is still compared."""
        first, before = handed[0]
        if len(handed) == 1 and first.data_ptr() == gradient.data_ptr():
            return version(gradient) == before
        with unseen(), torch.no_grad():
            total = first
            for each, _ in handed[1:]:
                total = total + each
            total = total.to(gradient.dtype)
            if total.shape != gradient.shape:
                return False
            # Added up in the same order, they are the same to the last bit.
            same = (total == gradient) | (total.isnan() & gradient.isnan())
            self._sums.append((number, same.all()))
            return True
