"""Sampled traces of the Gauss-Newton matrix against dense ones, and how often rows are labelled."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, quantities
from gradlens.curvature import factors
from gradlens.curvature.factors import drawing
from gradlens.curvature.hessian import GGNOperator
from gradlens.graph.graph import Graph
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.references import second_derivative
from tests.cases.steps import tracked_backward
from tests.curvature.test_diagonals import CURVED, LOSSES, PIECEWISE_LINEAR, SAMPLES, Case
from tests.curvature.test_diagonals_hard_cases import Centred

STEPS = 60
SAMPLED: Any = {"curvature": "diag_ggn_mc", "samples": 1}


def sampled(case: Case, steps: int = STEPS, **settings: Any) -> list[dict[str, Any]]:
    """A record for each of some steps, which have seeds of their own."""
    quantity = quantities.HessTrace(**{**SAMPLED, **settings})
    cockpit = Cockpit(case.model, [quantity], loss_reduction=case.reduction)
    for step in range(steps):
        loss = case.loss_function(case.model(case.inputs), case.targets) * case.factor
        tracked_backward(cockpit, step, loss, batch_size=SAMPLES)
    assert cockpit.history.notes == []
    return list(cockpit.history["HessTrace"].values())


def assert_unbiased(found: list[float], truth: float, size: float | None = None) -> None:
    """Within the error of the draws, and rounding errors of numbers of a ``size``."""
    values = torch.tensor(found, dtype=torch.float64)
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - truth) < 4.5 * error + 1e-12 * abs(
        truth if size is None else size
    )


class Positions(nn.Module):
    """Adds a vector for each position, the same for all samples, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Linear(1, 3), nn.Embedding(4, 3)
        self.scale, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 4] -> [N, 3]``."""
        embedded = self.words(x[..., None]) + self.positions(torch.arange(4)[None])
        return self.head(torch.tanh(embedded * self.scale).mean(1))


def normalised() -> nn.Module:
    """BatchNorm couples the samples."""
    normalise = nn.BatchNorm1d(5, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 5), normalise, nn.Tanh(), nn.Linear(5, 3))


NETWORKS = {**PIECEWISE_LINEAR, **CURVED, "positions": Positions, "BatchNorm": normalised}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "loss"),
    [
        *((each, "cross-entropy") for each in ("nested sigmoid", "convolution", "residual")),
        *((each, loss) for each in ("positions", "BatchNorm") for loss in LOSSES),
    ],
)
def test_every_blocks_trace_is_unbiased(network: str, loss: str) -> None:
    case = Case(NETWORKS[network], LOSSES[loss]("mean"))
    records = sampled(case)
    diagonal = case.ggn_diagonal()
    assert all(record["method"] == "Monte Carlo" for record in records)
    whole = float(diagonal.sum())
    assert_unbiased([record["trace"] for record in records], whole)
    for name, truth in case.blocks(diagonal).items():
        # Of a bias before a normalisation, the block is zero but for rounding.
        found = [record["parameters"][name]["trace"] for record in records]
        assert_unbiased(found, truth, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "reduction", "factor", "settings"),
    [
        ("convolution", "mean", 0.5, {"sub_batch": 3}),
        ("positions", "sum", 1.0, {"sub_batch": 3}),
        ("positions", "sum", 1.0, {"samples": 3}),
        ("BatchNorm", "mean", 0.5, {"sub_batch": 99}),
        ("BatchNorm", "sum", 1.0, {"sub_batch": 3}),
        ("BatchNorm", "sum", 1.0, {"samples": 3}),
    ],
)
def test_draws_sub_batches_and_sum_losses(
    settings: dict[str, int], reduction: str, factor: float, network: str
) -> None:
    case = Case(NETWORKS[network], nn.CrossEntropyLoss(reduction=reduction), factor)
    records = sampled(case, **settings)
    assert_unbiased([record["trace"] for record in records], float(case.ggn_diagonal().sum()))


@pytest.mark.slow
@pytest.mark.parametrize("sub_batch", [None, 4])
def test_intervals_of_one_draw_are_rather_too_wide(sub_batch: int | None) -> None:
    case = Case(CURVED["nested sigmoid"], nn.CrossEntropyLoss())
    truth = float(case.ggn_diagonal().sum())
    records = sampled(case, 100, sub_batch=sub_batch)
    assert sum(record["low"] <= truth <= record["high"] for record in records) >= 93
    values = torch.tensor([record["trace"] for record in records])
    errors = torch.tensor([record["standard_error"] for record in records])
    assert float(values.std()) < 1.1 * float(errors.square().mean().sqrt())


@pytest.mark.slow
def test_intervals_of_few_draws_where_samples_are_coupled() -> None:
    case = Case(normalised, nn.CrossEntropyLoss())
    truth = float(case.ggn_diagonal().sum())
    records = sampled(case, 100)
    assert sum(record["low"] <= truth <= record["high"] for record in records) >= 90


@pytest.mark.slow
def test_draws_have_the_losss_hessian_for_their_second_moment() -> None:
    """Of cross-entropy with weights, too, whose factor differs from sample to sample."""
    torch.manual_seed(0)
    outputs = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 2])
    for loss_of in (
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)),
        lambda o, t: nn.functional.mse_loss(o, nn.functional.one_hot(t, 3).double()),
    ):
        ggn = GGNOperator(loss_of(outputs, targets), outputs, {"outputs": outputs})
        draw = drawing(ggn, np.random.default_rng(0))
        draws = torch.stack([draw() for _ in range(4000)])
        moment = torch.einsum("sni,snj->nij", draws, draws) / len(draws)
        hessian = second_derivative(lambda o, f=loss_of: f(o, targets), outputs.detach())
        for n in range(2):
            expected = hessian[n, :, n]
            assert (moment[n] - expected).norm() < 0.08 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("axis", [1, 2])
def test_draws_of_many_outputs_with_a_weight_for_each_word(axis: int) -> None:
    """Of 2 x 30 words, some of which are ignored, so that no root can be computed."""
    torch.manual_seed(0)
    shape = (2, 30, 12) if axis == 2 else (2, 12, 30)
    outputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(12, (2, 30)).where(torch.rand(2, 30) < 0.6, -100)
    weights = torch.rand(12, dtype=torch.float64)

    def loss_of(o: Tensor) -> Tensor:
        return nn.functional.cross_entropy(o.mT if axis == 2 else o, targets, weights)

    ggn = GGNOperator(loss_of(outputs), outputs, {"outputs": outputs})
    draw = drawing(ggn, np.random.default_rng(0))
    probe = torch.randn(shape, dtype=torch.float64)
    curved = ggn.loss_hessian_product(probe)
    found = [draw() for _ in range(4000)]
    product = torch.stack([(each * probe).sum() * each for each in found]).mean(0)
    assert (product - curved).norm() < 0.5 * curved.norm()
    quadratic = torch.stack([(each * probe).sum().square() for each in found]).mean()
    assert float(quadratic) == pytest.approx(float((curved * probe).sum()), rel=0.1)


def test_draws_of_many_outputs_that_depend_on_each_other_are_refused() -> None:
    outputs = torch.randn(2, 30, 12, dtype=torch.float64, requires_grad=True)
    loss = outputs.logsumexp(2).square().sum()
    ggn = GGNOperator(loss, outputs, {"outputs": outputs})
    with pytest.raises(UnavailableError, match="more than 256"):
        drawing(ggn, np.random.default_rng(0))


class Texts(nn.Module):
    """Logits of each word of some texts, one row after the other; words see those before them."""

    def __init__(self, sees_texts: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.sees_texts = sees_texts

    def forward(self, words: Tensor) -> Tensor:
        """``[N, T] -> [N * T, 5]``."""
        x = self.words(words)
        if self.sees_texts:
            x = x - x.mean(0)
        later = torch.ones(words.shape[1], words.shape[1], dtype=torch.bool).triu(1)
        likeness = (self.query(x) @ self.key(x).mT).masked_fill(later, -torch.inf)
        output: Tensor = self.head(x + likeness.softmax(-1) @ x)
        return output.flatten(0, 1)


def traces_of_texts(model: nn.Module, words: Tensor, steps: int, **settings: Any) -> list[Any]:
    """Records of a loss with one row for each word."""
    loss_function = nn.CrossEntropyLoss()
    quantity = quantities.HessTrace(**{**SAMPLED, **settings})
    cockpit = Cockpit(model, [quantity], loss_function=loss_function)
    for step in range(steps):
        tracked_backward(cockpit, step, loss_function(model(words), words.roll(1, 1).flatten()))
    return list(cockpit.history["HessTrace"].values())


def trace_of_texts(model: nn.Module, words: Tensor) -> float:
    """The dense Gauss-Newton matrix's trace."""
    outputs = model(words)
    loss = nn.functional.cross_entropy(outputs, words.roll(1, 1).flatten())
    ggn = GGNOperator(loss, outputs, dict(model.named_parameters()))
    return float(np.trace(ggn @ np.eye(ggn.shape[0])))


@pytest.mark.parametrize("sub_batch", [None, 2])
@pytest.mark.slow
def test_words_of_a_text_are_one_sample_where_they_see_each_other(sub_batch: int | None) -> None:
    torch.manual_seed(0)
    model, words = Texts().double(), torch.randint(5, (3, 4))
    found = traces_of_texts(model, words, 2 * STEPS, sub_batch=sub_batch)
    assert {each["method"] for each in found} == {"Monte Carlo"}
    truth = trace_of_texts(model, words)
    assert_unbiased([each["trace"] for each in found], truth)
    # The errors that are given are those of the values.
    error = math.hypot(*(each["standard_error"] for each in found)) / math.sqrt(len(found))
    spread = float(torch.tensor([each["trace"] for each in found]).std())
    assert 0.8 * spread < error < 4 * spread


@pytest.mark.slow
def test_words_of_texts_that_see_each_other_are_drawn_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    labellings = Labellings(monkeypatch)
    model, words = Texts(sees_texts=True).double(), torch.randint(5, (3, 4))
    found = traces_of_texts(model, words, 2 * STEPS)
    assert_unbiased([each["trace"] for each in found], trace_of_texts(model, words))
    # Once by text, and once by word.
    assert labellings.count == 2


def test_rows_that_are_not_coupled_are_samples_of_their_own() -> None:
    """Such as pairs that a model is called with together: an error between two would say little."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    inputs = torch.randn(2, 8, 4, dtype=torch.float64)
    targets = torch.randint(3, (16,))

    def found(model: nn.Module, given: Tensor) -> dict[str, Any]:
        loss_function = nn.CrossEntropyLoss()
        cockpit = Cockpit(model, [quantities.HessTrace(**SAMPLED)], loss_function=loss_function)
        tracked_backward(cockpit, 0, loss_function(model(given), targets))
        return dict(cockpit.history["HessTrace"][0])

    together = found(nn.Sequential(layers, nn.Flatten(0, 1)), inputs)
    apart = found(layers, inputs.flatten(0, 1))
    assert together["method"] == apart["method"] == "Monte Carlo"
    for name in ("trace", "standard_error", "low", "high"):
        assert together[name] == pytest.approx(apart[name], rel=1e-12)


class AtATime(nn.Module):
    """A network that is given a time without axes, as those of diffusion models are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 3), nn.Embedding(5, 4)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``[N, 4] -> [N, 3]``."""
        return self.layer(torch.tanh(x + self.times(time)))


def test_inputs_without_axes_are_no_texts() -> None:
    torch.manual_seed(0)
    model, loss_function = AtATime(), nn.CrossEntropyLoss()
    cockpit = Cockpit(model, [quantities.HessTrace(**SAMPLED)], loss_function=loss_function)
    loss = loss_function(model(torch.randn(6, 4), torch.tensor(2)), torch.randint(3, (6,)))
    tracked_backward(cockpit, 0, loss)
    assert cockpit.history["HessTrace"][0]["method"] == "Monte Carlo"


@pytest.mark.filterwarnings("ignore:.*diag_ggn_mc is estimated")
def test_outputs_without_rows_have_a_trace_of_products() -> None:
    layer = nn.Linear(3, 1)
    cockpit = Cockpit(layer, [quantities.HessTrace(**SAMPLED)])
    output = layer(torch.randn(5, 3)).mean()
    tracked_backward(cockpit, 0, (output - 1).square(), info={"outputs": output})
    assert cockpit.history["HessTrace"][0]["method"] == "Hutchinson"


class Labellings:
    """Counts how often a graph's rows are labelled by their samples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        label = factors.plan_of_rows

        def counting(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return label(*arguments, **options)

        monkeypatch.setattr(factors, "plan_of_rows", counting)


def test_each_structure_is_labelled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    labellings = Labellings(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    trace, tic = quantities.HessTrace(**SAMPLED), quantities.TICTrace(**SAMPLED)
    cockpit = Cockpit(model, [tic, trace])

    def track(step: int, n: int) -> None:
        loss = loss_function(model(torch.randn(n, 4)), torch.randint(3, (n,)))
        tracked_backward(cockpit, step, loss)

    expected = [(6, 1), (6, 1), (4, 2), (6, 2), (6, 2), (6, 2)]
    for step, (n, count) in enumerate(expected):
        track(step, n)
        assert labellings.count == count, "for both quantities together"
    model[1] = nn.Sigmoid()
    track(len(expected), 6)
    assert labellings.count == 3


class SomeUsed(nn.Module):
    """Layers of which some are used, some of them twice, in random order."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.order = source.choices(range(6), k=3)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.layers[number](x).sigmoid()
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the loss doesn't depend on it")
@pytest.mark.parametrize("kind", ["diag_ggn_exact", "diag_ggn_mc"])
@pytest.mark.parametrize("seed", range(5))
def test_values_where_layers_are_frozen_and_thawed_are_those_of_a_new_cockpit(
    seed: int, kind: Any
) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    model = SomeUsed(source).double()
    loss_function = gradlens.extend(nn.CrossEntropyLoss())

    def new() -> Cockpit:
        kinds = (quantities.HessTrace, quantities.TICTrace, quantities.TICDiag)
        return Cockpit(model, [each(curvature=kind, samples=3) for each in kinds])

    def track(cockpit: Cockpit, step: int, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        model.zero_grad()
        tracked_backward(cockpit, step, loss_function(model(inputs), labels))
        return {name: cockpit.history[name][step] for name in cockpit.history.names}

    cockpit = new()
    for step in range(8):
        batch = torch.randn(SAMPLES, 4, dtype=torch.float64), torch.randint(4, (SAMPLES,))
        found = track(cockpit, step, *batch)
        assert found == track(new(), step, *batch)
        assert math.isfinite(found["TICTrace"])
        for number, layer in enumerate(model.layers):  # the last one that is used stays
            layer.requires_grad_(number == model.order[-1] or source.random() < 0.6)


def test_where_samples_meet_traces_are_sampled_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labellings = Labellings(monkeypatch)
    torch.manual_seed(0)
    model = Centred().double()
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    cockpit = Cockpit(model, [quantities.HessTrace(**SAMPLED)])
    for step in range(3):
        inputs = torch.randn(6, 4, dtype=torch.float64)
        tracked_backward(cockpit, step, loss_function(model(inputs), torch.randint(3, (6,))))
    records = cockpit.history["HessTrace"].values()
    assert [record["method"] for record in records] == ["Monte Carlo"] * 3
    assert all(record["standard_error"] > 0 for record in records)
    assert labellings.count == 1, "of three attempts: what was refused isn't tried again"


def square(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return second(torch.tanh(first(x)))


def test_structures_tell_operations_shapes_and_parameters_apart() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    parameters = dict(nn.ModuleList([first, second]).named_parameters())
    x = torch.randn(3, 3)
    graphs: list[Callable[[], Tensor]] = [
        lambda: square(x, first, second),
        lambda: square(x, second, first),
        lambda: square(x[:2], first, second),
        lambda: square(x, first, second).sin(),
        lambda: second(first(x).sigmoid()),
        lambda: second(torch.tanh(first(x)) + first(x)),
        lambda: second((hidden := torch.tanh(first(x))) + hidden.mean(0)),
    ]
    names = {id(parameter): name for name, parameter in parameters.items()}
    seen = [Graph(graph()).key(names) for graph in graphs]
    assert len(set(seen)) == len(graphs)
    assert seen == [Graph(graph()).key(names) for graph in graphs]


def test_criterion_of_a_sampled_trace() -> None:
    case = Case(PIECEWISE_LINEAR["convolution"], nn.CrossEntropyLoss())
    cockpit = case.track(
        quantities.TICTrace(epsilon=1e-3, **SAMPLED), quantities.HessTrace(**SAMPLED)
    )
    trace = cockpit.history["HessTrace"][0]["trace"]
    expected = float(case.second_moments().sum()) / (trace + 1e-3)
    assert cockpit.history["TICTrace"][0] == pytest.approx(expected, rel=1e-9)


def test_too_small_a_sub_batch_is_refused() -> None:
    for quantity in (quantities.HessTrace, quantities.TICTrace):
        with pytest.raises(ValueError, match="sub_batch=1 is too few: use 2 or more"):
            quantity(curvature="diag_ggn_mc", sub_batch=1)
    with pytest.raises(ValueError, match="samples=1 is too few: use 2 or more"):
        quantities.HessTrace(samples=1)
