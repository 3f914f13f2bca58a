"""Scores and weights of attention, read off the nodes that a call of a layer has made.

Fused attention keeps queries, keys and masks. Where attention is written out, a softmax has kept
the weights, and a batched product the queries and keys that the scores come from. Nothing of the
model is run again, and nothing is kept of it but one number for each head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gradlens.graph.checkpoints import why_not_to_read
from gradlens.graph.kinds import kind, plain_name, positive
from gradlens.history.undefined import Undefined
from gradlens.numerics.tensors import accumulable
from gradlens.numerics.unavailable import UnavailableError
from gradlens.signals.reductions import PIECE, SignalReduction, added
from gradlens.torch_private import output_metadata, saved, sequence_number, signed

Block: TypeAlias = tuple[Tensor | None, Tensor]
"""Scores, if they are known, and weights of some queries, ``[N, H, T, S]``."""

FUSED = ("ScaledDotProduct",)
SOFTMAX = frozenset({"Softmax", "SafeSoftmax"})
KEEPING = frozenset({
    "Clone", "Expand", "NativeDropout", "Permute", "ReshapeAlias", "Slice", "Squeeze", "ToCopy",
    "Transpose", "UnsafeView", "Unsqueeze", "View",
})  # fmt: skip
"""Kinds of nodes that keep numbers as they are, and may be between a softmax and a product."""
MASKING = frozenset(
    {"Add", "MaskedFill", "Sub", "Tanh", "Where", *KEEPING} - {"Slice", "Transpose"}
)
"""Those between a product and a softmax: they add a bias, or take keys out. Scores are capped as
c·tanh(x/c), which is x as far as factors go."""
PRODUCTS = {"Bmm": ("self", "mat2"), "Baddbmm": ("batch1", "batch2")}
"""What products of queries and keys have kept these under; the second one adds a bias, too."""
FAR = 24
"""Nodes between a softmax and a product that it weights, at most: mostly one or two."""

NO_ATTENTION = (
    "no attention that can be read was computed by the layer's own call: neither "
    "scaled_dot_product_attention nor a softmax of a batched product of queries and keys, that "
    "weights the rows of another one{others}"
)
NO_SCORES = (
    "the scores aren't known: between the product of queries and keys and the softmax is more than "
    "numbers that scale it, masks and biases, or another product"
)
NO_KEYS = "the layer has no queries, or masks take all keys out"
OTHER_HEADS = "the layer was called with different numbers of heads"


@dataclass(frozen=True)
class AttentionRows:
    """Of each head ``[H]``: the ``largest`` score, and the ``entropies`` of ``rows`` of weights."""

    largest: Tensor | None
    entropies: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Attention(SignalReduction[AttentionRows]):
    """The largest score, and the mean entropy of the weights, of each head."""

    classes: ClassVar[Sequence[type[object]] | None] = (AttentionRows,)

    def reduce(self, samples: Tensor) -> AttentionRows:
        """Of weights ``[N, H, T, S]`` whose scores aren't known."""
        return rows_of((None, samples))

    def merge(self, values: Sequence[AttentionRows]) -> AttentionRows | Undefined:
        if len({each.rows.shape for each in values}) > 1:
            return Undefined(OTHER_HEADS)
        scores = [each.largest for each in values]
        known = [each for each in scores if each is not None]
        largest = torch.stack(known).amax(0) if len(known) == len(scores) else None
        return added(values, largest=largest)


def rows_of(block: Block) -> AttentionRows:
    """What is kept of a block; weights of zero are those of keys that a mask has taken out."""
    scores, weights = block
    seen = weights != 0
    heads = (0, 2, 3)
    return AttentionRows(
        None if scores is None else scores.masked_fill(~seen, -torch.inf).amax(heads),
        torch.special.entr(weights).sum(-1).double().sum((0, 2)),
        seen.any(-1).sum((0, 2)).double(),
    )


def read_attention(output: Tensor, first: int) -> AttentionRows | Undefined:
    """All attention behind an output, by nodes whose sequence numbers are ``first`` or larger."""
    nodes = sorted(_nodes_since(output, first), key=sequence_number, reverse=True)
    found: dict[Any, Iterator[Block]] = {}
    try:
        for node in nodes:
            name = plain_name(kind(node))
            if name.startswith(FUSED):
                found[node] = _fused(node)
            elif name == "Bmm":
                for softmax in map(_softmax, node.next_functions):
                    products = [] if softmax is None else _products(softmax, nodes)
                    found |= {softmax: _written_out(softmax, products)} if products else {}
        rows = [rows_of(block) for blocks in found.values() for block in blocks]
    except UnavailableError as error:
        return Undefined(str(error))
    if rows:
        return Attention().merge(rows)
    unread = sorted({kind(node) for node in nodes if "attention" in kind(node).lower()})
    others = f"; {', '.join(unread)} can't be read" if unread else ""
    return Undefined(NO_ATTENTION.format(others=others))


def _nodes_since(output: Tensor, first: int) -> Iterator[Any]:
    waiting, seen = [output.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and sequence_number(node) >= first:
            seen.add(node)
            yield node
            waiting += [below for below, _ in node.next_functions]


def _read(node: Any, name: str) -> Any:
    """What a node has saved, or ``None``; ``UnavailableError`` if it can't be read."""
    why = why_not_to_read(node)
    if why:
        raise UnavailableError(why)
    return saved(node, name, None)


def _fused(node: Any) -> Iterator[Block]:
    """Blocks of ``scaled_dot_product_attention``, computed anew from queries and keys."""
    queries, keys = (_read(node, name) for name in ("query", "key"))
    if queries.dim() != 4 or queries.is_nested:
        raise UnavailableError(NO_ATTENTION.format(others=""))
    groups = queries.shape[1] // max(keys.shape[1], 1)  # of heads that share their keys
    keys = keys.repeat_interleave(groups, 1) if groups > 1 else keys
    scale = saved(node, "scale", None)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    masks = (saved(node, name, None) for name in ("attn_mask", "attn_bias", "bias"))
    mask = next((each for each in masks if each is not None), None)
    causal, last = saved(node, "is_causal", False), torch.arange(keys.shape[2], device=keys.device)
    for some in _pieces(queries.shape[2], queries.shape[0] * queries.shape[1] * keys.shape[2]):
        scores = accumulable(queries[:, :, some]) @ accumulable(keys).mT * scale
        biased = scores
        if mask is not None:
            biased = biased + (mask[..., some, :] if mask.shape[-2] > 1 else mask)
        if causal:
            rows = torch.arange(some.start, some.stop, device=keys.device)[:, None]
            biased = biased.masked_fill(last > rows, -torch.inf)
        blind = (biased == -torch.inf).all(-1, keepdim=True)  # queries that see no key
        yield scores, torch.softmax(biased, -1).masked_fill(blind, 0)


def _pieces(length: int, width: int) -> Iterator[slice]:
    at_once = max(1, PIECE // max(width, 1))
    for start in range(0, length, at_once):
        yield slice(start, min(start + at_once, length))


def _softmax(edge: tuple[Any, int]) -> Any:
    """The softmax behind an input of a product, if there is one."""
    node = edge[0]
    for _ in range(FAR):
        if node is None or plain_name(kind(node)) in SOFTMAX:
            return node
        name = plain_name(kind(node))
        is_dropout = name == "Mul" and _factor(node) is None
        if name not in KEEPING and not is_dropout:
            return None
        node = node.next_functions[0][0]
    return None


def _written_out(
    softmax: Any, products: Sequence[tuple[Any, float | Tensor | None]]
) -> Iterator[Block]:
    """Blocks of attention whose weights a softmax has kept; several products make no score."""
    weights = _read(softmax, "result")
    if weights.dim() < 3 or signed(saved(softmax, "dim")) not in (-1, weights.dim() - 1):
        return
    weights = _by_head(weights)
    (product, factor), *others = products
    factors = None if factor is None or others else _queries_and_keys(product, factor, weights)
    for some in _pieces(weights.shape[2], weights[:, :, :1].numel()):
        part, scores = accumulable(weights[:, :, some]), None
        if factors is not None:
            queries, keys, factor = factors
            scores = (accumulable(queries[:, some]) @ keys * factor).reshape(part.shape)
        yield scores, part


def _queries_and_keys(
    node: Any, factor: float | Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, float | Tensor] | None:
    """What a product has kept, if it has as many rows and columns as weights ``[N, H, T, S]``."""
    queries, keys = (_read(node, name) for name in PRODUCTS[plain_name(kind(node))])
    if queries is None or keys is None:
        return None
    products = len(queries), queries.shape[1], keys.shape[2]
    if products != (weights.shape[0] * weights.shape[1], *weights.shape[2:]):
        return None
    return queries, accumulable(keys), factor * saved(node, "alpha", 1)


def _by_head(rows: Tensor) -> Tensor:
    """``[N, H, T, S]``; without an axis of heads, or with more than that, there is one head."""
    if rows.dim() == 4:
        return rows
    return rows.reshape(-1, 1, *rows.shape[-2:])


def _products(softmax: Any, nodes: Sequence[Any]) -> list[tuple[Any, float | Tensor | None]]:
    """The batched products that scores come from, and the factor of each if it is a number alone.

    Nodes that were made later come first, so that all that use a node's output come before it.
    """
    found, arriving = list[tuple[Any, float | Tensor | None]](), dict[Any, float | Tensor | None]()
    unbatched: list[Any] = []
    arriving[softmax.next_functions[0][0]] = 1.0
    for node in nodes:
        if node in arriving and plain_name(kind(node)) in PRODUCTS:
            found.append((node, arriving[node]))
        elif node in arriving:
            unbatched += [node] if plain_name(kind(node)) in ("Mm", "Addmm") else []
            edges = zip(node.next_functions, _factors(node, arriving[node]), strict=True)
            for (below, _), factor in edges:
                arriving[below] = None if below in arriving else factor
    if not unbatched:
        return found
    # Queries times positions make scores, too; a bias that layers compute from positions doesn't.
    computed = set[Any]().union(*(_inputs(node, nodes) for node, _ in found))
    return found + [(node, None) for node in unbatched if _inputs(node, nodes) & computed]


def _inputs(node: Any, nodes: Sequence[Any]) -> set[Any]:
    """All nodes behind one of ``nodes``, and those that these begin with, without parameters."""
    found: set[Any] = {node}
    for each in nodes:
        if each in found:
            found |= {below for below, _ in each.next_functions if below and below.next_functions}
    return found - {node}


def _factors(node: Any, factor: float | Tensor | None) -> list[float | Tensor | None]:
    """What scores are of each input of a node, if they are ``factor`` times its output."""
    name, inputs = plain_name(kind(node)), len(node.next_functions)
    own = _factor(node) if name in ("Mul", "Div") else 1.0
    keeps = name in ("Mul", "Div") or (name in MASKING and _keeps_order(node))
    if factor is None or own is None or not keeps:
        return [None] * inputs
    first = factor / own if name == "Div" else factor * own
    if inputs < 2 or name not in ("Add", "Sub"):
        return [first] * inputs
    return [first, first * saved(node, "alpha", 1) * (1 if name == "Add" else -1)]


def _keeps_order(node: Any) -> bool:
    """Whether a node keeps the order of elements in memory, as a permutation often doesn't."""
    if plain_name(kind(node)) != "Permute":
        return True
    shape = output_metadata(node)[0].shape
    axes = positive(saved(node, "dims"), len(shape))
    moved = [axis for axis, length in zip(axes, shape, strict=True) if length > 1]
    return moved == sorted(moved)


def _factor(node: Any) -> Tensor | None:
    """The number that a node multiplies by, or divides by; ``None`` if it is none, or unknown."""
    other = _read(node, "other")
    return other.detach() if isinstance(other, Tensor) and other.numel() == 1 else None
