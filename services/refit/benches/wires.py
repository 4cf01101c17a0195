"""Measures of the wire alone: one sender, one receiver in another process, no service."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from weights import changed, free_port, hexed, layout_of, tensors_of

from treadle_runtime.measures import Measure
from treadle_weights.gloo import Gloo
from treadle_weights.sending import Sender
from treadle_weights.torch_groups import communicators
from treadle_weights.transport import Arena

MIB = 2**20


class Peer:
    """The receiver's process."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("receiver.py"))
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **told: Any) -> None:
        stdin = cast("IO[str]", self._process.stdin)
        stdin.write(json.dumps(told) + "\n")
        stdin.flush()

    def hear(self) -> dict[str, Any]:
        return json.loads(cast("IO[str]", self._process.stdout).readline())

    def close(self) -> None:
        cast("IO[str]", self._process.stdin).close()
        self._process.wait(30)


@contextmanager
def peer() -> Generator[Peer]:
    started = Peer()
    try:
        yield started
    finally:
        started.close()


class Arm:
    """One way of sending, and the versions that went by it."""

    def __init__(self, other: Peer, tensors: tuple[int, int], **settings: Any) -> None:
        self._other = other
        self._tensors = tensors
        self._settings = settings
        self._port = free_port()
        self._transport = Gloo(self._port, **settings)
        self._layout = layout_of(*tensors)
        self.sender: Sender = self._transport.sender("run")
        self._version = 0
        self._arena = Arena("", 0)
        self._digests: dict[str, int] = {}

    def send(self, bits: NDArray[np.uint16]) -> None:
        """Fills the next version; what was there before is committed."""
        if self._version:
            self.sender.keep(self._arena)
        self._version += 1
        self._arena = self._transport.arena("run", self._version, self._layout.size())
        tensors = tensors_of(self._layout, bits)
        self._digests = self.sender.send(self._arena, self._layout, tensors)

    def load(self) -> dict[str, Any]:
        """The version goes to the other process, whole and verified."""
        self._other.tell(
            do="load",
            port=self._port,
            settings=self._settings,
            tensors=self._tensors,
            path=self._arena.path,
            version=self._version,
            digests=hexed(self._digests),
        )
        return self._other.hear()


def wire(size_mib: int, repeats: int) -> Iterator[Measure]:
    """A version of 200 tensors beside one broadcast of as many bytes, in turn in one run."""
    tensors = (200, size_mib * MIB // 2 // 200 // 64 * 64)
    layout = layout_of(*tensors)
    bits = np.random.default_rng(0).integers(0, 2**16, 200 * tensors[1], np.uint16)
    bucket = 32 * MIB
    with peer() as other:
        arms = {
            name: Arm(other, tensors, encoding="dense", bucket_bytes=bucket, packed=is_packed)
            for name, is_packed in (("packed", True), ("per_tensor", False))
        }
        for arm in arms.values():
            arm.send(bits)
        seconds: dict[str, list[float]] = {"raw": [], "packed": [], "per_tensor": []}
        launches = 0
        raw = Raw(other, layout.size())
        for _ in range(repeats + 1):  # the first forms the groups and touches the memory
            seconds["raw"].append(raw.run())
            for name, arm in arms.items():
                said = arm.load()
                seconds[name].append(said["seconds"])
                launches = said["launches"] if name == "packed" else launches
        for arm in arms.values():
            arm.sender.close()
    speeds = {
        name: [layout.size() / each / 1e9 for each in found[1:]] for name, found in seconds.items()
    }
    medians = {name: statistics.median(found) for name, found in speeds.items()}
    best = max(medians["packed"], medians["per_tensor"])
    rounded = {f"{name}_gb_per_s": [round(v, 3) for v in found] for name, found in speeds.items()}
    yield Measure(
        "gloo_over_raw_broadcast", best / medians["raw"], "ratio", ">= 0.6", dict(rounded)
    )
    extra = launches - layout.size() / bucket
    yield Measure(
        "launches_over_buckets", extra, "launches", "<= 2", {"launches": launches, "bucket": bucket}
    )


class Raw:
    """Plain broadcasts of one large array in a group of two."""

    def __init__(self, other: Peer, size: int) -> None:
        self._other = other
        self._rendezvous = communicators("gloo", form_s=30.0, stall_s=60.0).host("127.0.0.1")
        self._data = np.ones(size, np.uint8)
        self._told: dict[str, Any] = {"name": "raw", "size": size, "port": self._rendezvous.port}
        self._other.tell(do="raw", **self._told)
        self._group = self._rendezvous.form("raw", 0, 2)
        self._group.broadcast(self._data).wait()
        self._other.hear()

    def run(self) -> float:
        """Seconds at the receiver, from its own start to its last byte."""
        self._other.tell(do="raw", **self._told)
        time.sleep(0.02)  # it is there first, as a receiver that has joined is
        began_at = time.monotonic()
        self._group.broadcast(self._data).wait()
        took_s = time.monotonic() - began_at
        self._other.hear()
        return took_s


def deltas(size_mib: int, slow_bytes_per_s: float, repeats: int) -> Iterator[Measure]:
    """Dense, delta and the choice between them, on links that are throttled in the sender."""
    tensors = (16, size_mib * MIB // 2 // 16 // 64 * 64)
    size = layout_of(*tensors).size()
    worst, details = 0.0, dict[str, Any]()
    cases = (
        ("slow", slow_bytes_per_s, 0.01, repeats),
        ("all_changed", slow_bytes_per_s, 0.9, max(repeats // 2, 1)),
        ("four_times_as_fast", 4 * slow_bytes_per_s, 0.3, repeats),
    )
    with peer() as other:
        for case, limit, share, times in cases:
            found = _arms(other, tensors, limit, share, times)
            # The least: what else runs on a machine only ever adds.
            least = {
                name: min(each["seconds"] for each in answers) for name, answers in found.items()
            }
            worst = max(worst, least["auto"] / min(least["dense"], least["delta"]))
            details[case] = {name: round(value, 4) for name, value in least.items()}
            details[f"{case}_chose"] = sorted({each["encoding"] for each in found["auto"]})
            if case == "slow":
                sent = max(each["wire_bytes"] for each in found["delta"])
                ratio = round(least["dense"] / least["delta"], 2)
                yield Measure(
                    "delta_bytes_ratio",
                    size / sent,
                    "ratio",
                    ">= 33",
                    {"bytes": size, "delta_bytes": sent, "time_ratio": ratio},
                )
    yield Measure("choice_over_better_arm", worst, "ratio", "<= 1.1", details)


def _arms(
    other: Peer, tensors: tuple[int, int], limit: float, share: float, repeats: int
) -> dict[str, list[dict[str, Any]]]:
    """Answers of each arm, version by version in turn, each with a share changed."""
    settings: dict[str, Any] = {"bucket_bytes": 4 * MIB, "most_bytes_per_s": limit}
    arms = {
        name: Arm(other, tensors, encoding=name, **settings) for name in ("dense", "delta", "auto")
    }
    bits = np.random.default_rng(1).integers(0, 2**16, tensors[0] * tensors[1], np.uint16)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for version in range(repeats + 2):
        # Each takes each place in turn: what ran just before leaves its mark.
        turn = version % len(arms)
        for name in [*list(arms)[turn:], *list(arms)[:turn]]:
            arms[name].send(bits)
            answer = arms[name].load()
            if version > 1:  # the first is dense for all, and the second measures what is compared
                found[name].append(answer)
        bits = changed(bits, share, version)
    for arm in arms.values():
        arm.sender.close()
    return found
