"""What backward is called on, as a multiple of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlens.hooks.backward_call import BackwardCall
from gradlens.hooks.module_hooks import on_gradient
from gradlens.numerics.unavailable import UnavailableError
from gradlens.per_sample.gradients import TIMES_ZERO
from gradlens.per_sample.loss_scale import loss_scale
from gradlens.quantities.step import gradient_scale

LINEAR = {
    f"{name}Backward{n}"
    for name in ("Add", "Alias", "Clone", "Expand", "Mean", "Neg", "Reshape", "Select", "Squeeze",
                 "Stack", "Sub", "Sum", "ToCopy", "UnsafeView", "Unsqueeze", "View")
    for n in (0, 1)
}  # fmt: skip
"""Nodes that are linear in all of their inputs."""
LINEAR_IN_ONE = {"MulBackward0", "DivBackward0"}
"""Nodes that are linear in the first input, if no other one depends on the parameters."""


class LossWeight:
    """Finds the factor between the loss and what backward is called on in a context.

    It is 0.5 for ``(loss / 2).backward()``. ``loss`` is what the user has passed, and otherwise
    what backward is called on; the step's loss is ``loss`` over ``loss_scale=``.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.loss: Tensor | None = info.get("loss")
        self._info = info
        self._calls = 0
        self._is_multiple = True
        self._found: list[Tensor] = []
        self._handle: RemovableHandle | None = None

    def call(self) -> BackwardCall:
        """A context for the backward pass."""
        return BackwardCall(self._called_on)

    def start(self) -> None:
        """Set a hook on the loss, if it was passed; passes of gradlens's own are over."""
        if self.loss is not None and self.loss.requires_grad:
            self._handle = on_gradient(self.loss, self._receive)

    def stop(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _called_on(self, root: Tensor) -> None:
        self._calls += 1
        if self.loss is None:
            self.loss = root
            self.start()
        self._is_multiple = is_multiple(root, self.loss)
        if self._calls == 1:  # those of torch.autograd.grad
            self._found.clear()

    def _receive(self, gradient: Tensor) -> None:
        self._found.append(gradient.detach().sum() * loss_scale(self._info))

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
        """The factor between the loss and what the optimizer minimises, without a scaler's.

        ``UnavailableError`` if that isn't a constant multiple of the loss.
        """
        if not self._is_multiple:
            raise UnavailableError(NO_MULTIPLE)
        return self.factor / gradient_scale(self._info)


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
        if node is None or node.name() not in LINEAR | LINEAR_IN_ONE:
            return False
        (first, *others) = node.next_functions
        if node.name() in LINEAR_IN_ONE and all(edge[0] is not None for edge in (first, *others)):
            return False
        if node.name() == "DivBackward0" and first[0] is None:
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
