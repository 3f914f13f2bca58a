"""A network's outputs for all batches of a data set, which are computed anew in each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from gradlens.curvature.operator import selected_parameters
from gradlens.graph.uncompiled import uncompiled_calls
from gradlens.graph.undisturbed import random_states_kept, training_kept, undisturbed
from gradlens.numerics.checksums import sum_of_bits_in_order
from gradlens.torch_private import torch_functions_on, tree_leaves, tree_map_only

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


class NetworkOverData:
    """A model and the batches that it is called with.

    Each pass computes the outputs batch by batch, on the device of the model's first parameter and
    in the model's own mode. Buffers, gradients and torch's random numbers are the same after a pass
    as before. Inputs that are a mapping are passed as keyword arguments.

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
    ) -> None:
        check_data(data)
        self.parameters = selected_parameters(model, parameters)
        self._model = model
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._data = data
        self._split = split
        self._passes = 0
        self._checksums: list[tuple[int, ...]] = []
        self.samples = 0
        self._first_pass(inspect)

    @property
    def batches(self) -> int:
        """How many batches the data has."""
        return len(self._checksums)

    @final
    def each_outputs(self, function: Callable[[BatchOutputs], None]) -> None:
        """Call the function with each batch's outputs, of which none are kept."""
        count = self._pass(function)
        if count < len(self._checksums):
            raise ValueError(CHANGED.format(index=count))

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

        self._pass(record)
        if not self._checksums:
            raise ValueError("the data has no batches: pass at least one")
        if not self._pass(compare, batches=1):
            raise ValueError(ONE_PASS.format(kind=_described(self._data)))

    def _pass(self, function: Callable[[BatchOutputs], None], batches: int | None = None) -> int:
        """Call the function with the outputs of all or some batches; their number."""
        # Each pass has random numbers of its own, so that what depends on them is found out.
        self._passes += 1
        count = 0
        with (
            undisturbed(self._model),
            training_kept(self._model.parameters()),
            _seeded(self._device, self._passes),
            random_states_kept(),
            uncompiled_calls(),
            torch.enable_grad(),
        ):
            for index, batch in enumerate(islice(self._data, batches)):
                function(self._outputs(index, batch))
                count += 1
        return count

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
