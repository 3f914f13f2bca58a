"""Factors between the loss, what backward is called on, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from gradlens.graph.hooks import on_gradient
from gradlens.graph.kinds import is_linear
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import unseen


class LossFactor:
    """Finds the factor between the step's loss and what backward is called on in a context.

    It is 0.5 for ``(loss / 2).backward()``. ``loss`` is what the user has passed, and otherwise
    what backward is called on; the step's loss is ``loss`` over ``loss_scale=``. Subclasses are
    told what becomes known: ``begin``, ``called_on``, ``receive_factor`` and ``end``.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.loss: Tensor | None = info.get("loss")
        self._is_given = self.loss is not None
        self._scale = loss_scale(info)
        self._calls = 0
        self._is_multiple = True
        self._found: list[Tensor | float] = []
        self._handle: RemovableHandle | None = None

    @contextmanager
    def finding(self) -> Iterator[None]:
        """A context for the backward pass."""
        if self.loss is not None:
            with unseen():
                self._follow(self.loss)
        try:
            with BackwardCall(self._intercept):
                yield
        finally:
            self._remove_hook()
            self.end()

    def begin(self, loss: Tensor) -> None:
        """The loss is known, and backward hasn't been called yet."""

    def called_on(self, root: Tensor) -> None:
        """Backward is about to be called on something that isn't plainly a multiple of the loss."""

    def receive_factor(self, factor: Tensor) -> Tensor | float:
        """The factor is known, and backward has reached nothing but the loss."""
        return factor

    def end(self) -> None:
        """The backward passes are over."""

    def _follow(self, loss: Tensor) -> None:
        self.loss = loss
        self._remove_hook()
        self.begin(loss)
        if loss.requires_grad:  # a hook now, since passes of gradlens's own are over
            self._handle = on_gradient(loss, self._receive)

    def _remove_hook(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _intercept(self, root: Tensor) -> None:
        self._calls += 1
        if self._calls == 1:  # those of torch.autograd.grad
            self._found.clear()
        if not self._is_given:
            self._follow(root)
        elif self.loss is not None:
            self._is_multiple = is_multiple(root, self.loss)
            if not self._is_multiple:
                self.called_on(root)

    def _receive(self, gradient: Tensor) -> None:
        with unseen():
            self._found.append(self.receive_factor(gradient.detach().sum() * self._scale))

    @property
    def factor(self) -> float:
        """∂(what backward is called on)/∂(the step's loss).

        ``UnavailableError`` unless it is one number.
        """
        if self._calls > 1 or (not self._calls and len(self._found) > 1):
            raise UnavailableError(SEVERAL)
        if not self._found:
            raise UnavailableError(NONE)
        factor = float(self._found[0])
        if not factor:
            raise UnavailableError(TIMES_ZERO)
        return factor

    @property
    def weight(self) -> float:
        """The factor between the loss and what the optimizer minimises, times a scaler's.

        ``UnavailableError`` if that isn't a constant multiple of the loss.
        """
        if not self._is_multiple:
            raise UnavailableError(NO_MULTIPLE)
        return self.factor


def is_multiple(root: Tensor, loss: Tensor) -> bool:
    """Whether a tensor is a constant multiple of the loss, up to a constant.

    Only what is plain from the graph between the two is one.
    """
    seen: set[torch.autograd.graph.Node] = set()
    waiting = [(root.grad_fn, root.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if node is loss.grad_fn and output == loss.output_nr:
            continue
        if node is None or not is_linear(node, up_to_constant=True):
            return False
        if node not in seen:
            seen.add(node)
            waiting += [edge for edge in node.next_functions if edge[0] is not None]
    return True


SEVERAL = (
    "several backward passes went through the loss, and it isn't known of which multiple of it the "
    "gradient is: add the losses and call backward once, or give each its own context"
)
NONE = (
    "no backward pass went through the loss inside the context: call backward there, and pass what "
    "it is called on as loss=..."
)
NO_MULTIPLE = (
    "backward was called on something that isn't a multiple of the loss that was passed, such as "
    "one with further terms: pass what backward is called on as loss=..."
)


def loss_scale(info: Mapping[str, Any]) -> float:
    """The factor between the step's loss and ``info["loss"]``; 1 if it isn't given.

    Frameworks divide the losses of micro-batches by their number, and multiply them by a gradient
    scaler's scale, before anybody else can read them.
    """
    return float(info.get("loss_scale", 1.0))


def unscaled_loss(info: Mapping[str, Any]) -> Tensor | None:
    """The step's loss, with its graph; ``None`` if it wasn't passed."""
    loss: Tensor | None = info.get("loss")
    scale = loss_scale(info)
    if loss is None or scale == 1:
        return loss
    with torch.enable_grad():
        return loss / scale


def joined_loss(parts: Sequence[tuple[Tensor, bool, int]], is_mean: bool) -> Tensor:
    """The loss of a step, from those of its micro-batches.

    ``parts`` are each micro-batch's loss, whether it is that of the micro-batch alone, and how many
    samples it is of, 0 if that isn't known. They add up as their gradients do, unless each is the
    mean over a micro-batch alone.
    """
    if len(parts) == 1:
        return parts[0][0]
    losses = torch.stack([loss for loss, _, _ in parts])
    if not is_mean or not all(alone for _, alone, _ in parts):
        return losses.sum()
    counts = losses.new_tensor([count or 1 for _, _, count in parts])
    return (losses * counts).sum() / counts.sum()


class BackwardCall(TorchFunctionMode):
    """A context that calls ``begin`` with the tensor whose ``backward`` is called, before it runs.

    Calls of ``torch.autograd.backward`` and ``torch.autograd.grad`` are not intercepted.
    """

    def __init__(self, begin: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._begin = begin

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.backward:
            with unseen():
                if args[0].numel() == 1:
                    self._begin(args[0])
        return func(*args, **(kwargs or {}))


TIMES_ZERO = (
    "backward was called on zero times the loss, so that nothing is left of the samples' gradients"
)
