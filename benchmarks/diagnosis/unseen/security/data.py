"""Names of hosts, logs, power traces, connections and packets.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy

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
