"""Processes that shard a network by ``fully_shard`` see what one sees on the joined batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens.graph.fully_shard import IS_KNOWN
from gradlens.quantities import (
    CriticalSharpness,
    Distance,
    EarlyStopping,
    GradHist2d,
    GradientActivation,
    GradientGeometry,
    OptimizerState,
    ParameterNorm,
    Parameters,
    RelativeUpdate,
    StepLedger,
    UpdateGeometry,
    WeightSignFlips,
)
from tests.cases.processes import join_group, outcomes_of
from tests.cases.records import assert_same_records, assert_same_searches
from tests.cockpit.test_training_loops import tracked

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_KNOWN, reason="this torch is too old")]

PROCESSES = 2


class Block(nn.Module):
    """A residual layer whose weights have an odd number of rows inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Head(nn.Module):
    """The last layer, which also computes the loss where it gets ``labels``."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5, bias=bias)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.linear(x)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class Network(nn.Module):
    """Tokens ``[N, T]`` to classes; the last layer is the embedding again where it is ``tied``."""

    def __init__(self, tied: bool = False, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.head = Head(bias=not tied)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.linear.weight = self.embedding.weight
        self._checkpoints = checkpoints
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        result: Tensor = self.head((x * self.scale).mean(1), labels)
        return result


class Normalised(nn.Module):
    """A convolution in front of a normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.stack([tokens, tokens**2], 1).to(self.head.weight.dtype)
        y: Tensor = self.head(self.norm(self.conv(x)).tanh().mean(2))
        return y


def frozen_network() -> nn.Module:
    model = Network()
    model.blocks[0].requires_grad_(False)
    model.head.linear.bias.requires_grad_(False)
    return model


def each_block(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def head_apart(model: Any) -> None:
    fully_shard(model.head, reshard_after_forward=True)
    each_block(model)


def root_only(model: Any, **options: Any) -> None:
    fully_shard(model, **options)


def nested(model: Any, **options: Any) -> None:
    for block in model.blocks:
        fully_shard(block.up, **options)
    fully_shard([*model.blocks], **options)
    fully_shard(model, **options)


def with_mesh(*shape: int) -> Callable[..., None]:
    def shard(model: Any) -> None:
        each_block(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")))

    return shard


@dataclass(frozen=True)
class Case:
    """A network and how it is sharded; ``shares`` are the two processes' numbers of samples.

    They are those of each step, and the last ones go on. ``rtol`` is that of all values, or of
    norms and losses alone where it is large. Parameters may be ``prefetched`` in another order or
    ``kept`` between micro-batches, and the loss may be computed ``inside`` the network.
    """

    shard: Callable[[Any], None]
    network: Callable[[], nn.Module] = Network
    shares: Sequence[tuple[int, int]] = ((4, 4),)
    micro: int = 1
    batchnorm: Any = "coupled"
    rtol: float = 1e-9
    prefetched: bool = False
    kept: bool = False
    inside: bool = False
    twice: bool = False
    steps: int = 2

    @property
    def alone(self) -> Case:
        """What one process sees of it: it shards nothing, and has each batch as a whole."""
        return replace(self, shard=root_only, micro=1, rtol=0.0, prefetched=False, kept=False)

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        """Two processes that have the same samples ``twice`` have the same statistics of them."""
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(5, (8, 6), generator=generator)
        labels = torch.randint(5, (8,), generator=generator)
        order = torch.arange(8) % 4 if self.twice else torch.arange(8)
        return tokens[order], labels[order]

    def share(self, step: int, rank: int) -> slice:
        sizes = self.shares[min(step, len(self.shares) - 1)]
        start = sum(sizes[:rank])
        return slice(start, start + sizes[rank])


ROUNDED = ("Loss", "GradNorm", "NormTest", "InnerTest", "EarlyStopping", "UpdateSize", "Distance")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

CASES = {
    "each block": Case(each_block, steps=3),
    "kept after forward": Case(lambda m: each_block(m, reshard_after_forward=False)),
    "freed after forward": Case(lambda m: each_block(m, reshard_after_forward=True)),
    "root only": Case(root_only),
    "nested": Case(nested),
    "one replica": Case(with_mesh(1, 2)),
    "two replicas": Case(with_mesh(2, 1)),
    "half precision": Case(lambda m: each_block(m, mp_policy=HALF), rtol=0.2),
    "unequal shares": Case(each_block, shares=((5, 3),)),
    "shares that change": Case(each_block, shares=((4, 4), (4, 2), (5, 3)), steps=3),
    "a plan of one process": Case(each_block, shares=((4, 4), (4, 4), (4, 3)), steps=3),
    "tied": Case(each_block, lambda: Network(tied=True)),
    "frozen": Case(each_block, frozen_network),
    "micro-batches": Case(each_block, micro=2),
    "checkpoints": Case(each_block, lambda: Network(checkpoints=True)),
    "half precision, micro-batches": Case(
        lambda m: each_block(m, mp_policy=HALF), micro=2, rtol=0.2
    ),
    "kept between micro-batches": Case(each_block, micro=2, kept=True),
    "loss in the model": Case(lambda m: each_block(m, reshard_after_forward=True), inside=True),
    "loss in a part": Case(head_apart, inside=True),
    "gathered in advance": Case(each_block, prefetched=True),
    "frozen statistics": Case(root_only, Normalised, batchnorm="frozen", twice=True),
}


def quantities() -> list[Any]:
    by_parameter = [ParameterNorm(), GradientGeometry(), UpdateGeometry(), GradientActivation()]
    companions = [GradHist2d(), EarlyStopping(), Distance(), Parameters(), WeightSignFlips()]
    of_optimizer = [OptimizerState(), RelativeUpdate()]
    along_update = [CriticalSharpness(), StepLedger()]
    return [*tracked(), *by_parameter, *companions, *of_optimizer, *along_update]


def worker(rank: int, processes: int, port: int, folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "gradlens")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    join_group(rank, processes, port)
    try:
        for name, case in CASES.items():
            tracked_weights = train(rank, case, folder / name, True)
            weights = train(rank, case, folder / name, False)
            same = all(map(torch.equal, tracked_weights, weights))
            (folder / name / f"same{rank}").write_text(str(same))
    finally:
        distributed.destroy_process_group()


def train(rank: int, case: Case, folder: Path, is_tracked: bool) -> list[Tensor]:
    """The weights after training."""
    model: Any = case.network()
    case.shard(model)
    if case.prefetched:
        model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_function = gradlens.extend(nn.CrossEntropyLoss())
    cockpit = gradlens.Cockpit(
        model, quantities() if is_tracked else [], batchnorm=case.batchnorm, strict=True
    )
    for step in range(case.steps):
        part = case.share(step, rank)
        x, y = (each[part] for each in case.data(step))
        optimizer.zero_grad()

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            parts = zip(x.chunk(case.micro), y.chunk(case.micro), strict=True)
            losses = [
                model(*part) if case.inside else loss_function(model(part[0]), part[1])
                for part in parts
            ]
            return torch.stack(losses).mean()

        for piece in range(case.micro):
            rows = slice(piece * len(x) // case.micro, (piece + 1) * len(x) // case.micro)
            last = piece == case.micro - 1
            model.set_requires_gradient_sync(last)
            if case.kept:
                model.set_is_last_backward(last)
                model.set_reshard_after_backward(last)
            info = {}
            if not case.inside:
                loss = loss_function(model(x[rows]), y[rows])
            else:
                loss = model(x[rows], y[rows])
                info = {"individual_losses": loss.detach().expand(len(y))}
            with cockpit(
                step,
                loss=loss,
                optimizer=optimizer,
                accumulating=not last,
                closure=closure,
                info=info,
            ):
                (loss / case.micro).backward()
        optimizer.step()
    cockpit.close()
    if is_tracked:
        cockpit.history.write(folder / f"rank{rank}.jsonl")
    return [p.detach().to_local().clone() for p in model.parameters()]


@cache
def in_one_process(case: Case) -> gradlens.History:
    model = case.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    cockpit = gradlens.Cockpit(model, quantities(), batchnorm=case.batchnorm)
    for step in range(case.steps):
        optimizer.zero_grad()
        shares = [case.share(step, rank) for rank in range(PROCESSES)]
        sizes = [share.stop - share.start for share in shares]
        x, y = (each[: sum(sizes)] for each in case.data(step))
        # The mean over processes of their means weighs the samples of a smaller share more.
        weights = torch.cat(
            [torch.full((n,), sum(sizes) / (2 * n), dtype=torch.float64) for n in sizes]
        )

        def individual(x: Tensor = x, y: Tensor = y, weights: Tensor = weights) -> Tensor:
            return weights * nn.functional.cross_entropy(model(x), y, reduction="none")

        losses = individual()
        info = {"individual_losses": losses}
        if case.inside:
            means = [losses[share].detach().mean() for share in shares]
            info = {
                "individual_losses": torch.cat(
                    [m.expand(n) for m, n in zip(means, sizes, strict=True)]
                )
            }
        loss, samples = losses.mean(), sum(sizes)
        with cockpit(
            step,
            loss=loss,
            optimizer=optimizer,
            batch_size=samples,
            closure=lambda individual=individual: individual().mean(),
            info=info,
        ):
            loss.backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory, worker, names=CASES)


def resolved(series: Mapping[int, Any]) -> dict[int, Any]:
    """Without those that half precision can't tell from rounding errors."""
    return {n: v for n, v in series.items() if "rounding errors" not in getattr(v, "reason", "")}


@pytest.mark.filterwarnings("ignore:gradlens, step 0. normalisation over the batch")
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_process(name: str, runs: Path) -> None:
    case = CASES[name]
    expected = in_one_process(case.alone)
    for rank in range(PROCESSES):
        found = gradlens.History.load(runs / name / f"rank{rank}.jsonl")
        assert found.names == expected.names
        assert found.coverages[0].missing == {}
        names = expected.names if case.rtol < 1e-6 else ROUNDED
        if case.batchnorm == "frozen":
            # Gradients of a backward pass of their own are reduced when the parameters are freed.
            assert "had freed" in str(found["GradHist2d"][0])
            names = [name for name in names if name != "GradHist2d"]
        if case.rtol < 1e-6:
            assert_same_searches(found["CriticalSharpness"], expected["CriticalSharpness"])
            names = [name for name in names if name != "CriticalSharpness"]
        for series in names:
            known = resolved(found[series])
            assert known
            assert_same_records(known, {step: expected[series][step] for step in known}, case.rtol)
        assert any(record["ratio"] > 0 for record in found["CriticalSharpness"].values())


@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_identical(name: str, runs: Path) -> None:
    for rank in range(PROCESSES):
        assert (runs / name / f"same{rank}").read_text() == "True"
