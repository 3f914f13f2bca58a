"""Where BackPACK's second-order rules hold.

BackPACK's own hooks must be on model and loss before the forward pass, cost time at every step, and
forbid in-place operations. Without them a chain of modules is run once more, on copies that share
the parameters. The input of the first layer and the masks of dropout are those of the step's own
forward pass.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from backpack.extensions.backprop_extension import BackpropExtension
from torch import Tensor, nn

from gradlens.backpack_adapter.context import extended_by_backpack
from gradlens.backpack_adapter.layer_calls import (
    LayerCall,
    in_order,
    kept_calls,
    own_parameters,
    stored_inputs,
    trainable_parameters,
)
from gradlens.curvature.hessian import HessianOperator, check_loss
from gradlens.curvature.products import Products, normal_like
from gradlens.graph.graph import Graph
from gradlens.graph.hooks import without_hooks
from gradlens.graph.passes import gradients_at
from gradlens.history.coverage import few
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import ChannelNorm, LossModule, has_parts

_ROUNDING = 100
"""Rounding errors that the products of equal matrices may differ by, relative to the whole product.

Each comes from passes through the network and back that sum in other orders. A trade-off: a block
whose part of the product is smaller than these isn't checked.
"""

_CURVED = (nn.Sigmoid, nn.Tanh, nn.ELU, nn.SELU, nn.LogSigmoid)
"""Activations with a second derivative, for which BackPACK's Hessian has further matrices."""


@dataclass(frozen=True)
class LossCall:
    """One call of an extended loss module: its inputs, still in the graph, and ∂L/∂output."""

    module: LossModule
    inputs: tuple[Any, ...]
    grad_output: Tensor


@dataclass(frozen=True)
class Calls:
    """The calls of layers by module, and those of loss modules, from the loss on."""

    of: Mapping[nn.Module, Sequence[LayerCall]] = field(default_factory=dict)
    of_losses: Sequence[LossCall] = ()


def calls_behind(loss: Tensor, model: nn.Module | None) -> Calls:
    """The calls that the graph of a loss keeps, with the gradients at their outputs.

    A loss module that BackPACK itself has extended keeps none there, but stores its own.
    """
    check_loss(loss)
    graph = Graph(loss)
    numbers = graph.by_sequence_number
    kept = [
        (call, [(numbers.get(made, -1), output) for made, output in places])
        for node in reversed(graph.nodes)
        for call, places in kept_calls(node)
    ]
    places = [edge for _, edges in kept for edge in edges]
    found = gradients_at(graph, [(graph.root, torch.ones_like(loss))], places)
    of: dict[nn.Module, list[LayerCall]] = {}
    of_losses: list[LossCall] = []
    for pending, edges in kept:
        call = pending.completed(tuple(found.get(edge) for edge in edges))
        of.setdefault(call.module, []).append(call)
        gradient = call.grad_outputs[0]
        if isinstance(call.module, LossModule) and gradient is not None:
            of_losses.append(LossCall(call.module, in_order(call), gradient.detach()))
    if not of_losses and (model is None or extended_by_backpack(model)):
        of_losses = [
            LossCall(module, stored_inputs(module), gradient)
            for module, gradient in extended_modules(graph, loss)
            if isinstance(module, LossModule)
        ]
    return Calls(of, of_losses)


def extended_modules(graph: Graph, loss: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """The modules that BackPACK has extended, in the order of their calls, and their gradients.

    BackPACK stores the output of its latest call on each. Nothing leads from a graph to them but a
    backward pass in which others' hooks would run, too, so that they are looked for among all
    objects.
    """
    every = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    modules = [each for each in every if not has_parts(each)]
    outputs = [(each, vars(each).get("output")) for each in modules]
    edges = {
        (graph.number_of(output), output.output_nr): module
        for module, output in outputs
        if isinstance(output, Tensor) and graph.number_of(output) >= 0
    }
    found = gradients_at(graph, [(graph.root, torch.ones_like(loss))], edges)
    gradients = {edge: found.get(edge) for edge in sorted(edges)}
    return [(edges[edge], each.detach()) for edge, each in gradients.items() if each is not None]


def loss_calls_at(loss: Tensor) -> list[LossCall]:
    """The calls of loss modules that have returned the loss itself; none if it was made of them."""
    check_loss(loss)
    ones = torch.ones_like(loss)
    calls = [call.completed((ones,)) for call, _ in kept_calls(loss.grad_fn)]
    return [
        LossCall(call.module, in_order(call), ones)
        for call in calls
        if isinstance(call.module, LossModule)
    ]


@final
@dataclass(frozen=True, eq=False)
class BackpackGraph:
    """A loss's graph that BackPACK's second-order extensions can be run on.

    Its ``loss`` may differ from the user's (``check_graph``). ``links`` are the modules in the
    order of their calls, the loss module last, each with the inputs and the output that BackPACK
    stores on it, and with ∂(loss module's output)/∂(its output). ``factor`` is what the loss
    module's output is multiplied by in the user's loss; the results of extensions are without it.
    """

    loss: Tensor
    links: Sequence[tuple[Any, Tensor]]
    factor: float = 1.0

    def run(self, extension: BackpropExtension) -> None:
        """Run an extension, which saves its results on the parameters.

        Raises ``UnavailableError`` where BackPACK has no rule.
        """
        try:
            with torch.no_grad(), _explained():
                for module, gradient in reversed(self.links):
                    extension(module, (), (gradient,))  # type: ignore[arg-type]
        finally:
            for module, _ in self.links:  # what is handed on from module to module
                vars(module.output).pop(extension.savefield, None)

    @property
    def bytes_for_hessian(self) -> int:
        """About what BackPACK's backpropagated matrices of the exact Hessian take."""
        *layers, last = [module for module, _ in self.links]
        outputs = last.input0
        curved: list[Tensor] = [each.output for each in layers if type(each) in _CURVED]
        columns = outputs[0].numel() + 2 * sum(output[0].numel() for output in curved)
        widest = max(module.output.numel() for module in layers)
        return int(columns * widest * outputs.element_size())


def check_graph(graph: BackpackGraph, hessian: HessianOperator, seed: int) -> None:
    """Raise ``UnavailableError`` unless the graph's loss has the same Hessian, but for rounding.

    Different matrices have the same product with a random vector with probability zero. Products
    are compared parameter by parameter, to half of their digits, so that a parameter of little
    curvature counts as much as the others. The error is also raised for NaN or Inf.
    """
    products = Products(hessian)
    vector = normal_like(products.like, np.random.default_rng(seed))
    expected = products(vector)
    other = HessianOperator(graph.loss, hessian.parameters, hessian.scale)
    difference = other.multiply(vector).to(expected) - expected
    noise = _ROUNDING * products.eps * expected.norm()
    agree = [
        difference[block].norm() <= products.eps**0.5 * expected[block].norm() + noise
        for block in hessian.slices.values()
    ]
    if not bool(torch.stack(agree).all()):
        raise UnavailableError(
            "the loss is not what the loss module returns for the network's modules one after "
            "another: something is added to it, or done between them, or dropout has met zeros"
        )


def backpack_graph(
    loss: Tensor, parameters: Mapping[str, nn.Parameter], model: nn.Module | None, calls: Calls
) -> BackpackGraph:
    """The graph behind ``loss``; ``UnavailableError`` where BackPACK's rules don't hold."""
    call = _the_loss_call(calls)
    with _explained():
        if extended_by_backpack(call.module) and (model is None or extended_by_backpack(model)):
            return _extended(loss, call)
        if model is not None:
            return _chain(parameters, model, calls, call)
    raise UnavailableError(
        "pass the model to the cockpit, or extend model and loss module by BackPACK's extend"
    )


def _extended(loss: Tensor, call: LossCall) -> BackpackGraph:
    """Modules that BackPACK itself has extended, with what it has stored on them."""
    with torch.enable_grad():
        again = without_hooks(call.module).forward(*call.inputs)
    return BackpackGraph(again, extended_modules(Graph(loss), loss))


def _chain(
    parameters: Mapping[str, nn.Parameter], model: nn.Module, calls: Calls, loss_call: LossCall
) -> BackpackGraph:
    """Copies of modules that the network calls one after another."""
    modules = _behind_first_layer(model, parameters)
    layer_calls = [_the_call(module, calls) for module in modules]
    (x,) = _tensors(layer_calls[0])
    links = []
    with torch.enable_grad():
        for module, call in zip(modules, layer_calls, strict=True):
            links.append(_link(module, (x,), call))
            x = links[-1].output
        if x.shape != loss_call.inputs[0].shape:
            raise UnavailableError("something is done between the last module and the loss")
        links.append(_link(loss_call.module, (x, *loss_call.inputs[1:]), None))
        output = links[-1].output
        factor = float(loss_call.grad_output)
        loss = output * factor
        gradients = torch.autograd.grad(output, [link.output for link in links], retain_graph=True)
    return BackpackGraph(loss, [*zip(links, gradients, strict=True)], factor)


def _the_loss_call(calls: Calls) -> LossCall:
    if len(calls.of_losses) != 1:
        raise UnavailableError(
            "the loss must come from one loss module that was passed to the cockpit "
            "(Cockpit(..., loss_function=loss_function)), or that has been extended; here "
            f"from {len(calls.of_losses)}"
        )
    (call,) = calls.of_losses
    if call.grad_output.numel() != 1:
        raise UnavailableError("the loss module returns one loss for each sample, not their sum")
    ignored = getattr(call.module, "ignore_index", None)
    if ignored is not None and bool((call.inputs[1] == ignored).any()):
        raise UnavailableError("BackPACK has no rule for ignored targets")
    if isinstance(call.module, nn.CrossEntropyLoss) and call.inputs[1].is_floating_point():
        raise UnavailableError("BackPACK has no rule for probabilities as targets")
    return call


def _behind_first_layer(
    model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> list[nn.Module]:
    """Modules of a sequential network, from the first trainable layer on."""
    modules = list(_sequence(model))
    places = [place for place, module in enumerate(modules) if trainable_parameters(module)]
    owned = [p for module in modules for p in own_parameters(module).values()]
    if len({id(p) for p in owned}) < len(owned):
        raise UnavailableError("layers share a parameter")
    elsewhere = [n for n, p in parameters.items() if id(p) not in {id(own) for own in owned}]
    if elsewhere:
        raise UnavailableError(f"no layer has {few(elsewhere)} as its own")
    if not places:
        raise UnavailableError("no layer is trained")
    return modules[places[0] :]


def _sequence(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _sequence(child)
    elif any(True for _ in module.children()):
        raise UnavailableError(f"{type(module).__name__} has a forward of its own")
    else:
        _check(module)
        yield module


def _the_call(module: nn.Module, calls: Calls) -> LayerCall | None:
    """The recorded call of a trainable layer, or of dropout in train mode; ``None`` of others."""
    dropping = isinstance(module, nn.Dropout) and module.training
    if not trainable_parameters(module) and not dropping:
        return None
    found = calls.of.get(module, [])
    if len(found) != 1:
        raise UnavailableError(f"{type(module).__name__} was called {len(found)} times")
    (call,) = found
    if call.unusable or call.autocast is not None:
        raise UnavailableError(call.unusable or "autocast changes the precision of its layers")
    if len(call.grad_outputs) != 1:
        raise UnavailableError(f"{type(module).__name__} returns more than one tensor")
    return call


def _check(module: nn.Module) -> None:
    """Refuse modules that a second run would change, or for which BackPACK's rules are wrong."""
    name = type(module).__name__
    if not type(module).__module__.startswith("torch.nn."):
        raise UnavailableError(f"BackPACK has no rule for {name}")
    if isinstance(module, ChannelNorm) and module.training:
        raise UnavailableError(f"{name} in train mode is not a function of each sample")
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise UnavailableError(f"BackPACK has no rule for padding_mode={module.padding_mode!r}")


def _tensors(call: LayerCall | None) -> tuple[Tensor, ...]:
    assert call is not None
    arguments = (*call.args, *call.kwargs.values())
    if len(arguments) != 1 or not isinstance(arguments[0], Tensor):
        raise UnavailableError(f"{type(call.module).__name__} takes more than one tensor")
    return arguments


def _link(module: nn.Module, inputs: Sequence[Any], call: LayerCall | None) -> Any:
    """A copy of the module that has stored ``input0``, ... and ``output`` as BackPACK does."""
    copy: Any = without_hooks(module)
    copy.inplace = False
    for index, argument in enumerate(inputs):
        setattr(copy, f"input{index}", argument)
    if call is not None and call.output is not None:
        kept = (call.output != 0).to(call.output.dtype)
        copy.output = inputs[0] * (kept / (1 - copy.p))
    else:
        copy.output = copy.forward(*inputs)
    return copy


@contextmanager
def _explained() -> Iterator[None]:
    """Turn the many errors of BackPACK and torch for a missing rule into ``UnavailableError``."""
    try:
        yield
    except UnavailableError:
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UnavailableError(f"BackPACK says: {first}") from error
