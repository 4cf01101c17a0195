"""Samples a second through our store and through TransferQueue, in turns, each with its CPU.

Both carry the same samples from one producer to one consumer, who checks them. README.md beside
this file says how to install the peer and what the arms do not have in common.

    python services/experience/benches/peers/plane.py --peer /opt/tq/bin/python --rounds 5
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ours import Ours
from samples import COUNT, cpu_seconds

from treadle_payloads.testing import SidecarProcess
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

SIZES = {"5kb": (False, 16, 40), "1mb": (True, 4, 8)}
"""Whether samples have a blob, batches in flight, and batches of a round."""
GOAL = ">= 2"
FAULTED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Settings of glibc for all processes of both arms: pages that were touched once stay theirs."""


class Peer:
    """A process of another environment, told what to do line by line."""

    def __init__(self, python: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.urandom(32).hex()}
        self._process = subprocess.Popen(  # noqa: S603, what the caller names
            [python, str(Path(__file__).with_name("transferqueue.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | token,
        )
        self._line()

    def pass_through(self, batches: int, window: int, *, blob: bool) -> dict[str, float]:
        """Its answer. Raises RuntimeError where it ended."""
        assert self._process.stdin  # noqa: S101, it was asked for
        order = {"batches": batches, "window": window, "blob": blob}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def end(self) -> None:
        """Waits until it has cleaned up."""
        self._process.communicate("")

    def _line(self) -> str:
        assert self._process.stdout  # noqa: S101, it was asked for
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer ended with {self._process.wait()}")
        return line


async def rounds(
    args: argparse.Namespace, ours: Ours, peer: Peer, processes: list[int], size: str
) -> AsyncIterator[Measure]:
    """Both arms in turns; the first round only warms."""
    blob, window, batches = SIZES[size]
    rate: dict[str, list[float]] = {"ours": [], "transferqueue": []}
    cpu: dict[str, list[float]] = {"ours": [], "transferqueue": []}
    for number in range(args.rounds + 1):
        before = sum(map(cpu_seconds, processes)) + own_cpu_seconds()
        wall_s = await ours.pass_through(batches, window, blob=blob)
        used = sum(map(cpu_seconds, processes)) + own_cpu_seconds() - before
        answer = await asyncio.to_thread(peer.pass_through, batches, window, blob=blob)
        if number:
            rate["ours"].append(round(batches * COUNT / wall_s))
            cpu["ours"].append(used * 1e6 / (batches * COUNT))
            rate["transferqueue"].append(round(answer["samples"] / answer["wall_s"]))
            cpu["transferqueue"].append(answer["cpu_s"] * 1e6 / answer["samples"])
    median = {arm: statistics.median(values) for arm, values in rate.items()}
    details = {
        "samples_per_s": rate,
        "cpu_us_per_sample": {arm: round(statistics.median(used)) for arm, used in cpu.items()},
        "load": round(os.getloadavg()[0], 1),
        "redis": importlib.metadata.version("redis"),
    }
    ratio = median["ours"] / median["transferqueue"]
    yield Measure(f"samples_over_transferqueue_{size}", ratio, "ratio", GOAL, details)


def own_cpu_seconds() -> float:
    """Of this process without its children."""
    times = os.times()
    return times.user + times.system


async def measure(args: argparse.Namespace) -> list[Measure]:
    """Starts everything, on loopback and in shared memory."""
    async with AsyncExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-", dir="/dev/shm"))
        )
        redis = RedisProcess(directory / "redis").start(appendfsync="everysec")
        stack.callback(redis.kill)
        sidecar = SidecarProcess(directory, "peers").start()
        stack.callback(sidecar.stop)
        peer: Any = await asyncio.to_thread(Peer, args.peer)
        stack.callback(peer.end)
        ours = Ours(directory, redis.url, sidecar)
        await ours.begin()
        stack.push_async_callback(ours.end)
        assert redis.process  # noqa: S101, started above
        processes = [redis.process.pid, sidecar.pid]
        return [
            each
            for size in args.sizes.split(",")
            async for each in rounds(args, ours, peer, processes, size)
        ]


if __name__ == "__main__":
    if not os.environ.keys() >= FAULTED.keys():  # they are read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | FAULTED)  # noqa: S606
    parser = argparse.ArgumentParser(description="Our store beside TransferQueue")
    parser.add_argument("--peer", required=True, help="python of an environment that has it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(SIZES))
    sys.exit(report(asyncio.run(measure(parser.parse_args()))))
