"""Boards, cards, mazes, matches, races and landings.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.development.disciplines.fixed import fixed
from benchmarks.diagnosis.draws import Samples, noisy, uniform

RANKS = 6
"""Ranks of cards, of four suits."""
CARDS = 4 * RANKS
"""Cards; the numbers behind them are suits that are trumps."""
PLAYERS = 40
"""Players of matches."""
SIDE = 6
"""Rows and columns of a maze."""
PAST = 8
"""Times of a landing."""

Board = tuple[int, ...]
"""Nine fields: 1 for one's own, -1 for the other's, else 0."""
ROWS = (
    *((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6)),
    *((1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)),
)


@cache
def worth(board: Board) -> int:
    """1 if the one to move wins by best play, 0 for a draw, else -1."""
    if is_lost(board):
        return -1
    return max((-worth(after(board, field)) for field in free(board)), default=0)


def is_lost(board: Board) -> bool:
    """Whether the other one has a row."""
    return any(all(board[field] == -1 for field in row) for row in ROWS)


def free(board: Board) -> list[int]:
    """Fields that nobody has."""
    return [field for field in range(9) if not board[field]]


def after(board: Board, field: int) -> Board:
    """The board as the other one sees it after a move."""
    return tuple(-(1 if place == field else owner) for place, owner in enumerate(board))


@cache
def all_positions() -> tuple[tuple[Board, ...], tuple[tuple[float, ...], ...]]:
    """Boards of tic-tac-toe that are to be played on; shares of the best moves, and the worth."""
    found: dict[Board, tuple[float, ...]] = {}
    stack: list[Board] = [(0,) * 9]
    while stack:
        board = stack.pop()
        if board in found or is_lost(board) or not free(board):
            continue
        moves = {field: -worth(after(board, field)) for field in free(board)}
        best = [field for field, value in moves.items() if value == max(moves.values())]
        shares = [1 / len(best) if field in best else 0.0 for field in range(9)]
        found[board] = (*shares, float(max(moves.values())))
        stack += [after(board, field) for field in moves]
    return tuple(found), tuple(found.values())


def positions(n: int) -> Samples:
    """Positions of tic-tac-toe, ``[2, 3, 3]``; shares of the moves and the worth, ``[10]``."""
    boards, answers = (torch.tensor(each, dtype=torch.float32) for each in all_positions())
    chosen = torch.randperm(len(boards))[:n]
    planes = torch.stack([(boards == 1).float(), (boards == -1).float()], 1)
    return planes[chosen].view(n, 2, 3, 3), answers[chosen]


def tricks(n: int) -> Samples:
    """Four cards and the trumps' suit, ``[5]``; which card takes the trick.

    It is the highest of the trumps, or else of the suit of the first card.
    """
    cards = torch.rand(n, CARDS).argsort(1)[:, :4]
    suits, ranks = cards // RANKS, cards % RANKS
    trumps = torch.randint(4, (n, 1))
    follows = (suits == suits[:, :1]).long() + 2 * (suits == trumps).long()
    return torch.cat([cards, CARDS + trumps], 1), (ranks + RANKS * follows).argmax(1)


def automata(n: int, side: int = 10) -> Samples:
    """Cells ``[1, side, side]`` of Conway's game of life on a torus, and which live next."""
    alive = (torch.rand(n, 1, side, side) < uniform(0.25, 0.5, n, 1, 1, 1)).float()
    around = F.pad(alive, (1, 1, 1, 1), mode="circular")
    total = 9 * F.avg_pool2d(around, 3, 1)
    next_alive = ((total - 3).abs() < 0.5) | ((alive > 0) & ((total - 4).abs() < 0.5))
    return noisy(2 * alive - 0.7, 0.3), next_alive.float()


def matches(n: int) -> Samples:
    """Two players, ``[2]``; whether the second one wins, none does, or the first one does.

    Players have strengths, and styles that beat each other in a ring.
    """
    pairs = torch.rand(n, PLAYERS).argsort(1)[:, :2]
    strength, style = 2.0 * fixed(3, PLAYERS), 2.0 * fixed(4, PLAYERS, 2)
    first, second = style[pairs].unbind(1)
    ring = first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]
    lead = strength[pairs[:, 0]] - strength[pairs[:, 1]] + ring
    shown = lead + 0.5 * torch.randn(n)
    return pairs, (shown > -0.6).long() + (shown > 0.6).long()


def mazes(n: int) -> Samples:
    """Walls, a goal and a walker, ``[3, SIDE, SIDE]``; the way to take: up, down, left or right.

    No other way is as good.
    """
    drawn = 5 * n
    walls = (torch.rand(drawn, SIDE, SIDE) < 0.2).float()
    flat = torch.rand(drawn, SIDE * SIDE).argsort(1)[:, :2]
    goal, walker = F.one_hot(flat, SIDE * SIDE).float().view(drawn, 2, SIDE, SIDE).unbind(1)
    walls = walls * (1 - goal) * (1 - walker)
    far = 100.0
    distance = far * (1 - goal)
    for _ in range(2 * SIDE):
        distance = torch.minimum(distance, beside(distance, far).amin(1) + 1) + far * walls
        distance = distance.clamp(max=far)
    ways = (beside(distance, far) * walker[:, None]).sum((2, 3))
    mazes = torch.stack([walls, goal, walker], 1)
    is_clear = ((ways == ways.amin(1, keepdim=True)).sum(1) == 1).nonzero()[:n, 0]
    return mazes[is_clear], ways[is_clear].argmin(1)


def beside(distance: Tensor, far: float) -> Tensor:
    """What is above, below, left and right of each place, ``[n, 4, SIDE, SIDE]``."""
    padded = F.pad(distance, (1, 1, 1, 1), value=far)
    return torch.stack(
        [
            *(padded[:, :-2, 1:-1], padded[:, 2:, 1:-1]),
            *(padded[:, 1:-1, :-2], padded[:, 1:-1, 2:]),
        ],
        1,
    )


def landings(n: int) -> Samples:
    """Points to come, height, speed and the thrust before, ``[PAST, 4]``; the thrust, ``[PAST]``.

    Good pilots, who get more points, correct what is wrong more strongly.
    """
    skill = uniform(-1, 1, n)
    height, speed, thrust = uniform(0.5, 2, n), uniform(-1.5, 0.5, n), torch.zeros(n)
    seen, taken = [], []
    for time in range(PAST):
        points = skill * (1 - 0.05 * time)
        seen.append(torch.stack([1.5 * points, height - 0.8, 1.5 * speed, thrust], 1))
        wanted = (1.2 + skill) * (-0.6 * height - 1.2 * speed) + 0.4 * thrust
        thrust = noisy(1.5 * (wanted / 1.5).tanh(), 0.1)
        taken.append(thrust)
        speed = noisy(speed + 0.25 * thrust, 0.05)
        height = height + 0.25 * speed
    return torch.stack(seen, 1), torch.stack(taken, 1)


def races(n: int) -> Samples:
    """Three sensors of the ground and six numbers of a car; what it does, one of four.

    It grips, slides in front, slides behind, or stands, by laws that asphalt, gravel and ice have.
    """
    ground = torch.randint(3, (n,))
    about = noisy(1.5 * F.one_hot(ground, 3).float() - 0.5, 0.25)
    car = torch.randn(n, 6)
    laws = 1.5 * fixed(5, 3, 6, 4)
    scores = (car[:, None] @ laws[ground])[:, 0] + torch.tensor([0.6, 0.0, 0.0, 0.3])
    return torch.cat([about, car], 1), noisy(scores, 0.2).argmax(1)
