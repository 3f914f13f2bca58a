"""Real training loops: scaled losses, micro-batches, mixed precision, checkpoints."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens import quantities
from gradlens.history.history import History
from gradlens.history.lines import number_lines
from gradlens.quantities import (
    CABS,
    Alpha,
    GradCovariance,
    GradHist1d,
    GradNoiseScale,
    GradNorm,
    InnerTest,
    Loss,
    MeanGSNR,
    NormTest,
    OrthoTest,
    Quantity,
    UpdateSize,
)
from tests.cases import random_networks
from tests.cases.processes import in_process_group
from tests.cases.records import assert_same_histories, assert_same_records
from tests.cases.steps import tracked_backward

N = 12


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.ReLU(True),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).to(dtype)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, 2, 6, dtype=dtype), torch.randint(3, (N,))


def tracked() -> list[Quantity]:
    return [
        Loss(),
        GradNorm(),
        NormTest(),
        InnerTest(),
        OrthoTest(),
        MeanGSNR(),
        GradCovariance(),
        GradHist1d(),
        GradNoiseScale(),
        CABS(),
        Alpha(),
        UpdateSize(),
    ]


def noise_by_part() -> list[Quantity]:
    """Noise by layer and by parameter, of every kind."""
    kinds = (NormTest, InnerTest, OrthoTest, MeanGSNR, GradNoiseScale)
    return [
        kind(by="layer" if place % 2 else "parameter", name=f"{kind.__name__} by part")
        for place, kind in enumerate(kinds)
    ]


def train(
    backward: Callable[..., None], reduction: Any = "mean", steps: int = 3, rate: float = 0.05
) -> gradlens.History:
    """``backward(cockpit, step, model, loss_function, optimizer, x, y)`` at each step."""
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loss_function = gradlens.extend(nn.CrossEntropyLoss(reduction=reduction))
    cockpit = gradlens.Cockpit(model, tracked(), loss_reduction=reduction)
    for step in range(steps):
        optimizer.zero_grad()
        backward(cockpit, step, model, loss_function, optimizer, x, y)
        optimizer.step()
    cockpit.close()
    return cockpit.history


def whole_batch(
    cockpit: Any, step: int, model: Any, loss_function: Any, optimizer: Any, x: Any, y: Any
) -> None:
    tracked_backward(cockpit, step, loss_function(model(x), y), optimizer=optimizer)


def test_curvature_is_that_of_the_last_micro_batch() -> None:
    model, (x, y) = network(), data()
    cockpit = gradlens.Cockpit(model, [quantities.HessMaxEV()])
    last = gradlens.Cockpit(network(), [quantities.HessMaxEV()])
    assert last.model is not None
    for part, more in ((slice(0, 6), True), (slice(6, 12), False)):
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with cockpit(0, loss=loss, accumulating=more):
                (loss / 2).backward()
    assert any("in parts" in str(one.message) for one in said)
    loss = nn.functional.cross_entropy(last.model(x[6:]), y[6:])
    tracked_backward(last, 0, loss)
    assert_same_histories(cockpit.history, last.history)


def test_curvature_of_a_part_isnt_compared_with_all_parts() -> None:
    found = {}
    for reduction in ("mean", "sum"):
        model, (x, y) = network(), data()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        tracked = [quantities.Stability(), quantities.TICDiag(), quantities.TICTrace()]
        cockpit = gradlens.Cockpit(model, tracked, loss_reduction=reduction)
        for part, more in ((slice(0, 7), True), (slice(7, 12), False)):
            loss = nn.functional.cross_entropy(model(x[part]), y[part], reduction=reduction)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tracked_backward(cockpit, 0, loss, optimizer=optimizer, accumulating=more)
        found[reduction] = cockpit.history["Stability"][0]
        for name in ("TICDiag", "TICTrace"):
            assert "curvature is that of one" in cockpit.history[name][0].reason
    assert math.isfinite(found["mean"]["sharpness"])
    assert "before all parts" in found["sum"].reason


def test_a_factor_of_the_loss_is_one_of_the_learning_rate() -> None:
    def three_times(
        cockpit: Any, step: int, model: Any, loss_function: Any, optimizer: Any, x: Any, y: Any
    ) -> None:
        loss = loss_function(model(x), y)
        with warnings.catch_warnings(), cockpit(step, loss=loss, optimizer=optimizer):
            warnings.simplefilter("ignore")
            (3 * loss).backward()

    found, expected = train(three_times), train(whole_batch, rate=0.15)
    for name in ("CABS", "Alpha", "NormTest"):
        assert_same_records(found[name], expected[name])


@dataclass(frozen=True)
class Trained:
    """Optimizers of parts of a network, of which one may be passed to the context.

    Inside the context, scalers are told of the first ``inside`` optimizers alone.
    """

    kinds: tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], ...]
    passed: int | None = 0
    inside: int = 2


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


TRAINED = {
    "one": Trained((sgd,)),
    "one that isn't passed": Trained((sgd,), None),
    "one that is fused": Trained((fused,)),
    "two": Trained((sgd, fused)),
    "two, of which the second is passed": Trained((sgd, fused), 1),
    "two that aren't passed": Trained((sgd, sgd), None),
    "two, of which the first is done inside": Trained((sgd, sgd), 0, 1),
    "two, of which the other is done inside": Trained((sgd, sgd), 1, 1),
}
STEPS_OF_A_SCALER: dict[str, Callable[[Any, Any], object]] = {
    "unscale": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip": lambda scaler, optimizer: nn.utils.clip_grad_norm_(
        optimizer.param_groups[0]["params"], 0.01
    ),
    "step": lambda scaler, optimizer: scaler.step(optimizer),
}


def trained_by_a_scaler(
    trained: Trained, inside: str, after: str, parts: int, enabled: bool
) -> gradlens.History:
    """The scale is multiplied by four at each update."""
    model, (x, y) = network(), data()
    scaler = torch.amp.GradScaler("cpu", 64.0, 4.0, growth_interval=1, enabled=enabled)
    parameters, several = [*model.parameters()], len(trained.kinds) > 1
    halves = (parameters[:2], parameters[2:]) if several else (parameters,)
    optimizers = [kind(half) for kind, half in zip(trained.kinds, halves, strict=True)]
    passed = None if trained.passed is None else optimizers[trained.passed]
    chosen = [
        *tracked(),
        quantities.GradientGeometry(),
        quantities.GradientActivation(threshold=1e-4),
        quantities.OutputGradientGeometry(),
        quantities.OutputGradientCovariance(),
    ]
    possible = [each for each in chosen if passed is not None or "optimizer" not in each.needs]
    cockpit = gradlens.Cockpit(model, possible)
    for step in range(2):
        model.zero_grad()
        for part in range(parts):
            rows = slice(part * N // parts, (part + 1) * N // parts)
            loss, more = nn.functional.cross_entropy(model(x[rows]), y[rows]), part < parts - 1
            with cockpit(step, loss=loss, optimizer=passed, scaler=scaler, accumulating=more):
                scaler.scale(loss / parts).backward()
                if not more:
                    for name in inside.split():
                        for optimizer in optimizers[: trained.inside]:
                            STEPS_OF_A_SCALER[name](scaler, optimizer)
        for optimizer in optimizers[trained.inside :]:
            for name in inside.split():
                STEPS_OF_A_SCALER[name](scaler, optimizer)
        for optimizer in optimizers:
            for name in after.split():
                STEPS_OF_A_SCALER[name](scaler, optimizer)
        scaler.update()
    cockpit.close()
    return cockpit.history


DONE = (
    ("", "unscale clip step"),
    ("unscale", "clip step"),
    ("unscale clip", "step"),
    ("unscale clip step", ""),
    ("step", ""),
    ("", "step"),
)
"""What is done inside of the context, and after it."""


@pytest.mark.parametrize(
    ("name", "inside", "after", "parts"),
    [(n, *done, 1 + (i + j) % 2) for i, n in enumerate(TRAINED) for j, done in enumerate(DONE)],
)
def test_values_are_those_without_a_scaler(name: str, inside: str, after: str, parts: int) -> None:
    """Whatever the scaler has done when the context is left."""
    settings = (TRAINED[name], inside, after, parts)
    found, expected = (trained_by_a_scaler(*settings, enabled) for enabled in (True, False))
    assert_same_histories(found, expected)
    assert [note.text for note in found.notes] == [note.text for note in expected.notes]
    for table in ("steps", "layers"):
        one, other = number_lines(found.facts[table]), number_lines(expected.facts[table])
        assert [*one] == [*other]
        for name, line in other.items():
            np.testing.assert_allclose(one[name].values, line.values, 1e-5, 1e-7, err_msg=name)


@pytest.mark.parametrize("after", ["", "unscale", "step"])
def test_the_norm_is_that_of_what_the_context_leaves(after: str) -> None:
    """Also where the scaler has started anew, with another scale."""
    model, (x, y) = network(), data()
    scaler = torch.amp.GradScaler("cpu", 1024.0, 4.0, growth_interval=1)
    optimizer, cockpit = sgd([*model.parameters()]), gradlens.Cockpit(model, [*tracked()])
    loss = nn.functional.cross_entropy(model(x), y)
    truth = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    with cockpit(0, loss=loss, optimizer=optimizer, scaler=scaler):
        scaler.scale(loss).backward()
        for name in after.split():
            STEPS_OF_A_SCALER[name](scaler, optimizer)
            scaler.update()
    norms = {
        name: float(g.norm()) for g, (name, _) in zip(truth, model.named_parameters(), strict=True)
    }
    assert cockpit.history["GradNorm"][0] == pytest.approx(norms, rel=1e-9)


def divided_by_the_framework(*sizes: int, scale: float = 1.0) -> Callable[..., None]:
    """Each part's loss is a mean that was multiplied by its share of the samples, and scaled.

    So do Lightning (equal parts) and the Trainer of transformers (a share of the tokens).
    """

    def backward(
        cockpit: Any, step: int, model: Any, loss_function: Any, optimizer: Any, x: Any, y: Any
    ) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1)
        parts = zip(x.split(sizes), y.split(sizes), strict=True)
        for place, (inputs, labels) in enumerate(parts):
            loss = scaler.scale(loss_function(model(inputs), labels) * (len(labels) / N))
            context = cockpit(
                step,
                loss=loss,
                loss_scale=scale / len(sizes),
                optimizer=optimizer,
                scaler=scaler,
                accumulating=place < len(sizes) - 1,
            )
            with context:
                loss.backward()
        scaler.unscale_(optimizer)

    return backward


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("sizes", [(12,), (6, 6), (4, 4, 4), (7, 5), (1, 9, 2)])
def test_a_loss_that_a_framework_has_divided(sizes: tuple[int, ...], scale: float) -> None:
    assert_same_histories(train(divided_by_the_framework(*sizes, scale=scale)), train(whole_batch))


DIVIDED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "divided": lambda loss, n: loss / (N / n),
    "multiplied by the share": lambda loss, n: (n / N) * loss,
    "multiplied and divided": lambda loss, n: loss * n / N,
}


@pytest.mark.parametrize("how", DIVIDED)
def test_losses_of_parts_that_were_divided_before_they_were_passed(how: str) -> None:
    """Values describe what was passed, and a warning says so, unless the factor is passed."""

    def backward(
        cockpit: Any, step: int, model: Any, loss_function: Any, optimizer: Any, x: Any, y: Any
    ) -> None:
        for inputs, labels in zip(x.split(7), y.split(7), strict=True):
            loss = DIVIDED[how](loss_function(model(inputs), labels), len(labels))
            scale = {"loss_scale": len(labels) / N} if is_passed else {}
            more = len(labels) == 7
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=more, **scale):
                loss.backward()

    is_passed = True
    assert_same_histories(train(backward), train(whole_batch))
    is_passed = False
    with pytest.warns(gradlens.GradlensWarning, match=r"loss_scale=1/4"):
        train(backward)


@pytest.mark.filterwarnings("ignore:.*the loss doesn't depend on it")
@pytest.mark.filterwarnings("ignore:.*backward was called on 8 times the loss")
@pytest.mark.parametrize("how", ["loss", "scaled loss and its scale", "scale", "nothing"])
@pytest.mark.parametrize("seed", range(6))
def test_whose_gradients_those_of_a_scaled_loss_are(seed: int, how: str) -> None:
    """Those of the loss, if its scale is known, or otherwise of what backward is called on."""
    source = random.Random(seed)
    drawn = random_networks.draw_recipe(source)
    refused = ("checkpointed", "dropout", "head on chosen tokens")  # or random
    while drawn.coupled or any(word in str(drawn) for word in refused):
        drawn = random_networks.draw_recipe(source)
    recipe = replace(drawn, samples=7)  # no other axis has as many entries
    scale = source.choice([1 / 4, 1 / 3, 8.0, -0.5])
    model = random_networks.build(recipe)
    batch = random_networks.draw_batch(model, 0)
    rows = random_networks.reference(model, batch)
    given = [GradCovariance(), GradNoiseScale()]
    cockpit = gradlens.Cockpit(model, given, loss_reduction=recipe.reduction)
    loss = model.batch_loss(batch)
    scaled = scale * loss
    told: dict[str, Any] = {
        "loss": {"loss": loss},
        "scaled loss and its scale": {"loss": scaled, "loss_scale": scale},
        "scale": {"loss_scale": scale},
        "nothing": {},
    }
    with cockpit(0, batch_size=recipe.samples, **told[how]):
        scaled.backward()
    covered = [rows[name] for name in rows if name not in cockpit.history.coverages[0].missing]
    assert covered
    spread = float(sum(each.var(0).sum() for each in covered))
    expected = spread * (scale**2 if how == "nothing" else 1)
    for quantity in ("GradCovariance", "GradNoiseScale"):
        found = cockpit.history[quantity][0]["trace"]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_divided_loss_is_no_scaled_one(dtype: torch.dtype) -> None:
    model, (x, y) = network(dtype), data(dtype)
    cockpit = gradlens.Cockpit(model, [NormTest()])
    tracked_backward(cockpit, 0, nn.functional.cross_entropy(model(x), y) / 3, loss_scale=1 / 3)
    assert not cockpit.history.notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Norms and products of half-precision factors are accumulated in float32."""
    model, (x, y) = network(torch.float32), data(torch.float32)
    cockpit = gradlens.Cockpit(model, [NormTest(), GradNoiseScale()])
    with torch.autocast("cpu", dtype):
        loss = nn.functional.cross_entropy(model(x), y)
    factors: dict[str, torch.dtype] = {}
    with cockpit(0, loss=loss), gradlens.per_sample_gradients(model, loss=loss) as g:
        loss.backward()
    factors = {name: operator.dtype for name, operator in g.items()}
    assert set(factors.values()) == {torch.float32}
    assert not cockpit.history.notes
    plain = network(torch.float32)
    exact = gradlens.Cockpit(plain, [NormTest(), GradNoiseScale()])
    loss = nn.functional.cross_entropy(plain(x), y)
    tracked_backward(exact, 0, loss)
    assert_same_histories(cockpit.history, exact.history, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_backward_and_the_optimizers_step_under_autocast(dtype: torch.dtype) -> None:
    """As in a training step that is run under autocast as a whole."""
    histories = []
    for inside in (False, True):
        model, (x, y) = network(torch.float32), data(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_function = nn.CrossEntropyLoss()
        given = [*tracked(), quantities.HessMaxEV(), quantities.InputGradientGeometry()]
        cockpit = gradlens.Cockpit(model, given, loss_function=loss_function)
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = loss_function(model(x), y)
            with torch.autocast("cpu", dtype, enabled=inside):
                tracked_backward(cockpit, step, loss, optimizer=optimizer)
                optimizer.step()
        cockpit.close()
        histories.append(cockpit.history)
    assert_same_histories(*histories, rtol=1e-6)


class Checkpointed(nn.Module):
    """``reentrant`` is ``None`` for no checkpoint at all."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).requires_grad_()
        if self.reentrant is None:
            x = self.inside(x)
        else:
            x = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return self.head(x * self.scale)


CHECKPOINTED = [NormTest, GradCovariance, GradNorm]


def with_checkpoint(model: Checkpointed, reentrant_says: str = "") -> gradlens.Cockpit:
    x, y = data()
    cockpit = gradlens.Cockpit(model.double(), [quantity() for quantity in CHECKPOINTED])
    for step in range(2):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        said = pytest.warns(match=reentrant_says) if reentrant_says and not step else nullcontext()
        with said, cockpit(step, loss=loss):
            loss.backward()
    return cockpit


def test_a_reentrant_checkpoint_hides_what_is_in_it() -> None:
    """No second backward pass is possible there. Behind it all is as it was."""
    cockpit = with_checkpoint(Checkpointed(True), "inside.0.weight.*pass use_reentrant=False")
    missing = cockpit.history.coverage("NormTest", 1).missing
    assert set(missing) == {f"inside.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}
    assert all("pass use_reentrant=False" in reason for reason in missing.values())
    behind, plain = Checkpointed(None), with_checkpoint(Checkpointed(None))
    behind.inside.requires_grad_(False)
    alone = with_checkpoint(behind)
    for name in ("NormTest", "GradCovariance"):
        assert_same_records(cockpit.history[name], alone.history[name])
    assert_same_records(cockpit.history["GradNorm"], plain.history["GradNorm"])


def of_some(
    model: nn.Sequential, names: Sequence[str], step: int, cockpit: gradlens.Cockpit
) -> None:
    """A step of an optimizer that leaves gradients of the other parameters as they are."""
    parameters = [model.get_parameter(name) for name in names]
    for parameter in parameters:
        parameter.grad = None
    tracked_backward(cockpit, step, model(torch.randn(5, 4)).square().mean())
    torch.optim.SGD(parameters, lr=0.1).step()


NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


@pytest.mark.parametrize("layer", ["0", "2"])
@pytest.mark.parametrize("change", ["frozen", "replaced"])
@pytest.mark.filterwarnings("ignore:.*(cover|the model doesn't have|not tracked)")
def test_gradients_of_layers_that_are_trained_no_more(layer: str, change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    tracked = [GradNorm(), NormTest(), quantities.Distance(), quantities.GradientGeometry()]
    cockpit = gradlens.Cockpit(model, tracked)
    of_some(model, NAMES, 0, cockpit)
    if change == "frozen":
        model.get_submodule(layer).requires_grad_(False)
    else:
        model[int(layer)] = copy.deepcopy(model[int(layer)])
    others = [name for name in NAMES if not name.startswith(layer)]
    of_some(model, others, 1, cockpit)
    found, coverage = cockpit.history, cockpit.history.coverage("NormTest", 1)
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if n in others}
    assert found["GradNorm"][1] == pytest.approx(norms)
    assert set(found["GradNorm"][0]) == set(NAMES)
    weight = f"{layer}.weight"
    geometry = found["GradientGeometry"][1]["parameters"][weight]
    if change == "frozen":
        assert coverage.share(found.parameters) == 1
        assert (set(coverage.frozen), dict(coverage.missing)) == ({*NAMES} - {*others}, {})
        assert str(cockpit.coverage()).count("none: it is frozen") == 2
        assert "frozen" in geometry.reason
        assert found["Distance"][1][weight] > 0
    else:
        assert coverage.share(found.parameters) < 1
        assert all("any more" in reason for reason in coverage.missing.values())
        assert "any more" in geometry.reason
        assert "any more" in found["Distance"][1][weight].reason


def test_one_process_has_the_whole_batch() -> None:
    """As without ``DistributedDataParallel``: the batch doesn't come in parts."""

    def history() -> History:
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        cockpit = gradlens.Cockpit(model, [quantities.TICTrace(curvature="diag_ggn_exact")])
        output = model(torch.randn(5, 4))
        tracked_backward(cockpit, 0, output.square().mean(), info={"outputs": output})
        return cockpit.history

    found = in_process_group(history)
    assert found["TICTrace"][0] > 0
    assert not found.notes


@pytest.mark.parametrize("dtypes", [("float32", "float64"), ("float64", "bfloat16")])
def test_correlations_of_steps_in_different_precisions(dtypes: tuple[str, str]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    tracked = [quantities.GradientGeometry(), quantities.UpdateGeometry()]
    cockpit = gradlens.Cockpit(model, tracked)
    gradients = []
    for step in range(2):
        model.to(getattr(torch, dtypes[step]))
        loss = model(torch.randn(5, 4).to(model.weight.dtype)).square().mean()
        model.zero_grad()
        tracked_backward(cockpit, step, loss)
        gradients.append(model.weight.grad.double().flatten())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    cockpit.close()
    expected = torch.nn.functional.cosine_similarity(*gradients, dim=0).item()
    found = cockpit.history["GradientGeometry"][1]["parameters"]["weight"]["correlation"]
    assert found == pytest.approx(expected, rel=1e-5)
    found = cockpit.history["UpdateGeometry"][1]["parameters"]["weight"]["correlation"]
    assert found == pytest.approx(expected, rel=0.05)


def test_distances_in_half_precision_have_the_digits_of_single() -> None:
    torch.manual_seed(0)
    model = nn.Linear(50, 20).bfloat16()
    start, cockpit = (
        model.weight.detach().double(),
        gradlens.Cockpit(model, [quantities.Distance()]),
    )
    with torch.no_grad():
        for step in range(2):
            with cockpit(step):
                pass
            model.weight.add_(torch.randn(20, 50))
    expected = (model.weight.detach().double() - start).norm().item()
    with cockpit(2):
        pass
    assert cockpit.history["Distance"][2]["weight"] == pytest.approx(expected, rel=1e-6)
