"""Networks of rows that none of the layers of ``tests.cases.random_layers`` shows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.zoo.losses import CLASSES, WORDS, classify, numbers, regress, targets
from benchmarks.zoo.network import Batch, Network, also_told
from tests.cases.row_cases import Net

KIND = "by hand: rows"
D = 7
H = 8

Build: TypeAlias = Callable[[], nn.Module]


def mlp(inside: int = D, outside: int = CLASSES) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inside, H), nn.Tanh(), nn.Linear(H, outside))


def multiple_choice(model: Net, x: Tensor) -> Tensor:
    """Samples folded with their choices, ``[N, C, D]``."""
    return model.net(x.flatten(0, 1)).view(x.shape[:2])


def multiple_choice_texts(model: Net, x: Tensor) -> Tensor:
    """Texts ``[N, C, T]`` of which each goes through a recurrent layer."""
    _, (state, _) = model.recurrent(model.table(x.flatten(0, 1)))
    return model.head(state[0]).view(x.shape[:2])


def crops_of_sizes(model: Net, x: Tensor) -> Tensor:
    """Images cropped to three sizes, with one call for those of each size."""
    pooled = [model.convolution(x[..., :k, :k]).relu().mean((2, 3)) for k in (4, 6, 8)]
    return model.head(torch.stack(pooled).mean(0))


def soft(model: Net, x: Tensor) -> Tensor:
    """All experts see all samples, in one product."""
    outputs = torch.einsum("nd,edk->nek", x, model.weight)
    return (model.router(x).softmax(-1)[..., None] * outputs).sum(1)


def chosen_heads(model: Net, x: Tensor, task: Tensor) -> Tensor:
    """The head of each sample's own task ``[N]`` is taken from a table of heads."""
    return torch.bmm(model.trunk(x).tanh()[:, None], model.heads[task])[:, 0]


def one_large_graph(model: Net, x: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
    """Vertices ``[V, D]`` of several graphs, edges ``[2, E]``, and whose each vertex is."""
    for layer in (model.first, model.second):
        messages = layer(x)
        received = torch.zeros_like(messages).index_add(0, edges[1], messages[edges[0]])
        x = (messages + received).tanh()
    return model.head(x.new_zeros(graphs, x.shape[1]).index_add(0, owner, x))


def graph_batch(samples: int) -> Batch:
    """Graphs of two to five vertices with random edges inside each."""
    sizes = torch.randint(2, 6, (samples,)).tolist()
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    edges = [
        torch.randint(size, (2, 2 * size)) + start
        for size, start in zip(sizes, starts, strict=False)
    ]
    return {
        "x": torch.randn(sum(sizes), D, dtype=torch.float64),
        "edges": torch.cat(edges, 1),
        "owner": torch.arange(samples).repeat_interleave(torch.tensor(sizes)),
        "y": torch.randint(CLASSES, (samples,)),
    }


def one_graph(batch: Batch, n: int) -> Batch:
    """One graph with its edges."""
    own = batch["owner"] == n
    start = int(own.nonzero()[0])
    edges = batch["edges"][:, own[batch["edges"][0]]] - start
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    return {"x": batch["x"][own], "edges": edges, "owner": owner, "y": batch["y"][n : n + 1]}


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of graphs."""
    output = model(batch["x"], batch["edges"], batch["owner"], len(batch["y"]))
    return cross_entropy(output, batch["y"])


def shuffled_vertices(samples: int) -> Batch:
    """As ``graph_batch``, but the vertices of all graphs are mixed."""
    batch = graph_batch(samples)
    order = torch.randperm(len(batch["x"]))
    edges = order.argsort()[batch["edges"]]
    return {**batch, "x": batch["x"][order], "owner": batch["owner"][order], "edges": edges}


def one_of_shuffled(batch: Batch, n: int) -> Batch:
    """One graph of those whose vertices are mixed."""
    own = batch["owner"] == n
    places = own.cumsum(0) - 1
    edges = places[batch["edges"][:, own[batch["edges"][0]]]]
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    return {"x": batch["x"][own], "edges": edges, "owner": owner, "y": batch["y"][n : n + 1]}


def graph_convolution(model: Net, x: Tensor, neighbours: Tensor) -> Tensor:
    """Vertices ``[N, V, D]`` with the adjacency of each sample's own graph."""
    hidden = (neighbours @ model.first(x)).relu()
    return model.head((neighbours @ model.second(hidden)).relu().mean(1))


def neighbours_batch(samples: int, vertices: int) -> Batch:
    """Graphs of equal sizes."""
    neighbours = (torch.rand(samples, vertices, vertices) < 0.5).double()
    return {**numbers(samples, vertices, D)(), "neighbours": neighbours}


def neighbours_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of graphs."""
    return cross_entropy(model(batch["x"], batch["neighbours"]), batch["y"])


def early_exit(model: Net, x: Tensor) -> Tensor:
    """Samples that are done leave the loop."""
    left, output = torch.arange(len(x)), x
    for _ in range(3):
        output = output.index_add(0, left, model.step(output[left]).tanh())
        left = left[output[left, 0].abs() < 1]
    return model.head(output)


def prototypes(model: Net, x: Tensor) -> Tensor:
    """Distances from the entries of a table."""
    return -torch.cdist(model.encoder(x), model.codes.weight)


def tokens_batch(samples: int, length: int) -> Batch:
    """Tokens ``[N, T, D]`` with a label each, and a mask of changing counts."""
    mask = torch.rand(samples, length) < 0.4
    mask[0, 0] = True
    labels = torch.randint(CLASSES, (samples, length))
    x = torch.randn(samples, length, D, dtype=torch.float64)
    return {"x": x, "y": labels, "tokens": labels, "mask": mask}


def film_frames(model: Net, x: Tensor) -> Tensor:
    """Films ``[N, F, C, H, W]`` whose frames go through a convolution one by one."""
    frames = model.convolution(x.flatten(0, 1)).relu().mean((2, 3))
    return model.head(frames.view(*x.shape[:2], -1).mean(1))


def frames_first(model: Net, x: Tensor) -> Tensor:
    """The same with frames folded in front of samples."""
    folded = x.transpose(0, 1).flatten(0, 1)
    frames = model.convolution(folded).relu().mean((2, 3))
    return model.head(frames.view(x.shape[1], x.shape[0], -1).mean(0))


def half_batch(samples: int) -> Batch:
    """Rows and which of them go left; changes from step to step."""
    return {**numbers(samples, D)(), "left": torch.rand(samples) < 0.5}


def equal_halves(samples: int) -> Batch:
    """As ``half_batch``, and each half has as many samples."""
    return {**numbers(samples, D)(), "left": torch.randperm(samples) < samples // 2}


def task_batch(samples: int) -> Batch:
    """Rows with the number of a task."""
    return {**numbers(samples, D)(), "task": torch.randint(5, (samples,))}


def choices(samples: int, *shape: int) -> Batch:
    """Rows ``[N, C, D]`` of which one is the right one."""
    return numbers(samples, CLASSES, *shape)()


def text_choices(samples: int, length: int) -> Batch:
    """Texts ``[N, C, T]`` of which one is the right one."""
    x = torch.randint(WORDS, (samples, CLASSES, length))
    return {"x": x, "y": torch.randint(CLASSES, (samples,))}


def mask_count(batch: Batch) -> float:
    """How many tokens the mask has."""
    return float(batch["mask"].sum())


def parted(
    function: Callable[..., Tensor], **parts: Callable[[], nn.Module | nn.Parameter]
) -> Build:
    """Something that builds the ``parts`` and applies the function."""
    return lambda: Net(function, **{key: part() for key, part in parts.items()})


def parameter(*shape: int, scale: float = 1.0) -> Callable[[], nn.Parameter]:
    """Something that builds a parameter of normal numbers."""
    return lambda: nn.Parameter(scale * torch.randn(*shape))


def linear(inside: int, outside: int) -> Build:
    """Something that builds a linear layer."""
    return partial(nn.Linear, inside, outside)


TWO = {"first": linear(D, H), "second": linear(H, CLASSES)}
HEADED = {"first": linear(D, H), "head": linear(H, CLASSES)}
TRUNK = {"trunk": linear(D, H), "a": linear(H, CLASSES), "b": linear(H, CLASSES)}
CONVOLUTION = {"convolution": partial(nn.Conv2d, 2, H, 3), "head": linear(H, CLASSES)}
SETS = {"inner": linear(D, H), "outer": linear(H, CLASSES)}
GRAPH = {"first": linear(D, H), "second": linear(H, H), "head": linear(H, CLASSES)}
READ = {
    "table": partial(nn.Embedding, WORDS, D),
    "recurrent": partial(nn.LSTM, D, H, batch_first=True),
    "head": linear(H, 1),
}


def networks() -> list[Network]:
    """All of them."""
    return [*_of_rows(), *_of_sequences(6), *_of_sequences(4), *_of_parts_of_rows()]


def _of_rows() -> list[Network]:
    """Of rows ``[N, D]`` with a label each."""
    codes = {"encoder": mlp, "codes": partial(nn.Embedding, 3, 3)}
    builds: dict[str, Build] = {
        "early exit": parted(early_exit, step=linear(D, D), head=linear(D, CLASSES)),
        "nearest prototypes": parted(prototypes, **codes),
        "soft mixture of experts": parted(
            soft, router=linear(D, 3), weight=parameter(3, D, CLASSES)
        ),
    }
    rows = numbers(4, D)
    return [
        *(Network(name, KIND, build, rows, classify) for name, build in builds.items()),
        Network("batch of one", KIND, mlp, numbers(1, D), classify, 1),
        Network("autoencoder", KIND, partial(mlp, D, D), targets(4, (D,), (D,)), regress),
    ]


def _of_sequences(length: int) -> list[Network]:
    """Of rows, words or images ``[N, T, ...]``."""
    suffix = ", T = N" if length == 4 else ""
    films = numbers(4, length, 2, 5, 5)
    choices_of = partial(text_choices, 4, length)
    graphs = partial(neighbours_batch, 4, length)
    builds: dict[str, tuple[Build, Callable[[], Batch]]] = {
        "multiple choice of texts": (parted(multiple_choice_texts, **READ), choices_of),
        "film frames": (parted(film_frames, **CONVOLUTION), films),
        "film frames first": (parted(frames_first, **CONVOLUTION), films),
    }
    convolved = parted(graph_convolution, **GRAPH)
    return [
        *(Network(name + suffix, KIND, *how, classify) for name, how in builds.items()),
        Network(f"graph convolution{suffix}", KIND, convolved, graphs, neighbours_loss),
    ]


def _of_parts_of_rows() -> list[Network]:
    """Of choices, tasks, halves, bags, graphs and crops."""
    choice = parted(multiple_choice, net=partial(mlp, D, 1))
    by_task = parted(chosen_heads, trunk=linear(D, H), heads=parameter(5, H, CLASSES))
    graph = parted(one_large_graph, **GRAPH)
    sized = parted(crops_of_sizes, **CONVOLUTION)
    graphs, mixed = partial(graph_batch, 4), partial(shuffled_vertices, 4)
    return [
        Network("heads taken by task", KIND, by_task, partial(task_batch, 4), labelled_by("task")),
        Network("multiple choice", KIND, choice, partial(choices, 4, D), classify),
        Network("crops of three sizes", KIND, sized, numbers(4, 2, 8, 8), classify),
        *also_told(Network("one large graph", KIND, graph, graphs, graph_loss, one=one_graph)),
        *also_told(Network("mixed graph", KIND, graph, mixed, graph_loss, one=one_of_shuffled)),
    ]


def labelled_by(key: str) -> Callable[[nn.Module, Batch], Tensor]:
    """Cross entropy of ``model(x, batch[key])``."""
    return lambda model, batch: cross_entropy(model(batch["x"], batch[key]), batch["y"])
