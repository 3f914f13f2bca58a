"""Healthy loops of many kinds: trainings in which nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from math import cos, log, pi

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

from benchmarks.diagnosis.networks import Beside, Memory

from .in_data import Decoder
from .training import (
    Data,
    Recipe,
    Recurrent,
    Watch,
    adam,
    altered,
    batches,
    cnn,
    digits,
    distance_of_means,
    drawn,
    errors,
    fit,
    friedman,
    healthy,
    images,
    learn,
    mean_of_last,
    misfit,
    mlp,
    moons,
    of_itself,
    real_points,
    run,
    sgd,
    split,
    stack,
    tabular,
    tokens,
    usual_loss,
    waves,
)

CE, BCE = functional.cross_entropy, functional.binary_cross_entropy_with_logits
ADAM = adam()
Loss = Callable[[Tensor, Tensor], Tensor]


def last(model: nn.Module, losses: list[float]) -> float:
    return mean_of_last(losses)


def wrong_digits(model: nn.Module, losses: list[float]) -> float:
    return errors(model, digits())


def loop(
    limit: float,
    model: Callable[[], nn.Module],
    data: Callable[[nn.Module], Iterator[tuple[Tensor, ...]]],
    optimizer: Recipe = ADAM,
    measure: Callable[[nn.Module, list[float]], float] = last,
    name: str = "",
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Adds the plain loop of a function, which is the loss of a model and a batch."""

    def add(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def train(watch: Watch) -> float:
            net = model()
            return measure(net, fit(watch, net, optimizer, partial(loss, net), data(net)))

        run(name or loss.__name__, limit, train)
        return loss

    return add


def plain(
    name: str,
    limit: float,
    data: Callable[[], Data],
    model: Callable[[], nn.Module],
    loss: Loss,
    optimizer: Recipe = ADAM,
    size: int = 32,
    steps: int = 120,
) -> None:
    """A loop that differs from others by data, network, loss, optimizer and size of batch alone."""

    def batch(_: nn.Module) -> Iterator[tuple[Tensor, ...]]:
        part = data()
        return batches(part.x, part.y, size=size, steps=steps)

    loop(limit, model, batch, optimizer, name=name)(lambda net, x, y: loss(net(x), y))


def goal(change: Callable[[Data], Tensor]) -> Callable[[], Data]:
    """The regression's data with other targets."""
    return lambda: friedman()._replace(y=change(friedman()))


def wrong_labels() -> Data:
    """A fifth of the labels is wrong."""
    data = digits()
    draw = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(data.y), generator=draw) < 0.2
    other = torch.randint(10, data.y.shape, generator=draw)
    return data._replace(y=torch.where(wrong, other, data.y))


def outliers() -> Data:
    """Three in a hundred targets have a large error."""
    data, draw = friedman(), torch.Generator().manual_seed(0)
    wild = torch.rand(data.y.shape, generator=draw) < 0.03
    wrong = data.y + 15 * torch.randn(data.y.shape, generator=draw)
    return data._replace(y=torch.where(wild, wrong, data.y))


def rare_class() -> Data:
    """One sample in ten is positive."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2400, 10, generator=draw)
    score = x[:, :4].sum(1) + 0.3 * torch.randn(2400, generator=draw)
    return split(x, (score > score.quantile(0.9)).float())


def focal(out: Tensor, y: Tensor) -> Tensor:
    each = BCE(out[:, 0], y, reduction="none")
    return (torch.where(y > 0, 0.75, 0.25) * (1 - (-each).exp()).square() * each).mean()


def mixed_densities(out: Tensor, y: Tensor) -> Tensor:
    """The likelihood of mixtures of three normal distributions."""
    weight, mean, spread = out.chunk(3, 1)
    each = torch.distributions.Normal(mean, functional.softplus(spread) + 0.05).log_prob(y)
    return -(weight.log_softmax(1) + each).logsumexp(1).mean()


def quantile(out: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(0.9 * (y - out), 0.1 * (out - y)).mean()


def cox(out: Tensor, time: Tensor) -> Tensor:
    """The partial likelihood of survival times."""
    order = time[:, 0].argsort(descending=True)
    return (out[order, 0].logcumsumexp(0) - out[order, 0]).mean()


def binary(out: Tensor, y: Tensor) -> Tensor:
    return BCE(out[:, 0], y)


def normed() -> nn.Module:
    """Ten layers with layer normalisation."""
    layers: list[nn.Module] = [nn.Linear(64, 32)]
    for _ in range(8):
        layers += [nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(32, 10))


def weight_normed() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(10, 32)), nn.Tanh(), weight_norm(nn.Linear(32, 1)))


def dropping() -> nn.Module:
    first, second = mlp(64, 128).append(nn.ReLU()), mlp(128, 64, 10)
    return nn.Sequential(*first, nn.Dropout(0.6), *second[:2], nn.Dropout(0.5), second[2])


def lstm(width: int) -> nn.Module:
    return Recurrent(nn.LSTM(1, width, batch_first=True), width)


small, wide = (lambda: mlp(10, 32, 1)), (lambda: mlp(64, 32, 10))
mse = functional.mse_loss
plain("one_sample", 0.6, friedman, small, mse, sgd(3e-3, 0.0), 1, 400)
plain("eight_samples", 0.4, friedman, small, mse, sgd(0.02, 0.0), 8, 200)
plain("large_batch", 0.4, digits, wide, CE, adam(0.01), 512)
plain("whole_data_set", 0.5, moons, lambda: mlp(2, 16, 2), CE, sgd(0.2), 900)
plain("tiny_network", 0.45, moons, lambda: mlp(2, 3, 2, activation=nn.Tanh), CE,
      adam(0.03))  # fmt: skip
plain("linear_model", 0.25, tabular, lambda: mlp(30, 1), binary, sgd(0.05, 0.0))
plain("deep_with_layer_norm", 0.9, digits, normed, CE)
plain("batch_norm", 0.4, images, lambda: cnn(norm=True), CE, sgd(0.05))
plain("dropout_heavy", 1.2, digits, dropping, CE)
plain("label_smoothing", 1.2, digits, wide, lambda o, y: CE(o, y, label_smoothing=0.1))
plain("noisy_labels", 1.6, wrong_labels, wide, CE)
plain("noisy_targets", 0.9, lambda: friedman(noise=4.0), small, functional.huber_loss)
plain("quantile_regression", 0.2, friedman, small, quantile)
plain("poisson_regression", 1.0, goal(lambda d: torch.poisson((d.y / 2).exp())), small,
      functional.poisson_nll_loss)  # fmt: skip
plain("survival", 3.2, goal(lambda d: d.y.exp() * torch.rand_like(d.y)), small, cox)
plain("multi_label", 0.4, goal(lambda d: (d.x[:, :4] > 0.3).float()), lambda: mlp(10, 32, 4), BCE)
plain("ordinal", 0.35, goal(lambda d: (d.y > torch.tensor([-1.0, 0.0, 1.0])).float()),
      lambda: mlp(10, 32, 3), BCE)  # fmt: skip
plain("focal_loss_of_rare_class", 0.05, rare_class, small, focal, adam(), 32, 300)
plain("huber_with_outliers", 0.9, outliers, small, functional.huber_loss, adam(), 32, 300)
plain("adagrad", 0.2, friedman, small, usual_loss,
      lambda m: torch.optim.Adagrad(m.parameters(), 0.05), 32, 300)  # fmt: skip
plain("normalised_weights", 0.4, friedman, weight_normed, usual_loss, adam(), 32, 300)
plain("mixture_density", 0.3, friedman, lambda: mlp(10, 48, 9), mixed_densities, adam(), 32, 300)
plain("rmsprop_tanh", 0.5, digits, lambda: mlp(64, 32, 10, activation=nn.Tanh), CE,
      lambda m: torch.optim.RMSprop(m.parameters(), 2e-3))  # fmt: skip

# fmt: off
run("accumulation", 0.2, lambda watch: learn(  # four micro-batches for each step
    watch, mlp(64, 32, 10), adam(5e-3), digits(), 320, 16, every=4,
    loss=lambda out, y: CE(out, y) / 4))
run("warmup_and_cosine", 0.12, lambda watch: learn(
    watch, cnn(), lambda model: torch.optim.AdamW(model.parameters(), 5e-3), images(),
    schedule=lambda o: LambdaLR(o, lambda s: min((s + 1) / 20, (1 + cos(pi * s / 150)) / 2))))
run("clipped_gradients", 0.3, lambda watch: learn(watch, lstm(16), adam(0.01), waves(), clip=1.0))
run("autoencoder", 0.35, lambda watch: learn(
    watch, mlp(64, 32, 12, 32, 64), adam(5e-3), of_itself(digits()), 200))
run("one_cycle", 0.12, lambda watch: learn(
    watch, cnn(norm=True), sgd(0.05), images(), 240,
    schedule=lambda o: OneCycleLR(o, 0.2, total_steps=251)))
run("cosine_with_restarts", 0.12, lambda watch: learn(
    watch, mlp(64, 64, 10), sgd(0.1), digits(), 240,
    schedule=lambda o: CosineAnnealingWarmRestarts(o, 60)))
# fmt: on


@healthy(1.5)
def adversarial(watch: Watch) -> float:
    """A GAN whose discriminator is watched: real and generated batches, two optimizers."""
    generator, critic, real = mlp(8, 32, 2), mlp(2, 32, 1), real_points(0.5, (1.0, -1.0))
    other = adam(2e-3)(generator)
    one, zero = torch.ones(32, 1), torch.zeros(32, 1)

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(32, 8))
        other.zero_grad()
        BCE(critic(fake), one).backward()
        other.step()
        critic.zero_grad()
        return BCE(critic(x), one) + BCE(critic(fake.detach()), zero)

    fit(watch, critic, adam(), loss, batches(real, steps=250))
    return distance_of_means(generator, real)


@healthy(1.5)
def wasserstein_with_penalty(watch: Watch) -> float:
    """A WGAN-GP whose generator is watched; its critic makes three steps for each."""
    generator, critic, real = mlp(8, 32, 2), mlp(2, 32, 1), real_points(0.5, (1.0, -1.0))
    other = adam(5e-3)(critic)

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8))
        for _ in range(3):
            between = torch.lerp(x, fake.detach(), torch.rand(len(x), 1)).requires_grad_()
            slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
            gap = critic(fake.detach()).mean() - critic(x).mean()
            other.zero_grad()
            (gap + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
            other.step()
        return -critic(fake).mean()

    fit(watch, generator, adam(3e-3), loss, batches(real, steps=150))
    return distance_of_means(generator, real)


@torch.no_grad()
def corridor(policy: Callable[[Tensor], Tensor], count: int = 8) -> tuple[Tensor, ...]:
    """Episodes on a line of eight places: states, actions, rewards and returns, ``[T * count]``."""
    place, steps = torch.randint(8, (count,)), []
    for _ in range(6):
        action = torch.distributions.Categorical(logits=policy(torch.eye(8)[place])).sample()
        after = (place + 2 * action - 1).clamp(0, 7)
        steps.append((place, action, (after - place).float()))
        place = after
    states, actions, rewards = (torch.stack(t) for t in zip(*steps, strict=True))
    returns = rewards.flip(0).cumsum(0).flip(0)
    return states.flatten(), actions.flatten(), rewards.flatten(), returns.flatten()


def episodes(model: nn.Module, steps: int = 120) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(steps):
        yield corridor(lambda x: model(x)[:, :2])


def goes_left(model: nn.Module, losses: list[float]) -> float:
    """The share of places where the policy isn't to go right."""
    return 1 - model(torch.eye(8)[:7])[:, :2].argmax(1).float().mean().item()


@loop(0.3, lambda: mlp(8, 16, 3), episodes, adam(0.01), goes_left)
def actor_and_critic(
    model: nn.Module, state: Tensor, action: Tensor, reward: Tensor, value: Tensor
) -> Tensor:
    """One network has the logits of actions and the value of the state."""
    out = model(torch.eye(8)[state])
    gain = value - out[:, 2]
    actor = CE(out[:, :2], action, reduction="none") * gain.detach()
    return actor.mean() + 0.5 * gain.square().mean()


@healthy(0.3)
def q_learning_with_replay(watch: Watch) -> float:
    """DQN: a buffer that fills, and a target network that follows."""
    model, memory = mlp(8, 16, 2), [torch.zeros(0) for _ in range(3)]
    target = deepcopy(model)
    optimizer = adam(0.01)(model)

    def explore(x: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x), 1) < 0.5, model(x) * 9, 0.0)

    def replay() -> Iterator[tuple[Tensor, ...]]:
        nonlocal memory
        for step in range(200):
            new = corridor(explore, 2)[:3]
            memory = [torch.cat([old, part])[-400:] for old, part in zip(memory, new, strict=True)]
            if step % 20 == 0:
                target.load_state_dict(model.state_dict())
            rows = torch.randint(len(memory[0]), (32,))
            yield tuple(part[rows] for part in memory)

    def loss(state: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        here, moved = state.long(), (2 * action - 1).long()
        with torch.no_grad():
            later = target(torch.eye(8)[(here + moved).clamp(0, 7)]).amax(1)
        chosen = model(torch.eye(8)[here]).gather(1, action.long()[:, None])[:, 0]
        return functional.smooth_l1_loss(chosen, reward + 0.8 * later)

    fit(watch, model, optimizer, loss, replay())
    return goes_left(model, [])


@loop(2.5, lambda: mlp(64, 64, 16), lambda _: batches(digits().x, size=64, steps=120))
def contrastive(model: nn.Module, x: Tensor) -> Tensor:
    """InfoNCE: two views of a sample are closer than those of all others of the batch."""
    one, other = (functional.normalize(model(x + torch.randn_like(x) / 2), dim=1) for _ in "12")
    return CE(one @ other.T / 0.2, torch.arange(len(x)))


@healthy(0.25)
def triplets(watch: Watch) -> float:
    """Anchors, positives and negatives, drawn at random."""
    data, model = digits(), mlp(64, 32, 8)
    order = [torch.nonzero(data.y == k)[:, 0] for k in range(10)]

    def draw(labels: Tensor) -> Tensor:
        rows = [order[k][torch.randint(len(order[k]), (1,))] for k in labels.tolist()]
        return model(data.x[torch.cat(rows)])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        same, other = draw(y), draw((y + torch.randint(1, 10, y.shape)) % 10)
        return functional.triplet_margin_loss(model(x), same, other)

    return mean_of_last(fit(watch, model, adam(), loss, batches(data.x, data.y, steps=120)))


@healthy(0.12)
def sharpness_aware(watch: Watch) -> float:
    """SAM: the weights go uphill, a second pass is made there, and they come back."""
    data, model = digits(), mlp(64, 32, 10)
    optimizer, step = sgd(0.05)(model), 0
    watch.follow(model)
    for step, (x, y) in enumerate(batches(data.x, data.y, steps=120)):
        optimizer.zero_grad()
        loss = CE(model(x), y)
        with watch.step(step, loss, optimizer):
            loss.backward()
        with torch.no_grad():
            slopes = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in slopes]).norm()
            moves = [0.05 * g / norm for g in slopes]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        CE(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
    return errors(model, data)


@healthy(0.2)
def quasi_newton(watch: Watch) -> float:
    """LBFGS on all samples, with a closure; the first pass of each step is watched."""
    data, model = friedman(), mlp(10, 16, 1, activation=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4)
    watch.follow(model)
    for step in range(40):
        passes = 0

        def closure() -> Tensor:
            nonlocal passes
            passes += 1
            optimizer.zero_grad()
            loss = mse(model(data.x), data.y)
            if passes == 1:
                with watch.step(step, loss, optimizer):  # noqa: B023
                    loss.backward()
            else:
                loss.backward()
            return loss

        optimizer.step(closure)
    return misfit(model, data)


@healthy(0.25)
def curriculum(watch: Watch) -> float:
    """Classes come one after the other, easy ones first, and the earlier ones stay."""
    data, model = digits(), mlp(64, 32, 10)

    def lessons() -> Iterator[tuple[Tensor, ...]]:
        for known in range(2, 11):
            rows = data.y < known
            yield from batches(data.x[rows], data.y[rows], steps=25)

    fit(watch, model, adam(), lambda x, y: CE(model(x), y), lessons())
    return errors(model, data)


@healthy(0.12)
def fine_tuning(watch: Watch) -> float:
    """A network that knows some classes gets a new head; its first layer stays frozen."""
    data, model = digits(), mlp(64, 64, 32, 10)
    learn(Watch(), model, adam(), data._replace(y=data.y % 5), 100)
    model[4], model[0] = nn.Linear(32, 10), model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return learn(watch, model, optimizer, data, 120)


@healthy(0.12)
def distillation(watch: Watch) -> float:
    """A student learns soft targets of a teacher, and labels."""
    data, teacher, model = digits(), mlp(64, 64, 10), mlp(64, 16, 10)
    learn(Watch(), teacher, adam(0.01), data)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        soft = (teacher(x) / 3).softmax(1).detach()
        student = model(x)
        match = functional.kl_div((student / 3).log_softmax(1), soft, reduction="batchmean")
        return 9 * match + CE(student, y)

    fit(watch, model, adam(), loss, batches(data.x, data.y))
    return errors(model, data)


@loop(0.4, lambda: mlp(10, 64, 2), lambda _: batches(*friedman(outputs=2)[:2], steps=200),
      adam(0.01))  # fmt: skip
def two_tasks(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Two heads, a regression and a classification, share a body."""
    out = model(x)
    return mse(out[:, 0], y[:, 0]) + BCE(out[:, 1], (y[:, 1] > 0).float())


@loop(50.0, lambda: nn.ModuleList([mlp(64, 32, 16), mlp(8, 32, 64)]),
      lambda _: batches(digits().x))  # fmt: skip
def variational(model: nn.ModuleList, x: Tensor) -> Tensor:
    """A VAE, with the sum over pixels and latents."""
    mean, log_variance = model[0](x).chunk(2, 1)
    out = model[1](mean + (log_variance / 2).exp() * torch.randn_like(mean))
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return ((out - x).square().sum(1) + divergence).mean()


@loop(0.75, lambda: mlp(3, 64, 64, 2, activation=nn.SiLU), lambda _: batches(moons().x, size=64))
def diffusion(model: nn.Module, x: Tensor) -> Tensor:
    """A network predicts the noise that was added, at a random time."""
    time, noise = torch.rand(len(x), 1), torch.randn_like(x)
    mixed = (time * pi / 2).cos() * x + (time * pi / 2).sin() * noise
    return mse(model(torch.cat([mixed, time], 1)), noise)


def tasks(_: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    """Sines, each with a height and a phase of its own."""
    for _ in range(150):
        x = torch.rand(40, 1) * 4 - 2
        yield x, torch.rand(()) * (x + torch.rand(()) * 3).sin()


@loop(0.5, lambda: mlp(1, 32, 1, activation=nn.Tanh), tasks, adam(5e-3))
def meta_learning(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML of first order: gradients are those after one inner step on a task of its own."""
    weights = dict(model.named_parameters())
    inner = mse(model(x[:20]), y[:20])
    slopes = torch.autograd.grad(inner, list(weights.values()))
    moved = {k: w - 0.02 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
    return mse(torch.func.functional_call(model, moved, (x[20:],)), y[20:])


@healthy(0.12)
def mixed_precision(watch: Watch) -> float:
    """Forward passes in bfloat16."""
    model = cnn()

    def predict(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    return learn(watch, model, adam(), images(), predict=predict)


@healthy(0.3)
def mean_teacher(watch: Watch) -> float:
    """Few labels, and a teacher that is the average of past students."""
    data, model = digits(), mlp(64, 64, 10)
    teacher = deepcopy(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        noisy = model(x + torch.randn_like(x) / 5).softmax(1)
        return CE(model(x[:8]), y[:8]) + mse(noisy, teacher(x).softmax(1).detach()) * 10

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
            old.data.lerp_(new.data, 0.05)

    fit(watch, model, adam(), loss, batches(data.x, data.y, size=64), update=update)
    return errors(model, data)


@healthy(0.1)
def truncated_backpropagation(watch: Watch) -> float:
    """Long sequences in pieces; the hidden state is carried on, and detached."""
    model = Recurrent(nn.GRU(1, 16, batch_first=True), 16)
    times = torch.arange(1201) * 0.3 + torch.rand(16, 1) * 6
    state: Tensor | None = None

    def loss(piece: Tensor) -> Tensor:
        nonlocal state
        out, state = model.layer(piece.T[:, :-1, None], state)
        state = state.detach()
        return mse(model.head(out)[..., 0], piece.T[:, 1:])

    pieces = ((times[:, i : i + 9].sin().T,) for i in range(0, 1192, 8))
    return mean_of_last(fit(watch, model, adam(5e-3), loss, pieces))


@loop(0.1, lambda: mlp(1, 32, 1, activation=nn.Tanh),
      lambda _: ((torch.rand(32, 1) * pi / 2,) for _ in range(250)), adam(0.01))  # fmt: skip
def physics_informed(model: nn.Module, x: Tensor) -> Tensor:
    """The loss is the residual of u'' = -u, by derivatives of the network, and boundary values."""
    ends, x = torch.tensor([[0.0], [pi / 2]]), x.requires_grad_()
    out = model(x)
    first = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
    return (second + out).square().mean() + 5 * mse(model(ends), ends.sin())


@healthy(0.4)
def embedded_categories(watch: Watch) -> float:
    """A table of two categories and eight numbers."""
    model = nn.ModuleList([nn.Embedding(6, 4), nn.Embedding(6, 4), mlp(16, 32, 1)])

    def predict(x: Tensor) -> Tensor:
        place = ((x[:, :2] + 1.73) / 3.46 * 5.99).long().clamp(0, 5)
        return model[2](torch.cat([model[0](place[:, 0]), model[1](place[:, 1]), x[:, 2:]], 1))

    return learn(watch, model, adam(5e-3), friedman(), 200, predict=predict)


@healthy(0.2)
def graph_convolution(watch: Watch) -> float:
    """All nodes of one graph at each step, and the labels of some."""
    data, model = digits(), mlp(64, 32, 10)
    near = torch.cdist(data.x[:400], data.x[:400]).topk(6, largest=False).indices
    adjacency = torch.zeros(400, 400).scatter_(1, near, 1 / 6)

    def predict(x: Tensor) -> Tensor:
        return adjacency @ model[2](model[1](adjacency @ model[0](x)))

    def loss(known: Tensor) -> Tensor:
        return CE(predict(data.x[:400])[known], data.y[known])

    fit(watch, model, adam(0.01), loss, ((torch.arange(150),) for _ in range(100)))
    return (predict(data.x[:400]).argmax(1) != data.y[:400])[150:].float().mean().item()


@loop(0.3, lambda: nn.ModuleList([nn.Embedding(9, 16), nn.GRU(16, 48, batch_first=True),
                                  nn.GRU(16, 48, batch_first=True), nn.Linear(48, 8)]),
      lambda _: batches(tokens(length=5).x, steps=200), adam(0.01))  # fmt: skip
def teacher_forcing(model: nn.ModuleList, x: Tensor) -> Tensor:
    """A sequence is reversed: the decoder gets the right tokens before."""
    goal = x.flip(1)
    given = torch.cat([torch.full((len(x), 1), 8), goal[:, :-1]], 1)
    out = model[2](model[0](given), model[1](model[0](x))[1])[0]
    return CE(model[3](out).flatten(0, 1), goal.flatten())


@loop(0.12, lambda: mlp(64, 32, 10), lambda _: batches(*digits()[:2]), measure=wrong_digits)
def mixed_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mixup: samples and labels are mixed in pairs."""
    order, share = torch.randperm(len(x)), torch.rand(()) / 2
    out = model(torch.lerp(x, x[order], share))
    return (1 - share) * CE(out, y) + share * CE(out, y[order])


@loop(0.7, Decoder, lambda _: batches(*tokens()[:2], steps=250), adam(5e-3))
def language_model(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A decoder with a causal mask, on sequences that follow a rule."""
    return CE(model(x).flatten(0, 1), y.flatten())


def with_coarser_view() -> nn.Module:
    view = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
    coarse = stack(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.SiLU(),
                   nn.Upsample(scale_factor=2))  # fmt: skip
    return stack(*view, Beside(nn.Identity(), coarse), nn.Conv2d(48, 1, 1))


@loop(0.3, with_coarser_view, lambda _: batches(images().x, steps=200))
def segmentation_with_dice(model: nn.Module, x: Tensor) -> Tensor:
    """Noisy images, a coarser view beside the finer one, and Dice loss plus cross-entropy."""
    mask = (x > 0.3).float()
    p = model(x + 0.3 * torch.randn_like(x)).sigmoid()
    dice = 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1)
    return dice + functional.binary_cross_entropy(p, mask)


@healthy(0.2)
def tagging_with_padding(watch: Watch) -> float:
    """Words have tags, of which those behind the end of a text aren't counted."""
    data = tokens()
    memory = nn.Embedding(8, 32), Memory(nn.LSTM, 32, 48, bidirectional=True)
    model = stack(*memory, nn.Linear(96, 8))
    tags = (data.x + data.x.roll(2, 1)) % 8  # with roll(1, 1), they are the next tokens
    lengths = torch.randint(4, 13, (len(data.x), 1))
    batch = batches(data.x, torch.where(torch.arange(12) < lengths, tags, -100), steps=250)
    fit(watch, model, adam(1e-2), lambda x, y: CE(model(x).transpose(1, 2), y), batch)
    wanted = (data.test_x + data.test_x.roll(2, 1)) % 8
    return (model(data.test_x).argmax(2) != wanted).float().mean().item()


@healthy(0.12)
def averaged_weights(watch: Watch) -> float:
    """The mean of late weights is what is used."""
    model = mlp(64, 48, 10)
    averaged = torch.optim.swa_utils.AveragedModel(model)

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if step > 120 and step % 10 == 0:
            averaged.update_parameters(model)

    learn(watch, model, sgd(0.1), digits(), 240, update=update)
    return errors(averaged, digits())


@healthy(0.12)
def two_optimizers(watch: Watch) -> float:
    """The body and the head have an optimizer each."""
    model = cnn()
    body = torch.optim.SGD([p for layer in model[:-1] for p in layer.parameters()], 0.05, 0.9)
    head = torch.optim.Adam(model[-1].parameters(), 3e-3)
    return learn(watch, model, body, images(), 200,
                 update=lambda o, _: (o.step(), head.step(), head.zero_grad()))  # fmt: skip


@healthy(0.4)
def sparse_regression(watch: Watch) -> float:
    """The size of all weights is a term of the loss."""
    model = mlp(10, 64, 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() + 1e-3 * sum(p.abs().sum() for p in model.parameters())

    return learn(watch, model, adam(), friedman(), 400, loss=loss)


@loop(1.2, lambda: nn.ModuleList([mlp(1, 32, 2, activation=nn.Tanh) for _ in range(4)]),
      lambda _: batches(moons(0.1).x, steps=400),
      measure=lambda _, losses: mean_of_last(losses) - 0.9)  # fmt: skip
def coupling_flow(nets: nn.ModuleList, x: Tensor) -> Tensor:
    """A flow of four couplings, whose targets are its inputs."""
    total = x.new_zeros(len(x))
    for number, net in enumerate(nets):
        a, b = x[:, number % 2 : number % 2 + 1], x[:, 1 - number % 2 : 2 - number % 2]
        scale, shift = net(a).chunk(2, 1)
        scale = scale.tanh()
        b = b * scale.exp() + shift
        total = total + scale[:, 0]
        x = torch.cat([a, b] if number % 2 == 0 else [b, a], 1)
    return (0.5 * x.square().sum(1) + log(2 * pi) - total).mean()


@healthy(0.1)
def fourier_features(watch: Watch) -> float:
    """A network of places is one image."""
    axis = torch.linspace(0, 1, 8)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
    waves = 6.28 * grid @ (drawn(2, 24) * 3)
    model, seen = mlp(48, 64, 1), torch.cat([waves.sin(), waves.cos()], 1)
    batch = batches(seen, images().x[7, 0].view(-1, 1), size=64, steps=200)
    return fit(watch, model, adam(1e-2), lambda x, y: usual_loss(model(x), y), batch)[-1]


@healthy(0.15)
def noise_added_to_gradients(watch: Watch) -> float:
    """Gradients get noise that becomes smaller."""
    model = mlp(64, 48, 10)

    def update(optimizer: Optimizer, step: int) -> None:
        for p in model.parameters():
            p.grad += 0.01 / (1 + step) ** 0.5 * torch.randn_like(p)
        optimizer.step()

    return learn(watch, model, sgd(0.05), digits(), 250, update=update)


@healthy(0.15)
def gradual_unfreezing(watch: Watch) -> float:
    """The first layer of a network with a new head is trained from the middle on."""
    model, data = mlp(64, 64, 64, 10), digits()
    learn(Watch(), model, adam(), altered(data, y=lambda y: (y + 1) % 10))
    model[-1] = nn.Linear(64, 10)
    optimizer = adam()(model)
    model[0].requires_grad_(False)

    def update(optimizer: Optimizer, step: int) -> None:
        optimizer.step()
        if step == 80:
            model[0].requires_grad_(True)

    return learn(watch, model, optimizer, data, 200, update=update)
