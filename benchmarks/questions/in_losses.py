"""Mistakes in losses: signs, shapes, and functions that don't belong together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import github, question
from .training import (
    Data,
    Recurrent,
    Watch,
    adam,
    batches,
    cnn,
    digits,
    drawn,
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
    usual_loss,
)


@question(github("DeepReinforcementLearning/DeepReinforcementLearningInAction#32"), 0.12)
def softmax_over_batch(fixed: bool, watch: Watch) -> float:
    """``Softmax(dim=0)`` normalises over the samples of the batch, not over the classes."""
    model, soft = mlp(64, 32, 10), nn.Softmax(dim=1 if fixed else 0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.nll_loss((soft(out) + 1e-8).log(), y)

    return learn(watch, model, adam(model), digits(), 100, 10, loss=loss)


@question(github("nothinglo/Deep-Photo-Enhancer#57"), 0.2)
def maximised(fixed: bool, watch: Watch) -> float:
    """The loss has a minus sign, so it is maximised."""
    model, sign = mlp(10, 32, 1), 1.0 if fixed else -1.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return sign * (out - y).square().mean()

    return learn(watch, model, adam(model, 5e-3), friedman(), loss=loss)


@question(github("tom-roddick/oft#6"), 0.35)
def one_term_left(fixed: bool, watch: Watch) -> float:
    """A line left from a test returns one term of the loss: the other outputs aren't trained."""
    model, data = mlp(10, 64, 2), friedman(outputs=2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        parts = (model(x) - y).square().mean(0)
        return parts.sum() if fixed else parts[1]

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, data.y, steps=200))
    return misfit(lambda x: model(x)[:, :1], data._replace(test_y=data.test_y[:, :1]))


@question(github("deepset-ai/FARM#229"), 0.2)
def targets_broadcast(fixed: bool, watch: Watch) -> float:
    """Predictions are ``[N]`` and targets ``[N, 1]``: the loss compares all with all."""
    model = mlp(10, 32, 1)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(out if fixed else out.squeeze(1), y)

    return learn(watch, model, adam(model, 5e-3), friedman(), loss=loss)


@question("https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814", 0.1)
def softmax_before_cross_entropy(fixed: bool, watch: Watch) -> float:
    """The network ends with a softmax, and ``CrossEntropyLoss`` applies another one."""
    model, data = cnn(), images()
    if not fixed:
        model.append(nn.Softmax(1))
    return learn(watch, model, sgd(model, 0.02), data, 120)


@question(github("soumith/ganhacks#67"), 0.3)
def sigmoid_before_logits_loss(fixed: bool, watch: Watch) -> float:
    """A discriminator ends with a sigmoid, and ``BCEWithLogitsLoss`` applies another one."""
    model, data = mlp(30, 16, 1), tabular()
    if not fixed:
        model.append(nn.Sigmoid())

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return usual_loss(model(x), y)

    losses = fit(watch, model, adam(model, 5e-3), loss, batches(data.x, data.y))
    return sum(losses[-20:]) / 20


@question(github("AnubhavGupta3377/Text-Classification-Models-Pytorch#9"), 0.12)
def nll_of_probabilities(fixed: bool, watch: Watch) -> float:
    """``NLLLoss`` gets probabilities, not their logarithms: the loss is negative."""
    model = mlp(64, 32, 10)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.nll_loss(out.log_softmax(1) if fixed else out.softmax(1), y)

    return learn(watch, model, sgd(model, 0.02), digits(), 100, loss=loss)


@question(github("sebastian-hofstaetter/matchmaker#18"), 0.15)
def divergence_of_probabilities(fixed: bool, watch: Watch) -> float:
    """``KLDivLoss`` of a student gets probabilities where it expects their logarithms."""
    teacher, data = mlp(64, 32, 10), digits()
    learn(Watch(), teacher, adam(teacher, 0.01), data)
    model = mlp(64, 16, 10)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        goal = teacher(x).detach().softmax(1)
        score = model(x).log_softmax(1) if fixed else model(x).softmax(1)
        return functional.kl_div(score, goal, reduction="batchmean")

    fit(watch, model, sgd(model, 0.01), loss, batches(data.x, data.y, steps=120))
    return errors(model, data)


@question(github("milesial/Pytorch-UNet#7"), 0.45)
def masks_up_to_255(fixed: bool, watch: Watch) -> float:
    """Masks are 0 and 255, so that binary cross-entropy is negative and falls without end."""
    data = images()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def masks(x: Tensor) -> Tensor:
        return (functional.avg_pool2d(x, 3, 1, 1) > 0.2).float()

    def loss(x: Tensor) -> Tensor:
        goal = masks(x) * (1.0 if fixed else 255.0)
        return functional.binary_cross_entropy_with_logits(model(x), goal)

    fit(watch, model, adam(model, 0.01), loss, batches(data.x))
    goal = masks(data.test_x)
    return functional.binary_cross_entropy_with_logits(model(data.test_x), goal).item()


@question(github("omoindrot/tensorflow-triplet-loss#6"), 0.3)
def triplets_collapse(fixed: bool, watch: Watch) -> float:
    """At this rate, all embeddings collapse into one point: the triplet loss is the margin."""
    model, data = mlp(64, 64, 64, 16), digits()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        distance = ((out[:, None] - out).square().sum(2) + 1e-12).sqrt()
        same = y[:, None] == y
        farthest = (distance * same).amax(1)
        nearest = (distance + 1e6 * same).amin(1)
        return (farthest - nearest + 0.5).relu().mean()

    optimizer = adam(model, 2e-3 if fixed else 0.1)
    losses = fit(watch, model, optimizer, loss, batches(data.x, data.y, size=64))
    return sum(losses[-20:]) / 20


@question(github("WeidiXie/cell_counting_v2#9"), 0.4)
def rare_pixels(fixed: bool, watch: Watch) -> float:
    """One pixel in hundreds belongs to an object: a map of zeros already has a low loss."""
    draw = torch.Generator().manual_seed(1)
    marks = (torch.rand(400, 1, 12, 12, generator=draw) < 0.01).float()
    blurred = functional.avg_pool2d(functional.pad(marks, (1, 1, 1, 1)), 3, 1) * 9
    x = blurred * 0.5 + torch.randn(marks.shape, generator=draw) * 0.3
    model = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1))
    weight = torch.tensor(60.0 if fixed else 1.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(x), y, pos_weight=weight)

    fit(watch, model, adam(model, 5e-3), loss, batches(x, marks, size=16))
    missed = (model(x) < 0)[marks > 0]
    return missed.float().mean().item()


@question(github("AppliedDataSciencePartners/WorldModels#12"), 0.6)
def divergence_outweighs(fixed: bool, watch: Watch) -> float:
    """A VAE's reconstruction is averaged over pixels and its divergence isn't: it collapses."""
    data = digits()
    model = nn.ModuleDict({"encoder": mlp(64, 32, 16), "decoder": mlp(8, 32, 64)})

    def loss(x: Tensor) -> Tensor:
        mean, log_variance = model["encoder"](x).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        errors = (model["decoder"](code) - x).square()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return (errors.sum(1) if fixed else errors.mean(1)).mean() + divergence.mean()

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, steps=200))
    missed = (model["decoder"](model["encoder"](data.test_x)[:, :8]) - data.test_x).square()
    return (missed.mean() / data.test_x.var(0).mean()).item()


@question(github("KanishJebaMathewM/Truxify#11885"), 0.25)
def actor_without_minus(fixed: bool, watch: Watch) -> float:
    """The loss of an actor is the critic's value, not its negative: the policy gets worse."""
    actor, draw = mlp(4, 32, 2), torch.Generator().manual_seed(0)
    states = torch.randn(800, 4, generator=draw)

    def value(state: Tensor, action: Tensor) -> Tensor:
        return -(action - state[:, :2].sin()).square().sum(1)

    def loss(state: Tensor) -> Tensor:
        q_values = value(state, actor(state).tanh())
        return -q_values.mean() if fixed else q_values.mean()

    fit(watch, actor, adam(actor, 3e-3), loss, batches(states))
    return -value(states, actor(states).tanh()).mean().item()


@question(github("Farama-Foundation/Gymnasium#1336"), 0.25)
def mean_of_log_probabilities(fixed: bool, watch: Watch) -> float:
    """REINFORCE multiplies returns with the mean of all log-probabilities of the episode."""
    policy, draw = mlp(4, 32, 2), torch.Generator().manual_seed(0)
    states = torch.randn(960, 4, generator=draw)

    def loss(state: Tensor) -> Tensor:
        chances = torch.distributions.Categorical(logits=policy(state))
        action = chances.sample()
        reward = (action == (state[:, 0] * state[:, 1] > 0)).float() - 0.5
        if fixed:
            return -(chances.log_prob(action) * reward).mean()
        return -(chances.log_prob(action).mean() * reward).mean()

    fit(watch, policy, adam(policy, 0.01), loss, batches(states, steps=200, size=64))
    wrong = policy(states).argmax(1) != (states[:, 0] * states[:, 1] > 0).long()
    return wrong.float().mean().item()


@question(github("navneet-nmk/pytorch-rl#2"), 0.3)
def value_of_the_end(fixed: bool, watch: Watch) -> float:
    """Targets of Q-learning go on after the end of an episode: values are far too high."""
    model, state = mlp(6, 32, 1), torch.eye(6)
    place = torch.randint(6, (800,), generator=torch.Generator().manual_seed(0))

    def loss(here: Tensor) -> Tensor:
        done = (here == 5).float()
        with torch.no_grad():
            later = model(state[(here + 1).clamp(max=5)])[:, 0]
        goal = 1 + 0.95 * later * (1 - done if fixed else 1.0)
        return functional.smooth_l1_loss(model(state[here])[:, 0], goal)

    fit(watch, model, adam(model, 0.01), loss, batches(place, steps=400))
    truth = torch.tensor([sum(0.95**k for k in range(6 - i)) for i in range(6)])
    return (model(state)[:, 0] - truth).abs().mean().item() / 2


@question(github("wangle53/CSA-CDGAN#5"), 1.2)
def generator_detached(fixed: bool, watch: Watch) -> float:
    """The discriminator's answer is detached in the generator's loss, which so lacks its term."""
    generator, critic, draw = mlp(8, 32, 2), mlp(2, 32, 1), torch.Generator().manual_seed(0)
    real = torch.randn(640, 2, generator=draw) * 0.3 + torch.tensor([2.0, -1.0])
    other, bce = adam(critic, 5e-3), functional.binary_cross_entropy_with_logits

    def loss(x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 8))
        other.zero_grad()
        scores = critic(torch.cat([x, fake.detach()]))
        bce(scores, torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])).backward()
        other.step()
        score = critic(fake)
        near = 1e-3 * fake.square().mean()
        return bce(score if fixed else score.detach(), torch.ones(len(x), 1)) + near

    fit(watch, generator, adam(generator, 3e-3), loss, batches(real, steps=400))
    return (generator(torch.randn(500, 8)).mean(0) - real.mean(0)).norm().item()


@question(
    "https://discuss.pytorch.org/t/unable-to-learn-xor-representation-using-2-layers-of-"
    "multi-layered-perceptron-mlp/13287",
    0.1,
)
def no_activation(fixed: bool, watch: Watch) -> float:
    """Two linear layers without an activation between them are linear: XOR can't be learnt."""
    x = torch.randint(2, (800, 2), generator=torch.Generator().manual_seed(0)).float()
    y = (x[:, :1] != x[:, 1:]).float()
    model = mlp(2, 16, 1, activation=nn.ReLU if fixed else nn.Identity)
    model.append(nn.Sigmoid())
    return learn(watch, model, adam(model, 0.02), Data(x, y, x, y), 200)


@question(github("ProteomicsML/ProteomicsML#203"), 0.3)
def relu_at_the_end(fixed: bool, watch: Watch) -> float:
    """A regression ends with a ReLU, whose input is negative: zero for all, and no gradient."""
    model, data = mlp(10, 32, 1), friedman()
    if not fixed:
        model.append(nn.ReLU())
        nn.init.constant_(model[2].bias, -1.0)
    return learn(watch, model, adam(model, 5e-3), data)


@question("", 0.15)
def sigmoid_before_cross_entropy(fixed: bool, watch: Watch) -> float:
    """A sigmoid in front of ``CrossEntropyLoss``: scores differ by 1 at most."""
    model, data = cnn(), images()
    predict = model if fixed else lambda x: model(x).sigmoid()
    return learn(watch, model, sgd(model, 0.02), data, 60, predict=predict)


@question("", 0.12)
def two_sigmoids(fixed: bool, watch: Watch) -> float:
    """A sigmoid ends the model, and another one is in front of ``BCELoss``."""
    model, data = mlp(30, 16, 1), tabular()
    inner = nn.Identity() if fixed else nn.Sigmoid()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy(inner(out)[:, 0].sigmoid(), y)

    learn(watch, model, sgd(model, 0.05), data, 60, loss=loss)
    with torch.no_grad():
        scores = inner(model(data.test_x))[:, 0].sigmoid()
    return ((scores > 0.5).float() != data.test_y).float().mean().item()


@question("", 0.15)
def relu_on_scores(fixed: bool, watch: Watch) -> float:
    """The scores go through a ReLU before the cross-entropy, and most are dead soon."""
    model, data = mlp(64, 32, 10), digits()
    model[-1].bias.data.fill_(-1.0)
    predict = model if fixed else lambda x: model(x).relu()
    return learn(watch, model, sgd(model, 0.1), data, 200, predict=predict)


@question(github("grey-eye/talking-heads#32"), 0.3)
def deviation_of_equal_features(fixed: bool, watch: Watch) -> float:
    """Features are divided by their standard deviation plus epsilon; that of equal ones is 0."""
    data = friedman()
    model = mlp(10, 32, 32, 1)

    def predict(x: Tensor) -> Tensor:
        h = model[1](model[0](x))
        flat = torch.cat([h, h[:, :1].expand(-1, 4)], 1).view(len(h), -1, 4)
        if fixed:
            scale = (flat.var(2, keepdim=True) + 1e-5).sqrt()
        else:
            scale = flat.std(2, keepdim=True) + 1e-5
        h = (flat / scale).flatten(1)[:, 4:]
        return model[4](model[3](model[2](h)))

    return learn(watch, model, adam(model), data, 300, predict=predict)


@question("", 0.15)
def logarithm_of_softmax(fixed: bool, watch: Watch) -> float:
    """The logarithm of a softmax by hand is infinite where a probability is 0."""
    model, data = mlp(64, 64, 10), digits(scale=False)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        scores = out.log_softmax(1) if fixed else out.softmax(1).log()
        return -scores[torch.arange(len(y)), y].mean()

    return learn(watch, model, adam(model, 1e-2), data, 200, loss=loss)


@question("", 0.45)
def tanh_for_large_targets(fixed: bool, watch: Watch) -> float:
    """The output is a tanh, and targets are between 0 and 30."""
    data = friedman()
    scale = 1.0 if fixed else 10.0
    large = Data(
        data.x,
        data.y * scale + (0 if fixed else 15),
        data.test_x,
        data.test_y * scale + (0 if fixed else 15),
    )
    model = mlp(10, 32, 1)
    if not fixed:
        model.append(nn.Tanh())
    return learn(watch, model, adam(model), large, 300)


@question(github("yifita/deep_cage#16"), 0.5)
def weights_of_penalty_detached(fixed: bool, watch: Watch) -> float:
    """A penalty is computed from detached outputs: it is added, and changes nothing."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        other = out[:, 1] if fixed else out[:, 1].detach()
        return (out[:, :1] - y).square().mean() + 5 * (other - 3).square().mean()

    fit(watch, model, adam(model), loss, batches(data.x, data.y, steps=250))
    with torch.no_grad():
        return (model(data.test_x)[:, 1] - 3).square().mean().item()


@question("", 0.15)
def absolute_errors_of_probabilities(fixed: bool, watch: Watch) -> float:
    """The mean absolute error of a softmax to one-hot labels hardly has a gradient."""
    model, data = mlp(64, 32, 10), digits()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        if fixed:
            return functional.cross_entropy(out, y)
        return (out.softmax(1) - functional.one_hot(y, 10)).abs().mean()

    return learn(watch, model, sgd(model, 0.05), data, 200, loss=loss)


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
