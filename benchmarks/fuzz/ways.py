"""Ways in which a training loop makes one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.fuzz.loop import Loop


class UsersError(Exception):
    """An exception of the user's own."""


@contextlib.contextmanager
def made(loop: Loop, step: int, referenced: bool = True, **forward: bool) -> Iterator[Any]:
    """A forward pass in front of the context, and an update behind it."""
    found = loop.forward(step, **forward)
    with loop.watched(step, found, referenced=referenced):
        yield found
    loop.update()


def plain(loop: Loop, step: int) -> None:
    with made(loop, step) as found:
        loop.backward(found.loss)


def graph_retained(loop: Loop, step: int) -> None:
    with made(loop, step) as found:
        loop.backward(found.loss, retain_graph=True)
    loop.remember("graph", found.loss.grad_fn is not None)


def backward_twice(loop: Loop, step: int) -> None:
    with made(loop, step, referenced=False) as found:
        loop.backward(found.loss, retain_graph=True)
        loop.backward(found.loss)


def backward_again_outside(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found):
        loop.backward(found.loss, retain_graph=True)
    loop.backward(found.loss)
    loop.update()


def graph_created(loop: Loop, step: int) -> None:
    with made(loop, step) as found:
        loop.backward(found.loss, create_graph=True)
    for parameter in loop.trainable:
        parameter.grad = None


def of_some_inputs(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    wanted = [parameter for parameter in loop.trainable if parameter.requires_grad][-2:]
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss, inputs=wanted)
    loop.update()


def by_grad(loop: Loop, step: int) -> None:
    """``torch.autograd.grad`` instead of ``backward``."""
    with made(loop, step, referenced=False) as found:
        wanted = [parameter for parameter in loop.trainable if parameter.requires_grad]
        gradients = torch.autograd.grad(found.loss, wanted, allow_unused=True)
        for parameter, gradient in zip(wanted, gradients, strict=True):
            parameter.grad = gradient


def grad_before(loop: Loop, step: int) -> None:
    """A gradient at the outputs, before the context and in it."""
    found = loop.forward(step)
    first = torch.autograd.grad(found.loss, found.outputs, retain_graph=True)[0]
    with loop.watched(step, found):
        second = torch.autograd.grad(found.loss, found.outputs, retain_graph=True)[0]
        loop.backward(found.loss)
    loop.remember("gradients at outputs", first + second)
    loop.update()


def penalised(loop: Loop, step: int) -> None:
    """A penalty on the gradient of the loss."""
    found = loop.forward(step)
    weight = loop.model.head.weight
    gradient = torch.autograd.grad(found.loss, weight, create_graph=True)[0]
    found.loss = found.loss + 0.1 * gradient.square().sum()
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss)
    loop.update()


def accumulated(loop: Loop, step: int) -> None:
    """Two micro-batches."""
    for part in (0, 1):
        found = loop.forward(step, zeroing=part == 0)
        with loop.watched(step, found, accumulating=part == 0, referenced=False):
            loop.backward(found.loss * 0.5 if loop.recipe.reduction == "mean" else found.loss)
    loop.update()


def accumulated_unsaid(loop: Loop, step: int) -> None:
    """Two micro-batches, each in a context of the same step."""
    for part in (0, 1):
        found = loop.forward(step, zeroing=part == 0)
        with loop.watched(step, found, referenced=False):
            loop.backward(found.loss)
    loop.update()


def accumulated_half(loop: Loop, step: int) -> None:
    """A micro-batch that no other one follows."""
    found = loop.forward(step)
    with loop.watched(step, found, accumulating=True, referenced=False):
        loop.backward(found.loss)


def two_losses(loop: Loop, step: int) -> None:
    """Backward is called on each of two losses; their sum is passed."""
    found = loop.forward(step)
    penalty = found.outputs.square().mean()
    first, found.loss = found.loss, found.loss + penalty
    with loop.watched(step, found, referenced=False):
        loop.backward(first, retain_graph=True)
        loop.backward(penalty)
    loop.update()


def loss_of_two(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    decay = torch.stack([p.square().sum().abs().double() for p in loop.trainable]).sum()
    with loop.watched(step, found):
        loop.backward(found.loss + 0.01 * decay.to(found.loss.dtype))
    loop.update()


def two_losses_one_passed(loop: Loop, step: int) -> None:
    with made(loop, step, referenced=False) as found:
        torch.autograd.backward([found.loss, found.outputs.square().mean()])


def vector(loop: Loop, step: int) -> None:
    """Backward is called on the outputs, with a gradient."""
    with made(loop, step, referenced=False) as found:
        found.outputs.backward(torch.ones_like(found.outputs))


def without_backward(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        pass


def without_context(loop: Loop, step: int) -> None:
    loop.backward(loop.forward(step).loss)
    loop.update()


def raises_before(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        raise UsersError("before backward")


def raises_after(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss)
        raise UsersError("after backward")


def raises_in_backward(loop: Loop, step: int) -> None:
    def hook(gradient: Tensor) -> None:
        raise UsersError("in backward")

    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        handle = loop.model.head.weight.register_hook(hook)
        try:
            loop.backward(found.loss)
        finally:
            handle.remove()


def raises_and_goes_on(loop: Loop, step: int) -> None:
    """The step is tried again after an exception."""
    found = loop.forward(step)
    try:
        with loop.watched(step, found, referenced=False):
            raise UsersError("once")
    except UsersError:
        pass
    plain(loop, step)


def interrupted(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    try:
        with loop.watched(step, found, referenced=False):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        loop.remember("interrupted", True)


def without_update(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found):
        loop.backward(found.loss)


def two_updates(loop: Loop, step: int) -> None:
    plain(loop, step)
    loop.update()


def update_inside(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss)
        loop.update()


def clipped(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found):
        loop.backward(found.loss)
    nn.utils.clip_grad_value_(loop.trainable, 0.1)
    loop.update()


def clipped_inside(loop: Loop, step: int) -> None:
    with made(loop, step) as found:
        loop.backward(found.loss)
        nn.utils.clip_grad_value_(loop.trainable, 0.1)


def zeroed_inside(loop: Loop, step: int) -> None:
    with made(loop, step, zeroing=False) as found:
        loop.zero_grad()
        loop.backward(found.loss)


def zeroed_before_the_end(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss)
        loop.update()
        loop.zero_grad()


def forward_inside(loop: Loop, step: int) -> None:
    """The forward pass runs inside the context, which is given no loss."""
    with loop.watched(step, None, referenced=False):
        loop.backward(loop.forward(step).loss)
    loop.update()


def evaluated_inside(loop: Loop, step: int) -> None:
    with made(loop, step) as found:
        with torch.no_grad():
            loop.remember("inside", loop.model(found.inputs))
        loop.backward(found.loss)


def evaluated_between(loop: Loop, step: int) -> None:
    """A pass without gradients between the forward pass and the context."""
    found = loop.forward(step)
    with torch.no_grad():
        loop.remember("between", loop.model(found.inputs))
    with loop.watched(step, found):
        loop.backward(found.loss)
    loop.update()


def forward_twice(loop: Loop, step: int) -> None:
    """The first forward pass is for nothing."""
    loop.forward(step)
    plain(loop, step)


def hooked_outputs(loop: Loop, step: int) -> None:
    """A hook that changes the gradient of the outputs, which keep theirs."""
    found = loop.forward(step)
    found.outputs.retain_grad()
    found.outputs.register_hook(lambda gradient: gradient * 0.5)
    with loop.watched(step, found, referenced=False):
        loop.backward(found.loss)
    loop.remember("at outputs", found.outputs.grad)
    loop.update()


def trained_inputs(loop: Loop, step: int) -> None:
    """The inputs need gradients, too."""
    with made(loop, step, inputs_need_gradients=True) as found:
        loop.backward(found.loss)
    loop.remember("at inputs", found.inputs.grad)


def scaled(loop: Loop, step: int) -> None:
    """Backward is called on half of the loss that is passed."""
    with made(loop, step, referenced=False) as found:
        loop.backward(found.loss * 0.5)


def divided(loop: Loop, step: int) -> None:
    """A framework has divided the loss by four before it is passed."""
    found = loop.forward(step)
    found.shown, found.loss_scale = found.loss / 4, 1 / 4
    with loop.watched(step, found):
        loop.backward(found.shown)
    loop.update()


def weighted_by_zero(loop: Loop, step: int) -> None:
    with made(loop, step, referenced=False) as found:
        loop.backward(found.loss * 0.0)


def in_eval_mode(loop: Loop, step: int) -> None:
    loop.model.eval()
    try:
        plain(loop, step)
    finally:
        loop.model.train()


def by_closure(loop: Loop, step: int) -> None:
    """The context is entered in the closure of the optimizer."""

    def closure() -> Tensor:
        found = loop.forward(step)
        with loop.watched(step, found, referenced=False):
            loop.backward(found.loss)
        return found.loss

    loop.update(closure)


def other_model_inside(loop: Loop, step: int) -> None:
    found = loop.forward(step)
    other = nn.Linear(2, 2)
    with loop.watched(step, found):
        other(torch.randn(3, 2)).sum().backward()
        loop.backward(found.loss)
    loop.remember("other", other.weight.grad)
    loop.update()


def detached(loop: Loop, step: int) -> None:
    """The loss that is passed has no graph."""
    found = loop.forward(step)
    loss, found.loss = found.loss, found.loss.detach()
    with loop.watched(step, found, referenced=False):
        loop.backward(loss)
    loop.update()


def one_element(loop: Loop, step: int) -> None:
    """A loss of shape [1]."""
    found = loop.forward(step)
    found.loss = found.loss.reshape(1)
    with loop.watched(step, found):
        loop.backward(found.loss)
    loop.update()


WAYS: dict[str, Callable[[Loop, int], None]] = {
    name.replace("_", " "): function
    for name, function in vars().copy().items()
    if isinstance(function, FunctionType) and function is not made
}
"""All functions of this module but ``made``, by their name in words."""
