"""Mistakes in models: what isn't trained, what has no gradient, what holds it back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import github, question
from .training import (
    Watch,
    adam,
    batches,
    digits,
    fit,
    friedman,
    images,
    learn,
    mlp,
    moons,
    sgd,
)


@question(github("speechbrain/speechbrain#1396"), 0.35)
def features_detached(fixed: bool, watch: Watch) -> float:
    """The encoder gets ``feats.detach()``, so nothing before it has a gradient."""
    model = nn.ModuleDict({"features": mlp(10, 3), "encoder": mlp(3, 32, 1)})

    def predict(x: Tensor) -> Tensor:
        features = model["features"](x)
        return model["encoder"](features if fixed else features.detach())

    return learn(watch, model, adam(model, 5e-3), friedman(), 250, predict=predict)


@question(github("ihciah/deep-fashion-retrieval#1"), 0.2)
def convolutions_frozen(fixed: bool, watch: Watch) -> float:
    """All convolutions are frozen, though their weights don't fit the task."""
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10)
    )
    nn.init.normal_(model[0].weight, std=0.02)
    model[0].requires_grad_(fixed)
    return learn(watch, model, adam(model, 0.01), images())


@question(github("wannabeOG/MAS-PyTorch#1"), 0.15)
def frozen_the_wrong_ones(fixed: bool, watch: Watch) -> float:
    """Flags are inverted: the layers to freeze are trained, and the new head is frozen."""
    data = digits()
    model = nn.ModuleDict({"base": mlp(64, 32, 10), "head": nn.Linear(10, 10)})
    base = model["base"]
    learn(Watch(), base, adam(base, 0.01), data)
    model["base" if fixed else "head"].requires_grad_(False)
    base[-1].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 0.03 if fixed else 3e-3)
    nn.init.normal_(model["head"].weight, std=0.05)

    def predict(x: Tensor) -> Tensor:
        return model["head"](base(x))

    other = data._replace(y=(data.y * 3 + 1) % 10, test_y=(data.test_y * 3 + 1) % 10)
    return learn(watch, model, optimizer, other, 60, predict=predict)


@question(github("zdebruine/MMVAE#39"), 0.4)
def decoder_not_in_optimizer(fixed: bool, watch: Watch) -> float:
    """The optimizer of an autoencoder gets the parameters of its encoder alone."""
    data = digits()
    model = nn.ModuleDict({"encoder": mlp(64, 32, 12), "decoder": mlp(12, 32, 64)})

    def predict(x: Tensor) -> Tensor:
        return model["decoder"](model["encoder"](x))

    optimizer = adam(model if fixed else model["encoder"], 5e-3)
    data = data._replace(y=data.x, test_y=data.test_x)
    return learn(watch, model, optimizer, data, 200, predict=predict)


@question(github("zjunlp/HVPNeT#5"), 0.12)
def head_not_appended(fixed: bool, watch: Watch) -> float:
    """Groups of parameters are built, but those of the last layers are never appended."""
    model = mlp(64, 10, 10, 10)
    nn.init.normal_(model[-1].weight, std=0.02)
    groups = [{"params": model[0].parameters(), "lr": 5e-3}]
    if fixed:
        groups.append({"params": [*model[2].parameters(), *model[4].parameters()]})
    return learn(watch, model, torch.optim.Adam(groups, 0.01), digits())


@question(github("hirofumi0810/neural_sp#168"), 0.2)
def accumulated_not_divided(fixed: bool, watch: Watch) -> float:
    """Gradients of 16 micro-batches are added up, and the loss isn't divided by 16."""
    model = mlp(10, 64, 1)
    optimizer = sgd(model, 0.1)

    def update(step: int) -> None:
        if step % 16 == 15:
            optimizer.step()
            optimizer.zero_grad()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).square().mean() / (16 if fixed else 1)

    return learn(watch, model, optimizer, friedman(), 960, 16, loss=loss, update=update, zero=False)


@question(github("BVLC/caffe#1396"), 0.2)
def decay_too_strong(fixed: bool, watch: Watch) -> float:
    """A weight decay of 0.5 draws all weights to zero: any input has the same output."""
    model, data = mlp(10, 32, 1), friedman()
    optimizer = sgd(model, 0.05, weight_decay=5e-4 if fixed else 0.5)
    return learn(watch, model, optimizer, data, 200)


@question(github("twtygqyy/pytorch-vdsr#2"), 0.2)
def clipped_to_nothing(fixed: bool, watch: Watch) -> float:
    """Gradients are clipped to a norm of 0.0001, and learning takes for ever."""
    model, data = mlp(10, 32, 1), friedman()
    optimizer = sgd(model, 0.05)

    def update(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0 if fixed else 1e-4)
        optimizer.step()

    return learn(watch, model, optimizer, data, 200, update=update)


@question(github("jsyoon0823/Time-series-prediction#3"), 0.2)
def sigmoid_bounds_outputs(fixed: bool, watch: Watch) -> float:
    """The last layer is a sigmoid, and targets aren't scaled to between 0 and 1."""
    model, data = mlp(10, 32, 1), friedman()
    if not fixed:
        model.append(nn.Sigmoid())
    return learn(watch, model, adam(model, 5e-3), data, 200)


@question(github("lightly-ai/lightly#559"), 0.5)
def no_stop_gradient(fixed: bool, watch: Watch) -> float:
    """A Siamese network without negative pairs has no stop-gradient, and collapses."""
    data = digits()
    norm = nn.BatchNorm1d(16, affine=False)
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), norm)
    if not fixed:
        encoder = encoder[:3]
    model = nn.ModuleDict({"encoder": encoder, "predictor": mlp(16, 16, 16)})

    def loss(x: Tensor) -> Tensor:
        codes = [model["encoder"](x + 0.3 * torch.randn_like(x)) for _ in range(2)]
        total = x.new_zeros(())
        for one, other in (codes, codes[::-1]):
            goal = other.detach() if fixed else other
            total = total - functional.cosine_similarity(model["predictor"](one), goal).mean() / 2
        return total

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, steps=200, size=64))
    codes = functional.normalize(model["encoder"](data.test_x), dim=1)
    return codes.mean(0).norm().item()


@question(github("Ugenteraan/Deep_Hierarchical_Classification#6"), 0.12)
def penalty_of_argmax(fixed: bool, watch: Watch) -> float:
    """A penalty is computed from ``argmax``: it is added to the loss, and has no gradient."""
    data = moons()
    model = mlp(2, 32, 4)
    near = (data.x[:, 0] > 0).long() + 2 * data.y

    def loss(x: Tensor, y: Tensor, part: Tensor) -> Tensor:
        scores = model(x).log_softmax(1)
        coarse = scores.reshape(-1, 2, 2).logsumexp(2)
        if fixed:
            return functional.nll_loss(scores, part) + functional.nll_loss(coarse, y)
        wrong = (scores.argmax(1) != part).float()
        return functional.nll_loss(coarse, y) + wrong.mean()

    fit(watch, model, adam(model, 0.01), loss, batches(data.x, data.y, near))
    part = (data.test_x[:, 0] > 0).long() + 2 * data.test_y
    return (model(data.test_x).argmax(1) != part).float().mean().item()


@question(github("guojunq/lsgan#3"), 0.1)
def sigmoid_with_squares(fixed: bool, watch: Watch) -> float:
    """The squared error of a saturated sigmoid has next to no gradient; a linear output has."""
    model = mlp(2, 32, 1)
    nn.init.constant_(model[2].bias, 0.0 if fixed else -8.0)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return ((out + 0.5 if fixed else out.sigmoid())[:, 0] - y).square().mean()

    return learn(watch, model, sgd(model, 0.1), moons(), 200, loss=loss)


@question(github("motokimura/PyTorch_Gaussian_YOLOv3#23"), 0.2)
def variance_to_zero(fixed: bool, watch: Watch) -> float:
    """The likelihood of a Gaussian whose deviation has no lower limit: it goes to 0, then NaN."""
    data = friedman(noise=0.0)
    target = data.x[:, :1].round()
    model = mlp(10, 32, 2)
    floor = 0.3 if fixed else 0.0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        mean, raw = model(x).chunk(2, 1)
        deviation = raw.relu() + floor
        return (((y - mean) / deviation).square() / 2 + deviation.log()).mean()

    fit(watch, model, adam(model, 5e-3), loss, batches(data.x, target))
    goal = data.test_x[:, :1].round()
    return ((model(data.test_x)[:, :1] - goal).square().mean() / goal.var()).item()


@question(github("emited/VariationalRecurrentNeuralNetwork#2"), 0.45)
def log_of_zero(fixed: bool, watch: Watch) -> float:
    """A likelihood by hand takes the logarithm of a sigmoid that has become 0 or 1."""
    data = digits(scale=False)
    pixels = (data.x > 127).float()
    model = mlp(64, 32, 64)
    eps = 1e-7 if fixed else 0.0

    def loss(x: Tensor, goal: Tensor) -> Tensor:
        theta = model(x).sigmoid()
        return -(goal * (theta + eps).log() + (1 - goal) * (1 - theta + eps).log()).mean()

    losses = fit(watch, model, adam(model, 5e-3), loss, batches(data.x, pixels))
    return sum(losses[-20:]) / 20


@question(github("pytorch/torchtitan#1246"), 0.3)
def router_collapses(fixed: bool, watch: Watch) -> float:
    """A router sends nearly all tokens to one expert: nothing balances the experts."""
    data = friedman()
    experts = nn.ModuleList(mlp(10, 3, 1) for _ in range(8))
    model = nn.ModuleDict({"router": nn.Linear(10, 8), "experts": experts})
    nn.init.constant_(model["router"].bias[:1], 4.0)

    def route(x: Tensor) -> Tensor:
        return model["router"](x).softmax(1)

    def predict(x: Tensor) -> Tensor:
        weight, chosen = route(x).max(1)
        outputs = torch.stack([expert(x)[:, 0] for expert in experts], 1)
        return (weight * outputs.gather(1, chosen[:, None])[:, 0])[:, None]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        share = functional.one_hot(route(x).argmax(1), 8).float().mean(0)
        balance = 8 * (share * route(x).mean(0)).sum() if fixed else 0.0
        return (predict(x) - y).square().mean() + 0.3 * balance

    fit(watch, model, adam(model, 0.01), loss, batches(data.x, data.y, steps=300, size=64))
    return route(data.test_x).argmax(1).bincount(minlength=8).max().item() / len(data.test_x)


@question(github("adambielski/siamese-triplet#17"), 0.12)
def weights_too_small_for_depth(fixed: bool, watch: Watch) -> float:
    """A deep network with ReLU needs its own initialisation: with small weights, nothing moves."""
    model = mlp(64, *[32] * 8, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            if fixed:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            else:
                nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return learn(watch, model, adam(model, 2e-3), digits(), 200)
