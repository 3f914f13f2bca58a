"""The properties of each kind of node, except for the rules of ``gradlens.gradients.rules``.

A kind is the name of a node's type, such as ``"AddmmBackward0"``. An unknown kind has none of the
properties below: its rows are single elements, and its gradients are computed by running the node
for one sample at a time.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

Node: TypeAlias = Any
"""A ``torch.autograd.graph.Node``, whose saved tensors its type doesn't declare."""


def kind(node: Node) -> str:
    """The node's name, such as ``"AddmmBackward0"``."""
    type_: Any = type(node)
    name = _kind_of(type_)
    return str(node.name()).rpartition("::")[2] if name == "CppFunction" else name


@cache
def _kind_of(type_: Hashable) -> str:
    return str(type_.__name__)  # type: ignore[attr-defined]


LEAF = "AccumulateGrad"
"""The node of a parameter, or of another tensor that was not computed."""

REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
COMPILED = "CompiledFunctionBackward"
HIDING = (REENTRANT_CHECKPOINT, COMPILED)
"""Nodes that allow no backward pass besides the user's own, and hide what they are made of."""

IN_PLACE = "CopySlices"
"""An operation that has changed a view in place; it hides its kind and the shape of the view."""

SYNCHRONISED = "SyncBatchNormBackward"
"""Normalisation with the statistics of all processes."""

TRANSPOSE = "TBackward0"
CASTS = frozenset({"ToCopyBackward0", "AliasBackward0"})
"""Kinds whose output has the elements of their only input in the same places."""


@dataclass(frozen=True)
class NodeKind:
    """Which inputs a kind of node has.

    ``weights`` are the numbers of the inputs that are the same for all rows. ``data`` is the name
    under which the node saves the other one. ``features`` are the axes of a matrix product's output
    that belong to one row, by the number of the input that is a parameter.
    """

    weights: tuple[int, ...] = ()
    data: str = ""
    features: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


_UNKNOWN = NodeKind()
_KNOWN: Mapping[str, NodeKind] = {
    "AddmmBackward0": NodeKind((0, 1, 2), "mat1", {0: (1,), 1: (0,), 2: (1,)}),
    "MmBackward0": NodeKind((0, 1), "self", {0: (0,), 1: (1,)}),
    "BmmBackward0": NodeKind((0, 1), "self", {0: (1,), 1: (2,)}),
    "BaddbmmBackward0": NodeKind(features={0: (2,), 1: (1,), 2: (2,)}),
    "ConvolutionBackward0": NodeKind((1, 2), "input"),
    "EmbeddingBackward0": NodeKind((0,), "indices"),
    "EmbeddingBagBackward0": NodeKind((0,), "indices"),
    "NativeLayerNormBackward0": NodeKind((1, 2), "input"),
    "NativeGroupNormBackward0": NodeKind((1, 2)),
    "NativeBatchNormBackward0": NodeKind((1, 2)),
    "MkldnnRnnLayerBackward0": NodeKind(data="input"),
    "MulBackward0": NodeKind(data="self"),
}


def node_kind(kind: str) -> NodeKind:
    """Which inputs nodes of a kind have."""
    return _KNOWN.get(kind, _UNKNOWN)


LAYERS = re.compile(
    r"^(Addmm|Mm|Bmm|Baddbmm|Mv|Convolution|NativeGroupNorm|NativeLayerNorm|FusedRmsNorm|MkldnnRnn"
    r"|CudnnRnn|Trilinear|EmbeddingBag|(Native|Cudnn|Miopen)BatchNorm)"
)
"""Kinds that compute with parameters and data, unless nothing but parameters enters."""

VIEWS = re.compile(
    r"^(T|Alias|ToCopy|View|UnsafeView|ReshapeAlias|Permute|Transpose|Squeeze|Unsqueeze|Clone|"
    r"Slice|Select|Split|SplitWithSizes|Unbind|AsStrided|Diagonal|Detach|Neg|Flip|Roll)Backward\d*$"
)
"""Kinds whose output has nothing but the elements of their only input."""

BROADCASTING = re.compile(r"^(Add|Sub|Mul|Div|Expand|Repeat|Where|Maximum|Minimum)Backward")
"""Kinds that repeat a smaller input for each row."""

INDEXING = re.compile(r"Index|Embedding|Gather|Scatter|Masked|Where|Take|Repeat|Expand|Checkpoint")
"""Kinds that bring in data, or the number of samples, without having an edge for it."""

CHANNEL_NORMALISATION = re.compile(r"^(Native|Cudnn|Miopen)BatchNorm")
"""Kinds that normalise channels, in train mode with the statistics of the batch."""

JOINING = re.compile(r"^(Stack|Cat)Backward")
"""Kinds that put tensors together."""

PARTING = re.compile(r"^(Select|Unbind|(Unsafe)?Split(WithSizes)?|Slice)Backward")
"""Kinds whose outputs are parts of their input."""

SELECT = "SelectBackward0"
"""The node of one entry of an axis."""

STACKING = re.compile(r"^StackBackward")
"""The kind whose output has a row for each of its inputs."""

SELECTING = re.compile(r"^(Index|IndexSelect|MaskedSelect|Gather|Take)Backward")
"""Kinds whose output has some rows of their input."""

_IMAGES = re.compile(r"^(Convolution|NativeGroupNorm)")
_LAST_AXIS = re.compile(
    r"^(NativeLayerNorm|FusedRmsNorm|Embedding|Add|Sub|Mul|Div|Expand|Repeat|Cat|Stack|Where|Index"
    r"|MkldnnRnn|CudnnRnn|Trilinear)"
)


def feature_axes(kind: str, index: int, dims: int) -> tuple[int, ...]:
    """The axes of a node's output that belong to one row; the others count rows.

    ``index`` is the number of the input that is a parameter, ``dims`` the output's number of axes.
    """
    products = node_kind(kind).features
    if products:
        return products.get(index, ())
    if _IMAGES.match(kind):
        return tuple(range(1, dims))
    if CHANNEL_NORMALISATION.match(kind):
        return tuple(range(2, dims))
    if kind == "EmbeddingBackward0":
        return (dims - 1,)
    return (dims - 1,) if _LAST_AXIS.match(kind) and dims > 1 else ()
