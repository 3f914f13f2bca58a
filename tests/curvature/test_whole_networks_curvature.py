"""The curvature of whole networks, unchanged, against dense Hessians in another formulation."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import gradlens
from benchmarks.zoo.check import without_dropout
from benchmarks.zoo.network import Batch, Network
from gradlens import quantities
from gradlens.curvature.differentiation import derivative, differentiable_gradient
from gradlens.curvature.hessian import HessianOperator
from tests.cases.references import without_hooks
from tests.cases.steps import tracked_backward
from tests.cases.whole_networks import BY_HAND, FAMILIES, GENERATED

CURVED = (
    *("Swin", "ViT, T = N", "layer: conv-transpose1d", "layer: conv2d, uneven"),
    *("bilinear, folded", "low rank, written into", "hypernetwork of each sample"),
    *("loss: token means", "loss: next token", "entry: frames"),
    *("lstm", "two lstms both ways", "gru, positions first", "rnn", "gru cells"),
    *("encoder layer", "encoder layer, positions first", "decoder layer", "attention by hand"),
    *("fused attention", "grouped queries", "attention with relative positions"),
    *("attention of shared queries", "packed lstm", "mixed positions", "translation"),
    "bmm with an expanded matrix, two views",
)
OF_LIBRARIES = (
    "GPT2LMHeadModel, T = 6",
    "BertForMaskedLM, T = 6",
    "ViTForImageClassification, T = 6",
)


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    """In float64, while the model's own loss is in float32."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def built(name: str) -> tuple[Network, nn.Module, Batch]:
    """Without dropout, in float64."""
    torch.manual_seed(0)
    network = FAMILIES[name].network() if name in FAMILIES else (BY_HAND | GENERATED)[name]
    if name.startswith("GPT2"):
        network = replace(network, loss=next_word)
    model = network.build().double()
    without_dropout(model)
    return network, model, network.batch()


class LossOf(nn.Module):
    """A network's loss as a module, for ``functional_call``."""

    def __init__(self, network: Network, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self._loss = partial(network.loss, batch=batch)

    def forward(self) -> Tensor:
        return self._loss(self.model)


def product_by_forward_mode(loss_of: LossOf, direction: dict[str, Tensor]) -> dict[str, Tensor]:
    """Forward-mode derivative of the gradient: H d, with the math kernel throughout."""
    primals = {f"model.{name}": p.detach() for name, p in loss_of.model.named_parameters()}
    trainable = {f"model.{name}": vector for name, vector in direction.items()}
    fixed = {name: p for name, p in primals.items() if name not in trainable}
    with sdpa_kernel(SDPBackend.MATH):
        gradient = grad(lambda free: functional_call(loss_of, {**fixed, **free}, ()))
        point = {name: primals[name] for name in trainable}
        _, product = jvp(gradient, (point,), (trainable,))
    return {name.removeprefix("model."): tensor for name, tensor in product.items()}


# Torch compiles its own forward-mode rules with what it calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", [*CURVED, *OF_LIBRARIES])
def test_hessian_products(name: str) -> None:
    network, model, batch = built(name)
    trainable = {key: p for key, p in model.named_parameters() if p.requires_grad}
    direction = {key: torch.randn_like(p) for key, p in trainable.items()}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            direction[f"{prefix}.weight"][module.padding_idx] = 0  # a row that is never trained
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        expected = by_central_differences(network, model, batch, direction)
        tolerance = 1e-6
    else:
        clone = without_hooks(model)
        expected = product_by_forward_mode(LossOf(network, clone, batch), direction)
        tolerance = 1e-9
    gradlens.extend(model)
    operator = HessianOperator(network.loss(model, batch), trainable)
    flat = torch.cat([vector.flatten() for vector in direction.values()])
    found = operator.multiply(flat)
    wanted = torch.cat([expected[key].flatten() for key in trainable])
    largest = float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * largest)


def by_central_differences(
    network: Network,
    model: nn.Module,
    batch: Batch,
    direction: dict[str, Tensor],
    step: float = 1e-5,
) -> dict[str, Tensor]:
    """(∇L(θ + h d) − ∇L(θ − h d)) / 2h, for operations without forward mode."""

    def gradient(shift: float) -> dict[str, Tensor]:
        clone = without_hooks(model)
        named = {key: p for key, p in clone.named_parameters() if key in direction}
        with torch.no_grad():
            for key, parameter in named.items():
                parameter.add_(direction[key], alpha=shift)
        loss = network.loss(clone, batch)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        pairs = zip(named.items(), found, strict=True)
        return {key: torch.zeros_like(p) if g is None else g for (key, p), g in pairs}

    ahead, behind = gradient(step), gradient(-step)
    return {key: (ahead[key] - behind[key]) / (2 * step) for key in ahead}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm", "encoder layer", OF_LIBRARIES[0]])
def test_every_second_order_quantity_has_a_value(name: str) -> None:
    network, model, batch = built(name)
    tracked = [
        quantities.HessMaxEV(),
        quantities.HessTrace(samples=3),
        quantities.HessEigenvalues(k=2),
        quantities.SpectralDensity(probes=2, steps=5),
        quantities.Stability(),
        quantities.TICTrace(samples=3),
        quantities.TICDiag(),
    ]
    cockpit = gradlens.Cockpit(model, tracked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = network.loss(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that diagonals are estimated
        tracked_backward(cockpit, 0, loss, optimizer=optimizer)
    assert set(cockpit.history.names) == {quantity.name for quantity in tracked}
    assert cockpit.history["HessMaxEV"][0] > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "added mask": {"attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5).double()},
    "boolean mask": {"attn_mask": torch.arange(25).reshape(5, 5) % 3 > 0},
    "grouped queries": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_second_derivative_of_fused_attention(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = 1 if "enable_gqa" in options else 2
    query = torch.randn(2, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(2, heads, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    inputs = [query, key, value]
    fused = scaled_dot_product_attention(query, key, value, **options)
    assert fused.grad_fn is not None
    assert "Flash" in fused.grad_fn.name()
    with sdpa_kernel(SDPBackend.MATH):
        math = scaled_dot_product_attention(query, key, value, **options)
    assert_second_derivatives(fused.sin().sum(), math.sin().sum(), inputs)


def assert_second_derivatives(loss: Tensor, plain: Tensor, inputs: list[Any]) -> None:
    """Those of a loss are those of the same loss by operations that torch differentiates twice."""
    directions = [torch.randn_like(tensor) for tensor in inputs]
    found = derivative(differentiable_gradient(loss, inputs), inputs, directions)
    gradient = torch.autograd.grad(plain, inputs, create_graph=True)
    expected = torch.autograd.grad(gradient, inputs, directions)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_second_derivative_of_weight_norm() -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)).double()
    parameters = list(layer.parameters())
    inputs = torch.randn(4, 5, dtype=torch.float64)
    bias, length, direction = parameters
    weight = length * direction / direction.norm(dim=1, keepdim=True)
    plain = (inputs @ weight.T + bias).sin().sum()
    assert_second_derivatives(layer(inputs).sin().sum(), plain, parameters)


def test_training_keeps_the_fused_kernel() -> None:
    query = torch.randn(2, 2, 5, 4, requires_grad=True)
    loss = scaled_dot_product_attention(query, query, query).sin().sum()
    (before,) = torch.autograd.grad(loss, query, retain_graph=True)
    differentiable_gradient(loss, [query])
    (after,) = torch.autograd.grad(loss, query)
    assert torch.equal(before, after)
