"""Reads the rows of an offline run of W&B."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32768
HEADER = 7
FULL, LAST = 1, 4


def rows(directory: Path) -> list[dict[str, Any]]:
    """What was logged, row by row, from the only run in W&B's folder."""
    (path,) = directory.glob("offline-run-*/run-*.wandb")
    found = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            names = ["/".join(one.nested_key) or one.key for one in items]
            values = [json.loads(one.value_json) for one in items]
            found.append(dict(zip(names, values, strict=True)))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, behind a header of W&B's."""
    at, record = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEADER])
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            yield record
            record = b""
