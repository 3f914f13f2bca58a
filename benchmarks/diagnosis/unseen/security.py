"""Problems for security.

Functions of data draw ``n`` samples with torch's global random numbers. Losses have the reductions
of PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere
from torch.optim import Adam, AdamW

from benchmarks.diagnosis.draws import Samples, fixed, noisy
from benchmarks.diagnosis.layers import Residual
from benchmarks.diagnosis.problem import reduced
from benchmarks.diagnosis.schedules import cosine, exponential, warmed_up_cosine
from benchmarks.diagnosis.training import Training, trained

POWER = 0.5
"""Between cross entropy, 0, and the mean absolute error, 1."""


def generalised_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """It withstands wrong labels (Zhang and Sabuncu, 2018)."""
    shares = outputs.softmax(1).gather(1, targets[:, None])[:, 0]
    return reduced((1 - (shares + 1e-8) ** POWER) / POWER, reduction)


LETTERS, EVENTS = 26, 16
"""Characters of names, and kinds of lines in a log."""


def hosts(n: int, length: int = 16) -> Samples:
    """Letters of a host's name ``[length]``; whether it was made by one of three generators.

    Letters of ordinary names depend on the ones before them. One generator counts in steps, one
    repeats its first letters backwards, and one draws from a part of the alphabet.
    """
    chain = (2.5 * fixed(81, LETTERS, LETTERS)).softmax(1)
    names = [torch.randint(LETTERS, (n,))]
    for _ in range(length - 1):
        names.append(torch.multinomial(chain[names[-1]], 1)[:, 0])
    ordinary = torch.stack(names, 1)
    step, start = torch.randint(1, 5, (n, 1)), torch.randint(LETTERS, (n, 1))
    counted = (start + step * torch.arange(length)) % LETTERS
    half = torch.randint(LETTERS, (n, length // 2))
    mirrored = torch.cat([half, half.flip(1)], 1)
    part = (start + torch.randint(8, (n, length))) % LETTERS
    kind = torch.randint(4, (n,))
    clean = torch.stack([ordinary, counted, mirrored, part], 1)[torch.arange(n), kind]
    is_noise = torch.rand(n, length) < 0.05
    return torch.where(is_noise, torch.randint(LETTERS, (n, length)), clean), kind


def logs(n: int, length: int = 20) -> Samples:
    """Kinds of lines ``[length]``, and that of each line after them, ``[length]``.

    A program goes through one of four routines again and again, and is sometimes interrupted.
    """
    routines = torch.tensor(
        [[0, 1, 2, 3, 4, 5], [0, 6, 2, 7, 8, 5], [9, 1, 10, 3, 11, 5], [9, 12, 10, 13, 8, 14]]
    )
    routine, phase = torch.randint(4, (n, 1)), torch.randint(6, (n, 1))
    lines = routines[routine, (torch.arange(length + 1) + phase) % 6]
    lines = torch.where(torch.rand(n, length + 1) < 0.05, 15, lines)
    return lines[:, :-1], lines[:, 1:]


def power_traces(n: int, length: int = 96) -> Samples:
    """Power that a chip draws, ``[1, length]``; how many of four secret bits are set.

    It draws more at three times for each set bit, after a start that varies.
    """
    bits = (torch.rand(n, 4) < 0.5).float()
    jitter = torch.randint(-3, 4, (n, 1))
    time = torch.arange(length) - jitter
    trace = 0.8 * (0.8 * time).sin() + 0.4 * (0.13 * time).cos()
    for place, width in ((25, 2.0), (50, 3.0), (75, 2.0)):
        bump = (-0.5 * ((time - place) / width).square()).exp()
        trace = trace + 0.9 * (bits.sum(1, keepdim=True) - 2) * bump
    return noisy(trace, 0.3)[:, None] / 0.85, bits.sum(1).long()


def connections(n: int) -> Samples:
    """Protocol, service and seven numbers of a connection, ``[9]``; which of five things it is.

    Ordinary traffic, a flood, a scan, a guess of passwords and a leak; a few labels are wrong.
    """
    kind = torch.randint(5, (n,))
    protocol = torch.multinomial((1.5 * fixed(82, 5, 3)).softmax(1)[kind], 1)
    service = torch.multinomial((1.5 * fixed(83, 5, 10)).softmax(1)[kind], 1)
    numbers = torch.randn(n, 7) + 1.3 * fixed(84, 5, 7)[kind]
    numbers[:, 0] = numbers[:, 0] * torch.where(kind == 2, -1.0, 1.0)
    wrong = torch.rand(n) < 0.03
    label = torch.where(wrong, torch.randint(5, (n,)), kind)
    return torch.cat([protocol.float(), service.float(), numbers / 1.6], 1), label


def packets(n: int, size: int = 24) -> Samples:
    """The port's group and bytes of a packet, ``[4 + size]``; which of six programs sent it.

    Each group of ports has its own code for the programs.
    """
    group, program = torch.randint(4, (n,)), torch.randint(6, (n,))
    contents = fixed(85, 4, 6, size)[group, program]
    return torch.cat([2.0 * F.one_hot(group, 4), noisy(contents, 1.3) / 1.6], 1), program


class HostNetwork(nn.Module):
    """Memories both ways, and the largest of each number over the name (Lai et al., 2015)."""

    def __init__(self, size: int = 16, width: int = 24, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, size)
        self.memory = nn.GRU(size, width, batch_first=True, bidirectional=True)
        self.join = nn.Sequential(nn.Linear(size + 2 * width, 48), nn.Tanh())
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        letters = self.embed(x)
        seen = self.join(torch.cat([letters, self.memory(letters)[0]], 2))
        return self.head(seen.amax(1))


class CausalDepthwise(nn.Module):
    """Each channel sees the last places of itself."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.convolution = nn.Conv1d(width, width, size, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(x.transpose(1, 2), (self.size - 1, 0))
        return self.convolution(past).transpose(1, 2)


class LogNetwork(nn.Module):
    """Residual blocks of light convolutions over the lines before (Wu et al., 2019)."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(EVENTS, width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    Residual(
                        nn.LayerNorm(width), nn.Linear(width, width), CausalDepthwise(width, 7)
                    ),
                    Residual(
                        *(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU()),
                        *(nn.Dropout(0.1), nn.Linear(2 * width, width)),
                    ),
                )
                for _ in range(blocks)
            ),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, EVENTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))).transpose(1, 2)


def trace_network(length: int = 96, width: int = 8, classes: int = 5) -> nn.Module:
    """Convolutions and averages with exponential units (Zaid et al., 2020)."""
    return nn.Sequential(
        *(nn.BatchNorm1d(1), nn.Conv1d(1, width, 7, padding=3), nn.ELU(), nn.AvgPool1d(2)),
        *(nn.Conv1d(width, 2 * width, 7, padding=3), nn.BatchNorm1d(2 * width), nn.ELU()),
        *(nn.AvgPool1d(4), nn.Flatten(), nn.Linear(length * width // 4, 24), nn.ELU()),
        nn.Linear(24, classes),
    )


class ConnectionNetwork(nn.Module):
    """Embeddings that scale and shift the numbers' hidden units (Perez et al., 2018)."""

    def __init__(self, width: int = 48, classes: int = 5) -> None:
        super().__init__()
        self.protocol, self.service = nn.Embedding(3, 2 * width), nn.Embedding(10, 2 * width)
        for table in (self.protocol, self.service):
            nn.init.normal_(table.weight, std=0.3)
        self.numbers = nn.Sequential(nn.Linear(7, width), nn.LayerNorm(width))
        self.layers = nn.Sequential(
            *(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)),
            nn.Linear(width, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        changes = self.protocol(x[:, 0].long()) + self.service(x[:, 1].long())
        scale, shift = changes.chunk(2, 1)
        return self.layers((1 + scale) * self.numbers(x[:, 2:]) + shift)


class PacketMixture(nn.Module):
    """Linear experts on hidden units, of which a gate mixes the logits."""

    def __init__(self, inputs: int = 28, width: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU())
            for _ in range(experts)
        )
        self.head = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        hidden = torch.stack([expert(x) for expert in self.experts], 2)
        return self.head((hidden * weights[:, None]).sum(2))


# fmt: off
SECURITY: tuple[Training, ...] = (
    trained("hosts", HostNetwork, hosts, 5000, F.cross_entropy,
        Adam, 4e-3, 32, 160, exponential, clip=1.0),
    trained("logs", LogNetwork, logs, 4000, F.cross_entropy,
        AdamW, 3e-3, 32, 150, warmed_up_cosine, clip=1.0, weight_decay=0.01),
    trained("power traces", trace_network, power_traces, 5000, F.cross_entropy,
        Adam, 2e-3, 32, 160),
    trained("connections", ConnectionNetwork, connections, 8000, generalised_cross_entropy,
        Adam, 3e-3, 64, 160),
    trained("experts for packets", PacketMixture, packets, 10000, F.cross_entropy,
        AdamW, 4e-3, 64, 180, cosine, weight_decay=0.01),
)
