"""What a run consists of at a step: the network, from the graph of its loss, and its optimizer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradlens.facts.parameters import ByKind, groups, rms
from gradlens.facts.rows import Rows, row_numbers, sizes
from gradlens.gradients.gradients import Setting, has_positions_first, layer_of
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, Node, called, kind_of, plain_name
from gradlens.graph.loss import Loss
from gradlens.graph.passes import nodes_above
from gradlens.history.setup import Layer, Setup
from gradlens.numerics.shards import is_distributed
from gradlens.numerics.tensors import accumulable
from gradlens.signals.attention import FUSED, SOFTMAX
from gradlens.signals.predicates import has_parameters, is_embedding, is_normalization
from gradlens.torch_private import (
    ChannelNorm,
    is_saved_elsewhere,
    output_metadata,
    saved,
    saved_by_name,
    saved_where_they_are,
    signed,
)

WITHIN = 64
"""Nodes of a loss function that are looked at, at most, from the loss on."""


@dataclass(frozen=True)
class Activation:
    """An activation: its node, its kind, and the layer before it.

    ``units`` is the axis of its units, if that follows from the layer.
    """

    node: int
    kind: str
    layer: str
    units: int | None = None


class Network:
    """The layers and activations behind a loss; ``names`` are those of parameters by ``id``."""

    def __init__(self, graph: Graph, names: Mapping[int, str]) -> None:
        self.graph = graph
        self._kinds = [kind_of(each) for each in graph.kinds]
        self._names = names

    @cached_property
    def _weights(self) -> dict[int, list[str]]:
        """The parameters that nodes compute with directly, by their numbers."""
        found: dict[int, list[str]] = {}
        for leaf, number in self.graph.leaves.items():
            name = self._names.get(leaf)
            if name is None:
                continue
            for user in self._users(number, self._alone):
                found.setdefault(user, []).append(name)
        return found

    def _users(self, number: int, passed: Sequence[bool]) -> Iterator[int]:
        """The nodes that compute with data and what views and ``passed`` nodes make of a tensor."""
        waiting, seen = [number], {number}
        while waiting:
            for consumer, _, _ in self.graph.consumers[waiting.pop()]:
                if not (self._kinds[consumer].is_view or passed[consumer]):
                    yield consumer
                elif consumer not in seen:
                    seen.add(consumer)
                    waiting.append(consumer)

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the parameters from input to output."""
        names = [name for number in sorted(self._weights) for name in self._weights[number]]
        return tuple(dict.fromkeys(names))

    @property
    def transformed(self) -> tuple[str, ...]:
        """The names of weights that are changed before they multiply data, as by a softplus."""
        leaves = {self._names[n]: at for n, at in self.graph.leaves.items() if n in self._names}
        views_alone = [False] * len(self._kinds)
        return tuple(
            name
            for name, number in leaves.items()
            if self._multiplies(number, self._alone) and not self._multiplies(number, views_alone)
        )

    def _multiplies(self, number: int, passed: Sequence[bool]) -> bool:
        """Whether data is multiplied by what views and ``passed`` nodes make of a tensor."""
        return any(self._kinds[user].is_affine for user in self._users(number, passed))

    @cached_property
    def activations(self) -> list[Activation]:
        """All activations, from input to output, each by the layer before it."""
        nodes = [n for n, kind in enumerate(self._kinds) if kind.is_activation]
        return [found for n in nodes if (found := self._activation(n)) is not None]

    def _activation(self, node: int) -> Activation | None:
        """An activation with the layer that it is applied to, if there is one nearby."""
        number, units = node, True
        for _ in range(NEARBY):
            child = next(self._data_of(number), None)
            if child is None:
                return None
            if child in self._weights:
                layer = layer_of(self._weights[child][0])
                axis = 1 if units and self._kinds[child].rows > 0 else None
                return Activation(node, called(self.graph.kinds[node]), layer, axis)
            number, units = child, units and not self._kinds[child].is_view
        return None

    def _data_of(self, number: int) -> Iterator[int]:
        """The nodes that made a node's inputs, without those that make its weights."""
        for edge in self.graph.children[number]:
            if edge is not None and not self._alone[edge[0]]:
                yield edge[0]

    @cached_property
    def _alone(self) -> list[bool]:
        """Whether nodes compute with parameters, and constants of their shape, alone."""
        return self.graph.of_parameters_alone(self._is_masking)

    def _is_masking(self, number: int, weight: Edge) -> bool:
        """Whether a node multiplies a weight by constants, such as a mask of its shape.

        Constant vectors give the largest singular value of a weight; samples are rows of a matrix.
        """
        if self._kinds[number].of_vectors:
            return True
        shape = self.graph.shape(weight)
        same = self.graph.shape((number, 0)) == shape
        return self._kinds[number].is_product and len(shape) > 1 and same

    @property
    def strangers(self) -> list[nn.Parameter]:
        """The weights that multiply data and aren't among the parameters whose names are known."""
        leaves = [(self.graph.nodes[n].variable, n) for n in self.graph.leaves.values()]
        return [
            leaf
            for leaf, number in leaves
            if isinstance(leaf, nn.Parameter) and id(leaf) not in self._names
            if self._multiplies(number, self._alone)
        ]

    @property
    def linear_pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of layers with nothing but linear nodes between, such as views and averages."""
        found: list[tuple[str, str]] = []
        for number, names in sorted(self._weights.items()):
            before = self._affine_before(number) if self._kinds[number].is_affine else None
            if before is not None:
                found.append((layer_of(self._weights[before][0]), layer_of(names[0])))
        return tuple(dict.fromkeys(found))

    def _affine_before(self, number: int) -> int | None:
        """The affine node whose output is another one's data."""
        data = [*self._data_of(number)]
        while len(data) == 1:
            kind = self._kinds[data[0]]
            if len(self.graph.consumers[data[0]]) > 1:
                return None  # what others get as well, as a residual branch's input, is of use
            if kind.is_affine:
                return data[0] if data[0] in self._weights else None
            if not kind.is_linear or None in self.graph.children[data[0]]:
                return None  # what is added to constants is not one linear layer with what follows
            data = [*self._data_of(data[0])]
        return None

    def is_linear(self, loss: Loss) -> bool:
        """Whether a loss function's inputs are computed from the parameters by linear nodes alone.

        A softmax in front of it belongs to the loss.
        """
        if loss.function is None:
            return False
        number = self._number(loss.function)
        below = self.graph.below([number]) - {number}
        kinds = (self._kinds[n] for n in below if self.graph.kinds[n] != LEAF)
        others = (kind for kind in kinds if not (kind.is_affine or kind.is_linear))
        return all(kind.takes_scores and kind.makes_probabilities for kind in others)

    @property
    def before_loss(self) -> str:
        """What the scores were computed by that the loss makes probabilities of, if they are some.

        Those are the mistake of a softmax before a loss that computes one itself.
        """
        for number in self._of_loss():
            scores = self._scores(number)
            if scores is not None and self._kinds[scores].makes_probabilities:
                return called(self.graph.kinds[scores])
        return ""

    def broadcast(self, samples: int) -> str:
        """The shapes of predictions and targets that a loss compares all pairs of; usually empty.

        Numbers ``[N, 1]`` and ``[N]`` are broadcast to ``[N, N]``; N is the number of ``samples``.
        Where both need a gradient, as where samples are compared with each other, it is no mistake,
        and more than one number for each sample may be compared with as many prototypes.
        """
        for number in self._of_loss() if samples > 1 else ():
            known = [edge for edge in self.graph.children[number] if edge is not None]
            if len(known) != 1:
                continue
            shape, given = self.graph.shape((number, 0)), self.graph.shape(known[0])
            column, row = (samples, 1), (samples,)
            is_all_pairs = shape == (samples, samples) and given in (column, row)
            if is_all_pairs and self._compares_vectors(number, samples):
                return f"{[*given]} and {[*(row if given == column else column)]}"
        return ""

    def _compares_vectors(self, number: int, samples: int) -> bool:
        """Whether a node compares predictions with what may have one number for each sample.

        Or repeats them for a node that does. A matrix of all pairs of samples, such as who is at
        risk at whose time, is no mistake.
        """
        kind = self._kinds[number]
        if kind.repeats and len(self.graph.children[number]) == 1:
            consumers = {consumer for consumer, _, _ in self.graph.consumers[number]}
            return any(self._kinds[each].is_difference for each in consumers)
        if not kind.is_product:
            return kind.is_difference
        is_first = self.graph.children[number][0] is not None
        tensors = dict(saved_by_name(self.graph.nodes[number]))
        other = tensors.get("other" if is_first else "self")
        return other is not None and other.numel() == samples

    def is_over_samples(self, loss: Loss) -> bool:
        """Whether a softmax in front of the loss is over the samples ``[N, C]`` of a batch.

        Of scores ``[N, N]``, it may compare the samples, whose labels are their numbers then, and
        those ``[N, 1]`` may be the weights of the members of a set.
        """
        return any(
            axis == 0 and len(shape) == 2 and shape[0] == loss.samples and shape[1] > 1
            and (shape[1] != loss.samples or _repeats(loss.targets))
            for _, axis, shape in self._softmaxes_of_loss()
        )  # fmt: skip

    @property
    def is_over_queries(self) -> bool:
        """Whether a softmax is over the rows of a matrix by whose columns a product sums.

        As of attention whose weights add up to 1 over the queries, rather than over the keys.
        """
        for number, kind in enumerate(self.graph.kinds):
            if called(kind) != "softmax":
                continue
            shape, axis = self.graph.shape((number, 0)), saved(self.graph.nodes[number], "dim")
            is_over_rows = len(shape) > 2 and signed(axis) in (-2, len(shape) - 2)
            waiting = [number] if is_over_rows else []
            while waiting:
                for consumer, place, _ in self.graph.consumers[waiting.pop()]:
                    name = plain_name(self.graph.kinds[consumer])
                    if name == "Bmm" and place == 0:
                        return True
                    if name in KEEPING and self.graph.shape((consumer, 0))[-1:] == shape[-1:]:
                        waiting.append(consumer)
        return False

    def columns(self, loss: Loss) -> dict[str, Tensor | float]:
        """Facts of steps, of what the nodes have kept; only those that are known."""
        found = {
            "unlogged": float(self.unlogged),
            "targets_beyond": self.beyond,
            "next_seen": self.next_seen,
            "code_nats": self.code_nats,
            "direction_spread": None if loss.name else self.direction_spread,
            **self.data_sizes,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def data_sizes(self) -> dict[str, Tensor]:
        """Sizes of the data that weights multiply, as a model has changed it before its layers.

        Of several tensors, they are those of the one whose rows differ most. Where rows are equal,
        as those of ones that derivatives by the inputs begin with, they are NaN.
        """
        names = [f"first_{each}" for each in ("rms", "mean", "std", "spread")]
        found = [sizes(row_numbers(each)) for each in self._data()]
        if not found:
            return {}
        table = torch.stack(found, 1)
        differences = (table[0] * table[3]).nan_to_num(0.0)
        most = table.index_select(1, differences.argmax().reshape(1))[:, 0]
        most = most.where(most[3] > EQUAL, torch.nan)
        return dict(zip(names, most, strict=True))

    def _data(self) -> Iterator[Tensor]:
        """What weights multiply that no parameter has changed, where their nodes keep it."""
        for number in self._of_data:
            if self._kinds[number].is_affine:
                kept = dict(saved_by_name(self.graph.nodes[number]))
                found = [kept[name] for name in ("input", "mat1", "self") if name in kept]
                data = next(iter(found or kept.values()), None)
                if data is None or data.is_nested or is_distributed(data):
                    continue
                if data.layout == torch.strided and data.is_floating_point() and data.numel():
                    yield data

    @cached_property
    def _of_data(self) -> set[int]:
        """The outermost nodes of each parameter that compute with nothing of others.

        There is one at each step of a rollout, the first of which may begin with one state.
        """
        leaves = {at for leaf, at in self.graph.leaves.items() if leaf in self._names}
        others, found = nodes_above(self.graph, leaves), dict[str, list[int]]()
        for number in sorted(self._weights):
            if others.isdisjoint(self._data_of(number)):
                found.setdefault(self._weights[number][0], []).append(number)
        return {number for each in found.values() for number in (each[0], each[-1])}

    @property
    def normalises_data(self) -> bool:
        """Whether a normalisation with weights gets data that no parameter has changed."""
        return any(plain_name(self.graph.kinds[n]).endswith(NORMALISING) for n in self._of_data)

    @property
    def next_seen(self) -> Tensor | None:
        """Of attention of places to each other, the largest share of those that see the next one.

        ``None`` without such attention. A causal mask hides what comes later.
        """
        seen = (_next_seen(*each) for each in zip(self.graph.nodes, self.graph.kinds, strict=True))
        known = [each for each in seen if each is not None]
        return torch.stack(known).amax() if known else None

    @property
    def code_nats(self) -> Tensor | None:
        """How much the code of a variational autoencoder says of its sample at most, in nats.

        The code is m + s·e with constants e. The divergence of N(m, s²) from N(0, 1), which is the
        mean over samples ``[N, ...]``, is no less than the mutual information of code and sample.
        ``None`` if there isn't exactly one code, or if m or s isn't kept.
        """
        found = [
            (mean, spread)
            for number, kind in enumerate(self.graph.kinds)
            if kind.startswith("Add") and len(self.graph.children[number]) == 2
            for mean, spread in self._code(*self.graph.children[number])
        ]
        return _nats(*found[0]) if len(found) == 1 else None

    def _code(self, one: Edge | None, other: Edge | None) -> Iterator[tuple[Tensor, Tensor]]:
        """The mean and the spread of a code that is the sum of two inputs."""
        for mean, noise in ((one, other), (other, one)):
            if mean is None or noise is None or self.graph.kinds[noise[0]] != "MulBackward0":
                continue
            factors = [edge for edge in self.graph.children[noise[0]] if edge is not None]
            if len(factors) != 1 or self._alone[factors[0][0]]:
                continue
            spreads = self._kept(factors[0][0], ("Exp", "Sqrt"), "result")
            squared = [
                user for user, _, output in self.graph.consumers[mean[0]] if output == mean[1]
            ]
            means = [t for user in squared for t in self._kept(user, ("Pow", "Mul"), "self")]
            if spreads and means and means[0].shape == spreads[0].shape:
                yield means[0], spreads[0]

    def _kept(self, number: int, kinds: tuple[str, ...], name: str) -> list[Tensor]:
        """What a node of one of some kinds has kept under a name, where it is."""
        if plain_name(self.graph.kinds[number]) not in kinds:
            return []
        tensors = dict(saved_by_name(self.graph.nodes[number]))
        return [tensors[name].detach()] if name in tensors else []

    @property
    @torch.no_grad()
    def direction_spread(self) -> Tensor | None:
        """How far the directions of vectors ``[N, D]`` that the loss compares are apart.

        It is the root of 1 − ‖mean direction‖², from 0 for one direction to 1; ``None`` if the loss
        divides nothing by the norms of vectors.
        """
        for number in self._of_loss():
            same = len({*self.graph.children[number]}) == 1
            kinds = ("LinalgVectorNorm", *(("Mul",) if same else ()))
            for rows in self._kept(number, kinds, "self"):
                if rows.dim() == 2 and len(rows) > 1 and rows.shape[1] > 1:
                    mean = functional.normalize(accumulable(rows), dim=1).mean(0)
                    return (1 - mean.square().sum()).clamp(min=0).sqrt()
        return None

    @property
    def unlogged(self) -> bool:
        """Whether a Kullback-Leibler divergence gets probabilities in place of their logarithms.

        It is the sum or mean of ``t log t − t x`` with constants ``t``; ``x`` is a softmax here.
        """
        for number in self._of_loss():
            users = {self.graph.kinds[user] for user, _, _ in self.graph.consumers[number]}
            if not all(each.startswith(("Sum", "Mean")) for each in users):
                continue
            subtracted = self._behind_constant(number, "Sub")
            given = None if subtracted is None else self._behind_constant(subtracted, "Mul")
            if given is not None and called(self.graph.kinds[given]) == "softmax":
                return True
        return False

    def _behind_constant(self, number: int, kind: str) -> int | None:
        """What the second operand of a node of this kind comes from, if the first is constant."""
        edges = self.graph.children[number]
        is_so = self.graph.kinds[number].startswith(kind) and len(edges) == 2
        return edges[1][0] if is_so and edges[0] is None and edges[1] is not None else None

    @property
    def beyond(self) -> Tensor | None:
        """The share of targets that outputs can't reach, as a sigmoid's don't leave 0 to 1.

        ``None`` unless an error, or the sigmoid of a binary cross-entropy, compares what an
        activation has returned with constants.
        """
        for number in self._of_loss():
            its = self._kinds[number]
            is_chance = its.takes_scores and its.targets == "probabilities"
            of = self._behind_views(number) if its.is_difference or is_chance else None
            limits = None if of is None else RANGES.get(called(self.graph.kinds[of]))
            if of is not None and limits is not None:
                if is_chance:
                    if self._kinds[of].makes_probabilities:
                        continue
                    low, high = torch.tensor(limits, device="cpu").sigmoid().tolist()
                    limits = low, high
                targets = self._targets(number, of)
                return None if targets is None else share_beyond(targets, *limits)
        return None

    @torch.no_grad()
    def _targets(self, number: int, of: int) -> Tensor | None:
        """What a difference is taken from the output ``of`` an activation, if that was kept.

        A difference by hand is kept by what makes it an error, such as a square.
        """
        node = self.graph.nodes[number]
        targets = None if is_saved_elsewhere(node) else saved(node, "target", None)
        edges = self.graph.children[number]
        if targets is not None or len(edges) != 2 or edges[0] is None or edges[1] is not None:
            return None if targets is None else targets.detach()
        users = [self.graph.nodes[user] for user, _, _ in self.graph.consumers[number]]
        errors = [t for user in users for t in saved_where_they_are(user)]
        outputs = saved_where_they_are(self.graph.nodes[of])
        if not errors or len(outputs) != 1 or errors[0].numel() != outputs[0].numel():
            return None
        return outputs[0].detach().reshape(errors[0].shape) - errors[0].detach()

    @property
    def of_one(self) -> str:
        """What has one element alone to make probabilities of, or to normalise; usually empty."""
        for number, axis, shape in self._softmaxes_of_loss():
            if shape and shape[axis] == 1:
                return called(self.graph.kinds[number])
        for number, kind in enumerate(self.graph.kinds):
            node, size = self.graph.nodes[number], 0
            if kind.startswith("NativeLayerNorm"):
                size = math.prod(saved(node, "normalized_shape", ()) or (0,))
            elif kind.startswith("NativeGroupNorm"):
                size = saved(node, "C") * saved(node, "HxW") // saved(node, "group")
            if size == 1:
                return next(iter(map(layer_of, self._weights.get(number, ()))), called(kind))
        return ""

    @property
    def rows_of_several(self) -> bool:
        """Whether the loss takes scores ``[N, C, ...]`` for rows ``[M, C]`` by a view alone.

        Each row then has scores of several places, and of some classes only.
        """
        for number in self._of_loss():
            edge = self.graph.children[number][0] if self._kinds[number].is_view else None
            if edge is None or plain_name(self.graph.kinds[number]) not in ("View", "UnsafeView"):
                continue
            before, after = self.graph.shape(edge), self.graph.shape((number, 0))
            is_cut = len(before) > 2 and len(after) == 2 and before[1] == after[1] > 1
            of_place = math.prod(before[2:])
            if is_cut and before[-1] != after[1] != of_place and self._has_units_at_1(edge[0]):
                return True
        return False

    def _has_units_at_1(self, number: int) -> bool:
        """Whether a node's units are along axis 1: a convolution's, or those that are moved there.

        A view of what isn't contiguous copies it first.
        """
        children = self.graph.children[number]
        if plain_name(self.graph.kinds[number]) == "Clone" and children[0] is not None:
            return self._has_units_at_1(children[0][0])
        is_moved = plain_name(self.graph.kinds[number]) in ("Permute", "Transpose")
        if not is_moved or children[0] is None:
            return self._kinds[number].rows == 1
        units = self.graph.shape(children[0])[-1]
        return self.graph.shape((number, 0))[1] == units

    def _softmaxes_of_loss(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Nodes of a softmax between the loss and the last layers, each with its axis and shape."""
        for number in self._of_loss():
            if called(self.graph.kinds[number]) in ("softmax", "log_softmax"):
                shape = self.graph.shape((number, 0))
                axis = signed(saved(self.graph.nodes[number], "dim"))
                yield number, axis % max(len(shape), 1), shape

    def is_bootstrapped(self, loss: Loss) -> bool:
        """Whether a target that needs a gradient adds a constant to the network's own prediction.

        So does that of a value function, which is a reward and the value of the next state.
        """
        if loss.function is None or not self._kinds[self._number(loss.function)].is_difference:
            return False
        edges = self.graph.children[self._number(loss.function)]
        if len(edges) < 2 or edges[1] is None:
            return False
        number: int | None = edges[1][0]
        for _ in range(NEARBY):
            if number is None or self._kinds[number].is_affine:
                return False
            if self.graph.kinds[number].startswith("Add") and None in self.graph.children[number]:
                return True
            number = next(self._data_of(number), None)
        return False

    def _number(self, node: Node) -> int:
        return self.graph.nodes.index(node)

    def _of_loss(self) -> Iterator[int]:
        """The nodes between the loss and the network's last layers."""
        waiting = deque([len(self._kinds) - 1])
        seen = {*waiting}
        for _ in range(WITHIN):
            if not waiting:
                return
            number = waiting.popleft()
            if self._kinds[number].is_affine:
                continue
            yield number
            behind = [child for child in self._data_of(number) if child not in seen]
            waiting += behind
            seen |= {*behind}

    def _scores(self, number: int) -> int | None:
        """The node of the scores whose probabilities' logarithms a node computes, if it does."""
        if self._kinds[number].takes_scores:
            return self._behind_views(number)
        if not self._kinds[number].is_logarithm:
            return None
        of = self._behind_views(number)
        while of is not None and self._kinds[of].is_guard:
            of = self._behind_views(of)
        is_probability = of is not None and self._kinds[of].makes_probabilities
        return self._behind_views(of) if of is not None and is_probability else None

    def _behind_views(self, number: int) -> int | None:
        """The node that made a node's data, whatever views and casts are between."""
        found = next(self._data_of(number), None)
        while found is not None and self._kinds[found].is_view:
            found = next(self._data_of(found), None)
        return found

    @property
    def has_half(self) -> bool:
        """Whether a node's output is in float16."""
        pairs = zip(self.graph.nodes, self.graph.kinds, strict=True)
        nodes = (node for node, kind in pairs if kind != LEAF)
        return any(out.dtype == torch.float16 for node in nodes for out in output_metadata(node))

    def output_of(self, activation: Activation) -> Tensor | None:
        """What an activation has returned, where its node has saved it without hooks."""
        saved = saved_where_they_are(self.graph.nodes[activation.node])
        return saved[0] if len(saved) == 1 else None


@torch.no_grad()
def _next_seen(node: Node, kind: str) -> Tensor | None:
    """The share of places of which attention lets the one before see them, if it is such a node."""
    name, kept = plain_name(kind), {}
    if name in SOFTMAX or name.startswith(FUSED):
        kept = dict(saved_by_name(node))
    weights = kept.get("result")
    if weights is not None:
        is_last = signed(saved(node, "dim")) in (-1, weights.dim() - 1)
        is_square = weights.dim() > 2 and weights.shape[-2] == weights.shape[-1] >= FEWEST_PLACES
        return (weights.diagonal(1, -2, -1) > 0).float().mean() if is_last and is_square else None
    queries, keys = (kept.get(each) for each in ("query", "key"))
    if queries is None or keys is None or queries.is_nested:
        return None
    if not queries.shape[-2] == keys.shape[-2] >= FEWEST_PLACES:
        return None
    mask = next((kept[n] for n in ("attn_mask", "attn_bias", "bias") if n in kept), None)
    if mask is None or mask.shape[-2] != mask.shape[-1]:
        return queries.new_tensor(float(not saved(node, "is_causal", False)))
    is_open = mask.detach().diagonal(1, -2, -1) > HIDDEN
    return is_open.float().mean() * float(not saved(node, "is_causal", False))


FEWEST_PLACES = 4
"""Shorter texts may be other things, such as pairs."""
HIDDEN = -1e3
"""What is added to the scores of places that a mask hides is below."""


@torch.no_grad()
def _nats(mean: Tensor, spread: Tensor) -> Tensor:
    """The divergence of normal distributions ``[N, ...]`` from the standard one, by sample."""
    terms = accumulable(mean).square() + spread.square() - 1 - 2 * spread.log()
    return terms.sum() / 2 / len(terms)


EQUAL = 1e-3
"""The spread of rows, over their size, that is put down to rounding in single precision."""
NORMALISING = ("BatchNorm", "GroupNorm", "LayerNorm", "RmsNorm")
"""How the names of kinds of nodes end that normalise their input."""
KEEPING = ("Expand", "NativeDropout", "ReshapeAlias", "ToCopy", "UnsafeView", "View")
"""Kinds of nodes that leave the axes of a matrix in their order."""
RANGES: Mapping[str, tuple[float, float]] = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "relu": (0.0, math.inf),
}
MARGIN = 0.05
"""Of the range, by which targets may be beyond it."""


@torch.no_grad()
def share_beyond(targets: Tensor, low: float, high: float) -> Tensor:
    """The share of targets that are outside of a range by more than a part of it."""
    margin = MARGIN * (high - low if high < math.inf else rms(targets))
    return ((targets < low - margin) | (targets > high + margin)).float().mean()


def _repeats(targets: Tensor | None) -> bool:
    """Whether targets have a number several times, as the labels of classes do."""
    return targets is not None and len(targets.unique()) < targets.numel()


NEARBY = 8
"""Between a layer and its activation, there are at most so many views and normalisations."""


SATURATED = 0.02
"""An output within 2 % of an end of its range has a gradient below 8 % of the largest (sigmoid), or
below 4 % (tanh)."""


@torch.no_grad()
def activation_share(activation: Activation, output: Tensor) -> tuple[str, Tensor] | None:
    """The name and value of the share of units that give no gradient; ``None`` for other kinds.

    A unit of a ReLU is dead if its output is zero for the whole batch. Units are along axis 1 of
    images ``[N, C, ...]`` and behind convolutions, and along the last axis of all others.
    """
    kind = activation.kind
    if not output.numel():
        return None
    if kind == "relu" and output.dim() > 1:
        unit = activation.units or (1 if output.dim() > 3 else output.dim() - 1)
        others = [axis for axis in range(output.dim()) if axis != unit]
        return "dead", (output.detach().amax(others) <= 0).float().mean()
    if kind in ("tanh", "sigmoid"):
        low, high = RANGES[kind]
        margin = SATURATED * (high - low)
        found = output.detach()
        ends = (found <= low + margin) | (found >= high - margin)
        return "saturated", ends.float().mean()
    return None


def activation_shares(network: Network) -> ByKind:
    """Facts of layers; the largest of those of a layer that is used repeatedly."""
    result: ByKind = {}
    for activation in network.activations:
        output = network.output_of(activation)
        share = None if output is None else activation_share(activation, output)
        if share is not None:
            of_kind = result.setdefault(share[0], {})
            before = of_kind.get(activation.layer, share[1])
            of_kind[activation.layer] = torch.maximum(before, share[1])
    return result


def setup_of(
    setting: Setting,
    info: Mapping[str, Any],
    network: Network | None,
    loss: Loss | None,
    rows: Sequence[Rows],
) -> Setup:
    """The setup: without a ``network`` and its ``loss``, as far as it is known from the rest."""
    model, parameters, optimizer = setting.model, setting.parameters, info.get("optimizer")
    names = {id(p): name for name, p in parameters.items()}
    found = () if optimizer is None else groups(optimizer, names)
    held = {name for group in found for name in group.parameters}
    trained = [name for name, p in parameters.items() if p.requires_grad]
    present = () if model is None else model.named_parameters()
    scaler = info.get("scaler")
    setup = Setup(
        optimizer="" if optimizer is None else type(optimizer).__name__,
        groups=found,
        missed=tuple(name for name in trained if name not in held) if found else (),
        frozen=tuple(name for name, p in present if not p.requires_grad),
        declared_reduction=setting.loss_reduction,
        layers={} if model is None else _layers(model),
        scaler=scaler is not None and scaler.is_enabled(),
        dtypes=tuple(sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})),
        input_kind=("real" if rows[-1].is_real else "integers") if rows else "",
        input_normalised=model is not None and _begins_normalised(model),
    )
    if network is None or loss is None:
        return setup
    return replace(
        setup,
        loss=loss.name,
        loss_reduction=loss.reduction,
        loss_weighted=loss.is_weighted,
        activations={each.layer: each.kind for each in network.activations},
        order=network.order,
        transformed=network.transformed,
        over_samples=network.is_over_samples(loss),
        over_queries=network.is_over_queries,
        of_one=network.of_one,
        rows_of_several=network.rows_of_several,
        bootstrapped=network.is_bootstrapped(loss),
        before_loss=network.before_loss,
        target_trained=loss.target_needs_gradient,
        unregistered=() if model is None else holders_of(network.strangers, model),
        broadcast=network.broadcast(loss.samples),
        linear_pairs=network.linear_pairs,
        is_linear=network.is_linear(loss),
        half=network.has_half,
        input_normalised=setup.input_normalised or network.normalises_data,
        positions_first=has_positions_first(network.graph, model, setting.unsharded),
    )


def holders_of(parameters: Sequence[nn.Parameter], model: nn.Module) -> tuple[str, ...]:
    """The lists, tuples and dicts of a model's modules with layers that have these parameters."""
    wanted, found = {id(p) for p in parameters}, []
    for name, module in model.named_modules() if wanted else ():
        for attribute, value in vars(module).items():
            held = [*value.values()] if isinstance(value, dict) else value
            items = held if isinstance(held, (list, tuple)) else ()
            layers = [each for each in items if isinstance(each, nn.Module)]
            if any(id(p) in wanted for layer in layers for p in layer.parameters()):
                found.append(".".join(filter(None, (name, attribute))))
    return tuple(found)


def _layers(model: nn.Module) -> dict[str, Layer]:
    """Modules with parameters of their own, and normalisations without any."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ChannelNorm) or has_parameters(module):
            classes = takewhile(lambda cls: cls is not nn.Module, type(module).__mro__)
            names = tuple(cls.__name__ for cls in classes)
            found[name] = Layer(names, module.training, _fan_in(module))
    return found


def _fan_in(module: nn.Module) -> int:
    """The number of inputs of one output of a layer; 0 without a weight of rows."""
    # Reading a parametrised weight would compute it, and may change the layer's buffers.
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() < 2 or not len(weight) or is_embedding(module):
        return 0
    return weight[0].numel()


def _begins_normalised(model: nn.Module) -> bool:
    """Whether the first module without children is a normalisation."""
    leaves = (module for module in model.modules() if next(module.children(), None) is None)
    first = next((each for each in leaves if not isinstance(each, PASSIVE)), None)
    return first is not None and is_normalization(first)


PASSIVE = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout)
