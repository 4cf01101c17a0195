"""Our store as an arm: decided by the core, appended to a ledger, claimed as steps of 64.

The ledger is Redis with durability `process`. Samples of 5 KB travel inline; those of 1 MiB are
uploaded to a payload sidecar whose spool is in shared memory, and mapped by the trainer, checked.
Every sample is leased, completed, claimed, reported trained and released by a checkpoint. The
experience service's own process is this one: there is no gRPC between it and who produces.
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

UPLOADS = 8
"""Side by side."""
CHECKPOINT_EVERY = 4
"""Steps; a checkpoint releases the payloads before it."""


class Ours:
    """One run that never ends."""

    def __init__(self, directory: Path, redis_url: str, sidecar: SidecarProcess) -> None:
        """Starts nothing; `begin` does."""
        rules = Rules(
            run_id="peers",
            steps=1_000_000,
            tasks_per_step=COUNT,
            group_size=1,
            max_lag=1_000_000,
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
        self._step = 0

    async def begin(self) -> None:
        """A trainer that has committed and published its start."""
        self._writing = asyncio.ensure_future(self._keeper.write())
        await self._keeper.ask(checkpoints.acquire, holder="t", checkpoint_digest="")
        await self._commit(0)
        number = await self._keeper.ask(
            versions.announce, trainer_epoch=1, step=0, request_id="v", trace_id=""
        )
        await self._keeper.ask(
            versions.commit, trainer_epoch=1, number=number, weights_digest="0" * 16
        )

    async def end(self) -> None:
        """Stops writing."""
        self._writing.cancel()
        await asyncio.gather(self._writing, return_exceptions=True)
        self._keeper.close()
        self._threads.shutdown()

    async def pass_through(self, batches: int, window: int, *, blob: bool) -> float:
        """Seconds until all samples were trained. Raises ValueError on wrong or lost ones."""
        source, room = Source(blob=blob), asyncio.Semaphore(window)
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
        seconds = time.perf_counter() - start
        if sorted(numbers) != list(range(batches * COUNT)):
            raise ValueError("samples were lost, or came twice")
        return seconds

    async def _put(self, batch: Batch, *, blob: bool) -> None:
        issued = await self._keeper.ask(
            tickets.lease, replica_id="r", served_version=1, max_tickets=COUNT, slots=1 << 20
        )
        payloads = [payload(batch, index) for index in range(COUNT)]
        if blob:
            loop = asyncio.get_running_loop()
            kept = [
                loop.run_in_executor(self._threads, self._upload, data, ticket)
                for data, ticket in zip(payloads, issued, strict=True)
            ]
            references: Sequence[PayloadReference] = await asyncio.gather(*kept)
        else:
            references = [PayloadReference.of(data) for data in payloads]
        await asyncio.gather(
            *(
                self._keeper.ask(
                    results.complete,
                    replica_id="r",
                    attempt=Attempt(ticket.episode_id, ticket.attempt),
                    result=result_of(reference, inlined=not blob),
                    inline=None if blob else data,
                )
                for ticket, reference, data in zip(issued, references, payloads, strict=True)
            )
        )

    def _upload(self, data: bytes, ticket: Ticket) -> PayloadReference:
        reference = self._store.put(data, holder=ticket.episode_id)
        self._store.confirm(Hold(reference, ticket.episode_id), writer_epoch=1)
        return reference

    async def _get(self, *, blob: bool) -> Batch:
        self._step += 1
        claim = await self._keeper.poll(
            lambda run: steps.claim(run, trainer_epoch=1, step=self._step),
            lambda claim: bool(claim.tasks),
            wait_s=60.0,
        )
        episodes = [task.episodes[0][0] for task in claim.tasks]
        if blob:
            wanted = [reference_of(episode.result) for episode in episodes]
            found = await asyncio.to_thread(self._store.fetch, wanted)
            parts: list[Buffer | TreadleError] = [found[reference.sha256] for reference in wanted]
        else:
            parts = [episode.inline or b"" for episode in episodes]
        batch = await asyncio.to_thread(joined, parts, blob=blob)
        await self._keeper.ask(
            steps.report, trainer_epoch=1, step=self._step, metrics={}, trace_id=""
        )
        if self._step % CHECKPOINT_EVERY == 0:
            await self._commit(self._step)
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
        await asyncio.to_thread(self._store.release, gone, writer_epoch=1)

    def _follow(self, transition: Transition) -> None:
        if isinstance(transition, PayloadsReleased):
            for sha256, (node, episode_id) in zip(transition.stored, transition.held, strict=True):
                self._released.append(Hold(PayloadReference(sha256, 0, node), episode_id))


def payload(batch: Batch, index: int) -> bytes:
    """A sample as one object."""
    blob = b"" if batch.blobs is None else batch.blobs[index].tobytes()
    return batch.metas[index].encode() + batch.tokens[index].tobytes() + blob


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


def result_of(reference: PayloadReference, *, inlined: bool) -> Result:
    """What a replica would say of a sample."""
    return Result(
        reward=0.5,
        termination=Termination.FINISHED,
        metrics={},
        turn_rewards=(),
        num_tokens=TOKENS,
        num_trained=TOKENS // 2,
        versions=(1,),
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
