"""The samples that all arms carry: 64 a batch, each part of each stamped with its number.

A sample is 1 KB of JSON and 4 KB of int32 tokens, and 1 MiB of bytes where `blob` is set. Needs
numpy alone, so that a peer's own environment can import it.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

COUNT, TOKENS, BLOB = 64, 1024, 1 << 20
META_BYTES = 1024


@dataclass
class Batch:
    """COUNT samples as contiguous arrays."""

    metas: list[str]
    tokens: Any
    """int32 [COUNT, TOKENS]."""
    blobs: Any = None
    """uint8 [COUNT, BLOB]; None where samples have none."""

    def numbers(self) -> list[int]:
        """Of its samples; raises ValueError where a part is not what its number says."""
        numbers = [int(json.loads(meta)["id"]) for meta in self.metas]
        stamps = np.array(numbers)
        right = (self.tokens[:, 0] == stamps).all() and (self.tokens[:, -1] == stamps).all()
        if self.blobs is not None:
            right = right and (self.blobs[:, 0] == stamps % 251).all()
            right = right and (self.blobs[:, -1] == stamps % 241).all()
        if not right or self.tokens.shape != (COUNT, TOKENS):
            raise ValueError(f"samples {numbers[0]} and on are not what was put")
        return numbers


class Source:
    """Makes batches, of one buffer of noise."""

    def __init__(self, *, blob: bool) -> None:
        """`blob`: samples are of 1 MiB."""
        noise = np.random.default_rng(0)
        self._blobs: Any = noise.integers(0, 255, (COUNT, BLOB), np.uint8) if blob else None

    def batch(self, number: int) -> Batch:
        """Overwrites the blobs of the one before."""
        numbers = np.arange(number * COUNT, (number + 1) * COUNT)
        metas = [json.dumps({"id": int(each), "reward": 0.5, "version": 3}) for each in numbers]
        tokens = np.repeat(numbers.astype(np.int32)[:, None], TOKENS, axis=1)
        if self._blobs is not None:
            self._blobs[:, 0], self._blobs[:, -1] = numbers % 251, numbers % 241
        return Batch([meta.ljust(META_BYTES) for meta in metas], tokens, self._blobs)


def cpu_seconds(root: int) -> float:
    """Of a process and all that descend from it, those that ended and were waited for too."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        process = int(path.parent.name)
        parents[process] = int(fields[1])
        seconds[process] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {root}
    while more := {process for process, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(seconds[process] for process in family if process in seconds)
