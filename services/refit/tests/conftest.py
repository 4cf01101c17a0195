"""One refit in memory: a clock that the test moves, and calls that wait in real tasks."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.experience.v1 import experience_service_pb2_grpc as experience_rpc
from treadle_refit.adapters.memory import MemoryLedger
from treadle_refit.core.fleet import Report
from treadle_refit.core.publication import Publication
from treadle_refit.reconciler import Limits, Reconciler
from treadle_weights.layouts import Layout, whole
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import WeightTransport

LIMITS = Limits(verify_timeout_s=20.0, send_timeout_s=60.0, dead_after_s=15.0)
LAYOUT = whole({"a": ("float32", (4,)), "b": ("float32", (2,))})
DIGESTS = {"a": 1, "b": 2}


class ExperienceServicer(experience_rpc.ExperienceServiceServicer):
    """The versions of an experience service, over the ledger in memory."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger

    async def GetRun(self, request: Any, context: object) -> Any:
        newest = await self._ledger.newest_committed()
        return experience_pb.GetRunResponse(
            version=newest.version, version_digest=newest.weights_digest
        )

    async def AnnounceVersion(self, request: Any, context: object) -> Any:
        version = await self._ledger.announce(
            trainer_epoch=request.trainer_epoch,
            step=request.step,
            request_id=request.request_id,
            trace_id=request.trace_id,
        )
        return experience_pb.AnnounceVersionResponse(version=version)

    async def CommitVersion(self, request: Any, context: object) -> Any:
        await self._ledger.commit(
            trainer_epoch=request.trainer_epoch,
            version=request.version,
            weights_digest=request.weights_digest,
        )
        return experience_pb.CommitVersionResponse()

    async def AbortVersion(self, request: Any, context: object) -> Any:
        await self._ledger.abort(version=request.version, message=request.message)
        return experience_pb.AbortVersionResponse()


class Rows:
    """Tracker that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float | int | str]] = []

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        self.rows.append({"name": name, **values})


@dataclass
class World:
    """A refit and what surrounds it."""

    directory: Path
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    tracker: Rows = field(default_factory=Rows)
    now: float = 1000.0
    requests: int = 0
    transport: WeightTransport = field(init=False)
    memory: MemoryLedger | None = None
    """The ledger behind an experience service, while there is one."""

    def __post_init__(self) -> None:
        self.transport = SharedMemory(self.directory)
        self.start_refit()

    def start_refit(self) -> None:
        """A process that knows nothing yet."""
        self.refit = Reconciler(
            "run",
            LIMITS,
            ledger=self.ledger,
            transport=self.transport,
            tracker=self.tracker,
            clock=lambda: self.now,
        )

    def register_experience(self, server: grpc.aio.Server) -> None:
        """Serves the ledger as an experience service does."""
        servicer = ExperienceServicer(self.ledger)
        experience_rpc.add_ExperienceServiceServicer_to_server(servicer, server)

    @staticmethod
    def fill(arena: Any) -> None:
        """Puts bytes where a trainer would."""
        Path(arena.path).write_bytes(bytes(arena.size))

    async def pass_time(self, seconds: float) -> None:
        """Moves the clock and lets every call look again."""
        self.now += seconds
        self.refit._ring()
        await self.settle()

    @staticmethod
    async def settle() -> None:
        """Lets every task run until it waits."""
        for _ in range(25):
            await asyncio.sleep(0)

    async def open(
        self, step: int = 0, *, request_id: str = "", epoch: int = 0, layout: Layout = LAYOUT
    ) -> Publication:
        self.requests += 1
        return await self.refit.open_version(
            trainer_epoch=epoch or self.ledger.trainer_epoch,
            step=step,
            request_id=request_id or f"request-{self.requests}",
            layout=layout,
            trace_id=f"{step:032x}",
        )

    async def send(self, publication: Publication) -> Publication:
        return await self.refit.send_version(
            trainer_epoch=publication.trainer_epoch, version=publication.version, digests=DIGESTS
        )

    async def publish(self, step: int = 0) -> Publication:
        return await self.send(await self.open(step))

    async def attend(self, engine_id: str = "e1", *, wait_s: float = 0.0, **state: Any) -> Any:
        return await self.refit.attend(
            Report(engine_id=engine_id, **({"layout": LAYOUT} | state)), wait_s=wait_s
        )

    async def wanted(self, published_version: int = 0, *, wait_s: float = 0.0) -> bool:
        return await self.refit.await_demand(published_version=published_version, wait_s=wait_s)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
