"""A seed is 2,000 actions, spread over runs of different lengths under different rules."""

import atexit
import contextlib
import functools
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from redis import Redis

from ledger_model.schedule import Schedule
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.core.transitions import kind_of
from treadle_experience.ports import Ledger
from treadle_payloads.files import FileStore
from treadle_runtime.testing import RedisProcess

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108
"""Where an fsync costs nothing: processes die here, not machines."""

LENGTHS = (15, 40, 80, 150, 300, 600)


@dataclass
class Tally:
    """What was done."""

    actions: int = 0
    runs: int = 0
    lives: int = 0
    claims: int = 0
    acknowledged: int = 0
    condensed: int = 0
    forgotten: int = 0
    """Tasks."""
    kinds: Counter[str] = field(default_factory=Counter[str])
    """Transitions that were stored, by kind."""


@dataclass
class CounterExample:
    """A schedule that broke a promise."""

    seed: int
    run: int
    error: BaseException
    trace: list[str]


def play(seed: int, actions: int, tally: Tally, *, ledger: str = "memory") -> CounterExample | None:
    """Plays a seed to its end, or to its first counter-example."""
    random, number = _generator(seed, 0), 0
    left = actions
    while left > 0:
        size = left if seed % 10 == 9 else min(left, random.choice(LENGTHS))
        number, before = number + 1, tally.actions
        found = _play_run(_generator(seed, number), size, tally, ledger)
        left -= tally.actions - before
        if found is not None:
            return CounterExample(seed, number, *found)
    return None


def _play_run(
    random: Random, size: int, tally: Tally, kind: str
) -> tuple[BaseException, list[str]] | None:
    with open_ledger(kind) as ledger:
        schedule = Schedule(random, ledger, size, open_store(), crashes=min(0.02, 4 / size))
        try:
            while schedule.actions < size and not schedule.is_over():
                schedule.step()
            schedule.complete()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a counter-example
            return error, schedule.lines()
        finally:
            tally.actions += schedule.actions
            tally.runs += 1
            tally.lives += schedule.lives
            tally.claims += schedule.world.oracle.claims
            tally.acknowledged += len(schedule.world.oracle.acknowledged)
            tally.condensed += schedule.condensed + schedule.world.process.session.condensed
            tally.forgotten += len(schedule.forgotten)
            tally.kinds.update(map(kind_of, schedule.stored))
            schedule.close()
    return None


def _generator(seed: int, number: int) -> Random:
    return Random(f"{seed}/{number}")  # noqa: S311


@contextlib.contextmanager
def open_ledger(kind: str) -> Iterator[Ledger]:
    """A ledger without a journal."""
    if kind == "memory":
        yield MemoryLedger()
        return
    if kind == "redis":
        with tempfile.TemporaryDirectory(prefix="treadle-model-", dir=FAST) as directory:
            ledger = RedisLedger(directory, emptied_redis())
            yield ledger
            ledger.close()
        return
    with tempfile.TemporaryDirectory(prefix="treadle-model-", dir=FAST) as directory:
        ledger = SqliteLedger(Path(directory) / FILE_NAME)
        yield ledger
        ledger.close()


@functools.cache
def open_store() -> FileStore:
    """The payload store of all schedules of this process; each removes what it stored."""
    folder = tempfile.mkdtemp(prefix="treadle-model-", dir=FAST)
    atexit.register(shutil.rmtree, folder)
    return FileStore(folder)


def emptied_redis() -> str:
    """The URL of this process's Redis server, which holds nothing."""
    server = _redis()
    with Redis.from_url(server.url) as client:
        client.flushall()
    return server.url


@functools.cache
def _redis() -> RedisProcess:
    folder = Path(tempfile.mkdtemp(prefix="treadle-model-", dir=FAST))
    atexit.register(shutil.rmtree, folder)
    server = RedisProcess(folder).start()
    atexit.register(server.kill)
    return server
