"""Ways in which a training loop makes one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.watch import Pass

if TYPE_CHECKING:
    from benchmarks.fuzz.loop import Loop

Act = Callable[["Loop", Pass], None]


class UsersError(Exception):
    """An exception of the user's own."""


def backward(factor: float | None = None, **options: Any) -> Act:
    """Of the loss, or of a multiple of it."""
    return lambda loop, found: loop.backward(
        found.loss if factor is None else found.loss * factor, **options
    )


def nothing(loop: Loop, found: Pass) -> None:
    """Of what others do there."""


class Way:
    """A forward pass, what happens before, inside and after the context, updates, and the end."""

    def __init__(
        self,
        *inside: Act,
        before: Act = nothing,
        after: Act = nothing,
        last: Act = nothing,
        forward: Mapping[str, bool] = {},
        referenced: bool = True,
        updates: int = 1,
    ) -> None:
        self.inside, self.before, self.after, self.last = inside, before, after, last
        self.forward, self.referenced, self.updates = forward, referenced, updates

    def __call__(self, loop: Loop, step: int) -> None:
        found = loop.forward(step, **self.forward)
        self.before(loop, found)
        with loop.watched(step, found, referenced=self.referenced):
            for act in self.inside or (backward(),):
                act(loop, found)
        self.after(loop, found)
        for _ in range(self.updates):
            loop.update()
        self.last(loop, found)


plain = Way()


def zero(loop: Loop, found: Pass) -> None:
    loop.zero_grad()


def update(loop: Loop, found: Pass) -> None:
    loop.update()


def clip(loop: Loop, found: Pass) -> None:
    nn.utils.clip_grad_value_(loop.trainable, 0.1)


def raises(loop: Loop, found: Pass) -> None:
    raise UsersError


def evaluate(loop: Loop, found: Pass) -> None:
    with torch.no_grad():
        loop.remember("evaluated", loop.model(found.inputs))


def forget_gradients(loop: Loop, found: Pass) -> None:
    for parameter in loop.trainable:
        parameter.grad = None


def of_some_inputs(loop: Loop, found: Pass) -> None:
    wanted = [parameter for parameter in loop.trainable if parameter.requires_grad][-2:]
    loop.backward(found.loss, inputs=wanted)


def by_grad(loop: Loop, found: Pass) -> None:
    """``torch.autograd.grad`` instead of ``backward``."""
    wanted = [parameter for parameter in loop.trainable if parameter.requires_grad]
    gradients = torch.autograd.grad(found.loss, wanted, allow_unused=True)
    for parameter, gradient in zip(wanted, gradients, strict=True):
        parameter.grad = gradient


def penalise(loop: Loop, found: Pass) -> None:
    """A penalty on the gradient of the loss."""
    weight = loop.model.head.weight
    gradient = torch.autograd.grad(found.loss, weight, create_graph=True)[0]
    found.loss = found.loss + 0.1 * gradient.square().sum()


def two_losses_one_passed(loop: Loop, found: Pass) -> None:
    torch.autograd.backward([found.loss, found.outputs.square().mean()])


def vector(loop: Loop, found: Pass) -> None:
    """Backward is called on the outputs, with a gradient."""
    found.outputs.backward(torch.ones_like(found.outputs))


def raises_in_backward(loop: Loop, found: Pass) -> None:
    handle = loop.model.head.weight.register_hook(lambda gradient: raises(loop, found))
    try:
        loop.backward(found.loss)
    finally:
        handle.remove()


def hook_outputs(loop: Loop, found: Pass) -> None:
    """A hook that changes the gradient of the outputs, which keep theirs."""
    found.outputs.retain_grad()
    found.outputs.register_hook(lambda gradient: gradient * 0.5)


def remember_at_outputs(loop: Loop, found: Pass) -> None:
    loop.remember("at outputs", found.outputs.grad)


def remember_at_inputs(loop: Loop, found: Pass) -> None:
    loop.remember("at inputs", found.inputs.grad)


def divide(loop: Loop, found: Pass) -> None:
    """A framework has divided the loss by four before it is passed."""
    found.shown, found.loss_scale = found.loss / 4, 1 / 4


def reshape(loop: Loop, found: Pass) -> None:
    """A loss of shape [1]."""
    found.loss = found.loss.reshape(1)


# Ways of another form.


def grad_before(loop: Loop, step: int) -> None:
    """A gradient at the outputs, before the context and in it."""
    found = loop.forward(step)
    first = torch.autograd.grad(found.loss, found.outputs, retain_graph=True)[0]
    with loop.watched(step, found):
        second = torch.autograd.grad(found.loss, found.outputs, retain_graph=True)[0]
        loop.backward(found.loss)
    loop.remember("gradients at outputs", first + second)
    loop.update()


def in_parts(loop: Loop, step: int, said: bool = True, count: int = 2) -> None:
    """Two micro-batches, each in a context of the same step, or one that no other one follows."""
    is_mean = said and count == 2 and loop.recipe.reduction == "mean"
    for part in range(count):
        found = loop.forward(step, zeroing=part == 0)
        with loop.watched(step, found, accumulating=said and part == 0, referenced=False):
            loop.backward(found.loss * 0.5 if is_mean else found.loss)
    if count == 2:
        loop.update()


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


def without_context(loop: Loop, step: int) -> None:
    loop.backward(loop.forward(step).loss)
    loop.update()


def raises_and_goes_on(loop: Loop, step: int) -> None:
    """The step is tried again after an exception."""
    found = loop.forward(step)
    try:
        with loop.watched(step, found, referenced=False):
            raise UsersError
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


def forward_inside(loop: Loop, step: int) -> None:
    """The forward pass runs inside the context, which is given no loss."""
    with loop.watched(step, None, referenced=False):
        loop.backward(loop.forward(step).loss)
    loop.update()


def forward_twice(loop: Loop, step: int) -> None:
    """The first forward pass is for nothing."""
    loop.forward(step)
    plain(loop, step)


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


WAYS: dict[str, Callable[[Loop, int], None]] = {
    "plain": plain,
    "graph retained": Way(backward(retain_graph=True)),
    "backward twice": Way(backward(retain_graph=True), backward(), referenced=False),
    "backward again outside": Way(backward(retain_graph=True), after=backward()),
    "graph created": Way(backward(create_graph=True), last=forget_gradients),
    "of some inputs": Way(of_some_inputs, referenced=False),
    "by grad": Way(by_grad, referenced=False),
    "grad before": grad_before,
    "penalised": Way(before=penalise, referenced=False),
    "accumulated": in_parts,
    "accumulated unsaid": partial(in_parts, said=False),
    "accumulated half": partial(in_parts, count=1),
    "two losses": two_losses,
    "loss of two": loss_of_two,
    "two losses one passed": Way(two_losses_one_passed, referenced=False),
    "vector": Way(vector, referenced=False),
    "without backward": Way(nothing, referenced=False),
    "without context": without_context,
    "raises before": Way(raises, referenced=False),
    "raises after": Way(backward(), raises, referenced=False),
    "raises in backward": Way(raises_in_backward, referenced=False),
    "raises and goes on": raises_and_goes_on,
    "interrupted": interrupted,
    "without update": Way(updates=0),
    "two updates": Way(updates=2),
    "update inside": Way(backward(), update, referenced=False, updates=0),
    "clipped": Way(after=clip),
    "clipped inside": Way(backward(), clip),
    "zeroed inside": Way(zero, backward(), forward={"zeroing": False}),
    "zeroed before the end": Way(backward(), update, zero, referenced=False, updates=0),
    "forward inside": forward_inside,
    "evaluated inside": Way(evaluate, backward()),
    "evaluated between": Way(before=evaluate),
    "forward twice": forward_twice,
    "hooked outputs": Way(before=hook_outputs, after=remember_at_outputs, referenced=False),
    "trained inputs": Way(forward={"inputs_need_gradients": True}, last=remember_at_inputs),
    "scaled": Way(backward(0.5), referenced=False),
    "divided": Way(lambda loop, found: loop.backward(found.shown), before=divide),
    "weighted by zero": Way(backward(0.0), referenced=False),
    "in eval mode": in_eval_mode,
    "by closure": by_closure,
    "other model inside": other_model_inside,
    "detached": detached,
    "one element": Way(before=reshape),
}
