"""Processes that train one network together record what one process records of the joined batch."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import gradlens
from gradlens.cockpit.checkpoint import CONTINUED
from gradlens.history.undefined import Undefined
from gradlens.quantities import (
    CriticalSharpness,
    GradHist1d,
    GradHist2d,
    Loss,
    MeanGSNR,
    NormTest,
    StepLedger,
)
from gradlens.reductions import SquaredNorms, SumOfSquares
from tests.cases.processes import join_group, outcomes_of
from tests.cases.records import assert_same_records, assert_same_searches, unnamed
from tests.cases.steps import tracked_backward
from tests.cockpit.test_training_loops import data, network, noise_by_part, tracked

pytestmark = pytest.mark.slow

SHARES = {
    "equal": (slice(0, 6), slice(6, 12)),
    "unequal": (slice(0, 8), slice(8, 12)),
    "empty": (slice(0, 12), slice(12, 12)),
    "of four": (slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 12)),
    "of three, unequal": (slice(0, 1), slice(1, 7), slice(7, 12)),
}


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
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": parallel,
    "static": static,
    "unused": partial(parallel, find_unused_parameters=True),
    "view": partial(parallel, gradient_as_bucket_view=True),
    "contained": lambda model: Containing(parallel(model)),
    "halves": halves,
    "compiled": lambda model: torch.compile(static(model), backend="eager"),
}
"""How processes are given a network."""

NETWORKS = {"factors": network, "recomputed": with_recomputed_layers}


def quantities() -> list[Any]:
    histograms = [GradHist2d(), GradHist1d(keep_individual=True, name="by parameter")]
    along_update = [CriticalSharpness(), StepLedger()]
    return [*tracked(), *noise_by_part(), *histograms, *along_update]


@dataclass(frozen=True)
class Case:
    """A network, how its batch is shared between the processes, and in how many micro-batches.

    Before the step ``cut``, everything is made anew and loaded from a checkpoint of each process.
    """

    network: str
    shares: str
    micro: int
    reduction: Any = "mean"
    cut: int | None = None
    wrapper: str = "plain"
    steps: int = 2

    @property
    def alone(self) -> Case:
        """What one process sees of it."""
        return replace(self, micro=1, cut=None, wrapper="plain")


CASES = {
    "factors, equal shares": Case("factors", "equal", 1, steps=3),
    "factors, unequal shares": Case("factors", "unequal", 1),
    "recomputed, micro-batches": Case("recomputed", "equal", 2, steps=3),
    "factors, sum loss": Case("factors", "unequal", 1, "sum"),
    "factors, checkpoint": Case("factors", "unequal", 1, cut=2, steps=3),
    "without samples": Case("factors", "empty", 1, "sum"),
    **{f"wrapped, {w}": Case("factors", "unequal", 1, wrapper=w) for w in WRAPPERS if w != "plain"},
    "four": Case("factors", "of four", 1),
    "four, micro-batches": Case("recomputed", "of four", 3),
    "three": Case("recomputed", "of three, unequal", 1),
}


def worker(rank: int, processes: int, port: int, folder: Path) -> None:
    warnings.simplefilter("error")
    join_group(rank, processes, port)
    try:
        for name, case in CASES.items():
            if len(SHARES[case.shares]) == processes:
                train(rank, case, folder / name)
        if processes == 2:
            warnings.simplefilter("ignore")
            sent = sent_bytes()
            if rank:
                (folder / "sent.json").write_text(json.dumps(sent))
    finally:
        distributed.destroy_process_group()


def train(rank: int, case: Case, folder: Path) -> None:
    x, y = data()
    part = SHARES[case.shares][rank]
    x, y = x[part], y[part]
    loss_function = gradlens.extend(nn.CrossEntropyLoss(reduction=case.reduction))
    model, optimizer, cockpit = parts(case, folder)
    for step in range(case.steps):
        if step == case.cut:
            states = [each.state_dict() for each in (model, optimizer, cockpit)]
            distributed.barrier()  # the file is written by one process, and read by all
            model, optimizer, cockpit = parts(case, folder, resume=True)
            for each, state in zip((model, optimizer, cockpit), states, strict=True):
                each.load_state_dict(state)
            distributed.barrier()
        optimizer.zero_grad()

        def closure(model: Any = model) -> Tensor:
            cuts = [piece * len(x) // case.micro for piece in range(case.micro + 1)]
            parts = [slice(*each) for each in pairwise(cuts)]
            losses = [loss_function(model(x[part]), y[part]) for part in parts]
            return torch.stack(losses).mean()

        for piece in range(case.micro):
            rows = slice(piece * len(x) // case.micro, (piece + 1) * len(x) // case.micro)
            last = piece == case.micro - 1
            if case.micro > 1:
                model.require_backward_grad_sync = last
            loss = loss_function(model(x[rows]), y[rows])
            given = {"optimizer": optimizer, "accumulating": not last, "closure": closure}
            with cockpit(step, loss=loss, **given):
                (loss / case.micro).backward()
        optimizer.step()
    cockpit.close()
    cockpit.history.write(folder / f"rank{rank}.jsonl")


def parts(case: Case, folder: Path, resume: bool = False) -> tuple[Any, Any, gradlens.Cockpit]:
    """The network, the optimizer and the cockpit of a process."""
    model = WRAPPERS[case.wrapper](NETWORKS[case.network]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path, reduction = folder / "run.jsonl", case.reduction
    cockpit = gradlens.Cockpit(
        model, quantities(), run=path, resume=resume, loss_reduction=reduction
    )
    return model, optimizer, cockpit


@cache
def in_one_process(case: Case) -> gradlens.History:
    model, (x, y) = NETWORKS[case.network](), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cockpit = gradlens.Cockpit(model, quantities(), loss_reduction=case.reduction)
    # The mean over processes of their means weighs the samples of a smaller share more.
    sizes = [share.stop - share.start for share in SHARES[case.shares]]
    count = len(sizes)
    each = [torch.full((n,), 12 / (count * max(n, 1)), dtype=torch.float64) for n in sizes]
    weights = torch.cat(each)
    is_mean = case.reduction == "mean"
    for step in range(case.steps):
        optimizer.zero_grad()

        def individual() -> Tensor:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
            return weights * losses if is_mean else losses

        def closure() -> Tensor:
            return individual().mean() if is_mean else individual().sum()

        losses = individual()
        loss = losses.mean() if is_mean else losses.sum()
        info = {"individual_losses": losses}
        with cockpit(step, loss=loss, optimizer=optimizer, closure=closure, info=info):
            # Gradients are averaged over the processes, also those of sums.
            (loss if is_mean else loss / count).backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory, worker, (2, 3, 4), CASES)


@pytest.mark.parametrize("name", CASES)
def test_processes_are_one_batch(name: str, runs: Path) -> None:
    history, cut = in_one_process(CASES[name].alone), CASES[name].cut
    expected = {series: dict(history[series]) for series in history.names}
    if cut is not None:
        expected["Alpha"][cut - 1] = Undefined(CONTINUED)
    ranks = [f"rank{rank}.jsonl" for rank in range(len(SHARES[CASES[name].shares]))]
    for file in (*ranks, "run.jsonl"):
        found = gradlens.History.load(runs / name / file)
        assert found.names == history.names
        for series, records in expected.items():  # wrapped modules have longer names
            if series == "CriticalSharpness":
                assert_same_searches(found[series], records)
                continue
            assert_same_records(unnamed(found[series]), unnamed(records))


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
    part = SHARES["equal"][rank]
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
