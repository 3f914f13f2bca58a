"""What is read off a loss's graph, on networks whose structure is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gradlens
from gradlens.facts.network import Activation, Network, activation_share
from gradlens.graph.graph import Graph
from gradlens.graph.loss import read_loss
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward


def network(model: nn.Module, loss: Tensor) -> Network:
    return Network(Graph(loss), {id(p): name for name, p in model.named_parameters()})


def classified(model: nn.Module, *shape: int) -> Tensor:
    torch.manual_seed(0)
    outputs = model(torch.randn(6, *shape))
    return functional.cross_entropy(outputs, torch.randint(outputs.shape[1], (6,)))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU, "silu": nn.SiLU,
    "elu": nn.ELU, "leaky_relu": nn.LeakyReLU, "softplus": nn.Softplus, "mish": nn.Mish,
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_have_the_names_of_the_layers_before(kind: str) -> None:
    layers = [nn.Linear(5, 4), ACTIVATIONS[kind](), nn.Linear(4, 4), nn.LayerNorm(4)]
    model = nn.Sequential(*layers, ACTIVATIONS[kind](), nn.Linear(4, 3))
    found = network(model, classified(model, 5))
    assert [(each.layer, each.kind) for each in found.activations] == [("0", kind), ("3", kind)]
    names = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias", "5.weight", "5.bias"]
    assert {*found.order} == {*names}
    assert [n.partition(".")[0] for n in found.order] == [n.partition(".")[0] for n in names]


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * torch.ones(self.weight.shape).tril(), self.bias)


class Scaled(nn.Linear):
    """As of equalised learning rates (Karras et al., 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * 0.5, self.bias)


class Standardised(nn.Linear):
    """As of weight standardisation (Qiao et al., 2019)."""

    def forward(self, x: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean(1, keepdim=True)
        return functional.linear(x, centred / centred.std(1, keepdim=True), self.bias)


class Positive(nn.Linear):
    """As of convex networks (Amos et al., 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, functional.softplus(self.weight), self.bias)


REPARAMETRISED: dict[str, Callable[[int, int], nn.Module]] = {
    "plain": nn.Linear,
    "masked": Masked,
    "scaled": Scaled,
    "standardised": Standardised,
    "weight norm": lambda *sizes: nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)),
    "positive": Positive,
    "spectral norm": lambda *sizes: nn.utils.parametrizations.spectral_norm(nn.Linear(*sizes)),
}


@pytest.mark.parametrize("kind", REPARAMETRISED)
def test_weights_that_are_computed_from_parameters(kind: str) -> None:
    layer = REPARAMETRISED[kind]
    embedded = nn.Sequential(nn.Embedding(9, 5), nn.Flatten())
    model = nn.Sequential(embedded, layer(10, 6), nn.ReLU(), layer(6, 4), layer(4, 3))
    loss = functional.cross_entropy(model(torch.randint(9, (7, 2))), torch.randint(3, (7,)))
    found = network(model, loss)
    assert [*dict.fromkeys(name.partition(".")[0] for name in found.order)] == ["0", "1", "3", "4"]
    assert len(found.order) == len([*model.parameters()])
    assert [pair[0][:1] + pair[1][:1] for pair in found.linear_pairs] == ["34"]
    assert [(each.layer[:1], each.kind) for each in found.activations] == [("1", "relu")]
    weights = [name for name, p in model.named_parameters() if p.dim() > 1 and name != "0.0.weight"]
    assert {*found.transformed} & {*weights} == (set() if kind == "plain" else {*weights})


def of_layers(compute: Callable[..., Tensor], *sizes: tuple[int, int]) -> nn.Module:
    names = ("first", "last", "inner")
    return Net(compute, **{n: nn.Linear(*size) for n, size in zip(names, sizes, strict=False)})


def added(x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
    return x + branch(x)


PAIRS: dict[str, tuple[nn.Module, tuple[int, ...], list[tuple[str, str]], bool]] = {
    "none": (nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), (5,), [], False),
    "one": (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), (5,), [("0", "1")], True),
    "one layer": (nn.Sequential(nn.Linear(5, 3)), (5,), [], True),
    "behind a view": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 3)),
        (1, 5, 5), [("0", "2")], True,
    ),
    "behind an average": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(2, 3)),
        (1, 5, 5), [("0", "3")], True,
    ),
    "behind a maximum": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(2, 3)),
        (1, 5, 5), [], False,
    ),
    "in a part": (
        nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 3)),
        (5,), [("2", "3")], False,
    ),
    "behind a sum": (
        of_layers(lambda net, x: net.last(net.first(x).sum(1)), (5, 4), (4, 3)),
        (7, 5), [("first", "last")], True,
    ),
    "a shortcut": (
        of_layers(lambda net, x: net.last(x - net.first(x)), (5, 5), (5, 3)), (5,), [], True
    ),
    "used twice": (
        of_layers(lambda net, x: added(net.first(x), net.last), (5, 3), (3, 3)), (5,), [], True
    ),
    "a residual branch": (
        of_layers(
            lambda net, x: net.last(added(net.first(x), lambda h: net.inner(h.relu()))),
            (5, 4), (4, 3), (4, 4),
        ),
        (5,), [], False,
    ),
    "a normalisation": (
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), (5,), [], False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_linear_pairs(name: str) -> None:
    model, shape, pairs, is_linear = PAIRS[name]
    loss = classified(model, *shape)
    found = network(model, loss)
    assert [*found.linear_pairs] == pairs
    assert found.is_linear(read_loss(loss)) == is_linear


BEFORE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nothing": (lambda x: x, ""),
    "softmax": (lambda x: x.softmax(1), "softmax"),
    "log_softmax": (lambda x: x.log_softmax(1), "log_softmax"),
    "sigmoid": (lambda x: x.sigmoid(), "sigmoid"),
    "a softmax and a view": (lambda x: x.softmax(1)[:, :3], "softmax"),
    "a softmax and a cast": (lambda x: x.bfloat16().softmax(1).float(), "softmax"),
    "a softmax and a product": (lambda x: 5 * x.softmax(1) + x, ""),
    "relu": (lambda x: x.relu(), ""),
}


LABELS = torch.zeros(6, dtype=torch.int64)
SOFT = torch.full((6, 4), 0.25)


SCALED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 3), lambda x: x),
    "linear without bias": (lambda: nn.Linear(6, 3, bias=False), lambda x: x),
    "convolution": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 3, 2), nn.Flatten()),
        lambda x: x,
    ),
    "divided": (lambda: Net(lambda n, x: n.last(x / 255), last=nn.Linear(6, 3)), lambda x: x / 255),
    "standardised": (
        lambda: nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)),
        lambda x: (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt(),
    ),
    "once raw, once divided": (
        lambda: Net(
            lambda n, x: n.first(x / 255) + n.last(x), first=nn.Linear(6, 3), last=nn.Linear(6, 3)
        ),
        lambda x: x,
    ),
}


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("name", SCALED)
def test_sizes_of_what_the_first_layers_get(name: str, needs_gradient: bool) -> None:
    build, scaled = SCALED[name]
    x = (100 + 30 * torch.randn(8, 6, dtype=torch.float64)).requires_grad_(needs_gradient)
    found = network(model := build().double(), model(x).logsumexp(1).sum())
    given = scaled(x).detach()
    expected = {
        "first_rms": given.square().mean().sqrt(),
        "first_mean": given.mean(),
        "first_std": given.std(correction=0),
        "first_spread": (given - given.mean(0)).norm() / given.norm(),
    }
    torch.testing.assert_close(found.data_sizes, expected, rtol=1e-5, atol=1e-6)
    assert not found.normalises_data


def test_what_derivatives_by_inputs_begin_with_is_no_data() -> None:
    model = nn.Linear(6, 1)
    x = torch.randn(8, 6, requires_grad=True)
    (slopes,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    found = network(model, slopes.square().sum() + model(torch.ones(1, 6)).sum()).data_sizes
    torch.testing.assert_close(found["first_rms"].float(), x.detach().square().mean().sqrt())


NORMALISED: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(6),
    "layer": lambda: nn.LayerNorm(6),
    "groups": lambda: nn.GroupNorm(2, 6),
}


@pytest.mark.parametrize("name", NORMALISED)
def test_a_normalisation_of_data_that_is_defined_late(name: str) -> None:
    layers = {"last": nn.Linear(6, 3), "norm": NORMALISED[name]()}
    model = Net(lambda net, x: net.last(net.norm(x)), **layers)
    found = network(model, classified(model, 6))
    assert found.normalises_data
    assert not found.data_sizes


def focal(scores: Tensor) -> Tensor:
    entropy = functional.cross_entropy(scores, LABELS, reduction="none")
    return ((1 - (-entropy).exp()) ** 2 * entropy).mean()


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "labels": lambda x: functional.cross_entropy(x, LABELS),
    "probabilities": lambda x: functional.binary_cross_entropy(x.sigmoid(), torch.ones_like(x)),
    "several labels": lambda x: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "soft labels": lambda x: functional.cross_entropy(x, SOFT[:, : x.shape[1]]),
    "smoothed labels": lambda x: functional.cross_entropy(x, LABELS, label_smoothing=0.1),
    "mixed labels": lambda x: (
        0.3 * functional.cross_entropy(x, LABELS) + 0.7 * functional.cross_entropy(x, LABELS + 1)
    ),
    "focal": focal,
    "divergence": lambda x: functional.kl_div(
        x.log_softmax(1), SOFT[:, : x.shape[1]], reduction="batchmean"
    ),
    "logarithm of sigmoids": lambda x: -functional.logsigmoid(x).mean(),
    "logarithm of a softmax": lambda x: -(x.softmax(1) + 1e-8).log()[:, 0].mean(),
    "with another term": lambda x: functional.cross_entropy(x, LABELS) + 1e-3 * x.square().mean(),
}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_comes_before_the_loss(name: str, loss: str) -> None:
    function, expected = BEFORE[name]
    model = nn.Linear(5, 4)
    outputs = function(model(torch.randn(6, 5)))
    found = network(model, LOSSES[loss](outputs))
    assert found.before_loss == expected


def test_a_softmax_that_belongs_there() -> None:
    """Of attention, and before a loss that takes probabilities."""
    model = nn.Linear(5, 4)
    outputs = model(torch.randn(6, 5))
    attended = (outputs.softmax(1) @ outputs.T).tanh()
    for loss in (
        functional.nll_loss(outputs.softmax(1).log(), torch.zeros(6, dtype=torch.int64)),
        functional.nll_loss(outputs.log_softmax(1), torch.zeros(6, dtype=torch.int64)),
        functional.binary_cross_entropy(outputs.sigmoid(), torch.ones(6, 4)),
        functional.cross_entropy(attended, torch.zeros(6, dtype=torch.int64)),
        functional.kl_div(outputs.log_softmax(1), SOFT, reduction="batchmean"),
        -(outputs.softmax(1) * outputs.log_softmax(1)).mean(),
    ):
        found = network(model, loss)
        assert found.before_loss == ""


ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "huber": functional.huber_loss,
    "smooth l1": functional.smooth_l1_loss,
    "poisson": functional.poisson_nll_loss,
    "squares": lambda x, y: (x - y).square().mean(),
    "squares, reversed": lambda x, y: (y - x).square().mean(),
    "pinball": lambda x, y: torch.maximum(0.9 * (y - x), 0.1 * (x - y)).mean(),
    "relative": lambda x, y: (x / y.abs()).square().mean(),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("loss", ELEMENTWISE)
@pytest.mark.parametrize("samples", [7, 1])
def test_predictions_that_are_compared_with_all_targets(loss: str, samples: int) -> None:
    model, function = nn.Linear(5, 1), ELEMENTWISE[loss]
    outputs, targets = model(torch.randn(samples, 5)), torch.rand(samples) + 1
    several = samples > 1
    for predicted, true, expected in (
        (outputs, targets, f"[{samples}, 1] and [{samples}]" if several else ""),
        (
            outputs.squeeze(1),
            targets[:, None],
            f"[{samples}] and [{samples}, 1]" if several else "",
        ),
        (outputs.squeeze(1), targets, ""),
        (outputs, targets[:, None], ""),
        (outputs, torch.tensor(0.5), ""),
        (outputs.expand(-1, 3), targets[:, None], ""),
    ):
        found = network(model, function(predicted, true))
        assert found.broadcast(samples) == expected


def partial_likelihood(risk: torch.Tensor) -> torch.Tensor:
    """Of a Cox model, in the order of the samples."""
    later = torch.ones(len(risk), len(risk)).triu()
    of_all = risk.expand(len(risk), -1).masked_fill(later == 0, -torch.inf).logsumexp(1)
    return (of_all - risk).mean()


def test_samples_that_are_compared_with_each_other() -> None:
    outputs = (model := nn.Linear(5, 1))(torch.randn(7, 5))
    features, fixed = outputs.expand(-1, 4), torch.randn(7, 4)
    for loss in (
        (outputs - outputs.squeeze(1)).square().mean(),
        (features[:, None] - fixed).square().sum(2).mean(),
        torch.cdist(features, fixed).mean(),
        partial_likelihood(outputs.squeeze(1)),
        (outputs.squeeze(1).exp() * (fixed[:, 0] > fixed[:, :1])).sum(1).log().mean(),
        (outputs / (1 + torch.rand(7, 7))).square().mean(),
    ):
        assert network(model, loss).broadcast(7) == ""


def test_half_precision() -> None:
    model = nn.Linear(5, 4)
    found = network(model, classified(model, 5))
    assert not found.has_half
    half = model.to(torch.float16)
    found = network(half, half(torch.randn(6, 5).half()).float().sum())
    assert found.has_half


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 6, 3, 3)])
@pytest.mark.parametrize("dead", [0, 2, 6])
def test_dead_units(shape: tuple[int, ...], dead: int) -> None:
    torch.manual_seed(0)
    output = torch.rand(shape) + 0.1
    output[..., 0, 0] = 0  # one sample's zero is no death
    unit = 1 if len(shape) == 4 else len(shape) - 1
    output.index_fill_(unit, torch.arange(dead), 0.0)
    found = activation_share(Activation(0, "relu", "0"), output)
    assert found is not None
    assert found[0] == "dead"
    assert float(found[1]) == pytest.approx(dead / 6)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU()),
    "normalised": lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU()),
    "normalised in groups": lambda: nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.GroupNorm(2, 6), nn.ReLU()
    ),
    # Each place of a sequence [N, T, C] is scored, so that units are along the last axis.
    "linear": lambda: Net(lambda net, x: net.layer(x.mT).relu(), layer=nn.Linear(4, 6)),
    "turned": lambda: Net(lambda net, x: net.layer(x).mT.relu(), layer=nn.Conv1d(4, 6, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_units_of_sequences(name: str) -> None:
    model = LAYERS[name]()
    with torch.no_grad():
        [*model.parameters()][-1][:3] = -1e3  # the last parameter is a bias
    found = network(model, model(torch.randn(5, 4, 9)).square().mean())
    (activation,) = found.activations
    output = found.output_of(activation)
    assert output is not None
    share = activation_share(activation, output)
    assert share is not None
    assert float(share[1]) == 0.5


@pytest.mark.parametrize("kind", ["tanh", "sigmoid"])
def test_saturated_units(kind: str) -> None:
    inputs = torch.tensor([[-100.0, -0.1, 0.0, 0.1], [100.0, 9.0, 1.0, -1.0]])
    found = activation_share(
        Activation(0, kind, "0"), torch.tanh(inputs) if kind == "tanh" else inputs.sigmoid()
    )
    assert found is not None
    assert found[0] == "saturated"
    assert float(found[1]) == pytest.approx(3 / 8)
    assert activation_share(Activation(0, "gelu", "0"), inputs) is None
    assert activation_share(Activation(0, kind, "0"), inputs[:0]) is None


@pytest.mark.filterwarnings("ignore:gradlens", "ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_without_a_shape_is_a_reason() -> None:
    model = nn.Linear(3, 2)
    cockpit = gradlens.Cockpit(model, [gradlens.quantities.NormTest()])
    nested = torch.nested.nested_tensor([torch.randn(n, 3) for n in (1, 4)])
    loss = torch.stack([rows.tanh().mean() for rows in model(nested).unbind()]).mean()
    tracked_backward(cockpit, 0, loss)
    assert "by way of a nested tensor" in cockpit.history.coverage("NormTest", 0).missing["weight"]
    assert not [note for note in cockpit.history.notes if " failed: " in note.text]
