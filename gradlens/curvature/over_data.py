"""A network's outputs and its loss for all batches of a data set, anew in each pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gradlens.curvature.differentiation import derivative
from gradlens.curvature.operator import CurvatureOperator, flat, placed, selected_parameters
from gradlens.gradients.gradients import Replica, replicas_of
from gradlens.gradients.per_sample_gradients import check_loss_reduction
from gradlens.graph.fully_shard import kept_whole, sharding_of
from gradlens.graph.loss import LossReduction
from gradlens.graph.uncompiled import uncompiled_calls
from gradlens.graph.undisturbed import training_kept, undisturbed, without_fused_recurrence
from gradlens.numerics.checksums import sum_of_bits_in_order
from gradlens.numerics.unavailable import first_line
from gradlens.parts.processes import Processes, process_group_of
from gradlens.torch_private import torch_functions_on, tree_leaves, tree_map_only, uncompiled

# Outputs --------------------------------------------------------------------------------------

Split: TypeAlias = Callable[[Any], tuple[Any, Any]]
"""Makes of a batch the inputs that the model is called with, and the targets."""

CHANGED = (
    "batch {index} of the data isn't the same as in the first pass, and each product takes a pass: "
    "pass a DataLoader with shuffle=False and without random transforms, or list(loader), whose "
    "batches are kept"
)
ONE_PASS = (
    "data is {kind}, which ends after one pass, and each product takes a pass: pass a DataLoader "
    "or a list of batches, such as list(data)"
)
NO_BATCHES = (
    "data is {kind}, which has samples and no batches: pass DataLoader(data, batch_size=...)"
)
NO_PAIR = (
    "batch {index} of the data is {kind}, and not a pair of inputs and targets: pass "
    "split=lambda batch: (inputs, targets), or [(inputs, targets)] for one batch as data"
)
RANDOM_OUTPUTS = (
    "two forward passes of the same batch give different outputs, as with active dropout, so that "
    "each product would be that of another function: call model.eval() before (of a Probe: "
    "training=False), or make the model's forward pass deterministic"
)
ONE_TENSOR = (
    "the model returned {kind}, and this matrix takes the one tensor that the loss is computed "
    "from: pass a model that returns it"
)
OTHER_LENGTHS = (
    "batch {index} has outputs for {outputs} samples and targets for {targets}: the first axis of "
    "both must be that of samples"
)
NO_SAMPLES = "batch {index} of the data has no samples: leave it out"
NO_AXIS = (
    "the model returned {kind} for batch {index}: it must return tensors whose first axis is that "
    "of samples"
)
IN_ANOTHER = "in another process: {reason}"
SAME_DATA = (
    "two processes have the same first batch, which would count twice in the sum over their data: "
    "give each process its own part, as by a DistributedSampler with shuffle=False"
)


def as_pair(batch: Any) -> tuple[Any, Any]:
    """The batch itself, which must be a pair of inputs and targets."""
    inputs, targets = batch
    return inputs, targets


@dataclass(frozen=True)
class BatchOutputs:
    """The outputs for one batch, with their graph; ``index`` is the batch's place in the data."""

    index: int
    outputs: Any
    targets: Any
    samples: int

    @property
    def output(self) -> Tensor:
        """The outputs as one tensor; raises ``ValueError`` if they are something else."""
        if isinstance(self.outputs, Tensor):
            return self.outputs
        raise ValueError(ONE_TENSOR.format(kind=_described(self.outputs)))

    @property
    def tensors(self) -> Tensor | list[Tensor]:
        """The outputs as one tensor, or all tensors in them."""
        return self.outputs if isinstance(self.outputs, Tensor) else _tensors(self.outputs)


class NetworkOverData:
    """A model and the batches that it is called with.

    Each pass computes the outputs batch by batch, on the device of the model's first parameter and
    in the model's own mode. Buffers, gradients and torch's random numbers are the same after a pass
    as before. Inputs that are a mapping are passed as keyword arguments.

    Of a model that several processes train together, by ``DistributedDataParallel`` or
    ``fully_shard``, each process passes its own part of the data, which may be of any size:
    ``samples`` are those of all processes. All of them must do the same at the same time. If they
    aren't ``joined``, each has all of the data. ``parameters`` are whole in each process during a
    pass.

    ``inspect`` is called with each batch of the first pass, which is made at once. Raises
    ``ValueError`` for data that can't be passed through repeatedly or has no samples, for outputs
    that differ from one forward pass to the next, and in later passes for batches that have
    changed.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Iterable[Any],
        parameters: Sequence[str] | None = None,
        split: Split = as_pair,
        inspect: Callable[[BatchOutputs], None] | None = None,
        joined: bool = True,
    ) -> None:
        check_data(data)
        replicas, plain = replicas_of(model), uncompiled(model)
        self._model = plain.module if isinstance(plain, Replica) else model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._data = data
        self._split = split
        self._passes = 0
        self._checksums: list[tuple[int, ...]] = []
        self.samples = 0
        chosen, sharding = selected_parameters(self._model, parameters), sharding_of(self._model)
        group = process_group_of(replicas, sharding) if joined else None
        self._processes = Processes(group, self._device)
        self._first_pass(inspect)
        # The first pass has made what the graph has for sharded parameters.
        whole = {} if sharding is None else sharding.unsharded()
        self.parameters = {name: whole.get(id(each), each) for name, each in chosen.items()}
        known = self._processes.of_all((self.batches, self.samples))
        self.batches_before = sum(batches for batches, _ in known[: self._processes.rank])
        """How many batches the processes before this one have."""
        self.samples = sum(samples for _, samples in known)

    @property
    def batches(self) -> int:
        """How many batches this process's data has."""
        return len(self._checksums)

    @final
    def each_outputs(self, function: Callable[[BatchOutputs], None]) -> None:
        """Call the function with each own batch's outputs, of which none are kept."""
        self._pass(function, self.batches, lambda count: CHANGED.format(index=count))

    def _first_pass(self, inspect: Callable[[BatchOutputs], None] | None) -> None:
        """Record the checksums, and find out whether the first batch is the same once more."""
        first: list[Tensor] = []

        def record(batch: BatchOutputs) -> None:
            self.samples += batch.samples
            if batch.index == 0:
                first.extend(each.detach() for each in _tensors(batch.outputs))
            if inspect is not None:
                inspect(batch)

        def compare(batch: BatchOutputs) -> None:
            if not all(map(_agree, first, _tensors(batch.outputs))):
                raise ValueError(RANDOM_OUTPUTS)

        self._pass(record, 1, lambda _: "the data has no batches: pass at least one")
        self._pass(compare, 1, lambda _: ONE_PASS.format(kind=_described(self._data)), batches=1)

    def _pass(
        self,
        function: Callable[[BatchOutputs], None],
        least: int,
        too_few: Callable[[int], str],
        batches: int | None = None,
    ) -> None:
        """Call the function with the outputs of all or some batches; ``ValueError`` if too few.

        What fails in one process is a ``ValueError`` in the others, which would wait for it.
        """
        # Each pass has random numbers of its own, so that what depends on them is found out.
        self._passes += 1
        failure: Exception | None = None
        with (
            undisturbed(self._model),
            training_kept(self._model.parameters()),
            kept_whole(self._model),
            without_fused_recurrence(self._model),
            _seeded(self._device, self._passes),
            uncompiled_calls(),
            torch.enable_grad(),
        ):
            count = 0
            try:
                for index, batch in enumerate(islice(self._data, batches)):
                    function(self._outputs(index, batch))
                    count += 1
                if count < least:
                    raise ValueError(too_few(count))
            except Exception as error:
                failure = error
        reasons = self._processes.of_all("" if failure is None else first_line(failure))
        if failure is not None:
            raise failure
        if any(reasons):
            raise ValueError(IN_ANOTHER.format(reason=next(filter(None, reasons))))

    def _outputs(self, index: int, batch: Any) -> BatchOutputs:
        if self._split is as_pair and not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ValueError(NO_PAIR.format(index=index, kind=_described(batch)))
        pair = tuple(self._split(batch))
        inputs, targets = tree_map_only(Tensor, lambda tensor: tensor.to(self._device), pair)
        sums = tuple(sum_of_bits_in_order(each) for each in _tensors((inputs, targets)))
        if self._passes == 1:
            self._checksums.append(sums)
        elif self._checksums[index : index + 1] != [sums]:
            raise ValueError(CHANGED.format(index=index))
        with torch_functions_on():
            outputs = self._model(**inputs) if isinstance(inputs, Mapping) else self._model(inputs)
        return BatchOutputs(index, outputs, targets, _samples(index, outputs, targets))


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the generators of CPU and device in the context, and restore their states on leaving."""
    others = [] if device.type == "cpu" else [device]
    kind = device.type if others else "cuda"
    with torch.random.fork_rng(others, device_type=kind):  # which keeps that of the CPU, too
        torch.default_generator.manual_seed(seed)
        if others:
            torch.get_device_module(device).manual_seed(seed)
        yield


def check_data(data: object) -> None:
    """Raise ``ValueError`` for data that has no batches or ends after one pass."""
    if isinstance(data, Iterator):
        raise ValueError(ONE_PASS.format(kind=_described(data)))
    if isinstance(data, Dataset) and not isinstance(data, Iterable):
        raise ValueError(NO_BATCHES.format(kind=_described(data)))


def _samples(index: int, outputs: Any, targets: Any) -> int:
    leaves = _tensors(outputs)
    if not leaves or leaves[0].dim() == 0:
        raise ValueError(NO_AXIS.format(kind=_described(outputs), index=index))
    samples = len(leaves[0])
    lengths = {len(each) for each in _tensors(targets) if each.dim()} - {samples}
    if lengths:
        raise ValueError(OTHER_LENGTHS.format(index=index, outputs=samples, targets=min(lengths)))
    if samples == 0:
        raise ValueError(NO_SAMPLES.format(index=index))
    return samples


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _agree(before: Tensor, now: Tensor) -> bool:
    """Whether outputs are equal to half of their digits, as nondeterministic kernels' are."""
    if before.shape != now.shape or not before.is_floating_point():
        return torch.equal(before, now)
    close = torch.finfo(before.dtype).eps ** 0.5 * float(before.norm())
    return not float((before - now.detach()).norm()) > close


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {[*value]}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


# Losses, and their matrices -------------------------------------------------------------------

LossFunction: TypeAlias = Callable[[Any, Any], Tensor]
"""Makes a loss of the model's outputs and the targets, such as ``nn.CrossEntropyLoss()``."""

ROUNDING = 1000
"""Rounding errors that the losses of parts may differ by from that of the whole.

A trade-off: each loss is a sum over many terms in another order, and a weighted mean of almost
equal weights is almost a mean.
"""

NO_SCALAR = (
    "loss_function returned {kind} for batch {index}: it must return a scalar tensor, as with "
    "reduction='mean' or 'sum'"
)
NOT_ADDITIVE = (
    "the loss of batch {index} isn't the {reduction} over its samples: it is {whole:.6g}, and that "
    "of its two parts together is {parts:.6g}. {remedy}"
)
OTHER_REDUCTION = "It is their {other}: pass loss_reduction={other!r}"
NEITHER = (
    "A loss that couples the samples of a batch isn't defined for all of the data; for a mean with "
    "weights or without ignored targets, pass the loss with reduction='sum' and "
    "loss_reduction='sum', and divide by the sum of weights"
)
UNKNOWN_PARTS = (
    "loss_function can't be computed for a part of batch {index} ({error}), so that it isn't known "
    "to be a mean or a sum over samples: pass one that takes any number of samples"
)


@dataclass(frozen=True)
class BatchLoss(BatchOutputs):
    """One batch's loss, with its graph, and what ``weight`` it has in the loss of all batches."""

    loss: Tensor
    weight: float


@final
class LossOverData(NetworkOverData):
    """The mean or summed loss over all samples of the data.

    ``loss_function`` of each batch must be the mean or the sum over the batch's samples, as
    ``loss_reduction`` says. That is checked by computing it for two parts of each batch. Batches
    may be of different sizes: each counts by its number of samples.

    Raises ``ValueError`` for a loss that isn't such a mean or sum, and as ``NetworkOverData`` does.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
        joined: bool = True,
    ) -> None:
        check_loss_reduction(loss_reduction)
        self.loss_reduction: LossReduction = loss_reduction
        self._function = loss_function
        super().__init__(model, data, parameters, split, self._check, joined)
        first = self._processes.of_all(self._checksums[0])
        if loss_reduction == "sum" and len({*first}) < len(first):
            raise ValueError(SAME_DATA)

    def each(self, function: Callable[[BatchLoss], None]) -> None:
        """Call the function with each own batch's loss, of which none is kept."""

        def of_loss(batch: BatchOutputs) -> None:
            weight = batch.samples / self.samples if self.loss_reduction == "mean" else 1.0
            function(BatchLoss(**vars(batch), loss=self._loss(batch), weight=weight))

        self.each_outputs(of_loss)

    @property
    def divisor(self) -> int:
        """The loss over the mean loss of all samples: N of a summed loss, and otherwise 1."""
        return self.samples if self.loss_reduction == "sum" else 1

    def mean(self) -> float:
        """The mean loss of all samples, at the parameters' present values."""
        parts: list[float] = []
        self.each(lambda batch: parts.append(float(batch.loss.detach()) * batch.weight))
        return sum(self._processes.of_all(sum(parts))) / self.divisor

    def mean_gradient(self) -> list[Tensor]:
        """The gradient of the mean loss, one tensor for each parameter."""
        parameters = list(self.parameters.values())
        totals = [torch.zeros_like(p, requires_grad=False) for p in parameters]

        def add(batch: BatchLoss) -> None:
            found = derivative([batch.loss], parameters, [torch.ones_like(batch.loss)])
            for total, part in zip(totals, found, strict=True):
                total.add_(part, alpha=batch.weight / self.divisor)

        self.each(add)
        return self.added_up(totals)

    def added_up(self, totals: list[Tensor]) -> list[Tensor]:
        """What all processes have found, added up in place."""
        self._processes.add_up(totals)
        return totals

    def gradients_of(self, samples: Sequence[int]) -> Tensor:
        """The gradients of single samples' losses by their numbers in the data, flat ``[k, D]``."""
        parameters = list(self.parameters.values())
        found: dict[int, Tensor] = {}
        first = 0

        def add(batch: BatchLoss) -> None:
            nonlocal first
            for place in range(batch.samples):
                if first + place in samples:
                    one = _rows((batch.outputs, batch.targets), slice(place, place + 1))
                    with torch_functions_on():
                        loss = self._function(*one)
                    parts = derivative([loss], parameters, [torch.ones_like(loss)])
                    found[first + place] = flat(parts, parameters[0].device)
            first += batch.samples

        self.each(add)
        return torch.stack([found[number] for number in samples if number in found])

    def _loss(self, batch: BatchOutputs) -> Tensor:
        with torch_functions_on():
            loss = self._function(batch.outputs, batch.targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(NO_SCALAR.format(kind=kind, index=batch.index))
        return loss

    @torch.no_grad()
    def _check(self, batch: BatchOutputs) -> None:
        """Compare the batch's loss with those of a third of its samples and of the rest."""
        whole = self._loss(batch)
        if batch.samples == 1:
            return
        first = max(1, batch.samples // 3)
        try:
            losses = [
                float(self._function(*_rows((batch.outputs, batch.targets), part)))
                for part in (slice(None, first), slice(first, None))
            ]
        except (RuntimeError, ValueError, IndexError) as error:
            reason = UNKNOWN_PARTS.format(index=batch.index, error=error)
            raise ValueError(reason) from error
        share = first / batch.samples
        combined = {"mean": share * losses[0] + (1 - share) * losses[1], "sum": sum(losses)}
        tolerance = ROUNDING * torch.finfo(whole.dtype).eps * max(map(abs, losses))
        agree = {name: not abs(float(whole) - one) > tolerance for name, one in combined.items()}
        if agree[self.loss_reduction]:
            return
        others = [name for name, agrees in agree.items() if agrees]
        raise ValueError(
            NOT_ADDITIVE.format(
                index=batch.index,
                reduction=self.loss_reduction,
                whole=float(whole),
                parts=combined[self.loss_reduction],
                remedy=OTHER_REDUCTION.format(other=others[0]) if others else NEITHER,
            )
        )


def _rows(tree: Any, part: slice) -> Any:
    """The samples of a part, of all tensors that have an axis of samples."""
    return tree_map_only(Tensor, lambda each: each[part] if each.dim() else each, tree)


OfBatch: TypeAlias = Callable[[BatchLoss], CurvatureOperator]
"""Makes the matrix of one batch's loss."""


@final
class SumOverData(CurvatureOperator):
    """Σᵢ wᵢ Mᵢ ``[D, D]`` over the batches, with each batch's weight in the loss of all samples.

    Each product takes a pass through the data, and so do several products together. The matrix is
    that of the parameters' values and the model's mode at the time of the product. ``parameters``
    are by default those of ``loss``.
    """

    joint = True

    def __init__(
        self, loss: LossOverData, of_batch: OfBatch, parameters: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__(loss.parameters if parameters is None else parameters, 1.0)
        self.loss = loss
        self._of_batch = of_batch

    def products(self, many: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """The products with several vectors, in one pass through the data."""
        directions = [placed(vectors, self.parameters) for vectors in many]
        totals = [[torch.zeros_like(v, dtype=self.torch_dtype) for v in one] for one in directions]

        def add(batch: BatchLoss) -> None:
            found = self._of_batch(batch).products(directions)
            for total, parts in zip(totals, found, strict=True):
                for each, part in zip(total, parts, strict=True):
                    each.add_(part, alpha=batch.weight)

        self.loss.each(add)
        for total in totals:
            self.loss.added_up(total)
        return totals

    def _product(self, vectors: list[Tensor]) -> list[Tensor]:
        return self.products([vectors])[0]


class LossOperator(CurvatureOperator, ABC):
    """The matrix of one loss, of which there is one over data, too."""

    @classmethod
    def over_data(
        cls,
        model: nn.Module,
        loss_function: LossFunction,
        data: Iterable[Any],
        *,
        parameters: Sequence[str] | None = None,
        loss_reduction: LossReduction = "mean",
        split: Split = as_pair,
        **options: Any,
    ) -> SumOverData:
        """The matrix of the loss over all of the data, which is an iterable of batches.

        Of a mean loss it is that of the mean over all samples, of a sum loss that of their sum.
        ``loss_function(outputs, targets)`` is called with ``model(inputs)``, and ``split`` makes
        inputs and targets of a batch that isn't such a pair. ``parameters`` are names of
        parameters, or of modules for all of theirs; by default, all that require a gradient.
        ``options`` are further ones of the matrix: ``draws`` and ``seed`` of ``FisherOperator``.
        For all matrices but the Hessian, the model must return one tensor. Of a model that several
        processes train together, each process passes its own part of the data, and all of them get
        the products of the matrix of all data.

        Raises ``ValueError`` for a model, a loss or data of which there is no such matrix.
        """
        whole = LossOverData(model, loss_function, data, parameters, loss_reduction, split)
        return SumOverData(whole, cls._of_batches(whole, **options))

    @classmethod
    @abstractmethod
    def _of_batches(cls, whole: LossOverData, *args: Any, **options: Any) -> OfBatch:
        """What makes the matrix of each batch's loss."""
