"""Records what a model was called with, and what its latest call has returned."""

from __future__ import annotations

import weakref
from collections import UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradlens.graph.checkpoints import data_of
from gradlens.graph.graph import Graph
from gradlens.graph.hooks import (
    NO_MODULE,
    HookOwner,
    OwnedHook,
    is_traced,
    removal,
    takes_hooks,
)
from gradlens.graph.kinds import Node, kind, kind_of
from gradlens.graph.layer_rules import (
    forget_layer_calls,
    keep_until_backward,
    record_layer_calls,
)
from gradlens.torch_private import (
    UnscriptedHook,
    add_hook,
    forward_hooks,
    remove_forward_hook,
    sequence_number,
    tree_leaves,
    unseen,
)

MAX_CALLS = 2**12
"""How many of the latest calls are kept, a kilobyte each: more than a step's loss consists of."""

LEFT_CALLS = 2**7
"""How many are left when a backward pass is over, since all are compared with each loss's graph."""

MAX_ELEMENTS = 2**22
"""Larger inputs, of 16 MiB in single precision, aren't kept until backward to be compared."""

_INPUTS = "gradlens_inputs"
_PART_INPUTS = "gradlens_part_inputs"


class Given(NamedTuple):
    """A tensor that a module was called with: where it is in memory, and a weak reference.

    Data is kept until the backward pass, as by a loop that holds its batch in variables.
    A tensor that a layer has saved is the same one if it is in the same place in memory. If a
    node has ``made`` it, that is its sequence number, and the number of its output.
    """

    shape: tuple[int, ...]
    storage: int
    address: int
    strides: tuple[int, ...]
    contiguous: bool
    is_real: bool
    made: tuple[int, int] | None
    reference: weakref.ref[Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Given:
        """The description of a tensor."""
        storage, address = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        return cls(
            tuple(tensor.shape),
            storage,
            address,
            tensor.stride(),
            tensor.is_contiguous(),
            tensor.is_floating_point(),
            made_by(tensor),
            weakref.ref(tensor),
        )


@dataclass(frozen=True)
class ModelCall:
    """The tensors of a call, and the sequence numbers of the nodes that computed its outputs.

    ``made`` are those of the outputs themselves, each with the number of the node's output. No
    graph is kept alive. ``indices`` are what may be an order of rows, returned or an argument: they
    give it, or ``None`` if it is no order, or is gone. ``lists`` are the inputs with several axes
    that are in a list, by argument.
    """

    inputs: tuple[Given, ...]
    outputs: frozenset[int]
    made: tuple[tuple[int, int], ...] = ()
    indices: tuple[Callable[[], Tensor | None], ...] = ()
    lists: tuple[tuple[Given, ...], ...] = ()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors, each once, without real vectors, which may be single samples."""
        counting = (g for g in self.inputs if len(g.shape) > 1 or not g.is_real)
        return tuple(dict.fromkeys(given.shape for given in counting))


class ModelCalls(HookOwner, UnscriptedHook):
    """A forward hook that records the calls of a model, and those of its parts before the first.

    ``users`` are the objects that need the hook, and ``outputs`` what the latest call has returned,
    for users that need that. ``watched`` are the parts. Copies and pickles of the model get an
    empty hook.
    """

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Hashable] = weakref.WeakSet()
        self.outputs: MutableMapping[Hashable, tuple[Tensor, ...]] = weakref.WeakKeyDictionary()
        self.whole: deque[ModelCall] = deque(maxlen=MAX_CALLS)
        self.parts: deque[ModelCall] = deque(maxlen=MAX_CALLS)
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._forget_parts: Callable[[], object] = int

    def watch_parts(self, model: nn.Module) -> None:
        """Record calls of the model's parts, too, until the model is called as a whole."""
        parts = [part for part in _parts_of(model) if takes_hooks(part)]
        self.watched.update(parts)
        hook = OwnedHook(self, ModelCalls._record_part)
        handles = [add_hook(part.register_forward_hook, hook, with_kwargs=True) for part in parts]
        self._forget_parts = removal(self, handles)

    def close(self, model: nn.Module) -> None:
        """Remove all hooks."""
        remove_forward_hook(model, self)
        self._forget_parts()

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if is_traced() or self._paused or not torch.is_grad_enabled():
            return
        # Classes of tensors may lack what is read: N is unknown then, and the forward pass goes on.
        with unseen(), suppress(Exception):
            returned = [*_returned(output)]
            outputs = [t for t in returned if isinstance(t, Tensor) and t.grad_fn is not None]
            indices = _indices(output, returned) if len(outputs) < len(returned) else []
            self.whole.append(_call(args, kwargs, outputs, indices))
            for user in [*self.outputs]:
                self.outputs[user] = tuple(outputs)
            self._forget_parts()

    def _record_part(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Of a part of a model, calls with data as input are enough."""
        if torch.is_grad_enabled() and not any(each.requires_grad for each in _given(args, kwargs)):
            outputs = [each for each in tensors_of(output) if each.grad_fn is not None]
            call = _call(args, kwargs, outputs, key=_PART_INPUTS)
            self.parts += [call] if call.shapes else []

    def failed(self, error: Exception) -> None:
        """The forward pass goes on, as above."""

    def __reduce__(self) -> tuple[type[ModelCalls], tuple[()]]:
        return ModelCalls, ()


def _call(
    args: Any,
    kwargs: Any,
    outputs: Sequence[Tensor],
    indices: Sequence[Tensor] = (),
    key: str = _INPUTS,
) -> ModelCall:
    tensors = _given(args, kwargs)
    data = [t for t in tensors if t.grad_fn is None and t.numel() <= MAX_ELEMENTS]
    if outputs and (data or indices):
        keep_until_backward(outputs[0].grad_fn, key, [*data, *indices])
    vectors = [each for each in data if each.dim() == 1 and len(each) and _are_integers(each)]
    orders = [partial(_order_of, weakref.ref(each)) for each in indices]
    orders += [partial(_order_of, weakref.ref(each), is_argument=True) for each in vectors]
    return ModelCall(
        tuple([Given.of(tensor) for tensor in tensors]),
        frozenset([number for tensor in outputs for number in _numbers(tensor.grad_fn)]),
        tuple([each for each in map(made_by, outputs) if each is not None]),
        tuple(orders),
        tuple(
            [_items(each) for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
        ),
    )


def _given(args: Any, kwargs: Any) -> list[Tensor]:
    """The strided tensors with axes among the arguments of a call, or in containers there."""
    # Most calls have tensors alone, and tree_leaves takes 20 microseconds.
    is_plain = not kwargs and all(isinstance(argument, Tensor) for argument in args)
    leaves = args if is_plain else map(_as_tensor, _leaves((args, kwargs), is_packed))
    return [t for t in leaves if t is not None and t.dim() and t.layout == torch.strided]


def _items(values: Sequence[Any]) -> tuple[Given, ...]:
    return tuple([Given.of(each) for each in _given(values, {}) if each.dim() > 1])


def _leaves(
    value: Any, is_leaf: Callable[[Any], bool] | None = None, visited: set[int] | None = None
) -> Iterator[Any]:
    """The leaves of containers, also of those in dataclasses, namespaces and ``UserDict``."""
    visited = set() if visited is None else visited
    for leaf in tree_leaves(value, is_leaf=is_leaf):
        has_fields = is_dataclass(leaf) and not isinstance(leaf, (type, nn.Module))
        if not (has_fields or isinstance(leaf, (SimpleNamespace, UserDict))):
            yield leaf
        elif id(leaf) not in visited:  # objects may refer to each other
            visited.add(id(leaf))
            yield from _leaves(_fields(leaf), is_leaf, visited)


def _fields(value: Any) -> list[Any]:
    if hasattr(value, "__dict__"):
        return [*vars(value).values()]
    return [getattr(value, each.name, None) for each in fields(value)]


def _as_tensor(value: Any) -> Tensor | None:
    """A tensor, or one for the numbers of an array, in its memory if that is possible."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        return None
    is_shared = value.flags.writeable and min(value.strides, default=0) >= 0
    if not is_shared and value.size > MAX_ELEMENTS:
        return None  # the copy wouldn't be kept, and others could get its memory
    try:
        return torch.from_numpy(value if is_shared else value.copy())
    except (TypeError, ValueError):  # such as texts, or numbers in another order of bytes
        return None


def made_by(tensor: Tensor) -> tuple[int, int] | None:
    """The sequence number of the node that made a tensor, and the number of its output."""
    node = tensor.grad_fn
    return None if node is None else (sequence_number(node), tensor.output_nr)


def is_packed(value: Any) -> bool:
    """Sequences of different lengths, whose tensors have no row for each."""
    return isinstance(value, PackedSequence)


def _numbers(node: Node) -> Iterator[int]:
    """Sequence numbers of the node of an output, and of those that it views.

    An output that is overwritten in place gets another node in place of its views.
    """
    yield sequence_number(node)
    while kind_of(kind(node)).is_view and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        yield sequence_number(node)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors in what a model has returned: a tensor, a container, or an object with fields."""
    yield from (leaf for leaf in _returned(output) if isinstance(leaf, Tensor))


def _returned(output: Any, is_leaf: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """All leaves of what a model has returned."""
    for leaf in [output] if isinstance(output, Tensor) else _leaves(output, is_leaf):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            yield leaf
        else:
            yield from _leaves([*vars(leaf).values()], is_leaf)


def _indices(output: Any, leaves: Sequence[Any]) -> list[Tensor]:
    """What of a model's output may be an order of rows: tensors, arrays, and lists of numbers."""
    tensors = [each for each in map(_as_tensor, leaves) if each is not None]
    found = [tensor for tensor in tensors if _may_be_order(tensor)]
    if any(map(_is_number, leaves)):
        found += [_vector(leaf) for leaf in _returned(output, _are_numbers) if _are_numbers(leaf)]
    return found


def _may_be_order(tensor: Tensor) -> bool:
    """Whether a tensor may be an order: integers, or a vector of numbers of another dtype."""
    if tensor.requires_grad or tensor.layout != torch.strided or tensor.is_nested:
        return False
    is_real_vector = tensor.is_floating_point() and tensor.numel() == max(tensor.shape, default=0)
    return 1 < tensor.numel() <= MAX_ELEMENTS and (_are_integers(tensor) or is_real_vector)


def _are_integers(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.grad_fn is None
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 1 and all(map(_is_number, value))


def _vector(numbers: Sequence[Any]) -> Tensor:
    if all(isinstance(each, Tensor) for each in numbers):
        return torch.stack([*numbers])
    return torch.tensor(numbers, device="cpu")


def _order_of(reference: weakref.ref[Tensor], is_argument: bool = False) -> Tensor | None:
    """The numbers of a tensor, if it is there and has each of 0, 1, 2, ... once.

    Arguments that have these in order are numbers of rows, and leave them where they are.
    """
    tensor = reference()
    if tensor is None:
        return None
    numbers = tensor.detach().flatten().cpu().double()
    if float(numbers.min()) or float(numbers.max()) != len(numbers) - 1:
        return None  # before a long vector is sorted
    places = torch.arange(len(numbers), dtype=numbers.dtype, device="cpu")
    is_order = torch.equal(numbers.sort().values, places)
    leaves_all = is_argument and torch.equal(numbers, places)
    return numbers.long() if is_order and not leaves_all else None


def say_an_order(calls: Iterable[ModelCall]) -> bool:
    """Whether any of the calls has got or returned what may be an order of its rows."""
    return any(each() is not None for call in calls for each in call.indices)


def calls_behind(graph: Graph, model: nn.Module | None) -> list[ModelCall]:
    """The calls of a model that a loss was computed from, by the loss's graph.

    Where the model isn't called as a whole, these are the calls of its parts with data as input.
    """
    hook = _hook_of(model)
    if model is None or hook is None:
        return []
    whole = _behind(graph, hook.whole)
    if whole or not all(part in hook.watched for part in _parts_of(model)):
        return whole
    return _behind(graph, hook.parts)


def _behind(graph: Graph, calls: Iterable[ModelCall]) -> list[ModelCall]:
    """The calls whose outputs were computed by nodes of a graph, by their sequence numbers.

    And those with inputs that need a gradient and are its leaves: a loss of derivatives by the
    inputs needn't depend on the outputs themselves.
    """
    variables = [graph.nodes[number].variable for number in graph.leaves.values()]
    leaves = {id(each) for each in variables if not isinstance(each, nn.Parameter)}
    numbers = graph.by_sequence_number.keys()
    return [
        call
        for call in calls
        if not call.outputs.isdisjoint(numbers)
        or (leaves and any(id(given.reference()) in leaves for given in call.inputs))
    ]


def places_of_inputs(graph: Graph, calls: Sequence[ModelCall]) -> Hashable:
    """Where in a graph the model's inputs are, as they are in memory, and its calls' outputs.

    Graphs of the same structure may differ in that, as where rows are shuffled later on, and in the
    inputs' shapes.
    """
    every = enumerate(given for call in calls for given in call.inputs)
    storages = {given.storage: (n, given.address) for n, given in every}

    def place(read: Tensor | None) -> Hashable:
        storage = None if read is None else read.untyped_storage().data_ptr()
        if read is None or storage not in storages:
            return None
        n, address = storages[storage]
        return n, read.data_ptr() - address, read.shape, read.stride()

    reading = (
        number
        for number, edges in enumerate(graph.children)
        if None in edges and kind_of(graph.kinds[number]).data
    )
    inputs = tuple((number, place(data_of(graph.nodes[number]))) for number in reading)
    made = [(graph.by_sequence_number.get(n, -1), o) for call in calls for n, o in call.made]
    return inputs, tuple(made), tuple([call.shapes for call in calls])


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """A model's children, and those of module lists and dicts, which aren't called themselves."""
    parts = list(model.children())
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            parts += part.children()
    return parts


def _hook_of(model: nn.Module | None) -> ModelCalls | None:
    hooks = [] if model is None else forward_hooks(model)
    return next((hook for hook in hooks if isinstance(hook, ModelCalls)), None)


def latest_call(model: nn.Module | None, back: int = 1) -> ModelCall | None:
    """The latest call of a model, if its calls are kept and there was one.

    Of a model that isn't called as a whole, it is that of a part with data. With ``back``, it is
    the first of so many latest calls.
    """
    hook = _hook_of(model)
    calls = () if hook is None else hook.whole or hook.parts
    return calls[-back] if len(calls) >= back else None


def forget_earlier_calls(model: nn.Module | None) -> None:
    """A backward pass is over: forget the calls of a model that were long before it."""
    hook = _hook_of(model)
    for calls in () if hook is None else (hook.whole, hook.parts):
        while len(calls) > LEFT_CALLS:
            calls.popleft()


def keep_outputs(model: nn.Module | None, user: Hashable, needed: bool) -> None:
    """Keep what later calls return if a user needs that, and release what is kept otherwise."""
    hook = _hook_of(model)
    if hook is not None and needed:
        hook.outputs.setdefault(user, ())
    elif hook is not None:
        hook.outputs.pop(user, None)


def take_outputs(model: nn.Module | None, user: Hashable) -> tuple[Tensor, ...]:
    """The tensors with a graph that the latest call has returned; they are kept no longer."""
    hook = _hook_of(model)
    if hook is None or user not in hook.outputs:
        return ()
    found, hook.outputs[user] = hook.outputs[user], ()
    return found


def keep_calls(model: nn.Module, user: Hashable) -> None:
    """Register the hook on a model and its parts, or use the one that is there."""
    hook = _hook_of(model)
    if hook is None and takes_hooks(model):
        hook = ModelCalls()
        add_hook(model.register_forward_hook, hook, with_kwargs=True)
    if hook is not None:
        if not hook.users:
            hook.watch_parts(model)
        hook.users.add(user)
    record_layer_calls(model)


AnyModule = TypeVar("AnyModule", bound=nn.Module)


def extend(model: AnyModule) -> AnyModule:
    """Record what a model is called with, for per-sample gradients, and return the model.

    The hooks don't change what the model computes. Call it once, before the forward pass. A model
    that is passed to a cockpit needs it not. ``TypeError`` if it isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(NO_MODULE.format(kind=type(model).__name__))
    keep_calls(model, user=model)
    return model


def forget_calls(model: nn.Module, user: Hashable) -> None:
    """Remove the hooks that no other object needs."""
    hook = _hook_of(model)
    if hook is not None:
        hook.users.discard(user)
        hook.outputs.pop(user, None)
        if hook.users:
            forget_earlier_calls(model)
            return
        hook.close(model)
    forget_layer_calls(model)
