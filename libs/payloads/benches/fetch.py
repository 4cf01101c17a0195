"""What it saves that ranks fetch their own payloads by reference, instead of through one process.

Ranks are processes, and each ends every round with its share of the payloads in one contiguous
array of its own. The arms take turns:

* reference: each rank maps its share from the sidecar's spool, on the node of the sidecar.
* collating: a controller maps everything, joins it to one batch, and sends each rank its part.
* forwarding: a controller maps everything, and sends each rank views of its part, not joined.
* verified: as reference, through the store, which also compares every sha256.

Every round of every arm is followed by a check of the bytes, outside of its time. Buffers are
warm. The resident memory of the sidecar is what it grew by while a gigabyte was uploaded to it and
streamed from it.

    python libs/payloads/benches/fetch.py --rounds 7
"""

import argparse
import hashlib
import json
import mmap
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treadle_core.errors import TreadleError
from treadle_payloads.files import FileStore
from treadle_payloads.sidecar_store import SidecarStore
from treadle_payloads.store import Buffer, PayloadReference
from treadle_payloads.testing import SidecarProcess
from treadle_runtime.measures import Measure, report

ARMS = ("reference", "collating", "forwarding", "verified")
DIRECT = ("reference", "verified")


class Peer:
    """A rank or the controller: this file as a process, told what to do line by line."""

    def __init__(
        self, kind: str, node: SidecarProcess, sockets: Sequence[socket.socket], share: int
    ) -> None:
        descriptors = [connection.fileno() for connection in sockets]
        self._process = subprocess.Popen(  # noqa: S603, this file
            [
                *(sys.executable, __file__, "--as", kind, "--node", str(node.directory)),
                *("--share", str(share), "--sockets", json.dumps(descriptors)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )

    def tell(self, order: str, *arguments: Any) -> None:
        assert self._process.stdin  # noqa: S101, it was asked for
        print(json.dumps([order, *arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> tuple[Any, float]:
        """What came of an order, and its CPU seconds."""
        assert self._process.stdout  # noqa: S101, it was asked for
        return json.loads(self._process.stdout.readline())

    def growth(self) -> int:
        """Bytes of resident memory that its peak is above what it had at the start."""
        self.tell("growth")
        return self.answer()[0]

    def end(self) -> None:
        self._process.communicate("")


Work = Generator[Any, list[Any], None]


def rank(node: SidecarProcess, share: int, connection: socket.socket) -> Work:
    """Orders come by `send`; what is yielded is the answer."""
    batch: Any = np.ones(share, np.uint8)
    files, store, view = node.files, node.store(), memoryview(batch)
    answer: Any = None
    while True:
        order, *arguments = yield answer
        answer = None
        if order in DIRECT:
            start, references = 0, references_of(arguments[0])
            parts = (
                mapped(files, references) if order == "reference" else fetched(store, references)
            )
            for data in parts:
                view[start : start + len(data)] = data
                start += len(data)
        elif order == "receive":
            left = view
            while left:
                left = left[connection.recv_into(left) :]
        elif order == "digest":
            answer = hashlib.sha256(batch).hexdigest()
            batch[:] = 0


def controller(node: SidecarProcess, share: int, connections: Sequence[socket.socket]) -> Work:
    """As `rank`."""
    files = node.files
    joined: Any = np.ones(0, np.uint8)
    answer: Any = None
    start = resident("VmRSS")
    with ThreadPoolExecutor(len(connections)) as threads:
        while True:
            order, *arguments = yield answer
            answer = None
            if order == "growth":
                answer = resident("VmHWM") - start
                continue
            parts = mapped(files, references_of(arguments[0]))
            each = len(parts) // len(connections)
            batches = [parts[at : at + each] for at in range(0, len(parts), each)]
            if order == "collating":
                if not joined.size:
                    joined = np.ones(share * len(connections), np.uint8)
                arrays = [np.frombuffer(part, np.uint8) for part in parts]
                np.concatenate(arrays, out=joined)
                whole = memoryview(joined)
                batches = [[whole[at : at + share]] for at in range(0, joined.size, share)]
            list(threads.map(send, connections, batches))


def send(connection: socket.socket, views: Sequence[Buffer]) -> None:
    for view in views:
        connection.sendall(view)


def mapped(files: FileStore, references: Sequence[PayloadReference]) -> list[Buffer]:
    """As the store does where the spool is on this node, but for the check of the sha256."""
    parts: list[Buffer] = []
    for reference in references:
        with files.path(reference.sha256).open("rb") as file:
            parts.append(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    return parts


def fetched(store: SidecarStore, references: Sequence[PayloadReference]) -> list[Buffer]:
    found = store.fetch(references)
    parts: list[Buffer] = []
    for reference in references:
        part = found[reference.sha256]
        if isinstance(part, TreadleError):
            raise part
        parts.append(part)
    return parts


def references_of(values: Sequence[dict[str, Any]]) -> list[PayloadReference]:
    return [PayloadReference(**value) for value in values]


def resident(key: str, process: int | str = "self") -> int:
    """Bytes, of a line of /proc/PID/status."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


class Bench:
    """Ranks and a controller around one sidecar."""

    def __init__(self, node: SidecarProcess, stack: ExitStack, args: argparse.Namespace) -> None:
        self._share = args.payloads // args.ranks * args.size
        pairs = [socket.socketpair() for _ in range(args.ranks)]
        self._controller = Peer("controller", node, [pair[0] for pair in pairs], self._share)
        self._ranks = [Peer("rank", node, [pair[1]], self._share) for pair in pairs]
        for peer in (*self._ranks, self._controller):
            stack.callback(peer.end)
        for connection in (end for pair in pairs for end in pair):
            connection.close()
        store, source = node.store(), random.Random(1)  # noqa: S311, content of a benchmark
        contents = [source.randbytes(args.size) for _ in range(args.payloads)]
        self._all = [asdict(store.put(data)) for data in contents]
        each = args.payloads // args.ranks
        starts = range(0, args.payloads, each)
        self._parts = [self._all[at : at + each] for at in starts]
        joined = (b"".join(contents[at : at + each]) for at in starts)
        self._digests = [hashlib.sha256(batch).hexdigest() for batch in joined]

    def seconds(self, arm: str) -> tuple[float, float]:
        """From the order to the last rank's batch, and of CPU; raises ValueError on wrong bytes."""
        start = time.perf_counter()
        for peer, part in zip(self._ranks, self._parts, strict=True):
            if arm in DIRECT:
                peer.tell(arm, part)
            else:
                peer.tell("receive")
        if arm not in DIRECT:
            self._controller.tell(arm, self._all)
        used = sum(peer.answer()[1] for peer in self._ranks)
        seconds = time.perf_counter() - start
        if arm not in DIRECT:
            used += self._controller.answer()[1]
        for peer, digest in zip(self._ranks, self._digests, strict=True):
            peer.tell("digest")
            if peer.answer()[0] != digest:
                raise ValueError(f"{arm}: a rank holds other bytes")
        return seconds, used

    def controller_share(self) -> float:
        """The controller's growth over the bytes that pass it."""
        return self._controller.growth() / (self._share * len(self._ranks))


def sidecar_share(node: SidecarProcess, size: int, total: int) -> float:
    """What a sidecar grows by over the bytes that are uploaded to it and streamed from it."""
    near, far, source = node.store(), node.store(far=True), random.Random(2)  # noqa: S311
    near.put(source.randbytes(size))
    start, peak = resident("VmRSS", node.pid), 0
    Path(f"/proc/{node.pid}/clear_refs").write_text("5", encoding="utf-8")
    for _ in range(total // size):
        reference = near.put(source.randbytes(size))
        fetched(far, [reference])
        peak = max(peak, resident("VmHWM", node.pid))
    return (peak - start) / total


def measures(args: argparse.Namespace) -> Iterator[Measure]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-fetch-"))
        node = SidecarProcess(Path(directory)).start()
        stack.callback(node.stop)
        bench = Bench(node, stack, args)
        wall: dict[str, list[float]] = {arm: [] for arm in ARMS}
        cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for number in range(args.rounds + 1):
            for arm in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                seconds, used = bench.seconds(arm)
                if number:  # the first one warms the buffers
                    wall[arm].append(round(seconds, 3))
                    cpu[arm].append(round(used, 3))
        verified = over(wall, "reference", of="verified")
        yield Measure("verified_fetch_over_fetch", verified, "ratio", details={"seconds": wall})
        load = round(os.getloadavg()[0], 1)
        for arm, name, goal in (
            ("collating", "collating_gather", "<= 0.35"),
            ("forwarding", "view_gather", "<= 0.75"),
        ):
            details = {"seconds": wall, "load": load, "ranks": args.ranks}
            yield Measure(f"fetch_over_{name}", over(wall, arm), "ratio", goal, details)
            yield Measure(f"fetch_cpu_over_{name}", over(cpu, arm), "ratio", details={"cpu_s": cpu})
        yield Measure("controller_rss_share", bench.controller_share(), "ratio")
        share = sidecar_share(node, args.size, args.stored)
        yield Measure("store_rss_share", share, "ratio", "<= 0.02")


def over(values: dict[str, list[float]], arm: str, of: str = "reference") -> float:
    """Of medians."""
    return statistics.median(values[of]) / statistics.median(values[arm])


def serve(args: argparse.Namespace) -> None:
    """The loop of a peer."""
    node = SidecarProcess(args.node)
    connections = [socket.socket(fileno=descriptor) for descriptor in json.loads(args.sockets)]
    made: dict[str, Callable[[], Work]] = {
        "rank": lambda: rank(node, args.share, connections[0]),
        "controller": lambda: controller(node, args.share, connections),
    }
    work = made[args.kind]()
    next(work)
    for line in sys.stdin:
        start = time.process_time()
        answer = work.send(json.loads(line))
        sys.stdout.write(json.dumps([answer, time.process_time() - start]) + "\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetching payloads")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--payloads", type=int, default=64, help="of one round; divides evenly")
    parser.add_argument("--size", type=int, default=4_000_000, help="bytes of a payload")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stored", type=int, default=1_000_000_000, help="bytes for the sidecar")
    parser.add_argument("--as", dest="kind", default="", help=argparse.SUPPRESS)
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--sockets", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind:
        serve(args)
        return 0
    return report(measures(args))


if __name__ == "__main__":
    sys.exit(main())
