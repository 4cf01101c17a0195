"""How long a killed store is away, beside a restart of Redis alone with the same data.

Fills a run on a Redis server with results that wait for a trainer; kills the service (SIGKILL)
under load, and waits for the first lease, which the process that stood by grants; the same with one
that is stopped (SIGSTOP), and where nobody stands by, and the service is started again. In turn it
kills Redis, and waits until it answers; the ratio is of each kill and the restart that followed.
Prints one JSON object a measure; exits with 1 where a goal does not hold.

    python services/experience/benches/recovery.py --episodes 50000
"""

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from store import BATCH, result_of, start_run
from throughput import GROUP_SIZE, TASKS_PER_STEP

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.config import ExperienceConfig
from treadle_experience.core import results, tickets
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt
from treadle_experience.keeper import Keeper
from treadle_runtime.channel import call, connect
from treadle_runtime.config import load
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

ROUNDS, CLIENTS = 3, 16
GOAL, TAKEOVER = "<= 2", "<= 15"


def configure(directory: Path, url: str, episodes: int) -> Path:
    """The service's configuration: a window that holds all episodes."""
    tasks = directory / "tasks.jsonl"
    tasks.write_text('{"prompt": "47+38-62"}\n', encoding="utf-8")
    config = {
        "run": {"id": "bench", "dir": str(directory), "model": str(directory)},
        "listen": f"unix:{directory}/s",
        "steps": episodes,
        "tasks_per_step": TASKS_PER_STEP,
        "group_size": GROUP_SIZE,
        "max_lag": episodes,
        "deadline_s": 6000,
        "lease_s": 3000,
        "source": {"name": "jsonl", "path": str(tasks), "epochs": None},
        "ledger": {"name": "redis", "url": url},
    }
    path = directory / "experience.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


async def fill(path: Path, url: str, episodes: int, payload: bytes) -> None:
    """Stores results as the service would, without its wire."""
    settings = load(ExperienceConfig, ["--config", str(path)])
    ledger = RedisLedger(settings.run.dir, url)
    keeper = Keeper(Run(settings.rules(), {"": lambda cursor: {"number": cursor}}), ledger)
    writing = asyncio.ensure_future(keeper.write())
    await start_run(keeper)
    result = result_of(payload)
    for _ in range(0, episodes, BATCH):
        issued = await keeper.ask(
            tickets.lease, replica_id="r", served_version=1, max_tickets=BATCH, slots=episodes
        )
        await asyncio.gather(
            *(
                keeper.ask(
                    results.complete,
                    replica_id="r",
                    attempt=Attempt(each.episode_id, each.attempt),
                    result=result,
                    inline=payload,
                )
                for each in issued
            )
        )
    writing.cancel()
    ledger.resign()
    keeper.close()


async def lease(stub: Any) -> None:
    """One ticket, however long the service is away."""
    request = pb.LeaseTicketsRequest(
        run_id="bench", replica_id="r", served_version=1, max_tickets=1, slots=10**6
    )
    answer = await call(stub.LeaseTickets, request, timeout_s=60, budget_s=60)
    if not answer.tickets:
        raise RuntimeError("the window is full")


class Service:
    """A process of the run at an address; the one that does not serve stands by."""

    def __init__(self, config: Path, address: str) -> None:
        self.address = address
        command = [sys.executable, "-m", "treadle_experience.main", "--config", str(config)]
        self.process = subprocess.Popen(  # noqa: S603, our own module
            [*command, f"listen={address}"], stderr=subprocess.PIPE, text=True
        )

    def read_until(self, words: str) -> None:
        """Blocks until it has said so."""
        lines = iter(self.process.stderr.readline, "") if self.process.stderr else iter(())
        said = ""
        for said in lines:
            if words in said:
                return
        raise RuntimeError(f"{self.address} ended without {words!r}: {said}")

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.process.kill()
        self.process.communicate()


async def away_s(serving: Service, stub: Any, signum: signal.Signals) -> float:
    """Kills or stops the service under load; the seconds to the first lease after."""
    before = [asyncio.ensure_future(lease(stub)) for _ in range(CLIENTS)]
    await before[0]
    began = time.perf_counter()
    serving.process.send_signal(signum)
    after = [asyncio.ensure_future(lease(stub)) for _ in range(CLIENTS)]
    await asyncio.wait(after, return_when=asyncio.FIRST_COMPLETED)
    seconds = time.perf_counter() - began
    await asyncio.gather(*before, *after)
    serving.kill()
    return seconds


async def by_a_standby(
    config: Path, addresses: list[str], signum: signal.Signals, redis: RedisProcess
) -> list[tuple[float, float]]:
    """Seconds without a lease, where another process stands by; each with a restart of Redis."""
    found: list[tuple[float, float]] = []
    serving = Service(config, addresses[0])
    serving.read_until("serving on")
    standby = Service(config, addresses[1])
    try:
        async with connect(addresses) as channel:
            stub = rpc.ExperienceServiceStub(channel)
            for _ in range(ROUNDS):
                standby.read_until("waiting: process")
                seconds = await away_s(serving, stub, signum)
                found.append((seconds, restart_s(redis)))
                serving, standby = standby, Service(config, serving.address)
    finally:
        serving.kill()
        standby.kill()
    return found


async def by_a_start(config: Path, address: str) -> list[float]:
    """The same, where a supervisor starts the service again at once."""
    found: list[float] = []
    serving = Service(config, address)
    try:
        async with connect(address) as channel:
            stub = rpc.ExperienceServiceStub(channel)
            for _ in range(ROUNDS):
                await lease(stub)
                began = time.perf_counter()
                serving.kill()
                serving = Service(config, address)
                await lease(stub)
                found.append(time.perf_counter() - began)
    finally:
        serving.kill()
    return found


def restart_s(redis: RedisProcess) -> float:
    """Seconds until Redis answers again after a kill."""
    redis.kill()
    began = time.perf_counter()
    redis.start()
    return time.perf_counter() - began


async def measure(args: argparse.Namespace) -> list[Measure]:
    """All on one ledger."""
    payload = bytes(range(256)) * (args.bytes // 256)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-rec-")))
        redis = RedisProcess(directory / "redis").start()
        stack.callback(redis.kill)
        addresses = [f"unix:{directory}/{name}" for name in ("s", "t")]
        config = configure(directory, redis.url, args.episodes)
        await fill(config, redis.url, args.episodes, payload)
        killed = await by_a_standby(config, addresses, signal.SIGKILL, redis)
        stopped = await by_a_standby(config, addresses, signal.SIGSTOP, redis)
        start_s = statistics.median(await by_a_start(config, addresses[0]))
    longest_s = max(seconds for seconds, _ in (*killed, *stopped))
    details = {"episodes": args.episodes, "payload_bytes": len(payload), "rounds": ROUNDS}
    return [
        Measure(
            "redis_restart",
            round(statistics.median(redis_s for _, redis_s in killed), 3),
            "s",
            details=details,
        ),
        Measure("recovery_by_a_start", round(start_s, 3), "s"),
        Measure(
            "recovery_by_a_standby", round(statistics.median(each for each, _ in killed), 3), "s"
        ),
        Measure("takeover_longest", round(longest_s, 3), "s", TAKEOVER),
        Measure(
            "recovery_over_redis",
            round(statistics.median(each / redis_s for each, redis_s in killed), 3),
            "ratio",
            GOAL,
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--bytes", type=int, default=5120, help="of a payload, in steps of 256")
    raise SystemExit(report(asyncio.run(measure(parser.parse_args()))))
