"""Records what a model was called with, and what its latest call has returned."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradlens.graph.graph import Graph
from gradlens.graph.hooks import NO_MODULE, HookOwner, is_traced, takes_hooks
from gradlens.graph.kinds import Node, kind, kind_of
from gradlens.graph.layer_rules import (
    forget_layer_calls,
    keep_until_backward,
    record_layer_calls,
)
from gradlens.torch_private import (
    UnscriptedHook,
    add_forward_hook,
    forward_hooks,
    remove_forward_hook,
    sequence_number,
    tree_leaves,
    unseen,
)

MAX_CALLS = 2**12
"""How many of the latest calls are kept, a kilobyte each: more than a step's loss consists of."""


MAX_ELEMENTS = 2**22
"""Larger inputs, of 16 MiB in single precision, aren't kept until backward to be compared."""

_INPUTS = "gradlens_inputs"


@dataclass(frozen=True)
class Given:
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

    ``made`` are those of the outputs themselves, each with the number of the node's output.
    ``is_first`` says that no input was computed by layers with parameters.
    """

    inputs: tuple[Given, ...]
    outputs: frozenset[int]
    made: tuple[tuple[int, int], ...] = ()
    is_first: bool = True

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors, each once, without real vectors, which may be single samples."""
        counting = (g for g in self.inputs if len(g.shape) > 1 or not g.is_real)
        return tuple(dict.fromkeys(given.shape for given in counting))


class ModelCalls(HookOwner, UnscriptedHook):
    """A forward hook that records which tensors a module was called with.

    A call belongs to a loss whose graph contains one of its outputs. Nodes are compared by their
    sequence numbers, so that the hook keeps no graph alive. Copies and pickles of the module get
    an empty hook. ``users`` are the objects that need it, and ``of_whole`` those of them whose
    model the module is: of a part of a model, calls with data as input are enough.
    """

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Hashable] = weakref.WeakSet()
        self.of_whole: weakref.WeakSet[Hashable] = weakref.WeakSet()
        self._latest: deque[ModelCall] = deque(maxlen=MAX_CALLS)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_traced() or self._paused or not torch.is_grad_enabled():
            return
        # Classes of tensors may lack what is read: N is unknown then, and the forward pass goes on.
        with unseen(), suppress(Exception):
            if self.of_whole or not any(map(_is_computed, args)):
                self._latest.append(_call(args, kwargs, output))

    def __reduce__(self) -> tuple[type[ModelCalls], tuple[()]]:
        return ModelCalls, ()

    @property
    def latest(self) -> ModelCall | None:
        """The call that was recorded last."""
        return self._latest[-1] if self._latest else None

    def behind(self, numbers: Set[int], leaves: Set[int]) -> list[ModelCall]:
        """The calls whose outputs were computed by nodes with some of these sequence numbers.

        And those with inputs that need a gradient and whose ``id`` is in ``leaves``: a loss
        of derivatives by the inputs needn't depend on the outputs themselves.
        """
        return [
            call
            for call in self._latest
            if call.outputs & numbers
            or (leaves and any(id(given.reference()) in leaves for given in call.inputs))
        ]


def _is_computed(argument: Any) -> bool:
    """Whether layers with parameters have computed a tensor."""
    if not isinstance(argument, Tensor) or not argument.requires_grad:
        return False
    return argument.dim() > 0 and argument.layout == torch.strided


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ModelCall:
    # Most calls have tensors alone, and tree_leaves takes 20 microseconds.
    outputs = [output] if isinstance(output, Tensor) else [*tensors_of(output)]
    plain = not kwargs and all(isinstance(argument, Tensor) for argument in args)
    leaves = args if plain else tree_leaves((args, kwargs), is_leaf=_is_packed)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in given if leaf.dim() and leaf.layout == torch.strided]
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    numbers = frozenset(number for node in nodes for number in _numbers(node))
    made = tuple(each for each in map(made_by, outputs) if each is not None)
    is_first = not any(map(_is_computed, given))
    data = [each for each in tensors if each.grad_fn is None and each.numel() <= MAX_ELEMENTS]
    if nodes and data:
        keep_until_backward(nodes[0], _INPUTS, data)
    return ModelCall(tuple(map(Given.of, tensors)), numbers, made, is_first)


def made_by(tensor: Tensor) -> tuple[int, int] | None:
    """The sequence number of the node that made a tensor, and the number of its output."""
    node = tensor.grad_fn
    return None if node is None else (sequence_number(node), tensor.output_nr)


def _is_packed(value: Any) -> bool:
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
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from _of_attributes(vars(leaf).values())


def _of_attributes(values: Iterable[Any]) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor))


def calls_behind(graph: Graph, model: nn.Module | None) -> list[ModelCall]:
    """The calls of a model that a loss was computed from, by the loss's graph.

    Where the model isn't called as a whole, these are the calls of its parts with data as input.
    """
    if model is None:
        return []
    variables = [graph.nodes[number].variable for number in graph.leaves.values()]
    leaves = {id(each) for each in variables if not isinstance(each, nn.Parameter)}
    numbers = graph.by_sequence_number.keys()
    whole = [call for hook in _hooks_of(model) for call in hook.behind(numbers, leaves)]
    if whole or not all(_hooks_of(part) for part in _parts_of(model)):
        return whole
    hooks = [hook for part in _parts_of(model) for hook in _hooks_of(part)]
    parts = [call for hook in hooks for call in hook.behind(numbers, leaves)]
    return [call for call in parts if call.is_first and call.shapes]


def _parts_of(model: nn.Module) -> list[nn.Module]:
    """A model's children, and those of module lists and dicts, which aren't called themselves."""
    parts = list(model.children())
    for part in model.children():
        if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
            parts += part.children()
    return parts


def _hooks_of(module: nn.Module) -> list[ModelCalls]:
    return [hook for hook in forward_hooks(module) if isinstance(hook, ModelCalls)]


def latest_call(model: nn.Module | None) -> ModelCall | None:
    """The latest call of a model as a whole, if its calls are kept and there was one."""
    hooks = [] if model is None else _hooks_of(model)
    return next((hook.latest for hook in hooks), None)


def keep_calls(model: nn.Module, user: Hashable) -> None:
    """Register the hook on a model and its parts, or use the one that is there."""
    for module in filter(takes_hooks, (model, *_parts_of(model))):
        if not _hooks_of(module):
            add_forward_hook(module, ModelCalls(), with_kwargs=True)
        hook = _hooks_of(module)[0]
        hook.users.add(user)
        if module is model:
            hook.of_whole.add(user)
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
    for module in (model, *_parts_of(model)):
        for hook in _hooks_of(module):
            hook.users.discard(user)
            hook.of_whole.discard(user)
            if not hook.users:
                remove_forward_hook(module, hook)
    if not _hooks_of(model):
        forget_layer_calls(model)


class ModelOutputs(HookOwner, UnscriptedHook):
    """A forward hook that keeps the tensors that its model's latest call has returned.

    It is registered while later calls may be those of a step that needs them, and the tensors are
    released when they are taken. Copies and pickles of the model get an empty hook.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._registered = False
        self._latest: tuple[Tensor, ...] = ()

    def keep_if(self, needed: bool) -> None:
        """Keep what later calls return if that is needed, and release what is kept otherwise."""
        if self._model is None or needed == self._registered:
            return
        self._registered = needed
        if needed:
            add_forward_hook(self._model, self)
        else:
            remove_forward_hook(self._model, self)
            self._latest = ()

    def take(self) -> tuple[Tensor, ...]:
        """The tensors with a graph that the latest call has returned; they are kept no longer."""
        found, self._latest = self._latest, ()
        return found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if is_traced() or self._paused or not torch.is_grad_enabled():
            return
        with (
            unseen(),
            suppress(Exception),
        ):  # of objects that the model returns; the forward pass goes on
            self._latest = tuple(t for t in tensors_of(output) if t.grad_fn is not None)

    def __reduce__(self) -> tuple[type[ModelOutputs], tuple[()]]:
        return ModelOutputs, ()
