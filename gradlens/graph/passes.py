"""Backward passes of gradlens's own, one node after the other.

Autograd's engine runs the hooks that users have set on tensors and nodes, adds to gradients that
tensors retain, and runs callbacks at its end. A pass that calls the nodes itself does none of this:
it runs torch's own backward functions, and those written in Python only if they leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from gradlens.graph.checkpoints import read_again, reading, why_not_to_read
from gradlens.graph.graph import Edge, Graph, is_python_function
from gradlens.graph.kinds import COMPILED, REENTRANT_CHECKPOINT, Node, kind
from gradlens.graph.python_functions import Watched, why_not_to_run
from gradlens.graph.uncompiled import RAN_COMPILED
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.torch_private import (
    hands_gradients_on,
    in_backward_pass,
    recomputing,
)

Gradients: TypeAlias = tuple[Tensor | None, ...]
"""Gradients at the outputs of a node, or at its inputs; ``None`` where the loss depends on none."""

Visit: TypeAlias = Callable[[int, Gradients], None]
Instead: TypeAlias = Mapping[int, Callable[[Gradients], Gradients]]
"""What is computed in place of some nodes, by their numbers."""


class RefusedNodeError(UnavailableError):
    """A node of a graph can't be run without a trace."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def run_backward(
    graph: Graph,
    starts: Iterable[tuple[Edge, Tensor]],
    wanted: Collection[int],
    visit: Visit,
    instead: Instead = MappingProxyType({}),
    create_graph: bool = False,
) -> None:
    """Compute the gradients that reach the ``wanted`` nodes, from those at some edges.

    ``visit(number, gradients)`` is called with the gradients at the outputs of each of these nodes.
    Only what lies between is run, and no leaf ever gets a gradient. With ``create_graph``, the
    gradients can be differentiated. ``RefusedNodeError`` if a node between can't be run without a
    trace, ``RuntimeError`` if a backward pass has freed the graph.
    """
    above = nodes_above(graph, wanted)
    arrived: dict[int, list[Tensor | None]] = {}

    def add(edge: Edge, gradient: Tensor) -> None:
        number, output = edge
        slots = arrived.get(number)
        if slots is None:
            slots = arrived[number] = [None] * len(graph.outputs(number))
        known = slots[output]
        slots[output] = gradient if known is None else known + gradient

    for edge, gradient in starts:
        if edge[0] in wanted or edge[0] in above:
            add(edge, gradient)
    for number in reversed(range(len(graph))):
        if number not in arrived:
            continue
        gradients = tuple(arrived.pop(number))
        if number in wanted:
            visit(number, gradients)
        if number not in above:
            continue
        if number in instead:
            found = instead[number](gradients)
        else:
            found = call(graph, number, gradients, create_graph)
        for below, handed_on in zip(graph.children[number], found, strict=True):
            needed = below is not None and (below[0] in wanted or below[0] in above)
            if below is not None and needed and handed_on is not None:
                add(below, handed_on)


def nodes_above(graph: Graph, numbers: Collection[int]) -> set[int]:
    """The nodes that have one of the others behind them."""
    found: set[int] = set()
    for number, edges in enumerate(graph.children):
        if any(edge is not None and (edge[0] in numbers or edge[0] in found) for edge in edges):
            found.add(number)
    return found


def reason_not_to_run(node: Node) -> str:
    """Why a node can't be run once more without a trace; empty if it can."""
    if is_python_function(node) and not hands_gradients_on(node):
        if kind(node) == COMPILED:
            return RAN_COMPILED
        what = why_not_to_run(node)
        if what:
            return RUNS_CODE.format(kind=kind(node), what=what)
    return why_not_to_read(node)


def why_not_to_pass(tensor: Tensor) -> str:
    """Why the graph behind a loss can't be passed without a trace; usually empty.

    Checkpoints count, too: computing a region again runs the user's own code. A reentrant one has a
    reason of its own.
    """
    graph = Graph(tensor)
    pairs = zip(graph.nodes, graph.kinds, strict=True)
    reasons = (reason_not_to_run(node) for node, k in pairs if k != REENTRANT_CHECKPOINT)
    return next(filter(None, reasons), "")


OTHER_OUTPUTS = (
    "the model returns something else than tensors beside them, and it isn't known which is which: "
    "return tensors alone, or use DistributedDataParallel without find_unused_parameters"
)
RUNS_CODE = (
    "the backward function of {kind} would have to run once more for it, and may change something "
    "that stays ({what}): let it compute with torch's functions alone, and change nothing"
)


def derivatives(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    cotangents: Sequence[Tensor],
    instead: Callable[[Graph], Instead] = lambda graph: {},
    create_graph: bool = False,
    graph: Graph | None = None,
) -> list[Tensor | None]:
    """Σⱼ cotangentⱼ·∂outputⱼ/∂input for each input, ``None`` where no output depends on it.

    Like ``torch.autograd.grad``, but as in ``run_backward``. Checkpoints are recomputed. ``graph``
    is that of the outputs, if it is known.
    """
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.grad_fn is not None]
    if not pairs:
        return [None] * len(inputs)
    graph = Graph(*(output for output, _ in pairs)) if graph is None else graph
    edges = [(graph.number_of(each), each.output_nr) for each in inputs]
    starts = [((graph.number_of(o), o.output_nr), cotangent) for o, cotangent in pairs]
    found: dict[Edge, Tensor | None] = {}

    def take(number: int, gradients: Gradients) -> None:
        found.update({(number, output): each for output, each in enumerate(gradients)})

    wanted = {number for number, _ in edges if number >= 0}
    with torch.set_grad_enabled(create_graph), recomputing():
        run_backward(graph, starts, wanted, take, instead(graph), create_graph)
    return [found.get(edge) for edge in edges]


def call(
    graph: Graph, number: int, gradients: Sequence[Tensor | None], create_graph: bool = False
) -> Gradients:
    """Gradients at a node's inputs, as autograd's engine would hand them on, from its outputs'.

    ``RefusedNodeError`` if the node can't be run without a trace.
    """
    node = graph.nodes[number]
    if not is_python_function(node):
        return _by_edge(graph, number, call_node(graph, number, gradients, create_graph))
    if hands_gradients_on(node):
        return _handed_on(graph, number, gradients)
    reason = reason_not_to_run(node)
    if reason:
        raise RefusedNodeError(number, reason)
    return _call_function(graph, number, _given(graph, number, gradients), create_graph)[0]


def _handed_on(graph: Graph, number: int, gradients: Sequence[Tensor | None]) -> Gradients:
    """The gradient at each tensor that a function hands on, which may hand on other objects, too.

    Torch knows these as tensors without axes, so that only the shapes of the others can tell.
    """
    outputs = [tuple(each.shape) for each in graph.outputs(number)]
    edges = graph.children[number]
    if len(outputs) == len(edges):
        return tuple(gradients)
    inputs = [None if edge is None else graph.shape(edge) for edge in edges]
    first, last = _places(inputs, outputs), _places(inputs[::-1], outputs[::-1])
    latest = [len(outputs) - 1 - place for place in reversed(last)]
    pairs = zip(edges, first, latest, strict=True)
    if any(edge is not None and one != other for edge, one, other in pairs):
        raise RefusedNodeError(number, OTHER_OUTPUTS)
    return tuple(gradients[place] for place in first)


def _places(
    inputs: Sequence[tuple[int, ...] | None], outputs: Sequence[tuple[int, ...]]
) -> list[int]:
    """The first output of each input's shape behind that of the input before it."""
    found, start = list[int](), 0
    for shape in inputs:
        fitting = (n for n in range(start, len(outputs)) if shape in (None, outputs[n]))
        found.append(next(fitting))
        start = found[-1] + 1
    return found


def call_node(
    graph: Graph, number: int, gradients: Sequence[Tensor | None], create_graph: bool = False
) -> Gradients:
    """What a node of torch's own hands on itself, as ``call``: nothing that was broadcast is added.

    ``RefusedNodeError`` if the node can't be run without a trace.
    """
    given = _given(graph, number, gradients)
    found = _call_node(graph, number, given, create_graph)
    if in_backward_pass() and any(
        each is None and edge is not None
        for each, edge in zip(found, graph.children[number], strict=True)
    ):
        # A node computes no gradient that the user's backward pass, which is running, doesn't need.
        # Another thread is in no backward pass.
        device = next(each.device for each in given if each is not None)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(_call_node, graph, number, given, create_graph, stream).result()
    return found


def _given(
    graph: Graph, number: int, gradients: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Gradients in the precision that a node takes."""
    return [
        gradient if gradient is None else _where_numbers_begin(gradient.to(output.dtype))
        for gradient, output in zip(gradients, graph.outputs(number), strict=True)
    ]


def _where_numbers_begin(gradient: Tensor) -> Tensor:
    """A gradient from a place where a complex number may begin, as ``view_as_complex`` demands."""
    is_odd = gradient.layout == torch.strided and gradient.storage_offset() % 2
    return gradient.clone() if is_odd else gradient


def _call_node(
    graph: Graph,
    number: int,
    given: Sequence[Tensor | None],
    create_graph: bool,
    stream: torch.cuda.Stream | None = None,
) -> Gradients:
    node = graph.nodes[number]
    reason, is_stored_by_hooks = reading(node)
    if reason:
        raise RefusedNodeError(number, reason)
    # Contexts that change nothing would take as long as most nodes.
    if torch.is_grad_enabled() == create_graph and stream is None and not is_stored_by_hooks:
        found = node(*given)
    else:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(create_graph))
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))
            if is_stored_by_hooks:
                stack.enter_context(read_again(node))
            found = node(*given)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _call_function(
    graph: Graph, number: int, given: Sequence[Tensor | None], create_graph: bool
) -> tuple[Gradients, bool]:
    """Call a backward function in Python, which returns a value for each argument of forward.

    Also returned is whether it has computed each element from elements at the same place.
    """
    node = graph.nodes[number]
    # Copies, since functions that save memory write into the gradients that they get.
    own = [
        torch.zeros(tuple(o.shape), dtype=o.dtype, device=o.device) if g is None else g.clone()
        for g, o in zip(given, graph.outputs(number), strict=True)
    ]
    try:
        with (
            torch.set_grad_enabled(create_graph),
            read_again(node),
            Watched(own) as watched,
        ):
            found = node.apply(*own)
    except Exception as error:
        what = str(error) if isinstance(error, UnavailableError) else f"raised {first_line(error)}"
        raise RefusedNodeError(number, RUNS_CODE.format(kind=kind(node), what=what)) from error
    values = found if isinstance(found, (tuple, list)) else (found,)
    needed = [n for n, is_needed in enumerate(node.needs_input_grad) if is_needed]
    # Arguments that need no gradient have no edge, or an edge without a node.
    edges = graph.children[number]
    places = [place for place, edge in enumerate(edges) if edge is not None]
    by_place = dict(zip(places, needed, strict=True))
    by_edge = [values[by_place[p]] if p in by_place else None for p in range(len(edges))]
    return _by_edge(graph, number, by_edge), watched.is_elementwise


def is_elementwise(graph: Graph, number: int) -> bool:
    """Whether a function in Python hands on a multiple of each element, at the same place.

    Its operations must be those that compute each element from elements at the same place, and its
    results change by the powers of two that the gradients are multiplied by.
    """
    node = graph.nodes[number]
    first, *others = graph.outputs(number)
    shape, where = tuple(first.shape), {"device": first.device, "dtype": first.dtype}
    alike = all((tuple(each.shape), each.dtype) == (shape, first.dtype) for each in others)
    if not alike or not first.dtype.is_floating_point or reason_not_to_run(node):
        return False
    generator = torch.Generator().manual_seed(0)
    gradients = [
        torch.rand(shape, generator=generator, device="cpu").to(**where) + 0.5 for _ in (0, *others)
    ]
    exponents = torch.randint(-2, 3, shape, generator=generator, device="cpu")
    factors = (exponents.exp2() * (exponents % 2 * 2 - 1)).to(**where)
    try:
        plain, *known = _call_function(graph, number, gradients, False)
        scaled, *again = _call_function(graph, number, [g * factors for g in gradients], False)
    except RefusedNodeError:
        return False
    pairs = [(one, other) for one, other in zip(plain, scaled, strict=True) if one is not None]
    same = all(o is not None and torch.equal(p * factors, o) for p, o in pairs if p.shape == shape)
    return all((*known, *again)) and same


def _by_edge(graph: Graph, number: int, found: Sequence[Tensor | None]) -> Gradients:
    return tuple(
        None if gradient is None or edge is None else as_engine(graph, edge, gradient)
        for gradient, edge in zip(found, graph.children[number], strict=True)
    )


def as_engine(graph: Graph, edge: Edge, gradient: Tensor) -> Tensor:
    """A gradient as autograd's engine hands it on along an edge.

    The engine, not the node, adds up what was broadcast, and takes the real part for real numbers.
    """
    is_sparse = gradient.layout not in (torch.strided, torch.jagged)
    dense, like = gradient.to_dense() if is_sparse else gradient, graph.like(edge)
    if dense.is_complex() and not like.dtype.is_complex:
        dense = dense.real
    fits = dense.is_nested or tuple(dense.shape) == tuple(like.shape)
    return dense if fits else dense.sum_to_size(like.shape)
