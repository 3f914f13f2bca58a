"""What forward passes run with: hooks on layers, compiled code or not, and records of calls.

A forward pass runs before the context of its step is entered, so that it is prepared for the steps
that may come next. What it doesn't need costs it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn

from gradlens.backpack_adapter.layer_hooks import HookInstaller
from gradlens.cockpit.boundary import Boundary
from gradlens.cockpit.budget import Budget
from gradlens.cockpit.forecast import Forecast, may_hold
from gradlens.cockpit.layers import LayerTracking
from gradlens.cockpit.run import Run
from gradlens.graph.model_calls import ModelOutputs, forget_calls, keep_calls, keeps_calls
from gradlens.graph.uncompiled import EagerCalls, uncompiled_calls
from gradlens.quantities.quantity import Quantity


class ForwardPasses:
    """Prepares forward passes for the steps that may come next.

    ``model`` is the network inside the ``wrapped`` one that the user calls.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        wrapped: nn.Module | None,
        loss_function: nn.Module | None,
        quantities: Sequence[Quantity],
        forecast: Forecast,
        budget: Budget | None,
        boundary: Boundary,
        run: Run,
    ) -> None:
        self.forecast = forecast
        self.layer_hooks = HookInstaller([m for m in (model, loss_function) if m is not None])
        self.eager_calls = EagerCalls([m for m in (wrapped, loss_function) if m is not None])
        self.outputs = ModelOutputs(model)
        self.layers = LayerTracking(model, quantities, forecast, boundary)
        self._model = model
        self._quantities = quantities
        self._budget = budget
        self._boundary = boundary
        self._run = run
        if model is not None:  # from which the number of samples is read
            keep_calls(model, user=self.layer_hooks)

    def expect(self, steps: Sequence[int], needs_next_step: bool, has_work: bool) -> None:
        """One of these steps comes next; without any, it is unknown which.

        Something that waits ``needs_next_step``, or there ``has_work`` for it whatever is tracked.
        """
        self.forecast.keep(steps)
        if self._budget is not None:
            self._spare(self._budget, steps, has_work)
        self.eager_calls.run_if(self.forecast.needs_graph(steps) or needs_next_step)
        # Compiled code is made anew where hooks come and go, and isn't slowed down by any.
        stay = self.eager_calls.has_modules
        needed = self.forecast.needs_layer_hooks(steps) or needs_next_step
        self.layer_hooks.install_if(needed or stay or not steps)
        self.outputs.keep_if(self.forecast.needs_outputs(() if stay else steps))

    def _spare(self, budget: Budget, steps: Sequence[int], has_work: bool) -> None:
        """Keep no calls in forward passes of steps for which the budget has no means."""
        is_active = (may_hold(lambda n: bool(self.forecast.active_at(n)), step) for step in steps)
        active = not steps or any(map(budget.watches, steps)) or any(is_active)
        started = all(quantity.has_started for quantity in self._quantities)
        is_idle = budget.expect(steps, has_work=active or has_work or not started)
        if self._model is None or self.eager_calls.has_modules:
            return
        if is_idle == keeps_calls(self._model, user=self.layer_hooks):
            (forget_calls if is_idle else keep_calls)(self._model, user=self.layer_hooks)

    @contextmanager
    def of(self, global_step: int) -> Iterator[None]:
        """A context for a step's forward pass, which doesn't run compiled if a quantity needs it.

        There is a note if the context can't have this effect.
        """
        with ExitStack() as stack:
            if self.eager_calls.needed:
                note = partial(self._run.note, global_step)
                with self._boundary.contain("running a forward pass uncompiled", note):
                    stack.enter_context(uncompiled_calls())
            stack.enter_context(self.layers.forward(global_step))
            yield

    def close(self) -> None:
        """Remove all hooks, and forget all calls."""
        self.layers.close()
        self.layer_hooks.close()
        self.eager_calls.close()
        self.outputs.keep_if(False)
        if self._model is not None:
            forget_calls(self._model, user=self.layer_hooks)
