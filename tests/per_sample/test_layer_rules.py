"""Per-sample gradients by rules for layers, against one backward pass for each sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import gradlens
from gradlens import quantities, register_layer_rule
from gradlens.curvature import Probe
from gradlens.gradients import rules as node_rules
from gradlens.samples.batchnorm import BatchNormPolicy
from tests.cases.references import per_sample_gradients_of_losses
from tests.cases.row_cases import C, D, H, N, RowCase, cross_entropy, randn, vectors
from tests.cases.ruled_layers import (
    RULED_CASES,
    WRONG_RULES,
    Normalised,
    OwnLinear,
    once,
    own_linear,
    with_head,
)
from tests.cases.steps import tracked_backward

STEPS = 5
"""Each on other data."""


def assert_right(case: RowCase, rules: Any) -> None:
    """While there are rules."""
    with ExitStack() as stack:
        for module_class, rule in rules.items():
            stack.enter_context(register_layer_rule(module_class, rule))
        case.assert_right(STEPS)


class Applied:
    """How often a rule gave the gradients of a parameter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        by_layer_rule = node_rules._by_layer_rule

        def counting(found: Any) -> Any:
            self.count += 1
            return by_layer_rule(found)

        monkeypatch.setattr(node_rules, "_by_layer_rule", counting)


@pytest.mark.parametrize("name", RULED_CASES)
def test_layers_with_a_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RULED_CASES[name]
    applied = Applied(monkeypatch)
    assert_right(case.network, case.rules)
    assert (applied.count > 0) == case.applied


@pytest.mark.parametrize("name", WRONG_RULES)
def test_rules_with_an_error(name: str) -> None:
    """Only the parameters that they are wrong about are refused; backward goes on."""
    rule, refused, reason = WRONG_RULES[name]
    case = RowCase(with_head(once), vectors, cross_entropy, refused=refused, reason=reason)
    assert_right(case, {OwnLinear: rule})


def test_rules_are_applied_to_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = Applied(monkeypatch)
    data = [(randn(N, D), torch.randint(C, (N,)))]

    def trace() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(OwnLinear(D, H), nn.Tanh(), nn.Linear(H, C)).double()
        probe = Probe(data, nn.CrossEntropyLoss())
        found = quantities.HessTrace(on=probe, curvature="diag_ggn_exact")
        cockpit = gradlens.Cockpit(model, [found])
        tracked_backward(cockpit, 0, model(randn(N, D)).square().mean())
        return cockpit.history["HessTrace"][0]["trace"]

    expected = trace()
    assert not applied.count
    with register_layer_rule(OwnLinear, own_linear):
        assert trace() == pytest.approx(expected)
    assert applied.count


BATCHNORMS: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
    "behind": lambda: (OwnLinear(D, H), nn.BatchNorm1d(H)),
    "in front": lambda: (nn.Linear(D, D), nn.BatchNorm1d(D), OwnLinear(D, H)),
    "inside": lambda: (Normalised(D, H),),
}


def tracked(place: str, policy: BatchNormPolicy, rule: Any) -> gradlens.Cockpit:
    torch.manual_seed(0)
    layers = *BATCHNORMS[place](), nn.Tanh(), nn.Linear(H, C)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if rule is not None:
            stack.enter_context(register_layer_rule(OwnLinear, rule))
        model = nn.Sequential(*layers).double()
        cockpit = gradlens.Cockpit(model, [quantities.NormTest()], batchnorm=policy)
        for step in range(3):
            model.zero_grad()
            loss = F.cross_entropy(model(randn(N, D)), torch.arange(N) % C)
            tracked_backward(cockpit, step, loss)
    return cockpit


@pytest.mark.parametrize("policy", ["coupled", "frozen", "skip"])
@pytest.mark.parametrize("place", BATCHNORMS)
def test_with_a_normalisation(place: str, policy: BatchNormPolicy) -> None:
    """The same as without a rule, under each policy."""
    by_rule, automatic = tracked(place, policy, own_linear), tracked(place, policy, None)
    assert by_rule.coverage() == automatic.coverage()
    for step in range(3):
        found, expected = (each.history["NormTest"][step] for each in (by_rule, automatic))
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_low_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = with_head(once)().to(dtype)
    with register_layer_rule(OwnLinear, own_linear):
        outputs = gradlens.extend(model)(torch.randn(N, D, dtype=dtype)).float()
        losses = F.cross_entropy(outputs, torch.arange(N) % C, reduction="none")
        expected = per_sample_gradients_of_losses(losses, model)
        with gradlens.per_sample_gradients(model) as gradients:
            losses.mean().backward()
    assert gradients.keys() == expected.keys()
    for name in expected:
        difference = gradients[name].dense() - expected[name].float()
        assert difference.norm() < 0.03 * expected[name].float().norm()


class Watched(nn.Module):
    """A layer with parts that change when they run, beside what its outputs are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(H))
        self.norm = nn.BatchNorm1d(H, affine=False)
        self.dropout = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        outputs = x * self.scale
        self.dropout(self.norm(outputs.detach()))
        return outputs


def by_its_parts(module: Any, inputs: Any, grad_output: Tensor) -> dict[str, Tensor]:
    module.dropout(module.norm(inputs[0]))
    return {"scale": inputs[0] * grad_output}


@pytest.mark.filterwarnings("ignore:gradlens")
def test_layers_with_parts_that_change_when_they_run() -> None:
    """Neither checking a rule nor calling it changes buffers and random numbers, or runs hooks."""

    def trained(tracked: bool) -> list[Any]:
        torch.manual_seed(0)
        calls: list[str] = []
        model = nn.Sequential(nn.Linear(D, H), Watched(), nn.Linear(H, C))
        model[1].norm.register_forward_hook(lambda *_: calls.append("norm"))
        cockpit = gradlens.Cockpit(model, [quantities.NormTest()])
        for step in range(STEPS):
            loss = F.cross_entropy(model(torch.randn(N, D)), torch.arange(N) % C)
            with cockpit(step, loss=loss) if tracked else ExitStack():
                loss.backward()
        tensors = [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
        return [len(calls), torch.get_rng_state().tolist(), [each.tolist() for each in tensors]]

    def rule(module: Any, inputs: Any, grad_output: Tensor) -> dict[str, Tensor]:
        return {"scale": inputs[0] * grad_output}

    with register_layer_rule(Watched, rule):
        assert trained(True) == trained(False)
    with register_layer_rule(Watched, by_its_parts):
        assert trained(True)[1:] == trained(False)[1:]


def test_a_rule_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between forward and backward pass; the one before it is back then."""
    applied = Applied(monkeypatch)
    torch.manual_seed(0)
    model = with_head(once)().double()
    handle = register_layer_rule(OwnLinear, own_linear)
    gradlens.extend(model)
    for removed in (False, True):
        loss = F.cross_entropy(model(randn(N, D)), torch.arange(N) % C)
        if removed:
            handle.remove()
        with gradlens.per_sample_gradients(model) as gradients:
            loss.backward()
        assert len(gradients) == 5
        assert applied.count == 3


def test_the_latest_rule_of_a_class() -> None:
    case = RowCase(with_head(once), vectors, cross_entropy)
    with register_layer_rule(OwnLinear, WRONG_RULES["summed"][0]):
        assert_right(case, {OwnLinear: own_linear})


class RunsOnce(nn.Module):
    """Fails at its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, H))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.calls:
            raise RuntimeError("it was called before")
        self.calls.append(1)
        return x @ self.weight


def outer(module: Any, inputs: tuple[Any, ...], grad_output: Tensor) -> dict[str, Tensor]:
    return {"weight": inputs[0][:, :, None] * grad_output[:, None]}


def test_a_rule_that_can_not_be_checked() -> None:
    """Its layer fails when it is called once more."""
    with register_layer_rule(RunsOnce, outer):
        model = gradlens.extend(nn.Sequential(RunsOnce(), nn.Linear(H, C)))
        loss = F.cross_entropy(model(torch.randn(N, D)), torch.arange(N) % C)
        with gradlens.per_sample_gradients(model, loss=loss) as gradients:
            loss.backward()
    assert set(gradients) == {"1.weight", "1.bias"}
    with pytest.raises(KeyError, match="outer for RunsOnce can't be checked by autograd"):
        gradients["0.weight"]
