"""Two processes that train one network together see what one process sees on the joined batch."""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing, nn

import gradlens
from gradlens.quantities import GradHist1d, GradHist2d
from tests.cockpit.test_training_loops import assert_same_histories, data, network, tracked

pytestmark = pytest.mark.slow

STEPS = 3
SHARES = {"equal": (slice(0, 6), slice(6, 12)), "unequal": (slice(0, 8), slice(8, 12))}


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


NETWORKS = {"factors": network, "recomputed": with_recomputed_layers}


def quantities() -> list[Any]:
    return [*tracked(), GradHist2d(), GradHist1d(keep_individual=True, name="by parameter")]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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


CASES = {
    "factors, equal shares": Case("factors", "equal", 1),
    "factors, unequal shares": Case("factors", "unequal", 1),
    "recomputed, micro-batches": Case("recomputed", "equal", 2),
    "factors, sum loss": Case("factors", "unequal", 1, "sum"),
    "factors, checkpoint": Case("factors", "unequal", 1, cut=2),
}


def worker(rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for name, case in CASES.items():
            train(rank, case, folder / name)
    finally:
        distributed.destroy_process_group()


def train(rank: int, case: Case, folder: Path) -> None:
    x, y = data()
    part = SHARES[case.shares][rank]
    x, y = x[part], y[part]
    loss_function = gradlens.extend(nn.CrossEntropyLoss(reduction=case.reduction))
    parallel, optimizer, cockpit = parts(case, folder)
    for step in range(STEPS):
        if step == case.cut:
            states = [each.state_dict() for each in (parallel, optimizer, cockpit)]
            distributed.barrier()  # the file is written by one process, and read by all
            parallel, optimizer, cockpit = parts(case, folder, resume=True)
            for each, state in zip((parallel, optimizer, cockpit), states, strict=True):
                each.load_state_dict(state)
            distributed.barrier()
        optimizer.zero_grad()
        for piece in range(case.micro):
            rows = slice(piece * len(x) // case.micro, (piece + 1) * len(x) // case.micro)
            last = piece == case.micro - 1
            parallel.require_backward_grad_sync = last
            loss = loss_function(parallel(x[rows]), y[rows])
            with cockpit(step, loss=loss, optimizer=optimizer, accumulating=not last):
                (loss / case.micro).backward()
        optimizer.step()
    cockpit.close()
    cockpit.history.write(folder / f"rank{rank}.jsonl")


def parts(case: Case, folder: Path, resume: bool = False) -> tuple[Any, Any, gradlens.Cockpit]:
    """The network, the optimizer and the cockpit of a process."""
    parallel = nn.parallel.DistributedDataParallel(NETWORKS[case.network]())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    path, reduction = folder / "run.jsonl", case.reduction
    cockpit = gradlens.Cockpit(
        parallel, quantities(), run=path, resume=resume, loss_reduction=reduction
    )
    return parallel, optimizer, cockpit


def in_one_process(case: Case) -> gradlens.History:
    model, (x, y) = NETWORKS[case.network](), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    cockpit = gradlens.Cockpit(model, quantities(), loss_reduction=case.reduction)
    # The mean over processes of their means weighs the samples of a smaller share more.
    sizes = [SHARES[case.shares][rank].stop - SHARES[case.shares][rank].start for rank in range(2)]
    weights = torch.cat([torch.full((n,), 12 / (2 * n), dtype=torch.float64) for n in sizes])
    is_mean = case.reduction == "mean"
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        losses = weights * losses if is_mean else losses
        loss = losses.mean() if is_mean else losses.sum()
        info = {"individual_losses": losses}
        with cockpit(step, loss=loss, optimizer=optimizer, info=info):
            # Gradients are averaged over the processes, also those of sums.
            (loss if is_mean else loss / 2).backward()
        optimizer.step()
    cockpit.close()
    return cockpit.history


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of every case: starting processes takes most of the time."""
    folder = tmp_path_factory.mktemp("runs")
    for name in CASES:
        (folder / name).mkdir()
    multiprocessing.spawn(worker, (free_port(), folder), nprocs=2)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, runs: Path) -> None:
    expected = in_one_process(CASES[name])
    for file in ("rank0.jsonl", "rank1.jsonl", "run.jsonl"):
        assert_same_histories(gradlens.History.load(runs / name / file), expected)
