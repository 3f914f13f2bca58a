"""HessTrace, TICDiag and TICTrace against dense matrices, wherever their diagonals come from."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import backpack
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from backpack.extensions import DiagHessian
from torch import Tensor, nn

import gradlens
from gradlens import Cockpit, History, quantities
from gradlens.curvature import factors
from gradlens.curvature.factors import drawing
from gradlens.curvature.hessian import GGNOperator
from gradlens.history.undefined import Undefined
from gradlens.numerics.unavailable import UnavailableError
from tests.cases.curvature_cases import SquareOnce
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

pytestmark = pytest.mark.filterwarnings("ignore:.*is estimated, by Hutchinson")
INPUT_WITHOUT_GRADIENT = "ignore:Full backward hook is firing"
"""Torch's warning on BackPACK's hooks where the network's input needs no gradient."""

N = 6
KINDS = ("diag_h", "diag_ggn_exact", "diag_ggn_mc")
FIRST = torch.tensor([0])


@dataclass(frozen=True)
class Problem:
    """A model in float64, and how a step goes: outputs from it, and a loss from these.

    A loss that is a sum has its matrix divided by ``samples``. ``passed`` says whether the user
    passes the outputs to the context, and ``info`` is what else is passed.
    """

    model: nn.Module
    outputs: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]
    reduction: Any = "mean"
    samples: int = N
    passed: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def track(
        self, *tracked: quantities.Quantity, steps: int = 1, given: Any = None, **info: Any
    ) -> History:
        """The history of a cockpit that is given the model, or something else."""
        cockpit = Cockpit(given or self.model, tracked, loss_reduction=self.reduction)
        for step in range(steps):
            outputs = self.outputs()
            passed = {"outputs": outputs} if self.passed else {}
            tracked_backward(cockpit, step, self.loss(outputs), info=passed | self.info | info)
            self.model.zero_grad()
        return cockpit.history

    def records(self, steps: int = 1, **settings: Any) -> list[Any]:
        """Of HessTrace, which draws other numbers at each step."""
        found = self.track(quantities.HessTrace(**settings), steps=steps)["HessTrace"]
        return list(found.values())

    def diagonal(self, kind: str) -> Tensor:
        """``[D]``, of the Hessian or the Gauss-Newton matrix of the mean loss."""
        outputs = self.outputs()
        if kind == "diag_h":
            slopes = torch.autograd.grad(
                self.loss(outputs),
                [*self.parameters.values()],
                create_graph=True,
                materialize_grads=True,
            )
            diagonal = self.rows(torch.cat([each.flatten() for each in slopes])).diagonal()
        else:
            jacobian = self.rows(outputs.flatten())
            hessian: Any = torch.autograd.functional.hessian(
                lambda z: self.loss(z.reshape(outputs.shape)), outputs.detach().flatten()
            )
            diagonal = (jacobian.T @ hessian @ jacobian).diagonal()
        return diagonal / (self.samples if self.reduction == "sum" else 1)

    def rows(self, entries: Tensor) -> Tensor:
        """Gradients of some numbers, by one backward pass for each."""
        rows = [
            torch.autograd.grad(
                entry, [*self.parameters.values()], retain_graph=True, materialize_grads=True
            )
            if entry.requires_grad
            else [torch.zeros_like(p) for p in self.parameters.values()]
            for entry in entries
        ]
        return torch.stack([torch.cat([each.flatten() for each in row]) for row in rows])

    def traces(self, kind: str) -> dict[str, float]:
        """Of the whole matrix, whose name is empty, and of each parameter's block."""
        diagonal = self.diagonal(kind)
        parts = diagonal.split([p.numel() for p in self.parameters.values()])
        blocks = zip(self.parameters, parts, strict=True)
        return {"": float(diagonal.sum())} | {name: float(part.sum()) for name, part in blocks}


def by_name(record: dict[str, Any]) -> dict[str, Any]:
    return {"": record, **record["parameters"]}


# Networks, of which each maps [N, 4] to [N, 3] ---------------------------------------------------


def two(
    compute: Callable[[Any, Tensor], Any], **more: Callable[[], Any]
) -> Callable[[], nn.Module]:
    """A network of two linear layers, and more."""

    def build() -> nn.Module:
        others = {name: make() for name, make in more.items()}
        return Net(compute, first=nn.Linear(4, 4), last=nn.Linear(4, 3), **others)

    return build


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def perceptron(width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, width))


def convolution(*more: nn.Module) -> nn.Module:
    layers = nn.Conv2d(1, 2, 2, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *layers, *more, nn.Linear(2, 3))


def relu(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), *more, nn.Linear(5, 3))


def shared() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(4, 3), layer, nn.ReLU(), layer)


def untrained() -> nn.Module:
    """Its gradients are sparse: of zeros and ones behind dropout."""
    first = nn.Linear(4, 5)
    nn.init.zeros_(first.weight)
    nn.init.zeros_(first.bias)
    return nn.Sequential(first, nn.Dropout(0.5), nn.Linear(5, 3))


def positions() -> nn.Module:
    """Adds a vector for each position, the same for all samples, as language models do."""

    def compute(net: Any, x: Tensor) -> Tensor:
        embedded = net.words(x[..., None]) + net.positions(torch.arange(4)[None])
        return net.head(torch.tanh(embedded * net.scale).mean(1))

    layers = {"positions": nn.Embedding(4, 3), "head": nn.Linear(3, 3)}
    return Net(compute, words=nn.Linear(1, 3), scale=nn.Parameter(torch.randn(3)), **layers)


PIECEWISE_LINEAR: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(4, 3),
    "ReLU in place": relu,
    "convolution": convolution,
    "circular padding": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 2, 3, padding=1, padding_mode="circular"),
        nn.Flatten(),
        nn.Linear(8, 3),
    ),
    "frozen layer": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3)
    ),
    "user's module": lambda: nn.Sequential(nn.Linear(4, 3), Doubling()),
    "parametrised": lambda: nn.Sequential(
        nn.utils.parametrize.register_parametrization(nn.Linear(4, 3), "weight", Doubling())
    ),
    "normalised": two(
        lambda net, x: net.last(torch.relu(net.norm(net.first(x))) + x),
        norm=lambda: nn.BatchNorm1d(4).eval(),
    ),
}
CURVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "nested sigmoid": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Sequential(nn.Linear(4, 5), nn.Sigmoid()), nn.Linear(5, 3)
        ),
        "it has sigmoid",
    ),
    "residual": (
        two(
            lambda net, x: net.last(F.gelu(net.norm(net.first(x))) + x),
            norm=partial(nn.LayerNorm, 4),
        ),
        "it has native_layer_norm",
    ),
    "GELU": (lambda: nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 3)), "it has gelu"),
    "unused layer": (
        two(lambda net, x: net.last(x).tanh(), spare=lambda: nn.Linear(2, 2).requires_grad_(False)),
        "it has tanh",
    ),
    "positions": (positions, "it has tanh"),
    "weight used twice": (
        two(lambda net, x: net.last(F.linear(net.first(x).tanh(), net.first.weight).tanh())),
        "it has tanh",
    ),
    "BatchNorm": (
        lambda: nn.Sequential(
            nn.Linear(4, 5),
            nn.BatchNorm1d(5, track_running_stats=False),
            nn.Tanh(),
            nn.Linear(5, 3),
        ),
        "it has native_batch_norm",
    ),
    "instance normalisation": (
        lambda: nn.Sequential(
            nn.Linear(4, 12), nn.Unflatten(1, (3, 4)), nn.InstanceNorm1d(3), nn.Flatten()
        ),
        "it has native_batch_norm",
    ),
    "shared parameter": (shared, "a parameter is multiplied by itself"),
    "division": (
        two(lambda net, x: net.last(x) / net.scale, scale=lambda: nn.Parameter(torch.tensor(2.0))),
        "it has div",
    ),
}
"""Networks, and why the diagonal of their Hessian isn't known exactly."""
NETWORKS = PIECEWISE_LINEAR | {name: build for name, (build, _) in CURVED.items()}
LOSSES: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "cross-entropy": (nn.CrossEntropyLoss, lambda: torch.randint(3, (N,))),
    "squared error": (nn.MSELoss, lambda: torch.randn(N, 3).double()),
    "binary": (nn.BCEWithLogitsLoss, lambda: torch.randint(2, (N, 3)).double()),
    "smoothed": (partial(nn.CrossEntropyLoss, label_smoothing=0.2), lambda: torch.randint(3, (N,))),
}


def problem(
    network: str | Callable[[], nn.Module] = "ReLU in place",
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross-entropy",
    reduction: str = "mean",
    factor: float = 1.0,
    first: float | None = None,
    **settings: Any,
) -> Problem:
    """With a loss of ``LOSSES``, or with one of outputs and labels.

    All numbers of the ``first`` sample may be the same one.
    """
    torch.manual_seed(0)
    model = (NETWORKS[network] if isinstance(network, str) else network)().double()
    kind, targets = LOSSES[loss if isinstance(loss, str) else "cross-entropy"]
    x, y = torch.randn(N, 4).double(), targets()
    x = x if first is None else x.index_fill(0, FIRST, first)
    function = gradlens.extend(kind(reduction=reduction)) if isinstance(loss, str) else loss

    def outputs() -> Tensor:
        torch.manual_seed(5)  # for the same units that dropout leaves out
        found: Tensor = model(x)
        return found

    def loss_of(z: Tensor) -> Tensor:
        found: Tensor = function(z, y)
        return found if factor == 1 else factor * found

    return Problem(model, outputs, loss_of, reduction, **settings)


# Problems ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A problem, by which method its traces are computed, and what a note on that says."""

    build: Callable[[], Problem]
    methods: dict[str, str]
    note: str = ""


LINEAR = {"diag_h": "exact", "diag_ggn_exact": "exact", "diag_ggn_mc": "Monte Carlo"}
EXACT, SAMPLED = {"diag_ggn_exact": "exact"}, {"diag_ggn_mc": "Monte Carlo"}
GAUSS_NEWTON = EXACT | SAMPLED
COUPLED = {"diag_ggn_exact": "Hutchinson"}


def extended(kind: Any, **settings: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss module of the outputs and labels."""
    module = gradlens.extend(kind(**settings))
    return lambda z, y: module(z, y)


CRITERION = nn.CrossEntropyLoss()
CROSS_ENTROPY, NLL = extended(nn.CrossEntropyLoss), extended(nn.NLLLoss)
SQUARED_ERROR = extended(nn.MSELoss)
CONVEX: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a function": F.cross_entropy,
    "with a penalty": lambda z, y: CROSS_ENTROPY(z, y) + 1e-3 * z.square().sum(),
    "of a multiple": lambda z, y: CROSS_ENTROPY(3 * z, y),
    "reduced by hand": lambda z, y: extended(nn.CrossEntropyLoss, reduction="none")(z, y).mean(),
    "ignored targets": lambda z, y: CROSS_ENTROPY(z, y.index_fill(0, FIRST, -100)),
    "weighted": extended(nn.CrossEntropyLoss, weight=torch.tensor([0.2, 0.9, 0.4]).double()),
    "of log-probabilities": lambda z, y: NLL(z.log_softmax(1), y),
}


def of_parameter(network: Callable[[], nn.Module], name: str, fill: float | None) -> Problem:
    """With a penalty on a parameter, which may be zero."""
    found = problem(network)
    parameter: Any = found.model.get_parameter(name)
    if fill is not None:
        nn.init.constant_(parameter, fill)
    return replace(found, loss=lambda z: found.loss(z) + 0.1 * parameter.square().sum())


def two_batches(loss: Callable[..., Tensor], width: int = 3) -> Problem:
    """The model is called on both at once, and ``loss`` gets the outputs of each and targets."""
    torch.manual_seed(0)
    model, x = perceptron(width).double(), torch.randn(2 * N, 4).double()
    y = torch.randn(N, width).double()
    return Problem(model, lambda: model(x), lambda z: loss(*z.split(N), y))


def coupled() -> Problem:
    """Each sample stands in one of two losses."""
    torch.manual_seed(0)
    model = two(lambda net, x: net.last(torch.tanh(net.first(x)) + x))().double()
    x, y = torch.randn(12, 4).double(), torch.randint(3, (4,))
    loss = lambda z: F.cross_entropy(z[:4], y) + F.mse_loss(z[4:8], z[8:])  # noqa: E731
    return Problem(model, lambda: model(x), loss, passed=True)


def own_targets(targets: Tensor, loss: Callable[..., Tensor], width: int = 3) -> Problem:
    return problem(partial(perceptron, width), lambda z, _: loss(z, targets))


def tokens(is_flat: bool, **info: int) -> Problem:
    """[N, T, 4] to [N, T, 3], or with T folded into N; N is the number of samples, not of words."""
    torch.manual_seed(0)
    layers, loss = perceptron().double(), nn.CrossEntropyLoss(reduction="sum")
    model = nn.Sequential(layers, nn.Flatten(0, 1)) if is_flat else nn.Sequential(layers)
    x, y = torch.randn(4, 3, 4).double(), torch.randint(3, (12,))
    gradlens.extend(loss)
    outputs = lambda: model(x).reshape(-1, 3)  # noqa: E731
    return Problem(model, outputs, lambda z: loss(z, y), "sum", 4, info=info)


def texts(sees_texts: bool = False) -> Problem:
    """Logits of each word of three texts, one row after the other; words see those before them."""

    def compute(net: Any, words: Tensor) -> Tensor:
        x = net.words(words)
        x = x - x.mean(0) if sees_texts else x
        later = torch.ones(4, 4, dtype=torch.bool).triu(1)
        likeness = (net.query(x) @ net.key(x).mT).masked_fill(later, -torch.inf)
        return net.head(x + likeness.softmax(-1) @ x).flatten(0, 1)

    torch.manual_seed(0)
    attention = {"query": nn.Linear(4, 4), "key": nn.Linear(4, 4), "head": nn.Linear(4, 5)}
    model = Net(compute, words=nn.Embedding(5, 4), **attention).double()
    words, loss = torch.randint(5, (3, 4)), gradlens.extend(nn.CrossEntropyLoss())
    targets = words.roll(1, 1).flatten()
    return Problem(model, lambda: model(words), lambda z: loss(z, targets))


def at_a_time() -> Problem:
    """A network that is given a time without axes, as those of diffusion models are."""
    compute = lambda net, x, time: net.layer(torch.tanh(x + net.times(time)))  # noqa: E731
    build = lambda: Net(compute, layer=nn.Linear(4, 3), times=nn.Embedding(5, 4))  # noqa: E731
    found = problem(lambda: nn.ModuleList([build()]))
    model, x = found.model[0], torch.randn(N, 4).double()  # type: ignore[index]
    return replace(found, model=model, outputs=lambda: model(x, torch.tensor(2)))


def without_rows() -> Problem:
    model, x = nn.Linear(3, 1).double(), torch.randn(5, 3).double()
    return Problem(model, lambda: model(x).mean(), lambda z: (z - 1).square(), passed=True)


CASES: dict[str, Case] = {
    f"{network}, {loss}, {reduction}": Case(partial(problem, network, loss, reduction), methods)
    for network in NETWORKS
    for loss in LOSSES
    for reduction in ("mean", "sum")
    for methods in [EXACT | ({"diag_h": "exact"} if network in PIECEWISE_LINEAR else {})]
    if network in PIECEWISE_LINEAR or network in ("nested sigmoid", "residual", "unused layer")
}
CASES |= {
    name: Case(partial(problem, name), {"diag_h": "Hutchinson"}, note)
    for name, (_, note) in CURVED.items()
}
CASES |= {
    name: Case(partial(problem, loss=loss, passed=True), {"diag_h": "exact"})
    for name, loss in CONVEX.items()
}
CASES |= {
    "a factor": Case(partial(problem, "frozen layer", "squared error", factor=0.25), LINEAR),
    "dropout": Case(partial(problem, lambda: relu(nn.Dropout(0.4))), LINEAR),
    "convolution, dropout": Case(partial(problem, lambda: convolution(nn.Dropout(0.4))), LINEAR),
    "zeros into dropout": Case(partial(problem, untrained), LINEAR),
    "penalty of zero": Case(lambda: of_parameter(relu, "0.bias", 0.0), {"diag_h": "Hutchinson"}),
    "penalty beside the outputs that are passed": Case(
        lambda: replace(of_parameter(perceptron, "0.weight", None), passed=True),
        EXACT,
        "depends on 0.weight in other ways than .*doesn't enter",
    ),
    "weight used twice": Case(partial(problem, "weight used twice"), GAUSS_NEWTON),
    "samples that meet": Case(
        partial(problem, two(lambda net, x: net.last((h := net.first(x).tanh()) - h.mean(0)))),
        COUPLED | SAMPLED,
    ),
    "soft targets": Case(
        lambda: own_targets(2 * torch.rand(N, 3).double(), CROSS_ENTROPY), GAUSS_NEWTON
    ),
    "coupled samples": Case(coupled, dict.fromkeys(KINDS[1:], "Hutchinson")),
    # Its value is that of the loss module times the gradient there, as if it were linear.
    "function of the loss": Case(
        lambda: problem(
            perceptron, lambda z, y: 1 + ((f := CROSS_ENTROPY(z, y)) / f.detach()).log()
        ),
        {"diag_ggn_mc": "Hutchinson"},
    ),
    "mixed up": Case(
        lambda: problem(
            perceptron, lambda z, y: 0.3 * CROSS_ENTROPY(z, y) + 0.7 * CROSS_ENTROPY(z, y.flip(0))
        ),
        GAUSS_NEWTON,
    ),
    "mean and variance": Case(
        lambda: own_targets(
            torch.randn(N, 1).double(),
            lambda z, y: F.gaussian_nll_loss(z[:, :1], y, F.softplus(z[:, 1:])),
            2,
        ),
        COUPLED,
    ),
    "two batches": Case(
        lambda: two_batches(lambda one, other, y: SQUARED_ERROR(one, other)), COUPLED
    ),
    "two batches, one by a function": Case(
        lambda: two_batches(lambda one, other, y: SQUARED_ERROR(one, y) + F.mse_loss(other, y)),
        EXACT,
    ),
    "as of a discriminator": Case(
        lambda: two_batches(
            lambda one, other, y: SQUARED_ERROR(one, y / y) + SQUARED_ERROR(other, -y / y), 1
        ),
        GAUSS_NEWTON,
    ),
    # The network's first derivatives are enough.
    "once differentiable": Case(
        partial(problem, two(lambda net, x: SquareOnce.apply(net.last(net.first(x).tanh() + x)))),
        GAUSS_NEWTON,
    ),
    "with its loss": Case(
        lambda: problem(
            two(lambda net, x: net.last(net.first(x).tanh()), own=lambda: CRITERION), CRITERION
        ),
        GAUSS_NEWTON | {"diag_h": "Hutchinson"},
    ),
    "output of a module without rows": Case(
        partial(
            problem,
            two(
                lambda net, x: net.last(x) * net.scale(x),
                scale=lambda: Net(
                    lambda net, _: net.factor * 1.0, factor=nn.Parameter(torch.tensor(1.3))
                ),
            ),
        ),
        LINEAR,
    ),
    "texts": Case(partial(tokens, False), {"diag_h": "Hutchinson"} | EXACT),
    "texts, one after the other": Case(partial(tokens, True), {"diag_h": "Hutchinson"} | EXACT),
    "texts whose number is passed": Case(
        partial(tokens, True, batch_size=4), {"diag_h": "Hutchinson"} | EXACT
    ),
    "inputs without axes": Case(at_a_time, SAMPLED),
    "outputs without rows": Case(without_rows, {"diag_ggn_mc": "Hutchinson"}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*depends on 0.weight in other ways")
@pytest.mark.filterwarnings("ignore:.*per-sample gradients")
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, case in CASES.items() for kind in case.methods]
)
def test_traces_are_those_of_dense_matrices(name: str, kind: str) -> None:
    """Of the whole and of each parameter, at each step, and by the expected method."""
    case = CASES[name]
    built, method = case.build(), case.methods[kind]
    truths = built.traces(kind)
    history = built.track(quantities.HessTrace(curvature=kind, samples=100), steps=2)
    for found in history["HessTrace"].values():
        assert found["method"] == method
        assert by_name(found).keys() == truths.keys()
        for block, one in by_name(found).items():
            truth = truths[block]
            assert one["low"] <= one["trace"] <= one["high"]
            if method == "exact":
                assert one["low"] == one["high"]
                assert one["standard_error"] == 0
                assert one["trace"] == pytest.approx(truth, rel=1e-10, abs=1e-14)
            else:
                rounding = 1e-9 * abs(truths[""])
                assert abs(one["trace"] - truth) < 4.5 * one["standard_error"] + rounding
    notes = [note.text for note in history.notes]
    if case.note:
        assert any(re.search(case.note, note) for note in notes), notes
    else:
        assert method == "Hutchinson" or notes == []


def test_a_linear_loss_has_no_curvature() -> None:
    (found,) = problem("linear", lambda z, y: z.mean()).records()
    assert found["trace"] == found["standard_error"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", [perceptron, NETWORKS["residual"]])
@pytest.mark.slow
def test_autocast(network: Callable[[], nn.Module], kind: Any) -> None:
    torch.manual_seed(0)
    model, x, y = network(), torch.randn(N, 4), torch.randint(3, (N,))
    autocast = torch.autocast("cpu", torch.bfloat16)(model)
    low = Problem(model, lambda: autocast(x), lambda z: CROSS_ENTROPY(z.float(), y))
    (found,) = low.records(curvature=kind, samples=100)
    model.double()
    exact = Problem(model, lambda: model(x.double()), lambda z: F.cross_entropy(z, y))
    truth = exact.traces(kind)[""]
    assert abs(found["trace"] - truth) < 4.5 * found["standard_error"] + 0.03 * truth


# Draws ------------------------------------------------------------------------------------------

STEPS = 60
ONE_DRAW: Any = {"curvature": "diag_ggn_mc", "samples": 1}
DRAWN: dict[str, tuple[Callable[[], Problem], dict[str, int]]] = {
    **{
        f"{network}, {loss}": (partial(problem, network, loss), {})
        for network, loss in (
            *((each, "cross-entropy") for each in ("nested sigmoid", "convolution", "residual")),
            *((each, loss) for each in ("positions", "BatchNorm") for loss in LOSSES),
        )
    },
    "a factor": (partial(problem, "convolution", factor=0.5), {"sub_batch": 3}),
    "positions, a sum of some": (partial(problem, "positions", reduction="sum"), {"sub_batch": 3}),
    "positions, three draws": (partial(problem, "positions", reduction="sum"), {"samples": 3}),
    "BatchNorm, a sum of some": (partial(problem, "BatchNorm", reduction="sum"), {"sub_batch": 3}),
    "BatchNorm, three draws": (partial(problem, "BatchNorm", reduction="sum"), {"samples": 3}),
    "BatchNorm, all": (partial(problem, "BatchNorm", factor=0.5), {"sub_batch": 99}),
    "a part of the batch": (partial(problem, "nested sigmoid"), {"sub_batch": 4}),
    "ten draws": (partial(problem, "nested sigmoid"), {"samples": 10}),
    "ten draws, residual": (partial(problem, "residual", "squared error"), {"samples": 10}),
    "words": (texts, {}),
    "words of some texts": (texts, {"sub_batch": 2}),
    "words that see other texts": (partial(texts, True), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_sampled_traces_are_unbiased_and_their_intervals_hold_the_truth(name: str) -> None:
    """Of the whole and of each parameter, over steps that have seeds of their own."""
    build, settings = DRAWN[name]
    drawn = build()
    truths = drawn.traces("diag_ggn_exact")
    records = drawn.records(steps=STEPS, **ONE_DRAW | settings)
    assert all(record["method"] == "Monte Carlo" for record in records)
    for block, truth in truths.items():
        found = np.array([by_name(record)[block]["trace"] for record in records])
        # Of a bias before a normalisation, the block is zero but for rounding.
        error = 4.5 * found.std() / math.sqrt(STEPS) + 1e-12 * truths[""]
        assert abs(found.mean() - truth) < error, block
    holds = sum(record["low"] <= truths[""] <= record["high"] for record in records)
    assert holds >= (0.8 if name.startswith(("BatchNorm", "words")) else 0.88) * STEPS
    assert settings.get("samples", 1) < 10 or holds < STEPS, "intervals of many draws are narrow"
    spread = np.std([record["trace"] for record in records])
    error = math.sqrt(np.mean([record["standard_error"] ** 2 for record in records]))
    assert 0.8 * spread < error < 4 * spread


WEIGHTS = torch.tensor([1.0, 2.0, 4.0]).double()
WORD_WEIGHTS = torch.arange(1, 13).double() / 12
WORDS = (7 * torch.arange(60).reshape(2, 30) % 12).where(torch.arange(30) % 5 < 3, -100)
HESSIANS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "cross-entropy": ((2, 3), lambda z: F.cross_entropy(z, torch.tensor([0, 2]))),
    "weighted": ((2, 3), lambda z: F.cross_entropy(z, torch.tensor([0, 2]), WEIGHTS)),
    "squared error": ((2, 3), lambda z: F.mse_loss(z, torch.eye(3)[[0, 2]].double())),
    # Many outputs, some of which are ignored, so that no root can be computed.
    "words": ((2, 30, 12), lambda z: F.cross_entropy(z.mT, WORDS, WORD_WEIGHTS)),
    "words behind": ((2, 12, 30), lambda z: F.cross_entropy(z, WORDS, WORD_WEIGHTS)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HESSIANS)
def test_draws_have_the_losss_hessian_for_their_second_moment(name: str) -> None:
    torch.manual_seed(0)
    shape, loss = HESSIANS[name]
    outputs = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ggn = GGNOperator(loss(outputs), outputs, {"outputs": outputs})
    draw = drawing(ggn, np.random.default_rng(0))
    draws = torch.stack([draw() for _ in range(4000)]).flatten(1)
    probes = torch.randn(3, *shape).double()
    curved = torch.stack([ggn.loss_hessian_product(probe) for probe in probes]).flatten(1)
    found = (draws @ probes.flatten(1).T).T @ draws / len(draws)
    assert (found - curved).norm() < (0.1 if len(shape) == 2 else 0.5) * curved.norm()
    quadratic = (found * probes.flatten(1)).sum(1), (curved * probes.flatten(1)).sum(1)
    torch.testing.assert_close(*quadratic, rtol=0.1, atol=0.0)


def test_draws_of_many_outputs_that_depend_on_each_other_are_refused() -> None:
    outputs = torch.randn(2, 30, 12, dtype=torch.float64, requires_grad=True)
    ggn = GGNOperator(outputs.logsumexp(2).square().sum(), outputs, {"outputs": outputs})
    with pytest.raises(UnavailableError, match="more than 256"):
        drawing(ggn, np.random.default_rng(0))


def test_rows_that_are_not_coupled_are_samples_of_their_own() -> None:
    """Such as pairs that a model is called with together: an error between two would say little."""
    torch.manual_seed(0)
    layers, x, y = perceptron().double(), torch.randn(2, 8, 4).double(), torch.randint(3, (16,))
    flat = nn.Sequential(layers, nn.Flatten(0, 1))
    together, apart = (
        Problem(model, partial(model, given), lambda z: CROSS_ENTROPY(z, y)).records(**ONE_DRAW)[0]
        for model, given in ((flat, x), (layers, x.flatten(0, 1)))
    )
    assert together["method"] == apart["method"] == "Monte Carlo"
    for name in ("trace", "standard_error", "low", "high"):
        assert together[name] == pytest.approx(apart[name], rel=1e-12)


@pytest.mark.parametrize("meet", [False, True])
def test_each_structure_is_labelled_once(meet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all quantities together, and where samples meet, too: what was refused stays refused."""
    labelled: list[int] = []
    label = factors.plan_of_rows
    monkeypatch.setattr(
        factors,
        "plan_of_rows",
        lambda *given, **options: labelled.append(1) or label(*given, **options),
    )
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    if meet:
        model[1] = Net(lambda net, x: x - x.mean(0))
    kinds = [quantities.HessTrace, *([] if meet else [quantities.TICTrace])]
    cockpit = Cockpit(model, [kind(**ONE_DRAW) for kind in kinds])
    for step, (n, count) in enumerate([(6, 1), (6, 1), (4, 2), (6, 2), (6, 2), (6, 3)]):
        model[1] = nn.Sigmoid() if step == 5 else model[1]
        loss = CROSS_ENTROPY(model(torch.randn(n, 4)), torch.randint(3, (n,)))
        tracked_backward(cockpit, step, loss)
        assert len(labelled) == count
        assert cockpit.history["HessTrace"][step]["method"] == "Monte Carlo"


OPERATIONS = (torch.sigmoid, torch.tanh, torch.sin, lambda x: x - x.mean(0), lambda x: x[:3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(the loss doesn't depend on it|per-sample gradients)")
@pytest.mark.parametrize("kind", ["diag_ggn_exact", "diag_ggn_mc"])
@pytest.mark.parametrize("seed", range(5))
def test_values_of_networks_that_change_are_those_of_a_new_cockpit(seed: int, kind: Any) -> None:
    """In layers and operations, some of which occur twice, in what is frozen, and in samples."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)).double()
    kinds = (quantities.HessTrace, quantities.TICTrace, quantities.TICDiag)

    def values(cockpit: Cockpit, step: int) -> dict[str, Any]:
        z = x
        for layer, operation in zip(layers, operations, strict=True):
            z = operation(layer(z))
        model.zero_grad()
        tracked_backward(cockpit, step, CROSS_ENTROPY(z, y[: len(z)]), info={"outputs": z})
        return {name: cockpit.history[name][step] for name in cockpit.history.names}

    def new() -> Cockpit:
        return Cockpit(model, [each(curvature=kind, samples=3) for each in kinds])

    cockpit = new()
    layers, operations = source.choices([*model], k=3), source.choices(OPERATIONS[:3], k=3)
    for step in range(12):
        x, y = torch.randn(N, 4).double(), torch.randint(4, (N,))
        assert repr(values(cockpit, step)) == repr(values(new(), step))
        for layer in model:  # the last one that is used stays
            layer.requires_grad_(layer is layers[-1] or source.random() < 0.6)
        if step % 3 == 2:
            operations[source.randrange(3)] = source.choice(OPERATIONS)
            layers[0] = source.choice([*model])


# Takeuchi's criterion ---------------------------------------------------------------------------


def second_moments(case: Problem) -> Tensor:
    """Σₙgₙⱼ²/N ``[D]``."""
    z = case.outputs()
    (slopes,) = torch.autograd.grad(case.loss(z), z, retain_graph=True)
    rows = case.rows((z * slopes).sum(1)) * (N if case.reduction == "mean" else 1)
    return rows.square().mean(0)


@pytest.mark.slow
def test_takeuchis_criterion_of_many_draws() -> None:
    case = problem("linear", "squared error")
    options: Any = {"curvature": "diag_ggn_mc", "samples": 500, "epsilon": 1e-3}
    found = case.track(quantities.TICDiag(**options))["TICDiag"][0]
    expected = second_moments(case) / (case.diagonal("diag_ggn_mc") + 1e-3)
    assert found == pytest.approx(float(expected.sum()), rel=0.05)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("network", "kind"),
    [
        *((each, "diag_ggn_exact") for each in ("convolution", "frozen layer", "residual")),
        *(("ReLU in place", each) for each in KINDS),
    ],
)
@pytest.mark.parametrize("is_extended", [True, False])
def test_takeuchis_criterion(network: str, kind: Any, reduction: Any, is_extended: bool) -> None:
    """Also of parameters without their model, and a loss function that was never extended."""
    loss = partial(F.cross_entropy, reduction=reduction)
    case = problem(network, "cross-entropy" if is_extended else loss, reduction, passed=True)
    moments, diagonal = second_moments(case), case.diagonal(kind)
    kinds = quantities.TICDiag, quantities.TICTrace, quantities.HessTrace
    for epsilon in (1e-3, 1e-7):
        options: Any = {"curvature": kind}
        tracked = [each(**options, epsilon=epsilon) for each in kinds[:2]]
        given = case.model if is_extended else [*case.model.parameters()]
        found = case.track(*tracked, kinds[2](**options), given=given, batch_size=N)
        trace = found["HessTrace"][0]["trace"]
        if kind != "diag_ggn_mc":
            assert trace == pytest.approx(float(diagonal.sum()), rel=1e-10)
            expected = float((moments / (diagonal + epsilon)).sum())
            assert found["TICDiag"][0] == pytest.approx(expected, rel=1e-9)
        expected = float(moments.sum()) / (trace + epsilon)
        assert found["TICTrace"][0] == pytest.approx(expected, rel=1e-9)


def test_zero_gradients_and_one_sample() -> None:
    model, x = nn.Linear(4, 3).double(), torch.randn(1, 4).double()
    target = model(x).detach()
    case = Problem(model, partial(model, x), lambda z: SQUARED_ERROR(z, target))
    found = case.track(quantities.TICDiag(), quantities.TICTrace(), quantities.HessTrace())
    assert found["TICDiag"][0] == found["TICTrace"][0] == 0
    assert found["HessTrace"][0]["trace"] > 0


# What is undefined ------------------------------------------------------------------------------


def passing(change: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The problem and what is passed instead of its outputs."""
    case = problem("residual", F.cross_entropy)
    outputs = case.outputs()
    return {"case": replace(case, outputs=lambda: outputs), "outputs": change(outputs)}


UNDEFINED: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...], str]] = {
    "regulariser": (
        lambda: {"case": of_parameter(perceptron, "0.weight", None)},
        KINDS[1:],
        "depends on 0.weight in other ways",
    ),
    "NaN": (lambda: {"case": problem("residual", first=math.nan)}, KINDS[1:], "contains? NaN"),
    "NaN in a linear network": (
        lambda: {"case": problem("linear", "squared error", first=math.nan)},
        KINDS,
        "NaN",
    ),
    "outputs in a tuple": (lambda: passing(lambda z: (z,)), EXACT, "is a tuple: pass the one"),
    "outputs without a graph": (lambda: passing(Tensor.detach), EXACT, "have no graph"),
    "other outputs": (lambda: passing(Tensor.clone), EXACT, "doesn't depend on the outputs"),
    # The outputs are the logits that the model has returned, or there are none.
    "log-probabilities": (
        lambda: {"case": problem(lambda: nn.Sequential(perceptron(), nn.LogSoftmax(1)), NLL)},
        EXACT,
        "linear in what the model has returned.*the logits",
    ),
    "another batch size": (
        lambda: {"case": problem(perceptron, reduction="sum"), "batch_size": 60},
        ("diag_h",),
        "sum loss is divided by the number of samples: N = 60 by batch_size=, .* of shape .6, 3.",
    ),
}  # type: ignore[dict-item]


@pytest.mark.filterwarnings("ignore:.*(the samples' gradients don't add up|per-sample gradients)")
@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, case in UNDEFINED.items() for kind in case[1]]
)
def test_what_is_undefined_is_a_nan_with_a_reason(name: str, kind: Any) -> None:
    make, _, reason = UNDEFINED[name]
    given = make()
    tracked = [each(curvature=kind) for each in (quantities.HessTrace, quantities.TICDiag)]
    history = given.pop("case").track(*tracked, quantities.NormTest(), **given)
    for value in (history["HessTrace"][0], history["TICDiag"][0]):
        assert isinstance(value, Undefined)
        assert re.search(reason, value.reason)
        assert "\n" not in value.reason
    assert 0 in history["NormTest"]
    missing = history.coverage("NormTest", 0).missing.values()
    assert not any("samples meet" in each for each in missing)


def test_curvature_that_is_not_positive() -> None:
    """−(x²): concave in the outputs."""
    case = problem("linear", "squared error", factor=-1.0)
    history = case.track(quantities.TICDiag(), quantities.TICTrace(), quantities.NormTest())
    assert "not positive at 15 of 15 elements" in history["TICDiag"][0].reason
    assert "trace of the curvature is not positive" in history["TICTrace"][0].reason
    assert math.isfinite(history["NormTest"][0])


@pytest.mark.parametrize(
    ("kinds", "options", "reason"),
    [
        (("HessTrace", "TICDiag"), {"curvature": "diag"}, "curvature='diag' is none of 'diag_h', "),
        (
            ("HessTrace", "TICTrace"),
            {"curvature": "diag_ggn_mc", "sub_batch": 1},
            "sub_batch=1 is too few: use 2 or more",
        ),
        (("HessTrace",), {"samples": 1}, "samples=1 is too few: use 2 or more"),
    ],
)
def test_options_that_mean_nothing(kinds: tuple[str, ...], options: Any, reason: str) -> None:
    for kind in kinds:
        with pytest.raises(ValueError, match=reason):
            getattr(quantities, kind)(**options)


# Models that BackPACK has extended --------------------------------------------------------------


@pytest.mark.filterwarnings(INPUT_WITHOUT_GRADIENT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", ["frozen layer", "nested sigmoid"])
def test_a_model_extended_by_backpack_alone(network: str, kind: Any) -> None:
    """As in a program written for cockpit, which passes parameters; no hook of others runs."""
    loss_function = backpack.extend(nn.CrossEntropyLoss())
    case = problem(network, loss_function)
    model, gradients = backpack.extend(case.model), list[Tensor]()
    plain = problem(network)
    truth = plain.traces(kind)[""]
    cockpit = Cockpit(model.parameters(), [quantities.HessTrace(curvature=kind)])
    outputs = case.outputs()
    outputs.retain_grad()
    outputs.register_hook(gradients.append)
    loss = case.loss(outputs)
    leaf = outputs.detach().requires_grad_()
    (expected,) = torch.autograd.grad(plain.loss(leaf), leaf)
    with cockpit(0, loss=loss):
        assert not gradients
        loss.backward()
    assert len(gradients) == 1
    torch.testing.assert_close(outputs.grad, expected, rtol=0, atol=0)
    found = cockpit.history["HessTrace"][0]
    assert abs(found["trace"] - truth) <= 4.5 * found["standard_error"] + 1e-10 * truth
    is_exact = kind == "diag_ggn_exact" or (kind == "diag_h" and network == "frozen layer")
    assert (found["method"] == "exact") == is_exact


@pytest.mark.filterwarnings(INPUT_WITHOUT_GRADIENT)
@pytest.mark.parametrize("tracked", [[], [quantities.HessTrace()]])
def test_results_of_a_users_own_extension_stay(tracked: list[quantities.Quantity]) -> None:
    case = problem(perceptron, backpack.extend(nn.CrossEntropyLoss()))
    backpack.extend(case.model)
    truth = case.traces("diag_h")[""]
    loss = case.loss(case.outputs())
    with Cockpit(case.model, tracked)(0, DiagHessian(), loss=loss):
        loss.backward()
    found = sum(float(p.diag_h.sum()) for p in case.model.parameters())  # type: ignore[attr-defined]
    assert found == pytest.approx(truth, rel=1e-10)
