"""Text from rules: formulas, recipes, marks, questions, walks over words, facts and topics.

Each function draws ``n`` samples with torch's global random numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from benchmarks.diagnosis.draws import Samples

LETTERS, LENGTH = 14, 8
"""Letters of words, and how many of them a word has."""
BEGIN = 2 * LETTERS
"""What a spelt word starts with."""


def spellings(n: int) -> Samples:
    """Words and their capitals backwards but the last, ``[2 LENGTH]``; all of these, ``[LENGTH]``.

    The capital of letter ``k`` is ``LETTERS + k``.
    """
    words = torch.randint(LETTERS, (n, LENGTH))
    spelt = LETTERS + words.flip(1)
    return torch.cat([words, torch.full((n, 1), BEGIN), spelt[:, :-1]], 1), spelt - LETTERS


STEPS, DISHES = 24, 4
"""Words of recipes, and how many kinds of dishes there are."""


def recipes(n: int, length: int = 24) -> Samples:
    """Recipes by word, and the words that come next.

    A word says the dish, and each next word depends on the dish and on the word before.
    """
    follows = (2.5 * torch.randn(DISHES, STEPS, STEPS)).softmax(2)
    dish, word = torch.randint(DISHES, (n,)), torch.randint(STEPS, (n,))
    words = [STEPS + dish, word]
    while len(words) < length + 1:
        words.append(torch.multinomial(follows[dish, words[-1]], 1)[:, 0])
    recipe = torch.stack(words, 1)
    return recipe[:, :-1], recipe[:, 1:].where(recipe[:, 1:] < STEPS, 0)


SYMBOLS = 10
"""Symbols of texts; the same number is the mark, and as a target says that there was none yet."""


def marked(n: int, length: int = 16) -> Samples:
    """Symbols with marks among them, ``[length]``; which symbol the last mark stood before.

    A mark itself still has the symbol of the mark before it.
    """
    symbols = torch.randint(SYMBOLS, (n, length))
    is_mark = torch.rand(n, length) < 0.2
    symbols[is_mark] = SYMBOLS
    targets, last = list[Tensor](), torch.full((n,), SYMBOLS)
    for place in range(length):
        is_new = is_mark[:, place - 1] & ~is_mark[:, place] if place else torch.zeros(n).bool()
        last = torch.where(is_new, symbols[:, place], last)
        targets.append(last)
    return symbols, torch.stack(targets, 1)


THINGS, ASKED, ANSWERS = 30, 6, 8
"""Words for things, how many of them a question has, as answers do, and how many answers."""


def questions(n: int) -> Samples:
    """A question and several answers, ``[1 + ANSWERS, ASKED]``; which of these is the right one.

    It consists of the question's words in another language and in another order, and two of the
    words are others in a wrong one.
    """
    language = torch.randperm(THINGS)
    question = torch.randint(THINGS, (n, ASKED))
    order = torch.rand(n, ANSWERS, ASKED).argsort(2)
    answers = question[:, None].expand(-1, ANSWERS, -1).gather(2, order)
    right = torch.randint(ANSWERS, (n,))
    wrong = torch.cat([torch.randint(THINGS, (n, ANSWERS, 2)), answers[..., 2:]], 2)
    is_right = (torch.arange(ANSWERS) == right[:, None])[..., None]
    answers = THINGS + language[torch.where(is_right, answers, wrong)]
    return torch.cat([question[:, None], answers], 1), right


WALKED, NEGATIVE = 60, 4
"""Words of walks, and how many words are drawn for each that was near."""


def neighbours(n: int, groups: int = 6) -> Samples:
    """A word, one that stands near it and others, ``[2 + NEGATIVE]``; which were near, ``[5]``.

    Most of the words near a word are of its group.
    """
    group = torch.arange(WALKED) % groups
    word, other = torch.randint(WALKED, (2, n))
    own = torch.randint(WALKED // groups, (n,)) * groups + group[word]
    near = torch.where(torch.rand(n) < 0.95, own, other)
    drawn = torch.randint(WALKED, (n, NEGATIVE))
    is_near = F.one_hot(torch.zeros(n, dtype=torch.long), 1 + NEGATIVE).float()
    return torch.cat([torch.stack([word, near], 1), drawn], 1), is_near


PLAIN, KEYS = 20, 4


def facts(n: int, length: int = 20) -> Samples:
    """A key and a text in which it stands, ``[1 + length]``; from where to where the answer is.

    The answer follows the key, and a full stop, ``PLAIN``, is at its end. Other keys stand in the
    text, too, with answers of theirs.
    """
    keys = torch.rand(n, KEYS).argsort(1)
    lengths = torch.randint(1, 4, (n, KEYS))
    ends = (lengths + 2).cumsum(1) - 1
    starts = ends - lengths
    text = torch.randint(PLAIN, (n, length))
    text.scatter_(1, ends, PLAIN)
    text.scatter_(1, starts - 1, PLAIN + 1 + keys)
    asked = torch.randint(KEYS, (n, 1))
    span = torch.cat([starts.gather(1, asked), ends.gather(1, asked) - 1], 1)
    return torch.cat([PLAIN + 1 + keys.gather(1, asked), text], 1), span


DOMAINS, VOCABULARY = 4, 48


def posts(n: int, length: int = 12) -> Samples:
    """Posts of four communities, by word; who likes them, of three groups, ``[3]``.

    The first word says which community it is, in each of which words mean something of their own.
    """
    meanings = torch.randn(DOMAINS, VOCABULARY, 3)
    community = torch.randint(DOMAINS, (n,))
    words = torch.randint(VOCABULARY, (n, length))
    total = meanings[community[:, None], words].sum(1)
    liked = (total / length**0.5 * 6).sigmoid() > torch.rand(n, 3)
    return torch.cat([VOCABULARY + community[:, None], words], 1), liked.float()
