"""Measures of a fleet: the real refit service, engines as processes, a trainer's end."""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from weights import free_port

from treadle_refit.adapters.memory import MemoryLedger
from treadle_refit.reconciler import Limits, Reconciler
from treadle_refit.servicer import RefitServicer
from treadle_runtime.channel import connect
from treadle_runtime.measures import Measure
from treadle_trainer.adapters.refit_client import RefitClient
from treadle_trainer.ports import NewVersion
from treadle_weights.gloo import Gloo
from treadle_weights.layouts import whole
from treadle_weights.sending import Sender

LIMITS = Limits(verify_timeout_s=20.0, send_timeout_s=60.0, dead_after_s=15.0)


class Quiet:
    """Tracker of rows that nobody reads."""

    def log(self, name: str, values: object) -> None: ...


@dataclass
class Engine:
    """A member's process, and the newest of what it said of each kind."""

    process: asyncio.subprocess.Process
    said: dict[str, Any] = field(default_factory=dict[str, Any])
    versions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gap_s: float = 0.0

    @property
    def served(self) -> int:
        return int(self.versions[-1]["version"]) if self.versions else 0

    async def listen(self) -> None:
        assert self.process.stdout is not None  # noqa: S101, a pipe was asked for
        async for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said.get("row") == "version":
                self.versions.append(said)
            else:
                self.said = said
                self.gap_s = max(self.gap_s, float(said["gap_s"]))


class Stage:
    """A refit service, a trainer's end and engines."""

    def __init__(self, client: RefitClient, sender: Sender, vocabulary: int) -> None:
        self._client = client
        self._sender = sender
        self._vocabulary = vocabulary
        self.layout = whole({"bigrams": ("float32", (vocabulary, vocabulary))})
        self.engines: list[Engine] = []
        self._step = 0

    def _table(self, version: int) -> "np.ndarray[Any, Any]":
        """Under version v the token after t is (t + v) modulo V."""
        size = self._vocabulary
        table = np.zeros((size, size), np.float32)
        table[np.arange(size), (np.arange(size) + version) % size] = 1000.0
        return table

    async def publish(self) -> tuple[int, int, float]:
        """The next version is committed: its number, its members, and when it was asked for."""
        self._step += 1
        began_at = time.monotonic()
        opened = await self._client.open_version(
            NewVersion(1, self._step, f"r{self._step}", self.layout, "", 0, "")
        )
        tensors = [("bigrams", self._table(opened.version))]
        digests = await asyncio.to_thread(self._sender.send, opened.arena, self.layout, tensors)
        sent = await self._client.send_version(
            trainer_epoch=1, version=opened.version, digests=digests
        )
        self._sender.keep(opened.arena)
        return opened.version, sent.members, began_at


@asynccontextmanager
async def stage(
    vocabulary: int, engines: list[tuple[float, bool]], **settings: Any
) -> AsyncGenerator[Stage]:
    """`engines`: seconds of a token of each, and whether its groups are lost on purpose."""
    port = free_port()
    transport = Gloo(port, **settings)
    described = json.dumps({"name": "gloo", "port": port, **settings})
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/refit.sock"
        refit = Reconciler(
            "run",
            LIMITS,
            ledger=MemoryLedger(),
            transport=transport,
            tracker=Quiet(),
            clock=time.monotonic,
        )
        server = grpc.aio.server()
        RefitServicer("run", refit).register(server)
        server.add_insecure_port(address)
        await server.start()
        watching = asyncio.create_task(refit.watch())
        sender = transport.sender("run")
        listening: list[asyncio.Task[None]] = []
        async with connect(address) as channel:
            made = Stage(RefitClient(channel, "run"), sender, vocabulary)
            try:
                for number, (token_s, fails) in enumerate(engines):
                    process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        str(Path(__file__).with_name("engine.py")),
                        *(address, f"e{number}", described, str(vocabulary)),
                        *(str(token_s), str(int(fails))),
                        stdout=asyncio.subprocess.PIPE,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                    made.engines.append(Engine(process))
                    listening.append(asyncio.create_task(made.engines[-1].listen()))
                yield made
            finally:
                for engine in made.engines:
                    if engine.process.returncode is None:
                        engine.process.kill()
                        await engine.process.wait()
                await asyncio.to_thread(sender.close)
                await refit.close()
                watching.cancel()
                await asyncio.wait([watching, *listening])
                await server.stop(1.0)


async def until(is_so: Callable[[], bool], limit_s: float) -> float:
    """Seconds until it is; `limit_s` where it is not."""
    began_at = time.monotonic()
    while not is_so() and time.monotonic() - began_at < limit_s:  # noqa: ASYNC110 - of processes
        await asyncio.sleep(0.01)
    return time.monotonic() - began_at


async def all_serve(made: Stage, engines: list[Engine], limit_s: float = 60.0) -> None:
    """Publishes once, and waits until all of them serve it."""
    version, _, _ = await made.publish()
    await until(lambda: all(engine.served >= version for engine in engines), limit_s)
    for engine in engines:
        if engine.process.returncode is not None:
            raise RuntimeError(f"an engine ended with {engine.process.returncode}")


async def pause(repeats: int) -> Measure:
    """The longest gap between two tokens while a version comes, as a share of its time."""
    ratios: list[float] = []
    walls: list[float] = []
    async with stage(4096, [(0.005, False)], bucket_bytes=4 * 2**20) as made:
        (engine,) = made.engines
        await all_serve(made, [engine])
        await asyncio.sleep(0.5)
        for _ in range(repeats):
            await asyncio.sleep(0.3)
            engine.gap_s = 0.0
            version, _, began_at = await made.publish()
            await until(lambda v=version: engine.served >= v, 60.0)
            walls.append(engine.versions[-1]["at"] - began_at)
            await asyncio.sleep(0.25)  # the gap is told a moment later
            ratios.append(engine.gap_s / walls[-1])
    return Measure(
        "pause_over_refit",
        statistics.median(ratios),
        "ratio",
        "<= 0.25",
        {"ratios": [round(r, 3) for r in ratios], "refit_s": [round(w, 3) for w in walls]},
    )


async def dead(name: str, signum: int, goal_s: int) -> Measure:
    """From the end of one of three engines, in the middle of a transfer, to whole survivors."""
    settings: dict[str, Any] = {
        "most_bytes_per_s": 16e6,
        "bucket_bytes": 2**20,
        "encoding": "dense",
    }
    async with stage(2048, [(0.002, False)] * 3, **settings) as made:
        first, second, victim = made.engines
        await all_serve(made, made.engines)
        await all_serve(made, made.engines)
        publishing = asyncio.create_task(made.publish())
        await asyncio.sleep(0.6)  # of about 1 s on the wire
        struck_at = time.monotonic()
        victim.process.send_signal(signum)
        version, members, _ = await publishing
        await until(lambda: min(first.served, second.served) >= version, 60.0)
        took_s = time.monotonic() - struck_at
        mixed = first.said["mixed"] + second.said["mixed"]
        whole_ones = [first.served, second.served] == [version, version] and mixed == 0
        epochs = sorted({int(engine.versions[-1]["group_epoch"]) for engine in (first, second)})
    details = {"members": members, "survivors_whole": whole_ones, "epochs": epochs}
    return Measure(name, took_s if whole_ones else float("inf"), "s", f"<= {goal_s}", details)


async def mixed(responses: int) -> Measure:
    """Responses with a token that its stated version would not have sampled, while groups fail."""
    engines = [(0.0, False), (0.0005, False), (0.0005, True)]
    settings: dict[str, Any] = {"bucket_bytes": 16384, "gather_s": 0.05, "join_s": 0.5}
    async with stage(256, engines, encoding="dense", **settings) as made:
        began_at = time.monotonic()
        versions = 0

        def counted() -> int:
            return sum(int(engine.said.get("responses", 0)) for engine in made.engines)

        while (counted() < responses or versions < 20) and time.monotonic() - began_at < 150:
            await all_serve(made, made.engines, 5.0)
            versions += 1
        await asyncio.sleep(0.3)
        found = sum(int(engine.said["mixed"]) for engine in made.engines)
        seen = [int(engine.said["versions"]) for engine in made.engines]
        details = {
            "responses": counted(),
            "versions": versions,
            "versions_seen": seen,
            "seconds": round(time.monotonic() - began_at, 1),
        }
        enough = 0 if counted() >= responses and min(seen) > 1 else 1
    return Measure("mixed_version_responses", found + enough, "responses", "== 0", details)


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
