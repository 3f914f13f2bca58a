"""Mistakes in models: what isn't trained, what has no gradient, what holds it back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .question import github, pull, question
from .training import (
    Data,
    Recurrent,
    Watch,
    adam,
    batches,
    digits,
    drawn,
    errors,
    fit,
    friedman,
    images,
    learn,
    misfit,
    mlp,
    moons,
    sgd,
    split,
    tabular,
    waves,
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


@question("", 0.25)
def constant_weights(fixed: bool, watch: Watch) -> float:
    """All weights begin as 0.1: units of a layer stay the same."""
    model, data = mlp(10, 32, 32, 1), friedman()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
    return learn(watch, model, adam(model), data, 300)


@question("", 0.15)
def normal_weights_of_size_one(fixed: bool, watch: Watch) -> float:
    """Weights are drawn with a deviation of 1, and the first loss is in the thousands."""
    model, data = mlp(64, 128, 128, 128, 10), digits()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    return learn(watch, model, sgd(model, 0.02), data, 150)


@question("", 0.2)
def eight_sigmoids(fixed: bool, watch: Watch) -> float:
    """Eight layers with sigmoids: gradients of the first ones are next to nothing."""
    act = nn.ReLU if fixed else nn.Sigmoid
    model, data = mlp(64, *[48] * 8, 10, activation=act), digits()
    return learn(watch, model, adam(model, 1e-3), data, 300)


@question("", 0.15)
def biases_far_below_zero(fixed: bool, watch: Watch) -> float:
    """Biases begin at -10: hardly any unit is ever active."""
    model, data = mlp(64, 64, 64, 10), digits()
    for layer in model if not fixed else ():
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.bias, -10.0)
    return learn(watch, model, sgd(model, 0.05), data, 200)


class Wrong(nn.Module):
    """A recurrent network that gets ``[N, T, D]`` and takes its axes for those of ``[T, N, D]``."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(1, 16, batch_first=fixed), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@question("", 0.1)
def batch_first_forgotten(fixed: bool, watch: Watch) -> float:
    """``batch_first=True`` is missing: the layer runs over the samples, and sees one step each."""
    model, data = Wrong(fixed), waves()
    return learn(watch, model, adam(model, 1e-2), data, 250)


class Pooled(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.axis = 1 if fixed else 0
        self.layer, self.head = nn.Linear(8, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x.view(-1, 8, 8)).relu()
        h = h.amax(self.axis, keepdim=True).expand_as(h)
        return self.head(h.mean(1))


@question("", 0.4)
def pooled_over_the_batch(fixed: bool, watch: Watch) -> float:
    """The maximum is taken over the batch in place of positions: all have the same output."""
    model, data = Pooled(fixed), digits()
    return learn(watch, model, adam(model), data, 300)


class MadeInForward(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.last = nn.Linear(32, 10) if fixed else None

    def forward(self, x: Tensor) -> Tensor:
        last = nn.Linear(32, 10) if self.last is None else self.last
        return last(self.first(x).relu())


@question("", 0.12)
def layer_made_in_forward(fixed: bool, watch: Watch) -> float:
    """The last layer is made in ``forward``, with new weights at each step."""
    model, data = MadeInForward(fixed), digits()
    return learn(watch, model, adam(model), data, 200)


class NoGrad(nn.Module):
    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.fixed = fixed
        self.encoder, self.head = mlp(10, 32, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.fixed):
            h = self.encoder(x)
        return self.head(h)


@question("", 0.35)
def encoder_under_no_grad(fixed: bool, watch: Watch) -> float:
    """A new encoder runs under ``no_grad``, as the old pretrained one did."""
    model, data = NoGrad(fixed), friedman()
    return learn(watch, model, adam(model), data, 300)


@question("", 0.2)
def dropout_of_what_is_kept(fixed: bool, watch: Watch) -> float:
    """``Dropout(0.98)`` is written by somebody who means the share that is kept."""
    p = 0.02 if fixed else 0.98
    model, data = (
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(p), nn.Linear(32, 10)),
        digits(),
    )
    learn(watch, model, sgd(model, 0.05), data, 200)
    return errors(model.eval(), data)


@question("", 0.2)
def batches_of_two_with_norm(fixed: bool, watch: Watch) -> float:
    """BatchNorm in batches of two: statistics are hardly better than noise."""
    model, data = (
        nn.Sequential(mlp(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
        digits(),
    )
    learn(watch, model, sgd(model, 0.02), data, 150 if fixed else 400, 64 if fixed else 2)
    return errors(model.eval(), data)


@question("", 0.5)
def long_plain_recurrence(fixed: bool, watch: Watch) -> float:
    """A plain recurrent network has to remember the first of 60 steps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 60, 1, generator=generator)
    data = split(x, x[:, 0])
    layer = nn.GRU(1, 24, batch_first=True) if fixed else nn.RNN(1, 24, batch_first=True)
    model = Recurrent(layer, 24)
    if fixed:
        with torch.no_grad():
            layer.bias_hh_l0[24:48] = 3.0
    return learn(watch, model, adam(model, 1e-2), data, 300)


@question(github("amanshenoy/multilogue-net#8"), 0.6)
def one_in_fifty(fixed: bool, watch: Watch) -> float:
    """One sample in fifty is positive: the network says no to all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 10, generator=generator)
    score = x[:, :3].sum(1) + torch.randn(3000, generator=generator)
    data = split(x, (score > score.quantile(0.98)).float())
    model = mlp(10, 16, 1)
    weight = torch.tensor(30.0 if fixed else 1.0)
    learn(
        watch,
        model,
        sgd(model, 0.05, 0.0),
        data,
        120,
        loss=lambda out, y: functional.binary_cross_entropy_with_logits(
            out[:, 0], y, pos_weight=weight
        ),
    )
    with torch.no_grad():
        found = model(data.test_x)[:, 0] > 0
    return 1 - found[data.test_y > 0].float().mean().item()


@question("", 0.2)
def weights_cut_each_step(fixed: bool, watch: Watch) -> float:
    """Weights are clipped to ±0.01 after each step, as a critic's, in a plain classifier."""
    model, data = mlp(64, 32, 32, 10), digits()
    optimizer = adam(model)

    def update(step: int) -> None:
        optimizer.step()
        for parameter in model.parameters() if not fixed else ():
            parameter.data.clamp_(-0.01, 0.01)

    return learn(watch, model, optimizer, data, 200, update=update)


@question("", 0.15)
def moons_with_a_line(fixed: bool, watch: Watch) -> float:
    """A single linear layer for two moons, which no line parts."""
    data = moons()
    model = mlp(2, 32, 2) if fixed else nn.Sequential(nn.Linear(2, 32), nn.Linear(32, 2))
    return learn(watch, model, adam(model, 1e-2), data, 300) * (1.0 if fixed else 3.0)


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
