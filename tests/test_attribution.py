"""Samples of layers that aren't those of the loss are refused, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens import quantities
from gradlens.individual.attribution import MIXED
from gradlens.individual.batchnorm import BatchNormPolicy
from gradlens.quantities import NormTest
from tests.references import without_hooks
from tests.whole_networks import WHOLE_NETWORKS


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Sorted(nn.Module):
    """Computes a part of itself on the samples in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return self.head(self.inner(x[order]).tanh()[order.argsort()])


class Experts(nn.Module):
    """Each token goes to one of two experts; ``taken`` says how many the first one gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.taken = 4

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(0, 1)
        first = torch.arange(len(tokens)) % 3 == 0
        first &= first.cumsum(0) <= self.taken
        found = torch.zeros_like(tokens)
        for expert, chosen in zip(self.experts, (first, ~first), strict=True):
            found = found.index_add(0, chosen.nonzero()[:, 0], expert(tokens[chosen]).tanh())
        return self.head((tokens + found).unflatten(0, x.shape[:2]).mean(1))


class PositionBias(nn.Module):
    """A network of positions alone, whose output is added for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias, self.head = nn.Linear(3, 4), nn.Linear(1, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        table = (places[:, None] - places)[..., None]
        scores = self.embed(x) @ self.embed(x).mT + self.bias(table).tanh()[..., 0]
        return self.head((scores.softmax(-1) @ self.embed(x)).mean(1))


class Positions(nn.Module):
    """Embeddings of positions without an axis of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.head = nn.Linear(3, 4), nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.embed(x) + self.places(torch.arange(x.shape[1]))).tanh().mean(1))


class Neighbours(nn.Module):
    """A layer of a graph network: nodes are the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        ring = torch.eye(len(x), dtype=x.dtype).roll(1, 0) + torch.eye(len(x), dtype=x.dtype)
        return self.head(ring @ self.inner(x).tanh())


class HandwrittenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
        return self.head((x * self.weight).tanh())


def labels(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1])


def contrastive(outputs: Tensor) -> Tensor:
    normal = F.normalize(outputs, dim=1)
    return F.cross_entropy(normal @ normal.detach().T, torch.arange(len(outputs)))


def by_class(outputs: Tensor) -> Tensor:
    """The axis of classes comes last, and may be as long as the batch."""
    return outputs.square().mean(0).sum()


def transposed(outputs: Tensor) -> Tensor:
    return outputs.T.contiguous().square().sum(0).mean()


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    refused: frozenset[str]
    loss: Callable[[Tensor], Tensor] = labels


def case(
    name: str,
    make: Callable[[], nn.Module],
    *inputs: int,
    refused: tuple[str, ...] = (),
    loss: Callable[[Tensor], Tensor] = labels,
) -> Case:
    names = {f"{layer}.{kind}" for layer in refused for kind in ("weight", "bias")}
    return Case(name, make, inputs, frozenset(names), loss)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def channels_first() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


CASES = [
    case("sorted inside", Sorted, 5, 4, refused=("inner",)),
    case("expert with N tokens", Experts, 4, 6, 3, refused=("experts.0", "experts.1")),
    case("position bias, T = N", PositionBias, 4, 4, 3, refused=("bias",)),
    case("position bias, T < N", PositionBias, 5, 4, 3),
    case("positions, T = N", Positions, 4, 4, 3),
    case("positions, T < N", Positions, 5, 4, 3),
    case("neighbours", Neighbours, 5, 4, refused=("inner",)),
    case("handwritten normalisation", HandwrittenNorm, 6, 4, refused=("inner",)),
    case("contrastive loss: shares of each sample's outputs", mlp, 5, 4, loss=contrastive),
    case("as many classes as samples", mlp, 3, 4, loss=by_class),
    case("as many classes as samples, transposed", mlp, 3, 4, loss=transposed),
    case("as many channels as samples", channels_first, 4, 2, 4),
]


def loop(case: Case, model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """N times the samples' contributions, from the rows of the outputs' gradient."""
    model = without_hooks(model)
    parameters = dict(model.named_parameters())
    outputs = model(inputs)
    (gradient,) = torch.autograd.grad(case.loss(outputs), outputs, retain_graph=True)
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(len(inputs)):
        share = torch.zeros_like(gradient)
        share[n] = len(inputs) * gradient[n]
        found = torch.autograd.grad(
            model(inputs), list(parameters.values()), share, allow_unused=True
        )
        for (name, parameter), one in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if one is None else one)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refuses_others_samples_alone(case: Case) -> None:
    torch.manual_seed(1)
    model, inputs = case.make().double(), randn(*case.inputs)
    expected = loop(case, model, inputs)
    gradlens.extend(model)
    loss = case.loss(model(inputs))
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert set(expected) - set(gradients) == case.refused
    for name in gradients:
        torch.testing.assert_close(gradients[name].dense(), expected[name], rtol=1e-9, atol=1e-12)


def test_says_why() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(Sorted().double())
    loss = labels(model(randn(5, 4)))
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    with pytest.raises(KeyError, match="change places"):
        gradients["inner.weight"]


def covered(cockpit: gradlens.Cockpit, step: int) -> set[str]:
    missing = cockpit.history.coverage("NormTest", step).missing
    assert set(missing.values()) <= {MIXED}
    return set(dict(cockpit.parameters)) - set(missing)


def tracked(
    cockpit: gradlens.Cockpit,
    model: nn.Module,
    batches: list[Tensor],
    before: Callable[[int], None] = lambda step: None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step, inputs in enumerate(batches):
            before(step)
            optimizer.zero_grad()
            loss = labels(model(inputs))
            with cockpit(step, loss=loss):
                loss.backward()
            optimizer.step()


@pytest.mark.parametrize("network", [Sorted, Positions])
def test_is_remembered_for_steps_of_the_same_shapes(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    shape = (4, 4) if network is Sorted else (4, 4, 3)
    model = network().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    batches = [randn(*shape) for _ in range(4)]
    tracked(cockpit, model, batches)
    refused = {"inner.weight", "inner.bias"} if network is Sorted else set()
    everything = set(cockpit.parameters)
    assert all(covered(cockpit, step) == everything - refused for step in range(4))


def test_other_shapes_are_looked_at_anew() -> None:
    torch.manual_seed(0)
    model = PositionBias().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    tracked(cockpit, model, [randn(n, 4, 3) for n in (5, 4, 5, 4)])
    missing = [len(cockpit.parameters) - len(covered(cockpit, step)) for step in range(4)]
    assert missing == [0, 2, 0, 2]


class CountedPasses(torch.autograd.Function):
    """The identity; counts backward passes."""

    count = 0

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        CountedPasses.count += 1
        return gradient


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(CountedPasses.apply(self.inner(x).tanh()))


def test_takes_ever_fewer_passes_more() -> None:
    """At the first, second, fourth, ... step of the same shapes."""
    torch.manual_seed(0)
    model = Counting().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    CountedPasses.count = 0
    tracked(cockpit, model, [randn(5, 4) for _ in range(9)])
    assert CountedPasses.count == 9 + 4


def test_what_is_unfrozen_is_asked_of_at_once() -> None:
    torch.manual_seed(0)
    model = Counting().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])

    def freeze(step: int) -> None:
        model.inner.requires_grad_(step > 5)

    CountedPasses.count = 0
    tracked(cockpit, model, [randn(5, 4).requires_grad_() for _ in range(7)], freeze)
    assert CountedPasses.count == 7 + 1  # the looks before had no reason to come here


def test_an_expert_is_refused_at_steps_that_give_it_n_tokens() -> None:
    torch.manual_seed(0)
    model = Experts().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    taken = [3, 4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step, count in enumerate(taken):
            model.taken = count
            loss = labels(model(randn(4, 6, 3)))
            with cockpit(step, loss=loss):
                loss.backward()
    reasons = [cockpit.history.coverage("NormTest", step).missing for step in range(3)]
    assert [r["experts.0.weight"] == MIXED for r in reasons] == [False, True, False]
    assert all("experts.0.weight" in r for r in reasons)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 2.0**16])
def test_in_low_precision(dtype: torch.dtype, factor: float) -> None:
    """Nothing is refused because of rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU())
    model = gradlens.extend(model.append(nn.Linear(64, 10)).to(dtype))
    loss = F.cross_entropy(model(torch.randn(64, 32, dtype=dtype)).float(), torch.arange(64) % 10)
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        (loss * factor).backward()
    assert len(gradients) == 6


def test_backward_on_another_loss() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(mlp().double())
    outputs = model(randn(5, 4))
    loss = labels(outputs)
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        (loss + outputs.square().mean()).backward()
    assert not gradients
    with pytest.raises(KeyError, match="another loss"):
        gradients["0.weight"]


def test_a_regulariser_beside_the_loss_does_no_harm() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(mlp().double())
    loss = labels(model(randn(5, 4))) + sum(p.square().sum() for p in model.parameters())
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert len(gradients) == 4


def test_leaves_no_trace() -> None:
    """Neither in gradients, buffers and random numbers, nor in how the training goes on."""
    torch.manual_seed(0)
    model = gradlens.extend(
        nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    )
    loss = labels(model(torch.randn(6, 4)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with gradlens.individual_gradients(model, loss=loss):
        assert all(parameter.grad is None for parameter in model.parameters())
        loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)) % 2 + 1
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][0][-1])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.head = nn.EmbeddingBag(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        indices = x.abs().long() % 7
        return self.head(self.bags(indices.flatten(), torch.arange(len(x)) * x[0].numel()))


@pytest.mark.parametrize(
    ("network", "parameter", "reason"),
    [(Packed, "recurrent.bias_hh_l0", "packed"), (Bags, "bags.weight", "offsets")],
)
def test_calls_without_an_axis_of_samples(
    network: type[nn.Module], parameter: str, reason: str
) -> None:
    torch.manual_seed(0)
    model = gradlens.extend(network().double())
    loss = labels(model(randn(5, 2, 4)))
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    with pytest.raises(KeyError, match=reason):
        gradients[parameter]
    assert {"head.weight", "head.bias"} <= set(gradients)


@pytest.mark.parametrize(
    "name", ["frames of films", "frames of films, time first", "windows", "twins"]
)
def test_orders_of_folded_samples_are_remembered(name: str) -> None:
    """Steps that take no look of their own find what one that does finds."""
    torch.manual_seed(0)
    network = WHOLE_NETWORKS[name]
    model = network.build().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    for step in range(3):
        batch = network.batch(4)
        loss = network.loss(model, batch, 4)
        with cockpit(step, loss=loss):
            loss.backward()
        assert not cockpit.history.coverage("NormTest", step).missing
    afresh = gradlens.Cockpit(model, [NormTest()])
    loss = network.loss(model, batch, 4)
    with afresh(2, loss=loss):
        loss.backward()
    assert cockpit.history["NormTest"][2] == pytest.approx(afresh.history["NormTest"][2], rel=1e-12)


def test_folded_samples_need_the_loss() -> None:
    torch.manual_seed(0)
    network = WHOLE_NETWORKS["frames of films"]
    model = gradlens.extend(network.build().double())
    loss = network.loss(model, network.batch(4), 4)
    with gradlens.individual_gradients(model) as gradients:
        loss.backward()
    with pytest.raises(KeyError, match="pass loss="):
        gradients["convolution.weight"]


def test_a_network_that_is_refused_altogether_does_not_stop_the_training() -> None:
    """Quantities are NaN with the reason, from the first step on."""
    torch.manual_seed(0)
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = [*gradlens.configuration("economy"), quantities.GradHist2d(), quantities.TICTrace()]
    cockpit = gradlens.Cockpit(model, tracked)
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(3):
            optimizer.zero_grad()
            outputs = model(randn(5, 4))
            loss = loss_function(outputs, torch.arange(5) % 3)
            with cockpit(step, loss=loss, optimizer=optimizer):
                (loss + outputs.square().mean()).backward()
            optimizer.step()
    for name in ("NormTest", "InnerTest", "GradHist1d", "GradHist2d", "Alpha"):
        assert "another loss" in cockpit.history[name][0].reason
    assert isinstance(cockpit.history["GradNorm"][2]["0.weight"], float)
    assert len(cockpit.history.coverage("NormTest", 0).missing) == 4
    plotter = gradlens.CockpitPlotter(secondary_screen=True)
    plotter.plot(cockpit, show_plot=False)


WITHOUT_BFLOAT16 = ("LSTM", "word model, LSTM", "bilinear")
"""Networks for which torch has no kernels under autocast on a processor."""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", WHOLE_NETWORKS)
def test_rounding_refuses_nothing(name: str, precision: str) -> None:
    if precision == "bfloat16" and name.startswith(WITHOUT_BFLOAT16):
        pytest.skip("torch has no kernel")
    torch.manual_seed(0)
    network = WHOLE_NETWORKS[name]
    model = gradlens.extend(network.build().float())
    batch = {
        key: value.float() if value.is_floating_point() else value
        for key, value in network.batch(6).items()
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = network.loss(model, batch, network.divisor(batch))
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert set(gradients) == {n for n, p in model.named_parameters() if p.requires_grad}


class Pairs(nn.Module):
    """Two towers whose outputs are compared both ways, at a learned temperature (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = nn.Linear(4, 5), nn.Linear(3, 5)
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        images, texts = self.images(x[:, :4]), self.texts(x[:, 4:])
        return F.normalize(images) @ F.normalize(texts).T * self.temperature.exp()


def test_towers_of_a_contrastive_network_are_covered() -> None:
    """By what flows through each sample's outputs; the parts add up to the gradient."""
    torch.manual_seed(0)
    model = gradlens.extend(Pairs().double())
    scores = model(randn(5, 7))
    targets = torch.arange(5)
    loss = (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name].mean(), parameter.grad)


def test_hooks_on_parameters_are_not_asked() -> None:
    """What the user does to a parameter's gradient isn't done to those of samples."""
    torch.manual_seed(0)
    model = gradlens.extend(mlp().double())
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: calls.append(1) or gradient.clamp(-1e-3, 1e-3))
    loss = labels(model(randn(5, 4)))
    with gradlens.individual_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert len(gradients) == len(calls) == 4


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh())
        self.first, self.head, self.reentrant = nn.Linear(4, 4), nn.Linear(5, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def trained(reentrant: bool, policy: BatchNormPolicy | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Checkpointed(reentrant).double()
    cockpit = None
    if policy is not None:
        cockpit = gradlens.Cockpit(model, [NormTest()], batchnorm=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for step in range(3):
            optimizer.zero_grad()
            loss = labels(model(randn(6, 4)))
            with nullcontext() if cockpit is None else cockpit(step, loss=loss):
                loss.backward()
            optimizer.step()
    return model, cockpit


@pytest.mark.parametrize("policy", ["coupled", "frozen", "skip"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_normalisation_inside_a_checkpoint(reentrant: bool, policy: BatchNormPolicy) -> None:
    """Running statistics are those of training without gradlens, whatever is looked at."""
    plain, _ = trained(reentrant, None)
    model, cockpit = trained(reentrant, policy)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    missing = cockpit.history.coverage("NormTest", 2).missing
    reasons = {
        ("frozen", False): "can't be frozen",
        ("frozen", True): "hides whether",
        ("skip", False): "in front of",
        ("skip", True): "hides whether",
    }
    if policy == "coupled":
        assert not missing
    else:
        assert reasons[policy, reentrant] in missing["first.weight"]
        assert not {"head.weight", "head.bias"} & set(missing)
    if reentrant:
        assert any("isn't tested" in note.text for note in cockpit.history.notes)
