"""The processes that train a model together, each with a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from gradlens.gradients.gradients import Replica, Setting
from gradlens.graph.fully_shard import Sharding
from gradlens.graph.loss import LossReduction
from gradlens.numerics.exchange import all_gathered, merged_over
from gradlens.numerics.noise_scales import PartSums
from gradlens.numerics.shards import any_distributed
from gradlens.numerics.unavailable import UnavailableError, first_line
from gradlens.operators.composed import Grouped, Joined, Summed
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows
from gradlens.parts.part import EMPTY, BatchPart, Keyed, Results, merged

T = TypeVar("T")


class Processes:
    """What processes of a ``group`` exchange; without one, there is this process alone.

    All processes must call the methods at the same steps and in the same order. Each takes part
    whatever it has found, since others would wait for it.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.count = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def merged(self, own: BatchPart, reductions: Keyed, loss_reduction: LossReduction) -> BatchPart:
        """The parts of all processes as one."""
        if self._group is None:
            return own
        classes = {BatchPart, PartSums, Results}
        classes |= {each for reduction in reductions.values() for each in reduction.classes}
        return merged_over(
            own,
            lambda one, other: merged(one, other, reductions, loss_reduction, _noted),
            lambda error: replace(EMPTY, tracked=own.tracked, failure=first_line(error)),
            tuple(classes),
            self._device,
            self._group,
        )

    def of_all(self, own: T) -> list[T]:
        """The plain values of all processes."""
        return [own] if self._group is None else all_gathered(own, (), CPU, self._group)

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Set tensors to their sums over all processes."""
        for tensor in tensors if self._group is not None else ():
            dist.all_reduce(tensor, group=self._group)

    def joined(
        self,
        own: Mapping[str, Any],
        merge: Callable[[str, Any, Any], Any],
        classes: Sequence[type[Any]],
        failure: str = "",
    ) -> Mapping[str, Any]:
        """Values by keys that mean the same in all processes; ``merge`` makes one of two of a key.

        Tensors of values are on the host. ``UnavailableError`` in all processes if there is a
        ``failure`` in one of them.
        """
        if self._group is None:
            return own
        found = merged_over(
            {FAILURE: failure} if failure else dict(own),
            lambda one, other: (
                one
                | other
                | {n: merge(n, one[n], other[n]) for n in one.keys() & other.keys() - {FAILURE}}
            ),
            lambda error: {FAILURE: first_line(error)},
            classes,
            CPU,
            self._group,
        )
        if FAILURE in found:
            raise UnavailableError(found[FAILURE])
        return found

    def joined_operators(
        self, own: Mapping[str, GradientOperator]
    ) -> Mapping[str, GradientOperator]:
        """The per-sample gradients of all processes, of parameters that have them in each.

        The factors of structured gradients are exchanged, not the gradients themselves.
        """
        if self._group is None:
            return own
        found = [each for each in all_gathered(own, OPERATORS, self._device, self._group) if each]
        names = [name for name in found[0] if all(name in each for each in found)] if found else []
        ones = [1.0] * len(found)
        return {name: Joined([each[name] for each in found], ones) for name in names}


@contextmanager
def _noted(work: str, refuse: Callable[[str], None]) -> Iterator[None]:
    """A context whose exceptions are reasons, so that all processes go on."""
    try:
        yield
    except Exception as error:
        refuse(f"{work} failed: {first_line(error)}")


CPU = torch.device("cpu")

FAILURE = ""
"""The key of why there are no values."""

OPERATORS = (Convolution, Dense, Geometry, Grouped, IndexedRows, Joined, OuterProducts, Summed)
"""What per-sample gradients consist of."""


def process_group_of(
    replicas: Sequence[Replica], sharding: Sharding | None
) -> dist.ProcessGroup | None:
    """The processes that train a model together, if there are several."""
    if replicas:
        group: dist.ProcessGroup = replicas[0].process_group
        return group if group.size() > 1 else None
    return None if sharding is None else sharding.processes


def processes_apart(setting: Setting) -> int:
    """How many processes there are, if they aren't known to train the model together; 0 if so."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    together = setting.replicas or setting.sharding is not None
    if together or any_distributed(setting.parameters.values()):
        return 0
    count = dist.get_world_size()
    return count if count > 1 else 0
