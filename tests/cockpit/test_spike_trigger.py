"""Which losses count as a jump."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest

from gradlens.history.spikes import NEVER
from gradlens.observers.autopsy import AT_LEAST, RECENT, SpikeTrigger


def jumps(losses: Iterable[float]) -> list[int]:
    trigger = SpikeTrigger()
    found = []
    for step, loss in enumerate(losses):
        trigger.recovery(step, loss)
        if trigger.take_in(step, loss) is not None:
            found.append(step)
    return found


def noisy(count: int, level: float = 1.0, noise: float = 0.1) -> list[float]:
    generator = random.Random(0)
    return [level + noise * generator.gauss(0, 1) for _ in range(count)]


NAN, FLAT = math.nan, [1.0] * 50
LOSSES: dict[str, tuple[list[float], list[int]]] = {
    **{f"one at {n}": ([*noisy(n), 5, *noisy(50)], [n]) for n in (AT_LEAST, 40, 200)},
    "nothing to compare with": ([*noisy(AT_LEAST - 1), 5, *noisy(50)], []),
    "noise": (noisy(5000), []),
    "slow growth": ([1.0 + 1e-3 * step for step in range(3000)], []),
    "decay": ([math.exp(-step / 100) for step in range(1000)], []),
    "tiny": ([*FLAT, 1.001, *FLAT, 1.4, *FLAT], []),
    "tiny, of a small loss": ([2.3] * 20 + [1e-4] * 60 + [0.01] + [1e-4] * 20, []),
    "a level": ([*noisy(40), *noisy(400, 10.0)], [40]),
    "two levels": ([*noisy(40), *noisy(200, 10.0), *noisy(100), *noisy(100, 30.0)], [40, 340]),
    "growth": ([*noisy(40), *(1.3**n for n in range(10, 10 + RECENT))], [40]),
    "NaN": ([NAN] * 200, [0]),
    "NaN until a loss is finite": ([1.0, math.inf, NAN, NAN, 1.0, 1.0, NAN], [1, 6]),
}
"""Losses, and the steps of the jumps among them."""


@pytest.mark.parametrize("name", LOSSES)
def test_jumps(name: str) -> None:
    losses, expected = LOSSES[name]
    assert jumps(losses) == expected


def test_jumps_again_and_again_become_rare() -> None:
    alternating = [10.0 if step % 2 else 1.0 for step in range(20_000)]
    assert len(jumps(alternating)) < 5
    rising = []
    for step in range(20_000):
        rising.append(1.0 + 0.01 * (step % 7) + (5 + step / 100 if step % 60 == 59 else 0))
    assert len(jumps(rising)) < math.sqrt(2 * 20_000)


def test_recovery() -> None:
    trigger = SpikeTrigger()
    for step, loss in enumerate([*noisy(40), 9.0]):
        assert trigger.recovery(step, loss) is None
        trigger.take_in(step, loss)
    assert trigger.recovery(41, 8.0) is None
    assert trigger.recovery(43, 1.0) == (40, 3)
    assert trigger.recovery(44, 1.0) is None
    for step, loss in enumerate([math.nan] * (RECENT + 1)):
        back = trigger.recovery(100 + step, loss)
        trigger.take_in(100 + step, loss)
    assert back == (100, NEVER)


def test_a_state_continues() -> None:
    losses = [*noisy(40), 9.0, 8.0, 1.0, *noisy(30), 20.0, *noisy(10)]
    for split in range(len(losses)):
        trigger = SpikeTrigger()
        found = []
        for step, loss in enumerate(losses):
            if step == split:
                state = trigger.state_dict()
                trigger = SpikeTrigger()
                trigger.load_state_dict(state)
            back = trigger.recovery(step, loss)
            found.append((back, trigger.take_in(step, loss) is not None))
        assert [step for step, (_, jump) in enumerate(found) if jump] == [40, 73]
        assert [each for each, _ in found if each is not None] == [(40, 2), (73, 1)]
