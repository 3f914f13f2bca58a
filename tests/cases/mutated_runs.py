"""Run files that are damaged, or written to do harm."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gradlens.history.coverage import Coverage
from gradlens.history.records import Note
from tests.instruments.test_instruments import CASES, realistic


def base_runs(folder: Path) -> list[bytes]:
    """The contents of small runs, which together have quantities of all kinds."""
    kinds = sorted({kind for case in CASES.values() for kind in case})
    runs = []
    for start in range(0, len(kinds), 3):
        history = realistic(3, tuple(kinds[start : start + 3]), layers=1)
        history.notes.append(Note(1, "something"))
        history.coverages[0] = Coverage({"0.weight": "no rule"}, ("1",), samples=4, known_by="loss")
        path = folder / f"base{start}.jsonl"
        history.write(path)
        runs.append(path.read_bytes())
    return runs


def array(dtype: Any, shape: Any, content: bytes = b"") -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
    return {"$array": [dtype, shape, data]}


def nested(depth: int, brackets: str = "[]") -> str:
    return brackets[0] * depth + brackets[1] * depth


class Raw(str):
    """JSON as it is written, or what looks like it."""


BOMB = array("<f8", [2**28], bytes(2**24))  # says 2 GiB
BOMB_OF_ZEROS = array("|u1", [2**29], bytes(2**25))

HOSTILE: list[Any] = [
    *(None, True, 0, -1, 1.5, "", "x" * 100_000, [], {}, [[1, 2], [3]], {"a": {"b": 1}}),
    *(2**53, 2**64, -(10**300), 10**400, 1e308, 5e-324),
    *map(Raw, ("NaN", "-Infinity", "1e999", "-0.0", "1" * 5000, nested(40), nested(100_000))),
    *map(Raw, (r'"\ud800"', r'"\udfff x"', r'"\u0000"', r'"\u001b[31m"', r'"a\nb"')),
    *({"$float": each} for each in ("nan", "-inf", "1", 3)),
    *({"$undefined": each} for each in ("why", 3, "x" * 100_000)),
    *({"$array": each} for each in ([], [1, 2, 3], {})),
    *(array("<f8", shape, bytes(16)) for shape in ([], [0, 3], [2], [-2], [3], [1.0], "ab")),
    *(array("<f8", [1] * 33, bytes(8)), array("<f8", [2**62, 2**62])),
    *(array(dtype, [1], bytes(8)) for dtype in ("O", "V8", "M8[s]", "<U2")),
    *(array("<i8", [1], b"\x80" * 8), array("|b1", [3], b"\x00\x01\x07")),
    *(array("<f2", [2], b"\x00|" * 2), array("<f4", [200, 200], bytes(160_000)), BOMB),
    *("$x^", "$\\frac{$", "\\$", "<script>", "日本語😀", "\u202eabc", "\t", "%s{0}{a}", "a" * 3000),
    *({str(n): n for n in range(300)}, {str(n): [n] for n in range(300)}, [0] * 10_000),
    {"": {"": 0}},
]


def dumped(value: Any) -> str:
    """JSON in which ``Raw`` texts are left as they are."""
    raws: list[str] = []

    def mark(part: Any) -> Any:
        if isinstance(part, Raw):
            raws.append(str(part))
            return f"\x01{len(raws) - 1}\x01"
        if isinstance(part, dict):
            return {key: mark(entry) for key, entry in part.items()}
        return [mark(entry) for entry in part] if isinstance(part, list) else part

    text = json.dumps(mark(value))
    for number, raw in enumerate(raws):
        text = text.replace(f'"\\u0001{number}\\u0001"', raw)
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all parts of a JSON value."""
    yield path
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for key, entry in parts.items() if isinstance(parts, dict) else ():
        yield from places(entry, (*path, key))


def with_value(content: bytes, rng: random.Random) -> bytes:
    """Another value at some place of some line."""
    lines, number, record = _line(content, rng)
    path = rng.choice([*places(record)])
    lines[number] = dumped(_replaced(record, path, rng.choice(HOSTILE))).encode()
    return b"\n".join(lines) + b"\n"


def in_every_step(content: bytes, rng: random.Random) -> bytes:
    """Another value at the same place of all steps that have it."""
    lines = content.splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "values" in record]
    path = rng.choice([p for p in places(rng.choice(steps)) if len(p) > 1])
    value = rng.choice(HOSTILE)
    for number, record in enumerate(records):
        if path in places(record):
            lines[number] = dumped(_replaced(record, path, value)).encode()
    return b"\n".join(lines) + b"\n"


def with_key(content: bytes, rng: random.Random) -> bytes:
    """A key removed, renamed or added."""
    lines, number, record = _line(content, rng)
    parent, key = _parent(record, rng.choice([p for p in places(record) if p]))
    if isinstance(parent, dict):
        value = parent.pop(key)
        names = [None, "", "$array", "$float", "$x", "x" * 5000, "\ud800", "\0", "values", "a\nb"]
        name = rng.choice(names)
        parent |= {} if name is None else {name: value}
    else:
        del parent[key]
    lines[number] = json.dumps(record).encode()
    return b"\n".join(lines) + b"\n"


def _line(content: bytes, rng: random.Random) -> tuple[list[bytes], int, Any]:
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    return lines, number, json.loads(lines[number])


def _replaced(record: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    parent, key = _parent(record, path)
    parent[key] = value
    return record


def _parent(record: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
    for key in path[:-1]:
        record = record[key]
    return record, path[-1]


def flipped_bits(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 30])):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def garbage_inside(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + rng.randbytes(rng.choice([1, 10, 1000])) + content[start:]


def lines_in_disorder(content: bytes, rng: random.Random) -> bytes:
    header, *lines = content.splitlines(keepends=True)
    lines += rng.choices([header, b"\n", b"{}\n", b"[]\n", b"null\n", *lines], k=5)
    rng.shuffle(lines)
    return b"".join([header, *lines])


def many_series(content: bytes, rng: random.Random) -> bytes:
    header = json.loads(content.splitlines()[0])
    count = rng.choice([300, 3000])
    if rng.random() < 0.3:
        source = next(iter(header["sources"].values()))
        header["sources"] = {f"s{n}": source for n in range(count)}
    values = {f"s{n}": rng.choice([1.0, n, [n, n]]) for n in range(count)}
    step = {"step": 0, "values": values}
    return (dumped(header) + "\n" + dumped(step) + "\n").encode()


def bombs(content: bytes, rng: random.Random) -> bytes:
    """Arrays that inflate to much more than the file's size."""
    name = rng.choice(["Loss", "GradHist2d", "a"])
    step = dumped({"step": 5, "values": {name: BOMB_OF_ZEROS}}).encode()
    inflating = array("<f8", [2**21], bytes(2**24))
    many = [dumped({"step": n, "values": {name: inflating}}).encode() for n in range(40)]
    return content + b"\n".join(rng.choice([[step], many]))


MUTATIONS: dict[Callable[[bytes, random.Random], bytes], int] = {
    with_value: 40,
    in_every_step: 30,
    with_key: 15,
    flipped_bits: 10,
    cut: 5,
    garbage_inside: 5,
    lines_in_disorder: 5,
    many_series: 1,
    bombs: 1,
}
"""All mutations, with their weights."""


def mutated_log(content: bytes, seed: int) -> bytes:
    """A mutated log of cockpit-for-pytorch, which is one JSON object."""
    rng = random.Random(seed)
    line = json.dumps(json.loads(content)).encode()
    mutation = rng.choice([with_value, with_value, with_key, flipped_bits, cut, garbage_inside])
    return mutation(line, rng)


def mutated(runs: list[bytes], seed: int) -> tuple[str, bytes]:
    """A mutated run, and what was done to it."""
    rng = random.Random(seed)
    (mutation,) = rng.choices([*MUTATIONS], weights=[*MUTATIONS.values()])
    return mutation.__name__, mutation(rng.choice(runs), rng)
