"""A loss's autograd graph, walked once, and what is known of its nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gradlens.graph.kinds import LEAF, Node, kind, kind_of
from gradlens.graph.layer_rules import layer_calls
from gradlens.graph.python_functions import constants_of
from gradlens.torch_private import (
    output_metadata,
    saved_integers,
    sequence_numbers,
    storage_number,
)

T = TypeVar("T")

Edge: TypeAlias = tuple[int, int]
"""The number of a node in its graph, and the number of one of its outputs."""


@dataclass(frozen=True)
class Link:
    """One node between a use and the parameter, with its output and input on that path."""

    node: int
    output: int
    input: int


@dataclass(frozen=True)
class Use:
    """A node that computes with a parameter, as its input number ``index``.

    ``shape`` is that input's; ``chain`` leads from it down to the parameter. Where the node makes
    the output of a layer that has a rule, ``own_name`` is the parameter's name in that layer.
    """

    node: int
    index: int
    shape: tuple[int, ...]
    chain: tuple[Link, ...]
    own_name: str = ""


@dataclass(frozen=True)
class RuledCall:
    """A call of a layer that has a rule: the node that made its output, by number.

    ``origins`` are the nodes that made its inputs, and ``names`` the layer's own names of its
    parameters, by the numbers of their leaves.
    """

    node: int
    origins: tuple[int, ...]
    names: tuple[tuple[int, str], ...]
    rule: int


class Graph:
    """The nodes behind a tensor, numbered so that each comes after all that it consumes.

    The nodes' Python objects are kept, since torch makes them on demand. ``children`` are the edges
    that a node consumes, with ``None`` for inputs that need no gradient. Graphs with the same
    ``key`` have the same operations, shapes, integers and edges: only numbers in tensors differ.
    The nodes behind further tensors may be there, too.
    """

    def __init__(self, tensor: Tensor, *others: Tensor) -> None:
        self.nodes: list[Node] = []
        self.kinds: list[str] = []
        self.children: list[tuple[Edge | None, ...]] = []
        self.leaves: dict[int, int] = {}
        self._shapes: dict[Edge, tuple[int, ...]] = {}
        self._outputs: dict[int, Sequence[Any]] = {}
        self._numbers: dict[Node, int] = {}
        if tensor.grad_fn is None and tensor.requires_grad:
            raise ValueError("the loss is a leaf of the graph: it doesn't depend on any layer")
        self._walk([each.grad_fn for each in (*others, tensor) if each.grad_fn is not None])
        self.root: Edge = (self.number_of(tensor), tensor.output_nr)

    def _walk(self, roots: Sequence[Node]) -> None:
        numbers, waiting = self._numbers, [*roots]
        below: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        # As few objects as possible stay: where thousands do at each step, Python's collection of
        # garbage takes longer than the walk.
        while waiting:
            node = waiting[-1]
            if node not in below:
                edges = below[node] = node.next_functions
                new = [child for child, _ in edges if child is not None and child not in below]
                if new:
                    waiting += new
                    continue
            waiting.pop()
            if node in numbers:
                continue
            number = numbers[node] = len(self.nodes)
            self.nodes.append(node)
            kind_ = kind(node)
            self.kinds.append(kind_)
            self.children.append(
                tuple([None if c is None else (numbers[c], output) for c, output in below[node]])
            )
            if kind_ == LEAF:
                self.leaves[id(node.variable)] = number

    @cached_property
    def consumers(self) -> list[list[tuple[int, int, int]]]:
        """``(consumer, number of its input, number of the output consumed)`` of each node."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.nodes]
        for number, edges in enumerate(self.children):
            for index, edge in enumerate(edges):
                if edge is not None:
                    found[edge[0]].append((number, index, edge[1]))
        return found

    def number_of(self, tensor: Tensor) -> int:
        """The number of the node that made a tensor, or of its leaf; -1 if there is none."""
        if tensor.grad_fn is None:
            return self.leaves.get(id(tensor), -1)
        return self._numbers.get(tensor.grad_fn, -1)

    def edge_of(self, tensor: Tensor) -> Edge | None:
        """Where a tensor that a node has made is in the graph; ``None`` if it isn't there."""
        number = -1 if tensor.grad_fn is None else self.number_of(tensor)
        return None if number < 0 else (number, tensor.output_nr)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self.leaves

    def __len__(self) -> int:
        return len(self.nodes)

    def shape(self, edge: Edge) -> tuple[int, ...]:
        """Shape of the tensor along an edge in the forward pass."""
        found = self._shapes.get(edge)
        if found is None:
            found = self._shapes[edge] = _shape(self.like(edge))
        return found

    def like(self, edge: Edge) -> Any:
        """What has the dtype and the device of the tensor along an edge."""
        return self.outputs(edge[0])[edge[1]]

    def outputs(self, number: int) -> Sequence[Any]:
        """What has the shape, the dtype and the device of each output of a node."""
        found = self._outputs.get(number)
        if found is None:
            node, is_leaf = self.nodes[number], self.kinds[number] == LEAF
            found = self._outputs[number] = (node.variable,) if is_leaf else output_metadata(node)
        return found

    @cached_property
    def python_functions(self) -> frozenset[int]:
        """The nodes of ``torch.autograd.Function``s, which may do anything."""
        pairs = enumerate(self.nodes)
        return frozenset([n for n, node in pairs if isinstance(node, BackwardCFunction)])

    @property
    def has_nested_tensors(self) -> bool:
        """Whether some tensor has rows of different lengths, of which torch gives no numbers."""
        edges = {self.root, *(edge for edges in self.children for edge in edges if edge)}
        shapes = map(self.shape, edges)
        return any(not isinstance(length, int) for shape in shapes for length in shape)

    @cached_property
    def storages(self) -> frozenset[int]:
        """The numbers of the parameters' storages."""
        variables = [self.nodes[number].variable for number in self.leaves.values()]
        dense = (variable for variable in variables if variable.layout == torch.strided)
        return frozenset(map(storage_number, dense))

    def key(self, names: dict[int, str]) -> int:
        """A hash of the graph's structure; ``names`` are those of parameters, by ``id``."""
        found = hash((self.root, self.ruled_calls))
        for node, kind_, edges in zip(self.nodes, self.kinds, self.children, strict=True):
            if kind_ == LEAF:
                own: Any = names.get(id(node.variable))
                made: Sequence[Any] = (node.variable,)
            else:
                is_code = isinstance(node, BackwardCFunction)
                own = constants_of(node) if is_code else saved_integers(node)
                made = output_metadata(node)
            try:
                shapes = [tuple(each.shape) for each in made]
            except RuntimeError:  # of a nested tensor that isn't jagged
                shapes = [*map(_shape, made)]
            found = hash((found, kind_, edges, own, *shapes))
        return found

    def below(self, start: Iterable[int], lowest: int = 0, stop: Collection[int] = ()) -> set[int]:
        """The nodes and all that they consume, directly or not.

        Nodes with smaller numbers than ``lowest`` and those in ``stop`` are left out.
        """
        found: set[int] = set()
        waiting = list(start)
        for node in each_once(waiting):
            if node >= lowest and node not in stop:
                found.add(node)
                waiting += [edge[0] for edge in self.children[node] if edge is not None]
        return found

    @cached_property
    def by_sequence_number(self) -> dict[int, int]:
        """The numbers of nodes by torch's sequence numbers, which leaves don't have."""
        inner = [i for i, kind_ in enumerate(self.kinds) if kind_ != LEAF]
        return dict(zip(sequence_numbers(self.nodes[i] for i in inner), inner, strict=True))

    @cached_property
    def ruled_calls(self) -> tuple[RuledCall, ...]:
        """Calls of layers that have a rule, whose output is all that is used of its node."""
        calls = layer_calls(self.nodes)
        if not calls:
            return ()
        numbers = self.by_sequence_number
        return tuple(
            RuledCall(
                number,
                tuple(sorted(numbers[origin] for origin in call.origins if origin in numbers)),
                tuple(
                    (self.leaves[id(parameter)], name)
                    for name, parameter in call.parameters.items()
                    if parameter in self
                ),
                id(call.rule),
            )
            for number, call in calls.items()
            if self.outputs_of(number) == [call.output]
        )

    def inside(self, call: RuledCall) -> set[int]:
        """The nodes of a call: those behind its output, but not behind its inputs."""
        behind = self.below([call.node], stop=call.origins)
        inner = {number for number in behind if self.kinds[number] != LEAF}
        return inner - self.below(call.origins, lowest=min(inner, default=0))

    @cached_property
    def alone(self) -> list[bool]:
        """Whether a node certainly computes with parameters alone, by number."""
        return self.of_parameters_alone()

    def of_parameters_alone(
        self, with_constants: Callable[[int, Edge], bool] = lambda number, edge: False
    ) -> list[bool]:
        """Whether a node certainly computes with parameters alone, by number.

        Data that needs no gradient has no edge, so only nodes without open inputs are certain, and
        those whose open inputs are constants, as ``with_constants`` says of a node's number and the
        edge of its first other input.
        """
        alone: list[bool] = []
        for node, kind_, edges in zip(self.nodes, self.kinds, self.children, strict=True):
            if kind_ == LEAF:
                alone.append(isinstance(node.variable, nn.Parameter))
            else:
                known = [edge for edge in edges if edge is not None]
                found = bool(known) and not kind_of(kind_).brings_data
                found = found and all(alone[edge[0]] for edge in known)
                number = len(alone)
                alone.append(
                    found and (len(known) == len(edges) or with_constants(number, known[0]))
                )
        return alone

    def outputs_of(self, number: int) -> list[int]:
        """The numbers of a node's outputs that other nodes use, or that are the graph's tensor."""
        return self._used_outputs[number]

    @cached_property
    def _used_outputs(self) -> list[list[int]]:
        used = [{output for _, _, output in consumers} for consumers in self.consumers]
        used[self.root[0]].add(self.root[1])
        return [sorted(outputs) for outputs in used]

    def descend(self, edge: Edge) -> Iterator[Edge]:
        """The edges that the node of an edge consumes."""
        return (child for child in self.children[edge[0]] if child is not None)


def each_once(waiting: list[T]) -> Iterator[T]:
    """What is taken from the end of a list, to which more may be added meanwhile, each once."""
    visited: set[T] = set()
    while waiting:
        each = waiting.pop()
        if each not in visited:
            visited.add(each)
            yield each


def _shape(output: Any) -> tuple[Any, ...]:
    try:
        return tuple(output.shape)
    except RuntimeError:  # of a nested tensor that isn't jagged
        return (None,)


def is_python_function(node: Node) -> bool:
    """Whether the node is that of a ``torch.autograd.Function``."""
    return isinstance(node, BackwardCFunction)
