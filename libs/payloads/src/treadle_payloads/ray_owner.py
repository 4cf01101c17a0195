"""Payloads of one node in Ray's object store, owned by an actor that outlives their producers.

Only who calls `ray.put` owns an object, and an object dies with its owner. So one named actor a
node reads its spool and puts what is asked for itself. It is a cache: the spool is the truth, and
what the spool no longer has is dropped here too.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectStoreFullError

from treadle_core.ids import is_sha256

SILENCE_S = 60.0
"""An owner that its sidecar has not tended for so long ends itself."""


@dataclass(frozen=True, slots=True)
class Loan:
    """The answer to a reader; references may be taken out of Ray by nobody."""

    life: int
    """Of the owner, which rises with each start."""
    objects: list[Any]
    """An ObjectRef of a uint8 array each, or None for what cannot be had here."""


@dataclass(slots=True)
class _Held:
    reference: Any
    size: int


class PayloadOwner:
    """The actor's class. Its calls run one after another."""

    def __init__(self, directory: str, budget_bytes: int, silence_s: float = SILENCE_S) -> None:
        """Holds nothing yet; `directory` is the spool, as `FileStore` lays it out."""
        self._directory = Path(directory)
        self._budget = budget_bytes
        self._life = time.time_ns()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._bytes = 0
        self._tended = time.monotonic()
        self._silence_s = silence_s
        threading.Thread(target=self._end_alone, daemon=True).start()

    def lend(self, sha256s: Sequence[str]) -> Loan:
        """References of a batch, in its order; puts what is not held yet."""
        lent = 0
        objects: list[Any] = []
        for sha256 in sha256s:
            held = self._held.get(sha256) or self._load(sha256, self._budget - lent)
            if held is None or lent + held.size > self._budget:
                objects.append(None)
                continue
            self._held.move_to_end(sha256)
            lent += held.size
            objects.append(held.reference)
        return Loan(self._life, objects)

    def release(self, sha256s: Sequence[str]) -> None:
        """Forgets objects; their memory is free once no reader looks at them."""
        for sha256 in sha256s:
            held = self._held.pop(sha256, None)
            self._bytes -= held.size if held else 0

    def tend(self) -> int:
        """Forgets what the spool has forgotten; returns the bytes that are still held."""
        self._tended = time.monotonic()
        self.release([sha256 for sha256 in self._held if not self._path(sha256).exists()])
        return self._bytes

    def process(self) -> int:
        """The id of its process."""
        return os.getpid()

    def _load(self, sha256: str, room: int) -> _Held | None:
        if not is_sha256(sha256):
            return None
        try:
            data = np.asarray(np.memmap(self._path(sha256), dtype=np.uint8, mode="r"))
            if data.size > room:
                return None
            while self._held and self._bytes + data.size > self._budget:
                self.release([next(iter(self._held))])
            held = _Held(ray.put(data), data.size)
        except (OSError, ValueError, ObjectStoreFullError):  # an empty file cannot be mapped
            return None
        self._held[sha256] = held
        self._bytes += held.size
        return held

    def _path(self, sha256: str) -> Path:
        return self._directory / sha256[:2] / sha256

    def _end_alone(self) -> None:
        while (left := self._tended + self._silence_s - time.monotonic()) > 0:
            time.sleep(left)
        context: Any = ray.get_runtime_context()
        ray.kill(context.current_actor)
