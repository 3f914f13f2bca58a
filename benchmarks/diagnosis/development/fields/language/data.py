"""Text by character and by word: scikit-learn's, and text from rules.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache
from importlib import resources

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples

CHARACTERS = " ,.abcdefghijklmnopqrstuvwxyz"


@lru_cache
def descriptions() -> str:
    """What scikit-learn says about its data sets: words, commas and full stops."""
    files = sorted(resources.files("sklearn.datasets.descr").iterdir(), key=lambda file: file.name)
    text = " ".join(file.read_text() for file in files if file.name.endswith(".rst"))
    return " ".join(re.findall(r"[a-z]+|[.,]", text.lower()))


def english(n: int, length: int = 32) -> Samples:
    """Pieces of English by character, which don't overlap, and the characters that come next."""
    characters = torch.tensor([CHARACTERS.index(character) for character in descriptions()])
    first = int(torch.randint(length, ()))
    pieces = characters[first:].unfold(0, length + 1, length + 1)
    chosen = pieces[torch.randperm(len(pieces))[:n]]
    return chosen[:, :-1], chosen[:, 1:]


ONES = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
ONES += " sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
WORDS = ["", *ONES.split(), *TENS.split(), "hundred", "thousand"]
SPOKEN, WRITTEN = 9, 6
"""The most words of a number, and its digits."""
START = len(WORDS)
"""What the digits start with; digit ``d`` is ``START + 1 + d``."""


def spoken(number: int) -> list[str]:
    """The words of a number below a million."""
    if number >= 1000:
        return [*spoken(number // 1000), "thousand", *spoken(number % 1000)]
    if number >= 100:
        return [WORDS[number // 100], "hundred", *spoken(number % 100)]
    if number >= 20:
        return [TENS.split()[number // 10 - 2], *spoken(number % 10)]
    return [WORDS[number]] if number else []


def numbers(n: int) -> Samples:
    """Numbers in words and their digits but the last, ``[15]``; all of the digits, ``[6]``."""
    values = torch.randint(1, 10**WRITTEN, (n,))
    powers = 10 ** torch.arange(WRITTEN - 1, -1, -1)
    digits = values[:, None] // powers % 10
    codes = [[WORDS.index(word) for word in spoken(value)] for value in values.tolist()]
    words = torch.tensor([[*code, *[0] * (SPOKEN - len(code))] for code in codes])
    return torch.cat([words, torch.full((n, 1), START), START + 1 + digits[:, :-1]], 1), digits


KINDS = 2
"""Tag 0 is outside of names; ``2 k - 1`` begins a name of kind ``k``, ``2 k`` continues it."""
NAMES, CUES = 24, 6
"""Words that names consist of, and words of each kind that stand before a name."""


def named_entities(n: int, length: int = 18) -> Samples:
    """Sentences in which a cue says of which kind the name is that follows; tags of the words.

    A name consists of two or three words, and any of these may be in a name of either kind.
    """
    choose = random.Random(int(torch.randint(2**31, ())))
    sentences, tags = [], []
    for _ in range(n):
        words, marks = list[int](), list[int]()
        while len(words) < length:
            kind = choose.randint(1, KINDS)
            name = [choose.randrange(NAMES) for _ in range(choose.randint(2, 3))]
            words += [NAMES + CUES * (kind - 1) + choose.randrange(CUES), *name]
            marks += [0, 2 * kind - 1, *[2 * kind] * (len(name) - 1)]
        first = choose.randrange(2)
        sentences.append(words[first : first + length - 2])
        tags.append(marks[first : first + length - 2])
    return torch.tensor(sentences), torch.tensor(tags)


NOTES, HIDDEN = 20, 20
"""How many notes there are, and what stands for one that isn't shown."""


def melodies(n: int, half: int = 8, hidden: int = 4) -> Samples:
    """Melodies that are played twice, with some notes hidden; which these are, and else -100.

    A note that is hidden the first time isn't hidden the second time.
    """
    steps = torch.randint(-2, 3, (n, half)).cumsum(1) + torch.randint(NOTES, (n, 1))
    turned = steps.remainder(2 * NOTES - 2)
    motif = torch.where(turned < NOTES, turned, 2 * NOTES - 2 - turned)
    places = torch.rand(n, half).topk(hidden, 1).indices
    places = places + half * torch.randint(2, (n, hidden))
    notes = motif.repeat(1, 2)
    is_hidden = torch.zeros_like(notes).scatter(1, places, 1) > 0
    return notes.masked_fill(is_hidden, HIDDEN), notes.masked_fill(~is_hidden, -100)


CONSONANTS, VOWELS = 12, 5
"""Letters from 0 are consonants, and those behind them vowels; the last one is a space."""
LANGUAGES = 5


def languages(n: int, length: int = 40) -> Samples:
    """Words of syllables, by letter, and the language that they are in.

    Each language prefers some consonants, some vowels behind each of them, and lengths of words.
    """
    consonants = (1.2 * torch.randn(LANGUAGES, CONSONANTS)).softmax(1)
    vowels = (1.5 * torch.randn(LANGUAGES, CONSONANTS, VOWELS)).softmax(2)
    ends = torch.tensor([0.2, 0.3, 0.4, 0.5, 0.6])
    labels = torch.randint(LANGUAGES, (n,))
    syllables = length // 2
    first = torch.multinomial(consonants[labels], syllables, replacement=True)
    second = torch.multinomial(vowels[labels[:, None], first].flatten(0, 1), 1).view(n, -1)
    is_end = torch.rand(n, syllables) < ends[labels][:, None]
    return _spelt(first, second + CONSONANTS, is_end, length), labels


def _spelt(consonants: Tensor, vowels: Tensor, is_end: Tensor, length: int) -> Tensor:
    """The letters of syllables, with a space behind each one that ends a word."""
    space = torch.full_like(vowels, CONSONANTS + VOWELS)
    letters = torch.stack([consonants, vowels, space], 2).flatten(1)
    is_kept = F.pad(is_end[..., None], (2, 0), value=True).flatten(1)
    order = torch.where(is_kept, 0, 1).argsort(dim=1, stable=True)
    return letters.gather(1, order)[:, :length]
