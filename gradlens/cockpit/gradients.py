"""Per-sample gradients of a tracked step: from entering its context to their reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradlens.cockpit.model import changed_parameters
from gradlens.gradients.gradients import Gradients, Setting
from gradlens.gradients.loss_factor import loss_scale, unscaled_loss
from gradlens.gradients.per_sample_gradients import UNSEEN
from gradlens.gradients.reduce import Reducer
from gradlens.graph.loss import Batch
from gradlens.history.coverage import Coverage, few
from gradlens.numerics.formulas import inner_test_error
from gradlens.numerics.host import on_host
from gradlens.numerics.shards import has_nonzero
from gradlens.numerics.strata import Drawn, count
from gradlens.numerics.unavailable import Contain
from gradlens.observers.observer import Outcome
from gradlens.operators.operator import GradientOperator
from gradlens.parts.assembly import BatchAssembly, Whole, need_gradients
from gradlens.parts.kept import KeptGradients, smaller
from gradlens.parts.part import BatchPart, Results
from gradlens.quantities.step import REMOVED
from gradlens.reductions import Deviations, Reduction
from gradlens.samples.planner import UNUSED


class StepGradients:
    """Per-sample gradients of one backward pass, and their reductions after ``finish``.

    ``reductions`` are of the whole batch, and ``own`` ones of this backward pass.
    ``labelling_seconds`` is the time spent on labelling the graph, which most steps don't need.
    ``whole`` is the batch, where it has several parts and this is the last one.
    """

    def __init__(
        self,
        setting: Setting,
        assembly: BatchAssembly,
        reductions: Sequence[Reduction],
        own: Sequence[Reduction],
        retain: bool,
        projections: Drawn | None,
        info: Mapping[str, Any],
        accumulating: bool,
        contain: Contain,
        needs_losses: bool,
    ) -> None:
        self._setting = setting
        self._assembly = assembly
        self._info = info
        self._reductions = reductions
        self._own = own
        self._projections = projections
        self._is_part = assembly.has_parts(accumulating)
        self._accumulating = accumulating
        self._contain = contain
        self.labelling_seconds = 0.0
        self._weight = 0.0
        self.whole: Whole | None = None
        self._gradients = Gradients(setting, info, needs_losses)
        self._of_part = assembly.part_reductions(reductions, accumulating)
        of_batch = self._of_part.values() if self._is_part else reductions
        self._reducer = Reducer(
            setting.parameters,
            self._gradients.collector,
            dict.fromkeys([*of_batch, *own]),
            retain=retain and not self._is_part,
            keep=self._keep(retain, accumulating),
            contain=contain,
            buffer=setting.buffer,
        )

    def _keep(
        self, retain: bool, accumulating: bool
    ) -> Callable[[GradientOperator], GradientOperator] | None:
        """What is made of operators that are kept until all parts of the batch are there."""
        if not self._is_part or not (retain or need_gradients(self._reductions)):
            return None
        return smaller if self._assembly.is_one_of_several(accumulating) else lambda each: each

    @property
    def batch(self) -> Batch:
        """The batch, all of its parts together."""
        found = self._gradients.batch
        if self.whole is None:
            return found
        return replace(found, samples=self.whole.part.samples, known_by=PARTS + found.known_by)

    @property
    def part_samples(self) -> int | None:
        """The number of samples of this part of the batch; ``None`` if it isn't known."""
        return self._gradients.batch.samples

    @property
    def loss_factor(self) -> float:
        """∂(what backward is called on)/∂loss, as the loss was passed."""
        return self._gradients.batch.factor / loss_scale(self._info)

    @property
    def expects_losses(self) -> bool:
        """Whether the losses of single samples will be read off the loss's graph."""
        return self._gradients.expects_losses

    def losses(self) -> Tensor:
        """ℓₙ of this part of the batch, from the loss's graph; ``UnavailableError`` without."""
        return self._gradients.losses()

    def begin(self, loss: Tensor) -> None:
        """Find the samples of the loss, before backward is called."""
        self._timed(self._gradients.begin, loss)

    def called_on(self, root: Tensor) -> None:
        """Backward is about to be called, though the loss was passed."""
        self._timed(self._gradients.called_on, root)

    def receive_factor(self, factor: float) -> None:
        """Collect gradients from now on, in the backward pass that has reached the loss."""
        self._gradients.receive_factor(factor)
        self._weight = factor

    @property
    def are_complete(self) -> bool:
        """Whether the backward pass has reached all parameters."""
        return self._reducer.has_seen_all

    def end(self) -> None:
        """Remove the hooks on the loss's graph."""
        self._gradients.end()

    def _timed(self, begin: Callable[[Tensor], None], tensor: Tensor) -> None:
        start = time.perf_counter()
        with self._contain("finding the samples of the loss", self._refuse_all):
            # Unsharded parameters exist from the first forward pass on, which may be over only now.
            self._reducer.start(self._setting.leaves)
            begin(tensor)
        if self._gradients.planned:
            self.labelling_seconds += time.perf_counter() - start

    def _refuse_all(self, reason: str) -> None:
        self._gradients.collector.refuse_all(self._setting.parameters, reason)

    def finish(self, individual_losses: Tensor | None, without_losses: str) -> None:
        """Reduce what is left, and the whole batch if this was the last of its parts.

        ``without_losses`` is the reason why there are no ``individual_losses``.
        """
        self._reducer.finish()
        if not self._is_part:
            return
        part = self._part(individual_losses, without_losses)
        operators = self._reducer.take_kept()
        self._assembly.add(part, operators, self._reductions, self._accumulating, self._contain)
        if not self._accumulating:
            self.whole = self._assembly.whole(self._reductions, self._contain)

    def _part(self, individual_losses: Tensor | None, without_losses: str) -> BatchPart:
        batch, loss, reducer = self._gradients.batch, unscaled_loss(self._info), self._reducer
        return BatchPart(
            batch.samples,
            self._weight,
            1,
            None if loss is None else float(loss.detach()),
            individual_losses,
            without_losses,
            Results(
                {key: reducer.values[each] for key, each in self._of_part.items()},
                {k: reducer.failed[r] for k, r in self._of_part.items() if r in reducer.failed},
            ),
            frozenset(reducer.covered),
            self.missing,
            self._gradients.coupling,
            projections=None if self._accumulating else self._projections,
        )

    def for_step(self) -> dict[str, Any]:
        """What ``Step`` has of per-sample gradients, by the names of its fields."""
        return {
            "batch_size": self.batch.samples,
            "reduced": self.values,
            "uncovered": self.uncovered,
            "failed": self.failed,
            "lacking": self.lacking,
            "missing": self.missing,
        }

    def outcome(self, error: BaseException | None) -> Outcome:
        """What observers get of this backward pass, also if an ``error`` has come of it."""
        if self._own:
            self._reducer.finish()
        given = self._own if self._is_part else (*self._reductions, *self._own)
        values, failed = self._reducer.values, self._reducer.failed
        known = {each: values[each] for each in given if each not in failed}
        reasons = (*(failed[each] for each in self._own if each in failed), *self.missing.values())
        return Outcome(error, known, self.part_samples, next(iter(reasons), ""))

    @property
    def values(self) -> Mapping[Reduction, Mapping[str, Any]]:
        """By reduction and parameter name."""
        return self._reducer.values if self.whole is None else self.whole.values

    @property
    def failed(self) -> Mapping[Reduction, str]:
        """Reasons why reductions have no values."""
        return self._reducer.failed if self.whole is None else self.whole.failed

    @property
    def retained(self) -> KeptGradients:
        """Operators for projections on the update."""
        return KeptGradients(self._reducer.retained) if self.whole is None else self.whole.kept

    @property
    def start_projections(self) -> Drawn | None:
        """The projections of the step before, of all processes."""
        return self._projections if self.whole is None else self.whole.part.projections

    @property
    def missing(self) -> Mapping[str, str]:
        """Why parameters have no per-sample gradients."""
        if self.whole is not None:
            return self.whole.part.missing
        found = self._gradients.collector.unavailable
        absent = [name for name in self._setting.parameters if name not in self._reducer.covered]
        reasons = {name: found.get(name, UNSEEN) for name in absent}
        gone = changed_parameters(self._setting).removed if UNUSED in reasons.values() else ()
        return reasons | {n: REMOVED for n in gone if reasons.get(n) == UNUSED}

    @property
    def _frozen(self) -> tuple[str, ...]:
        return tuple(name for name, p in self._setting.parameters.items() if not p.requires_grad)

    @property
    def uncovered(self) -> str:
        """Why no parameter has per-sample gradients; empty if one has."""
        covered = self._reducer.covered if self.whole is None else self.whole.part.covered
        if covered or not self.missing:
            return ""
        frozen = self._frozen
        name, reason = min(self.missing.items(), key=lambda each: each[0] in frozen)
        return f"no parameter has per-sample gradients; of {name}: {reason}"

    @property
    def lacking(self) -> frozenset[str]:
        """Parameters that have a gradient, but none of single samples."""
        missing = [(name, self._setting.parameters[name].grad) for name in self.missing]
        return frozenset(n for n, grad in missing if grad is not None and has_nonzero(grad))

    @property
    def coverage(self) -> Coverage:
        """Which parameters have per-sample gradients at this step."""
        coupling = self._gradients.coupling if self.whole is None else self.whole.part.coupling
        frozen = self._frozen
        return Coverage(
            {name: reason for name, reason in self.missing.items() if name not in frozen},
            tuple(sorted(coupling)),
            self._setting.batchnorm,
            self.batch.samples,
            self.batch.known_by,
            frozen,
        )

    def notes(self) -> Iterator[str]:
        """What the user should know of this step."""
        if self.loss_factor > ONE and "scaler" not in self._info:
            yield SCALED.format(factor=f"{self.loss_factor:.6g}")
        if self._gradients.beside and not self._is_part:
            yield BESIDE.format(names=few(self._gradients.beside))
        if self.whole is not None and self._assembly.is_first_estimate(self.whole):
            strata = self.whole.part.strata
            drawn, samples = sum(stratum.drawn for stratum in strata), count(strata)
            yield DRAWN.format(drawn=drawn, samples=samples, error=_error(self.whole))

    def release(self) -> None:
        """Remove all hooks, and free all gradients."""
        self._gradients.end()
        self._reducer.stop()


def _error(whole: Whole) -> str:
    """The standard error of what is computed from drawn samples, if it is."""
    values = on_host([*whole.values.get(Deviations(), {}).values()])
    if not values:
        return ""
    error = inner_test_error(Deviations().total(values))
    return f" The relative standard error of InnerTest is {error:.2g} at this step."


ONE = 1.01
"""A factor that isn't larger may be one: a loss over three is rounded, in bfloat16 by 0.2 %."""

SCALED = (
    "backward was called on {factor} times the loss. Per-sample gradients are those of the loss "
    "itself; GradNorm and others that read p.grad use it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
PARTS = "all parts of the batch; of each, "
DRAWN = (
    "per-sample gradients of all micro-batches take more than max_bytes: where they are needed "
    "together, quantities are computed from {drawn} of {samples} samples, drawn at random.{error} "
    "A larger Cockpit(..., max_bytes=...) makes it smaller"
)
BESIDE = (
    "the samples' gradients don't add up to p.grad of {names}: the loss has a term that isn't a "
    "sum over samples (a regulariser). Quantities describe the part that comes from the samples"
)
