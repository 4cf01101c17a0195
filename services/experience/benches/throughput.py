"""How many episodes a second the ledger serves, and what one costs it.

Starts the service as its own process and drives whole steps through it over a unix socket: lease,
complete (inline payloads), claim, report, commit. With `--ledger redis` it starts a Redis server of
its own too. Prints one JSON object a measure.

    python services/experience/benches/throughput.py --steps 40 --rate 130 --ledger redis
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from google.protobuf.duration_pb2 import Duration

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_core.episodes import Segment
from treadle_payloads.codec import encode_payload
from treadle_payloads.store import PayloadReference
from treadle_runtime.channel import call, connect
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

RUN = "benchmark"
TASKS_PER_STEP, GROUP_SIZE, LANES = 16, 8, 32
SYNC = {"host": "always", "process": "everysec"}
"""Redis's `appendfsync` by what is declared."""


class Driver:
    """One trainer and LANES lanes of episodes, as fast as the ledger lets them or at `rate`."""

    def __init__(self, stub: Any, payload: bytes, args: argparse.Namespace) -> None:
        self._stub = stub
        self._payload = payload
        self._tokens: int = args.tokens
        self._most: int = args.most
        self._gap_s = 1 / args.rate if args.rate else 0.0
        self._next = time.monotonic()
        self._version = 0
        self.latencies: list[float] = []

    async def ask(self, request: Any) -> Any:
        name = type(request).__name__.removesuffix("Request")
        return await call(getattr(self._stub, name), request, timeout_s=20, budget_s=10)

    async def train(self, steps: int) -> float:
        """Runs all steps; returns the seconds that they took."""
        await self.ask(pb.AcquireRunRequest(run_id=RUN, holder="trainer"))
        await self._commit(0)
        await self._publish(0)
        start = time.monotonic()
        lanes = [asyncio.ensure_future(self._lane(f"r{i}")) for i in range(LANES)]
        for step in range(1, steps + 1):
            while not (await self._claim(step)).tasks:
                pass
            await self.ask(pb.ReportStepRequest(run_id=RUN, trainer_epoch=1, step=step))
            await self._publish(step)
            if step % 10 == 0 or step == steps:
                await self._commit(step)
        await asyncio.gather(*lanes)
        return time.monotonic() - start

    async def _lane(self, replica_id: str) -> None:
        while True:
            leased = await self.ask(
                pb.LeaseTicketsRequest(
                    run_id=RUN,
                    replica_id=replica_id,
                    served_version=self._version,
                    max_tickets=self._most,
                    slots=128,
                    wait=Duration(seconds=1),
                )
            )
            if leased.complete:
                return
            for ticket in leased.tickets:
                await self._complete(replica_id, ticket)

    async def _complete(self, replica_id: str, ticket: pb.Ticket) -> None:
        if self._gap_s:
            self._next = max(self._next + self._gap_s, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
        reference = PayloadReference.of(self._payload)
        result = episode_pb2.EpisodeResult(
            reward=1.0,
            termination=episode_pb2.TERMINATION_FINISHED,
            metrics={"calls": 2.0},
            num_tokens=self._tokens,
            num_trained=self._tokens // 2,
            versions=[1],
            payload=episode_pb2.Payload(
                sha256=reference.sha256, size=reference.size, inline=self._payload
            ),
        )
        start = time.monotonic()
        await self.ask(
            pb.CompleteEpisodeRequest(
                run_id=RUN,
                replica_id=replica_id,
                attempt=pb.Attempt(episode_id=ticket.episode_id, attempt=ticket.attempt),
                result=result,
            )
        )
        self.latencies.append(time.monotonic() - start)

    async def _claim(self, step: int) -> pb.ClaimStepResponse:
        return await self.ask(
            pb.ClaimStepRequest(run_id=RUN, trainer_epoch=1, step=step, wait=Duration(seconds=10))
        )

    async def _publish(self, step: int) -> None:
        request = pb.AnnounceVersionRequest(
            run_id=RUN, trainer_epoch=1, step=step, request_id=f"v{step}"
        )
        version = (await self.ask(request)).version
        await self.ask(
            pb.CommitVersionRequest(
                run_id=RUN, trainer_epoch=1, version=version, weights_digest="0" * 16
            )
        )
        self._version = version

    async def _commit(self, step: int) -> None:
        head = await self.ask(pb.GetRunRequest(run_id=RUN))
        parent = head.checkpoints[0].digest if head.checkpoints else ""
        await self.ask(
            pb.CommitCheckpointRequest(
                run_id=RUN,
                trainer_epoch=1,
                digest=f"{step:064x}",
                parent_digest=parent,
                step=step,
                path=f"c/{step}",
            )
        )


def payload_of(tokens: int) -> bytes:
    """One segment, the second half of it sampled by version 1."""
    sampled = np.arange(tokens) >= tokens // 2
    version = np.where(sampled, 1, -1).astype(np.int32)
    return encode_payload(
        [
            Segment(
                token_ids=np.arange(tokens, dtype=np.int32),
                sampled=sampled,
                trained=sampled.copy(),
                logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
                policy_version=version,
                context_version=version.copy(),
            )
        ]
    )


def write_config(directory: Path, steps: int, ledger: dict[str, str]) -> Path:
    """The service's configuration, with tasks enough for all steps."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"prompt": "47+38-62"}\n' * (steps * TASKS_PER_STEP), encoding="utf-8")
    config = {
        "run": {"id": RUN, "dir": str(directory), "model": str(directory)},
        "listen": f"unix:{directory}/s",
        "steps": steps,
        "tasks_per_step": TASKS_PER_STEP,
        "group_size": GROUP_SIZE,
        "max_lag": 1000,  # everything is sampled by version 1
        "deadline_s": 600,
        "source": {"name": "jsonl", "path": str(tasks)},
        "ledger": ledger,
    }
    path = directory / "experience.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace) -> list[Measure]:
    """Starts the service and drives it."""
    steps: int = args.steps
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle")))
        ledger = {"name": args.ledger}
        if args.ledger == "redis":
            redis = RedisProcess(directory / "redis").start(appendfsync=SYNC[args.durability])
            stack.callback(redis.kill)
            ledger |= {"url": redis.url, "durability": args.durability}
        config = write_config(directory, steps, ledger)
        service = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "treadle_experience.main", "--config", str(config)
        )
        try:
            channel = await stack.enter_async_context(connect(f"unix:{directory}/s"))
            payload = payload_of(args.tokens)
            driver = Driver(rpc.ExperienceServiceStub(channel), payload, args)
            await driver.ask(pb.GetRunRequest(run_id=RUN))
            before = cpu_seconds(service.pid)
            wall_s = await driver.train(steps)
            cpu_s = cpu_seconds(service.pid) - before
        finally:
            service.terminate()
            await service.wait()
    episodes = steps * TASKS_PER_STEP * GROUP_SIZE
    latencies = np.array(driver.latencies) * 1e3
    details = {"episodes": episodes, "payload_bytes": len(payload), "rate": args.rate} | ledger
    return [
        Measure("ledger_episodes_per_s", episodes / wall_s, "episodes/s", details=details),
        Measure("ledger_cpu_ms_per_episode", 1e3 * cpu_s / episodes, "ms"),
        Measure("ledger_cores", cpu_s / wall_s, "cores"),
        Measure("ledger_complete_ms_p50", float(np.percentile(latencies, 50)), "ms"),
        Measure("ledger_complete_ms_p99", float(np.percentile(latencies, 99)), "ms"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=0.0, help="episodes a second; 0: no limit")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--ledger", choices=("sqlite", "redis"), default="sqlite")
    parser.add_argument("--durability", choices=tuple(SYNC), default="host", help="of Redis")
    parser.add_argument("--most", type=int, default=1, help="tickets that one call leases")
    raise SystemExit(report(asyncio.run(measure(parser.parse_args()))))
