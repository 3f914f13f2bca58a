"""Per-sample gradients of a tracked step: from entering its context to their reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradlens.cockpit.batch_assembly import BatchAssembly
from gradlens.cockpit.model import compiled_prefixes
from gradlens.history.coverage import Coverage, few
from gradlens.hooks.backward_call import BackwardCall
from gradlens.numerics.unavailable import Contain
from gradlens.per_sample.batch_parts import BatchPart
from gradlens.per_sample.context import UNSEEN
from gradlens.per_sample.gradients import Gradients, Setting
from gradlens.per_sample.labelling.batch import Batch
from gradlens.per_sample.labelling.planner import COMPILED
from gradlens.per_sample.reducing import Reducer
from gradlens.quantities.step import gradient_scale
from gradlens.reductions import Reduction


class StepGradients:
    """Per-sample gradients of one backward pass.

    ``reducer`` holds their reductions after ``finish``. ``labelling_seconds`` is the time spent on
    labelling the graph, which most steps don't need. ``whole`` is the batch, where it has several
    parts and this is the last one.
    """

    def __init__(
        self,
        setting: Setting,
        assembly: BatchAssembly,
        reductions: Iterable[Reduction],
        retain: bool,
        info: Mapping[str, Any],
        accumulating: bool,
        contain: Contain,
    ) -> None:
        self._setting = setting
        self._assembly = assembly
        self._info = info
        self._is_part = assembly.has_parts(accumulating)
        self._accumulating = accumulating
        self._contain = contain
        self.labelling_seconds = 0.0
        self.whole: BatchPart | None = None
        self._gradients = Gradients(setting, info)
        self.reducer = Reducer(
            setting.parameters,
            setting.leaves,
            self._gradients.collector,
            reductions,
            retain,
            waits=self._is_part,
            contain=contain,
        )

    @property
    def batch(self) -> Batch:
        """The batch, all of its parts together."""
        found = self._gradients.batch
        if self.whole is None:
            return found
        return replace(found, samples=self.whole.batch_size, known_by=PARTS + found.known_by)

    @property
    def loss_factor(self) -> float:
        """∂(what backward is called on)/∂loss."""
        return self._gradients.batch.factor

    @property
    def loss_weight(self) -> float:
        """The weight of the batch's loss in what the optimizer minimises, without a scaler's."""
        weight = self.loss_factor if self.whole is None else self.whole.weight
        return weight / gradient_scale(self._info)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect gradients in the backward pass of the loss, or of what backward is called on."""
        loss = self._info.get("loss")
        self.reducer.start()
        if loss is not None:
            self._timed(self._gradients.begin, loss)
        with BackwardCall(lambda tensor: self._timed(self._gradients.called_on, tensor)):
            try:
                yield
            finally:
                self._gradients.end()

    def _timed(self, begin: Callable[[Tensor], None], tensor: Tensor) -> None:
        start = time.perf_counter()
        with self._contain("finding the samples of the loss", self._refuse_all):
            begin(tensor)
        if self._gradients.labelled:
            self.labelling_seconds += time.perf_counter() - start

    def _refuse_all(self, reason: str) -> None:
        self._gradients.collector.refuse_all(self._setting.parameters, reason)

    def finish(self, individual_losses: Tensor | None) -> None:
        """Reduce what is left, and the whole batch if this was the last of its parts."""
        self.reducer.finish()
        if not self._is_part:
            return
        self._assembly.add(self._part(individual_losses))
        if not self._accumulating:
            self.whole = self._assembly.whole()
            self.reducer.take_joined(self.whole.operators)

    def _part(self, individual_losses: Tensor | None) -> BatchPart:
        batch, loss = self._gradients.batch, self._info.get("loss")
        return BatchPart(
            batch.samples,
            batch.factor,
            None if loss is None else float(loss.detach()),
            individual_losses,
            dict(self.reducer.waiting),
            self._missing,
            self._gradients.coupling,
        )

    @property
    def _missing(self) -> Mapping[str, str]:
        """Why parameters have no per-sample gradients."""
        if self.whole is not None:
            return self.whole.missing
        found, compiled = self._gradients.collector.unavailable, compiled_prefixes(self._setting)
        absent = [name for name in self._setting.parameters if name not in self.reducer.covered]
        unseen = {n: COMPILED if n.startswith(compiled) else UNSEEN for n in absent}
        return {name: found.get(name, reason) for name, reason in unseen.items()}

    @property
    def uncovered(self) -> str:
        """Why no parameter has per-sample gradients; empty if one has."""
        if self.reducer.covered or not self._missing:
            return ""
        name, reason = next(iter(self._missing.items()))
        return f"no parameter has per-sample gradients; of {name}: {reason}"

    @property
    def coverage(self) -> Coverage:
        """Which parameters have per-sample gradients at this step."""
        coupling = self._gradients.coupling if self.whole is None else self.whole.coupling
        return Coverage(
            self._missing,
            tuple(sorted(coupling)),
            self._setting.batchnorm,
            self.batch.samples,
            self.batch.known_by,
        )

    def notes(self) -> Iterator[str]:
        """What the user should know of this step."""
        if self.loss_factor > 1 and "scaler" not in self._info:
            yield SCALED.format(factor=f"{self.loss_factor:.6g}")
        if self._gradients.beside and not self._is_part:
            yield BESIDE.format(names=few(self._gradients.beside))

    def release(self) -> None:
        """Remove all hooks, and free all gradients."""
        self._gradients.end()
        self.reducer.stop()


SCALED = (
    "backward was called on {factor} times the loss. Per-sample gradients are those of the loss "
    "itself; GradNorm and others that read p.grad use it as it is: with a GradScaler, pass "
    "scaler=... to the context"
)
PARTS = "all parts of the batch; of each, "
BESIDE = (
    "the samples' gradients don't add up to p.grad of {names}: the loss has a term that isn't a "
    "sum over samples (a regulariser). Quantities describe the part that comes from the samples"
)
