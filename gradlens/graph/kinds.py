"""What each kind of node does with the rows of its inputs: the one table of kinds.

A kind is the name of a node's type, such as ``"AddmmBackward0"``. That of a function in Python
begins with its module, so that it is never taken for one of torch's. All that labels, operators,
losses and facts know of a kind stands in ``_PROPERTIES``. Of a kind that isn't listed nothing is
known: its rows are single elements, and its gradients are computed by running the node for one
sample at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from string import digits
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from gradlens.numerics.tensors import accumulable
from gradlens.torch_private import function_name, saved, signed

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


def plain_name(kind_: str) -> str:
    """The name of an operation, such as ``"Addmm"``, from that of its kind."""
    return kind_.rstrip(digits).removesuffix("Backward")


def called(kind_: str) -> str:
    """What functions and activations are called, such as ``"leaky_relu"``, by their kinds."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", plain_name(kind_)).lower()
    return words.removesuffix("_kernel")


TRANSPOSE = "TBackward0"
CASTS = frozenset({"ToCopyBackward0", "AliasBackward0"})
"""Kinds whose output has the elements of their only input in the same places."""


@dataclass(frozen=True, eq=False)
class Step:
    """From a node's output to its input number ``place``, as the backward pass goes.

    ``output`` is the number of the output; ``above`` is its shape, and ``below`` the input's.
    """

    node: Node
    place: int
    output: int
    above: tuple[int, ...]
    below: tuple[int, ...]

    @property
    def outputs(self) -> int:
        """The number of axes of the output."""
        return len(self.above)

    @property
    def inputs(self) -> int:
        """The number of axes of the input."""
        return len(self.below)

    @property
    def dim(self) -> int:
        """The axis that the node works along, in the tensor with more axes."""
        return _dim(self)[0]

    def saved(self, name: str) -> int:
        """An integer that the node has saved."""
        return signed(int(saved(self.node, name)))


AxisRule: TypeAlias = Callable[[Step, int], "int | None"]
"""The axis of the input that an axis of the output goes on in; ``None`` if it doesn't.

The gradient at an entry of the input's axis must depend on those at the same entry of the output's
axis alone, whatever the numbers are.
"""

Dim: TypeAlias = Callable[[Step], "list[int]"]

Values: TypeAlias = Callable[[Node, bool], Tensor]
"""The values of a node, from what it has saved; the flag says whether weights are to count."""


@dataclass(frozen=True)
class Kind:
    """What is known of a kind of node.

    ``axes`` follows axes from its output to its inputs, and ``in_order`` says that its output has
    the elements of its only input in their order. ``weights`` are the numbers of the inputs that
    are the same for all rows, and ``data`` the name under which it saves the other one.
    ``features`` are the axes of a matrix product's output that belong to one row, by the number of
    the input that is a parameter; other kinds have their ``rows`` counted by the first axis (1),
    the first two (2), or all but the last one (-1), which it always has if it ``is_table``. It
    ``is_layer`` if it computes with parameters and data, unless only parameters enter, and
    ``is_view`` if its output has nothing but the elements of its only input. It ``repeats`` a
    smaller input for each row, ``brings_data`` that no edge leads to, such as an index whose length
    may be N, ``joins`` tensors, or ``selects`` rows of one. It ``is_linear`` in all of its inputs
    together, ``is_piecewise_linear`` in them, or ``is_product``, linear in each. Its input
    ``is_subtracted`` from another tensor or from a number. It
    ``normalises_channels``, in train mode with the statistics of the batch. If it ``is_recurrent``,
    it computes with the steps ``[T, N, ...]`` of sequences one after the other.

    Of networks: it ``is_affine`` if it multiplies data by a weight, ``is_activation``, and
    ``stays_finite`` if its input does. It ``makes_probabilities`` or their logarithms, or
    ``takes_scores`` to compute these; it ``is_logarithm``, or ``is_guard``, which keeps one finite.
    It ``is_arithmetic`` of two tensors, ``is_division``, ``is_difference`` of predictions and
    targets, or a product ``of_vectors``.

    Of losses: it reduces by a ``reduction``, or has known ``values``, of the shape of its output.
    Those of a loss function, which compares its input with ``targets`` and may reduce them itself,
    have the shape of its inputs. ``row_axis`` is the name under which it saves an axis that belongs
    to a row.
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
    selects: bool = False
    is_linear: bool = False
    is_subtracted: bool = False
    is_piecewise_linear: bool = False
    is_product: bool = False
    normalises_channels: bool = False
    is_recurrent: bool = False
    is_affine: bool = False
    is_activation: bool = False
    stays_finite: bool = False
    makes_probabilities: bool = False
    takes_scores: bool = False
    is_logarithm: bool = False
    is_guard: bool = False
    is_arithmetic: bool = False
    is_division: bool = False
    is_difference: bool = False
    of_vectors: bool = False
    reduction: Literal["", "mean", "sum"] = ""
    values: Values | None = None
    targets: Literal["", "classes", "probabilities", "numbers"] = ""
    row_axis: str = ""

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
    known = _KINDS.get(plain_name(name))
    if known is None and name.rstrip(digits).endswith("BackwardBackward"):
        of = kind_of(plain_name(name))
        return Kind(axes=from_the_right) if of.axes is from_the_right else _UNKNOWN
    return known or _UNKNOWN


def is_linear(node: Node, up_to_constant: bool = False) -> bool:
    """Whether a node's output is linear in those of its inputs that depend on the parameters."""
    known = [child is not None for child, _ in node.next_functions]
    its = kind_of(kind(node))
    if its.is_subtracted and len(known) == 1:  # from a number, which has no edge
        known.append(False)
    if its.is_product:
        return sum(known) == 1 and (known[0] or not its.is_division)
    return its.is_linear and any(known) and (up_to_constant or all(known))


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


def _of_matrices(step: Step, axis: int) -> int | None:
    """Matrices ``[*B, P, R]``, each computed from those of the same entry of B alone."""
    return from_the_right(step, axis) if axis < step.outputs - 2 else None


def _recurrent(step: Step, axis: int) -> int | None:
    """Sequences ``[T, N, D]`` and states ``[N, H]`` of one layer."""
    return step.inputs - 2 if axis == step.outputs - 2 and step.place in (0, 5, 6) else None


# Values of losses -------------------------------------------------------------------------------


def _result(name: str = "result") -> Values:
    return lambda node, weighted: saved(node, name)


def _of_saved(function: Callable[..., Tensor], *names: str) -> Values:
    return lambda node, weighted: function(*(saved(node, name) for name in names))


def _of_errors(function: Callable[..., Tensor], *options: str) -> Values:
    """A loss function of ``self`` and ``target``, which are saved with its options."""

    def values(node: Node, weighted: bool) -> Tensor:
        given = {name: saved(node, name) for name in options if weighted or name not in WEIGHTS}
        for name in WEIGHTS & given.keys():
            given[name] = None if given[name] is None else accumulable(given[name])
        if "ignore_index" in given:
            given["ignore_index"] = signed(given["ignore_index"])
        inputs = accumulable(saved(node, "self"))
        targets = accumulable(saved(node, "target"))
        return function(inputs, targets, reduction="none", **given)

    return values


WEIGHTS = frozenset({"weight", "pos_weight"})
"""Names under which loss functions save weights of classes and samples."""


# The table --------------------------------------------------------------------------------------

_PROPERTIES: Sequence[tuple[str, dict[str, Any]]] = (
    # How axes go on. Kinds that compute each element from one element of each input:
    (
        "Abs Acos Acosh Angle Asin Asinh Atan Atanh Ceil Celu Clamp ClampMax ClampMin Conj "
        "ConjPhysical Cos Cosh Deg2Rad Digamma Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor Frac "
        "FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh I0 LeakyRelu Lgamma Log Log10 "
        "Log1P Log2 LogSigmoid Logit Mish Mvlgamma NanToNum NativeDropout Neg Polygamma Pow "
        "Rad2Deg Reciprocal Relu Round Rsqrt RreluWithNoise Sgn Sigmoid Sign Silu Sin Sinc Sinh "
        "Softplus Softshrink SpecialEntr SpecialErfcx SpecialLogNdtr SpecialNdtri Sqrt Tan Tanh "
        "Threshold Tril Triu Trunc",
        {"axes": from_the_right},
    ),
    (
        "Add Addcdiv Addcmul Atan2 Complex Copysign Div Fmax Fmin Fmod Hypot Ldexp Lerp Logaddexp "
        "Logaddexp2 MaskedFill Maximum Minimum Mul Polar PreluKernel Remainder Rsub "
        "SpecialXlog1Py Sub Where Xlogy CopyBackwards "
        "BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss SmoothL1Loss "
        "SoftMarginLoss Expand Repeat",
        {"axes": from_the_right},
    ),
    # Those that work along one axis, or some, and keep apart what is beside it:
    (
        "Cat Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C Gather Glu IndexAdd IndexSelect "
        "LogSoftmax Logcumsumexp SafeSoftmax Scatter ScatterAdd Slice Split SplitWithSizes "
        "UnsafeSplit UnsafeSplitWithSizes Softmax Sort Topk Amax Amin Kthvalue LinalgVectorNorm "
        "Logsumexp Max Mean Median Min Mode Nansum Norm Prod Select Stack Std StdMean Sum Unbind "
        "Var VarMean",
        {"axes": _beside(_dim)},
    ),
    ("Flip Roll", {"axes": _beside(_dims)}),
    (
        "Linear MkldnnLinear ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D "
        "UpsampleNearestExact1D",
        {"axes": _in_front_of(1)},
    ),
    (
        "AdaptiveAvgPool2D AdaptiveMaxPool2D AvgPool2D FractionalMaxPool2D MaxPool2D "
        "MaxPool2DWithIndices MaxUnpool2D MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D ReflectionPad2D "
        "ReplicationPad2D UpsampleBicubic2D UpsampleBilinear2D UpsampleNearest2D "
        "UpsampleNearestExact2D",
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
    (
        "AffineGridGenerator ChannelShuffle Convolution NativeGroupNorm Im2Col Col2Im",
        {"axes": _by_input({0: {0: 0}})},
    ),
    (
        "GridSampler2D GridSampler3D CudnnGridSampler",
        {"axes": _by_input({0: {0: 0, 1: 1}, 1: {0: 0}})},
    ),
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
    (
        "LinalgSolveTriangular LinalgInvEx LinalgCholeskyEx LinalgMatrixExp",
        {"axes": _of_matrices},
    ),
    ("MkldnnRnnLayer", {"axes": _recurrent}),
    # Log-probabilities [R] and entropies [R] of rows [R, F], by tiles of the logits.
    ("trl.kernels.chunked_logprob.ChunkedLogProbFunction", {"axes": _by_input({0: {0: 0}})}),
    ("View UnsafeView ReshapeAlias Alias ToCopy Clone Squeeze Unsqueeze", {"in_order": True}),
    # Which inputs they have, and what counts their rows.
    ("Addmm", {"weights": (0, 1, 2), "data": "mat1", "features": {0: (1,), 1: (0,), 2: (1,)}}),
    ("Mm", {"weights": (0, 1), "data": "self", "features": {0: (0,), 1: (1,)}}),
    ("Bmm", {"weights": (0, 1), "data": "self", "features": {0: (1,), 1: (2,)}}),
    ("Baddbmm", {"features": {0: (2,), 1: (1,), 2: (2,)}}),
    ("Convolution", {"weights": (1, 2), "data": "input"}),
    ("Embedding EmbeddingBag", {"weights": (0,), "data": "indices"}),
    ("NativeLayerNorm", {"weights": (1, 2), "data": "input"}),
    ("NativeGroupNorm NativeBatchNorm", {"weights": (1, 2), "data": "input"}),
    ("MkldnnRnnLayer CudnnRnn", {"data": "input", "is_recurrent": True}),
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
        "AdaptiveMaxPool2D AdaptiveMaxPool3D Clamp ClampMax ClampMin ConstantPadNd Hardtanh "
        "LeakyRelu MaxPool2DWithIndices MaxPool3DWithIndices NativeDropout Relu Threshold "
        "Where",
        {"is_piecewise_linear": True},
    ),
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
    ("Add Sub Rsub Mul Div Expand Repeat Where Maximum Minimum", {"repeats": True}),
    (
        "Index IndexAdd IndexCopy IndexFill IndexPut IndexReduce IndexSelect Embedding "
        "EmbeddingBag Gather Scatter ScatterAdd ScatterReduce MaskedFill MaskedScatter "
        "MaskedSelect Where Take Repeat RepeatInterleave Expand "
        "torch.utils.checkpoint.CheckpointFunction",
        {"brings_data": True},
    ),
    ("Stack Cat", {"joins": True}),
    ("Index IndexSelect MaskedSelect Gather Take Topk Kthvalue Median", {"selects": True}),
    (
        "Add Sub Rsub Mean Sum Stack Cat NllLoss NllLoss2D MaskedFill Gather Index IndexSelect "
        "IndexAdd ScatterAdd MaskedSelect Expand Repeat Reshape Nansum AvgPool2D AvgPool3D "
        "AdaptiveAvgPool2D AdaptiveAvgPool3D",
        {"is_linear": True},
    ),
    ("Rsub", {"is_subtracted": True}),
    ("Bmm Div Dot Mm Mul Mv", {"is_product": True}),
    ("Div", {"is_division": True}),
    ("Add Sub Mul Div", {"is_arithmetic": True}),
    ("Mv Dot Vdot", {"of_vectors": True}),
    # What they are in networks.
    ("Addmm Mm Convolution Bmm Linear", {"is_affine": True}),
    (
        "Elu Gelu Hardswish Hardtanh LeakyRelu Mish PreluKernel Relu Sigmoid Silu Softplus Tanh "
        "Threshold",
        {"is_activation": True, "stays_finite": True},
    ),
    ("LogSoftmax Sigmoid Softmax", {"makes_probabilities": True, "stays_finite": True}),
    ("BinaryCrossEntropyWithLogits LogSigmoid LogSoftmax", {"takes_scores": True}),
    (
        "AdaptiveAvgPool2D AdaptiveAvgPool3D AvgPool2D AvgPool3D LogSigmoid MaxPool2D "
        "MaxPool2DWithIndices MaxPool3DWithIndices Mean NativeDropout Neg",
        {"stays_finite": True},
    ),
    ("BinaryCrossEntropy Log", {"is_logarithm": True}),
    ("Add Clamp ClampMin", {"is_guard": True}),
    # What they are in losses. Functions of a pair expand it, an L1 loss is a difference.
    ("Sub MseLoss SmoothL1Loss HuberLoss", {"is_difference": True}),
    ("Mean", {"reduction": "mean"}),
    ("Sum", {"reduction": "sum"}),
    ("Exp LinalgVectorNorm LogSoftmax Logsumexp Relu Sigmoid Sqrt", {"values": _result()}),
    ("LogSoftmax", {"row_axis": "dim"}),
    ("CtcLoss", {"values": _result("result0")}),
    ("Abs", {"values": _of_saved(torch.abs, "self")}),
    ("ClampMin", {"values": _of_saved(torch.clamp_min, "self", "min")}),
    ("Div", {"values": _of_saved(torch.div, "self", "other")}),
    ("Log", {"values": _of_saved(torch.log, "self")}),
    ("LogSigmoid", {"values": _of_saved(functional.logsigmoid, "self")}),
    ("Maximum", {"values": _of_saved(torch.maximum, "self", "other")}),
    ("Minimum", {"values": _of_saved(torch.minimum, "self", "other")}),
    ("Mul", {"values": _of_saved(torch.mul, "self", "other")}),
    ("Pow", {"values": _of_saved(torch.pow, "self", "exponent")}),
    ("Softplus", {"values": _of_saved(functional.softplus, "self", "beta", "threshold")}),
    ("Xlogy", {"values": _of_saved(torch.xlogy, "self", "other")}),
    ("NllLoss NllLoss2D", {"targets": "classes"}),
    ("NllLoss NllLoss2D", {"values": _of_errors(functional.nll_loss, "weight", "ignore_index")}),
    ("BinaryCrossEntropy BinaryCrossEntropyWithLogits", {"targets": "probabilities"}),
    ("BinaryCrossEntropy", {"values": _of_errors(functional.binary_cross_entropy, "weight")}),
    (
        "BinaryCrossEntropyWithLogits",
        {"values": _of_errors(functional.binary_cross_entropy_with_logits, *WEIGHTS)},
    ),
    ("HuberLoss MseLoss SmoothL1Loss SoftMarginLoss", {"targets": "numbers"}),
    ("HuberLoss", {"values": _of_errors(functional.huber_loss, "delta")}),
    ("MseLoss", {"values": _of_errors(functional.mse_loss)}),
    ("SmoothL1Loss", {"values": _of_errors(functional.smooth_l1_loss, "beta")}),
    ("SoftMarginLoss", {"values": _of_errors(functional.soft_margin_loss)}),
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
