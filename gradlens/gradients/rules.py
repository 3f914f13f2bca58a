"""Per-sample gradients of a parameter at one node of a graph, by the kind of node.

A rule gets the gradient at the node's output, with the sample of each of its rows, and the tensors
that the node has saved. It returns an operator for the gradients of the parameter itself, behind
the links between the two. ``one_by_one`` is used for all kinds without a rule: a node's backward
function is linear in the gradient, so it is run with the gradient of one sample at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from gradlens.graph.checkpoints import read_saved
from gradlens.graph.graph import Graph, Link, is_python_function
from gradlens.graph.kinds import CASTS, TRANSPOSE, from_the_right, kind_of, plain_name, positive
from gradlens.graph.layer_rules import layer_call
from gradlens.graph.passes import call, call_node
from gradlens.numerics.tensors import accumulable, on_device
from gradlens.numerics.unavailable import UnavailableError
from gradlens.operators.composed import Grouped
from gradlens.operators.convolution import Convolution, Geometry
from gradlens.operators.dense import Dense
from gradlens.operators.operator import GradientOperator
from gradlens.operators.outer_products import OuterProducts
from gradlens.operators.table_rows import IndexedRows
from gradlens.samples.labels import NO_SAMPLE
from gradlens.samples.plan import LabelledUse, RowIndex
from gradlens.samples.powers_of_two import NOT_LINEAR
from gradlens.torch_private import saved, storage_number

MAX_BYTES = 2**31
"""More memory than this is not taken for the per-sample gradients of one use."""


@final
class NodeGradient:
    """The ``gradients`` at a node's outputs, ``None`` where the loss doesn't depend on one.

    ``labelled`` says which samples their rows are of, and what parameter is used there. ``known``
    keeps, for all parameters at the node, what the node has saved, the result of a layer's rule,
    and gradients on the way from the node to parameters. Most nodes have one output, whose
    ``gradient`` is detached, and ``index`` has the samples of its rows; of several outputs, these
    are the first that there are. ``links`` are the kinds of nodes between it and the parameter
    that change the gradient; it ``is_transposed`` if all that they do is to transpose it. ``eps``
    is the rounding error of the gradient's precision.
    """

    def __init__(
        self,
        graph: Graph,
        labelled: LabelledUse,
        gradients: tuple[Tensor | None, ...],
        scale: float,
        known: dict[Hashable, Any],
    ) -> None:
        self.graph = graph
        self.labelled = labelled
        self.gradients = gradients
        self.scale = scale
        self.known = known
        self.use = labelled.use
        self.rows = labelled.rows
        self.node = graph.nodes[labelled.use.node]
        self.kind = graph.kinds[labelled.use.node]
        self.index = next(iter(labelled.rows.values()))
        self.samples = self.index.samples
        kinds = [graph.kinds[link.node] for link in self.use.chain]
        self.links = [kind for kind in kinds if kind not in CASTS]
        self.is_transposed = set(self.links) == {TRANSPOSE} and len(self.links) % 2 == 1
        first = next(each for each in gradients if each is not None)
        self.gradient = first.detach() if first.requires_grad else first
        self.eps = torch.finfo(first.dtype).eps

    def saved(self, name: str) -> Tensor | None:
        """A tensor that the node has saved."""
        if name not in self.known:
            tensor = read_saved(self.node, name)
            if tensor is not None and tensor.requires_grad:
                tensor = tensor.detach()
            self.known[name] = tensor
        found: Tensor | None = self.known[name]
        return found


Rule: TypeAlias = Callable[[NodeGradient], GradientOperator]

_Product: TypeAlias = Callable[[NodeGradient, Tensor, Tensor | None], GradientOperator]
"""``(found, gradients, inputs)``, both with a row for each row of the product."""


def operator_of(found: NodeGradient) -> GradientOperator:
    """Per-sample gradients by one use; ``UnavailableError`` with the reason if there are none."""
    if not all(index.some or index.is_complete for index in found.rows.values()):
        _check_unlabelled_rows(found)
    if found.use.own_name:
        return _by_layer_rule(found)
    if {*found.links} - {TRANSPOSE}:
        operator: GradientOperator = _behind_links(found)
    else:
        operator = _at_node(found)
        if found.is_transposed and not isinstance(operator, OuterProducts):
            whole = operator.dense()
            operator = Dense(whole.mT if whole.dim() == 3 else whole, eps=operator.eps)
    if operator.dtype.is_complex:  # of a real parameter, of which the engine takes the real part
        operator = Dense(operator.dense().real, eps=operator.eps)
    # Autograd makes a gradient without other references a parameter's grad, which users change.
    operator.hold(found.gradients)
    return operator


def _at_node(found: NodeGradient) -> GradientOperator:
    """Per-sample gradients at the node's input."""
    first = found.gradients[0]
    if found.labelled.fine or first is None or first.is_complex() or 0 not in found.rows:
        return one_by_one(found)
    rule = _RULES.get((found.kind, found.use.index))
    if rule is None:
        rule = _elementwise if kind_of(found.kind).axes is from_the_right else one_by_one
    return rule(found)


def _behind_links(found: NodeGradient) -> Dense:
    """Per-sample gradients of the parameter, by the nodes between it and the use.

    Parameters that are stacked, say, have parts of the same gradient.
    """
    use = found.use
    way: tuple[Any, ...] = (use.index, use.shape, found.labelled.fine)
    if way not in found.known:
        _check_memory(found, use.shape)
        unscaled = NodeGradient(found.graph, found.labelled, found.gradients, 1.0, found.known)
        operator = _at_node(unscaled)
        found.known[way] = [operator.dense()], operator.eps
    gradients, eps = found.known[way]
    place = 0
    for link in use.chain:
        way = (*way, place, link.node, link.output)
        if way not in found.known:
            found.known[way] = _handed_on_by(found, link, gradients[place])
        gradients, place = found.known[way], link.input
    return Dense(gradients[place], found.scale, eps)


def _by_layer_rule(found: NodeGradient) -> Dense:
    """The gradients of rows that the rule of a layer gives, summed for each sample."""
    ((output, index),) = found.rows.items()
    call, gradient = layer_call(found.node), found.gradients[output]
    assert gradient is not None
    rows_of_sample = -(-len(gradient) // found.samples)
    _check_memory(found, (max(1, rows_of_sample), *found.use.shape))
    if "by rule" not in found.known:
        found.known["by rule"] = dict(call.row_gradients(gradient))
    rows = call.checked(found.use.own_name, found.known["by rule"], gradient)
    return Dense(index.sum(rows), found.scale, found.eps)


def _check_unlabelled_rows(found: NodeGradient) -> None:
    """Rows without a label had no gradient, or one too small for its precision."""
    for number, index in found.rows.items():
        gradient = found.gradients[number]
        if index.some or index.is_complete or gradient is None:
            continue
        features = found.labelled.features[number]
        rest = [a for a in range(gradient.dim()) if a not in features]
        by_row = gradient.permute(*rest, *features)
        if bool((by_row[index.of_sample(NO_SAMPLE, by_row.device)] != 0).any()):
            raise UnavailableError(UNLABELLED_ROWS)


UNLABELLED_ROWS = (
    "some of its rows had no gradient, or one too small for its precision, when the samples of the "
    "rows were determined, and have one now"
)


def _product(found: NodeGradient, delta: Tensor, inputs: Tensor | None) -> GradientOperator:
    """Σ x δᵀ over the rows of a sample, for a use of shape ``[I, O]``, or Σ δ xᵀ for ``[O, I]``."""
    if inputs is None or inputs.layout != torch.strided:
        return one_by_one(found)
    index = found.index
    if storage_number(inputs) in found.graph.storages:
        inputs = inputs.clone()  # the optimizer changes parameters before updates are projected on
    left, right = (delta, inputs) if found.is_transposed else (inputs, delta)
    if not index.counts_samples:
        left, right = index.split(left), index.split(right)
    return OuterProducts(left, right, found.scale)


def _batched_product(found: NodeGradient, delta: Tensor, inputs: Tensor | None) -> GradientOperator:
    """One matrix of ``inputs @ weights`` after the other, for weights ``[B, I, O]``."""
    if inputs is None:
        return one_by_one(found)
    _check_memory(found, found.use.shape)
    matrices = []
    for number, (left, right) in enumerate(zip(inputs, delta, strict=True)):
        index = RowIndex(found.index.labels[number], found.samples)
        x, d = accumulable(index.split(left)), accumulable(index.split(right))
        matrices.append(x.mT @ d.to(x.dtype))
    return _dense(found, torch.stack(matrices, dim=1))


def _right_factor(product: _Product, name: str) -> Rule:
    """The rule for the weight of ``inputs @ weight``; ``name`` is that of the saved inputs."""

    def rule(found: NodeGradient) -> GradientOperator:
        return product(found, _times_alpha(found), found.saved(name))

    return rule


def _left_factor(product: _Product, name: str) -> Rule:
    """The rule for the weight of ``weight @ inputs``, where samples are columns."""

    def rule(found: NodeGradient) -> GradientOperator:
        inputs = found.saved(name)
        if inputs is None:
            return one_by_one(found)
        delta = _times_alpha(found).mT
        # The gradient is that of the transposed weight with the factors exchanged.
        return product(found, inputs.mT, delta)

    return rule


def _times_alpha(found: NodeGradient) -> Tensor:
    """The gradient itself where the factor is one, since a copy would be kept beside it."""
    alpha = saved(found.node, "alpha", 1)
    return found.gradient if alpha == 1 else found.gradient * alpha


def _added(found: NodeGradient) -> GradientOperator:
    """What is added to the output as it is, or times ``beta`` to a product of matrices."""
    beta, gradient = saved(found.node, "beta", 1), accumulable(found.gradient)
    return _unbroadcast(found, gradient if beta == 1 else gradient * beta)


def _elementwise(found: NodeGradient) -> GradientOperator:
    """Each element of the output is computed from the elements at the same place of the inputs.

    The node itself hands on the gradient of each element, and autograd's engine adds up where an
    input was repeated.
    """
    handed = call_node(found.graph, found.use.node, found.gradients)[found.use.index]
    if handed is None or handed.shape != found.gradient.shape:
        return one_by_one(found)
    return _unbroadcast(found, accumulable(handed))


def _convolution(found: NodeGradient) -> GradientOperator:
    node, inputs = found.node, found.saved("input")
    if inputs is None:
        return one_by_one(found)
    sides = [side for p in reversed(saved(node, "padding")) for side in (p, p)]
    kernel = tuple(found.use.shape[2:])
    geometry = Geometry(
        kernel, tuple(saved(node, "stride")), tuple(saved(node, "dilation")), saved(node, "groups")
    )
    delta = found.gradient
    # A transposed convolution takes its input where another one has its output.
    first, second = (inputs, delta) if saved(node, "transposed") else (delta, inputs)
    left, right = found.index.split(first), found.index.split(F.pad(second, sides))
    together = left.shape[1]
    if not together:
        return Dense(delta.new_zeros(found.samples, *found.use.shape), found.scale)
    if together == 1:
        return Convolution(left[:, 0], right[:, 0], geometry, found.scale)
    by_image = Convolution(left.flatten(0, 1), right.flatten(0, 1), geometry, found.scale)
    return Grouped(by_image, together)


def _by_channel(found: NodeGradient, gradient: Tensor | None = None) -> GradientOperator:
    """The gradient of what is added to each channel, or another one."""
    gradient = accumulable(found.gradient) if gradient is None else gradient
    by_image = gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient
    return _unbroadcast_rows(found, by_image, found.index.labels, (1, -1))


def _embedding(found: NodeGradient) -> GradientOperator:
    node, indices = found.node, found.saved("indices")
    if indices is None:
        return one_by_one(found)
    delta = accumulable(found.gradient)
    if saved(node, "scale_grad_by_freq"):
        _, inverse, counts = torch.unique(indices, return_inverse=True, return_counts=True)
        delta = delta / counts[inverse][..., None]
    owners = (
        found.index.on(indices.device)
        .masked_fill(indices == saved(node, "padding_idx"), -1)
        .flatten()
    )
    delta = delta.reshape(len(owners), -1)
    return _rows_of_table(found, indices.flatten(), delta, owners)


def _rows_of_table(
    found: NodeGradient, indices: Tensor, delta: Tensor, owners: Tensor
) -> GradientOperator:
    known = owners >= 0
    if not bool(known.all()):
        indices, delta, owners = indices[known], delta[known], owners[known]
    rows = found.use.shape[0]
    return IndexedRows(indices, delta, owners, found.samples, rows, found.scale, found.eps)


def _embedding_bag(found: NodeGradient) -> GradientOperator:
    """Sums and means of rows; with the maximum, and weights by frequency, one by one."""
    node = found.node
    indices, offsets = found.saved("indices"), found.saved("offsets")
    bag_of, sizes = found.saved("result1"), found.saved("result2")
    unusual = saved(node, "scale_grad_by_freq") or saved(node, "mode") > 1
    if unusual or indices is None or offsets is None or bag_of is None or sizes is None:
        return one_by_one(found)
    bags = torch.bucketize(torch.arange(len(indices), device=indices.device), offsets, right=True)
    bags = bags - 1
    delta = accumulable(found.gradient)[bags]
    weights = found.saved("per_sample_weights")
    if weights is not None and weights.numel():
        delta = delta * weights[:, None]
    valid = indices != saved(node, "padding_idx")
    if saved(node, "mode") == 1:
        counts = torch.zeros_like(offsets).index_add_(0, bags, valid.to(offsets.dtype))
        delta = delta / counts[bags, None].clamp(min=1)
    owners = found.index.on(bags.device)[bags].masked_fill(~valid, -1)
    return _rows_of_table(found, indices, delta, owners)


def _norm(found: NodeGradient) -> GradientOperator:
    """Weight and bias of a normalisation: over the last axes, or ``[C]`` for each channel."""
    gradient = accumulable(found.gradient)
    if found.use.index == 1:
        normalised = _normalised(found)
        if normalised is None:
            return one_by_one(found)
        gradient = gradient * normalised.reshape(gradient.shape)
    if found.kind == "NativeLayerNormBackward0":
        return _unbroadcast(found, gradient)
    return _by_channel(found, gradient)


def _normalised(found: NodeGradient) -> Tensor | None:
    """What the weight is multiplied by, in the order of the inputs; ``None`` if it isn't known."""
    node, inputs = found.node, found.saved("input")
    # Of a normalisation over the batch that isn't training, its running statistics.
    has_own = bool(saved(node, "training", True))
    names = ("result1", "result2") if has_own else ("running_mean", "running_var")
    mean, spread = (found.saved(name) for name in names)
    if inputs is None or mean is None or spread is None:
        return None
    inverse = spread
    if not has_own:
        epsilon = saved(node, "eps", None) or saved(node, "epsilon")  # that of cuDNN
        inverse = (accumulable(spread) + epsilon).rsqrt()
    rows, shape = accumulable(inputs), tuple(mean.shape)
    if found.kind == "NativeGroupNormBackward0":
        rows = rows.reshape(len(rows), saved(node, "group"), -1)
        shape = (*rows.shape[:2], 1)
    elif found.kind != "NativeLayerNormBackward0":
        rows = rows.reshape(*rows.shape[:2], -1)
        shape = (1, -1, 1)
    return (rows - mean.reshape(shape)) * inverse.reshape(shape)


def _times_vector(found: NodeGradient) -> GradientOperator:
    matrix = found.saved("self")
    if matrix is None:
        return one_by_one(found)
    return _dense(found, found.index.sum(accumulable(found.gradient)[:, None] * matrix))


def one_by_one(found: NodeGradient) -> GradientOperator:
    """Run the node's backward function with one sample's gradient at a time."""
    _check_memory(found, found.use.shape)
    owners = sorted({sample for index in found.rows.values() for sample in index.owners})
    results = {n: _handed_on(found, _of_sample(found, n)) for n in owners or [0]}
    if is_python_function(found.node):
        _check_linear(found, list(results.values()))
    zero = torch.zeros_like(next(iter(results.values())))
    return _dense(found, torch.stack([results.get(n, zero) for n in range(found.samples)]))


def _handed_on(found: NodeGradient, gradients: Sequence[Tensor | None]) -> Tensor:
    """The gradient at the use's input, from gradients at the node's outputs."""
    result = call(found.graph, found.use.node, gradients)[found.use.index]
    like = next(each for each in gradients if each is not None)
    return like.real.new_zeros(found.use.shape) if result is None else result


def _of_sample(found: NodeGradient, sample: int) -> tuple[Tensor | None, ...]:
    """The node's gradients with zeros for all other samples."""
    parts: list[Tensor | None] = []
    for number, gradient in enumerate(found.gradients):
        if gradient is None or number not in found.rows:
            parts.append(gradient if gradient is None else torch.zeros_like(gradient))
            continue
        mask = found.rows[number].of_sample(sample, gradient.device)
        for axis in found.labelled.features[number]:
            mask = mask.unsqueeze(axis)
        parts.append(torch.where(mask, gradient, torch.zeros_like(gradient)))
    return tuple(parts)


def _check_linear(found: NodeGradient, parts: Sequence[Tensor]) -> None:
    """``UnavailableError`` if a user's backward function isn't linear in the gradient."""
    # It may also change the gradient in place, and what it gets here is the real one.
    whole = _handed_on(found, [None if g is None else g.clone() for g in found.gradients])
    total = torch.stack(tuple(parts)).sum(0)
    rounding = torch.finfo(whole.dtype).eps ** 0.5
    if float((total - whole).norm()) > rounding * float(whole.norm()):
        raise UnavailableError(NOT_LINEAR.format(kind=found.kind))


def _dense(found: NodeGradient, gradients: Tensor) -> Dense:
    """Gradients ``[N, ...]`` of the use's input."""
    shape = (found.samples, *found.use.shape)
    fitting = gradients if gradients.shape == shape else gradients.reshape(shape)
    return Dense(fitting, found.scale, found.eps)


def _handed_on_by(found: NodeGradient, link: Link, gradients: Tensor) -> Sequence[Tensor]:
    """Gradients ``[N, ...]`` at a link's inputs, from those at its output."""
    graph, number = found.graph, link.node
    name = plain_name(graph.kinds[number])
    shapes = [() if edge is None else graph.shape(edge) for edge in graph.children[number]]
    if name == "Stack":
        dim = positive(saved(graph.nodes[number], "dim"), gradients.dim() - 1)[0]
        return gradients.unbind(dim + 1)
    if name == "T":
        return [gradients.mT if len(shapes[0]) == 2 else gradients]
    if kind_of(name).in_order:
        return [gradients.reshape(found.samples, *shapes[0])]
    given: list[Tensor | None] = [None] * len(graph.outputs(number))
    parts: list[list[Tensor]] = [[] for _ in shapes]
    for gradient in gradients:
        given[link.output] = gradient
        for handed, part in zip(parts, call(graph, number, given), strict=True):
            handed += [] if part is None else [part]
    return [
        torch.stack(handed) if handed else gradients.new_zeros(len(gradients), *shape)
        for handed, shape in zip(parts, shapes, strict=True)
    ]


def _unbroadcast(found: NodeGradient, gradient: Tensor) -> GradientOperator:
    """Sums over the axes along which the use's input was repeated, by sample."""
    missing = gradient.dim() - len(found.use.shape)
    own = (1,) * missing + found.use.shape
    return _unbroadcast_rows(found, gradient, found.index.labels, own)


def _unbroadcast_rows(
    found: NodeGradient, gradient: Tensor, labels: Tensor, own: tuple[int, ...]
) -> GradientOperator:
    """From ``[*S, F]`` with labels ``[*S]`` to ``[N, *own]``; -1 in ``own`` is an axis kept."""
    own = tuple(gradient.shape[axis] if size == -1 else size for axis, size in enumerate(own))
    while gradient.dim() <= labels.dim():  # a single number has a row, too
        gradient, own = gradient[..., None], (*own, 1)
    axis, n = found.index.axis, found.samples
    if all(size == 1 for size in own[:-1]):
        total = found.index.sum(gradient)
        return _dense(found, total.sum(-1, keepdim=True) if own[-1] == 1 else total)
    if axis is not None and own[axis] == 1 and gradient.shape[axis] == n:
        others = [a for a, size in enumerate(own) if size == 1 and a != axis]
        summed = gradient.sum(others, keepdim=True) if others else gradient
        return _dense(found, summed.movedim(axis, 0))
    _check_memory(found, own)
    if own[-1] == 1:
        gradient = gradient.sum(-1, keepdim=True)
    places = torch.arange(math.prod(own[:-1]), device="cpu").reshape(own[:-1])
    known = (labels >= 0).flatten().nonzero()[:, 0]
    cells = (labels * math.prod(own[:-1]) + places).flatten()[known]
    rows = gradient.reshape(labels.numel(), own[-1])
    if len(known) < len(rows):
        rows = rows[on_device(known, rows.device)]
    total = gradient.new_zeros(n * math.prod(own[:-1]), own[-1])
    return _dense(found, total.index_add_(0, on_device(cells, rows.device), rows))


def _check_memory(found: NodeGradient, shape: Sequence[int]) -> None:
    itemsize = next(g for g in found.gradients if g is not None).element_size()
    size = found.samples * math.prod(shape) * itemsize
    if size > MAX_BYTES:
        raise UnavailableError(f"its per-sample gradients would take {size / 2**30:.1f} GiB")


_RULES: dict[tuple[str, int], Rule] = {
    ("AddmmBackward0", 0): _added,
    ("BaddbmmBackward0", 0): _added,
    ("AddmmBackward0", 1): _left_factor(_product, "mat2"),
    ("AddmmBackward0", 2): _right_factor(_product, "mat1"),
    ("MmBackward0", 0): _left_factor(_product, "mat2"),
    ("MmBackward0", 1): _right_factor(_product, "self"),
    ("BmmBackward0", 0): _left_factor(_batched_product, "mat2"),
    ("BmmBackward0", 1): _right_factor(_batched_product, "self"),
    ("BaddbmmBackward0", 1): _left_factor(_batched_product, "batch2"),
    ("BaddbmmBackward0", 2): _right_factor(_batched_product, "batch1"),
    ("MvBackward0", 1): _times_vector,
    ("ExpandBackward0", 0): _added,
    ("ConvolutionBackward0", 1): _convolution,
    ("ConvolutionBackward0", 2): _by_channel,
    ("EmbeddingBackward0", 0): _embedding,
    ("EmbeddingBagBackward0", 0): _embedding_bag,
} | {
    (f"{name}NormBackward0", index): _norm
    for name in ("NativeLayer", "NativeGroup", "NativeBatch", "CudnnBatch", "MiopenBatch")
    for index in (1, 2)
}
