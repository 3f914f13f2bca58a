"""Per-sample gradients of a cockpit's steps: from entering a context to their reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch._dynamo import OptimizedModule

from gradlens.history.coverage import Coverage, few
from gradlens.hooks.backward_call import BackwardCall
from gradlens.hooks.layer_calls import Watch, taps_of
from gradlens.hooks.model_calls import forget_calls, keep_calls
from gradlens.per_sample.batch_parts import BatchPart, exchanged, joined
from gradlens.per_sample.batchnorm import BatchNormPolicy
from gradlens.per_sample.context import UNSEEN
from gradlens.per_sample.gradients import Gradients, Plans, Setting
from gradlens.per_sample.labelling.batch import Batch, LossReduction
from gradlens.per_sample.labelling.planner import COMPILED
from gradlens.per_sample.reducing import Reducer
from gradlens.reductions import Reduction


class GradientTracking:
    """What is known from step to step.

    ``look_seconds`` is what the latest step has spent on a look that later ones don't need,
    ``waiting`` are the shares of micro-batches whose last one is still to come, ``group`` the
    processes that train together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        model: nn.Module | None,
        loss_reduction: LossReduction,
        batchnorm: BatchNormPolicy = "coupled",
        group: dist.ProcessGroup | None = None,
        compiled: nn.Module | None = None,
        loss_function: nn.Module | None = None,
    ) -> None:
        self.parameters = parameters
        self.model = model
        self.loss_reduction: LossReduction = loss_reduction
        self.batchnorm: BatchNormPolicy = batchnorm
        self.group = group
        self.setting = Setting(parameters, model, loss_reduction, batchnorm, called=compiled)
        self.plans_of_outputs = Plans()
        self._called = model if compiled is None else compiled
        if self._called is not None:
            keep_calls(self._called)
        self._watch = Watch()
        self._may_sleep = True
        for watched in (model, loss_function):
            if watched is not None:
                self._watch.over(watched)
        self._compiled = compiled
        self.look_seconds = 0.0
        self.waiting: list[BatchPart] = []
        self._waiting_for: int | None = None

    def begin_step(self, global_step: int) -> str:
        """Forget micro-batches whose step never ended; a remark, if there are any."""
        self.look_seconds = 0.0
        left = len(self.waiting) if self._waiting_for != global_step else 0
        before, self._waiting_for = self._waiting_for, global_step
        if not left:
            return ""
        self.waiting.clear()
        return LEFT_OVER.format(count=left, step=before)

    def expect(self, needed: bool) -> None:
        """Watch forward passes to come if they may be ``needed``, as far as can be foreseen."""
        self._watch.awake = needed or not self._may_sleep

    def stay_awake(self) -> None:
        """Watch each forward pass from now on, since there is no telling what is needed when."""
        self._may_sleep, self._watch.awake = False, True

    @property
    def has_slept(self) -> bool:
        """Whether the latest forward pass was not watched."""
        return self.model is not None and any(tap.slept for tap in taps_of(self.model))

    def close(self) -> None:
        """Watch no forward pass any more."""
        self._watch.awake = False
        if self._called is not None:
            forget_calls(self._called)

    def at_step(
        self,
        reductions: Iterable[Reduction],
        retain: bool,
        info: Mapping[str, Any],
        accumulating: bool,
    ) -> StepGradients:
        """Those of the backward pass to come."""
        return StepGradients(self, set(reductions), retain, info, accumulating)

    @property
    def is_first_process(self) -> bool:
        """Whether this process speaks for its group."""
        return self.group is None or dist.get_rank(self.group) == 0

    def compiled_prefixes(self) -> tuple[str, ...]:
        """How the names of parameters begin that belong to compiled modules."""
        if self._compiled is not None:
            return ("",)
        named = [] if self.model is None else self.model.named_modules()
        compiled = [name for name, module in named if is_compiled(module)]
        return tuple(f"{name}." if name else "" for name in compiled)

    def joins(self, accumulating: bool) -> bool:
        """Whether a backward pass is only a part of what a step is about."""
        return accumulating or bool(self.waiting) or self.group is not None


class StepGradients:
    """Per-sample gradients of one backward pass.

    ``reducer`` holds their reductions after ``finish``, and ``batch`` says what the batch is.
    ``joined`` is the whole batch, where it has parts.
    """

    def __init__(
        self,
        tracking: GradientTracking,
        reductions: set[Reduction],
        retain: bool,
        info: Mapping[str, Any],
        accumulating: bool,
    ) -> None:
        self._tracking = tracking
        self._info = info
        self._joins = tracking.joins(accumulating)
        self.accumulating = accumulating
        self.gradients = Gradients(tracking.setting, info)
        self.reducer = Reducer(
            tracking.parameters,
            self.gradients.collector,
            reductions,
            retain,
            waits=self._joins,
        )
        self.joined: BatchPart | None = None

    @property
    def batch(self) -> Batch:
        """The batch whose values there are: the whole one, where it has parts."""
        found = self.gradients.batch
        if self.joined is None:
            return found
        return replace(found, samples=self.joined.batch_size, known_by=PARTS + found.known_by)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Collect gradients in the backward pass of the loss, or of what backward is called on."""
        loss = self._info.get("loss")
        if loss is not None:
            self._timed(self.gradients.begin, loss)
        with BackwardCall(lambda tensor: self._timed(self.gradients.called_on, tensor)):
            try:
                yield
            finally:
                self.gradients.end()

    def _timed(self, begin: Callable[[Tensor], None], tensor: Tensor) -> None:
        start = time.perf_counter()
        begin(tensor)
        if self.gradients.labelled:
            self._tracking.look_seconds += time.perf_counter() - start

    @property
    def error(self) -> Exception | None:
        """The first exception of a reduction."""
        return self.reducer.error

    def finish(self, individual_losses: Tensor | None) -> None:
        """Reduce what is left, and join the parts of the batch if this was the last one."""
        self.reducer.finish()
        if not self._joins:
            return
        tracking = self._tracking
        share = self._share(individual_losses)
        if self.accumulating:
            tracking.waiting.append(share)
            return
        shares, tracking.waiting = [*tracking.waiting, share], []
        whole = joined(shares, tracking.loss_reduction)
        if tracking.group is not None:
            device = next(iter(tracking.parameters.values())).device
            everyone = exchanged(whole, device, tracking.group)
            whole = joined(everyone, tracking.loss_reduction)
        self.reducer.take_joined(whole.operators)
        self.joined = whole

    def _share(self, individual_losses: Tensor | None) -> BatchPart:
        batch, loss = self.gradients.batch, self._info.get("loss")
        return BatchPart(
            batch.samples,
            batch.factor,
            None if loss is None else float(loss.detach()),
            individual_losses,
            dict(self.reducer.waiting),
            self._missing,
            self.gradients.coupling,
        )

    @property
    def _missing(self) -> Mapping[str, str]:
        """Why parameters have no per-sample gradients."""
        if self.joined is not None:
            return self.joined.missing
        found, compiled = self.gradients.collector.unavailable, self._tracking.compiled_prefixes()
        absent = [name for name in self._tracking.parameters if name not in self.reducer.covered]
        unseen = {n: COMPILED if n.startswith(compiled) else UNSEEN for n in absent}
        return {name: found.get(name, reason) for name, reason in unseen.items()}

    @property
    def refusal(self) -> str:
        """Why nothing is covered."""
        if self.reducer.covered or not self._missing:
            return ""
        name, reason = next(iter(self._missing.items()))
        return f"no parameter has per-sample gradients; of {name}: {reason}"

    @property
    def coverage(self) -> Coverage:
        """The ledger's entry for this step."""
        coupling = self.gradients.coupling if self.joined is None else self.joined.coupling
        return Coverage(
            self._missing,
            tuple(sorted(coupling)),
            self._tracking.batchnorm,
            self.batch.samples,
            self.batch.known_by,
        )

    def remarks(self) -> Iterator[str]:
        """What the user should know of this step."""
        factor = self.gradients.batch.factor
        if factor > 1 and "scaler" not in self._info:
            yield SCALED.format(factor=f"{factor:.6g}")
        if self.gradients.beside and not self._joins:
            yield BESIDE.format(names=few(self.gradients.beside))

    def release(self) -> None:
        """Let go of all gradients."""
        self.gradients.end()
        self.reducer.stop()


def process_group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The processes that a model is trained by, if it is wrapped for several."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        group: dist.ProcessGroup = model.process_group
        return group
    return None


LEFT_OVER = (
    "{count} micro-batches of step {step} have no values, since none of them was the last "
    "(accumulating=False)"
)
SCALED = (
    "backward was called on {factor} times the loss. Per-sample gradients are those of the loss "
    "itself; GradNorm and others that look at p.grad see it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
SLEPT = (
    "nothing was expected at this step, and its layers were not watched in the forward pass; they "
    "are from now on. Where steps come irregularly, run it inside cockpit.forward(step)"
)
PARTS = "all parts of the batch; of each, "
BESIDE = (
    "the samples' gradients don't add up to p.grad of {names}: the loss has a term that isn't a "
    "sum over samples (a regulariser). Quantities describe the part that comes from the samples"
)


def is_compiled(module: nn.Module) -> bool:
    """Whether calling the module runs what ``torch.compile`` has made of it."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside ``DistributedDataParallel`` or ``torch.compile``."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    if isinstance(model, OptimizedModule):
        return unwrapped(model._orig_mod)
    return model
