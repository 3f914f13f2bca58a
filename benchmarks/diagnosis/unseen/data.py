"""Data of the unseen problems, drawn with the global random numbers of torch."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.training import Samples, fixed, noisy, pixels, uniform

# For music.

CHORDS = ((0, 4, 7), (0, 3, 7), (0, 5, 7))
"""Major, minor and suspended chords, in semitones above the root."""

OVERTONES = ((0, 1.0), (12, 0.6), (19, 0.4), (24, 0.3))
"""Semitones above the note, and how loud."""

RHYTHMS = (
    ("x...x...", "..x...x.", "xxxxxxxx", "........"),
    ("x..x..x.", "....x...", "x.x.x.x.", "x......."),
    ("x.....x.", "....x..x", "..x...x.", "....x..."),
    ("x.x.....", "...x..x.", "xx.xx.xx", "......x."),
    ("x...x.x.", "..x..x..", "x...x...", ".x.....x"),
    ("xx..x...", "...xx...", ".x.x.x.x", "x...x..."),
)
"""Bars of eight steps of bass drum, snare, hi-hat and cymbal."""


def chords(n: int, frames: int = 8) -> Samples:
    """How loud each pitch is over time, ``[1, 12, frames]``; which of 36 chords is played."""
    root, kind = torch.randint(12, (n,)), torch.randint(3, (n,))
    pitches = (torch.tensor(CHORDS)[kind] + root[:, None]) % 12
    loud = torch.zeros(n, 12, frames)
    loud.scatter_(1, pitches[..., None].expand(-1, -1, frames), uniform(0, 1.2, n, 3, frames))
    passing = (torch.rand(n, 12, frames) < 0.2) * uniform(0.3, 1, n, 12, frames)
    return (noisy(loud + passing, 0.5)[:, None] - 0.28) / 0.65, 3 * root + kind


def tempos(n: int, length: int = 128) -> Samples:
    """How suddenly a recording gets louder, ``[length]``; the logarithm of the beat's period."""
    period, phase = uniform(6, 20, n, 1), torch.rand(n, 1)
    turns = (torch.arange(length) / period + phase) % 1
    away = torch.minimum(turns, 1 - turns) * period
    beats = (-0.5 * away.square()).exp() * uniform(0.6, 1.4, n, length)
    offbeat = (-0.5 * ((turns - 0.5) * period).square()).exp() * uniform(0, 0.5, n, 1)
    heard = noisy(beats + offbeat, 0.25)
    return (heard - 0.3) / 0.5, (period.log() - 2.5) / 0.34


def notes(n: int, frames: int = 24, pitches: int = 12) -> Samples:
    """A spectrum over time, ``[frames, 36]``, and which notes sound, ``[frames, pitches]``."""
    start, last = uniform(-8, frames, n, 1, pitches), uniform(6, 14, n, 1, pitches)
    time = torch.arange(frames)[:, None] - start
    is_played = torch.rand(n, 1, pitches) < 0.5
    sounds = (time >= 0) & (time < last) & is_played
    decaying = sounds * (-0.08 * time.clamp(min=0)).exp() * uniform(0.7, 1.3, n, 1, pitches)
    spectrum = torch.zeros(n, frames, 36)
    for semitones, loudness in OVERTONES:
        spectrum[..., semitones : semitones + pitches] += loudness * decaying[..., : 36 - semitones]
    return (noisy(spectrum, 0.1) - 0.12) / 0.25, sounds.float()


def drums(n: int, length: int = 32) -> Samples:
    """Which drums are hit at each step, ``[length, 4]``, and at the step after it."""
    bars = torch.tensor([[[hit == "x" for hit in drum] for drum in bar] for bar in RHYTHMS])
    which, phase = torch.randint(len(RHYTHMS), (n, 1)), torch.randint(8, (n, 1))
    step = (torch.arange(length + 1) + phase) % 8
    hits = bars.transpose(1, 2)[which, step].float()
    hits = (hits - (torch.rand_like(hits) < 0.03).float()).abs()
    return 2 * hits[:, :-1] - 1, hits[:, 1:]


def tagged_sounds(n: int, bands: int = 24, frames: int = 32) -> Samples:
    """How loud each band is, ``[1, bands, frames]``; drums, bass, song, hiss and echo, ``[5]``."""
    tags = (torch.rand(n, 5) < 0.45).float()
    drum, bass, song, hiss, echo = tags[:, :, None, None].unbind(1)
    band, time = torch.arange(bands)[:, None], torch.arange(frames)
    beat = uniform(5, 9, n, 1, 1)
    since = (time + uniform(0, 9, n, 1, 1)) % beat
    height = uniform(10, 14, n, 1, 1) + 3 * (time / uniform(2, 4, n, 1, 1)).sin()
    low = uniform(1, 4, n, 1, 1)
    sound = 0.9 * drum * (-since).exp()
    sound = sound + bass * (-0.5 * (band - low).square()).exp()
    sound = sound + song * (-0.5 * (band - height).square()).exp()
    sound = sound + 0.5 * hiss * (band > 17) * torch.rand(n, bands, frames)
    late = torch.roll(sound, 4, 2) * (time >= 4)
    steady = echo * 0.5 * ((band - 7 - low).abs() < 1)
    return noisy((sound + 0.2 * late + steady - 0.25) / 0.35, 0.25)[:, None], tags


def synthesisers(n: int) -> Samples:
    """Knobs of a synthesiser, ``[6]``, the first for the wave; how it sounds, ``[3]``."""
    knobs = uniform(-1.7, 1.7, n, 6)
    kind = ((knobs[:, 0] + 1.7) / 0.85).long().clamp(0, 3)
    cutoff, resonance, attack, detune, drive = knobs[:, 1:].unbind(1)
    bright = torch.stack([-resonance, cutoff, cutoff * drive, 0.5 * cutoff + drive], 1)
    rough = torch.stack([0.5 * drive, detune, -detune + 0.5 * drive, resonance * drive], 1)
    rising = torch.stack([attack, attack - 0.5 * cutoff, -attack, 0.6 * detune], 1)
    chosen = [each.gather(1, kind[:, None]) for each in (bright, rough, rising)]
    return knobs, noisy(torch.cat(chosen, 1), 0.1)


# For finance.

MAKES, REGIONS = 12, 8
"""Of cars, and where they are driven."""


def options(n: int) -> Samples:
    """Moneyness, time, volatility and rate of a call option, ``[4]``; its price, ``[1]``.

    By the formula of Black and Scholes, in parts of the strike.
    """
    money, time = uniform(0.6, 1.4, n), uniform(0.1, 2, n)
    volatility, rate = uniform(0.1, 0.6, n), uniform(0, 0.1, n)
    spread = volatility * time.sqrt()
    near = (money.log() + (rate + volatility.square() / 2) * time) / spread
    discount = (-rate * time).exp()
    price = money * torch.special.ndtr(near) - discount * torch.special.ndtr(near - spread)
    inputs = [(money - 1) / 0.23, (time - 1.05) / 0.55, (volatility - 0.35) / 0.144]
    columns = torch.stack([*inputs, (rate - 0.05) / 0.029], 1)
    return columns, ((price - 0.2) / 0.15)[:, None]


def repairs(n: int) -> Samples:
    """Make, region and four numbers of a damaged car, ``[6]``; what the repair costs, ``[1]``."""
    make, region = torch.randint(MAKES, (n,)), torch.randint(REGIONS, (n,))
    age, speed, worth, season = torch.randn(n, 4).unbind(1)
    mean = 0.5 * fixed(61, MAKES)[make] + 0.4 * fixed(62, REGIONS)[region]
    mean = mean + 0.5 * speed - 0.3 * age * (worth > 0) + 0.3 * worth + 0.2 * (2 * season).sin()
    noise = torch.stack([-torch.rand(n).clamp(min=1e-6).log() for _ in range(8)]).mean(0)
    columns = [make.float(), region.float(), age, speed, worth, season]
    return torch.stack(columns, 1), (mean.exp() * noise)[:, None]


def volatilities(n: int, past: int = 48, future: int = 24) -> Samples:
    """Daily returns ``[past]`` and the mean of their squares in the days to come, ``[1]``."""
    level = uniform(-1.5, 1.5, n, 1)
    slope = 0.6 * torch.randn(n, 1)
    time = torch.linspace(-1, 0.5, past + future)
    deviation = (level + slope * time).exp()
    returns = deviation * torch.randn(n, past + future)
    return returns[:, :past] / 1.5, returns[:, past:].square().mean(1, keepdim=True) + 1e-3


def order_books(n: int, levels: int = 5, length: int = 32) -> Samples:
    """Volumes offered and asked for, ``[2 * levels, length]``; whether the price falls or rises.

    It follows the pressure of the best levels in the last quarter, and otherwise stays.
    """
    target = torch.randint(3, (n,))
    time = torch.linspace(0, 1, length)
    begins = uniform(0.55, 0.75, n, 1)
    pressure = (target[:, None] - 1) * ((time - begins) / 0.05).sigmoid() * uniform(0.7, 1.2, n, 1)
    old = torch.randint(-1, 2, (n, 1)) * ((0.4 - time) / 0.05).sigmoid()
    depth = (-0.5 * torch.arange(levels)).exp()[:, None]
    both = depth * (pressure + old)[:, None]
    busy = 0.4 * (2 * math.pi * (uniform(1, 3, n, 1, 1) * time + torch.rand(n, 1, 1))).sin()
    volumes = torch.cat([busy + both, busy - both], 1)
    return noisy(volumes, 1.0) / 1.1, target


def mortgages(n: int) -> Samples:
    """Seven numbers of a household, ``[7]``; whether it pays back early, ``[1]``.

    What matters depends on the contract, which two of the numbers say.
    """
    x = torch.randn(n, 7)
    fix, long, gap, income, age, left, region = x.unbind(1)
    fixed_rate = torch.where(long > 0, 2 * gap - left, gap + 1.5 * income)
    floating = torch.where(long > 0, 1.5 * age - income, -2 * left + 0.7 * region)
    score = 2 * torch.where(fix > 0, fixed_rate, floating)
    return x, (torch.rand(n) < score.sigmoid()).float()[:, None]


# For logistics.

HAULIERS, DEPOTS = 10, 6
"""Who drives the lorries, and from where."""


def tours(n: int, stops: int = 10) -> Samples:
    """Place, deadline and load of stops, ``[stops, 4]``; which of them is the next one.

    It is the one with the smallest sum of its distance and its deadline, of those whose load fits.
    """
    place, deadline = uniform(-1.7, 1.7, n, stops, 2), uniform(-1.7, 1.7, n, stops)
    load = uniform(-1.7, 1.7, n, stops)
    costs = place.norm(dim=2) + 0.8 * deadline + 3 * (load > 0.6)
    inputs = torch.cat([place, deadline[..., None], load[..., None]], 2)
    return inputs, costs.argmin(1)


def bicycles(n: int, times: int = 6, side: int = 10) -> Samples:
    """Bicycles lent and returned at places, ``[2, times, side, side]``; those lent next.

    A crowd moves over the town. Those who lent bicycles return them one time later.
    """
    rows, columns = pixels(side)
    time = torch.arange(times + 1)[:, None, None]
    lent = torch.zeros(n, times + 1, side, side)
    for _ in range(2):
        start, move = uniform(-0.7, 0.7, n, 2), uniform(-0.2, 0.2, n, 2)
        row, column = (
            start[:, i, None, None, None] + move[:, i, None, None, None] * time for i in range(2)
        )
        away = (rows - row).square() + (columns - column).square()
        lent += uniform(0.6, 1.4, n, 1, 1, 1) * (-away / 0.12).exp()
    returned = torch.roll(lent, 1, 1)[:, 1:]
    both = torch.stack([lent[:, :-1], returned], 1)
    return noisy((both - 0.35) / 0.4, 0.2), (lent[:, -1] - 0.35) / 0.4


def lorries(n: int) -> Samples:
    """Haulier, depot and six numbers of a trip, ``[8]``; how late it is, ``[1]``."""
    haulier, depot = torch.randint(HAULIERS, (n,)), torch.randint(DEPOTS, (n,))
    x = torch.randn(n, 6)
    way, rain, load, hour, works, stops = x.unbind(1)
    late = 0.4 * fixed(71, HAULIERS)[haulier] + 0.3 * fixed(72, DEPOTS)[depot]
    late = late + 0.5 * way * (works > 0) + 0.4 * rain * way + 0.3 * (2 * hour).sin()
    late = late + 0.3 * stops.relu() - 0.2 * load
    columns = torch.cat([haulier[:, None].float(), depot[:, None].float(), x], 1)
    return columns, noisy(late, 0.15)[:, None]


def stacks(n: int, count: int = 6, height: int = 5) -> Samples:
    """When each container of each stack leaves, ``[count, height]``; how many are in the way.

    A container is in the way if one below it leaves earlier. Empty places leave at -2.
    """
    leaves = uniform(0, 1, n, count, height)
    filled = torch.randint(1, height + 1, (n, count, 1)) > torch.arange(height)
    below = torch.where(filled, leaves, 2.0).cummin(2).values
    blocking = ((leaves > below) & filled).sum((1, 2), dtype=torch.float32)
    inputs = torch.where(filled, 3 * leaves - 1, -2.0)
    return inputs, (blocking[:, None] - 6.5) / 2.3


def warehouses(n: int, count: int = 8) -> Samples:
    """Six numbers of warehouses for an order, ``[count, 6]``; how good each is, ``[count]``.

    One number is the order's urgency, which is the same for all.
    """
    x = torch.randn(n, count, 6)
    x[..., 5] = x[:, :1, 5]
    near, stock, price, staff, space, urgent = x.unbind(2)
    worth = torch.where(urgent > 0, 1.5 * near + staff, -price + 0.7 * space) + stock.clamp(max=0)
    return x, noisy(worth, 0.1)


def couriers(n: int) -> Samples:
    """Distance, hills, traffic, rain, weight and hour, ``[6]``; minutes by the best means, ``[1]``.

    Bicycles, vans and drones depend on other things.
    """
    x = torch.randn(n, 6)
    way, hills, traffic, rain, weight, hour = x.unbind(1)
    bicycle = 1.5 * way + hills + 0.5 * rain
    van = 0.5 * way + 1.5 * traffic * (1 + 0.3 * hour) - 0.3
    drone = 0.3 * way.abs() + 1.5 * weight - 0.2
    fast = torch.where(weight < -0.4, drone, torch.where(way + hour < 0.2, bicycle, van))
    return x, noisy(fast, 0.1)[:, None]


# For the oceans.


def eddies(n: int, side: int = 16) -> Samples:
    """Currents ``[2, side, side]``; where water turns left, right or not, ``[side, side]``."""
    rows, columns = pixels(side)
    current = torch.zeros(n, 2, side, side)
    kind = torch.zeros(n, side, side, dtype=torch.long)
    for sign, label in ((1.0, 1), (-1.0, 2)):
        row, column = uniform(-0.7, 0.7, n, 1, 1), uniform(-0.7, 0.7, n, 1, 1)
        size = uniform(0.2, 0.4, n, 1, 1)
        south, east = rows - row, columns - column
        away = (south.square() + east.square()) / size.square()
        turning = 2 * sign * (-away / 2).exp() / size
        current = current + torch.stack([-turning * south, turning * east], 1)
        kind[away < 1.5] = label
    steady = 0.3 * torch.randn(n, 2, 1, 1)
    return noisy(current + steady, 0.1) / 0.5, kind


def buoys(n: int, length: int = 64) -> Samples:
    """How a buoy rises and tilts, ``[3, length]``; sine and cosine of where waves go, ``[2]``.

    A second, weaker swell comes from elsewhere.
    """
    time = torch.arange(length)
    moved = torch.zeros(n, 3, length)
    main = uniform(-math.pi, math.pi, n, 1)
    for strength, direction in ((1.0, main), (0.35, uniform(-math.pi, math.pi, n, 1))):
        period = uniform(6, 16, n, 1)
        phase = 2 * math.pi * (time / period + torch.rand(n, 1))
        tilts = [direction.sin() * phase.cos(), direction.cos() * phase.cos()]
        moved = moved + strength * torch.stack([phase.sin(), *tilts], 1)
    return noisy(moved, 0.2) / 0.65, torch.cat([main.sin(), main.cos()], 1)


def layers(n: int, depths: int = 40) -> Samples:
    """Temperature and salt by depth, ``[2, depths]``; how deep water is mixed, ``[1]``."""
    depth = torch.linspace(0, 1, depths)
    mixed, sharp = uniform(0.15, 0.75, n, 1), uniform(0.02, 0.08, n, 1)
    below = ((depth - mixed) / sharp).sigmoid()
    warm, salt = uniform(0.7, 1.5, n, 1), uniform(-0.8, 0.8, n, 1)
    temperature = -warm * below - 0.3 * depth + uniform(-0.3, 0.3, n, 1)
    salinity = salt * below + uniform(-0.3, 0.3, n, 1)
    profile = torch.stack([(temperature + 0.65) / 0.6, salinity / 0.4], 1)
    return noisy(profile, 0.15), (mixed - 0.45) / 0.173


def plankton(n: int, side: int = 16) -> Samples:
    """Pictures ``[1, side, side]`` of rings, chains, rods, stars and blobs; which of them it is."""
    rows, columns = pixels(side)
    kind = torch.randint(5, (n,))
    row, column = uniform(-0.25, 0.25, n, 1, 1), uniform(-0.25, 0.25, n, 1, 1)
    angle, size = uniform(0, math.pi, n, 1, 1), uniform(0.45, 0.65, n, 1, 1)
    south, east = rows - row, columns - column
    along = angle.cos() * south + angle.sin() * east
    across = angle.cos() * east - angle.sin() * south
    radius = (along.square() + across.square()).sqrt()
    around = torch.atan2(across, along)
    inside = (along.abs() < 1.3 * size) * 1.0
    line = (-0.5 * (across / 0.1).square()).exp() * inside
    pictures = torch.stack(
        [
            (-0.5 * ((radius - size) / 0.1).square()).exp(),
            (-0.5 * (across / 0.17).square()).exp() * inside * (along * 9).sin().square(),
            line,
            (-0.5 * (radius * (2 * around).sin() / 0.1).square()).exp() * (radius < 1.2 * size),
            (-0.5 * (radius / (0.6 * size)).square()).exp(),
        ],
        1,
    )
    seen = pictures[torch.arange(n), kind] * uniform(0.7, 1.3, n, 1, 1)
    return noisy((seen - 0.15) / 0.3, 0.4)[:, None], kind


def floats(n: int, length: int = 24, later: int = 6) -> Samples:
    """Where a float drifts, ``[length, 2]``, from its last place; where it is later, ``[2]``.

    It follows a steady current and turns with an eddy.
    """
    time = torch.arange(-length + 1, later + 1)
    speed, heading = uniform(0.02, 0.08, n, 1), uniform(0, 2 * math.pi, n, 1)
    turn, start = uniform(-0.35, 0.35, n, 1), uniform(0, 2 * math.pi, n, 1)
    radius = uniform(0.2, 0.6, n, 1)
    phase = start + turn * time
    east = speed * heading.cos() * time + radius * (phase.cos() - start.cos())
    north = speed * heading.sin() * time + radius * (phase.sin() - start.sin())
    path = torch.stack([east, north], 2)
    return noisy(path[:, :length], 0.02) / 0.7, path[:, -1] / 0.5


# For security.

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


# For robots.


def scans(n: int, rays: int = 48) -> Samples:
    """How far walls are before and after a turn, ``[2, rays]``; its sine and cosine, ``[2]``."""
    angle = 2 * math.pi * torch.arange(rays) / rays
    turn = uniform(-0.8, 0.8, n, 1)
    sizes, phases = uniform(0.15, 0.45, n, 4, 1), uniform(0, 2 * math.pi, n, 4, 1)
    waves = torch.arange(1, 5)[:, None]

    def seen(heading: torch.Tensor) -> torch.Tensor:
        return (sizes * (waves * heading[:, None] + phases).sin()).sum(1)

    both = torch.stack([seen(angle.expand(n, -1)), seen(angle + turn)], 1)
    return noisy(both, 0.03) / 0.43, torch.cat([turn.sin(), turn.cos()], 1)


def grips(n: int, side: int = 16) -> Samples:
    """Heights ``[1, side, side]``; where a gripper that opens sideways can hold, the same shape.

    It holds narrow things, and slips from wide ones.
    """
    rows, columns = pixels(side)
    height, holds = torch.zeros(n, side, side), torch.zeros(n, side, side)
    for row, column in ((-0.5, -0.5), (0.5, -0.45), (-0.45, 0.5), (0.5, 0.5)):
        there = torch.rand(n, 1, 1) < 0.75
        narrow = torch.rand(n, 1, 1) < 0.5
        south, east = (uniform(-0.1, 0.1, n, 1, 1) for _ in range(2))
        wide = torch.where(narrow, 0.14, 0.36)
        tall = torch.where(narrow, uniform(0.2, 0.36, n, 1, 1), uniform(0.12, 0.36, n, 1, 1))
        inside = ((rows - row - south).abs() < tall) & ((columns - column - east).abs() < wide)
        height = torch.where(inside & there, uniform(0.7, 1.3, n, 1, 1), height)
        holds = torch.where(inside & there & narrow, 1.0, holds)
    return noisy((height - 0.15) / 0.35, 0.3)[:, None], holds[:, None]


def arms(n: int) -> Samples:
    """Angles, speeds and accelerations of an arm with two joints, ``[6]``; its torques, ``[2]``."""
    angles, speeds, gains = uniform(-2, 2, n, 2), torch.randn(n, 2), torch.randn(n, 2)
    first, second = angles.unbind(1)
    coupled, turned = second.cos(), second.sin()
    own = (2 + coupled) * gains[:, 0] + (0.5 + 0.5 * coupled) * gains[:, 1]
    own = own - 0.5 * turned * (2 * speeds[:, 0] + speeds[:, 1]) * speeds[:, 1]
    other = (0.5 + 0.5 * coupled) * gains[:, 0] + 0.7 * gains[:, 1]
    other = other + 0.5 * turned * speeds[:, 0].square()
    weight = (first + second).cos()
    torques = torch.stack([own + 2 * first.cos() + weight, other + weight], 1)
    inputs = torch.cat([angles / 1.15, speeds, gains], 1)
    return inputs, noisy(torques / torch.tensor([2.9, 1.2]), 0.05)


def ground(n: int, length: int = 64) -> Samples:
    """Accelerations ``[3, length]`` of a robot that walks; on which of five grounds it does.

    Grounds differ in how hard steps are, how long they ring, and how much the robot sways.
    """
    kind = torch.randint(5, (n,))
    hard = torch.tensor([2.5, 1.2, 2.0, 0.8, 1.6])[kind][:, None]
    ring = torch.tensor([0.6, 0.15, 0.15, 0.3, 0.5])[kind][:, None]
    tone = torch.tensor([2.4, 1.0, 1.7, 0.6, 1.2])[kind][:, None]
    sway = torch.tensor([0.2, 0.8, 0.4, 1.2, 0.9])[kind][:, None]
    time = torch.arange(length)
    period, phase = uniform(12, 18, n, 1), torch.rand(n, 1)
    since = (time + phase * period) % period
    step = hard * (-ring * since).exp() * (tone * since).cos() * uniform(0.8, 1.2, n, 1)
    swing = (math.pi * (time / period + phase)).sin()
    motion = torch.stack([step, 0.4 * step + sway * swing, sway * swing.square()], 1)
    return noisy(motion - 0.1, 0.35) / 0.7, kind


def gaits(n: int) -> Samples:
    """Speed, slope, load and two phases, ``[7]``; angles of three joints, ``[3]``.

    A robot creeps, walks or trots by its speed.
    """
    speed, slope, load = uniform(-1.7, 1.7, n), torch.randn(n), torch.randn(n)
    first, second = uniform(0, 2 * math.pi, n), uniform(0, 2 * math.pi, n)
    creep = torch.stack([first.sin(), 0.5 * slope, -first.cos()], 1)
    walk = torch.stack([second.cos() + 0.3 * load, -second.sin(), 0.5 * load], 1)
    trot = torch.stack([-first.cos(), second.sin() + 0.3 * slope, second.cos()], 1)
    fast, slow = (speed > 0.6)[:, None], (speed < -0.6)[:, None]
    angles = torch.where(fast, trot, torch.where(slow, creep, walk))
    waves = [1.4 * wave for wave in (first.sin(), first.cos(), second.sin(), second.cos())]
    return torch.stack([speed, slope, load, *waves], 1), noisy(1.3 * angles, 0.1)
