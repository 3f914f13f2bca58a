"""One use of a parameter, taken apart into samples at the node of the graph where it meets them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradlens.individual.convolution import Convolution, Geometry
from gradlens.individual.dense import Dense
from gradlens.individual.folding import Order, by_sample
from gradlens.individual.graph import Link, Node, Use, kind, output_shape
from gradlens.individual.operator import GradientOperator, accumulable
from gradlens.individual.outer_product import OuterProduct, SumOfOuterProducts
from gradlens.individual.rows import IndexedRows

MAX_BYTES = 2**31
"""More memory than this is not taken for the individual gradients of one use."""

Saved: TypeAlias = dict[str, Tensor]
"""Tensors that a node has saved, by their names there."""


class UnknownUseError(Exception):
    """Why a use of a parameter can't be taken apart into samples."""


@dataclass(frozen=True)
class Meeting:
    """A use with what is known of it in the backward pass.

    ``gradient`` is that at the output of the use's node. ``layout`` are the axes that the rows of
    a matrix stand for. ``preferred_axis`` counts the samples where several axes have length N.
    ``order`` says that the leading axis counts samples folded with another axis.
    """

    use: Use
    gradient: Tensor
    saved: Saved
    layout: tuple[int, ...] | None
    samples: int
    scale: float
    preferred_axis: int = 0
    order: Order | None = None

    @property
    def may_be_folded(self) -> bool:
        """Whether the leading axis may count N samples and something else."""
        rows = len(self.gradient) if self.gradient.dim() else 0
        return rows > self.samples and rows % self.samples == 0


def saved_tensors(node: Node) -> Saved:
    """What a rule needs of a node's saved tensors, before the backward pass reaches it.

    Inside activation checkpointing they may be asked for only once within a backward pass.
    """
    names = _SAVED.get(kind(node), ())
    found = {name: getattr(node, name) for name in names}
    return {name: tensor.detach() for name, tensor in found.items() if tensor is not None}


def flaw_of(use: Use, samples: int) -> str:
    """Why the nodes of a use can't be run for single samples, before the backward pass."""
    by_rule = samples > 1 and (kind(use.node), use.index) in _RULES
    for node in [link.node for link in use.chain] + ([] if by_rule else [use.node]):
        if not re.fullmatch(r"\w+Backward\d+", kind(node)):
            return f"it is used in {kind(node)}, whose inside can't be seen"
        if not _is_repeatable(node):
            return "it is used inside activation checkpointing"
    return ""


def operator_of(meeting: Meeting) -> GradientOperator | None:
    """Individual gradients by one use; ``None`` for one that no sample has a share in.

    ``UnknownUseError`` says why there are none.
    """
    use = meeting.use
    if meeting.samples == 1:
        return _whole(meeting)
    if meeting.gradient.numel() == 1:
        return None
    return _RULES.get((kind(use.node), use.index), _one_by_one)(meeting)


def _whole(meeting: Meeting) -> GradientOperator:
    """The gradient of a batch of one is that of its sample."""
    found = _run(Link(meeting.use.node, 0, meeting.use.index), meeting.gradient)
    return _down(meeting, found)


def _matrix(meeting: Meeting) -> GradientOperator:
    """The second factor of a matrix product: xₙᵀδₙ, or transposed by what is in between."""
    saved = meeting.saved.get("_saved_mat1", meeting.saved.get("_saved_self"))
    if saved is None:
        raise UnknownUseError("its matrix product has kept no input")
    delta = meeting.gradient * getattr(meeting.use.node, "_saved_alpha", 1)
    left, right = _by_sample(meeting, saved), _by_sample(meeting, delta)
    kinds = [kind(link.node) for link in meeting.use.chain]
    if set(kinds) <= _HARMLESS:
        flipped = sum(name == "TBackward0" for name in kinds) % 2 == 1
        first, second = (right, left) if flipped else (left, right)
        if first.shape[1] == 1:
            return OuterProduct(first[:, 0], second[:, 0], meeting.scale)
        return SumOfOuterProducts(first, second, meeting.scale)
    _check_memory(meeting, meeting.use.shape)
    return _down(meeting, accumulable(left).mT @ accumulable(right).to(accumulable(left).dtype))


def _matrix_bias(meeting: Meeting) -> GradientOperator:
    delta = accumulable(meeting.gradient) * getattr(meeting.use.node, "_saved_beta", 1)
    summed = _by_sample(meeting, delta).sum(1)
    if summed[0].numel() != torch.Size(meeting.use.shape).numel():
        raise UnknownUseError("it is added to each row of a matrix by another rule than a bias")
    return _down(meeting, summed)


def _added(meeting: Meeting) -> GradientOperator:
    node = meeting.use.node
    sign = -1 if kind(node) == "SubBackward0" else 1
    factor = sign * node._saved_alpha if meeting.use.index == 1 else 1
    return _down(meeting, _unbroadcast(meeting, accumulable(meeting.gradient) * factor))


def _multiplied(meeting: Meeting) -> GradientOperator:
    name = "_saved_other" if meeting.use.index == 0 else "_saved_self"
    other = meeting.saved.get(name)
    if other is None:
        raise UnknownUseError("its product has kept no other factor")
    return _down(meeting, _unbroadcast(meeting, accumulable(meeting.gradient) * other))


def _expanded(meeting: Meeting) -> GradientOperator:
    return _down(meeting, _unbroadcast(meeting, accumulable(meeting.gradient)))


def _convolution(meeting: Meeting) -> GradientOperator:
    node, inputs = meeting.use.node, meeting.saved.get("_saved_input")
    if node._saved_transposed or inputs is None or len(meeting.gradient) != meeting.samples:
        return _one_by_one(meeting)
    sides = [side for p in reversed(node._saved_padding) for side in (p, p)]
    kernel = tuple(meeting.use.shape[2:])
    geometry = Geometry(
        kernel, tuple(node._saved_stride), tuple(node._saved_dilation), node._saved_groups
    )
    operator = Convolution(meeting.gradient, F.pad(inputs, sides), geometry, meeting.scale)
    if not meeting.use.chain:
        return operator
    _check_memory(meeting, meeting.use.shape)
    return _down(meeting, operator.dense() / meeting.scale)


def _convolution_bias(meeting: Meeting) -> GradientOperator:
    gradient = accumulable(meeting.gradient)
    if len(gradient) != meeting.samples:
        raise UnknownUseError("its convolution doesn't have the samples in front")
    return _down(meeting, gradient.flatten(2).sum(2))


def _embedding(meeting: Meeting) -> GradientOperator:
    node, indices = meeting.use.node, meeting.saved["_saved_indices"]
    axis = _axis_among(meeting, tuple(indices.shape))
    if node._saved_scale_grad_by_freq or meeting.use.chain:
        return _one_by_one(meeting)
    indices = indices.movedim(axis, 0).reshape(meeting.samples, -1)
    delta = accumulable(meeting.gradient).movedim(axis, 0).reshape(*indices.shape, -1)
    delta = delta.masked_fill((indices == node._saved_padding_idx)[..., None], 0)
    return IndexedRows(indices, delta, meeting.use.shape[0], meeting.scale)


def _layer_norm(meeting: Meeting) -> GradientOperator:
    """Weight and bias of a layer norm over the last axes."""
    gradient = accumulable(meeting.gradient)
    if meeting.use.index == 2:
        return _down(meeting, _unbroadcast(meeting, gradient))
    inputs, mean, inverse = (meeting.saved.get(name) for name in _SAVED["NativeLayerNormBackward0"])
    if inputs is None or mean is None or inverse is None:
        return _one_by_one(meeting)
    normalized = (accumulable(inputs) - mean) * inverse
    return _down(meeting, _unbroadcast(meeting, gradient * normalized))


def _one_by_one(meeting: Meeting) -> GradientOperator:
    """Any node is linear in the gradient: run it with that of one sample at a time."""
    gradient, use = meeting.gradient, meeting.use
    _check_memory(meeting, use.shape)
    contributions = []
    for sample in range(meeting.samples):
        share = torch.zeros_like(gradient)
        _of_sample(meeting, share, sample).copy_(_of_sample(meeting, gradient, sample))
        contributions.append(_run(Link(use.node, 0, use.index), share))
    return _down(meeting, torch.stack(contributions))


def _of_sample(meeting: Meeting, gradient: Tensor, sample: int) -> Tensor:
    """A view of one sample's part."""
    if meeting.order is not None:
        return by_sample(gradient, meeting.samples, meeting.order)[sample]
    axis = _broadcast_axis(meeting)
    axis = _axis_among(meeting, tuple(gradient.shape)) if axis is None else axis
    return gradient.select(axis, sample)


_RULES: dict[tuple[str, int], Callable[[Meeting], GradientOperator]] = {
    ("AddmmBackward0", 2): _matrix,
    ("MmBackward0", 1): _matrix,
    ("AddmmBackward0", 0): _matrix_bias,
    ("AddBackward0", 0): _added,
    ("AddBackward0", 1): _added,
    ("SubBackward0", 0): _added,
    ("SubBackward0", 1): _added,
    ("MulBackward0", 0): _multiplied,
    ("MulBackward0", 1): _multiplied,
    ("ExpandBackward0", 0): _expanded,
    ("ConvolutionBackward0", 1): _convolution,
    ("ConvolutionBackward0", 2): _convolution_bias,
    ("EmbeddingBackward0", 0): _embedding,
    ("NativeLayerNormBackward0", 1): _layer_norm,
    ("NativeLayerNormBackward0", 2): _layer_norm,
}
_SAVED = {
    "AddmmBackward0": ("_saved_mat1",),
    "MmBackward0": ("_saved_self",),
    "MulBackward0": ("_saved_self", "_saved_other"),
    "ConvolutionBackward0": ("_saved_input",),
    "EmbeddingBackward0": ("_saved_indices",),
    "NativeLayerNormBackward0": ("_saved_input", "_saved_result1", "_saved_result2"),
}
_HARMLESS = {"TBackward0", "ToCopyBackward0", "AliasBackward0"}
"""Links through which a structured gradient goes as it is, or transposed."""


def _down(meeting: Meeting, contributions: Tensor) -> Dense:
    """From gradients of the use's input ``[N, ...]`` along the chain to those of the parameter."""
    found = contributions.reshape(meeting.samples, *meeting.use.shape)
    for link in meeting.use.chain:
        found = torch.stack([_run(link, part) for part in found])
    return Dense(found, meeting.scale)


def _run(link: Link, gradient: Tensor) -> Tensor:
    """What a node makes of a gradient, of the shape of the input in question."""
    given: list[Tensor | None] = [None] * len(link.node._input_metadata)
    given[link.output] = gradient.to(link.node._input_metadata[link.output].dtype)
    found = link.node(*given)
    result: Tensor | None = found[link.input] if isinstance(found, tuple) else found
    shape = output_shape(*link.node.next_functions[link.input])
    # The engine, not the node, adds up what was broadcast.
    return gradient.new_zeros(shape) if result is None else result.sum_to_size(shape)


def _by_sample(meeting: Meeting, matrix: Tensor) -> Tensor:
    """Rows ``[R, K]`` as ``[N, S, K]``."""
    rows, n = len(matrix), meeting.samples
    if meeting.order is not None:
        return by_sample(matrix, n, meeting.order)
    if rows == n or n == 1:
        return matrix[:, None] if rows == n else matrix[None]
    if meeting.layout is None:
        raise UnknownUseError(f"nothing tells which of its {rows} rows belong to which sample")
    axis = _axis_among(meeting, meeting.layout)
    unfolded = matrix.reshape(*meeting.layout, matrix.shape[1])
    return unfolded.movedim(axis, 0).flatten(1, -2)


def _axis_among(meeting: Meeting, shape: tuple[int, ...]) -> int:
    axes = [axis for axis, length in enumerate(shape) if length == meeting.samples]
    if not axes:
        raise UnknownUseError(f"no axis of {list(shape)} counts the {meeting.samples} samples")
    return _likeliest(meeting, axes, shape)


def _likeliest(meeting: Meeting, axes: list[int], shape: tuple[int, ...]) -> int:
    """The samples' axis among those of length N; ``UnknownUseError`` if it may be none of them."""
    if meeting.preferred_axis in axes:
        return meeting.preferred_axis
    samples = meeting.samples
    before = shape[: axes[0]]
    if any(length > samples and length % samples == 0 for length in before):
        raise UnknownUseError(
            f"samples may be folded with another axis in {list(shape)}, where N = {samples}"
        )
    if len(axes) > 1 and kind(meeting.use.node) == "BmmBackward0":
        raise UnknownUseError(f"two axes of {list(shape)} have as many entries as samples")
    return axes[0]


def _unbroadcast(meeting: Meeting, gradient: Tensor) -> Tensor:
    """Sum over the axes along which the parameter was broadcast, but for the samples'."""
    if meeting.order is not None:
        return _unbroadcast_folded(meeting, gradient, meeting.order)
    axis = _broadcast_axis(meeting)
    if axis is None:
        raise UnknownUseError(
            f"it has shape {list(meeting.use.shape)} where it meets {list(gradient.shape)}: no "
            "sample has its own"
        )
    others = [other for other in _broadcast_axes(meeting) if other != axis]
    summed = gradient.sum(others, keepdim=True) if others else gradient
    return summed.movedim(axis, 0)


def _unbroadcast_folded(meeting: Meeting, gradient: Tensor, order: Order) -> Tensor:
    axes = _broadcast_axes(meeting)
    if 0 not in axes:
        raise UnknownUseError(f"it isn't repeated along the leading axis of {list(gradient.shape)}")
    folds_and_others = [1, *(axis + 1 for axis in axes if axis > 0)]
    return by_sample(gradient, meeting.samples, order).sum(folds_and_others)


def _broadcast_axis(meeting: Meeting) -> int | None:
    """The samples' axis among those along which the parameter was broadcast."""
    shape = meeting.gradient.shape
    among = [axis for axis in _broadcast_axes(meeting) if shape[axis] == meeting.samples]
    return _likeliest(meeting, among, tuple(shape)) if among else None


def _broadcast_axes(meeting: Meeting) -> list[int]:
    missing = meeting.gradient.dim() - len(meeting.use.shape)
    own = (1,) * missing + meeting.use.shape
    return [axis for axis, length in enumerate(own) if length == 1]


def _check_memory(meeting: Meeting, shape: tuple[int, ...]) -> None:
    size = meeting.samples * torch.Size(shape).numel() * meeting.gradient.element_size()
    if size > MAX_BYTES:
        raise UnknownUseError(f"its individual gradients would take {size / 2**30:.1f} GiB")


def _is_repeatable(node: Node) -> bool:
    """Whether saved tensors are where they were saved, rather than made when asked for."""
    for name in (name for name in dir(node) if name.startswith("_saved_")):
        first, second = getattr(node, name), getattr(node, name)
        if isinstance(first, Tensor) and first.data_ptr() != second.data_ptr():
            return False
    return True
