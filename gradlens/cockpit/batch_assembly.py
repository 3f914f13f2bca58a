"""The batch of a step that comes in several parts: from micro-batches, processes or both."""

from __future__ import annotations

from torch import distributed as dist

from gradlens.per_sample.batch_parts import BatchPart, exchanged, joined
from gradlens.per_sample.gradients import Setting


class BatchAssembly:
    """Keeps the parts of a step's batch until the last one is there.

    ``group`` are the processes that train together, each with a part of the batch.
    """

    def __init__(
        self,
        setting: Setting,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._setting = setting
        self._group = group
        self._parts: list[BatchPart] = []
        self._step: int | None = None

    def begin_step(self, global_step: int) -> str:
        """Drop the parts of a step that never had a last one; a note, if there are any."""
        left = len(self._parts) if self._step != global_step else 0
        before, self._step = self._step, global_step
        if not left:
            return ""
        self.drop()
        return LEFT_OVER.format(count=left, step=before)

    def has_parts(self, accumulating: bool) -> bool:
        """Whether a backward pass is that of a part of its step's batch."""
        return accumulating or bool(self._parts) or self._group is not None

    @property
    def is_first_process(self) -> bool:
        """Whether this process writes files for its group."""
        return self._group is None or dist.get_rank(self._group) == 0

    def add(self, part: BatchPart) -> None:
        """Keep a part."""
        self._parts.append(part)

    def drop(self) -> None:
        """Drop all parts."""
        self._parts.clear()

    def whole(self) -> BatchPart:
        """The parts as one; all processes must call it at the same steps."""
        parts, self._parts = self._parts, []
        loss_reduction = self._setting.loss_reduction
        whole = joined(parts, loss_reduction)
        if self._group is None:
            return whole
        device = next(iter(self._setting.parameters.values())).device
        return joined(exchanged(whole, device, self._group), loss_reduction)


LEFT_OVER = (
    "{count} micro-batches of step {step} have no values, since none of them was the last "
    "(accumulating=False)"
)
