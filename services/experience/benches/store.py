"""Experiences a second through the store on Redis, beside raw pipelined writes of the same bytes.

One experience is an episode's result with its inline payload. The store decides and folds it, and
appends it in a batch; raw writes are the same rows and payloads, pipelined by the same client to
the same server, where nobody decides, checks or reads back. Both take turns. Prints one JSON
object a measure; exits with 1 where a goal does not hold.

    python services/experience/benches/store.py --batches 40
"""

import argparse
import asyncio
import hashlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from redis import Redis

from treadle_core.episodes import Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_experience.adapters import redis_rows
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core import checkpoints, results, tickets, versions
from treadle_experience.core.apply import apply
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt, EpisodeState, Result, RunState
from treadle_experience.core.transitions import EpisodeDone, Transition, WithPayload
from treadle_experience.keeper import Keeper
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

BATCH = 64
ROUNDS = 5
GOAL = ">= 0.3"


async def through_the_store(keeper: Keeper, issued: Sequence[Ticket], payload: bytes) -> float:
    """Seconds until all results are acknowledged, `BATCH` at a time."""
    result = result_of(payload)
    began = time.perf_counter()
    for start in range(0, len(issued), BATCH):
        await asyncio.gather(
            *(
                keeper.ask(
                    results.complete,
                    replica_id="r",
                    attempt=Attempt(ticket.episode_id, ticket.attempt),
                    result=result,
                    inline=payload,
                )
                for ticket in issued[start : start + BATCH]
            )
        )
    return time.perf_counter() - began


def by_the_ledger(ledger: RedisLedger, epoch: int, done: Sequence[Transition]) -> float:
    """Seconds until all are appended, `BATCH` at a time, where nobody decides."""
    began = time.perf_counter()
    for start in range(0, len(done), BATCH):
        ledger.append(done[start : start + BATCH], epoch)
    return time.perf_counter() - began


def raw(client: Redis, done: Sequence[Transition]) -> float:
    """Seconds until the same bytes are written, `BATCH` at a time."""
    rows = [
        (each.episode_id, redis_rows.dump(each), each.inline)
        for each in done
        if isinstance(each, WithPayload)
    ]
    began = time.perf_counter()
    for start in range(0, len(rows), BATCH):
        with client.pipeline(transaction=False) as pipeline:
            for episode_id, row, inline in rows[start : start + BATCH]:
                pipeline.rpush("raw:journal", row)
                pipeline.hset("raw:inline", episode_id, inline or b"")
            pipeline.execute()
    return time.perf_counter() - began


def result_of(payload: bytes) -> Result:
    """What a replica would say of it."""
    return Result(
        reward=1.0,
        termination=Termination.FINISHED,
        metrics={"calls": 2.0},
        turn_rewards=(),
        num_tokens=60,
        num_trained=30,
        versions=(1,),
        traceparent="",
        sha256=hashlib.sha256(payload).hexdigest(),
        size=len(payload),
        inlined=True,
    )


async def start_run(keeper: Keeper) -> None:
    """A trainer that has committed and published its start."""
    await keeper.ask(checkpoints.acquire, holder="t", checkpoint_digest="")
    await keeper.ask(
        checkpoints.commit, trainer_epoch=1, digest="0" * 64, parent_digest="", step=0, path="c"
    )
    number = await keeper.ask(
        versions.announce, trainer_epoch=1, step=0, request_id="v", trace_id=""
    )
    await keeper.ask(versions.commit, trainer_epoch=1, number=number, weights_digest="0" * 16)


async def measure(args: argparse.Namespace) -> list[Measure]:
    """Both in turns on one server."""
    count, payload = args.batches * BATCH, bytes(range(256)) * (args.bytes // 256)
    rules = Rules(
        run_id="bench",
        steps=1_000_000,
        tasks_per_step=1,
        group_size=1,
        max_lag=1_000_000,
        retries=0,
        deadline_s=3600,
        lease_s=3000,
        sampling=Sampling(1.0, 16),
    )
    with tempfile.TemporaryDirectory(prefix="treadle-store-") as directory:
        server = RedisProcess(Path(directory) / "redis").start(appendfsync="everysec")
        ledger = RedisLedger(directory, server.url, durability="process")
        run = Run(rules, {"": lambda cursor: {"number": cursor}})
        keeper = Keeper(run, ledger)
        writing = asyncio.ensure_future(keeper.write())
        alone = RedisLedger(Path(directory) / "alone", server.url, durability="process")
        epoch = alone.acquire("alone")
        stored: list[float] = []
        appended: list[float] = []
        written: list[float] = []
        with Redis.from_url(server.url) as client:
            await start_run(keeper)
            for number in range(ROUNDS):
                issued = await keeper.ask(
                    tickets.lease, replica_id="r", served_version=1, max_tickets=count, slots=count
                )
                stored.append(await through_the_store(keeper, issued, payload))
                done = [
                    EpisodeDone(f"{each.episode_id}/{number}", 1, result_of(payload), payload)
                    for each in issued
                ]
                appended.append(by_the_ledger(alone, epoch, done))
                written.append(raw(client, done))
        found = RunState()
        for transition in ledger.read().journal:  # its start may be condensed
            apply(found, transition)
        held = found.episode_counts[EpisodeState.DONE]
        writing.cancel()
        keeper.close()
        alone.close()
        server.kill()
    details = {"batch": BATCH, "payload_bytes": len(payload), "rounds": ROUNDS}
    raw_s = statistics.median(written)
    return [
        Measure("experiences_lost", ROUNDS * count - held, "experiences", "== 0"),
        Measure("raw_redis", count / raw_s, "experiences/s", details=details),
        Measure("experiences", count / statistics.median(stored), "experiences/s"),
        Measure("ledger_appends", count / statistics.median(appended), "experiences/s"),
        Measure("appends_over_raw_redis", raw_s / statistics.median(appended), "ratio"),
        Measure("experiences_over_raw_redis", raw_s / statistics.median(stored), "ratio", GOAL),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=40, help="of a round")
    parser.add_argument("--bytes", type=int, default=768, help="of a payload, in steps of 256")
    raise SystemExit(report(asyncio.run(measure(parser.parse_args()))))
