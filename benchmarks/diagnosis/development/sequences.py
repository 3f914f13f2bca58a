"""Sequences of the development problems: text, words of formal languages, and series.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import random

import torch

from benchmarks.diagnosis.draws import Samples, noisy, uniform


def tagged_sentences(n: int, length: int = 20) -> Samples:
    """Sentences of 39 words that each have two meanings, and the meant one of six as a tag.

    The tags are a Markov chain, so that the neighbours say which tag a word has. Sentences have
    different lengths: behind the end the word is 0 and the tag -100.
    """
    follows = (2.5 * torch.randn(6, 6)).softmax(1)
    meanings = torch.zeros(6, 39)
    for word in range(39):
        meanings[torch.randperm(6)[:2], word] = 1.0
    tags = [torch.randint(6, (n,))]
    while len(tags) < length:
        tags.append(torch.multinomial(follows[tags[-1]], 1)[:, 0])
    sentence = torch.stack(tags, 1)
    words = 1 + torch.multinomial(meanings[sentence.flatten()], 1).view(n, length)
    behind = torch.arange(length) >= torch.randint(length // 2, length + 1, (n, 1))
    return words.masked_fill(behind, 0), sentence.masked_fill(behind, -100)


SUBJECTS = ("the cat", "a dog", "my old friend", "the king", "no one", "every child")
VERBS = (" sees ", " likes ", " follows ", " paints ", " forgets ")
ENDINGS = (" today. ", " in the garden. ", " at night. ", ". ")
ALPHABET = sorted({*"".join((*SUBJECTS, *VERBS, *ENDINGS))})


def generated_text(n: int, length: int = 32) -> Samples:
    """Pieces of text from a grammar, by character, and the characters that come next."""
    choose = random.Random(int(torch.randint(2**31, ()))).choice
    text = ""
    while len(text) < 5 * n:
        text += choose(SUBJECTS) + choose(VERBS) + choose(SUBJECTS) + choose(ENDINGS)
    characters = torch.tensor([ALPHABET.index(character) for character in text])
    starts = torch.randint(len(characters) - length, (n, 1))
    pieces = characters[starts + torch.arange(length + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def sorted_numbers(n: int, count: int = 8, largest: int = 10) -> Samples:
    """Numbers, a separator, and the numbers in order.

    The targets are the next tokens of the sorted half, and -100 before the separator.
    """
    numbers = torch.randint(largest, (n, count))
    separator = torch.full((n, 1), largest)
    tokens = torch.cat([numbers, separator, numbers.sort(1).values], 1)
    targets = tokens[:, 1:].clone()
    targets[:, :count] = -100
    return tokens[:, :-1], targets


def formal_languages(n: int, length: int = 16) -> Samples:
    """Words over six letters, and the language that a word belongs to.

    Words are palindromes, have a period of four, ascend, or are random; some letters are wrong.
    """
    labels = torch.randint(4, (n,))
    words = torch.randint(6, (n, length))
    half = words[:, : length // 2]
    languages = torch.stack(
        [
            torch.cat([half, half.flip(1)], 1),
            words[:, :4].repeat(1, length // 4),
            (words[:, :1] + torch.arange(length)) % 6,
            words,
        ]
    )
    wrong = torch.rand(n, length) < 0.05
    return torch.where(wrong, words, languages[labels, torch.arange(n)]), labels


def mackey_glass(n: int, length: int = 64, delay: int = 17) -> Samples:
    """Pieces ``[1, length]`` of Mackey and Glass's series (1977), and its next values."""
    series = [uniform(0.5, 1.3, n) for _ in range(delay + 1)]
    for _ in range(100 + 3 * (length + 1)):
        late = series[-1 - delay]
        series.append(0.9 * series[-1] + 0.2 * late / (1 + late**10))
    values = noisy((torch.stack(series, 1)[:, -3 * (length + 1) :: 3] - 0.9) / 0.23, 0.05)[:, None]
    return values[..., :-1], values[..., 1:]


def events(n: int, length: int = 96) -> Samples:
    """Recordings ``[1, length]`` in which events of five kinds happen or not, anywhere.

    The kinds are a spike, a step and its decay, a dip, a burst, and a ramp.
    """
    happened = (torch.rand(n, 5) < 0.35).float()
    time = torch.arange(length) - uniform(8, length - 16, n, 5, 1)
    after = (time > 0).float()
    shapes = torch.stack(
        [
            3 * (-((time[:, 0] / 1.5) ** 2)).exp(),
            2 * after[:, 1] * (-time[:, 1] / 10).exp(),
            -2 * (-((time[:, 2] / 5) ** 2)).exp(),
            1.5 * (-((time[:, 3] / 6) ** 2)).exp() * (2.2 * time[:, 3]).cos(),
            2 * after[:, 4] * (1 - time[:, 4] / 14).clamp(min=0) * time[:, 4] / 4,
        ],
        1,
    )
    return noisy((happened[..., None] * shapes).sum(1, keepdim=True), 0.15), happened


def pendulum(n: int, times: int = 12) -> Samples:
    """Angle and speed of a damped pendulum, ``[2]``, and those at later times, ``[times, 2]``."""
    angle, speed = uniform(-2.5, 2.5, n), uniform(-2, 2, n)
    path = [torch.stack([angle, speed], 1)]
    for _ in range(20 * times):
        speed = speed - 0.01 * (4 * angle.sin() + 0.3 * speed)
        angle = angle + 0.01 * speed
        path.append(torch.stack([angle, speed], 1))
    return path[0], noisy(torch.stack(path[20::20], 1), 0.02)
