"""Per-sample gradients of layers of the user's own, by a rule for their class.

Without a rule, the backward function of an unknown operation is run for one sample at a time. A
rule replaces that for all parameters of a layer at once. Calls of such layers are recorded by a
forward hook, at the node of the graph that made the output, and go with the graph.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from gradlens.graph.hooks import is_traced, without_hooks
from gradlens.graph.undisturbed import buffers_kept, training_kept
from gradlens.numerics.tensors import accumulable
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.torch_private import (
    UnscriptedHook,
    add_hook,
    forward_hooks,
    keeps_graph,
    remove_forward_hook,
    sequence_number,
    tree_leaves,
    tree_map_only,
    unseen,
    versions,
)

LayerRule: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Tensor], Mapping[str, Tensor]]

_RULES: OrderedDict[int, tuple[type[nn.Module], LayerRule]] = OrderedDict()
_CALL = "gradlens_layer_call"
"""Where a call is kept in the metadata of the node that made its output."""


def register_layer_rule(module_class: type[nn.Module], rule: LayerRule) -> RemovableHandle:
    """Set the rule for per-sample gradients of a class of layers and its subclasses.

    ``rule(module, inputs, grad_output)`` returns the gradients of each row of the layer's output,
    ``{name: [rows, *parameter.shape]}`` for each trainable parameter of the module itself; other
    names are left out. Rows are the leading axis of ``grad_output``, the gradient ∂L/∂output.
    ``inputs`` are the arguments of the call, first positional ones, then keyword ones, with tensors
    detached; half precisions come as float32. Neither may be changed in place. The samples of the
    rows are read off the loss's graph, and rows of the same sample are added up.

    The rule applies to models that are extended (``gradlens.extend``, ``Cockpit(model)``) after the
    registration, and to calls that return one tensor. It is checked against autograd, and the
    parameters have no per-sample gradients if it disagrees. A rule of a subclass goes before that
    of its base. The handle's ``remove()`` takes the rule back, also at the end of a ``with`` block.

    Raises:
        TypeError: If ``module_class`` isn't a class of modules.
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise TypeError(f"{module_class!r} is no subclass of torch.nn.Module: pass a layer's class")
    handle = RemovableHandle(_RULES)
    _RULES[handle.id] = (module_class, rule)
    return handle


def rule_of(module: nn.Module) -> LayerRule | None:
    """The rule of the module's class, or of its nearest base class that has one."""
    rules = dict(_RULES.values())
    return next((rules[each] for each in type(module).__mro__ if each in rules), None)


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer that has a rule, which has returned output number ``output`` of a node.

    ``inputs`` are its arguments, the last of them for ``keywords``; their tensors had the given
    ``versions``, and ``origins`` are the sequence numbers of the nodes that made them. Nothing
    refers to the graph, which refers to this.
    """

    module: weakref.ref[nn.Module]
    rule: LayerRule
    inputs: tuple[Any, ...]
    keywords: tuple[str, ...]
    versions: tuple[int, ...]
    origins: tuple[int, ...]
    output: int

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's own trainable parameters."""
        module = self.module()
        named = () if module is None else module.named_parameters(recurse=False)
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    @property
    def title(self) -> str:
        """The name of the rule in messages."""
        rule = getattr(self.rule, "__qualname__", repr(self.rule))
        return f"the layer rule {rule} for {type(self.module()).__name__}"

    def _unchanged_module(self, work: str) -> nn.Module:
        module = self.module()
        if module is None or _versions(self.inputs) != self.versions:
            raise UnavailableError(f"{self.title} can't be {work}: {OVERWRITTEN}")
        return module

    def row_gradients(self, grad_output: Tensor) -> dict[str, Tensor]:
        """What the rule returns; ``UnavailableError`` if it fails."""
        module = self._unchanged_module("applied")
        inputs = tree_map_only(Tensor, _accumulable, self.inputs)
        if not len(grad_output):  # as of an expert that gets no rows
            return {n: grad_output.new_zeros(0, *p.shape) for n, p in self.parameters.items()}
        try:
            with (
                torch.no_grad(),
                buffers_kept(module.modules()),
                training_kept(self.parameters.values()),
            ):
                return dict(self.rule(module, inputs, _accumulable(grad_output)))
        except Exception as error:  # the user's backward pass goes on
            raise UnavailableError(
                f"{self.title} raised {type(error).__name__}: {error}; {REMEDY}"
            ) from error

    def gradients_again(self, grad_output: Tensor) -> dict[str, Tensor]:
        """Gradients of the module's own parameters by a new call and its backward pass.

        Nothing of the user's call, and no hook, is run. ``UnavailableError`` if the call fails.
        """
        module = self._unchanged_module("checked")
        own = {n: accumulable(p).clone().requires_grad_() for n, p in self.parameters.items()}
        inputs = tree_map_only(Tensor, lambda each: _accumulable(each).clone(), self.inputs)
        first = len(inputs) - len(self.keywords)
        keywords = dict(zip(self.keywords, inputs[first:], strict=True))
        try:
            with (
                torch.enable_grad(),
                buffers_kept(module.modules()),
                training_kept(self.parameters.values()),
            ):
                output = functional_call(without_hooks(module), own, inputs[:first], keywords)
                found = torch.autograd.grad(
                    output,
                    [*own.values()],
                    grad_output.to(output.dtype),
                    allow_unused=True,
                    materialize_grads=True,
                )
        except Exception as error:
            text = f"{self.title} can't be checked by autograd ({first_line(error)})"
            raise UnavailableError(text) from error
        return dict(zip(own, found, strict=True))

    def checked(self, name: str, found: Mapping[str, Tensor], grad_output: Tensor) -> Tensor:
        """The rule's gradients of one parameter; ``UnavailableError`` if their shape is wrong."""
        gradients = found.get(name)
        expected = (len(grad_output), *self.parameters[name].shape)
        if not isinstance(gradients, Tensor) or gradients.layout != torch.strided:
            given = ", ".join(repr(key) for key, each in found.items() if isinstance(each, Tensor))
            raise UnavailableError(
                f"{self.title} gives no gradients of {name!r}, only of {given or 'nothing'}; "
                f"{REMEDY}"
            )
        if tuple(gradients.shape) != expected:
            raise UnavailableError(
                f"{self.title} gives gradients of {name!r} of shape {list(gradients.shape)}, which "
                f"should be [rows, *parameter.shape] = {list(expected)}; {REMEDY}"
            )
        return gradients.detach().to(accumulable(grad_output))


OVERWRITTEN = "an in-place operation has overwritten the layer's input"
REMEDY = (
    "correct the rule, or remove it by its handle, to have the gradients computed one sample at a "
    "time"
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _accumulable(tensor: Tensor) -> Tensor:
    return accumulable(tensor) if tensor.is_floating_point() else tensor


def _versions(inputs: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(versions(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


class _Record(UnscriptedHook):
    """A forward hook without state, of which there is one, also in copies and pickles."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if is_traced():
            return
        # Without the call, the layer's parameters are those of any computation.
        with unseen(), suppress(Exception):
            _record_call(module, args, kwargs, output)

    def __reduce__(self) -> str:
        return "_record"


_record = _Record()


def _record_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    rule = rule_of(module)
    if rule is None or not isinstance(output, Tensor):
        return
    arguments = (*args, *kwargs.values())
    leaves = tree_leaves(arguments)
    # Other objects, such as caches, might hold the output, and with it the graph.
    if not all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves):
        return
    made = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)} - {None}
    node: Any = output.grad_fn
    if node is None or node in made or not output.dim() or output.is_complex():
        return
    inputs = tree_map_only(Tensor, Tensor.detach, arguments)
    origins = tuple(sequence_number(origin) for origin in made if origin is not None)
    versions = _versions(inputs)
    reference = weakref.ref(module)
    call = LayerCall(reference, rule, inputs, (*kwargs,), versions, origins, output.output_nr)
    keep_until_backward(node, _CALL, call)


def keep_until_backward(node: Any, key: str, value: Any) -> None:
    """Keep a value with a node, until a backward pass frees the graph's own tensors."""
    if node.metadata.setdefault(key, value) is value:
        node.register_hook(partial(_release, node.metadata, key))


def _release(metadata: MutableMapping[str, Any], key: str, *gradients: object) -> None:
    if not keeps_graph():
        metadata.pop(key, None)


def layer_calls(nodes: Sequence[Any]) -> dict[int, LayerCall]:
    """The calls whose outputs the nodes of a graph made, by the nodes' places."""
    found = {n: node.metadata.get(_CALL) for n, node in enumerate(nodes)} if _RULES else {}
    return {number: call for number, call in found.items() if call is not None}


def layer_call(node: Any) -> LayerCall:
    """The call whose output a node made; ``UnavailableError`` if there is none any more."""
    for call in layer_calls([node]).values():
        return call
    raise UnavailableError("the rule of its layer was removed between forward and backward pass")


def record_layer_calls(model: nn.Module) -> None:
    """Set the hook on the layers that have a rule."""
    for module in model.modules():
        if rule_of(module) is not None and _record not in forward_hooks(module):
            add_hook(module.register_forward_hook, _record, with_kwargs=True, prepend=True)


def forget_layer_calls(model: nn.Module) -> None:
    """Remove the hooks."""
    for module in model.modules():
        remove_forward_hook(module, _record)
