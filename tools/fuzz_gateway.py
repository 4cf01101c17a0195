"""Proves what a gateway makes of conversations and of nonsense; prints a JSON line a measure.

    python tools/fuzz_gateway.py [--conversations 10000] [--malformed 10000] [--seed 0]

`conversations` plays random sessions on capture and on a model of it that is simple enough to be
right, every fourth with a real chat template and tokenizer, most over the JSON of a wire.
`malformed` breaks requests of all wires until so many are refused: nothing else may come of them.
A counter-example is on stderr, with its seed.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random

import malformed
from conversation_speech import Spoken
from conversation_wires import WIRES
from conversations import Play

from treadle_gateway.capture.session import Capture
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.body import parsed
from treadle_gateway.wires.generate import Generate
from treadle_runtime.measures import Measure, report

_SHARE = 250
"""Sessions that a process plays in one go; refused requests, likewise."""
_SHOWN = 10
"""Most counter-examples that are told."""


@dataclass
class Tally:
    """What was played, and what went wrong."""

    played: int = 0
    wrong: list[str] = field(default_factory=list[str])
    counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, other: "Tally") -> None:
        """Counts what another one counted."""
        self.played += other.played
        self.wrong += other.wrong
        self.counts.update(other.counts)


def main() -> int:
    """Plays all, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--malformed", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    return report(_measures(options.conversations, options.malformed, options.seed))


def _measures(conversations: int, refusals: int, seed: int) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory() as folder:
        played = _together(partial(play, Path(folder)), conversations, seed)
        details = {name: played.counts[name] for name in sorted(played.counts)}
        yield Measure(
            "conversations", played.played, "sessions", f">= {conversations}", {"counts": details}
        )
        yield Measure("differences", len(played.wrong), "sessions", "== 0")
        broken = _together(partial(refuse, Path(folder)), refusals, seed)
        yield Measure("malformed", broken.played, "requests", f">= {refusals}")
        yield Measure("server_errors", len(broken.wrong), "requests", "== 0")


def _together(work: "partial[Tally]", total: int, seed: int) -> Tally:
    """Shares `total` out over the processors."""
    begins = range(seed, seed + total, _SHARE)
    sizes = [min(_SHARE, seed + total - begin) for begin in begins]
    tally = Tally()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as processes:
        for share in processes.map(work, begins, sizes):
            tally.add(share)
    for wrong in tally.wrong[:_SHOWN]:
        sys.stderr.write(f"{wrong}\n")
    return tally


def play(folder: Path, begin: int, size: int) -> Tally:
    """Plays the sessions of `size` seeds."""
    tally = Tally()
    for seed in range(begin, begin + size):
        speech = spoken(folder, strips=seed % 8 == 0) if seed % 4 == 0 else None
        played = Play(seed, speech, (*WIRES, None)[seed // 4 % 4])
        try:
            played.play()
        except Exception:  # noqa: BLE001, all is told
            tally.wrong.append(f"seed {seed}: {traceback.format_exc()}")
        tally.played += 1
        tally.counts.update(played.capture.counts)
    return tally


def refuse(folder: Path, begin: int, size: int) -> Tally:
    """Breaks requests until `size` of them are refused."""
    random, tally = Random(begin), Tally()  # noqa: S311
    speech = spoken(folder, strips=False)
    while tally.played < size:
        try:
            _answer(random, speech)
        except RefusedError:
            tally.played += 1
        except Exception:  # noqa: BLE001, all is told
            tally.played += 1
            tally.wrong.append(f"seed {begin}, {tally.played}: {traceback.format_exc()}")
    return tally


def _answer(random: Random, speech: Spoken) -> None:
    """All that comes before the policy is asked. Raises RefusedError."""
    if random.random() < 0.1:
        Generate().ask(parsed(malformed.tokens(random)), malformed.headers(random))
        return
    client = random.choice(WIRES)
    try:
        ask = client.wire.ask(parsed(malformed.body(random, client)), malformed.headers(random))
        speech.render(Capture(max_requests=1).locate(ask), ask)
    except RefusedError as error:
        status, headers, body = client.wire.refusal(error)
        json.dumps([status, headers, body]).encode()
        raise


@cache
def spoken(folder: Path, *, strips: bool) -> Spoken:
    """A policy of this process."""
    return Spoken(folder / f"{os.getpid()}-{strips}", strips=strips)


if __name__ == "__main__":
    sys.exit(main())
