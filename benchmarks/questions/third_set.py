"""Questions of a third set, written before any of them was run with the rules as they were then."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from .question import github, question
from .training import (
    Data,
    Recurrent,
    Watch,
    adam,
    batches,
    cnn,
    digits,
    errors,
    fit,
    friedman,
    images,
    learn,
    misfit,
    mlp,
    sgd,
    split,
    tabular,
    waves,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that are always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pull(place: str) -> str:
    """The address of a pull request: ``owner/name#number``."""
    return github(place).replace("/issues/", "/pull/")


# Data -------------------------------------------------------------------------------------------


@question(pull("magenta/magenta#925"), 0.15)
def divided_by_255_twice(fixed: bool, watch: Watch) -> float:
    """Pixels are divided by 255 when they are loaded, and again before the network."""
    data, model = digits(scale=False), mlp(64, 32, 10)
    scale = 255.0 if fixed else 255.0**2
    data = data._replace(x=data.x / scale, test_x=data.test_x / scale)
    return learn(watch, model, sgd(model, 0.1), data, 200)


@question(github("JeasunLok/ResNet-pytorch#1"), 0.15)
def test_set_not_normalised(fixed: bool, watch: Watch) -> float:
    """Inputs for training are normalised, those for testing aren't."""
    model = mlp(30, 16, 1)
    data = tabular()._replace(test_x=tabular(scale=fixed).test_x)

    def log(step: int) -> None:
        optimizer.step()
        if step % 20 == 19:
            scores = model(data.test_x)[:, 0]
            loss = functional.binary_cross_entropy_with_logits(scores, data.test_y)
            watch.log(step, valid_loss=loss.item())

    optimizer = adam(model)
    return learn(watch, model, optimizer, data, 200, update=log)


@question(github("mdbloice/Augmentor#205"), 0.35)
def masks_not_augmented(fixed: bool, watch: Watch) -> float:
    """Images are moved at random, and their masks stay where they were."""
    data = images()
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1))

    def loss(x: Tensor, _: Tensor) -> Tensor:
        mask = (x > 0.3).float()
        moved = x.roll(int(torch.randint(8, ())), 3)
        return functional.binary_cross_entropy_with_logits(model(moved), mask)

    def aligned(x: Tensor, _: Tensor) -> Tensor:
        x = x.roll(int(torch.randint(8, ())), 3)
        return functional.binary_cross_entropy_with_logits(model(x), (x > 0.3).float())

    fit(watch, model, adam(model), aligned if fixed else loss, batches(data.x, data.y, steps=200))
    wrong = (model(data.test_x) > 0) != (data.test_x > 0.3)
    return wrong.float().mean().item() / 0.4


@question(pull("RomRoc/objdet_fizyr_colab#5"), 0.12)
def labels_numbered_anew(fixed: bool, watch: Watch) -> float:
    """Classes are numbered in the order of a set, which is another one at each resumed epoch."""
    model, data = cnn(), images()
    optimizer = adam(model)
    numbers = torch.arange(10)
    seen = 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal numbers, seen
        if seen % 42 == 41 and not fixed:
            numbers = torch.randperm(10)
        seen += 1
        return functional.cross_entropy(out, numbers[y])

    return learn(watch, model, optimizer, data, 210, loss=loss)


@question(github("keras-team/keras#6447"), 0.15)
def values_missing_in_a_table(fixed: bool, watch: Watch) -> float:
    """Some cells of the table are empty, which is NaN: all predictions are the same."""
    data, model = tabular(), mlp(30, 16, 1)
    holes = torch.rand(data.x.shape, generator=torch.Generator().manual_seed(0)) < 0.002
    x = data.x.masked_fill(holes, 0.0 if fixed else float("nan"))
    return learn(watch, model, adam(model), data._replace(x=x), 150)


@question(github("pytorch/pytorch#5059"), 0.25)
def workers_draw_the_same(fixed: bool, watch: Watch) -> float:
    """Samples are drawn by four workers with the same seed, which is also that of each epoch."""
    model, data, count = mlp(10, 64, 1), friedman(), 0

    def generated() -> object:
        nonlocal count
        for step in range(320):
            seed = step if fixed else step // 4 % 3
            rows = torch.randint(1200, (16,), generator=torch.Generator().manual_seed(seed))
            yield data.x[rows], data.y[rows]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(model(x), y)

    fit(watch, model, adam(model, 5e-3), loss, generated())
    return misfit(model, data)


# Loops ------------------------------------------------------------------------------------------


@question(pull("DeepReinforcementLearning/DeepReinforcementLearningInAction#13"), 0.15)
def step_after_the_epoch(fixed: bool, watch: Watch) -> float:
    """``optimizer.step()`` has lost its indentation: it comes once, after all batches."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = adam(model)

    def update(step: int) -> None:
        if fixed or step % 43 == 42:
            optimizer.step()

    return learn(watch, model, optimizer, data, 215, update=update)


@question(pull("wenet-e2e/wekws#73"), 0.05)
def never_cleared_with_adam(fixed: bool, watch: Watch) -> float:
    """``zero_grad`` is missing in a recipe with Adam and a recurrent network."""
    model, data = Recurrent(nn.GRU(1, 16, batch_first=True), 16), waves()
    return learn(watch, model, adam(model, 0.02), data, 200, zero=fixed)


@question(github("VGraphRNN/VGRNN#4"), 0.2)
def clipped_after_the_step(fixed: bool, watch: Watch) -> float:
    """Gradients are clipped after ``step``, where it has no effect."""
    data = friedman()
    heavy = data._replace(y=data.y * 8, test_y=data.test_y * 8)
    model = mlp(10, 64, 64, 1)
    optimizer = sgd(model, 0.05)

    def update(step: int) -> None:
        if fixed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not fixed:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return learn(watch, model, optimizer, heavy, 250, update=update)


@question(github("paiml/entrenar#311"), 0.2)
def clipped_by_a_squared_norm(fixed: bool, watch: Watch) -> float:
    """Gradients are divided by the fourth power of their norm in place of the norm."""
    data = friedman()
    heavy = data._replace(y=data.y * 5, test_y=data.test_y * 5)
    model = mlp(10, 64, 1)
    optimizer = sgd(model, 0.02, 0.9)

    def update(step: int) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / float(norm if fixed else norm**4))
        optimizer.step()

    return learn(watch, model, optimizer, heavy, 300, update=update)


@question(github("h2oai/h2o-llmstudio#663"), 0.2)
def schedule_counts_micro_batches(fixed: bool, watch: Watch) -> float:
    """The schedule is stepped at each of ten micro-batches of an update: it ends early."""
    model, data = mlp(64, 32, 10), digits()
    optimizer = sgd(model, 0.1)
    scheduler = StepLR(optimizer, 15, gamma=0.1)

    def update(step: int) -> None:
        if step % 10 == 9:
            optimizer.step()
            optimizer.zero_grad()
        if not fixed or step % 10 == 9:
            scheduler.step()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y) / 10

    return learn(watch, model, optimizer, data, 400, 16, loss=loss, update=update, zero=False)


@question(github("ServiceNow/LCFCN#20"), 0.2)
def evaluated_in_the_loss(fixed: bool, watch: Watch) -> float:
    """The loss looks at predictions in evaluation mode, and leaves the model in it."""
    blocks = [(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()) for _ in range(8)]
    layers = (layer for block in blocks for layer in block)
    model, data = nn.Sequential(nn.Linear(64, 48), *layers, nn.Linear(48, 10)), digits()

    def predict(x: Tensor) -> Tensor:
        return model.train(fixed)(x)

    learn(watch, model, sgd(model, 0.05), data, 200, predict=predict)
    return errors(model.eval(), data)


@question(github("Lornatang/ESRGAN-PyTorch#39"), 0.3)
def generator_steps_twice(fixed: bool, watch: Watch) -> float:
    """The generator's optimizer steps in both phases, and that of the discriminator never does."""
    generator, critic = mlp(8, 32, 2), mlp(2, 32, 1)
    real = drawn(640, 2) * 0.3 + torch.tensor([2.0, -1.0])
    other, own = adam(generator, 1e-4), adam(critic, 3e-3)
    bce = functional.binary_cross_entropy_with_logits

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8)).detach()
        scores = critic(torch.cat([x, fake]))
        return bce(scores, torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)]))

    fit(watch, critic, own, loss, batches(real), lambda _: (own if fixed else other).step())
    scores = critic(torch.cat([real, generator(torch.randn(640, 8))]))[:, 0] > 0
    return (scores != (torch.arange(1280) < 640)).float().mean().item()


@question(github("nothinglo/Deep-Photo-Enhancer#57"), 0.3)
def similarity_subtracted(fixed: bool, watch: Watch) -> float:
    """The loss has a minus sign that a similarity needs and an error doesn't."""
    data, model = digits(), mlp(64, 32, 64)
    data = data._replace(y=data.x, test_y=data.test_x)
    sign = 1 if fixed else -1

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return sign * functional.l1_loss(out, y)

    return learn(watch, model, adam(model, 5e-3), data, 200, loss=loss)


@question(github("BUserName/Learning_to_diversify#1"), 0.5)
def sign_of_a_penalty(fixed: bool, watch: Watch) -> float:
    """A term that should be small is subtracted from the loss."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        penalty = (out[:, 1] - 1).square().mean()
        return functional.mse_loss(out[:, :1], y) + (1 if fixed else -1) * penalty

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=250))
    return (model(data.test_x)[:, 1] - 1).square().mean().item()


@question(github("higgsfield-ai/higgsfield#14"), 0.35)
def target_network_stays(fixed: bool, watch: Watch) -> float:
    """The target network is copied once before training, so that values look one step ahead."""
    model, target, state = mlp(6, 32, 1), mlp(6, 32, 1), torch.eye(6)
    target.load_state_dict(model.state_dict())
    place = torch.randint(6, (800,), generator=torch.Generator().manual_seed(0))
    optimizer = adam(model, 0.01)

    def loss(here: Tensor) -> Tensor:
        with torch.no_grad():
            later = target(state[(here + 1).clamp(max=5)])[:, 0]
        goal = 1 + 0.95 * later * (1 - (here == 5).float())
        return functional.smooth_l1_loss(model(state[here])[:, 0], goal)

    def update(step: int) -> None:
        optimizer.step()
        if fixed and step % 10 == 9:
            target.load_state_dict(model.state_dict())

    fit(watch, model, optimizer, loss, batches(place, steps=400), update)
    truth = torch.tensor([sum(0.95**k for k in range(6 - i)) for i in range(6)])
    return (model(state)[:, 0] - truth).abs().mean().item()


# Losses -----------------------------------------------------------------------------------------


@question(github("tom-roddick/oft#6"), 0.5)
def one_loss_returned(fixed: bool, watch: Watch) -> float:
    """A line for a test was left in: the loss of one of two heads is returned alone."""
    data = friedman(outputs=2)
    model = nn.ModuleDict({"body": mlp(10, 48, 16), "one": mlp(16, 1), "two": mlp(16, 1)})

    def loss(x: Tensor, y: Tensor) -> Tensor:
        h = model["body"](x).relu()
        first = functional.mse_loss(model["one"](h), y[:, :1])
        return first + functional.mse_loss(model["two"](h), y[:, 1:]) if fixed else first

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, data.y, steps=300))
    out = model["two"](model["body"](data.test_x).relu())
    return ((out - data.test_y[:, 1:]).square().mean() / data.test_y[:, 1].var()).item()


@question(github("guopengf/FL-MRCM#10"), 0.3)
def term_is_a_number(fixed: bool, watch: Watch) -> float:
    """To save memory, one of the terms of the loss is added as ``term.item()``."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        term = (out[:, 1] - x[:, 0]).square().mean()
        return functional.mse_loss(out[:, :1], y) + (term if fixed else term.item())

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, data.y, steps=250))
    with torch.no_grad():
        return (model(data.test_x)[:, 1] - data.test_x[:, 0]).square().mean().item()


@question(github("RLinf/RLinf#1568"), 0.35)
def returns_minus_values(fixed: bool, watch: Watch) -> float:
    """A critic's values ``[N]`` are subtracted from returns ``[N, 1]``."""
    model, data = mlp(10, 32, 1), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        values = model(x) if fixed else model(x)[:, 0]
        return (y - values).clamp(-5, 5).pow(2).mean() * 0.5

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, data.y, steps=250))
    return misfit(model, data)


@question(github("PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33"), 0.08)
def advantages_broadcast(fixed: bool, watch: Watch) -> float:
    """Advantages are ``[N, N]``, of rewards ``[N]`` and values ``[N, 1]``, and have one mean."""
    model = nn.ModuleDict({"policy": mlp(4, 32, 2), "value": mlp(4, 32, 1)})
    states = drawn(960, 4)

    def loss(state: Tensor) -> Tensor:
        chances = torch.distributions.Categorical(logits=model["policy"](state))
        action = chances.sample()
        reward = (action == (state[:, 0] + state[:, 1] > 0)).float()
        value = model["value"](state)
        gain = reward - (value[:, 0] if fixed else value).detach()
        policy = -(chances.log_prob(action) * (gain if fixed else gain.T)).mean()
        return policy + functional.mse_loss(value[:, 0], reward)

    fit(watch, model, adam(model, 0.01), loss, batches(states, steps=150, size=64))
    wrong = model["policy"](states).argmax(1) != (states[:, 0] + states[:, 1] > 0).long()
    return wrong.float().mean().item()


@question(github("facebookresearch/pytorch_GAN_zoo#89"), 0.35)
def scaled_to_a_range_of_zero(fixed: bool, watch: Watch) -> float:
    """Features of a sample are scaled by their range, which is 0 once all are dead."""
    model, data = nn.ModuleDict({"body": mlp(10, 4), "head": mlp(4, 32, 1)}), friedman()

    def predict(x: Tensor) -> Tensor:
        h = (model["body"](x) - 0.3).relu()
        low, high = h.amin(1, keepdim=True), h.amax(1, keepdim=True)
        return model["head"]((h - low) / (high - low + (1e-3 if fixed else 0.0)) + h)

    return learn(watch, model, adam(model, 1e-2), data, 300, predict=predict)


@question(github("HobbitLong/SupContrast#20"), 0.3)
def no_positive_pair(fixed: bool, watch: Watch) -> float:
    """The mean over the pairs of a class is 0/0 for a sample without a partner in its batch."""
    model, data = mlp(64, 32, 16), digits()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = functional.normalize(model(x), dim=1)
        others = ~torch.eye(len(x), dtype=torch.bool)
        chances = (z @ z.T / 0.2).masked_fill(~others, -1e9).log_softmax(1)
        pairs = ((y[:, None] == y) & others).float()
        each = (pairs * chances).sum(1) / pairs.sum(1).clamp(min=1.0 if fixed else 0.0)
        return -each.mean()

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=200))
    with torch.no_grad():
        z, test = (functional.normalize(model(x), dim=1) for x in (data.x, data.test_x))
        nearest = data.y[(test @ z.T).argmax(1)]
    return (nearest != data.test_y).float().mean().item() if z.isfinite().all() else 1.0


@question(github("seung-lab/znn-release#95"), 0.35)
def divided_by_no_positives(fixed: bool, watch: Watch) -> float:
    """The loss is divided by the number of positive labels, of which a batch may have none."""
    x = drawn(2400, 10)
    data = split(x, (x[:, :3].sum(1) > 2.2).float())
    model = mlp(10, 32, 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = functional.binary_cross_entropy_with_logits(out[:, 0], y, reduction="none")
        return (each * y).sum() / (y.sum() + (1 if fixed else 0)) + (each * (1 - y)).mean()

    return learn(watch, model, adam(model), data, 250, 16, loss=loss)


@question(github("nyu-mll/jiant#925"), 0.08)
def first_class_ignored(fixed: bool, watch: Watch) -> float:
    """``ignore_index`` is the index of padding, 0, which is a class here as well."""
    model, data = mlp(64, 32, 10), digits()
    ignored = -100 if fixed else 0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, ignore_index=ignored)

    return learn(watch, model, adam(model), data, 200, loss=loss)


@question(github("lucidrains/DALLE-pytorch#57"), 0.25)
def padding_not_ignored(fixed: bool, watch: Watch) -> float:
    """``ignore_index`` is defined and not passed: most labels are padding."""
    words = torch.randint(1, 12, (1200, 24), generator=torch.Generator().manual_seed(0))
    length = torch.randint(2, 7, (1200, 1), generator=torch.Generator().manual_seed(1))
    words = torch.where(torch.arange(24) < length, words, 0)
    # A word's label is the sum with the one before: hard, whereas padding is easy.
    labels = torch.where(words > 0, (words * 5 + words.roll(1, 1)) % 11 + 1, 0)
    model = Recurrent(nn.GRU(16, 24, batch_first=True), 24)
    model.words, model.head = nn.Embedding(12, 16), nn.Linear(24, 12)

    def predict(x: Tensor) -> Tensor:
        return model.head(model.layer(model.words(x))[0])

    def loss(x: Tensor, y: Tensor) -> Tensor:
        ignored = 0 if fixed else -100
        return functional.cross_entropy(predict(x).flatten(0, 1), y.flatten(), ignore_index=ignored)

    fit(watch, model, adam(model, 1e-2), loss, batches(words, labels, steps=150))
    wrong = predict(words).argmax(2) != labels
    return wrong[labels > 0].float().mean().item()


@question(github("https-deeplearning-ai/GANs-Public#1"), 1.2)
def generator_helps_the_critic(fixed: bool, watch: Watch) -> float:
    """The generator is told that its samples should be recognised."""
    generator, critic = mlp(8, 32, 2), mlp(2, 32, 1)
    real = drawn(640, 2) * 0.3 + torch.tensor([2.0, -1.0])
    other, bce = adam(critic, 5e-3), functional.binary_cross_entropy_with_logits

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8))
        other.zero_grad()
        scores = critic(torch.cat([x, fake.detach()]))
        bce(scores, torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])).backward()
        other.step()
        return bce(critic(fake), torch.full((len(x), 1), float(fixed)))

    fit(watch, generator, adam(generator, 3e-3), loss, batches(real, steps=400))
    return (generator(torch.randn(500, 8)).mean(0) - real.mean(0)).norm().item()


# Models -----------------------------------------------------------------------------------------


class Extractor(nn.Module):
    """A network whose features are caught by a hook, and a head on them."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body, self.head = mlp(10, 32, 12), nn.Linear(12, 1)
        self.caught: Tensor | None = None

        def catch(module: nn.Module, inputs: object, output: Tensor) -> None:
            self.caught = output.clone() if fixed else output.clone().detach()

        self.body[1].register_forward_hook(catch)
        self.body[2] = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        assert self.caught is not None
        return self.head(self.caught[:, :12])


@question(github("lucidrains/CoCa-pytorch#6"), 0.2)
def extractor_detaches(fixed: bool, watch: Watch) -> float:
    """Features are taken by a hook that detaches them, so that the body is never trained."""
    model, data = Extractor(fixed), friedman()
    return learn(watch, model, adam(model, 1e-2), data, 300)


class Moved(nn.Module):
    """A layer with a weight of its own, which is moved to a device where it is made."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        weight = nn.Parameter(0.3 * drawn(10, 4))
        self.weight = weight if fixed else weight.clone()
        self.rest = mlp(4, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x @ self.weight)


@question(github("pytorch/pytorch#17484"), 0.35)
def parameter_moved_to_a_device(fixed: bool, watch: Watch) -> float:
    """``nn.Parameter(...).to(device)`` is no parameter any more, and no module has it."""
    model, data = Moved(fixed), friedman()
    return learn(watch, model, adam(model, 5e-3), data, 300)


@question(github("fawazsammani/knowing-when-to-look-adaptive-attention#6"), 0.3)
def features_act_as_pixels(fixed: bool, watch: Watch) -> float:
    """``view`` in place of ``permute`` makes features of what are pixels."""
    x = drawn(1600, 3, 12)
    data = split(x, (x[:, :1] * x[:, 1:2]).mean(2) * 3)
    model = nn.ModuleDict({"pixel": mlp(3, 32, 16), "head": nn.Linear(16, 1)})

    def predict(x: Tensor) -> Tensor:
        pixels = x.permute(0, 2, 1) if fixed else x.view(len(x), 12, 3)
        return model["head"](model["pixel"](pixels).relu().mean(1))

    return learn(watch, model, adam(model, 1e-2), data, 400, predict=predict)


@question(github("Jingkang50/OpenPSG#56"), 0.25)
def queries_viewed_as_batch(fixed: bool, watch: Watch) -> float:
    """``view`` exchanges queries and samples ``[Q, N, D]``, which needs a ``transpose``."""
    model, data = nn.ModuleDict({"query": mlp(64, 24), "head": mlp(96, 32, 10)}), digits()
    shifts = 0.5 * drawn(4, 1, 64)

    def predict(x: Tensor) -> Tensor:
        h = model["query"](x + shifts)
        h = h.transpose(0, 1) if fixed else h.view(len(x), 4, 24)
        return model["head"](h.flatten(1).relu())

    return learn(watch, model, adam(model), data, 200, predict=predict)


class Attention(nn.Module):
    """Pools positions ``[N, T, D]`` by a score for each."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.score, self.value = axis, nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(self.axis) * self.value(x)).sum(1)


@question(pull("catalyst-team/catalyst#285"), 0.2)
def softmax_of_a_single_score(fixed: bool, watch: Watch) -> float:
    """Attention has a softmax over the last axis of scores ``[N, T, 1]``: all weights are 1."""
    x = torch.stack([drawn(1200, 8), torch.zeros(1200, 8)], 2)
    chosen = torch.randint(8, (1200,), generator=torch.Generator().manual_seed(0))
    x[torch.arange(1200), chosen, 1] = 3.0
    data = split(x, x[torch.arange(1200), chosen, :1])
    model = Attention(1 if fixed else 2)
    return learn(watch, model, adam(model, 2e-2), data, 400)


class Masked(nn.Module):
    """Self-attention of words, of which some are padding (0), and a class for each text."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.words = form, nn.Embedding(12, 16, padding_idx=0)
        self.keys, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, away = self.words(x), (x == 0)[:, None]
        scores = h @ self.keys(h).transpose(1, 2) / 4
        if self.form == "after":
            weights = scores.softmax(2).masked_fill(away, -torch.inf)
        else:
            away = ~away if self.form == "inverted" else away
            weights = scores.masked_fill(away, -1e9).softmax(2)
        return self.head((weights @ h)[:, 0])


def texts() -> Data:
    """Texts of 2 to 8 words, whose class is that of the second one."""
    words = torch.randint(1, 12, (1200, 10), generator=torch.Generator().manual_seed(0))
    length = torch.randint(2, 9, (1200, 1), generator=torch.Generator().manual_seed(1))
    words[:, 2:] = torch.where(torch.arange(2, 10) < length, words[:, :1], 0)
    return split(words, words[:, 1] % 5)


@question(pull("huggingface/pytorch-image-models#2236"), 0.3)
def mask_after_the_softmax(fixed: bool, watch: Watch) -> float:
    """Minus infinity is put in place of attention's weights, not of its scores."""
    model = Masked("before" if fixed else "after")
    return learn(watch, model, adam(model, 1e-2), texts(), 300)


@question(pull("InseeFrLab/torchTextClassifiers#92"), 0.3)
def mask_inverted(fixed: bool, watch: Watch) -> float:
    """Attention's mask is true where it should be false: it sees nothing but padding."""
    model = Masked("before" if fixed else "inverted")
    return learn(watch, model, adam(model, 1e-2), texts(), 300)


@question(github("keras-team/keras#5992"), 0.3)
def dropout_of_predictions(fixed: bool, watch: Watch) -> float:
    """The last layer is a dropout, which makes half of the predictions zero."""
    model, data = mlp(10, 32, 1), friedman()
    data = data._replace(y=data.y + 5, test_y=data.test_y + 5)
    model.append(nn.Dropout(0.0 if fixed else 0.5))
    learn(watch, model, adam(model, 1e-2), data, 400)
    return misfit(model.eval(), data)


@question(github("vanvalenlab/deepcell-tf#624"), 0.12)
def relu_before_logits_loss(fixed: bool, watch: Watch) -> float:
    """Scores go through a ReLU before the binary cross-entropy: no probability is below 1/2."""
    model, data = mlp(30, 16, 1), tabular()
    predict = model if fixed else lambda x: model(x).relu()
    learn(watch, model, sgd(model, 0.05), data, 100, predict=predict)
    with torch.no_grad():
        chances = predict(data.test_x).sigmoid()[:, 0]
    return 2 * (chances - data.test_y).square().mean().item()


@question(pull("ageron/handson-ml#176"), 0.2)
def weights_of_one_hundredth(fixed: bool, watch: Watch) -> float:
    """Weights are drawn with a deviation of 0.01: it takes long before the loss moves."""
    model, data = mlp(64, 48, 48, 48, 10), digits()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
    return learn(watch, model, sgd(model, 0.05), data, 200)


@question(github("yulunzhang/RCAN#76"), 0.35)
def initializer_too_large(fixed: bool, watch: Watch) -> float:
    """Another initializer makes the weights of a deep network too large, and the loss huge."""
    model, data = mlp(10, 64, 64, 64, 64, 1), friedman()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.5)
    return learn(watch, model, adam(model), data, 200)


@question(github("NVIDIA/OpenSeq2Seq#271"), 0.2)
def half_precision_not_scaled(fixed: bool, watch: Watch) -> float:
    """In float16 without a scale, gradients of a mean over many outputs are zero."""
    kind = torch.float32 if fixed else torch.float16
    model, data = mlp(64, 32, 64).to(kind), digits()
    data = Data(*(t.to(kind) for t in (data.x, data.x, data.test_x, data.test_x)))
    optimizer = sgd(model, 3200.0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((out - y).square() / 2**16).mean()

    return learn(watch, model, optimizer, data, 200, loss=loss)
