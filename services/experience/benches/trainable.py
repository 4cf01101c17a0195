"""From the call that hands a result in to the trainer that holds its payload, beside its parts.

A service on Redis, with doorbells over NATS; the trainer waits at its bell for a batch of one
episode, whose payload lies in the payload store. The parts are measured alone, in turn with the
whole, on the same servers: a call that decides nothing, an append of the same rows, a ring that is
heard, a read of the same bytes. The way has two calls and two appends (the result, the claim), one
ring and one read. Prints one JSON object a measure; exits with 1 where a goal does not hold.

    python services/experience/benches/trainable.py --steps 200
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from google.protobuf.duration_pb2 import Duration
from store import result_of

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core.transitions import EpisodeDone
from treadle_payloads.files import FileStore
from treadle_runtime import doorbell
from treadle_runtime.channel import call, connect
from treadle_runtime.config import RunConfig
from treadle_runtime.doorbell import Doorbell, Topic
from treadle_runtime.local_servers import known
from treadle_runtime.local_servers.nats import NatsServer
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

RUN = "bench"
GOAL = "<= 1.5"
PARTS = {"call": 2, "append": 2, "ring": 1, "read": 1}
"""How often the way has each."""


class Bench:
    """One trainer and one replica of a run that is served elsewhere."""

    def __init__(self, stub: Any, bell: Doorbell, store: FileStore, payload: bytes) -> None:
        self._stub = stub
        self._bell = bell
        self._store = store
        self._reference = store.put(payload)

    async def ask(self, request: Any) -> Any:
        name = type(request).__name__.removesuffix("Request")
        return await call(getattr(self._stub, name), request, timeout_s=20, budget_s=20)

    async def begin(self) -> None:
        """A trainer that has committed and published its start."""
        await self.ask(pb.AcquireRunRequest(run_id=RUN, holder="trainer"))
        of: dict[str, Any] = {"run_id": RUN, "trainer_epoch": 1}
        await self.ask(pb.CommitCheckpointRequest(digest="0" * 64, step=0, path="c", **of))
        await self.ask(pb.AnnounceVersionRequest(step=0, request_id="v", **of))
        await self.ask(pb.CommitVersionRequest(version=1, weights_digest="0" * 16, **of))

    async def whole(self, step: int) -> float:
        """Seconds from the call with the result to the array in the trainer's hands."""
        lease = pb.LeaseTicketsRequest(
            run_id=RUN, replica_id="r", served_version=1, max_tickets=1, slots=1
        )
        (ticket,) = (await self.ask(lease)).tickets
        waiting = asyncio.ensure_future(self._train(step))
        while not (await asyncio.wait({waiting}, timeout=0.05))[0] and not self._is_waiting:
            pass
        began = time.perf_counter()
        completing = asyncio.ensure_future(self.ask(self._result(ticket)))
        ended = await waiting
        await completing
        await self.ask(pb.ReportStepRequest(run_id=RUN, trainer_epoch=1, step=step))
        return ended - began

    def read(self) -> np.ndarray[Any, Any]:
        """The payload as a trainer has it."""
        return np.frombuffer(self._store.get(self._reference), np.uint8)

    async def _train(self, step: int) -> float:
        self._is_waiting = False

        async def claim(wait_s: float) -> pb.ClaimStepResponse:
            request = pb.ClaimStepRequest(
                run_id=RUN, trainer_epoch=1, step=step, wait=Duration(seconds=int(wait_s))
            )
            answer = await self.ask(request)
            self._is_waiting = True
            return answer

        def enough(answer: pb.ClaimStepResponse) -> bool:
            return bool(answer.tasks)

        await doorbell.ask_until(self._bell, Topic.BATCHES, claim, enough, wait_s=60)
        self.read()
        return time.perf_counter()

    def _result(self, ticket: pb.Ticket) -> pb.CompleteEpisodeRequest:
        payload = episode_pb2.Payload(sha256=self._reference.sha256, size=self._reference.size)
        return pb.CompleteEpisodeRequest(
            run_id=RUN,
            replica_id="r",
            attempt=pb.Attempt(episode_id=ticket.episode_id, attempt=ticket.attempt),
            result=episode_pb2.EpisodeResult(
                reward=1.0,
                termination=episode_pb2.TERMINATION_FINISHED,
                num_tokens=60,
                num_trained=30,
                versions=[1],
                payload=payload,
            ),
        )


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def configure(directory: Path, redis: str, nats: str, steps: int) -> dict[str, Any]:
    """What the service is told."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"prompt": "47+38-62"}\n', encoding="utf-8")
    return {
        "run": {
            "id": RUN,
            "dir": str(directory),
            "model": str(directory),
            "doorbell": {"name": "nats", "url": nats},
        },
        "listen": f"unix:{directory}/s",
        "steps": steps + 1,
        "tasks_per_step": 1,
        "group_size": 1,
        "max_lag": steps,
        "deadline_s": 600,
        "source": {"name": "jsonl", "path": str(tasks), "epochs": None},
        "ledger": {"name": "redis", "url": redis},
    }


async def measure(args: argparse.Namespace) -> list[Measure]:
    """The whole and its parts, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ("whole", *PARTS)}
    payload = np.random.default_rng(0).bytes(args.bytes)
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-way-")))
        redis = RedisProcess(directory / "redis").start()
        stack.callback(redis.kill)
        nats = NatsServer.of(directory)
        nats.record()
        stack.enter_context(known.running(directory, nats.address))
        settings = configure(directory, redis.url, nats.address, args.steps)
        path = directory / "experience.yaml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "treadle_experience.main", "--config", str(path)]
        service = subprocess.Popen(command)  # noqa: ASYNC220, S603, our own module
        stack.callback(service.wait)
        stack.callback(service.terminate)
        run = RunConfig.model_validate(settings["run"])
        other = run.model_copy(update={"id": "alone"})
        bell = await stack.enter_async_context(doorbell.of_run(run, hears=[Topic.BATCHES]))
        hearer = await stack.enter_async_context(doorbell.of_run(other, hears=[Topic.BATCHES]))
        ringer = await stack.enter_async_context(doorbell.of_run(other))
        ledger = RedisLedger(directory / "alone", redis.url)
        stack.callback(ledger.close)
        epoch = ledger.acquire("alone")
        channel = await stack.enter_async_context(connect(settings["listen"]))
        stub = rpc.ExperienceServiceStub(channel)
        bench = Bench(stub, bell, FileStore(directory / "payloads"), payload)
        await bench.begin()
        for step in range(1, args.steps + 1):
            found["whole"].append(await bench.whole(step))
            found["call"].append(await timed(bench.ask(pb.GetRunRequest(run_id=RUN))))
            done = EpisodeDone(f"{step}", 1, result_of(payload), None)
            append = asyncio.to_thread(ledger.append, [done], epoch)
            found["append"].append(await timed(append))
            await hearer.wait(Topic.BATCHES, 0.01)  # a ring that came late is none of the next
            heard = asyncio.ensure_future(timed(hearer.wait(Topic.BATCHES, 5.0)))
            await asyncio.sleep(0)
            ringer.ring(Topic.BATCHES)
            found["ring"].append(await heard)
            found["read"].append(await timed(asyncio.to_thread(bench.read)))
    return list(measures(found, args))


def measures(found: dict[str, list[float]], args: argparse.Namespace) -> "list[Measure]":
    """Medians in milliseconds, and the whole over the sum of its parts."""
    p50 = {name: 1e3 * statistics.median(each) for name, each in found.items()}
    parts_ms = sum(count * p50[name] for name, count in PARTS.items())
    details = {"payload_bytes": args.bytes, "steps": args.steps}
    return [
        Measure("append_to_trainable", round(p50["whole"], 3), "ms", details=details),
        *(
            Measure(f"part_{name}", round(p50[name], 3), "ms", details={"times": times})
            for name, times in PARTS.items()
        ),
        Measure("append_to_trainable_over_parts", p50["whole"] / parts_ms, "ratio", GOAL),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a payload")
    raise SystemExit(report(asyncio.run(measure(parser.parse_args()))))
