"""Our store as an arm: decided by the core, appended to a ledger, claimed as steps of 64.

The ledger is Redis with durability `process`. Samples of 5 KB travel inline; those of 1 MiB are
uploaded to a payload sidecar whose spool is in shared memory, and mapped by the trainer, checked.
Every sample is leased, completed, claimed, reported trained and released by a checkpoint, after
which a version is published. The next tickets are leased while a batch is handed in, and a
checkpoint is committed while the next batch is trained. The experience service's own process is
this one: there is no gRPC between it and who produces.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from samples import BLOB, COUNT, META_BYTES, TOKENS, Batch, Source

from treadle_core.episodes import Termination
from treadle_core.errors import TreadleError
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core import checkpoints, results, steps, tickets, versions
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt, Result
from treadle_experience.core.transitions import PayloadsReleased, Transition
from treadle_experience.keeper import Keeper
from treadle_payloads.store import Buffer, Hold, PayloadReference
from treadle_payloads.testing import SidecarProcess

GROUP = 8
"""Samples of a task, as a group-relative algorithm has them."""
UPLOADS = 8
"""Side by side."""
CHECKPOINT_EVERY = 4
"""Steps; a checkpoint releases the payloads before it, and is published."""
MAX_LAG = 32
"""Steps: more than the batches in flight and those of two checkpoints."""


class Ours:
    """One run that never ends."""

    def __init__(self, directory: Path, redis_url: str, sidecar: SidecarProcess) -> None:
        """Starts nothing; `begin` does."""
        rules = Rules(
            run_id="peers",
            steps=1_000_000,
            tasks_per_step=COUNT // GROUP,
            group_size=GROUP,
            max_lag=MAX_LAG,
            retries=0,
            deadline_s=3600,
            lease_s=3000,
            sampling=Sampling(1.0, 16),
        )
        ledger = RedisLedger(directory, redis_url, durability="process")
        run = Run(rules, {"": lambda cursor: {"number": cursor}})
        self._keeper = Keeper(run, ledger, on_durable=self._follow)
        self._sidecar = sidecar
        self._store = sidecar.store()
        self._threads = ThreadPoolExecutor(UPLOADS)
        self._released: list[Hold] = []
        self._sources = {blob: Source(blob=blob) for blob in (False, True)}
        self._step = self._version = 0

    async def begin(self) -> None:
        """A trainer that has committed and published its start."""
        self._writing = asyncio.ensure_future(self._keeper.write())
        await self._keeper.ask(checkpoints.acquire, holder="t", checkpoint_digest="")
        await self._commit(0)
        self._committing = asyncio.ensure_future(asyncio.sleep(0))
        self._leasing = asyncio.ensure_future(self._lease())

    async def end(self) -> None:
        """Stops writing."""
        await asyncio.gather(self._committing, self._leasing)
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._keeper.close()
        self._threads.shutdown()

    async def pass_through(self, batches: int, window: int, *, blob: bool) -> float:
        """Seconds until all samples were trained. Raises ValueError on wrong or lost ones."""
        source, room = self._sources[blob], asyncio.Semaphore(window)
        start = time.perf_counter()

        async def produce() -> None:
            for number in range(batches):
                await room.acquire()
                await self._put(source.batch(number), blob=blob)

        producing = asyncio.ensure_future(produce())
        numbers: list[int] = []
        for _ in range(batches):
            numbers += (await self._get(blob=blob)).numbers()
            room.release()
        await producing
        await self._committing
        seconds = time.perf_counter() - start
        if sorted(numbers) != list(range(batches * COUNT)):
            raise ValueError("samples were lost, or came twice")
        return seconds

    async def _lease(self) -> tuple[list[Ticket], int]:
        """Those of the next batch, and the version that samples it."""
        version = self._version
        issued = await self._keeper.ask(
            tickets.lease, replica_id="r", served_version=version, max_tickets=COUNT, slots=1 << 20
        )
        return issued, version

    async def _put(self, batch: Batch, *, blob: bool) -> None:
        issued, version = await self._leasing
        self._leasing = asyncio.ensure_future(self._lease())
        if blob:
            loop = asyncio.get_running_loop()
            kept = [
                loop.run_in_executor(self._threads, self._upload, batch, issued, first)
                for first in range(UPLOADS)
            ]
            holds = [hold for some in await asyncio.gather(*kept) for hold in some]
            if await asyncio.to_thread(self._store.confirm, holds, writer_epoch=1):
                raise ValueError("what was uploaded is not there")
            references = [hold.reference for hold in holds]
            payloads: Sequence[bytes | None] = [None] * COUNT
        else:
            data = [payload(batch, index) for index in range(COUNT)]
            references, payloads = [PayloadReference.of(each) for each in data], data
        await asyncio.gather(
            *(
                self._keeper.ask(
                    results.complete,
                    replica_id="r",
                    attempt=Attempt(ticket.episode_id, ticket.attempt),
                    result=result_of(reference, version, inlined=not blob),
                    inline=inline,
                )
                for ticket, reference, inline in zip(issued, references, payloads, strict=True)
            )
        )

    def _upload(self, batch: Batch, issued: Sequence[Ticket], first: int) -> list[Hold]:
        """What one of the producers makes of its part of a batch."""
        part = range(first * COUNT // UPLOADS, (first + 1) * COUNT // UPLOADS)
        holders = [(index, issued[index].episode_id) for index in part]
        return [
            Hold(self._store.put(payload(batch, index), holder=holder), holder)
            for index, holder in holders
        ]

    async def _get(self, *, blob: bool) -> Batch:
        self._step += 1
        claim = await self._keeper.poll(
            lambda run: steps.claim(run, trainer_epoch=1, step=self._step),
            lambda claim: bool(claim.tasks),
            wait_s=60.0,
        )
        episodes = [episode for task in claim.tasks for episode, _ in task.episodes]
        if blob:
            wanted = [reference_of(episode.result) for episode in episodes]
            found = await asyncio.to_thread(self._store.fetch, wanted)
            parts: list[Buffer | TreadleError] = [found[reference.sha256] for reference in wanted]
            batch = await asyncio.to_thread(joined, parts, blob=True)
        else:
            batch = joined([episode.inline or b"" for episode in episodes], blob=False)
        await self._keeper.ask(
            steps.report, trainer_epoch=1, step=self._step, metrics={}, trace_id=""
        )
        if self._step % CHECKPOINT_EVERY == 0:
            await self._committing
            self._committing = asyncio.ensure_future(self._commit(self._step))
        return batch

    async def _commit(self, step: int) -> None:
        parent = f"{step - CHECKPOINT_EVERY:064x}" if step else ""
        await self._keeper.ask(
            checkpoints.commit,
            trainer_epoch=1,
            digest=f"{step:064x}",
            parent_digest=parent,
            step=step,
            path="c",
        )
        gone, self._released = self._released, []
        if gone:
            await asyncio.to_thread(self._store.release, gone, writer_epoch=1)
        number = await self._keeper.ask(
            versions.announce, trainer_epoch=1, step=step, request_id=f"v{step}", trace_id=""
        )
        await self._keeper.ask(
            versions.commit, trainer_epoch=1, number=number, weights_digest=f"{number:016x}"
        )
        self._version = number

    def _follow(self, transition: Transition) -> None:
        if isinstance(transition, PayloadsReleased):
            for sha256, (node, episode_id) in zip(transition.stored, transition.held, strict=True):
                self._released.append(Hold(PayloadReference(sha256, 0, node), episode_id))


def payload(batch: Batch, index: int) -> bytes:
    """A sample as one object."""
    blob = b"" if batch.blobs is None else batch.blobs[index]
    return b"".join((batch.metas[index].encode(), batch.tokens[index], blob))


def joined(parts: Sequence[Buffer | TreadleError], *, blob: bool) -> Batch:
    """Contiguous arrays of the samples. Raises what came instead of a part."""
    batch = Batch([], np.empty((COUNT, TOKENS), np.int32))
    batch.blobs = np.empty((COUNT, BLOB), np.uint8) if blob else None
    for index, part in enumerate(parts):
        if isinstance(part, TreadleError):
            raise part
        batch.metas.append(bytes(part[:META_BYTES]).decode())
        batch.tokens[index] = np.frombuffer(part, np.int32, TOKENS, META_BYTES)
        if blob:
            start = META_BYTES + TOKENS * 4
            batch.blobs[index] = np.frombuffer(part, np.uint8, BLOB, start)
    return batch


def result_of(reference: PayloadReference, version: int, *, inlined: bool) -> Result:
    """What a replica would say of a sample."""
    return Result(
        reward=0.5,
        termination=Termination.FINISHED,
        metrics={},
        turn_rewards=(),
        num_tokens=TOKENS,
        num_trained=TOKENS // 2,
        versions=(version,),
        traceparent="",
        sha256=reference.sha256,
        size=reference.size,
        inlined=inlined,
        node=reference.node,
        node_epoch=reference.epoch,
    )


def reference_of(result: Result | None) -> PayloadReference:
    if result is None:
        raise ValueError("a claimed episode has no result")
    return PayloadReference(result.sha256, result.size, result.node, result.node_epoch)
