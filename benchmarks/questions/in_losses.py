"""Mistakes in losses: signs, shapes, and functions that don't belong together."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from .training import (
    DEAD,
    DIVERGES,
    FLAT,
    NAN,
    Data,
    Recurrent,
    Watch,
    adam,
    ask,
    batches,
    begun,
    cnn,
    digits,
    drawn,
    errors,
    fit,
    friedman,
    generate,
    github,
    images,
    learn,
    mean_of_last,
    misfit,
    mlp,
    question,
    sgd,
    split,
    stack,
    tabular,
    usual_loss,
    values_of_a_chain,
    waves,
)

CE, BCE = functional.cross_entropy, functional.binary_cross_entropy_with_logits
MSE = functional.mse_loss


def behind(model: nn.Sequential, layer: nn.Module, fixed: bool) -> nn.Sequential:
    """The model with a layer behind it, but if it is ``fixed``."""
    return model if fixed else model.append(layer)


# fmt: off
ask("softmax_over_batch",
    github("DeepReinforcementLearning/DeepReinforcementLearningInAction#32"), 0.12,
    "softmax_axis samples_mixed", FLAT,
    "``Softmax(dim=0)`` normalises over the samples of the batch, not over the classes.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), adam(), digits(), 100, 10, loss=lambda out, y: functional.nll_loss(
            (nn.Softmax(dim=1 if fixed else 0)(out) + 1e-8).log(), y)))
ask("maximised", github("nothinglo/Deep-Photo-Enhancer#57"), 0.2, "loss_maximised", "",
    "The loss has a minus sign, so it is maximised.",
    lambda fixed, watch: learn(
        watch, mlp(10, 32, 1), adam(5e-3), friedman(),
        loss=lambda out, y: (1.0 if fixed else -1.0) * (out - y).square().mean()))
ask("targets_broadcast", github("deepset-ai/FARM#229"), 0.2, "loss_broadcast", FLAT,
    "Predictions are ``[N]`` and targets ``[N, 1]``: the loss compares all with all.",
    lambda fixed, watch: learn(watch, mlp(10, 32, 1), adam(5e-3), friedman(),
                               loss=lambda out, y: MSE(out if fixed else out.squeeze(1), y)))
ask("softmax_before_cross_entropy",
    "https://discuss.pytorch.org/t/cross-entropy-loss-is-not-decreasing/43814", 0.1,
    "softmax_twice", FLAT,
    "The network ends with a softmax, and ``CrossEntropyLoss`` applies another one.",
    lambda fixed, watch: learn(watch, behind(cnn(), nn.Softmax(1), fixed), sgd(0.02), images(),
                               120))
ask("nll_of_probabilities",
    github("AnubhavGupta3377/Text-Classification-Models-Pytorch#9"), 0.12, "loss_of_scores", FLAT,
    "``NLLLoss`` gets probabilities, not their logarithms: the loss is negative.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), sgd(0.02), digits(), 100, loss=lambda out, y:
        functional.nll_loss(out.log_softmax(1) if fixed else out.softmax(1), y)))
ask("value_of_the_end", github("navneet-nmk/pytorch-rl#2"), 0.6, "", "",
    "Targets of Q-learning go on after the end of an episode: values are far too high.",
    lambda fixed, watch: values_of_a_chain(watch, *[mlp(6, 32, 1)] * 2, ends=fixed))
ask("generator_detached", github("wangle53/CSA-CDGAN#5"), 1.2, "", "",
    "The discriminator's answer is detached in the generator's loss, which so lacks its term.",
    lambda fixed, watch: generate(watch, lambda critic, fake: BCE(
        critic(fake) if fixed else critic(fake).detach(), torch.ones(len(fake), 1))
        + 1e-3 * fake.square().mean()))
ask("generator_helps_the_critic", github("https-deeplearning-ai/GANs-Public#1"), 1.2, "", "",
    "The generator is told that its samples should be recognised.",
    lambda fixed, watch: generate(watch, lambda critic, fake: BCE(
        critic(fake), torch.full((len(fake), 1), float(fixed)))))
ask("relu_at_the_end", github("ProteomicsML/ProteomicsML#203"), 0.3, "dead_units", DEAD,
    "A regression ends with a ReLU, whose input is negative: zero for all, and no gradient.",
    lambda fixed, watch: learn(
        watch, mlp(10, 32, 1) if fixed else
        stack(mlp(10, 32), nn.ReLU(), begun(nn.Linear(32, 1), bias=-1.0), nn.ReLU()),
        adam(5e-3), friedman()))
ask("returns_minus_values", github("RLinf/RLinf#1568"), 0.35, "loss_broadcast", FLAT,
    "A critic's values ``[N]`` are subtracted from returns ``[N, 1]``.",
    lambda fixed, watch: learn(
        watch, mlp(10, 32, 1), adam(5e-3), friedman(), 250, loss=lambda out, y:
        (y - (out if fixed else out[:, 0])).clamp(-5, 5).pow(2).mean() * 0.5))
ask("first_class_ignored", github("nyu-mll/jiant#925"), 0.08, "", "",
    "``ignore_index`` is the index of padding, 0, which is a class here as well.",
    lambda fixed, watch: learn(watch, mlp(64, 32, 10), adam(), digits(), 200,
                               loss=partial(CE, ignore_index=-100 if fixed else 0)))
# fmt: on


@question(github("tom-roddick/oft#6"), 0.35, "no_gradient", "")
def one_term_left(fixed: bool, watch: Watch) -> float:
    """A line left from a test returns one term of the loss: the other outputs aren't trained."""
    model, data = mlp(10, 64, 2), friedman(outputs=2)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        parts = (out - y).square().mean(0)
        return parts.sum() if fixed else parts[1]

    learn(watch, model, adam(5e-3), data, 200, loss=loss)
    return misfit(lambda x: model(x)[:, :1], data._replace(test_y=data.test_y[:, :1]))


@question(github("soumith/ganhacks#67"), 0.3, "softmax_twice", FLAT)
def sigmoid_before_logits_loss(fixed: bool, watch: Watch) -> float:
    """A discriminator ends with a sigmoid, and ``BCEWithLogitsLoss`` applies another one."""
    model, data = behind(mlp(30, 16, 1), nn.Sigmoid(), fixed), tabular()
    batch = batches(data.x, data.y)
    return mean_of_last(fit(watch, model, adam(5e-3), lambda x, y: usual_loss(model(x), y), batch))


@question(github("sebastian-hofstaetter/matchmaker#18"), 0.15, "loss_of_scores", FLAT)
def divergence_of_probabilities(fixed: bool, watch: Watch) -> float:
    """``KLDivLoss`` of a student gets probabilities where it expects their logarithms."""
    teacher, data = mlp(64, 32, 10), digits()
    learn(Watch(), teacher, adam(0.01), data)
    model = mlp(64, 16, 10)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        goal = teacher(x).detach().softmax(1)
        score = model(x).log_softmax(1) if fixed else model(x).softmax(1)
        return functional.kl_div(score, goal, reduction="batchmean")

    fit(watch, model, sgd(0.01), loss, batches(data.x, data.y, steps=120))
    return errors(model, data)


@question(github("milesial/Pytorch-UNet#7"), 0.45, "target_scale", "")
def masks_up_to_255(fixed: bool, watch: Watch) -> float:
    """Masks are 0 and 255, so that binary cross-entropy is negative and falls without end."""
    data = images()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))

    def loss(x: Tensor, scale: float) -> Tensor:
        masks = (functional.avg_pool2d(x, 3, 1, 1) > 0.2).float()
        return BCE(model(x), masks * scale)

    scale = 1.0 if fixed else 255.0
    fit(watch, model, adam(0.01), lambda x: loss(x, scale), batches(data.x))
    return loss(data.test_x, 1.0).item()


@question(github("omoindrot/tensorflow-triplet-loss#6"), 0.3, DIVERGES, DEAD)
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

    batch = batches(data.x, data.y, size=64)
    return mean_of_last(fit(watch, model, adam(2e-3 if fixed else 0.1), loss, batch))


@question(github("WeidiXie/cell_counting_v2#9"), 0.4, "class_imbalance", FLAT)
def rare_pixels(fixed: bool, watch: Watch) -> float:
    """One pixel in hundreds belongs to an object: a map of zeros already has a low loss."""
    draw = torch.Generator().manual_seed(1)
    marks = (torch.rand(400, 1, 12, 12, generator=draw) < 0.01).float()
    blurred = functional.avg_pool2d(functional.pad(marks, (1, 1, 1, 1)), 3, 1) * 9
    x = blurred * 0.5 + torch.randn(marks.shape, generator=draw) * 0.3
    model = nn.Sequential(nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 1, 1))
    weight = torch.tensor(60.0 if fixed else 1.0)
    batch = batches(x, marks, size=16)
    fit(watch, model, adam(5e-3), lambda x, y: BCE(model(x), y, pos_weight=weight), batch)
    return (model(x) < 0)[marks > 0].float().mean().item()


@question(github("AppliedDataSciencePartners/WorldModels#12"), 0.6, "posterior_collapse", FLAT)
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

    fit(watch, model, adam(5e-3), loss, batches(data.x, steps=200))
    missed = (model["decoder"](model["encoder"](data.test_x)[:, :8]) - data.test_x).square()
    return (missed.mean() / data.test_x.var(0).mean()).item()


@question(github("KanishJebaMathewM/Truxify#11885"), 0.25, "", "")
def actor_without_minus(fixed: bool, watch: Watch) -> float:
    """The loss of an actor is the critic's value, not its negative: the policy gets worse."""
    actor, states = mlp(4, 32, 2), drawn(800, 4)

    def cost(state: Tensor) -> Tensor:
        return (actor(state).tanh() - state[:, :2].sin()).square().sum(1).mean()

    sign = 1 if fixed else -1
    fit(watch, actor, adam(), lambda state: sign * cost(state), batches(states))
    return cost(states).item()


@question(github("Farama-Foundation/Gymnasium#1336"), 0.25, "", FLAT)
def mean_of_log_probabilities(fixed: bool, watch: Watch) -> float:
    """REINFORCE multiplies returns with the mean of all log-probabilities of the episode."""
    policy, states = mlp(4, 32, 2), drawn(960, 4)

    def loss(state: Tensor) -> Tensor:
        chances = torch.distributions.Categorical(logits=policy(state))
        action = chances.sample()
        reward = (action == (state[:, 0] * state[:, 1] > 0)).float() - 0.5
        said = chances.log_prob(action)
        return -((said if fixed else said.mean()) * reward).mean()

    fit(watch, policy, adam(0.01), loss, batches(states, steps=200, size=64))
    wrong = policy(states).argmax(1) != (states[:, 0] * states[:, 1] > 0).long()
    return wrong.float().mean().item()


@question(
    "https://discuss.pytorch.org/t/unable-to-learn-xor-representation-using-2-layers-of-"
    "multi-layered-perceptron-mlp/13287", 0.1, "no_nonlinearity", FLAT,
)  # fmt: skip
def no_activation(fixed: bool, watch: Watch) -> float:
    """Two linear layers without an activation between them are linear: XOR can't be learnt."""
    x = torch.randint(2, (800, 2), generator=torch.Generator().manual_seed(0)).float()
    y = (x[:, :1] != x[:, 1:]).float()
    model = mlp(2, 16, 1, activation=nn.ReLU if fixed else nn.Identity)
    return learn(watch, model.append(nn.Sigmoid()), adam(0.02), Data(x, y, x, y), 200)


@question(github("grey-eye/talking-heads#32"), 0.3, NAN.split()[1], "")
def deviation_of_equal_features(fixed: bool, watch: Watch) -> float:
    """Features are divided by their standard deviation plus epsilon; that of equal ones is 0."""
    model = mlp(10, 32, 32, 1)

    def predict(x: Tensor) -> Tensor:
        h = model[:2](x)
        flat = torch.cat([h, h[:, :1].expand(-1, 4)], 1).view(len(h), -1, 4)
        if fixed:
            scale = (flat.var(2, keepdim=True) + 1e-5).sqrt()
        else:
            scale = flat.std(2, keepdim=True) + 1e-5
        return model[2:]((flat / scale).flatten(1)[:, 4:])

    return learn(watch, model, adam(), friedman(), 300, predict=predict)


@question(github("yifita/deep_cage#16"), 0.5, "no_gradient", "")
def weights_of_penalty_detached(fixed: bool, watch: Watch) -> float:
    """A penalty is computed from detached outputs: it is added, and changes nothing."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        other = out[:, 1] if fixed else out[:, 1].detach()
        return (out[:, :1] - y).square().mean() + 5 * (other - 3).square().mean()

    learn(watch, model, adam(), data, 250, loss=loss)
    return (model(data.test_x)[:, 1] - 3).square().mean().item()


@question(github("guopengf/FL-MRCM#10"), 0.3, "no_gradient", "")
def term_is_a_number(fixed: bool, watch: Watch) -> float:
    """To save memory, one of the terms of the loss is added as ``term.item()``."""
    model, data = mlp(10, 32, 2), friedman()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        term = (out[:, 1] - x[:, 0]).square().mean()
        return MSE(out[:, :1], y) + (term if fixed else term.item())

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, steps=250))
    return (model(data.test_x)[:, 1] - data.test_x[:, 0]).square().mean().item()


@question(
    github("PacktPublishing/Deep-Reinforcement-Learning-Hands-On#33"), 0.08,
    "loss_broadcast samples_mixed", "",
)  # fmt: skip
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
        return policy + MSE(value[:, 0], reward)

    fit(watch, model, adam(0.01), loss, batches(states, steps=150, size=64))
    wrong = model["policy"](states).argmax(1) != (states[:, 0] + states[:, 1] > 0).long()
    return wrong.float().mean().item()


@question(github("facebookresearch/pytorch_GAN_zoo#89"), 0.35, NAN, "")
def scaled_to_a_range_of_zero(fixed: bool, watch: Watch) -> float:
    """Features of a sample are scaled by their range, which is 0 once all are dead."""
    model = nn.ModuleDict({"body": mlp(10, 4), "head": mlp(4, 32, 1)})

    def predict(x: Tensor) -> Tensor:
        h = (model["body"](x) - 0.3).relu()
        low, high = h.amin(1, keepdim=True), h.amax(1, keepdim=True)
        return model["head"]((h - low) / (high - low + (1e-3 if fixed else 0.0)) + h)

    return learn(watch, model, adam(1e-2), friedman(), 300, predict=predict)


@question(github("HobbitLong/SupContrast#20"), 0.3, NAN, "")
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

    fit(watch, model, adam(), loss, batches(data.x, data.y, steps=200))
    with torch.no_grad():
        z, test = (functional.normalize(model(x), dim=1) for x in (data.x, data.test_x))
        nearest = data.y[(test @ z.T).argmax(1)]
    return (nearest != data.test_y).float().mean().item() if z.isfinite().all() else 1.0


@question(github("seung-lab/znn-release#95"), 0.35, NAN, "")
def divided_by_no_positives(fixed: bool, watch: Watch) -> float:
    """The loss is divided by the number of positive labels, of which a batch may have none."""
    x = drawn(2400, 10)
    data = split(x, (x[:, :3].sum(1) > 2.2).float())

    def loss(out: Tensor, y: Tensor) -> Tensor:
        each = BCE(out[:, 0], y, reduction="none")
        return (each * y).sum() / (y.sum() + (1 if fixed else 0)) + (each * (1 - y)).mean()

    return learn(watch, mlp(10, 32, 1), adam(), data, 250, 16, loss=loss)


@question(github("lucidrains/DALLE-pytorch#57"), 0.25, "padding_in_loss", "class_imbalance")
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
        return CE(predict(x).flatten(0, 1), y.flatten(), ignore_index=ignored)

    fit(watch, model, adam(1e-2), loss, batches(words, labels, steps=150))
    wrong = predict(words).argmax(2) != labels
    return wrong[labels > 0].float().mean().item()


# Losses and gradients that become NaN or infinite.


LOSS, GRADIENT = NAN.split()

# fmt: off
ask("exponential_of_loss",
    "https://whosebug.com/question/6301115/Weird-behaviour-of-loss-function-in-pytorch", 0.2,
    f"{DIVERGES} {NAN}", "",
    "The loss is the exponential of the cross-entropy, which a few wrong samples overflow.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 10), sgd(0.05), digits(), size=16,
        loss=functional.cross_entropy if fixed else
        lambda out, y: (functional.cross_entropy(out, y) / 0.5).exp()))
# fmt: on


@question(github("MhLiao/DB#14"), 0.4, LOSS, "")
def empty_mask(fixed: bool, watch: Watch) -> float:
    """The loss is divided by the number of masked places, which is 0 in some batches."""
    model, data = mlp(10, 32, 1), friedman()
    valid = (torch.rand(len(data.x), 1) < 0.2).float()

    def loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum().clamp(min=1) if fixed else mask.sum()
        return ((model(x) - y).abs() * mask).sum() / count

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, valid, size=16, steps=250))
    return misfit(model, data)


@question("https://discuss.pytorch.org/t/94875", 0.3, GRADIENT, "")
def root_of_zero(fixed: bool, watch: Watch) -> float:
    """The root of a squared error has no gradient where the error is zero, as at padded places."""
    model, data = mlp(10, 32, 1), friedman()
    padded = torch.rand(len(data.x), 1) < 0.01

    def loss(x: Tensor, y: Tensor, pad: Tensor) -> Tensor:
        squares = ((model(x) - y) * ~pad).square()
        return (squares + (1e-8 if fixed else 0.0)).sqrt().mean()

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, padded))
    return misfit(model, data)


@question(
    "https://discuss.pytorch.org/t/nan-gradient-for-torch-cos-torch-acos/9617", 0.2, GRADIENT, ""
)
def angle_of_equal_vectors(fixed: bool, watch: Watch) -> float:
    """The arc cosine has an infinite gradient where prediction and target point the same way."""
    x = functional.normalize(drawn(800, 3), dim=1)
    y = functional.normalize(x + torch.tensor([0.5, 0.0, 0.0]), dim=1)
    x[::80] = y[::80] = torch.tensor([0.0, 0.0, 1.0])
    model = mlp(3, 32, 3)
    begun(model[2], nn.init.zeros_, 0.0)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        cosine = (functional.normalize(x + model(x), dim=1) * y).sum(1)
        limit = 1 - 1e-6 if fixed else 1.0
        return cosine.clamp(-limit, limit).acos().mean()

    fit(watch, model, adam(), loss, batches(x, y))
    return loss(x[1:70], y[1:70]).item()


@question("https://e-com-net.com/article/1610541398946250752.htm", 0.6, GRADIENT, "")
def fourth_root(fixed: bool, watch: Watch) -> float:
    """The output is a fourth root, whose gradient is infinite as soon as one argument is 0."""
    model, data = mlp(10, 32, 1), friedman()
    goal = data.y - data.y.min()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        out = functional.softplus(model(x)) if fixed else model(x).relu() ** 0.25
        return (out - y).square().mean() * 2 + 0.1 * (out - y).abs().mean()

    return mean_of_last(fit(watch, model, adam(5e-3), loss, batches(data.x, goal)))


@question(github("avalonstrel/GatedConvolution_pytorch#27"), 0.15, "nonfinite_input", "")
def constant_image(fixed: bool, watch: Watch) -> float:
    """Images are scaled by their minimum and maximum, which are equal in an empty image."""
    data, model = images(), cnn()
    x = data.x.clone()
    x[700] = 0.5
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    x = (x - low) / ((high - low).clamp(min=1e-6) if fixed else high - low) * 2 - 1
    return learn(watch, model, adam(), data._replace(x=x))


@question(github("NRCan/geo-deep-learning#68"), 0.15, "nonfinite_input", "")
def pixels_without_data(fixed: bool, watch: Watch) -> float:
    """Satellite images have NaN where there is no data, and infinite values."""
    data, model = images(), cnn()
    x = data.x.clone()
    x[5::200, :, 0, :2] = torch.inf
    x[9::200, :, 5:, 6:] = torch.nan
    x = x.nan_to_num(0.0, 0.0, 0.0) if fixed else x
    return learn(watch, model, sgd(0.02), data._replace(x=x))


@question(github("prs-eth/Marigold#111"), 0.3, "nonfinite_target", "")
def depth_missing(fixed: bool, watch: Watch) -> float:
    """The ground truth has NaN in some samples, where depth wasn't measured."""
    model, data = mlp(10, 32, 1), friedman()
    target = data.y.clone()
    target[11::150] = torch.nan

    def loss(out: Tensor, y: Tensor) -> Tensor:
        known = y.isfinite() if fixed else torch.ones_like(y, dtype=torch.bool)
        return (out - y)[known].square().mean()

    return learn(watch, model, adam(5e-3), data._replace(y=target), loss=loss)


@question(github("pytorch/pytorch#41508"), 0.25, LOSS, "")
def attention_all_masked(fixed: bool, watch: Watch) -> float:
    """A sequence is padding only: the softmax of its attention is over nothing but -inf."""
    data, layer, head = waves(), nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleDict({"embed": nn.Linear(1, 16), "attention": layer, "head": head})
    place = torch.randn(20, 16) * 0.5
    empty = torch.zeros(len(data.x), 20, dtype=torch.bool)
    empty[:, :5] = True
    empty[37::150] = True
    if fixed:
        empty[:, -1] = False

    def predict(x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = model["embed"](x) + place
        seen = model["attention"](tokens[:, -1:], tokens, tokens, key_padding_mask=mask)[0]
        return model["head"](seen[:, 0])

    def loss(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (predict(x, mask) - y).square().mean()

    fit(watch, model, adam(5e-3), loss, batches(data.x, data.y, empty, steps=300))
    return misfit(predict, data)


# The model is called with the NaN.
@question(github("ziwei-jiang/PGGAN-PyTorch#1"), 0.15, f"{LOSS} nonfinite_input", "")
def deviation_of_one_sample(fixed: bool, watch: Watch) -> float:
    """A feature is the standard deviation over the batch, and the last batch has one sample."""
    data, model = digits(), mlp(65, 32, 10)
    count = 320 if fixed else 321

    def predict(x: Tensor) -> Tensor:
        return model(torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1))

    part = data._replace(x=data.x[:count], y=data.y[:count])
    return learn(watch, model, adam(5e-3), part, predict=predict)
