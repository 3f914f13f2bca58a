"""Networks by hand of rows, texts and graphs, and what networks by hand are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, ctc_loss

from benchmarks.zoo.network import (
    CLASSES,
    WORDS,
    Batch,
    Losses,
    Network,
    also_told,
    classify,
    drawn,
    integers,
    labelled,
    normal,
    numbers,
    some_of,
)
from tests.cases.random_layers import SEQUENCE_LAYERS, Sizes
from tests.cases.row_cases import Net

KIND = "by hand: rows"
D = 6
H = 8

Build: TypeAlias = Callable[[], nn.Module]


def mlp(inside: int = D, outside: int = CLASSES) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inside, H), nn.Tanh(), nn.Linear(H, outside))


def parted(
    function: Callable[..., Tensor], **parts: Callable[[], nn.Module | nn.Parameter]
) -> Build:
    """Something that builds the ``parts`` and applies the function."""
    return lambda: Net(function, **{key: part() for key, part in parts.items()})


def parameter(*shape: int, scale: float = 1.0) -> Callable[[], nn.Parameter]:
    """Something that builds a parameter of normal numbers."""
    return lambda: nn.Parameter(scale * torch.randn(shape))


def linear(inside: int, outside: int) -> Build:
    """Something that builds a linear layer."""
    return partial(nn.Linear, inside, outside)


def multiple_choice(model: Net, x: Tensor) -> Tensor:
    """Texts ``[N, C, T]`` of which each goes through a recurrent layer."""
    _, (state, _) = model.recurrent(model.table(x.flatten(0, 1)))
    return model.head(state[0]).view(x.shape[:2])


def crops_of_sizes(model: Net, x: Tensor) -> Tensor:
    """Images cropped to three sizes, with one call for those of each size."""
    pooled = [model.convolution(x[..., :k, :k]).relu().mean((2, 3)) for k in (4, 6, 8)]
    return model.head(torch.stack(pooled).mean(0))


def graph_convolution(model: Net, x: Tensor, neighbours: Tensor) -> Tensor:
    """Vertices ``[N, V, D]`` with the adjacency of each sample's own graph."""
    hidden = (neighbours @ model.first(x)).relu()
    return model.head((neighbours @ model.second(hidden)).relu().mean(1))


def one_large_graph(model: Net, x: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
    """Vertices ``[V, D]`` of several graphs, edges ``[2, E]``, and whose each vertex is."""
    for layer in (model.first, model.second):
        messages = layer(x)
        received = torch.zeros_like(messages).index_add(0, edges[1], messages[edges[0]])
        x = (messages + received).tanh()
    return model.head(x.new_zeros(graphs, x.shape[1]).index_add(0, owner, x))


def graph_batch(samples: int, mixed: bool = False) -> Batch:
    """Graphs of two to five vertices with random edges inside each; their vertices may be mixed."""
    owner = torch.arange(samples).repeat_interleave(torch.randint(2, 6, (samples,)))
    if mixed:
        owner = owner[torch.randperm(len(owner))]
    vertices = [(owner == n).nonzero()[:, 0] for n in range(samples)]
    edges = [own[torch.randint(len(own), (2, 2 * len(own)))] for own in vertices]
    x = torch.randn(len(owner), D, dtype=torch.float64)
    labels = torch.randint(CLASSES, (samples,))
    return {"x": x, "edges": torch.cat(edges, 1), "owner": owner, "y": labels}


def one_graph(batch: Batch, n: int) -> Batch:
    """One graph with its edges."""
    own = batch["owner"] == n
    places = own.cumsum(0) - 1
    edges = places[batch["edges"][:, own[batch["edges"][0]]]]
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    return {"x": batch["x"][own], "edges": edges, "owner": owner, "y": batch["y"][n : n + 1]}


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of graphs."""
    output = model(batch["x"], batch["edges"], batch["owner"], len(batch["y"]))
    return cross_entropy(output, batch["y"])


def translate(model: Net, x: Tensor) -> Tensor:
    """An encoder's states, a decoder with teacher forcing, and attention between them.

    The words to come are those that came in.
    """
    states, last = model.encoder(model.source(x))
    output, _ = model.decoder(model.target(x), last)
    attended = (model.score(output) @ states.transpose(1, 2)).softmax(-1) @ states
    return model.head(torch.cat([output, attended], -1))


def label_words(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy over all words whose label isn't -100."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def labels_left(batch: Batch) -> float:
    """Labels that count."""
    return labelled(batch["y"])


def transcribe(model: nn.Module, batch: Batch) -> Tensor:
    """Connectionist temporal classification of one to three letters, averaged over samples."""
    logits = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    n, t = batch["x"].shape
    lengths = torch.full((n,), t), batch["length"] + 1
    return ctc_loss(logits, batch["y"] + 1, *lengths, reduction="sum", zero_infinity=True) / n


class LowNorm(nn.Module):
    """Root mean squares in float32, whatever the network computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., H]``."""
        low = x.float()
        return self.weight * (low * low.square().mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x)


def lists(model: Net, x: Tensor) -> Tensor:
    """Weights in lists and dictionaries, used by functions."""
    for weight in model.weights:
        x = x + (x @ weight).tanh()
    return nn.functional.linear(x, model.named["out"], model.named["bias"])


def hyper(model: Net, x: Tensor) -> Tensor:
    """Each sample's weights come out of a network of that sample."""
    weights = model.generator(x).view(-1, D, H) / D
    return model.head((x[:, None] @ weights)[:, 0].tanh())


def generated(model: Net, x: Tensor) -> Tensor:
    """Weights for all samples come out of a network of a few parameters."""
    weight = model.generator(model.code).view(H, D)
    return model.head(nn.functional.linear(x, weight).tanh())


def called(model: Net, x: Tensor) -> Tensor:
    """A network called with weights that are mixtures of two others'."""
    other = dict(model.b.named_parameters())
    mixed = {n: model.mixture * p + other[n] for n, p in model.a.named_parameters()}
    return model.head(functional_call(nn.Linear(D, H), mixed, (x,)).tanh())


def capsules(model: Net, x: Tensor) -> Tensor:
    """Capsules that agree by three rounds of routing."""
    votes = torch.einsum("nid,ikde->nike", model.inside(x).view(-1, 4, 3), model.weight)
    scores = x.new_zeros(votes.shape[:3])
    for _ in range(3):
        output = (scores.softmax(2)[..., None] * votes).sum(1)
        size = output.square().sum(-1, keepdim=True)
        output = output * size.sqrt() / (1 + size)
        scores = scores + (votes * output[:, None]).sum(-1)
    return output.square().sum(-1)


def equilibrium(model: Net, x: Tensor) -> Tensor:
    """A layer applied until not much changes, and once with its gradient."""
    inside = model.inside(x)
    with torch.no_grad():
        state = torch.zeros_like(inside)
        for _ in range(8):
            state = (inside + 0.5 * model.again(state)).tanh()
    return model.head((inside + 0.5 * model.again(state)).tanh())


def butterfly(model: Net, x: Tensor) -> Tensor:
    """Two block-diagonal matrices with a permutation between them (Monarch)."""
    x = torch.einsum("nki,kij->nkj", x.view(-1, 3, 2), model.left).transpose(1, 2)
    return model.head(torch.einsum("nki,kij->nkj", x, model.right).flatten(1))


def _lists() -> dict[str, Callable[[], Any]]:
    named = partial(torch.randn, CLASSES, D)
    return {
        "weights": lambda: nn.ParameterList(torch.randn(D, D) / 2 for _ in range(3)),
        "named": lambda: nn.ParameterDict({"out": named(), "bias": torch.zeros(CLASSES)}),
    }


INSIDE, HEAD = linear(D, H), {"head": linear(H, CLASSES)}
LAYERS: dict[str, Build] = {
    "normalisation in float32": lambda: nn.Sequential(INSIDE(), LowNorm(), HEAD["head"]()),
    "lists of parameters": parted(lists, **_lists()),
    "hypernetwork of each sample": parted(hyper, generator=linear(D, D * H), **HEAD),
    "hypernetwork of all": parted(generated, code=parameter(4), generator=linear(4, D * H), **HEAD),
    "functional call": parted(called, a=INSIDE, b=INSIDE, mixture=parameter(), **HEAD),
    "capsules": parted(capsules, inside=linear(D, 12), weight=parameter(4, CLASSES, 3, 5)),
    "equilibrium": parted(equilibrium, inside=INSIDE, again=linear(H, H), **HEAD),
    "block-diagonal matrices": parted(
        butterfly, left=parameter(3, 2, 2), right=parameter(2, 3, 3), head=linear(D, CLASSES)
    ),
}
"""Networks of rows with layers of users."""

GRAPH = {"first": linear(D, H), "second": linear(H, H), "head": linear(H, CLASSES)}
TABLE = partial(nn.Embedding, WORDS, D)
READ = {
    "table": TABLE,
    "recurrent": partial(nn.LSTM, D, H, batch_first=True),
    "head": linear(H, 1),
}
CROPS = {"convolution": partial(nn.Conv2d, 2, H, 3), "head": linear(H, CLASSES)}
CODER = partial(nn.GRU, D, H, batch_first=True)
TRANSLATION = {
    "source": TABLE,
    "target": TABLE,
    "encoder": CODER,
    "decoder": CODER,
    "score": partial(nn.Linear, H, H, bias=False),
    "head": linear(2 * H, WORDS),
}


def networks() -> list[Network]:
    """All of them; those of texts and graphs also with as many positions as samples."""
    crops = parted(crops_of_sizes, **CROPS), numbers(4, 2, 8, 8), classify
    found = [Network("crops of three sizes", KIND, *crops)]
    found += [Network(name, KIND, each, numbers(4, D), classify) for name, each in LAYERS.items()]
    for name, mixed in (("one large graph", False), ("mixed graph", True)):
        graphs = parted(one_large_graph, **GRAPH), partial(graph_batch, 4, mixed), graph_loss
        found += also_told(Network(name, KIND, *graphs, one=one_graph))
    for length, suffix in ((6, ""), (4, ", T = N")):
        words, labels = integers(WORDS, 4, length), integers(CLASSES, 4)
        neighbours = partial(_neighbours, 4, length)
        cases: dict[str, tuple[Build, Callable[[], Batch], Losses]] = {
            "multiple choice": (
                *(
                    parted(multiple_choice, **READ),
                    drawn(x=integers(WORDS, 4, 3, length), y=labels),
                ),
                classify,
            ),
            "graph convolution": (
                parted(graph_convolution, **GRAPH),
                *(drawn(x=normal(4, length, D), neighbours=neighbours, y=labels), classify),
            ),
            "transcription": (
                lambda length=length: nn.Sequential(TABLE(), _causal(length), nn.Linear(D, WORDS)),
                drawn(x=words, y=integers(WORDS - 1, 4, 3), length=integers(3, 4)),
                transcribe,
            ),
        }
        found += [Network(name + suffix, KIND, *how) for name, how in cases.items()]
        pairs = drawn(x=words, y=partial(_some_words, 4, length))
        translation = parted(translate, **TRANSLATION), pairs, label_words
        found.append(Network(f"translation{suffix}", KIND, *translation, units=labels_left))
    return found


def _neighbours(*sizes: int) -> Tensor:
    return (torch.rand(*sizes, sizes[-1]) < 0.5).double()


def _some_words(*sizes: int) -> Tensor:
    return some_of(torch.randint(WORDS, sizes))


def _causal(length: int) -> nn.Module:
    return SEQUENCE_LAYERS["causal convolution"](Sizes(length, D), Random(0))
