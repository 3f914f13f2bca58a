"""Whether the structure of a graph alone says which rows belong to which sample.

Labels are read off the numbers of one graph. They hold for all graphs of the same structure if no
number can move a row to another sample, or mix the rows of several. This is shown by following the
axis that counts the samples from the loss's inputs down to the nodes where parameters are used. A
node that may move or mix entries along that axis, and any node of a kind that isn't listed here,
ends the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import digits
from typing import TypeAlias

import torch
from torch import Tensor

from gradlens.fully_shard.torch_private import hands_gradients_on
from gradlens.graph.graph import Edge, Graph, is_python_function, recomputation
from gradlens.graph.kinds import Node
from gradlens.graph.torch_private import saved
from gradlens.samples.labels import Source
from gradlens.samples.plan import NO_SAMPLE, LabelledUse, RowIndex, Selection


@dataclass(frozen=True)
class Structure:
    """Uses of parameters with the labels that follow from the structure of a graph.

    ``selections`` are the indices by which nodes on the way select rows of samples.
    """

    uses: Mapping[str, tuple[LabelledUse, ...]]
    selections: tuple[Selection, ...] = ()


def structure_of(
    graph: Graph,
    sources: Sequence[Source],
    samples: int,
    uses: Mapping[str, tuple[LabelledUse, ...]],
) -> Structure | None:
    """The labels of the uses' rows, if they follow from the structure.

    Rows without gradient, whose labels can't be read, have them, too. ``None`` if it isn't certain,
    or if other labels were read.
    """
    way = _Way(graph, samples, {use.use.node for each in uses.values() for use in each})
    if samples > 1 and not way.follow(sources):
        return None
    indices: dict[tuple[Edge, tuple[int, ...]], RowIndex] = {}
    for use in (use for each in uses.values() for use in each):
        for output, read in use.rows.items():
            edge, features = (use.use.node, output), use.features[output]
            if (edge, features) in indices:
                continue
            found = way.rows(edge, features, read.labels.device)
            known = read.labels != NO_SAMPLE
            if found is None or bool((known & (found.labels != read.labels)).any()):
                return None
            indices[edge, features] = found
    return Structure(
        {name: tuple(_with(use, indices) for use in each) for name, each in uses.items()},
        tuple(way.selections),
    )


def _with(
    use: LabelledUse, indices: Mapping[tuple[Edge, tuple[int, ...]], RowIndex]
) -> LabelledUse:
    features = use.features.items()
    return replace(use, rows={o: indices[(use.use.node, o), axes] for o, axes in features})


@dataclass(frozen=True)
class _Axis:
    """The axis that counts the samples: its entry i belongs to sample (i // stride) mod N."""

    number: int
    stride: int

    def elements(self, shape: Sequence[int]) -> int:
        """The stride with which the elements of a tensor belong to the samples."""
        return self.stride * math.prod(shape[self.number + 1 :])


class _Way:
    """Follows samples from the loss's inputs down to some nodes.

    Each edge on the way has a stride: element i of what flows there belongs to sample
    (i // stride) mod N.
    """

    def __init__(self, graph: Graph, samples: int, nodes: set[int]) -> None:
        self._graph = graph
        self._samples = samples
        self._wanted = _made_of(graph, nodes)
        self._strides: dict[Edge, int] = {}
        self.selections: list[Selection] = []

    def follow(self, sources: Sequence[Source]) -> bool:
        """Whether the samples of everything on the way are certain."""
        below = (source for source in sources if source.edge[0] in self._wanted)
        return all(self._set(source.edge, self._at(source)) for source in below) and all(
            self._set(edge, self._below((number, output), place))
            for number in sorted(self._wanted, reverse=True)
            for place, edge in enumerate(self._graph.children[number])
            if edge is not None and edge[0] in self._wanted
            for output in self._graph.outputs_of(number)
            if (number, output) in self._strides
        )

    def rows(self, edge: Edge, features: tuple[int, ...], device: torch.device) -> RowIndex | None:
        """The samples of the rows at an edge."""
        shape = self._graph.shape(edge)
        rows = [length for each, length in enumerate(shape) if each not in features]
        if self._samples == 1:
            return RowIndex(torch.zeros(rows, dtype=torch.long, device=device), 1)
        axis = self._axis(shape, self._strides[edge]) if edge in self._strides else None
        if axis is None or axis.number in features:
            return None
        numbers = torch.arange(shape[axis.number], device=device) // axis.stride % self._samples
        behind = [each for each in range(axis.number + 1, len(shape)) if each not in features]
        labels = numbers.reshape(-1, *[1] * len(behind)).expand(rows).contiguous()
        return RowIndex(labels, self._samples)

    def _set(self, edge: Edge, stride: int | None) -> bool:
        """Whether a stride is certain, and the same as by other ways to the edge."""
        return stride is not None and self._strides.setdefault(edge, stride) == stride

    def _at(self, source: Source) -> int | None:
        """The stride at a source of labels."""
        if source.labels is None:
            return None
        fold = RowIndex(source.labels, self._samples).fold
        axis = None if fold is None else self._axis(source.labels.shape, fold[1])
        return None if axis is None else axis.elements(self._graph.shape(source.edge))

    def _axis(self, shape: Sequence[int], stride: int) -> _Axis | None:
        """The axis that counts the samples, from the stride of a tensor's elements."""
        if not stride:  # of a tensor without elements
            return None
        behind = 1
        for number in reversed(range(len(shape))):
            if stride < behind * shape[number]:
                along, rest = divmod(stride, behind)
                whole = not rest and shape[number] % (along * self._samples) == 0
                return _Axis(number, along) if whole else None
            behind *= shape[number]
        return None

    def _below(self, output: Edge, place: int) -> int | None:
        """The stride of a node's input, from that of its output."""
        node, name = self._graph.nodes[output[0]], self._graph.kinds[output[0]].rstrip(digits)
        edge = self._graph.children[output[0]][place]
        assert edge is not None
        above, below = self._graph.shape(output), self._graph.shape(edge)
        if is_python_function(node):
            # The backward function of any other may do anything.
            return self._strides[output] if hands_gradients_on(node) else None
        if name in _IN_ORDER or (name in _ELEMENTWISE and above == below):
            return self._strides[output]
        axis = self._axis(above, self._strides[output])
        if axis is None:
            return None
        step = _Step(node, place, len(above), len(below), axis.stride * self._samples)
        if name == _INDEX:
            number = self._along_indices(step, output[0], axis.number)
        else:
            number = _RULES[name](step, axis.number) if name in _RULES else None
        if number is None or number < 0 or below[number] % step.period:
            return None
        return _Axis(number, axis.stride).elements(below)

    def _along_indices(self, step: _Step, node: int, axis: int) -> int | None:
        """The axis of a tensor from which rows are selected, as in ``x[rows, places]``.

        Indices that count from 0, as ``torch.arange(N)`` does, keep samples in order.
        """
        with recomputation():
            given: Sequence[Tensor | None] = saved(step.node, "indices")
        indices = {number: each for number, each in enumerate(given) if each is not None}
        free = [number for number in range(step.inputs) if number not in indices]
        adjacent = len(indices) == max(indices) - min(indices) + 1
        first = min(indices) if adjacent else 0
        dims = step.outputs - len(free)
        if not first <= axis < first + dims:
            return free[axis if axis < first else axis - dims]
        for number, index in indices.items():
            along = axis - first - dims + index.dim()
            if along >= 0 and _counts(index, along):
                self.selections.append(Selection(node, number, index.detach().clone()))
                return number
        return None


def _made_of(graph: Graph, numbers: set[int]) -> set[int]:
    """The nodes, and all that consume them, directly or not."""
    found = set(numbers)
    for number, edges in enumerate(graph.children):
        if any(edge is not None and edge[0] in found for edge in edges):
            found.add(number)
    return found


def _counts(index: Tensor, along: int) -> bool:
    """Whether an index counts from 0 along one of its axes, and has one entry along the others."""
    if index.dtype in (torch.bool, torch.uint8) or index.shape[along] != index.numel():
        return False
    return torch.equal(index.flatten(), torch.arange(index.numel()).to(index))


@dataclass(frozen=True)
class _Step:
    """From a node's output to one of its inputs, as the backward pass goes.

    ``place`` is the number of the input; ``outputs`` and ``inputs`` are numbers of axes. The
    samples along their axis come again after ``period`` entries.
    """

    node: Node
    place: int
    outputs: int
    inputs: int
    period: int


_Rule: TypeAlias = Callable[[_Step, int], int | None]
"""The axis of the input that an axis of the output goes on in; ``None`` if it doesn't.

The gradient at an entry of the input's axis must depend on those at the same entry of the output's
axis alone, or after whole periods, whatever the numbers are.
"""


def _from_the_right(step: _Step, axis: int) -> int | None:
    """Each entry is computed from one entry of the input, which may be repeated."""
    return axis - step.outputs + step.inputs


def _beside_dim(step: _Step, axis: int) -> int | None:
    return _beside(step, axis, saved(step.node, "dim"))


def _beside_dims(step: _Step, axis: int) -> int | None:
    return _beside(step, axis, saved(step.node, "dims"))


def _split(step: _Step, axis: int) -> int | None:
    """Pieces of a tensor, which begin with the first sample if they have whole periods."""
    if axis != positive(saved(step.node, "dim"), step.inputs)[0]:
        return axis
    return axis if saved(step.node, "split_size") % step.period == 0 else None


def _beside(step: _Step, axis: int, dims: int | Sequence[int] | None) -> int | None:
    """The node works along some axes, and keeps apart what is beside them."""
    most = max(step.outputs, step.inputs)
    along = positive(dims, most)
    others = [each for each in range(most) if each not in along]
    if not along or axis >= step.outputs:
        return None  # without axes, all are meant
    if step.outputs == step.inputs:
        return axis if axis in others else None
    if step.outputs < step.inputs:
        return others[axis] if len(others) == step.outputs else None
    return others.index(axis) if axis in others and len(others) == step.inputs else None


def positive(dims: int | Sequence[int] | None, axes: int) -> list[int]:
    """Axes from 0 on; nodes save negative ones as unsigned numbers."""
    given = [dims] if isinstance(dims, int) else dims or []
    return [(dim - 2**64 if dim >= 2**63 else dim) % axes for dim in given]


def _permuted(step: _Step, axis: int) -> int | None:
    return positive(saved(step.node, "dims"), step.inputs)[axis]


def _transposed(step: _Step, axis: int) -> int | None:
    pair = positive((saved(step.node, "dim0"), saved(step.node, "dim1")), step.inputs)
    return pair[1 - pair.index(axis)] if axis in pair else axis


def _last_axis_first(step: _Step, axis: int) -> int | None:
    return step.inputs - 1 - axis


def _in_front_of(last: int) -> _Rule:
    """The node works along the last axes of its first input."""

    def rule(step: _Step, axis: int) -> int | None:
        fits = step.place == 0 and step.inputs == step.outputs
        return axis if fits and axis < step.outputs - last else None

    return rule


def _in_front_of_normalized(step: _Step, axis: int) -> int | None:
    return _in_front_of(len(saved(step.node, "normalized_shape")))(step, axis)


def _in_front_of_padded(step: _Step, axis: int) -> int | None:
    return _in_front_of(len(saved(step.node, "pad")) // 2)(step, axis)


def _by_input(axes: Mapping[int, Mapping[int, int]]) -> _Rule:
    """Axes of inputs by axes of the output, for each input's number."""
    return lambda step, axis: axes.get(step.place, {}).get(axis)


def _with_bias(axes: Mapping[int, Mapping[int, int]]) -> _Rule:
    """The same, where input 0 is added to the output."""
    rest = _by_input(axes)
    return lambda step, axis: (rest if step.place else _from_the_right)(step, axis)


def _classes_behind_samples(step: _Step, axis: int) -> int | None:
    """Losses ``[N, *S]`` from class scores ``[N, C, *S]``."""
    return axis + (axis > 0)


def _recurrent(step: _Step, axis: int) -> int | None:
    """Sequences ``[T, N, D]`` and states ``[N, H]`` of one layer."""
    return step.inputs - 2 if axis == step.outputs - 2 and step.place in (0, 5, 6) else None


_INDEX = "IndexBackward"


def _kinds(names: str) -> frozenset[str]:
    """Names of nodes in front of their number; those of functions in Python have none."""
    return frozenset(f"{name}Backward" for name in names.split())


_IN_ORDER = _kinds("View UnsafeView ReshapeAlias Alias ToCopy Clone Squeeze Unsqueeze")
"""Kinds whose output has the elements of their only input, in the same order."""

_ELEMENTWISE = _kinds(
    # Of one input.
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clamp ClampMax ClampMin Cos Cosh Elu Erf Erfc "
    "Erfinv Exp Exp2 Expm1 Floor FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh "
    "LeakyRelu Lgamma Log Log10 Log1P Log2 LogSigmoid Logit Mish NanToNum NativeDropout Neg Pow "
    "Reciprocal Relu Round Rsqrt RreluWithNoise Sigmoid Sign Silu Sin Sinh Softplus Softshrink "
    "Sqrt Tan Tanh Threshold Tril Triu Trunc "
    # Of several.
    "Add Addcdiv Addcmul Atan2 Div Fmax Fmin Fmod Lerp Logaddexp MaskedFill Maximum Minimum Mul "
    "PreluKernel Remainder Rsub Sub Where "
    # Losses of each element.
    "BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss SmoothL1Loss SoftMarginLoss "
    # Repetitions.
    "Expand Repeat"
)
"""Kinds that compute each element from one element of each input."""

_ALONG_DIM = _kinds(
    # With as many axes as their input.
    "Cat Cummax Cummin Cumprod Cumsum Gather Glu IndexAdd IndexSelect LogSoftmax Logcumsumexp "
    "SafeSoftmax Scatter ScatterAdd Slice SplitWithSizes UnsafeSplitWithSizes Softmax Sort Topk "
    # With fewer, or one more.
    "Amax Amin Kthvalue LinalgVectorNorm Logsumexp Max Mean Median Min Mode Nansum Norm Prod "
    "Select Stack Std StdMean Sum Unbind Var VarMean"
)

_OF_THE_LAST_AXES = {
    1: _kinds(
        "Linear MkldnnLinear ReflectionPad1D ReplicationPad1D UpsampleLinear1D "
        "UpsampleNearest1D UpsampleNearestExact1D"
    ),
    2: _kinds(
        "AdaptiveAvgPool2D AdaptiveMaxPool2D AvgPool2D MaxPool2D MaxPool2DWithIndices "
        "MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D ReflectionPad2D ReplicationPad2D "
        "UpsampleBicubic2D UpsampleBilinear2D UpsampleNearest2D UpsampleNearestExact2D"
    ),
    3: _kinds(
        "AdaptiveAvgPool3D AdaptiveMaxPool3D AvgPool3D MaxPool3DWithIndices MkldnnMaxPool3D "
        "PixelShuffle PixelUnshuffle ReflectionPad3D ReplicationPad3D UpsampleNearest3D "
        "UpsampleNearestExact3D UpsampleTrilinear3D"
    ),
}
"""Kinds that work along the last axes of their input, by their number."""

_ATTENTION = _kinds(
    "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention "
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu "
    "ScaledDotProductFusedAttentionOverrideable"
)

_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_ELEMENTWISE | {"CopyBackwards"}, _from_the_right),
    **dict.fromkeys(_ALONG_DIM, _beside_dim),
    **dict.fromkeys(_kinds("Split UnsafeSplit"), _split),
    **dict.fromkeys(_kinds("Flip Roll"), _beside_dims),
    **{kind: _in_front_of(n) for n, kinds in _OF_THE_LAST_AXES.items() for kind in kinds},
    **dict.fromkeys(_kinds("NativeLayerNorm FusedRmsNorm"), _in_front_of_normalized),
    **dict.fromkeys(_kinds("Convolution NativeGroupNorm Im2Col Col2Im"), _by_input({0: {0: 0}})),
    **dict.fromkeys(
        _kinds("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm"),
        _by_input({0: {0: 0, 1: 1}, 1: {1: 0}, 2: {1: 0}}),
    ),
    **dict.fromkeys(_ATTENTION, _by_input({place: {0: 0, 1: 1} for place in range(3)})),
    **dict.fromkeys(_kinds("NllLoss NllLoss2D"), _classes_behind_samples),
    "ConstantPadNdBackward": _in_front_of_padded,
    "PermuteBackward": _permuted,
    "TransposeBackward": _transposed,
    "TBackward": _last_axis_first,
    "MmBackward": _by_input({0: {0: 0}, 1: {1: 1}}),
    "AddmmBackward": _with_bias({1: {0: 0}, 2: {1: 1}}),
    "BmmBackward": _by_input({0: {0: 0, 1: 1}, 1: {0: 0, 2: 2}}),
    "BaddbmmBackward": _with_bias({1: {0: 0, 1: 1}, 2: {0: 0, 2: 2}}),
    "MvBackward": _by_input({0: {0: 0}}),
    "MkldnnRnnLayerBackward": _recurrent,
}
