"""A loss's autograd graph, and where in it parameters meet the samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Node: TypeAlias = Any
"""A ``torch.autograd.graph.Node``, whose saved tensors its type doesn't know."""

Edge: TypeAlias = tuple[Node, int]
"""A node and the number of one of its outputs."""


@dataclass(frozen=True)
class Link:
    """One node between a use and the parameter: which of its outputs and inputs are on the way."""

    node: Node
    output: int
    input: int


@dataclass(frozen=True)
class Use:
    """Where a parameter meets the samples: ``node`` computes with it as input number ``index``.

    ``shape`` is that input's; ``chain`` leads from it down to the parameter.
    """

    node: Node
    index: int
    shape: tuple[int, ...]
    chain: tuple[Link, ...]


class Graph:
    """A loss's graph, walked once.

    ``parametrised`` are nodes known to compute with parameters alone. Nodes are held, since torch
    makes their Python objects on demand.
    """

    def __init__(self, loss: Tensor, parametrised: Sequence[Node] = ()) -> None:
        self._parametrised = parametrised
        self._consumers: dict[Node, list[tuple[Node, int, int]]] = defaultdict(list)
        self._in_order: list[Node] = []
        self._leaves: dict[int, Node] = {}
        self.root: Edge = (loss.grad_fn, loss.output_nr)
        if loss.grad_fn is not None:
            self._walk(loss.grad_fn)

    def _walk(self, root: Node) -> None:
        """Depth first: a node comes after all that it consumes."""
        seen: set[Node] = set()
        stack = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                self._in_order.append(node)
                continue
            if node in seen:
                continue
            seen.add(node)
            stack.append((node, True))
            if kind(node) == "AccumulateGrad":
                self._leaves[id(node.variable)] = node
            for index, (child, output) in enumerate(node.next_functions):
                if child is not None:
                    self._consumers[child].append((node, index, output))
                    stack.append((child, False))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, each after those that it consumes."""
        return tuple(self._in_order)

    def leaves_below(self, nodes: Sequence[Node]) -> set[int]:
        """``id`` of all parameters that the nodes are computed from."""
        below = nodes_below(nodes)
        return {identity for identity, leaf in self._leaves.items() if leaf in below}

    def has_scalars_alone(self, nodes: Iterable[Node]) -> bool:
        """Whether the nodes are computed from parameters of one element each."""
        below = nodes_below(nodes)
        return all(leaf.variable.numel() == 1 for leaf in self._leaves.values() if leaf in below)

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._leaves

    def of_parameters_alone(self, samples: int) -> set[Node]:
        """Nodes that none of N ``samples`` has entered."""
        alone = nodes_below(self._parametrised)
        for node in self._in_order:
            if kind(node) == "AccumulateGrad":
                known = isinstance(node.variable, nn.Parameter)
            else:
                children = [child for child, _ in node.next_functions if child is not None]
                known = all(child in alone for child in children)
            if known and (
                not samples_enter(node, samples) or self._is_repeated_for_samples(node, samples)
            ):
                alone.add(node)
        return alone

    def _is_repeated_for_samples(self, node: Node, samples: int) -> bool:
        """Whether what comes out is the same for all samples, by what it is added to.

        Positions look like samples where there are as many.
        """
        own = output_shape(node, 0)
        missing = len(own) if own[:1] != (1,) else len(own) - 1
        sums = [
            output_shape(c, 0) for c, _, _ in self._consumers[node] if kind(c) == "AddBackward0"
        ]
        repeated = [shape for shape in sums if len(shape) > missing and shape[0] == samples]
        return 0 < len(repeated) == len(self._consumers[node])

    def uses(self, parameter: Tensor, alone: set[Node]) -> Iterator[Use]:
        """All ways from the parameter to a node that isn't of parameters alone."""
        leaf = self._leaves[id(parameter)]
        stack: list[tuple[Node, int | None, tuple[Link, ...]]] = [(leaf, None, ())]
        while stack:
            node, index, chain = stack.pop()
            for consumer, place, output in self._consumers[node]:
                links = chain if index is None else (Link(node, output, index), *chain)
                if consumer in alone:
                    stack.append((consumer, place, links))
                else:
                    yield Use(consumer, place, output_shape(node, output), links)

    def layout_around(self, node: Node, rows: int) -> tuple[int, ...] | None:
        """The axes that ``rows`` of a matrix were folded from, or are unfolded to."""
        unfolded = [output_shape(consumer, 0) for consumer, _, _ in self._consumers[node]]
        children = [child for child, _ in node.next_functions if child is not None]
        folded = [_shape_before(child) for child in children if "View" in kind(child)]
        for shape in (*unfolded, *folded):
            leading = shape[:-1]
            if len(leading) > 1 and torch.Size(leading).numel() == rows:
                return tuple(leading)
        return None


def nodes_below(nodes: Iterable[Node | None]) -> set[Node]:
    """The nodes and all that they consume, directly or not."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node is None or node in found:
            continue
        found.add(node)
        stack += [child for child, _ in node.next_functions]
    return found


def kind(node: Node) -> str:
    """The node's name, such as ``"AddmmBackward0"``."""
    return str(node.name()).rpartition("::")[2]


def output_shape(node: Node, output: int) -> tuple[int, ...]:
    """Shape of a node's output in the forward pass."""
    if kind(node) == "AccumulateGrad":
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[output].shape)


def sample_axis(shape: tuple[int, ...], operand: tuple[int, ...], samples: int) -> int | None:
    """The first axis of length N along which an operand is broadcast to ``shape``."""
    own = (1,) * (len(shape) - len(operand)) + operand
    missing = len(shape) - len(operand)
    for axis, length in enumerate(shape):
        if length == samples and own[axis] == 1 and (length > 1 or axis < missing or axis == 0):
            return axis
    return None


_GROWING = {"ExpandBackward0", "RepeatBackward0"}
_BROADCASTING = {
    f"{name}Backward0" for name in ("Add", "Sub", "Mul", "Div", "Where", "Maximum", "Minimum")
}


def samples_enter(node: Node, samples: int) -> bool:
    """Whether a node of parameters alone, to judge by its edges, computes with data.

    Data that needs no gradient has no edge. It shows in the shape of what comes out.
    """
    children = node.next_functions
    if kind(node) == "AccumulateGrad" or not children:
        return False
    shape = output_shape(node, 0)
    constant = any(child is None for child, _ in children)
    name = kind(node)
    if name in _GROWING or (constant and name in _BROADCASTING):
        operands = [output_shape(child, output) for child, output in children if child is not None]
        axes = [sample_axis(shape, operand, samples) for operand in operands]
        # Within a matrix of parameters alone, rows are repeated along columns.
        inside_matrix = len(shape) < 3 and any(axis != 0 for axis in axes)
        return None not in axes and not (name in _GROWING and inside_matrix)
    if name == "EmbeddingBackward0":
        return len(shape) > 1 and (shape[0] == samples or samples in shape[1:-1])
    if name in ("AddmmBackward0", "MmBackward0"):
        inputs, _ = children[-2]
        return inputs is None and shape[0] % samples == 0
    if name.startswith(("NativeLayerNorm", "NativeGroupNorm", "NativeBatchNorm")):
        return children[0][0] is None and samples in shape[:-1]
    if name.startswith("Convolution"):
        return children[0][0] is None and shape[0] % samples == 0
    return False


def _shape_before(view: Node) -> tuple[int, ...]:
    child, output = view.next_functions[0]
    return () if child is None else output_shape(child, output)
