"""The gradient of each sample in networks with unusual rows, or a reason why there is none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens.quantities import NormTest
from gradlens.samples.batchnorm import BatchNormPolicy
from tests.cases.random_layers import SEQUENCE_LAYERS
from tests.cases.references import assert_covered, per_sample_gradients_of_losses
from tests.cases.row_cases import ROW_CASES, Net, mlp, position_bias, randn
from tests.cases.steps import take_steps, tracked_backward
from tests.cases.whole_networks import BY_HAND, GENERATED


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows_of_samples(name: str) -> None:
    ROW_CASES[name].assert_right(steps=3)


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows_of_samples_of_a_model_that_was_never_extended(name: str) -> None:
    """Its calls aren't recorded, so some parameters have a reason instead of a gradient."""
    torch.manual_seed(0)
    case = ROW_CASES[name]
    model = case.model()
    batch = case.batch()
    with gradlens.per_sample_gradients(model, batch_size=case.batch_size) as gradients:
        case.loss(model, batch).backward()
    if not gradients:
        return
    assert gradients.batch_size == case.samples
    expected = case.reference(model, batch)
    for parameter in gradients:
        assert_close(gradients[parameter].dense(), expected[parameter])


def test_other_shapes_have_plans_of_their_own() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(position_bias().double())
    context = gradlens.per_sample_gradients(model)
    for samples in (5, 4, 5, 4, 1, 5):
        inputs, targets = randn(samples, 4, 5), torch.arange(samples) % 3
        assert_covered(
            model, F.cross_entropy(model(inputs), targets, reduction="none"), context=context
        )


def labels(outputs: Tensor) -> Tensor:
    return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[1])


@pytest.mark.filterwarnings("ignore:.*per-sample gradients cover")
def test_what_is_unfrozen_has_a_new_plan_at_once() -> None:
    torch.manual_seed(0)
    model = mlp().double()
    cockpit = gradlens.Cockpit(model, [NormTest()])
    for step in range(7):
        model[0].requires_grad_(step > 5)  # type: ignore[index]
        model.zero_grad()
        tracked_backward(cockpit, step, labels(model(randn(5, 5).requires_grad_())))
    assert cockpit.coverage().share == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 2.0**16])
def test_in_low_precision(dtype: torch.dtype, factor: float) -> None:
    """Nothing is refused because of rounding, and each row has its sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU())
    model = gradlens.extend(model.append(nn.Linear(64, 10)).to(dtype))
    outputs = model(torch.randn(64, 32, dtype=dtype)).float()
    losses = F.cross_entropy(outputs, torch.arange(64) % 10, reduction="none")
    loss = losses.mean()
    expected = per_sample_gradients_of_losses(losses, model)
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        (loss * factor).backward()
    assert gradients.keys() == expected.keys()
    for name in expected:
        difference = gradients[name].dense() - expected[name].float()
        assert difference.norm() < 0.03 * expected[name].float().norm()


def test_outputs_that_are_overwritten_after_the_call() -> None:
    torch.manual_seed(0)
    model = gradlens.extend(nn.Linear(4, 4).double())
    outputs = model(randn(2, 3, 4))
    outputs.mul_(0.5)
    outputs[..., 0] = 0
    assert_covered(model, outputs.square().mean((1, 2)))


@pytest.mark.parametrize("batch_size", [4.0, 0, "4"])
def test_a_batch_size_that_is_no_number_of_samples(batch_size: Any) -> None:
    model = gradlens.extend(mlp().double())
    with gradlens.per_sample_gradients(model, batch_size=batch_size) as gradients:
        labels(model(randn(4, 5))).backward()
    with pytest.raises(KeyError, match="pass the number of samples as an int"):
        gradients["0.weight"]


NETWORKS = BY_HAND | GENERATED


ROUNDED = [
    name
    for name, each in NETWORKS.items()
    if (each.kind == "by hand: images" or name in SEQUENCE_LAYERS or name.startswith("translation"))
    and not name.startswith(("regions", "lstm with projections", "orthogonal"))
]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_refuses_nothing(name: str, precision: str) -> None:
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = gradlens.extend(network.build().float())
    batch = {
        key: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in network.batch().items()
    }
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = network.loss(model, batch)
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"torch has no kernel: {error}")
    batch_size = network.samples if network.told else None
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=batch_size) as gradients:
        loss.backward()
    assert set(gradients) == {n for n, p in model.named_parameters() if p.grad is not None}


class ClipsItsGradient(torch.autograd.Function):
    """Backward isn't linear in what comes in."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / gradient.norm()


def test_gradients_that_are_clipped_on_the_way_are_refused() -> None:
    torch.manual_seed(0)
    clips = Net(lambda net, x: ClipsItsGradient.apply(x))
    model = gradlens.extend(nn.Sequential(nn.Linear(5, 4), clips, nn.Linear(4, 3)).double())
    loss = labels(model(randn(5, 5)))
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        loss.backward()
    assert set(gradients) == {"2.weight", "2.bias"}
    with pytest.raises(KeyError, match="isn't linear"):
        gradients["0.weight"]


class HasNaN(torch.autograd.Function):
    """Backward is linear, and its result is no number."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * float("nan")


def test_gradients_that_are_no_numbers_are_refused_for_that() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), Net(lambda net, x: HasNaN.apply(x)), nn.Linear(4, 3))
    with gradlens.per_sample_gradients(model.double()) as gradients:
        labels(model(randn(5, 5))).backward()
    with pytest.raises(KeyError, match="NaN"):
        gradients["0.weight"]


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
        take_steps(cockpit, optimizer, lambda _: labels(model(randn(6, 4))), optimizer=None)
    return model, cockpit


FRONT = {"first.weight", "first.bias", "inner.0.weight", "inner.0.bias"}


@pytest.mark.parametrize("policy", ["coupled", "frozen", "skip"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_normalisation_inside_a_checkpoint(reentrant: bool, policy: BatchNormPolicy) -> None:
    """Running statistics are those of training without gradlens, whatever is run again."""
    plain, _ = trained(reentrant, None)
    model, cockpit = trained(reentrant, policy)
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    missing = cockpit.history.coverage("NormTest", 2).missing
    if reentrant:
        assert set(missing) == FRONT | {"inner.1.weight", "inner.1.bias"}
        assert all("pass use_reentrant=False" in reason for reason in missing.values())
    elif policy == "skip":
        assert set(missing) == FRONT
        assert all("in front of a normalisation" in reason for reason in missing.values())
    elif policy == "frozen":  # which takes a pass of gradlens's own
        assert set(missing) == FRONT
        assert all("would have to be recomputed" in reason for reason in missing.values())
    else:
        assert not missing


def test_a_part_of_one_sample_is_its_own() -> None:
    """Changing p.grad afterwards changes nothing."""
    model = gradlens.extend(nn.Linear(3, 2))
    loss = model(torch.randn(1, 3)).square().mean()
    with gradlens.per_sample_gradients(model, loss=loss) as gradients:
        loss.backward()
    before = {name: gradients[name].dense().clone() for name in gradients}
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    assert all(torch.equal(gradients[name].dense(), before[name]) for name in before)
    assert all(bool(each.any()) for each in before.values())


def test_selected_rows_that_are_not_finite() -> None:
    """The indices say which rows they are, whatever the numbers are."""
    torch.manual_seed(0)
    model = gradlens.extend(nn.Sequential(nn.Embedding(13, 4), nn.Tanh(), nn.Linear(4, 3)))
    words, mask = torch.arange(12).reshape(4, 3), torch.zeros(4, 3, dtype=torch.bool)
    mask[[0, 0, 1, 2, 3], [0, 2, 1, 2, 0]] = True
    with torch.no_grad():
        model[0].weight[0] = torch.nan
    outputs = model[2](model[1](model[0](words))[mask])
    loss = F.cross_entropy(outputs, torch.tensor([0, 1, 2, 0, 1]))
    with gradlens.per_sample_gradients(model, loss=loss, batch_size=4) as gradients:
        loss.backward()
    assert len(gradients) == 3
    bad = gradients["2.weight"].dense().isnan().flatten(1).any(1)
    assert bad.tolist() == [True, False, False, False]
