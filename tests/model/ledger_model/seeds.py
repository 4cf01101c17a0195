"""A seed is 2,000 actions, spread over runs of different lengths under different rules."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from ledger_model.schedule import Schedule
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.ports import Ledger

LENGTHS = (15, 40, 80, 150, 300, 600)


@dataclass
class Tally:
    """What was done."""

    actions: int = 0
    runs: int = 0
    lives: int = 0
    claims: int = 0
    acknowledged: int = 0


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
    with _ledger(kind) as ledger:
        schedule = Schedule(random, ledger, size, crashes=min(0.02, 4 / size))
        try:
            while schedule.actions < size and not schedule.is_over():
                schedule.step()
            schedule.complete()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a counter-example
            return error, [str(schedule.rules), *schedule.world.lines()]
        finally:
            tally.actions += schedule.actions
            tally.runs += 1
            tally.lives += schedule.lives
            tally.claims += schedule.world.oracle.claims
            tally.acknowledged += len(schedule.world.oracle.acknowledged)
            schedule.close()
    return None


def _generator(seed: int, number: int) -> Random:
    return Random(f"{seed}/{number}")  # noqa: S311


@contextlib.contextmanager
def _ledger(kind: str) -> Iterator[Ledger]:
    if kind == "memory":
        yield MemoryLedger()
        return
    with tempfile.TemporaryDirectory(prefix="treadle-model-") as directory:
        ledger = SqliteLedger(Path(directory) / FILE_NAME)
        yield ledger
        ledger.close()
