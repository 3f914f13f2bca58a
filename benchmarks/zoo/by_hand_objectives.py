"""Networks whose losses are more than one call of a network and a mean over its outputs.

They roll out, unroll, differentiate inside, pack, chunk, compare samples, and have backward passes
of their own. What is random is part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss, softplus
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.by_hand_rows import Build, D, H, graph_batch, linear, mlp, one_graph, parted
from benchmarks.zoo.network import (
    CLASSES,
    WORDS,
    Batch,
    Losses,
    Network,
    also_told,
    drawn,
    integers,
    normal,
)
from tests.cases.random_layers import Reversed
from tests.cases.row_cases import Net

KIND = "by hand: objectives"
Z = 4
"""Size of latent vectors and states."""


def attention_over_edges(model: nn.Module, batch: Batch) -> Tensor:
    """Each vertex takes a softmax over the edges that lead to it."""
    hidden, (source, target) = model.first(batch["x"]), batch["edges"]
    scores = model.score(torch.cat([hidden[source], hidden[target]], 1))[:, 0].exp()
    totals = scores.new_zeros(len(hidden)).index_add(0, target, scores)
    weights = (scores / totals[target])[:, None]
    hidden = hidden.index_add(0, target, weights * hidden[source]).tanh()
    pooled = hidden.new_zeros(len(batch["y"]), H).index_add(0, batch["owner"], hidden)
    return cross_entropy(model.head(pooled), batch["y"])


def labelled_vertices(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over the vertices of all graphs, each of which is a sample with a label."""
    return _of_vertices(model, batch).mean()


def _of_vertices(model: nn.Module, batch: Batch) -> Tensor:
    x, (source, target) = batch["x"], batch["edges"]
    hidden = model.first(x).index_add(0, target, model.second(x)[source].tanh())
    return cross_entropy(model.head(hidden), (x[:, 0] > 0).long(), reduction="none")


def equal_graphs(samples: int) -> Batch:
    """Rings of three vertices each."""
    vertices = torch.arange(samples)
    after = vertices - vertices % 3 + (vertices + 1) % 3
    return {"x": normal(samples, D)(), "edges": torch.stack([vertices, after])}


def bootstrapped(model: nn.Module, batch: Batch) -> Tensor:
    """Actor and critic on rollouts ``[T + 1, N, D]`` in one call; the last step is a target."""
    logits, values = model.policy(batch["x"])[:-1], model.critic(batch["x"])[..., 0]
    target = batch["reward"] + 0.9 * values[1:].detach()
    advantage = target - values[:-1]
    chosen = logits.log_softmax(-1).gather(-1, batch["action"][..., None])[..., 0]
    return (0.5 * advantage.square() - chosen * advantage.detach()).mean()


def step_by_step(model: nn.Module, batch: Batch) -> Tensor:
    """The same with a call for each step, whose losses are summed up."""
    loss, after = 0.0, model.critic(batch["x"][-1])[:, 0].detach()
    for x, action, reward in zip(batch["x"][:-1], batch["action"], batch["reward"], strict=True):
        advantage = reward + 0.9 * after - model.critic(x)[:, 0]
        chosen = model.policy(x).log_softmax(-1).gather(-1, action[:, None])[:, 0]
        loss = loss + (0.5 * advantage.square() - chosen * advantage.detach()).mean()
    return loss


def mixed_agents(model: nn.Module, batch: Batch) -> Tensor:
    """Values of agents ``[N, A, D]``, folded, are mixed by weights made from a state (QMIX)."""
    samples, agents, _ = batch["x"].shape
    values = model.agent(batch["x"].flatten(0, 1)).view(samples, agents, CLASSES)
    chosen = values.gather(2, batch["action"][..., None])
    weights = model.mixer(batch["state"]).abs().view(samples, 1, agents)
    return mse_loss(torch.bmm(weights, chosen).flatten(), batch["y"])


def inner_steps(model: nn.Module, batch: Batch) -> Tensor:
    """Each task takes two gradient steps of its own before its loss (MAML)."""
    return torch.stack([_task(model, batch, n) for n in range(len(batch["x"]))]).mean()


def _task(model: nn.Module, batch: Batch, n: int) -> Tensor:
    weights = dict(model.net.named_parameters())
    for _ in range(2):
        loss = cross_entropy(functional_call(model.net, weights, (batch["x"][n],)), batch["y"][n])
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), gradients, strict=True)}
    return cross_entropy(
        functional_call(model.net, weights, (batch["query"][n],)), batch["label"][n]
    )


def episodes(model: nn.Module, batch: Batch) -> Tensor:
    """Queries of each episode and means of its examples, folded into two calls (prototypes)."""
    samples, length, _ = batch["query"].shape
    examples = model.net(batch["x"].flatten(0, 1)).view(samples, CLASSES, -1, H).mean(2)
    queries = model.net(batch["query"].flatten(0, 1)).view(samples, length, H)
    distances = torch.cdist(queries, examples).square()
    return cross_entropy(-distances.flatten(0, 1), batch["label"].flatten())


def importance_weighted(model: nn.Module, batch: Batch) -> Tensor:
    """A bound by several draws ``[K, N, Z]`` for each sample (IWAE)."""
    mean, spread = model.encoder(batch["x"]).chunk(2, 1)
    latent = mean + spread.exp() * batch["noise"]
    error = (model.decoder(latent) - batch["x"]).square().sum(-1)
    ratio = 0.5 * (batch["noise"].square() - latent.square()).sum(-1) + spread.sum(-1)
    return -torch.logsumexp(ratio - error, 0).mean()


def slope_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """A critic whose slope between real and made samples is to be one (WGAN-GP)."""
    between = (batch["a"] + batch["share"] * (batch["b"] - batch["a"])).requires_grad_()
    (slope,) = torch.autograd.grad(model.net(between).sum(), between, create_graph=True)
    scores = model.net(batch["b"]).mean() - model.net(batch["a"]).mean()
    return scores + 10 * (slope.norm(dim=1) - 1).square().mean()


def continuous_flow(model: nn.Module, batch: Batch) -> Tensor:
    """A flow whose divergence is estimated along given directions (FFJORD)."""
    x, change = batch["x"].clone().requires_grad_(), 0.0
    for _ in range(3):
        speed = model.net(x)
        (slope,) = torch.autograd.grad(speed, x, batch["direction"], create_graph=True)
        change = change + (slope * batch["direction"]).sum(1) / 3
        x = x + speed / 3
    return (0.5 * x.square().sum(1) - change).mean()


def residual(model: nn.Module, batch: Batch) -> Tensor:
    """A differential equation inside and values on the boundary, in two calls (PINN)."""
    x = batch["a"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.net(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), x, create_graph=True)
    boundary = model.net(batch["b"]).square().mean()
    return (slope[:, 1] - curve[:, 0]).square().mean() + boundary


class Adjoint(torch.autograd.Function):
    """Steps of Euler's method, whose backward pass runs the module once more (torchdiffeq)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        """Without a graph."""
        states = [x]
        for _ in range(3):
            states.append(states[-1] + 0.3 * module(states[-1]))
        ctx.module, ctx.states = module, states[:-1]
        ctx.save_for_backward(*weights)
        return states[-1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        """Vector-Jacobian products of one step after another, from the last to the first."""
        weights = ctx.saved_tensors
        totals = [torch.zeros_like(weight) for weight in weights]
        for state in reversed(ctx.states):
            with torch.enable_grad():
                x = state.detach().requires_grad_()
                found = torch.autograd.grad(ctx.module(x), [x, *weights], 0.3 * grad_output)
            grad_output = grad_output + found[0]
            totals = [total + each for total, each in zip(totals, found[1:], strict=True)]
        return grad_output, None, *totals


def by_adjoint(model: nn.Module, batch: Batch) -> Tensor:
    """A differential equation solved without a graph."""
    hidden = Adjoint.apply(model.first(batch["x"]), model.net, *model.net.parameters())
    return cross_entropy(model.head(hidden), batch["y"])


class Solve(torch.autograd.Function):
    """The solution of a linear system, and its gradients by the transposed system."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        """A system for each column of ``right``."""
        solution = torch.linalg.solve(matrix, right)
        ctx.save_for_backward(matrix, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of both."""
        matrix, solution = ctx.saved_tensors
        right = torch.linalg.solve(matrix.T, grad_output)
        return -right @ solution.T, right


def solved(model: nn.Module, batch: Batch) -> Tensor:
    """Samples are columns of the right side of a linear system."""
    matrix = torch.eye(H, dtype=batch["x"].dtype) + model.net.weight @ model.net.weight.T
    return cross_entropy(model.head(Solve.apply(matrix, model.first(batch["x"]).T).T), batch["y"])


def equilibrium(model: nn.Module, batch: Batch) -> Tensor:
    """A fixed point found without a graph; a hook on it solves for its gradient (DEQ)."""
    start = model.first(batch["x"])
    with torch.no_grad():
        state = torch.zeros_like(start)
        for _ in range(40):
            state = (0.3 * model.net(state) + start).tanh()
    state = (0.3 * model.net(state) + start).tanh()
    if state.requires_grad:
        fixed = state.detach().requires_grad_()
        again = (0.3 * model.net(fixed) + start).tanh()
        state.register_hook(partial(_solved_gradient, again, fixed))
    return cross_entropy(model.head(state), batch["y"])


def _solved_gradient(output: Tensor, state: Tensor, gradient: Tensor) -> Tensor:
    solution = gradient
    for _ in range(40):
        (change,) = torch.autograd.grad(output, state, solution, retain_graph=True)
        solution = change + gradient
    return solution


def packed_documents(model: nn.Module, batch: Batch) -> Tensor:
    """Documents in one row ``[1, S]``, and the mean of the means of their tokens' losses."""
    owner = batch["owner"]
    hidden = model.table(batch["x"])
    query, key, value = model.attention(hidden).chunk(3, -1)
    scores = (query @ key.mT).masked_fill(owner[:, None] != owner[None, :], -1e9)
    logits = model.head(hidden + scores.softmax(-1) @ value)[0]
    each = cross_entropy(logits, batch["y"][0], reduction="none")
    sums = each.new_zeros(int(owner.max()) + 1).index_add(0, owner, each)
    return (sums / owner.bincount()).mean()


def variable_lengths(model: nn.Module, batch: Batch) -> Tensor:
    """Texts behind each other, attention in a loop, and the mean over words, which are samples."""
    return _of_words_in_row(model, batch).mean()


def _of_words_in_row(model: nn.Module, batch: Batch) -> Tensor:
    hidden = model.table(batch["x"])
    parts = [each.chunk(3, -1) for each in model.attention(hidden).split([1, 5, 2, 3])]
    found = torch.cat([(q @ k.T).softmax(-1) @ v for q, k, v in parts])
    return cross_entropy(model.head(found + hidden), batch["y"], reduction="none")


def two_losses(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of what two heads lose, behind one of which the gradient is reversed."""
    hidden = model.first(batch["x"]).tanh()
    other = cross_entropy(model.b(Reversed.apply(hidden)), 2 - batch["y"])
    return cross_entropy(model.a(hidden), batch["y"]) + 0.3 * other


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample's own loss and the square of its own gradient by the inputs."""
    x = batch["x"].detach().requires_grad_()
    each = cross_entropy(model.net(x), batch["y"], reduction="none")
    (gradient,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    return (each + gradient.square().sum(1)).mean()


def forces(model: nn.Module, batch: Batch) -> Tensor:
    """Minus the gradient of an energy by the inputs is what is to be right."""
    x = batch["x"].detach().requires_grad_()
    (force,) = torch.autograd.grad(model.net(x).sum(), x, create_graph=True)
    return mse_loss(force, batch["y"])


def own_part(
    each: Callable[[nn.Module, Batch], Tensor], model: nn.Module, batch: Batch, n: int
) -> Tensor:
    """What the n-th of several losses contributes to their mean."""
    losses = each(model, batch)
    return losses[n] / len(losses)


def documents(samples: int) -> Batch:
    """One to five words of each document."""
    sizes = torch.randint(1, 6, (samples,))
    x, y = (torch.randint(WORDS, (1, int(sizes.sum()))) for _ in range(2))
    return {"x": x, "y": y, "owner": torch.arange(samples).repeat_interleave(sizes)}


def one_document(batch: Batch, n: int) -> Batch:
    """The words of document n."""
    own = batch["owner"] == n
    owner = torch.zeros(int(own.sum()), dtype=torch.long)
    return {"x": batch["x"][:, own], "y": batch["y"][:, own], "owner": owner}


def jagged(model: nn.Module, batch: Batch) -> Tensor:
    """Sets of different sizes as a nested tensor, padded behind the first layer."""
    nested = torch.nested.nested_tensor(batch["x"], layout=torch.jagged)
    hidden = torch.nested.to_padded_tensor(model.first(nested).relu(), 0.0)
    return cross_entropy(model.head(hidden.sum(1)), batch["y"])


def cached(model: nn.Module, batch: Batch) -> Tensor:
    """The second half of a text attends to what was cached of the first; losses of both."""
    first, second = batch["x"].chunk(2, 1)
    before, cache = _attend(model, first, None)
    after, _ = _attend(model, second, cache)
    logits = torch.cat([before, after], 1)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), batch["x"][:, 1:].flatten())


def shared_prompt(model: nn.Module, batch: Batch) -> Tensor:
    """All texts attend to what was cached of one prompt ``[1, P]``."""
    _, cache = _attend(model, batch["prompt"], None)
    cache = cache.expand(len(batch["x"]), -1, -1)
    logits, _ = _attend(model, batch["x"], cache)
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["x"][:, 1:].flatten())


def _attend(model: nn.Module, x: Tensor, cache: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits ``[N, T, K]``, and keys and values ``[N, T, 2 H]`` of all words so far."""
    hidden = model.table(x)
    query, memory = model.attention(hidden).split([H, 2 * H], -1)
    memory = memory if cache is None else torch.cat([cache, memory], 1)
    key, value = memory.chunk(2, -1)
    words, so_far = x.shape[1], key.shape[1]
    later = torch.arange(so_far) > torch.arange(so_far - words, so_far)[:, None]
    scores = (query @ key.mT).masked_fill(later, -1e9)
    return model.head(hidden + scores.softmax(-1) @ value), memory


class FusedCrossEntropy(torch.autograd.Function):
    """A linear layer and its loss, whose gradients are made in the forward pass (Liger)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        with torch.enable_grad():
            given = [each.detach().requires_grad_() for each in (x, weight)]
            loss = cross_entropy(given[0] @ given[1].T, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, given))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        """Multiples of what was saved."""
        of_x, of_weight = ctx.saved_tensors
        return grad_output * of_x, grad_output * of_weight, None


def fused(model: nn.Module, batch: Batch) -> Tensor:
    """The gradient of the head is made in the forward pass."""
    hidden = model.net(model.table(batch["x"]))
    return FusedCrossEntropy.apply(
        hidden[:, :-1].flatten(0, 1), model.head.weight, batch["x"][:, 1:].flatten()
    )


def in_chunks(model: nn.Module, batch: Batch) -> Tensor:
    """The head and its loss on three tokens at a time, recomputed in the backward pass."""
    hidden = model.net(model.table(batch["x"]))[:, :-1].flatten(0, 1)
    labels = batch["x"][:, 1:].flatten()
    chunks = zip(hidden.split(3), labels.split(3), strict=True)
    loss = partial(_head_loss, model.head)
    return sum(checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks) / len(labels)


def _head_loss(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(head(x), y, reduction="sum")


def vocabulary_chunks(model: nn.Module, batch: Batch) -> Tensor:
    """The normaliser comes from two parts of the vocabulary, and scores of labels by a look-up."""
    hidden, labels = model.net(model.table(batch["x"]))[:, :-1], batch["x"][:, 1:]
    weight = model.head.weight
    normaliser = [(hidden @ part.T).logsumexp(-1) for part in weight.split(5)]
    return (torch.stack(normaliser).logsumexp(0) - (hidden * weight[labels]).sum(-1)).mean()


class LearnedStep(torch.autograd.Function):
    """Rounding to multiples of a learned step (LSQ)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor) -> Tensor:
        """At most eight steps from zero."""
        ctx.save_for_backward(x, step)
        return (x / step).round().clamp(-8, 7) * step

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Straight through where it isn't clamped."""
        x, step = ctx.saved_tensors
        steps = x / step
        inside = (steps >= -8) & (steps <= 7)
        of_step = torch.where(inside, steps.round() - steps, steps.clamp(-8, 7))
        return grad_output * inside, (grad_output * of_step).sum().view_as(step)


def rounded(model: nn.Module, batch: Batch) -> Tensor:
    """Activations are rounded to multiples of a learned step."""
    hidden = LearnedStep.apply(model.first(batch["x"]), model.step.weight)
    return cross_entropy(model.head(hidden), batch["y"])


def conditional_field(model: nn.Module, batch: Batch) -> Tensor:
    """Sequences of labels, scored against all others by the forward algorithm (CRF)."""
    scores, moves, y = model.first(batch["x"]), model.moves.weight, batch["tokens"]
    own, all_of_them = scores[:, 0].gather(1, y[:, :1])[:, 0], scores[:, 0]
    for t in range(1, y.shape[1]):
        own = own + moves[y[:, t - 1], y[:, t]] + scores[:, t].gather(1, y[:, t : t + 1])[:, 0]
        all_of_them = (all_of_them[:, :, None] + moves).logsumexp(1) + scores[:, t]
    return (all_of_them.logsumexp(1) - own).mean()


def lists(model: nn.Module, batch: Batch) -> Tensor:
    """Pairs inside of each list that are in the wrong order, over the pairs of all lists."""
    scores, wanted = model.net(batch["x"])[..., 0], batch["y"]
    ordered = wanted[:, :, None] > wanted[:, None]
    return (softplus(scores[:, None] - scores[:, :, None]) * ordered).sum() / ordered.sum()


def trees(model: nn.Module, batch: Batch) -> Tensor:
    """Networks that follow trees, one call for each node."""
    roots = torch.cat([_node(model, tree) for tree in batch["x"]])
    return cross_entropy(model.head(roots), batch["y"])


def _node(model: nn.Module, tree: Any) -> Tensor:
    if isinstance(tree, int):
        return model.table(torch.tensor([tree]))
    return model.join(torch.cat([_node(model, child) for child in tree], 1)).tanh()


def _tree(levels: int) -> Any:
    if levels == 0 or torch.rand(()) < 0.3:
        return int(torch.randint(WORDS, ()))
    return _tree(levels - 1), _tree(levels - 1)


def _ordered(batch: Batch) -> float:
    return float((batch["y"][:, :, None] > batch["y"][:, None]).sum())


def two_towers(model: nn.Module, batch: Batch) -> Tensor:
    """Queries and documents, where the documents of others are the negatives."""
    scores = model.query(batch["a"]) @ model.document(batch["b"]).T
    return cross_entropy(scores, torch.arange(len(scores)))


def list_of_sets(model: nn.Module, batch: Batch) -> Tensor:
    """A loop over sets of different sizes."""
    pooled = [model.first(x).tanh().sum(0) for x in batch["x"]]
    return cross_entropy(model.head(torch.stack(pooled)), batch["y"])


def shared_negatives(model: nn.Module, batch: Batch) -> Tensor:
    """A sampled softmax: all samples are told from the same few random words."""
    hidden = model.net(batch["x"])
    own = (hidden * model.table(batch["word"])).sum(1, keepdim=True)
    others = hidden @ model.table(batch["negatives"]).T
    logits = torch.cat([own, others], 1)
    return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def recommender(model: nn.Module, batch: Batch) -> Tensor:
    """Users times items, with a bias of each."""
    scores = (model.users(batch["a"]) * model.items(batch["b"])).sum(1)
    scores = scores + model.bias(batch["b"])[:, 0]
    return nn.functional.binary_cross_entropy_with_logits(scores, batch["y"].double() / 2)


def quantised(model: nn.Module, batch: Batch) -> Tensor:
    """The nearest entries of a codebook, with gradients straight through."""
    hidden = model.encoder(batch["x"])
    nearest = torch.cdist(hidden.detach(), model.codes.weight).argmin(1)
    code = model.codes(nearest)
    output = model.decoder(hidden + (code - hidden).detach())
    commitment = (hidden - code.detach()).square().mean() + (hidden.detach() - code).square().mean()
    return nn.functional.mse_loss(output, batch["x"]) + commitment


def adaptive_softmax(model: nn.Module, batch: Batch) -> Tensor:
    """Rare words have a head of their own, on the rows that need it."""
    return model.softmax(model.net(batch["x"]), batch["word"]).loss


class Whole(nn.Module):
    """A network whose forward pass gives the loss."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.inner = network.build()
        self.loss = network.loss

    def forward(self, **batch: Tensor) -> Tensor:
        """All of the batch's inputs and labels by name."""
        return self.loss(self.inner, batch)


def ways(network: Network) -> list[Network]:
    """Called whole, and in parts by the training loop, and the latter told how many samples."""
    inner = network.contribution
    whole = replace(
        network,
        build=partial(Whole, network),
        loss=lambda model, batch: model(**batch),
        contribution=None if inner is None else lambda m, b, n: inner(m.inner, b, n),
    )
    return [whole, *also_told(replace(network, name=f"{network.name}, called in parts"))]


def uncalled(model: Net, *inputs: Tensor) -> Tensor:
    """For networks whose parts are called alone."""
    raise NotImplementedError


def distilled(model: nn.Module, batch: Batch) -> Tensor:
    """A student sees all crops ``[N, C, D]`` in one call, and a teacher the first."""
    of_crops = batch["x"].transpose(0, 1)
    student = model.student(of_crops.flatten(0, 1)).log_softmax(-1)
    with torch.no_grad():
        teacher = model.teacher(of_crops[0]).softmax(-1)
    return -(teacher * student.view(*of_crops.shape[:2], -1)).sum(-1).mean()


def two_towers_part(model: nn.Module, batch: Batch, n: int) -> Tensor:
    """The same loss as a function of sample n's query and document alone."""

    def own(side: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = side(x)
        return torch.where((torch.arange(len(x)) == n)[:, None], found, found.detach())

    scores = own(model.query, batch["a"]) @ own(model.document, batch["b"]).T
    return cross_entropy(scores, torch.arange(len(scores)))


Table = Mapping[str, tuple[Losses, dict[str, Build], Callable[[], Batch], dict[str, Any]]]

HEADED = {"first": linear(D, H), "head": linear(H, CLASSES)}
READING = {"table": partial(nn.Embedding, WORDS, H), "head": partial(nn.Linear, H, WORDS, False)}
ATTENDING = {**READING, "attention": linear(H, 3 * H)}
ROW, PAIR = {"x": normal(4, D)}, {"a": normal(4, D), "b": normal(4, D)}
ROWS, TEXTS = drawn(**ROW, y=integers(CLASSES, 4)), drawn(x=integers(WORDS, 4, 6))
ROLLOUTS = drawn(x=normal(6, 4, D), action=integers(CLASSES, 5, 4), reward=normal(5, 4))
OF_ROLLOUTS = {"axes": dict.fromkeys(("x", "action", "reward"), 1)}
POLICY = {"policy": mlp, "critic": partial(mlp, D, 1)}
QUERIES = {"query": normal(4, 5, D), "label": integers(CLASSES, 4, 5)}
TASKS = drawn(x=normal(4, 6, D), y=integers(CLASSES, 4, 6), **QUERIES)
CRITIC = {"net": partial(mlp, D, 1)}
SQUARE = {**HEADED, "net": linear(H, H)}
WORD_BY_WORD = {**READING, "net": partial(mlp, H, H)}


def _sets() -> list[Tensor]:
    """One to four rows for each sample."""
    return [torch.randn(int(n), D, dtype=torch.float64) for n in torch.randint(1, 5, (4,))]


OBJECTIVES: Table = {
    "two towers": (
        *(two_towers, {"query": partial(mlp, D, H), "document": partial(mlp, D, H)}, drawn(**PAIR)),
        {"contribution": two_towers_part, "meet": True},
    ),
    "list of sets": (*(list_of_sets, HEADED, drawn(x=_sets, y=integers(CLASSES, 4)), {}),),
    "sampled softmax": (
        *(shared_negatives, {"net": partial(mlp, D, H), "table": READING["table"]}),
        drawn(**ROW, word=integers(WORDS, 4), negatives=integers(WORDS, 5)),
        {"axes": {"negatives": None}},
    ),
    "recommender": (
        recommender,
        {
            "users": partial(nn.Embedding, 7, H),
            "items": partial(nn.Embedding, WORDS, H, padding_idx=0),
            "bias": partial(nn.Embedding, WORDS, 1, padding_idx=0),
        },
        *(drawn(a=integers(7, 4), b=integers(WORDS, 4), y=integers(3, 4)), {}),
    ),
    "codebook": (
        quantised,
        {"encoder": partial(mlp, D, H), "codes": partial(nn.Embedding, 5, H)}
        | {"decoder": partial(mlp, H, D)},
        *(drawn(**ROW), {}),
    ),
    "adaptive softmax": (
        adaptive_softmax,
        {
            "net": partial(mlp, D, H),
            "softmax": partial(nn.AdaptiveLogSoftmaxWithLoss, H, WORDS, [3, 7], div_value=2.0),
        },
        *(drawn(x=normal(5, D), word=integers(WORDS, 5)), {"samples": 5}),
    ),
    **{
        f"{count} crops, distilled": (
            *(distilled, {"student": mlp, "teacher": mlp}, drawn(x=normal(4, count, D)), {}),
        )
        for count in (3, 4)
    },
    "two losses, one reversed": (
        *(two_losses, {"first": linear(D, H)} | dict.fromkeys("ab", linear(H, CLASSES)), ROWS, {}),
    ),
    "attention over edges": (
        *(attention_over_edges, {**HEADED, "score": linear(2 * H, 1)}, partial(graph_batch, 4)),
        {"one": one_graph},
    ),
    "labelled vertices": (
        labelled_vertices,
        {**HEADED, "second": linear(D, H), "head": linear(H, 2)},
        partial(equal_graphs, 12),
        {"samples": 12, "contribution": partial(own_part, _of_vertices), "meet": True},
    ),
    "rollouts in one call": (bootstrapped, POLICY, ROLLOUTS, OF_ROLLOUTS),
    "rollouts step by step": (step_by_step, POLICY, ROLLOUTS, OF_ROLLOUTS),
    "mixed agents": (
        *(mixed_agents, {"agent": mlp, "mixer": linear(Z, 3)}),
        drawn(x=normal(4, 3, D), state=normal(4, Z), action=integers(CLASSES, 4, 3), y=normal(4)),
        {},
    ),
    "inner steps": (inner_steps, {"net": mlp}, TASKS, {}),
    "episodes": (episodes, {"net": partial(mlp, D, H)}, TASKS, {}),
    "several draws": (
        importance_weighted,
        {"encoder": partial(mlp, D, 2 * Z), "decoder": partial(mlp, Z, D)},
        *(drawn(**ROW, noise=normal(3, 4, Z)), {"axes": {"noise": 1}}),
    ),
    "slope penalty": (
        *(slope_penalty, CRITIC),
        *(drawn(**PAIR, share=partial(torch.rand, 4, 1, dtype=torch.float64)), {}),
    ),
    "gradient penalty": (penalised, {"net": mlp}, ROWS, {}),
    "continuous flow": (
        *(continuous_flow, {"net": partial(mlp, D, D)}, drawn(**ROW, direction=normal(4, D)), {}),
    ),
    "residual of an equation": (residual, CRITIC, drawn(**PAIR), {}),
    "forces of an energy": (forces, CRITIC, drawn(**ROW, y=normal(4, D)), {}),
    "adjoint": (by_adjoint, {**HEADED, "net": partial(mlp, H, H)}, ROWS, {}),
    "linear system": (solved, SQUARE, ROWS, {}),
    "equilibrium with a hook": (equilibrium, SQUARE, ROWS, {}),
    "packed documents": (
        *(packed_documents, ATTENDING, partial(documents, 4), {"one": one_document}),
    ),
    "variable lengths": (
        *(variable_lengths, ATTENDING, drawn(x=integers(WORDS, 11), y=integers(WORDS, 11))),
        {"samples": 11, "contribution": partial(own_part, _of_words_in_row), "meet": True},
    ),
    "cached first half": (cached, ATTENDING, TEXTS, {}),
    "cached prompt of all": (
        *(shared_prompt, ATTENDING, drawn(x=integers(WORDS, 4, 6), prompt=integers(WORDS, 1, 3))),
        {"axes": {"prompt": None}},
    ),
    "nested tensor": (jagged, HEADED, drawn(x=_sets, y=integers(CLASSES, 4)), {}),
    "fused head and loss": (fused, WORD_BY_WORD, TEXTS, {}),
    "head in checkpointed chunks": (in_chunks, WORD_BY_WORD, TEXTS, {}),
    "chunks of the vocabulary": (vocabulary_chunks, WORD_BY_WORD, TEXTS, {}),
    "rounded to a learned step": (
        *(rounded, {**HEADED, "step": partial(nn.Embedding, 1, 1)}, ROWS, {}),
    ),
    "conditional field": (
        conditional_field,
        {"first": linear(D, CLASSES), "moves": partial(nn.Embedding, CLASSES, CLASSES)},
        *(drawn(x=normal(4, 6, D), tokens=integers(CLASSES, 4, 6)), {}),
    ),
    "pairs of lists": (
        *(lists, CRITIC, drawn(x=normal(4, 5, D), y=integers(3, 4, 5)), {"units": _ordered}),
    ),
    "trees": (
        trees,
        {"table": READING["table"], "join": linear(2 * H, H), "head": linear(H, CLASSES)},
        *(drawn(x=lambda: [_tree(2) for _ in range(4)], y=integers(CLASSES, 4)), {}),
    ),
}
"""Losses, parts of networks, data, and what else a ``Network`` is told, by name."""


def networks() -> list[Network]:
    """Each called whole, in parts, and in parts with its number of samples passed."""
    found = [
        way
        for name, (loss, parts, batch, options) in OBJECTIVES.items()
        for way in ways(Network(name, KIND, parted(uncalled, **parts), batch, loss, **options))
    ]
    # Of one row that holds all documents, parts have other rows than samples.
    return [each for each in found if each.name != "packed documents, called in parts"]
