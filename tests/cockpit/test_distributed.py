"""Processes that train one network together record what one process records of the joined batch."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import gradlens
from gradlens.cockpit.checkpoint import CONTINUED
from gradlens.graph.fully_shard import IS_KNOWN
from gradlens.history.undefined import Undefined
from gradlens.quantities import (
    Alpha,
    CriticalSharpness,
    Distance,
    EarlyStopping,
    GradCovariance,
    GradHist1d,
    GradHist2d,
    GradientActivation,
    GradientGeometry,
    Loss,
    MeanGSNR,
    NormTest,
    OptimizerState,
    ParameterNorm,
    Parameters,
    RelativeUpdate,
    StepLedger,
    UpdateGeometry,
    WeightSignFlips,
)
from gradlens.reductions import SquaredNorms, SumOfSquares
from tests.cases.processes import join_group, outcomes_of
from tests.cases.records import assert_same_records, assert_same_searches, unnamed
from tests.cases.steps import tracked_backward
from tests.cockpit.test_training_loops import data, network, noise_by_part, tracked

pytestmark = pytest.mark.slow

Make = Callable[[], nn.Module]
Wrap = Callable[[Any], Any]
"""How processes are given a network."""


# Copies -----------------------------------------------------------------------------------------


def with_recomputed_layers() -> nn.Module:
    """PReLU and a recurrent layer have no factors to send."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3),
        nn.PReLU(4),
        FirstOfPair(nn.GRU(4, 3, batch_first=True)),
        nn.Flatten(),
        nn.Linear(12, 3),
    ).double()


class FirstOfPair(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Containing(nn.Module):
    """A module that has the ones that processes exchange inside of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def halves(model: Any) -> nn.Module:
    """Two modules, of each of which the gradients are exchanged on their own."""
    return Containing(nn.Sequential(static(model[:3]), static(model[3:])))


parallel = nn.parallel.DistributedDataParallel
static = partial(parallel, static_graph=True)
WRAPPERS: dict[str, Wrap] = {
    "static": static,
    "unused": partial(parallel, find_unused_parameters=True),
    "view": partial(parallel, gradient_as_bucket_view=True),
    "contained": lambda model: Containing(parallel(model)),
    "halves": halves,
    "compiled": lambda model: torch.compile(static(model), backend="eager"),
}


def of_copies() -> list[Any]:
    histograms = [GradHist2d(), GradHist1d(keep_individual=True, name="by parameter")]
    return [*tracked(), *noise_by_part(), *histograms, CriticalSharpness(), StepLedger()]


def of_wrapped() -> list[Any]:
    """Of cases that differ in how networks are wrapped: one value of each way to join parts."""
    return [Loss(), NormTest(), MeanGSNR(), GradCovariance(), GradHist1d(), Alpha(), Distance()]


# Shards -----------------------------------------------------------------------------------------


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


def of_shards() -> list[Any]:
    by_parameter = [ParameterNorm(), GradientGeometry(), UpdateGeometry(), GradientActivation()]
    companions = [GradHist2d(), EarlyStopping(), Distance(), Parameters(), WeightSignFlips()]
    of_optimizer = [OptimizerState(), RelativeUpdate()]
    along_update = [CriticalSharpness(), StepLedger()]
    return [*tracked(), *by_parameter, *companions, *of_optimizer, *along_update]


def each_block(model: Any, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def head_apart(model: Any) -> Any:
    fully_shard(model.head, reshard_after_forward=True)
    return each_block(model)


def nested(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block.up)
    fully_shard([*model.blocks])
    return fully_shard(model)


def with_mesh(*shape: int) -> Wrap:
    names = ("replica", "shard")
    return lambda m: each_block(m, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))


def tokens(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(5, (8, 6), generator=generator)
    return inputs, torch.randint(5, (8,), generator=generator)


def tokens_twice(step: int) -> tuple[Tensor, Tensor]:
    """Two processes that have the same samples have the same statistics of them."""
    return tuple(each[torch.arange(8) % 4] for each in tokens(step))  # type: ignore[return-value]


@dataclass(frozen=True)
class Case:
    """A network, how processes are given it, and the ``shares`` of each in the batch's samples.

    Shares are those of each step, and the last ones go on. Before the step ``cut``, everything is
    made anew and loaded from a checkpoint of each process. ``rtol`` is that of all values, or of
    norms and losses alone where it is large. Sharded parameters may be ``prefetched`` in another
    order or ``kept`` between micro-batches, and the loss may be computed ``inside`` the network.
    """

    network: Make
    wrap: Wrap = parallel
    shares: Sequence[tuple[int, ...]] = ((8, 4),)
    micro: int = 1
    reduction: Any = "mean"
    cut: int | None = None
    steps: int = 2
    data: Callable[[int], tuple[Tensor, Tensor]] = lambda step: data()
    tracked: Callable[[], list[Any]] = of_copies
    batchnorm: Any = "coupled"
    rtol: float = 1e-9
    prefetched: bool = False
    kept: bool = False
    inside: bool = False

    @property
    def processes(self) -> int:
        return len(self.shares[0])

    @property
    def alone(self) -> Case:
        """What one process sees of it: it shares nothing, and has each batch as a whole."""
        options: dict[str, Any] = {"cut": None, "rtol": 0.0, "prefetched": False, "kept": False}
        return replace(self, wrap=parallel, micro=1, **options)

    def slices(self, step: int) -> list[slice]:
        """The samples of each process."""
        sizes = self.shares[min(step, len(self.shares) - 1)]
        return [slice(sum(sizes[:rank]), sum(sizes[: rank + 1])) for rank in range(len(sizes))]


copied = partial(Case, network)
sharded = partial(
    Case, shares=((4, 4),), data=tokens, tracked=of_shards, network=Network, wrap=each_block
)
wrapped = partial(sharded, tracked=of_wrapped)
ROUNDED = ("Loss", "GradNorm", "NormTest", "InnerTest", "EarlyStopping", "UpdateSize", "Distance")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

COPIES = {
    "equal shares": copied(shares=((6, 6),), steps=3),
    "unequal shares": copied(),
    "recomputed, micro-batches": Case(with_recomputed_layers, shares=((6, 6),), micro=2, steps=3),
    "sum loss": copied(reduction="sum"),
    "checkpoint": copied(cut=2, steps=3),
    "without samples": copied(shares=((12, 0),), reduction="sum"),
    **{f"wrapped, {name}": copied(wrap, tracked=of_wrapped) for name, wrap in WRAPPERS.items()},
    "four": copied(shares=((3, 3, 3, 3),)),
    "four, micro-batches": Case(with_recomputed_layers, shares=((3, 3, 3, 3),), micro=3),
    "three": Case(with_recomputed_layers, shares=((1, 6, 5),)),
}
SHARDS = {
    "each block": sharded(steps=3),
    "kept after forward": wrapped(wrap=partial(each_block, reshard_after_forward=False)),
    "freed after forward": wrapped(wrap=partial(each_block, reshard_after_forward=True)),
    "root only": wrapped(wrap=fully_shard),
    "nested": wrapped(wrap=nested),
    "one replica": wrapped(wrap=with_mesh(1, 2)),
    "two replicas": wrapped(wrap=with_mesh(2, 1)),
    "shares that change": sharded(shares=((4, 4), (4, 2), (5, 3)), steps=3),
    "a plan of one process": sharded(shares=((4, 4), (4, 4), (4, 3)), steps=3),
    "tied": sharded(network=partial(Network, tied=True)),
    "frozen": wrapped(network=frozen_network),
    "micro-batches": sharded(micro=2),
    "checkpoints": wrapped(network=partial(Network, checkpoints=True)),
    "half precision, micro-batches": sharded(
        wrap=partial(each_block, mp_policy=HALF), micro=2, rtol=0.2
    ),
    "kept between micro-batches": sharded(micro=2, kept=True),
    "loss in the model": sharded(wrap=partial(each_block, reshard_after_forward=True), inside=True),
    "loss in a part": wrapped(wrap=head_apart, inside=True),
    "gathered in advance": wrapped(prefetched=True),
    "frozen statistics": sharded(
        network=Normalised, wrap=fully_shard, batchnorm="frozen", data=tokens_twice
    ),
}
CASES = COPIES | (SHARDS if IS_KNOWN else {})


def worker(rank: int, processes: int, port: int, folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "gradlens, step 0. normalisation over the batch")
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    join_group(rank, processes, port)
    try:
        for name, case in CASES.items():
            if case.processes == processes:
                weights = train(rank, case, folder / name, case.tracked())
                if name in SHARDS:
                    same = all(map(torch.equal, weights, train(rank, case, folder / name, [])))
                    (folder / name / f"same{rank}").write_text(str(same))
        if processes == 2:
            warnings.simplefilter("ignore")
            sent = sent_bytes()
            if rank:
                (folder / "sent.json").write_text(json.dumps(sent))
    finally:
        distributed.destroy_process_group()


def parts(case: Case, chosen: list[Any], **options: Any) -> tuple[Any, Any, gradlens.Cockpit]:
    """The network, the optimizer and the cockpit of a process."""
    model = case.wrap(case.network())
    if case.prefetched:
        model.set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options |= {"loss_reduction": case.reduction, "batchnorm": case.batchnorm, "strict": True}
    return model, optimizer, gradlens.Cockpit(model, chosen, **options)


def accumulates(model: Any, case: Case, last: bool) -> None:
    """Say whether the gradients of a micro-batch are exchanged."""
    if isinstance(model, parallel):
        model.require_backward_grad_sync = last
        return
    model.set_requires_gradient_sync(last)
    if case.kept:
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)


def train(rank: int, case: Case, folder: Path, chosen: list[Any]) -> list[Tensor]:
    """The weights after training."""
    run = folder / "run.jsonl" if chosen else None
    function = gradlens.extend(nn.CrossEntropyLoss(reduction=case.reduction))
    model, optimizer, cockpit = parts(case, chosen, run=run)
    for step in range(case.steps):
        if step == case.cut:
            states = [each.state_dict() for each in (model, optimizer, cockpit)]
            distributed.barrier()  # the file is written by one process, and read by all
            model, optimizer, cockpit = parts(case, case.tracked(), run=run, resume=True)
            for each, state in zip((model, optimizer, cockpit), states, strict=True):
                each.load_state_dict(state)
            distributed.barrier()
        part = case.slices(step)[rank]
        x, y = (each[part] for each in case.data(step))
        cuts = [piece * len(x) // case.micro for piece in range(case.micro + 1)]
        pieces = [slice(*each) for each in pairwise(cuts)]
        optimizer.zero_grad()

        def loss_of(rows: slice, model: Any = model, x: Tensor = x, y: Tensor = y) -> Tensor:
            return model(x[rows], y[rows]) if case.inside else function(model(x[rows]), y[rows])

        def closure(pieces: list[slice] = pieces, loss_of: Any = loss_of) -> Tensor:
            return torch.stack([loss_of(rows) for rows in pieces]).mean()

        for rows in pieces:
            last = rows is pieces[-1]
            if case.micro > 1:
                accumulates(model, case, last)
            loss = loss_of(rows)
            info = {"individual_losses": loss.detach().expand(len(y))} if case.inside else {}
            given = {"optimizer": optimizer, "accumulating": not last, "closure": closure}
            with cockpit(step, loss=loss, info=info, **given):
                (loss / case.micro).backward()
        optimizer.step()
    cockpit.close()
    if chosen:
        cockpit.history.write(folder / f"rank{rank}.jsonl")
    weights = (p.detach() for p in model.parameters())
    return [p.to_local().clone() if isinstance(p, DTensor) else p.clone() for p in weights]


@cache
def in_one_process(case: Case) -> gradlens.History:
    model, optimizer, cockpit = parts(replace(case, wrap=lambda m: m), case.tracked())
    is_mean = case.reduction == "mean"
    for step in range(case.steps):
        optimizer.zero_grad()
        shares = case.slices(step)
        sizes = [share.stop - share.start for share in shares]
        samples, count = sum(sizes), len(sizes)
        x, y = (each[:samples] for each in case.data(step))
        # The mean over processes of their means weighs the samples of a smaller share more.
        each = [torch.full((n,), samples / (count * max(n, 1)), dtype=torch.float64) for n in sizes]
        weights = torch.cat(each) if is_mean else 1.0

        def individual(x: Tensor = x, y: Tensor = y, weights: Any = weights) -> Tensor:
            return weights * nn.functional.cross_entropy(model(x), y, reduction="none")

        def closure(individual: Any = individual) -> Tensor:
            return individual().mean() if is_mean else individual().sum()

        losses = individual()
        loss = losses.mean() if is_mean else losses.sum()
        info = {"individual_losses": losses}
        if case.inside:
            means = [
                losses[share].detach().mean().expand(n)
                for share, n in zip(shares, sizes, strict=True)
            ]
            info = {"individual_losses": torch.cat(means)}
        given = {"optimizer": optimizer, "closure": closure, "batch_size": samples}
        with cockpit(step, loss=loss, info=info, **given):
            # Gradients are averaged over the processes, also those of sums.
            (loss if is_mean else loss / count).backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory, worker, (2, 3, 4), CASES)


def resolved(series: Mapping[int, Any]) -> dict[int, Any]:
    """Without those that half precision can't tell from rounding errors."""
    return {n: v for n, v in series.items() if "rounding errors" not in getattr(v, "reason", "")}


@pytest.mark.filterwarnings("ignore:gradlens, step 0. normalisation over the batch")
@pytest.mark.parametrize("name", CASES)
def test_processes_are_one_batch(name: str, runs: Path) -> None:
    case = CASES[name]
    history = in_one_process(case.alone)
    expected = {series: dict(history[series]) for series in history.names}
    if case.cut is not None:
        expected["Alpha"][case.cut - 1] = Undefined(CONTINUED)
    for file in (*(f"rank{rank}.jsonl" for rank in range(case.processes)), "run.jsonl"):
        found = gradlens.History.load(runs / name / file)
        assert found.names == history.names
        if name in SHARDS:
            assert found.coverages[0].missing == {}
        if name in SHARDS and case.tracked is of_shards:
            assert any(record["ratio"] > 0 for record in found["CriticalSharpness"].values())
        for series in history.names if case.rtol < 1e-6 else ROUNDED:
            if series == "CriticalSharpness":
                assert_same_searches(found[series], expected[series])
            elif series == "GradHist2d" and case.batchnorm == "frozen":
                # Gradients of a backward pass of their own are reduced when parameters are freed.
                assert "had freed" in str(found[series][0])
            else:
                known = resolved(found[series])
                assert known
                wanted = {step: expected[series][step] for step in known}
                # Wrapped modules have longer names.
                assert_same_records(unnamed(known), unnamed(wanted), case.rtol)


@pytest.mark.parametrize("name", SHARDS if IS_KNOWN else ())
def test_training_is_bit_identical(name: str, runs: Path) -> None:
    for rank in range(2):
        assert (runs / name / f"same{rank}").read_text() == "True"


# What goes wrong in one of them -------------------------------------------------------------------


class Failing(gradlens.quantities.SingleStepQuantity):
    """A reduction whose values can't be merged, or sent, or that fails in one process."""

    def __init__(self, kind: str) -> None:
        super().__init__(name=kind)
        self.reductions = (FailingReduction(kind),)

    def compute(self, step: Any) -> Any:
        return float(step.total(self.reductions[0]).sum())


@dataclass(frozen=True)
class FailingReduction(SquaredNorms):
    kind: str

    def reduce(self, gradients: Any) -> Any:
        if self.kind == "in one process" and distributed.get_rank() == 1:
            raise RuntimeError("out of luck")
        return object() if self.kind == "can't be sent" else super().reduce(gradients)

    def merge(self, one: Any, other: Any, samples: tuple[int, int]) -> Any:
        if self.kind == "can't be merged":
            raise RuntimeError("out of luck")
        return super().merge(one, other, samples)


def failing(rank: int, processes: int, port: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    join_group(rank, processes, port)
    model, (x, y) = network(), data()
    parallel = nn.parallel.DistributedDataParallel(model)
    part = slice(6 * rank, 6 * rank + 6)
    for kind in FAILURES:
        steps = 3 if kind == "one raises" else 2
        track: list[Any] = [NormTest(), Failing(kind)]
        if kind == "other quantities":
            track = [NormTest() if rank else MeanGSNR()]
        cockpit = gradlens.Cockpit(parallel, track)
        for step in range(steps):
            loss = nn.functional.cross_entropy(parallel(x[part]), y[part])
            with suppress(ValueError), cockpit(step, loss=loss):
                loss.backward()
                if kind == "one dies" and rank == 1 and step == 1:
                    os._exit(0)
                if kind == "one raises" and rank == 1 and step == 1:
                    raise ValueError
        cockpit.close()
        cockpit.history.write(folder / f"{kind} {rank}.jsonl")


FAILURES = {
    "can't be merged": "merging FailingReduction failed: RuntimeError: out of luck",
    "can't be sent": "a object can't be sent to other processes",
    "in one process": "RuntimeError: out of luck",
    "one raises": "a ValueError has left the context of one process",
    "other quantities": "the parts of the batch were tracked differently",
    "one dies": "",
}
"""What is wrong, and the reason; that of gloo's own errors depends on its version."""


@pytest.fixture(scope="module")
def failed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory, failing)


@pytest.mark.parametrize("kind", FAILURES)
def test_no_process_waits_in_vain(kind: str, failed_runs: Path) -> None:
    for rank in (0,) if kind in ("one dies", "one raises") else (0, 1):
        history = gradlens.History.load(failed_runs / f"{kind} {rank}.jsonl")
        for name in history.names:
            value = history[name][1]
            spared = name == "NormTest" and kind in ("can't be merged", "in one process")
            assert math.isnan(value) != spared
            assert spared or FAILURES[kind] in value.reason


def test_a_process_that_raises_goes_on_with_the_others(failed_runs: Path) -> None:
    for rank, steps in enumerate(((0, 1, 2), (0, 2))):
        history = gradlens.History.load(failed_runs / f"one raises {rank}.jsonl")
        assert history.steps == steps
        assert all(math.isfinite(history[name][2]) for name in history.names)


def test_what_is_sent(runs: Path) -> None:
    """Bytes that a process sends for each quantity, by parameters P and samples N."""
    sent = json.loads((runs / "sent.json").read_text())
    parameters, samples, tensors = 2 * 50 * 50, 6, 2
    values = {name: count - sent["Loss"] for name, count in sent.items()}
    numbers = 8 * samples * tensors
    slack = 5000  # names and shapes, and a header for each tensor
    for name, expected in {
        "SumsOfSquares": 8 * parameters,
        "NormTest": 8 * parameters + 2 * numbers,
        "MeanGSNR": 2 * 8 * parameters,
        "GradHist1d": 103 * 8 * tensors,
        "Norms": numbers,
    }.items():
        assert expected <= values[name] <= expected + slack, name


class Norms(gradlens.quantities.SingleStepQuantity):
    reductions = (SquaredNorms(),)

    def compute(self, step: Any) -> Any:
        return float(step.total(SquaredNorms()).sum())


class SumsOfSquares(Norms):
    reductions = (SumOfSquares(),)

    def compute(self, step: Any) -> Any:
        return float(step.total(SumOfSquares()).sum())


def sent_bytes() -> dict[str, int]:
    """Bytes that this process sends, by quantity; the second one sends to the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 50, bias=False), nn.Linear(50, 50, bias=False)).double()
    parallel, send, sent = nn.parallel.DistributedDataParallel(model), distributed.send, [0]

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        sent[0] += tensor.nbytes
        send(tensor, *args, **kwargs)

    distributed.send = counted
    found = {}
    kinds = [Norms, SumsOfSquares, NormTest, MeanGSNR, GradHist1d, Loss]
    for kind in kinds:
        cockpit = gradlens.Cockpit(parallel, [kind()])
        sent[0] = 0
        tracked_backward(cockpit, 0, parallel(torch.randn(6, 50).double()).square().mean())
        cockpit.close()
        found[kind.__name__] = sent[0]
    return found
