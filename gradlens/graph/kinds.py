"""What each kind of node does with the rows of its inputs: the one table of kinds.

A kind is the name of a node's type, such as ``"AddmmBackward0"``. That of a function in Python
begins with its module, so that it is never taken for one of torch's. All that labels, operators,
losses and facts know of a kind stands in ``_PROPERTIES``. Of a kind that isn't listed nothing is
known: its rows are single elements, and its gradients are computed by running the node for one
sample at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from string import digits
from typing import Any, TypeAlias

from gradlens.graph.torch_private import function_name, saved

Node: TypeAlias = Any
"""A ``torch.autograd.graph.Node``, whose saved tensors its type doesn't declare."""


def kind(node: Node) -> str:
    """The node's name, such as ``"AddmmBackward0"``."""
    type_: Any = type(node)
    name = _kind_of(type_)
    return str(node.name()).rpartition("::")[2] if name == "CppFunction" else name


@cache
def _kind_of(type_: Hashable) -> str:
    return function_name(type_) or str(type_.__name__)  # type: ignore[attr-defined]


LEAF = "AccumulateGrad"
"""The node of a parameter, or of another tensor that was not computed."""

REENTRANT_CHECKPOINT = "torch.utils.checkpoint.CheckpointFunction"
COMPILED = "torch._functorch._aot_autograd.runtime_wrappers.CompiledFunction"
HIDING = (REENTRANT_CHECKPOINT, COMPILED)
"""Nodes that allow no backward pass besides the user's own, and hide what they are made of."""

IN_PLACE = "CopySlices"
"""An operation that has changed a view in place; it hides its kind and the shape of the view."""

SYNCHRONISED = "torch.nn.modules._functions.SyncBatchNorm"
"""Normalisation with the statistics of all processes."""

TRANSPOSE = "TBackward0"
CASTS = frozenset({"ToCopyBackward0", "AliasBackward0"})
"""Kinds whose output has the elements of their only input in the same places."""


@dataclass(frozen=True)
class Step:
    """From a node's output to one of its inputs, as the backward pass goes.

    ``place`` is the number of the input, ``output`` that of the output; ``outputs`` and ``inputs``
    are numbers of axes.
    """

    node: Node
    place: int
    output: int
    outputs: int
    inputs: int


AxisRule: TypeAlias = Callable[[Step, int], "int | None"]
"""The axis of the input that an axis of the output goes on in; ``None`` if it doesn't.

The gradient at an entry of the input's axis must depend on those at the same entry of the output's
axis alone, whatever the numbers are.
"""

Dim: TypeAlias = Callable[[Step], "list[int]"]


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of node.

    ``axes`` follows axes from its output to its inputs, and ``in_order`` says that its output has
    the elements of its only input in their order. ``weights`` are the numbers of the inputs that
    are the same for all rows, and ``data`` the name under which it saves the other one.
    ``features`` are the axes of a matrix product's output that belong to one row, by the number of
    the input that is a parameter; other kinds have their ``rows`` counted by the first axis (1),
    the first two (2), or all but the last one (-1), which it always has if it ``is_table``. It
    ``is_layer`` if it computes with parameters
    and data, unless only parameters enter, and ``is_view`` if its output has nothing but the
    elements of its only input. It ``repeats`` a smaller input for each row, ``brings_data`` or the
    number of samples without an edge for it, ``joins`` tensors, ``parts`` one, or ``selects`` rows
    of it. It ``is_linear`` in all of its inputs together, or ``is_product``, linear in each. It
    ``normalises_channels``, in train mode with the statistics of the batch. If it
    ``is_recurrent``, it computes with the steps ``[T, N, ...]`` of sequences one after the other.
    """

    axes: AxisRule | None = None
    in_order: bool = False
    weights: tuple[int, ...] = ()
    data: str = ""
    features: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    rows: int = 0
    is_table: bool = False
    is_layer: bool = False
    is_view: bool = False
    repeats: bool = False
    brings_data: bool = False
    joins: bool = False
    parts: bool = False
    selects: bool = False
    is_linear: bool = False
    is_product: bool = False
    normalises_channels: bool = False
    is_recurrent: bool = False

    def feature_axes(self, index: int, dims: int) -> tuple[int, ...]:
        """The axes of the output that belong to one row; the others count rows.

        ``index`` is the number of the input that is a parameter, ``dims`` the number of axes.
        """
        if self.features:
            return self.features.get(index, ())
        if self.rows < 0:
            return (dims - 1,) if dims > 1 or self.is_table else ()
        return tuple(range(self.rows, dims)) if self.rows else ()


@cache
def kind_of(name: str) -> Kind:
    """What is known of a kind of node, whatever number is at the end of its name.

    The derivative of what computes each element from one element does that, too.
    """
    known = _KINDS.get(name.rstrip(digits).removesuffix("Backward"))
    if known is None and name.rstrip(digits).endswith("BackwardBackward"):
        of = kind_of(name.rstrip(digits).removesuffix("Backward"))
        return Kind(axes=from_the_right) if of.axes is from_the_right else _UNKNOWN
    return known or _UNKNOWN


# How axes go on ---------------------------------------------------------------------------------


def positive(dims: int | Sequence[int] | None, axes: int) -> list[int]:
    """Axes from 0 on; nodes save negative ones as unsigned numbers."""
    given = [dims] if isinstance(dims, int) else dims or []
    return [(dim - 2**64 if dim >= 2**63 else dim) % max(axes, 1) for dim in given]


def from_the_right(step: Step, axis: int) -> int | None:
    """Each entry is computed from one entry of the input, which may be repeated."""
    return axis - step.outputs + step.inputs


def _dim(step: Step) -> list[int]:
    """The axes that a node works along, of its input or, with as many or more axes, its output."""
    dims = saved(step.node, "dim", None)
    return positive(dims, max(step.outputs, step.inputs))


def _dims(step: Step) -> list[int]:
    return positive(saved(step.node, "dims", None), max(step.outputs, step.inputs))


def _beside(dims: Dim) -> AxisRule:
    """The node works along some axes, and keeps apart what is beside them."""

    def rule(step: Step, axis: int) -> int | None:
        along, most = dims(step), max(step.outputs, step.inputs)
        others = [each for each in range(most) if each not in along]
        if not along or axis >= step.outputs:
            return None  # without axes, all are meant
        if step.outputs == step.inputs:
            return axis if axis in others else None
        if step.outputs < step.inputs:
            return others[axis] if len(others) == step.outputs else None
        return others.index(axis) if axis in others and len(others) == step.inputs else None

    return rule


def _permuted(step: Step, axis: int) -> int | None:
    return positive(saved(step.node, "dims"), step.inputs)[axis]


def _transposed(step: Step, axis: int) -> int | None:
    pair = positive((saved(step.node, "dim0"), saved(step.node, "dim1")), step.inputs)
    return pair[1 - pair.index(axis)] if axis in pair else axis


def _last_axis_first(step: Step, axis: int) -> int | None:
    return step.inputs - 1 - axis


def _in_front_of(last: int) -> AxisRule:
    """The node works along the last axes of its first input."""

    def rule(step: Step, axis: int) -> int | None:
        fits = step.place == 0 and step.inputs == step.outputs
        return axis if fits and axis < step.outputs - last else None

    return rule


def _in_front_of_normalized(step: Step, axis: int) -> int | None:
    return _in_front_of(len(saved(step.node, "normalized_shape")))(step, axis)


def _in_front_of_padded(step: Step, axis: int) -> int | None:
    return _in_front_of(len(saved(step.node, "pad")) // 2)(step, axis)


def _by_input(axes: Mapping[int, Mapping[int, int]]) -> AxisRule:
    """Axes of inputs by axes of the output, for each input's number."""
    return lambda step, axis: axes.get(step.place, {}).get(axis)


def _with_bias(axes: Mapping[int, Mapping[int, int]]) -> AxisRule:
    """The same, where input 0 is added to the output."""
    rest = _by_input(axes)
    return lambda step, axis: (rest if step.place else from_the_right)(step, axis)


def _classes_behind_samples(step: Step, axis: int) -> int | None:
    """Losses ``[N, *S]`` from class scores ``[N, C, *S]``."""
    return axis + (axis > 0)


def _pairs(step: Step, axis: int) -> int | None:
    """``[*B, P, R]`` from vectors ``[*B, P, D]`` and ``[*B, R, D]``."""
    if axis == step.outputs - 2 + step.place:
        return step.inputs - 2
    return from_the_right(step, axis) if axis < step.outputs - 2 else None


def _recurrent(step: Step, axis: int) -> int | None:
    """Sequences ``[T, N, D]`` and states ``[N, H]`` of one layer."""
    return step.inputs - 2 if axis == step.outputs - 2 and step.place in (0, 5, 6) else None


# The table --------------------------------------------------------------------------------------

_PROPERTIES: Sequence[tuple[str, dict[str, Any]]] = (
    # How axes go on. Kinds that compute each element from one element of each input:
    (
        "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Clamp ClampMax ClampMin Cos Cosh Elu Erf "
        "Erfc Erfinv Exp Exp2 Expm1 Floor FusedDropout Gelu Hardshrink Hardsigmoid Hardswish "
        "Hardtanh LeakyRelu Lgamma Log Log10 Log1P Log2 LogSigmoid Logit Mish NanToNum "
        "NativeDropout Neg Pow Reciprocal Relu Round Rsqrt RreluWithNoise Sigmoid Sign Silu Sin "
        "Sinh Softplus Softshrink Sqrt Tan Tanh Threshold Tril Triu Trunc",
        {"axes": from_the_right},
    ),
    (
        "Add Addcdiv Addcmul Atan2 Div Fmax Fmin Fmod Lerp Logaddexp MaskedFill Maximum Minimum "
        "Mul PreluKernel Remainder Rsub Sub Where CopyBackwards "
        "BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss SmoothL1Loss "
        "SoftMarginLoss Expand Repeat",
        {"axes": from_the_right},
    ),
    # Those that work along one axis, or some, and keep apart what is beside it:
    (
        "Cat Cummax Cummin Cumprod Cumsum Gather Glu IndexAdd IndexSelect LogSoftmax Logcumsumexp "
        "SafeSoftmax Scatter ScatterAdd Slice Split SplitWithSizes UnsafeSplit "
        "UnsafeSplitWithSizes Softmax Sort Topk Amax Amin Kthvalue LinalgVectorNorm Logsumexp Max "
        "Mean Median Min Mode Nansum Norm Prod Select Stack Std StdMean Sum Unbind Var VarMean",
        {"axes": _beside(_dim)},
    ),
    ("Flip Roll", {"axes": _beside(_dims)}),
    (
        "Linear MkldnnLinear ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D "
        "UpsampleNearestExact1D",
        {"axes": _in_front_of(1)},
    ),
    (
        "AdaptiveAvgPool2D AdaptiveMaxPool2D AvgPool2D MaxPool2D MaxPool2DWithIndices "
        "MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D ReflectionPad2D ReplicationPad2D "
        "UpsampleBicubic2D UpsampleBilinear2D UpsampleNearest2D UpsampleNearestExact2D",
        {"axes": _in_front_of(2)},
    ),
    (
        "AdaptiveAvgPool3D AdaptiveMaxPool3D AvgPool3D MaxPool3DWithIndices MkldnnMaxPool3D "
        "PixelShuffle PixelUnshuffle ReflectionPad3D ReplicationPad3D UpsampleNearest3D "
        "UpsampleNearestExact3D UpsampleTrilinear3D",
        {"axes": _in_front_of(3)},
    ),
    ("NativeLayerNorm FusedRmsNorm", {"axes": _in_front_of_normalized}),
    ("ConstantPadNd", {"axes": _in_front_of_padded}),
    ("Convolution NativeGroupNorm Im2Col Col2Im", {"axes": _by_input({0: {0: 0}})}),
    (
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm",
        {"axes": _by_input({0: {0: 0, 1: 1}, 1: {1: 0}, 2: {1: 0}}), "normalises_channels": True},
    ),
    (
        "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention "
        "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu "
        "ScaledDotProductFusedAttentionOverrideable",
        {"axes": _by_input({place: {0: 0, 1: 1} for place in range(3)})},
    ),
    ("NllLoss NllLoss2D", {"axes": _classes_behind_samples}),
    ("Permute", {"axes": _permuted}),
    ("Transpose", {"axes": _transposed}),
    ("T", {"axes": _last_axis_first}),
    ("Mm", {"axes": _by_input({0: {0: 0}, 1: {1: 1}})}),
    ("Addmm", {"axes": _with_bias({1: {0: 0}, 2: {1: 1}})}),
    ("Bmm", {"axes": _by_input({0: {0: 0, 1: 1}, 1: {0: 0, 2: 2}})}),
    ("Baddbmm", {"axes": _with_bias({1: {0: 0, 1: 1}, 2: {0: 0, 2: 2}})}),
    ("Mv", {"axes": _by_input({0: {0: 0}})}),
    ("Cdist", {"axes": _pairs}),
    ("MkldnnRnnLayer", {"axes": _recurrent}),
    # Log-probabilities [R] and entropies [R] of rows [R, F], by tiles of the logits.
    ("trl.kernels.chunked_logprob.ChunkedLogProbFunction", {"axes": _by_input({0: {0: 0}})}),
    (
        "View UnsafeView ReshapeAlias Alias ToCopy Clone Squeeze Unsqueeze",
        {"in_order": True},
    ),
    # Which inputs they have, and what counts their rows.
    ("Addmm", {"weights": (0, 1, 2), "data": "mat1", "features": {0: (1,), 1: (0,), 2: (1,)}}),
    ("Mm", {"weights": (0, 1), "data": "self", "features": {0: (0,), 1: (1,)}}),
    ("Bmm", {"weights": (0, 1), "data": "self", "features": {0: (1,), 1: (2,)}}),
    ("Baddbmm", {"features": {0: (2,), 1: (1,), 2: (2,)}}),
    ("Convolution", {"weights": (1, 2), "data": "input"}),
    ("Embedding EmbeddingBag", {"weights": (0,), "data": "indices"}),
    ("NativeLayerNorm", {"weights": (1, 2), "data": "input"}),
    ("NativeGroupNorm NativeBatchNorm", {"weights": (1, 2)}),
    ("MkldnnRnnLayer CudnnRnn", {"data": "input"}),
    ("MkldnnRnnLayer CudnnRnn", {"is_recurrent": True}),
    ("Mul", {"data": "self"}),
    ("Embedding", {"is_table": True}),
    ("Convolution ConvolutionOverrideable NativeGroupNorm", {"rows": 1}),
    ("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm", {"rows": 2}),
    (
        "NativeLayerNorm FusedRmsNorm Embedding EmbeddingBag Add Addcdiv Addcmul Sub Mul Div "
        "Expand Repeat RepeatInterleave Cat Stack Where Index IndexAdd IndexCopy IndexFill "
        "IndexPut IndexSelect MkldnnRnnLayer CudnnRnn Trilinear",
        {"rows": -1},
    ),
    # What they are.
    (
        "Addmm Mm Bmm Baddbmm Mv Convolution ConvolutionOverrideable NativeGroupNorm "
        "NativeLayerNorm FusedRmsNorm MkldnnRnnLayer CudnnRnn Trilinear EmbeddingBag "
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm",
        {"is_layer": True},
    ),
    (
        "T Alias ToCopy View UnsafeView ReshapeAlias Permute Transpose Squeeze Unsqueeze Clone "
        "Slice Select Split SplitWithSizes Unbind AsStrided Diagonal Detach Neg Flip Roll",
        {"is_view": True, "is_linear": True},
    ),
    ("Add Sub Mul Div Expand Repeat Where Maximum Minimum", {"repeats": True}),
    (
        "Index IndexAdd IndexCopy IndexFill IndexPut IndexReduce IndexSelect Embedding "
        "EmbeddingBag Gather Scatter ScatterAdd ScatterReduce MaskedFill MaskedScatter "
        "MaskedSelect Where Take Repeat RepeatInterleave Expand "
        "torch.utils.checkpoint.CheckpointFunction",
        {"brings_data": True},
    ),
    ("Stack Cat", {"joins": True}),
    (
        "Select Unbind Split UnsafeSplit SplitWithSizes UnsafeSplitWithSizes Slice",
        {"parts": True},
    ),
    ("Index IndexSelect MaskedSelect Gather Take Topk Kthvalue Median", {"selects": True}),
    (
        "Add Sub Rsub Mean Sum Stack Cat NllLoss NllLoss2D MaskedFill Gather Index IndexSelect "
        "MaskedSelect Expand Reshape Nansum",
        {"is_linear": True},
    ),
    ("Div Dot Mul", {"is_product": True}),
)
"""Properties of kinds, by their names without ``Backward`` and the number behind it."""

_UNKNOWN = Kind()


def _table() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for names, properties in _PROPERTIES:
        for name in names.split():
            found[name] = replace(found.get(name, _UNKNOWN), **properties)
    return found


_KINDS: Mapping[str, Kind] = _table()
