"""Scores and weights of attention against a plain float64 formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradlens import Cockpit
from gradlens.history.history import History
from gradlens.history.undefined import Undefined
from gradlens.quantities import AttentionEntropy, AttentionLogits
from tests.cases.row_cases import Net
from tests.cases.steps import tracked_backward

N, T, D, H = 8, 5, 8, 2
SEEN = torch.ones(T, T, dtype=torch.bool).tril()

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    found = torch.einsum("nhtc,nhsc->nhts", q, k) * q.shape[-1] ** -0.5
    found = torch.where(SEEN, found, torch.finfo(found.dtype).min)
    return torch.einsum("nhts,nhsc->nhtc", F.softmax(found, -1, dtype=torch.float32).to(v), v)


ATTEND: dict[str, Attend] = {
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=SEEN),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, attn_mask=SEEN, dropout_p=1e-9
    ),
    "by hand": lambda q, k, v: (
        F.dropout(scores(q, k).masked_fill(~SEEN, -torch.inf).softmax(-1), 1e-9) @ v
    ),
    "einsum": einsum,
    "added mask": lambda q, k, v: (
        (scores(q, k) + torch.zeros(T, T).masked_fill(~SEEN, -1e9)).softmax(-1) @ v
    ),
    "added to a mask": lambda q, k, v: (
        torch.add(
            torch.zeros(T, T).masked_fill(~SEEN, -torch.inf), q @ k.mT, alpha=q.shape[-1] ** -0.5
        ).softmax(-1)
        @ v
    ),
}


class SelfAttention(nn.Module):
    """Attention that keeps its queries and keys for the reference."""

    def __init__(self, attend: Attend, groups: int = 1) -> None:
        super().__init__()
        self.attend, self.groups = attend, groups
        self.queries = nn.Linear(D, D)
        self.keys, self.values = nn.Linear(D, D // groups), nn.Linear(D, D // groups)
        self.out = nn.Linear(D, D)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        made = (layer(x) for layer in (self.queries, self.keys, self.values))
        q, k, v = (each.unflatten(-1, (-1, D // H)).transpose(1, 2) for each in made)
        self.seen.append((q.detach().double(), k.detach().double()))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Network(nn.Module):
    def __init__(self, *attention: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(attention)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


def reference(layer: SelfAttention) -> tuple[Tensor, Tensor]:
    """The largest scores and the mean entropies of heads, ``[H]``."""
    q, k = (torch.cat(each) for each in zip(*layer.seen, strict=True))
    masked = scores(q, k.repeat_interleave(H // k.shape[1], 1)).masked_fill(~SEEN, -torch.inf)
    weights = masked.softmax(-1)
    logs = masked.log_softmax(-1).masked_fill(~SEEN, 0)
    return masked.amax((0, 2, 3)), -(weights * logs).sum(-1).mean((0, 2))


def tracked(model: nn.Module, parts: int = 1, layers: str | None = None) -> History:
    quantities = [
        kind(by_head=by_head, layers=layers, name=f"{kind.__name__} {by_head}")
        for kind in (AttentionLogits, AttentionEntropy)
        for by_head in (False, True)
    ]
    cockpit = Cockpit(model, quantities, facts=False, autopsy=False)
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(N, T, D, generator=generator)
    for number, part in enumerate(x.chunk(parts), start=1):
        loss = model(part).square().mean() / parts
        tracked_backward(cockpit, 0, loss, accumulating=number < parts)
    return cockpit.history


def layers_of(history: History, name: str) -> dict[str, object]:
    found: dict[str, object] = history[name][0]["layers"]
    return found


def check(history: History, model: Network, tolerance: float = 1e-5) -> None:
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, SelfAttention)
        largest, entropies = reference(layer)
        name = f"layers.{number}"
        expected = {
            "AttentionLogits True": largest,
            "AttentionLogits False": largest.amax(),
            "AttentionEntropy True": entropies,
            "AttentionEntropy False": entropies.mean(),
        }
        for quantity, value in expected.items():
            found = torch.as_tensor(layers_of(history, quantity)[name]).double()
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("kind", ATTEND)
def test_scores_and_entropies_are_those_of_the_formula(kind: str, parts: int) -> None:
    torch.manual_seed(0)
    model = Network(*(SelfAttention(ATTEND[kind]) for _ in range(2)))
    check(tracked(model, parts), model)


def test_grouped_queries_share_keys() -> None:
    torch.manual_seed(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = Network(SelfAttention(attend, groups=2))
    check(tracked(model), model)


def test_scores_are_those_in_front_of_a_cap() -> None:
    torch.manual_seed(0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        capped = 50 * torch.tanh(scores(q, k) / 50)
        return capped.masked_fill(~SEEN, -torch.inf).softmax(-1) @ v

    layer = SelfAttention(attend)
    found = layers_of(tracked(Network(layer)), "AttentionLogits True")["layers.0"]
    torch.testing.assert_close(torch.as_tensor(found).double(), reference(layer)[0])


@pytest.mark.parametrize("needs_weights", [False, True])
def test_multi_head_attention(needs_weights: bool) -> None:
    torch.manual_seed(0)

    seen: list[Any] = []

    def compute(net: Any, x: Tensor) -> Tensor:
        options = {"need_weights": needs_weights, "average_attn_weights": False}
        out, weights = net.inner(x, x, x, **options)
        seen.append(weights)
        return out

    model = Network(Net(compute, inner=nn.MultiheadAttention(D, H, batch_first=True)))
    history = tracked(model)
    found = layers_of(history, "AttentionEntropy False")
    assert list(found) == ["layers.0.inner"]
    if needs_weights:
        weights = seen[0].detach().double()
        expected = torch.special.entr(weights).sum(-1).mean()
        torch.testing.assert_close(torch.as_tensor(found["layers.0.inner"]).double(), expected)


def test_half_precision_keeps_the_scores_of_its_queries() -> None:
    torch.manual_seed(0)
    model = Network(SelfAttention(ATTEND["causal"]))
    with torch.autocast("cpu", torch.bfloat16):
        history = tracked(model)
    check(history, model, tolerance=1e-5)


def reason(model: nn.Module, layers: str | None = None) -> str:
    (found,) = layers_of(tracked(model, layers=layers), "AttentionLogits False").values()
    assert isinstance(found, Undefined)
    return found.reason


def test_what_cannot_be_read_has_a_reason() -> None:
    def additive(net: Any, x: Tensor) -> Tensor:
        weights = (x[:, :, None] + x[:, None]).tanh()
        return net.score(weights)[..., 0].softmax(-1) @ x

    def checkpointed(net: Any, x: Tensor) -> Any:
        return checkpoint(net.inner, x, use_reentrant=False)

    inner = SelfAttention(ATTEND["causal"])
    by_sum = Net(additive, score=nn.Linear(D, 1))
    assert "product of queries and keys" in reason(Network(by_sum), "layers.0")
    assert "no attention" in reason(Network(nn.Linear(D, D)), "layers.0")
    assert "checkpoint" in reason(Network(Net(checkpointed, inner=inner)))
    with pytest.raises(ValueError, match="no layer matches"):
        AttentionLogits().choose(nn.Linear(2, 2), {})


@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["fused", "written out"])
def test_queries_that_see_no_key_do_not_count(dropout: float) -> None:
    torch.manual_seed(0)
    seen = SEEN.clone()
    seen[2] = False

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)

    layer = SelfAttention(attend)
    found = layers_of(tracked(Network(layer)), "AttentionEntropy True")["layers.0"]
    q, k = layer.seen[0]
    rows = scores(q, k).masked_fill(~SEEN, -torch.inf).softmax(-1)[:, :, [0, 1, 3, 4]]
    expected = torch.special.entr(rows).sum(-1).mean((0, 2))
    torch.testing.assert_close(torch.as_tensor(found).double(), expected)


def test_scores_that_were_turned_are_not_known() -> None:
    """Where keys come first in the product, its elements have another order than the weights."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (k @ q.mT / 2).transpose(-1, -2).masked_fill(~SEEN, -torch.inf).softmax(-1) @ v

    assert "product of queries and keys" in reason(Network(SelfAttention(attend)))


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("heads", [(), (H,)])
def test_scores_of_two_products_are_not_known(heads: tuple[int, ...], turned: int) -> None:
    """As of content and relative positions, in either order; entropies are those of the weights."""
    positions = nn.Parameter(torch.randn(*heads, D // H, T))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        both = (q @ k.mT, q @ positions)[::turned]
        return ((both[0] + both[1]) / 2).softmax(-1) @ v

    model = Network(SelfAttention(attend))
    assert "or another product" in reason(model)
    entropy = layers_of(tracked(model), "AttentionEntropy False")["layers.0"]
    assert float(entropy) > 0  # type: ignore[arg-type]


def test_a_bias_that_layers_compute_is_no_product() -> None:
    """As of the distance between positions, which doesn't depend on queries."""
    bias = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, H))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = bias(torch.rand(T * T, 2)).T.view(H, T, T)
        return (q @ k.mT / 2 + places).softmax(-1) @ v

    layer = SelfAttention(attend)
    found = layers_of(tracked(Network(layer)), "AttentionLogits False")["layers.0"]
    queries, keys = layer.seen[0]
    assert float(found) == pytest.approx(float((queries @ keys.mT / 2).amax()))  # type: ignore[arg-type]


def test_a_softmax_of_features_is_no_attention() -> None:
    def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)

    (found,) = layers_of(tracked(Network(SelfAttention(linear))), "AttentionEntropy False").values()
    assert isinstance(found, Undefined)
    assert "no attention that can be read" in found.reason
