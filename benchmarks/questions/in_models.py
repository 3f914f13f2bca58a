"""Mistakes in models: what isn't trained, what has no gradient, what holds it back."""

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
    Watch,
    adam,
    altered,
    ask,
    batches,
    begun,
    digits,
    drawn,
    fit,
    friedman,
    github,
    images,
    learn,
    mean_of_last,
    misfit,
    mlp,
    moons,
    normal,
    of_itself,
    pull,
    question,
    sgd,
    split,
    stack,
    tabular,
)


def kept(fixed: bool, x: Tensor) -> Tensor:
    """What a network goes on with; it is detached if the network isn't ``fixed``."""
    return x if fixed else x.detach()


# fmt: off
ask("accumulated_not_divided", github("hirofumi0810/neural_sp#168"), 0.2, "loss_sum",
    f"{DIVERGES} {NAN} dead_units",
    "Gradients of 16 micro-batches are added up, and the loss isn't divided by 16.",
    lambda fixed, watch: learn(
        watch, mlp(10, 64, 1), sgd(0.1), friedman(), 960, 16, every=16,
        loss=lambda out, y: (out - y).square().mean() / (16 if fixed else 1)))
ask("decay_too_strong", github("BVLC/caffe#1396"), 0.2, "weight_decay_high", FLAT,
    "A weight decay of 0.5 draws all weights to zero: any input has the same output.",
    lambda fixed, watch: learn(watch, mlp(10, 32, 1), sgd(
        0.05, weight_decay=5e-4 if fixed else 0.5), friedman(), 200))
ask("clipped_to_nothing", github("twtygqyy/pytorch-vdsr#2"), 0.2, "clipping_always",
    f"lr_too_low {FLAT}",
    "Gradients are clipped to a norm of 0.0001, and learning takes for ever.",
    lambda fixed, watch: learn(watch, mlp(10, 32, 1), sgd(0.05), friedman(), 200,
                               clip=1.0 if fixed else 1e-4))
ask("sigmoid_bounds_outputs", github("jsyoon0823/Time-series-prediction#3"), 0.2, "target_scale",
    "saturated_units",
    "The last layer is a sigmoid, and targets aren't scaled to between 0 and 1.",
    lambda fixed, watch: learn(watch, stack(mlp(10, 32, 1), *(() if fixed else (nn.Sigmoid(),))),
                               adam(5e-3), friedman(), 200))
ask("sigmoid_with_squares", github("guojunq/lsgan#3"), 0.1, "saturated_units vanishing_gradients",
    DEAD, "The squared error of a saturated sigmoid has next to no gradient; a linear output has.",
    lambda fixed, watch: learn(
        watch, stack(mlp(2, 32), nn.ReLU(), begun(nn.Linear(32, 1), bias=0.0 if fixed else -8.0)),
        sgd(0.1), moons(), 200, loss=lambda out, y:
        ((out + 0.5 if fixed else out.sigmoid())[:, 0] - y).square().mean()))
ask("weights_too_small_for_depth", github("adambielski/siamese-triplet#17"), 0.12,
    "vanishing_gradients", DEAD,
    "A deep network with ReLU needs its own initialisation: with small weights, nothing moves.",
    lambda fixed, watch: learn(watch, begun(
        mlp(64, *[32] * 8, 10), partial(nn.init.kaiming_normal_, nonlinearity="relu") if fixed else
        normal(0.01), 0.0), adam(2e-3), digits(), 200))
ask("dropout_of_predictions", github("keras-team/keras#5992"), 0.3, "", FLAT,
    "The last layer is a dropout, which makes half of the predictions zero.",
    lambda fixed, watch: learn(watch, stack(mlp(10, 32, 1), nn.Dropout(0.0 if fixed else 0.5)),
                               adam(1e-2), altered(friedman(), y=lambda y: y + 5), 400))
ask("weights_of_one_hundredth", pull("ageron/handson-ml#176"), 0.2,
    "vanishing_gradients lr_too_low", DEAD,
    "Weights are drawn with a deviation of 0.01: it takes long before the loss moves.",
    lambda fixed, watch: learn(watch, begun(mlp(64, 48, 48, 48, 10),
                                            None if fixed else normal(0.01)), sgd(0.05), digits(),
                               200))
ask("initializer_too_large", github("yulunzhang/RCAN#76"), 0.35, "exploding_gradients",
    f"{DIVERGES} {DEAD}",
    "Another initializer makes the weights of a deep network too large, and the loss huge.",
    lambda fixed, watch: learn(watch, begun(mlp(10, 64, 64, 64, 64, 1),
                                            None if fixed else normal(0.5)), adam(), friedman(),
                               200))
ask("half_precision_not_scaled", github("NVIDIA/OpenSeq2Seq#271"), 0.2, "precision_underflow",
    FLAT, "In float16 without a scale, gradients of a mean over many outputs are zero.",
    lambda fixed, watch: learn(
        watch, mlp(64, 32, 64) if fixed else mlp(64, 32, 64).half(), sgd(3200.0),
        of_itself(digits() if fixed else altered(digits(), x=Tensor.half)), 200,
        loss=lambda out, y: ((out - y).square() / 2**16).mean()))
ask("extractor_detaches", github("lucidrains/CoCa-pytorch#6"), 0.2, "no_gradient", "",
    "Features are taken by a hook that detaches them, so that the body is never trained.",
    lambda fixed, watch: learn(watch, Extractor(fixed), adam(1e-2), friedman(), 300))
ask("parameter_moved_to_a_device", github("pytorch/pytorch#17484"), 0.35,
    "unregistered_layers optimizer_misses", "",
    "``nn.Parameter(...).to(device)`` is no parameter any more, and no module has it.",
    lambda fixed, watch: learn(watch, Moved(fixed), adam(5e-3), friedman(), 300))
ask("mask_after_the_softmax", pull("huggingface/pytorch-image-models#2236"), 0.3, NAN, "",
    "Minus infinity is put in place of attention's weights, not of its scores.",
    lambda fixed, watch: learn(watch, Masked("before" if fixed else "after"), adam(1e-2),
                               texts(), 300))
ask("mask_inverted", pull("InseeFrLab/torchTextClassifiers#92"), 0.3, "", f"{FLAT} no_gradient",
    "Attention's mask is true where it should be false: it sees nothing but padding.",
    lambda fixed, watch: learn(watch, Masked("before" if fixed else "inverted"), adam(1e-2),
                               texts(), 300))
# fmt: on


@question(github("speechbrain/speechbrain#1396"), 0.35, "frozen_layer no_gradient", "")
def features_detached(fixed: bool, watch: Watch) -> float:
    """The encoder gets ``feats.detach()``, so nothing before it has a gradient."""
    model = nn.ModuleDict({"features": mlp(10, 3), "encoder": mlp(3, 32, 1)})

    def predict(x: Tensor) -> Tensor:
        return model["encoder"](kept(fixed, model["features"](x)))

    return learn(watch, model, adam(5e-3), friedman(), 250, predict=predict)


@question(github("ihciah/deep-fashion-retrieval#1"), 0.2, "frozen_layer", f"{FLAT} no_gradient")
def convolutions_frozen(fixed: bool, watch: Watch) -> float:
    """All convolutions are frozen, though their weights don't fit the task."""
    convolution = nn.Conv2d(1, 6, 3)
    model = stack(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10))
    nn.init.normal_(convolution.weight, std=0.02)
    convolution.requires_grad_(fixed)
    return learn(watch, model, adam(0.01), images())


@question(github("wannabeOG/MAS-PyTorch#1"), 0.15, "frozen_layer", f"{FLAT} no_gradient")
def frozen_the_wrong_ones(fixed: bool, watch: Watch) -> float:
    """Flags are inverted: the layers to freeze are trained, and the new head is frozen."""
    data = digits()
    model = nn.ModuleDict({"base": mlp(64, 32, 10), "head": nn.Linear(10, 10)})
    base = model["base"]
    learn(Watch(), base, adam(0.01), data)
    model["base" if fixed else "head"].requires_grad_(False)
    base[-1].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 0.03 if fixed else 3e-3)
    begun(model["head"], normal(0.05))
    other = altered(data, y=lambda y: (y * 3 + 1) % 10)
    return learn(watch, model, optimizer, other, 60, predict=lambda x: model["head"](base(x)))


@question(github("zdebruine/MMVAE#39"), 0.4, "optimizer_misses", FLAT)
def decoder_not_in_optimizer(fixed: bool, watch: Watch) -> float:
    """The optimizer of an autoencoder gets the parameters of its encoder alone."""
    model = nn.ModuleDict({"encoder": mlp(64, 32, 12), "decoder": mlp(12, 32, 64)})

    def predict(x: Tensor) -> Tensor:
        return model["decoder"](model["encoder"](x))

    optimizer = adam(5e-3)(model if fixed else model["encoder"])
    return learn(watch, model, optimizer, of_itself(digits()), 200, predict=predict)


@question(github("zjunlp/HVPNeT#5"), 0.12, "optimizer_misses", FLAT)
def head_not_appended(fixed: bool, watch: Watch) -> float:
    """Groups of parameters are built, but those of the last layers are never appended."""
    model = mlp(64, 10, 10, 10)
    begun(model[-1], normal(0.02))
    groups = [{"params": model[0].parameters(), "lr": 5e-3}]
    if fixed:
        groups.append({"params": [*model[2].parameters(), *model[4].parameters()]})
    return learn(watch, model, torch.optim.Adam(groups, 0.01), digits())


@question(github("lightly-ai/lightly#559"), 0.5, "target_trained", FLAT)
def no_stop_gradient(fixed: bool, watch: Watch) -> float:
    """A Siamese network without negative pairs has no stop-gradient, and collapses."""
    data, encoder = digits(), mlp(64, 32, 16)
    if fixed:
        encoder.append(nn.BatchNorm1d(16, affine=False))
    model = nn.ModuleDict({"encoder": encoder, "predictor": mlp(16, 16, 16)})

    def loss(x: Tensor) -> Tensor:
        codes = [model["encoder"](x + 0.3 * torch.randn_like(x)) for _ in range(2)]
        total = x.new_zeros(())
        for one, other in (codes, codes[::-1]):
            goal = other.detach() if fixed else other
            total = total - functional.cosine_similarity(model["predictor"](one), goal).mean() / 2
        return total

    fit(watch, model, adam(5e-3), loss, batches(data.x, steps=200, size=64))
    codes = functional.normalize(model["encoder"](data.test_x), dim=1)
    return codes.mean(0).norm().item()


@question(github("Ugenteraan/Deep_Hierarchical_Classification#6"), 0.12, "", "")
def penalty_of_argmax(fixed: bool, watch: Watch) -> float:
    """A penalty is computed from ``argmax``: it is added to the loss, and has no gradient."""

    def parts(x: Tensor, y: Tensor) -> Tensor:
        return (x[:, 0] > 0).long() + 2 * y

    x, y, test_x, test_y = moons()
    data = Data(x, parts(x, y), test_x, parts(test_x, test_y))

    def loss(out: Tensor, part: Tensor) -> Tensor:
        scores = out.log_softmax(1)
        coarse = functional.nll_loss(scores.reshape(-1, 2, 2).logsumexp(2), part // 2)
        if fixed:
            return functional.nll_loss(scores, part) + coarse
        return coarse + (scores.argmax(1) != part).float().mean()

    return learn(watch, mlp(2, 32, 4), adam(0.01), data, loss=loss)


@question(github("motokimura/PyTorch_Gaussian_YOLOv3#23"), 0.2, NAN, "")
def variance_to_zero(fixed: bool, watch: Watch) -> float:
    """The likelihood of a Gaussian whose deviation has no lower limit: it goes to 0, then NaN."""
    smooth, model = friedman(noise=0.0), mlp(10, 32, 2)
    data = smooth._replace(y=smooth.x[:, :1].round(), test_y=smooth.test_x[:, :1].round())
    floor = 0.3 if fixed else 0.0

    def loss(out: Tensor, y: Tensor) -> Tensor:
        mean, raw = out.chunk(2, 1)
        deviation = raw.relu() + floor
        return (((y - mean) / deviation).square() / 2 + deviation.log()).mean()

    learn(watch, model, adam(5e-3), data, loss=loss)
    return misfit(lambda x: model(x)[:, :1], data)


@question(github("emited/VariationalRecurrentNeuralNetwork#2"), 0.45, NAN, "")
def log_of_zero(fixed: bool, watch: Watch) -> float:
    """A likelihood by hand takes the logarithm of a sigmoid that has become 0 or 1."""
    data, model = digits(scale=False), mlp(64, 32, 64)
    eps = 1e-7 if fixed else 0.0

    def loss(x: Tensor, goal: Tensor) -> Tensor:
        theta = model(x).sigmoid()
        return -(goal * (theta + eps).log() + (1 - goal) * (1 - theta + eps).log()).mean()

    batch = batches(data.x, (data.x > 127).float())
    return mean_of_last(fit(watch, model, adam(5e-3), loss, batch))


@question(github("pytorch/torchtitan#1246"), 0.3, "expert_unused", "no_gradient")
def router_collapses(fixed: bool, watch: Watch) -> float:
    """A router sends nearly all tokens to one expert: nothing balances the experts."""
    data = friedman()
    experts = nn.ModuleList(mlp(10, 3, 1) for _ in range(8))
    model = nn.ModuleDict({"router": nn.Linear(10, 8), "experts": experts})
    nn.init.constant_(model["router"].bias[:1], 4.0)

    def route(x: Tensor) -> Tensor:
        return model["router"](x).softmax(1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        share = functional.one_hot(route(x).argmax(1), 8).float().mean(0)
        balance = 8 * (share * route(x).mean(0)).sum() if fixed else 0.0
        weight, chosen = route(x).max(1)
        outputs = torch.stack([expert(x)[:, 0] for expert in experts], 1)
        out = (weight * outputs.gather(1, chosen[:, None])[:, 0])[:, None]
        return (out - y).square().mean() + 0.3 * balance

    fit(watch, model, adam(0.01), loss, batches(data.x, data.y, steps=300, size=64))
    return route(data.test_x).argmax(1).bincount(minlength=8).max().item() / len(data.test_x)


@question(github("amanshenoy/multilogue-net#8"), 0.6, "class_imbalance", FLAT)
def one_in_fifty(fixed: bool, watch: Watch) -> float:
    """One sample in fifty is positive: the network says no to all."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 10, generator=generator)
    score = x[:, :3].sum(1) + torch.randn(3000, generator=generator)
    data, model = split(x, (score > score.quantile(0.98)).float()), mlp(10, 16, 1)
    bce = partial(functional.binary_cross_entropy_with_logits,
                  pos_weight=torch.tensor(30.0 if fixed else 1.0))  # fmt: skip
    learn(watch, model, sgd(0.05, 0.0), data, 120, loss=lambda out, y: bce(out[:, 0], y))
    return 1 - (model(data.test_x)[:, 0] > 0)[data.test_y > 0].float().mean().item()


class Extractor(nn.Module):
    """A network whose features are caught by a hook, and a head on them."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.body, self.head = mlp(10, 32, 12), nn.Linear(12, 1)
        self.caught: Tensor | None = None

        def catch(module: nn.Module, inputs: object, output: Tensor) -> None:
            self.caught = kept(fixed, output.clone())

        self.body[1].register_forward_hook(catch)
        self.body[2] = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        assert self.caught is not None
        return self.head(self.caught[:, :12])


class Moved(nn.Module):
    """A layer with a weight of its own, which is moved to a device where it is made."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        weight = nn.Parameter(0.3 * drawn(10, 4))
        self.weight = weight if fixed else weight.clone()
        self.rest = mlp(4, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x @ self.weight)


@question(github("fawazsammani/knowing-when-to-look-adaptive-attention#6"), 0.3, "", FLAT)
def features_act_as_pixels(fixed: bool, watch: Watch) -> float:
    """``view`` in place of ``permute`` makes features of what are pixels."""
    x = drawn(1600, 3, 12)
    data = split(x, (x[:, :1] * x[:, 1:2]).mean(2) * 3)
    model = nn.ModuleDict({"pixel": mlp(3, 32, 16), "head": nn.Linear(16, 1)})

    def predict(x: Tensor) -> Tensor:
        pixels = x.permute(0, 2, 1) if fixed else x.view(len(x), 12, 3)
        return model["head"](model["pixel"](pixels).relu().mean(1))

    return learn(watch, model, adam(1e-2), data, 400, predict=predict)


class Attention(nn.Module):
    """Pools positions ``[N, T, D]`` by a score for each."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.score, self.value = axis, nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(x).softmax(self.axis) * self.value(x)).sum(1)


@question(pull("catalyst-team/catalyst#285"), 0.2, "one_element softmax_axis", FLAT)
def softmax_of_a_single_score(fixed: bool, watch: Watch) -> float:
    """Attention has a softmax over the last axis of scores ``[N, T, 1]``: all weights are 1."""
    x = torch.stack([drawn(1200, 8), torch.zeros(1200, 8)], 2)
    chosen = torch.randint(8, (1200,), generator=torch.Generator().manual_seed(0))
    x[torch.arange(1200), chosen, 1] = 3.0
    data = split(x, x[torch.arange(1200), chosen, :1])
    return learn(watch, Attention(1 if fixed else 2), adam(2e-2), data, 400)


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


@question(
    github("vanvalenlab/deepcell-tf#624"), 0.12, "dead_units target_scale softmax_twice", DEAD
)
def relu_before_logits_loss(fixed: bool, watch: Watch) -> float:
    """Scores go through a ReLU before the binary cross-entropy: no probability is below 1/2."""
    model, data = mlp(30, 16, 1), tabular()
    predict = model if fixed else lambda x: model(x).relu()
    learn(watch, model, sgd(0.05), data, 100, predict=predict)
    return 2 * (predict(data.test_x).sigmoid()[:, 0] - data.test_y).square().mean().item()
