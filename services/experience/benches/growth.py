"""Whether a decision of the ledger costs the same after a million tasks as after ten thousand.

Drives the keeper of a run, in this process, through whole lives of tasks: lease, complete (inline
payload), claim, report, publish, checkpoint, release. CPU seconds are those of this process, all
threads; with the ledger `redis` the server's come apart. Prints one JSON object a measure.

    python services/experience/benches/growth.py --tasks 1000000 --ledger sqlite
"""

import argparse
import asyncio
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from treadle_core.episodes import Termination
from treadle_core.tickets import Sampling
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.core import checkpoints, results, steps, tickets, versions
from treadle_experience.core.audit import reconcile
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt, Result, RunState, TaskState
from treadle_experience.keeper import Keeper
from treadle_experience.ports import Ledger
from treadle_runtime.measures import Measure, report
from treadle_runtime.testing import RedisProcess

WINDOW = 10_000
"""Tasks between two looks at the clock."""
LAST = 10
"""Windows at the end that are compared with the first one."""
TASKS_PER_STEP, GROUP_SIZE, CHECKPOINT_EVERY = 200, 1, 10
PAYLOAD = bytes(64)
RULES = Rules(
    run_id="growth",
    steps=10**9,
    tasks_per_step=TASKS_PER_STEP,
    group_size=GROUP_SIZE,
    max_lag=1,
    retries=1,
    deadline_s=3600.0,
    lease_s=600.0,
    sampling=Sampling(1.0, 16),
)


@dataclass
class Driver:
    """One trainer and one replica that do what is next."""

    keeper: Keeper
    epoch: int = 0
    head: str = ""
    version: int = 0
    windows: list[float] = field(default_factory=list[float])
    """CPU seconds."""

    async def train(self, num_tasks: int, look: Callable[[], None]) -> None:
        """The whole life of as many tasks; `look` is called after each window."""
        self.epoch, _ = await self.keeper.ask(
            checkpoints.acquire, holder="trainer", checkpoint_digest=""
        )
        await self.commit(0)
        await self.publish(0)
        began = time.process_time()
        for step in range(1, num_tasks // TASKS_PER_STEP + 1):
            await self.step(step)
            if step * TASKS_PER_STEP % WINDOW == 0:
                now = time.process_time()
                self.windows.append(now - began)
                look()
                began = time.process_time()

    async def step(self, step: int) -> None:
        """Samples, trains and publishes one step."""
        leased = await self.keeper.ask(
            tickets.lease,
            replica_id="r",
            served_version=self.version,
            max_tickets=TASKS_PER_STEP * GROUP_SIZE,
            slots=TASKS_PER_STEP * GROUP_SIZE,
        )
        await asyncio.gather(*(self.complete(each.episode_id, each.attempt) for each in leased))
        claim = await self.keeper.ask(steps.claim, trainer_epoch=self.epoch, step=step)
        if len(claim.tasks) != TASKS_PER_STEP:
            raise RuntimeError(f"step {step} is not ready")
        metrics = {"loss": 0.5, "wait_s": 0.0, "train_s": 1.0}
        await self.keeper.ask(
            steps.report, trainer_epoch=self.epoch, step=step, metrics=metrics, trace_id=""
        )
        if step % CHECKPOINT_EVERY == 0:
            await self.commit(step)
        await self.publish(step)

    async def complete(self, episode_id: str, attempt: int) -> None:
        """Delivers a result."""
        result = Result(
            reward=1.0,
            termination=Termination.FINISHED,
            metrics={"calls": 2.0},
            turn_rewards=(),
            num_tokens=16,
            num_trained=8,
            versions=(self.version,),
            traceparent="",
            sha256=hashlib.sha256(PAYLOAD).hexdigest(),
            size=len(PAYLOAD),
            inlined=True,
        )
        await self.keeper.ask(
            results.complete,
            replica_id="r",
            attempt=Attempt(episode_id, attempt),
            result=result,
            inline=PAYLOAD,
        )

    async def commit(self, step: int) -> None:
        """Commits a checkpoint."""
        digest = f"{step + 1:064x}"
        await self.keeper.ask(
            checkpoints.commit,
            trainer_epoch=self.epoch,
            digest=digest,
            parent_digest=self.head,
            step=step,
            path=f"checkpoints/step-{step:06d}",
        )
        self.head = digest

    async def publish(self, step: int) -> None:
        """Commits a version."""
        number = await self.keeper.ask(
            versions.announce,
            trainer_epoch=self.epoch,
            step=step,
            request_id=f"v{step}",
            trace_id="",
        )
        await self.keeper.ask(
            versions.commit,
            trainer_epoch=self.epoch,
            number=number,
            weights_digest=f"{number:016x}",
        )
        self.version = number


@contextmanager
def opened(kind: str, directory: Path) -> Generator[tuple[Ledger, psutil.Process | None]]:
    """A new ledger, and its server where it has one."""
    if kind == "sqlite":
        yield SqliteLedger(directory / FILE_NAME), None
        return
    from treadle_experience.adapters.redis_ledger import RedisLedger  # noqa: PLC0415, an extra

    server = RedisProcess(directory / "redis").start()
    try:
        pid = server.process.pid if server.process else 0
        yield RedisLedger(directory, server.url), psutil.Process(pid)
    finally:
        server.kill()


@dataclass
class Memory:
    """Resident MiB after each window, of this process and of the ledger's server."""

    server: psutil.Process | None
    ours: list[float] = field(default_factory=list[float])
    theirs: list[float] = field(default_factory=list[float])

    def look(self) -> str:
        """Takes note of it."""
        self.ours.append(psutil.Process().memory_info().rss / 2**20)
        self.theirs.append(self.server.memory_info().rss / 2**20 if self.server else 0.0)
        return f"RSS {self.ours[-1]:.0f} MiB, server {self.theirs[-1]:.0f} MiB"

    def measures(self) -> Iterator[Measure]:
        """The first and the last of them."""
        for name, found in (("rss", self.ours), ("server_rss", self.theirs)):
            yield Measure(f"{name}_first_10k", round(found[0]), "MiB")
            yield Measure(f"{name}_last", round(found[-1]), "MiB")


async def measure(kind: str, num_tasks: int, directory: Path) -> list[Measure]:
    """Drives a run of `num_tasks` tasks, and starts it again."""
    with opened(kind, directory) as (ledger, server):
        run = Run(RULES, {"": lambda cursor: {"number": cursor}})
        keeper = Keeper(run, ledger)
        writer = asyncio.ensure_future(keeper.write())
        driver, memory = Driver(keeper), Memory(server)

        def look() -> None:
            done = f"{len(driver.windows) * WINDOW:>9} tasks {driver.windows[-1]:6.2f} s CPU"
            sys.stderr.write(f"{done}, {memory.look()}, {len(run.state.tasks)} records\n")

        await driver.train(num_tasks, look)
        await keeper.drain()
        writer.cancel()
        server_s = sum(server.cpu_times()[:2]) if server else 0.0
        found = [
            Measure("tasks", num_tasks, "tasks"),
            *costs(driver.windows, kind),
            Measure("server_cpu_s", round(server_s, 1), "s"),
            *memory.measures(),
            *restart(ledger, num_tasks),
        ]
        keeper.close()
    return found


def costs(windows: list[float], kind: str) -> Iterator[Measure]:
    """CPU seconds, and how the last ones compare with the first."""
    first, last = windows[0], statistics.median(windows[-LAST:])
    growth = round(last / first, 3)
    yield Measure("cost_growth_at_1m", growth, "ratio", "<= 1.5", details={"ledger": kind})
    yield Measure("cpu_s_first_10k", round(first, 3), "s")
    yield Measure("cpu_s_per_10k", round(statistics.median(windows), 3), "s")
    yield Measure("cpu_s_worst_10k", round(max(windows), 3), "s")


def restart(ledger: Ledger, num_tasks: int) -> Iterator[Measure]:
    """What a successor reads, and whether it accounts for every task."""
    began = time.process_time()
    journal = list(ledger.load())
    state = RunState()
    Run(RULES, {}, state).load(journal)
    yield Measure("restart_cpu_s", round(time.process_time() - began, 2), "s")
    yield Measure("restart_transitions", len(journal), "transitions")
    account = reconcile(journal, state)
    trained = state.task_counts[TaskState.CONSUMED] + state.task_counts[TaskState.TRAINED]
    lost = abs(account.unaccounted()) + len(account.missing()) + num_tasks - trained
    yield Measure("lost", lost, "tasks", "== 0")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--ledger", choices=("sqlite", "redis"), default="sqlite")
    parser.add_argument("--directory", type=Path, help="where the ledger lies; a new one in it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="treadle-growth-", dir=args.directory) as directory:
        return report(asyncio.run(measure(args.ledger, args.tasks, Path(directory))))


if __name__ == "__main__":
    raise SystemExit(main())
