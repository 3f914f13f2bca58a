"""What the graph of a loss that has jumped, or isn't finite, shows of samples and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradlens.gradients.gradients import SampleLosses, Setting, layer_of, sample_losses
from gradlens.graph.graph import Edge, Graph
from gradlens.graph.kinds import LEAF, kind_of, plain_name
from gradlens.graph.loss import read_loss
from gradlens.graph.model_calls import calls_behind
from gradlens.history.spikes import Origin, Position, SampleId, Suspect
from gradlens.numerics.unavailable import UnavailableError
from gradlens.torch_private import saved, saved_by_name, sequence_number

SUSPECTS = 4
"""Samples that are named at most."""
POSITIONS = 3
"""Positions of a sample that are named at most."""


@dataclass(frozen=True)
class Evidence:
    """What the loss's graph shows before the backward pass.

    ``losses``, ``inputs`` and ``targets`` are by sample: ℓₙ, and the root mean squares of the
    input's and of real targets; ``by_part`` has what ℓₙ are sums of. ``bad`` are the samples that
    aren't finite where ``origin`` says, at the layer ``place``; ``origin`` is empty if the loss is
    finite. ``hint`` is that of ``Spike``.
    """

    losses: Tensor | None = None
    by_part: SampleLosses | None = None
    inputs: Tensor | None = None
    targets: Tensor | None = None
    bad: Tensor | None = None
    origin: Origin | None = None
    place: str = ""
    hint: str = ""

    @property
    def samples(self) -> int:
        """The number of rows; 0 if it isn't known."""
        known = [each for each in (self.losses, self.inputs) if each is not None]
        return len(known[0]) if known else 0

    def suspects(
        self,
        norms: Tensor | None,
        without: Tensor | None,
        samples: int,
        ids: Sequence[SampleId] | None,
    ) -> tuple[Suspect, ...]:
        """The samples with the largest squared ``norms`` or losses, or that aren't finite.

        ``without`` has each sample's ``norm_without``.
        """
        losses, inputs, targets, bad, without = (
            each if each is not None and len(each) == samples else None
            for each in (self.losses, self.inputs, self.targets, self.bad, without)
        )
        names = ids if ids is not None and len(ids) == samples else [None] * samples
        ranked = _worst(bad, norms if norms is not None else losses, self.origin is not None)
        return tuple(
            Suspect(
                index,
                names[index],
                _share(norms, index),
                math.nan if losses is None else float(losses[index]),
                _share(None if losses is None else losses.abs(), index),
                _ratio(inputs, index),
                _ratio(targets, index),
                math.nan if losses is None else _mean_of_others(losses, index),
                math.nan if without is None else float(without[index]),
                _positions(self.by_part, index),
            )
            for index in ranked
        )


def _worst(bad: Tensor | None, sizes: Tensor | None, is_broken: bool) -> list[int]:
    """The places of the samples to name, the worst first."""
    if is_broken:
        if bad is None and sizes is not None:
            bad = ~sizes.isfinite()
        # Where no sample is finite, it isn't one that has broken the others.
        if bad is None or bool(bad.all()):
            return [0] if bad is not None and len(bad) == 1 else []
        return [int(index) for index in bad.nonzero().flatten()[:SUSPECTS]]
    if sizes is None:
        return []
    ranked = torch.where(sizes.isnan(), -math.inf, sizes)
    return [int(index) for index in ranked.topk(min(SUSPECTS, len(sizes))).indices]


def _share(sizes: Tensor | None, index: int) -> float:
    return math.nan if sizes is None else float(sizes[index] / sizes.sum())


def _ratio(sizes: Tensor | None, index: int) -> float:
    if sizes is None:
        return math.nan
    return float(sizes[index] / sizes[sizes.isfinite()].median())


def _mean_of_others(losses: Tensor, index: int) -> float:
    return float(torch.cat([losses[:index], losses[index + 1 :]]).mean())


def _positions(found: SampleLosses | None, sample: int) -> tuple[Position, ...]:
    """Those of a sample with several labels that have the largest losses, or NaN."""
    targets = None if found is None else found.of.targets
    if found is None or targets is None or targets.is_floating_point():
        return ()
    if targets.numel() != found.parts.numel():
        return ()
    own = found.owners == sample
    losses = found.parts[own].flatten().double().cpu()
    labels = targets.reshape(found.parts.shape)[own].flatten().tolist()
    if len(losses) < 2:
        return ()
    worst = losses.nan_to_num(math.inf).topk(min(POSITIONS, len(losses))).indices.tolist()
    shares = (losses / losses.sum()).tolist()
    return tuple(Position(place, labels[place], shares[place]) for place in worst)


def evidence_of(setting: Setting, info: Mapping[str, Any], is_finite: bool) -> Evidence:
    """Look at the parameters, at what the model was called with, and at the graph."""
    graph = Graph(info["loss"])
    loss, by_part = read_loss(info["loss"]), None
    with suppress(UnavailableError):
        by_part = sample_losses(setting, info["loss"], info)
    known = info.get("individual_losses")
    losses = known if known is not None else None if by_part is None else by_part.losses
    samples = 0 if losses is None else len(losses)
    inputs = _inputs(graph, setting, samples or len(info.get("ids") or ()))
    targets = loss.targets
    if targets is not None and not (targets.is_floating_point() and targets.dim()):
        targets = None
    on_host = None if losses is None else losses.detach().double().cpu()
    found = Evidence(on_host, by_part, _root_mean_squares(inputs), _root_mean_squares(targets))
    if is_finite:
        return found
    weights = bad_tensors(setting.leaves)
    if weights:
        return replace(found, origin="weights", place=layer_of(weights[0]))
    given: tuple[tuple[Origin, Tensor | None], ...] = (("input", inputs), ("target", targets))
    for origin, tensor in given:
        bad = None if tensor is None else bad_rows(tensor)
        if bad is not None and bool(bad.any()):
            return replace(found, origin=origin, bad=bad.cpu())
    place = first_place(graph, setting.names, found.samples)
    bad = place.bad if place is not None else None
    if bad is None and found.losses is not None:
        bad = ~found.losses.isfinite()
    term = term_of(graph, None if place is None else place.node)
    bad = None if bad is None else bad.cpu()
    name = "" if place is None else place.name
    is_given = place is not None and place.is_given
    return replace(
        found, origin="target" if is_given else "forward", place=name, hint=term, bad=bad
    )


def _inputs(graph: Graph, setting: Setting, samples: int) -> Tensor | None:
    """The first real tensor that the model was called with, with a row for each sample."""
    calls = calls_behind(graph, setting.model)
    given = (each.reference() for call in calls for each in call.inputs if each.is_real)
    known = (each for each in given if each is not None and each.dim())
    return next((each for each in known if len(each) == samples or not samples), None)


def _root_mean_squares(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not len(tensor):
        return None
    rows = tensor.detach().reshape(len(tensor), -1).double()
    return rows.square().mean(1).sqrt().cpu()


# Where the first number came up that isn't finite --------------------------------------------

_RESULTS = ("result", "result0", "output", "out", "logsumexp")
"""Names under which nodes save what they have computed, and not what they compute with."""


_STEEP = ("Sqrt", "Rsqrt", "Log", "Log2", "Log10", "Pow", "Acos", "Asin", "Atan2")
"""Operations whose derivative is infinite somewhere, as that of the square root at 0."""


class Place(NamedTuple):
    """A layer or operation, and the rows of its output with numbers that aren't finite.

    ``node`` is its number in the graph. It ``is_given`` if the numbers came with a tensor without a
    gradient, such as a target, while the output that it is compared with is finite.
    """

    name: str
    bad: Tensor | None
    node: int
    is_given: bool = False


def bad_rows(tensor: Tensor) -> Tensor:
    """Whether each row along the first axis has a NaN or an Inf, ``[N]`` of booleans."""
    if not tensor.is_floating_point():
        return torch.zeros(len(tensor), dtype=torch.bool, device=tensor.device)
    found = ~tensor.detach().isfinite()
    return found.any(tuple(range(1, found.dim()))) if found.dim() > 1 else found


def bad_tensors(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Names of the tensors that have a NaN or an Inf."""
    found = {name: each.detach() for name, each in tensors.items() if each is not None}
    return [name for name, each in found.items() if not bool(each.isfinite().all())]


def first_place(graph: Graph, names: Mapping[int, str], samples: int) -> Place | None:
    """The first operation of the forward pass whose output isn't finite, as far as that was saved.

    ``names`` are those of parameters, by ``id``. Where nothing was saved of an operation's output,
    the next one that has saved its input shows it. ``None`` if everything that was saved is finite.
    """
    inner = [number for number, each in enumerate(graph.kinds) if each != LEAF]
    for number in sorted(inner, key=lambda each: sequence_number(graph.nodes[each])):
        if _is_of_nothing(graph, number):
            return Place(f"{plain_name(graph.kinds[number])} of no elements", None, number)
        for name, tensor in saved_by_name(graph.nodes[number]):
            if not tensor.is_floating_point() or bool(tensor.detach().isfinite().all()):
                continue
            # Masked scores are minus infinity on purpose, which a softmax makes zero.
            if bool((tensor.isfinite() | tensor.isneginf()).all()) and name not in _RESULTS:
                continue
            at = number if name in _RESULTS else _source(graph, number)
            at = _made(graph, at)
            has_rows = tensor.dim() > 0 and len(tensor) == samples
            name = _place(graph, at, names, _pole(graph, at)[0])
            bad = bad_rows(tensor) if has_rows else None
            return Place(name, bad, at, _is_given(graph, at))
    for number in inner:
        why, where = _pole(graph, number)
        if where is not None:
            has_rows = where.dim() > 0 and len(where) == samples
            bad = where.reshape(samples, -1).any(1) if has_rows else None
            return Place(_place(graph, number, names, why), bad, number)
    return None


def _made(graph: Graph, number: int) -> int:
    """The operation that has made the numbers that others have chosen or kept finite."""
    kind = kind_of(graph.kinds[number])
    is_passed = kind.stays_finite or kind.selects or kind.is_view
    source = _source(graph, number)
    return _made(graph, source) if is_passed and source != number else number


LARGE = 1e30
"""A product of a layer's input and weights has finite numbers if that of their norms is smaller."""


def _is_given(graph: Graph, number: int) -> bool:
    """Whether a difference isn't finite although a layer's output, which is one of the two, is."""
    kind, edges = plain_name(graph.kinds[number]), graph.children[number]
    computed = [edge[0] for edge in edges if edge is not None]
    if kind not in ("Sub", "Rsub") or len(edges) != 2 or len(computed) != 1:
        return False
    layer = _made(graph, computed[0])
    tensors = (t.detach() for _, t in saved_by_name(graph.nodes[layer]) if t.is_floating_point())
    norms = [float(torch.linalg.vector_norm(t.double())) for t in tensors]
    return kind_of(graph.kinds[layer]).is_affine and math.prod(norms) < LARGE


def _is_of_nothing(graph: Graph, number: int) -> bool:
    """Whether a mean or loss is over no elements, as where a mask is empty or all is ignored."""
    node, kind = graph.nodes[number], graph.kinds[number]
    if kind.startswith("Mean"):
        return bool(0 in saved(node, "self_sym_sizes", (1,)))
    weights = dict(saved_by_name(node)).get("total_weight")
    is_mean = kind.startswith("NllLoss") and saved(node, "reduction", 0) == 1
    return is_mean and weights is not None and not bool(weights)


def _pole(graph: Graph, number: int) -> tuple[str, Tensor | None]:
    """What an operation was applied to where it has no finite value, in words, and where."""
    kind, tensors = plain_name(graph.kinds[number]), dict(saved_by_name(graph.nodes[number]))
    of = tensors.get("other" if kind == "Div" else "self")
    if of is None or not of.is_floating_point() or kind not in ("Div", "Log", "Log2", "Log10"):
        return "", None
    if kind != "Div" and bool((of < 0).any()):
        return " of a negative number", of < 0
    if not bool((of == 0).any()):
        return "", None
    return " by 0" if kind == "Div" else " of 0", of == 0


def steep_places(graph: Graph, names: Mapping[int, str]) -> list[str]:
    """The operations whose derivative may have been infinite, the last of the forward pass first.

    Their values are gone after the backward pass.
    """
    found = [n for n, kind in enumerate(graph.kinds) if plain_name(kind) in _STEEP]
    return list(dict.fromkeys(_place(graph, number, names) for number in reversed(found)))


def term_of(graph: Graph, number: int | None) -> str:
    """Which term of the loss depends on a node, if it is a sum of which one alone does.

    Without a node, it is the term that needs no gradient and so isn't in the graph, if there is
    one.
    """
    terms = [*_terms(graph, graph.root)]
    if len(terms) < 2:
        return ""
    which = [
        place
        for place, edge in enumerate(terms)
        if (edge is None if number is None else edge and number in graph.below([edge[0]]))
    ]
    if len(which) != 1:
        return ""
    edge = terms[which[0]]
    words = f"term {which[0] + 1} of {len(terms)} of the loss"
    if edge is None:
        return f"{words}, perhaps, which needs no gradient"
    return f"{words} ({plain_name(graph.kinds[edge[0]])})"


def _terms(graph: Graph, edge: Edge) -> Iterator[Edge | None]:
    """The terms of a sum of single numbers, as they were written; ``None`` is a constant tensor."""
    number = edge[0]
    kind, below = plain_name(graph.kinds[number]), graph.children[number]
    is_number = graph.shape(edge) == ()
    if is_number and kind in ("Add", "Sub") and len(below) == 2:
        for each in below:
            yield from [None] if each is None else _terms(graph, each)
        return
    factors = [each for each in below if each is not None]
    if is_number and kind in ("Mul", "Div", "Neg") and len(factors) == 1:
        yield from _terms(graph, factors[0])
    else:
        yield edge


def _source(graph: Graph, number: int) -> int:
    """The operation that has computed the input of a node; the node itself if that is data."""
    inputs = [edge[0] for edge in graph.children[number] if edge is not None]
    computed = [each for each in inputs if _leaf(graph, (each, 0)) is None]
    return max(computed, default=number, key=lambda each: sequence_number(graph.nodes[each]))


def _leaf(graph: Graph, edge: Edge | None) -> int | None:
    """The leaf that an edge leads to by nodes with one input alone, such as views and casts."""
    while edge is not None and graph.kinds[edge[0]] != LEAF:
        below = graph.children[edge[0]]
        edge = below[0] if len(below) == 1 else None
    return None if edge is None else edge[0]


def _place(graph: Graph, number: int, names: Mapping[int, str], why: str = "") -> str:
    """The layer of an operation; of one without parameters, its kind and the layer before it.

    ``why`` says after the kind what the operation was applied to.
    """
    own = next(_own_names(graph, number, names), "")
    if own:
        return layer_of(own)
    kind = plain_name(graph.kinds[number]) + why
    before = sorted(graph.below([number]) - {number}, reverse=True)
    layer = next((n for each in before for n in _own_names(graph, each, names)), "")
    return f"{kind} behind layer {layer_of(layer)}" if layer else kind


def _own_names(graph: Graph, number: int, names: Mapping[int, str]) -> Iterator[str]:
    """Names of the parameters that a node computes with."""
    leaves = [_leaf(graph, edge) for edge in graph.children[number]]
    found = (names.get(id(graph.nodes[leaf].variable)) for leaf in leaves if leaf is not None)
    return (name for name in found if name is not None)
