"""Networks that chunk, mask, route, sort, fold, share and pack the rows of their batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from benchmarks.zoo.losses import CLASSES, WORDS, classify, numbers, regress, targets, words
from benchmarks.zoo.network import Batch, Network, also_told

KIND = "by hand: rows"
D = 7
H = 8

Build: TypeAlias = Callable[[], nn.Module]


def mlp(inside: int = D, outside: int = CLASSES) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(inside, H), nn.Tanh(), nn.Linear(H, outside))


class Applied(nn.Module):
    """A network whose forward pass is a function of its parts and the inputs."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Whatever the function makes of them."""
        return self.function(self, *inputs)


def chunks(model: Applied, x: Tensor) -> Tensor:
    """The batch in chunks of two."""
    return torch.cat([model.net(chunk) for chunk in x.split(2)])


def single_rows(model: Applied, x: Tensor) -> Tensor:
    """One call for each row."""
    return torch.cat([model.net(x[n : n + 1]) for n in range(len(x))])


def single_vectors(model: Applied, x: Tensor) -> Tensor:
    """One call for each row, on a vector."""
    return torch.stack([model.net(row) for row in x])


def permuted(model: Applied, x: Tensor) -> Tensor:
    """Samples change places between two layers, and back."""
    order = torch.randperm(len(x))
    hidden = model.first(x).tanh()[order]
    return model.second(hidden)[order.argsort()]


def sorted_inside(model: Applied, x: Tensor) -> Tensor:
    """Samples are sorted by a feature, and put back."""
    order = x[:, 0].argsort()
    return model.second(model.first(x[order]).tanh())[order.argsort()]


def flipped(model: Applied, x: Tensor) -> Tensor:
    """A module used on the batch and on the flipped batch."""
    return model.net(x) + 0.5 * model.net(x.flip(0) ** 2).flip(0)


def halves(model: Applied, x: Tensor, left: Tensor) -> Tensor:
    """Two heads, each on the samples of a mask."""
    hidden = model.trunk(x).tanh()
    output = hidden.new_zeros(len(x), CLASSES)
    output[left] = model.a(hidden[left])
    output[~left] = model.b(hidden[~left])
    return output


def masked(model: Applied, x: Tensor, mask: Tensor) -> Tensor:
    """A head on the tokens of a mask."""
    return model.second(model.first(x).tanh()[mask])


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of the tokens of a mask."""
    return cross_entropy(model(batch["x"], batch["mask"]), batch["y"][batch["mask"]])


def multiple_choice(model: Applied, x: Tensor) -> Tensor:
    """Samples folded with their choices, ``[N, C, D]``."""
    return model.net(x.flatten(0, 1)).view(x.shape[:2])


def multiple_choice_texts(model: Applied, x: Tensor) -> Tensor:
    """Texts ``[N, C, T]`` of which each goes through a recurrent layer."""
    _, (state, _) = model.recurrent(model.table(x.flatten(0, 1)))
    return model.head(state[0]).view(x.shape[:2])


def crops_of_sizes(model: Applied, x: Tensor) -> Tensor:
    """Images cropped to three sizes, with one call for those of each size."""
    pooled = [model.convolution(x[..., :k, :k]).relu().mean((2, 3)) for k in (4, 6, 8)]
    return model.head(torch.stack(pooled).mean(0))


class Switch(nn.Module):
    """Each token goes to the one expert that its router likes best."""

    def __init__(self, experts: int = 3, top: int = 1) -> None:
        super().__init__()
        self.top = top
        self.inside = nn.Linear(D, D)
        self.router = nn.Linear(D, experts)
        self.experts = nn.ModuleList(mlp(D, D) for _ in range(experts))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, D]``."""
        hidden = self.inside(x).tanh()
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top, dim=-1)
        output = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, rank = (chosen == index).nonzero(as_tuple=True)
            output.index_add_(0, rows, weights[rows, rank, None] * expert(tokens[rows]))
        return self.head((hidden + output.view_as(hidden)).mean(1))


def grouped(model: Applied, x: Tensor) -> Tensor:
    """Experts whose tokens ``[N, T, D]`` are sorted by expert and multiplied group by group."""
    tokens = x.flatten(0, 1)
    gate, chosen = model.router(tokens).softmax(-1).max(-1)
    order = chosen.argsort()
    sizes = chosen.bincount(minlength=len(model.weight)).tolist()
    groups = tokens[order].split(sizes)
    output = torch.cat([group @ w for group, w in zip(groups, model.weight, strict=True)])
    output = gate[:, None] * output[order.argsort()]
    return model.head(output.view_as(x).tanh().mean(1))


def soft(model: Applied, x: Tensor) -> Tensor:
    """All experts see all samples, in one product."""
    outputs = torch.einsum("nd,edk->nek", x, model.weight)
    return (model.router(x).softmax(-1)[..., None] * outputs).sum(1)


def chosen_heads(model: Applied, x: Tensor, task: Tensor) -> Tensor:
    """The head of each sample's own task ``[N]`` is taken from a table of heads."""
    return torch.bmm(model.trunk(x).tanh()[:, None], model.heads[task])[:, 0]


def prompted(model: Applied, x: Tensor) -> Tensor:
    """Prompts that all samples share, of a layer or a parameter, stand in front of each text."""
    is_layer = isinstance(model.prompts, nn.Module)
    prompts = model.prompts(torch.arange(2)[None]) if is_layer else model.prompts[None]
    hidden = torch.cat([prompts.expand(len(x), -1, -1), model.table(x)], 1)
    scores = hidden @ hidden.transpose(1, 2)
    return model.head((scores.softmax(-1) @ model.mix(hidden)).mean(1))


def bags(model: Applied, x: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Bags of all words, given by where each starts, or of texts ``[N, T]``."""
    return model.head(model.bag(x, offsets).tanh())


def bag_batch(samples: int) -> Batch:
    """Texts of one to five words, one behind the other."""
    lengths = torch.randint(1, 6, (samples,))
    return {
        "x": torch.randint(WORDS, (int(lengths.sum()),)),
        "offsets": lengths.cumsum(0) - lengths,
        "y": torch.randint(CLASSES, (samples,)),
    }


def one_bag(batch: Batch, n: int) -> Batch:
    """The words of one text."""
    ends = [*batch["offsets"].tolist(), len(batch["x"])]
    x = batch["x"][ends[n] : ends[n + 1]]
    return {"x": x, "offsets": torch.zeros(1, dtype=torch.long), "y": batch["y"][n : n + 1]}


def bag_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of bags."""
    return cross_entropy(model(batch["x"], batch["offsets"]), batch["y"])


def one_large_graph(model: Applied, x: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
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


def graph_convolution(model: Applied, x: Tensor, neighbours: Tensor) -> Tensor:
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


def sets(model: Applied, x: Tensor) -> Tensor:
    """Sums over the elements of each set, ``[N, M, D]``."""
    return model.outer(model.inner(x).tanh().sum(1))


def early_exit(model: Applied, x: Tensor) -> Tensor:
    """Samples that are done leave the loop."""
    left, output = torch.arange(len(x)), x
    for _ in range(3):
        output = output.index_add(0, left, model.step(output[left]).tanh())
        left = left[output[left, 0].abs() < 1]
    return model.head(output)


def attention_across(model: Applied, x: Tensor) -> Tensor:
    """Each sample looks at all others of the batch."""
    hidden = model.first(x)
    return model.head((hidden @ hidden.T).softmax(-1) @ hidden)


def batch_statistics(model: Applied, x: Tensor) -> Tensor:
    """A normalisation over the batch by hand."""
    hidden = model.first(x)
    return model.head((hidden - hidden.mean(0)) / hidden.std(0))


def prototypes(model: Applied, x: Tensor) -> Tensor:
    """Distances from the entries of a table."""
    return -torch.cdist(model.encoder(x), model.codes.weight)


def tokens_batch(samples: int, length: int) -> Batch:
    """Tokens ``[N, T, D]`` with a label each, and a mask of changing counts."""
    mask = torch.rand(samples, length) < 0.4
    mask[0, 0] = True
    labels = torch.randint(CLASSES, (samples, length))
    x = torch.randn(samples, length, D, dtype=torch.float64)
    return {"x": x, "y": labels, "tokens": labels, "mask": mask}


def class_token(model: Applied, x: Tensor) -> Tensor:
    """Attention by hand over the tokens and a class token, which is read out."""
    hidden = torch.cat([model.token.expand(len(x), -1, -1), x], 1)
    keys, values = model.mix(hidden).chunk(2, -1)
    return model.head(((hidden @ keys.transpose(1, 2)).softmax(-1) @ values)[:, 0])


def film_frames(model: Applied, x: Tensor) -> Tensor:
    """Films ``[N, F, C, H, W]`` whose frames go through a convolution one by one."""
    frames = model.convolution(x.flatten(0, 1)).relu().mean((2, 3))
    return model.head(frames.view(*x.shape[:2], -1).mean(1))


def frames_first(model: Applied, x: Tensor) -> Tensor:
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


def tables_by_function(model: Applied, x: Tensor) -> Tensor:
    """A table of positions and one of words, both looked up by ``embedding`` itself."""
    positions = embedding(torch.arange(x.shape[1])[None], model.positions)
    return model.head((embedding(x, model.words) * positions).tanh().mean(1))


def parted(
    function: Callable[..., Tensor], **parts: Callable[[], nn.Module | nn.Parameter]
) -> Build:
    """Something that builds the ``parts`` and applies the function."""
    return lambda: Applied(function, **{key: part() for key, part in parts.items()})


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
        "chunks of two": parted(chunks, net=mlp),
        "loop over single rows": parted(single_rows, net=mlp),
        "loop over single vectors": parted(single_vectors, net=mlp),
        "permuted inside": parted(permuted, **TWO),
        "sorted inside": parted(sorted_inside, **TWO),
        "the batch and the flipped batch": parted(flipped, net=mlp),
        "early exit": parted(early_exit, step=linear(D, D), head=linear(D, CLASSES)),
        "nearest prototypes": parted(prototypes, **codes),
        "soft mixture of experts": parted(
            soft, router=linear(D, 3), weight=parameter(3, D, CLASSES)
        ),
    }
    coupled = {
        "attention across the batch": parted(attention_across, **HEADED),
        "normalisation over the batch by hand": parted(batch_statistics, **HEADED),
    }
    rows = numbers(4, D)
    return [
        *(Network(name, KIND, build, rows, classify) for name, build in builds.items()),
        *(Network(name, KIND, b, rows, classify, meet=True) for name, b in coupled.items()),
        Network("batch of one", KIND, mlp, numbers(1, D), classify, 1),
        Network("five in chunks of two", KIND, builds["chunks of two"], numbers(5, D), classify, 5),
        Network("autoencoder", KIND, partial(mlp, D, D), targets(4, (D,), (D,)), regress),
    ]


def _of_sequences(length: int) -> list[Network]:
    """Of rows, words or images ``[N, T, ...]``."""
    suffix = ", T = N" if length == 4 else ""
    rows, texts = numbers(4, length, D), words(4, length)
    films, tokens = numbers(4, length, 2, 5, 5), partial(tokens_batch, 4, length)
    choices_of = partial(text_choices, 4, length)
    graphs, head = partial(neighbours_batch, 4, length), {"head": linear(D, CLASSES)}
    experts = {"router": linear(D, 3), "weight": parameter(3, D, D, scale=D**-0.5), **head}
    read_out = {"token": parameter(1, 1, D), "mix": linear(D, 2 * D), **head}
    tables = {"words": parameter(WORDS, D), "positions": parameter(9, D), **head}
    builds: dict[str, tuple[Build, Callable[[], Batch]]] = {
        "switch layer": (Switch, rows),
        "two experts of four": (partial(Switch, 4, 2), rows),
        "grouped experts": (parted(grouped, **experts), rows),
        "prompts, embedded": (prompts_of(partial(nn.Embedding, 2, D)), texts),
        "prompts, parameters": (prompts_of(parameter(2, D)), texts),
        "class token": (parted(class_token, **read_out), rows),
        "tables by function": (parted(tables_by_function, **tables), texts),
        "multiple choice of texts": (parted(multiple_choice_texts, **READ), choices_of),
        "sets": (parted(sets, **SETS), rows),
        "bags of words, padded": (bags_by("mean"), texts),
        "film frames": (parted(film_frames, **CONVOLUTION), films),
        "film frames first": (parted(frames_first, **CONVOLUTION), films),
    }
    convolved = parted(graph_convolution, **GRAPH)
    chosen, counted = parted(masked, **TWO), {"units": mask_count}
    return [
        *(Network(name + suffix, KIND, *how, classify) for name, how in builds.items()),
        Network(f"masked head{suffix}", KIND, chosen, tokens, masked_loss, **counted),
        Network(f"graph convolution{suffix}", KIND, convolved, graphs, neighbours_loss),
    ]


def _of_parts_of_rows() -> list[Network]:
    """Of choices, tasks, halves, bags, graphs and crops."""
    pairs = numbers(2, 2, D)
    choice, heads = parted(multiple_choice, net=partial(mlp, D, 1)), parted(halves, **TRUNK)
    by_task = parted(chosen_heads, trunk=linear(D, H), heads=parameter(5, H, CLASSES))
    graph = parted(one_large_graph, **GRAPH)
    sized = parted(crops_of_sizes, **CONVOLUTION)
    graphs, mixed = partial(graph_batch, 4), partial(shuffled_vertices, 4)
    return [
        Network("switch layer, two tokens of two samples", KIND, Switch, pairs, classify, 2),
        Network("heads taken by task", KIND, by_task, partial(task_batch, 4), labelled_by("task")),
        Network("multiple choice", KIND, choice, partial(choices, 4, D), classify),
        Network("heads on halves", KIND, heads, partial(half_batch, 4), labelled_by("left")),
        Network(
            "heads on equal halves", KIND, heads, partial(equal_halves, 4), labelled_by("left")
        ),
        Network("crops of three sizes", KIND, sized, numbers(4, 2, 8, 8), classify),
        *(_bags(mode) for mode in ("sum", "mean", "max")),
        *also_told(Network("one large graph", KIND, graph, graphs, graph_loss, one=one_graph)),
        *also_told(Network("mixed graph", KIND, graph, mixed, graph_loss, one=one_of_shuffled)),
    ]


def bags_by(mode: str) -> Build:
    """Something that builds a network of bags."""
    bag = partial(nn.EmbeddingBag, WORDS, H, mode=mode)
    return parted(bags, bag=bag, head=linear(H, CLASSES))


def prompts_of(prompts: Callable[[], nn.Module | nn.Parameter]) -> Build:
    """Something that builds a network with prompts."""
    around = {"mix": linear(D, D), "head": linear(D, CLASSES)}
    return parted(prompted, table=partial(nn.Embedding, WORDS, D), prompts=prompts, **around)


def _bags(mode: str) -> Network:
    name, batch = f"bags of words with offsets, {mode}", partial(bag_batch, 4)
    return Network(name, KIND, bags_by(mode), batch, bag_loss, one=one_bag)


def labelled_by(key: str) -> Callable[[nn.Module, Batch], Tensor]:
    """Cross entropy of ``model(x, batch[key])``."""
    return lambda model, batch: cross_entropy(model(batch["x"], batch[key]), batch["y"])
