"""What the gateway costs, beside an engine alone, a bare pass-through, and a peer.

Clients hold growing chats over arms that take turns, and check every reply; what the gateway
captured is compared with what was said, token for token. The arms:

* direct: an engine that speaks Chat Completions. 50 ms to the first token, 5 ms each.
* passthrough: such an engine behind a process that hands bytes on, on the same HTTP server.
* gateway: a worker of the gateway, and behind its line a replica whose policy has the same pace.
* floor: a process that reads bodies, parses them as the wire does and hashes every message.
* molt: the chat server of that peer before the same engine; see peers/README.md.
* litellm, lightning: public proxies before the same engine, which capture text or nothing.

A stream of the gateway says a token at most 20 ms after it was sampled, and all that came until
then at once; the pass-through hands on each.

CPU is that of the one process between client and engine. What the gateway's replica and the HTTP
side of an engine use is in the times of their arms and in nobody's CPU. A token is a character:
histories have as many tokens as their bodies have bytes.

    python libs/gateway/benches/gateway.py [--only stream,json] [--molt WHEEL --molt-python PYTHON]
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import aiohttp
from arms import (
    Arm,
    Clients,
    Took,
    cpu_seconds,
    engine_arms,
    floor_arm,
    molt_arm,
    prober,
    proxy_arm,
)

from treadle_runtime.measures import Measure, report

SHORT, LONG = 400, 1500
"""Characters of what a user says: in short chats, and in those that grow to 100 000 tokens."""
EARLY, LATE = 4, 64
"""The turns that are compared; each with its two neighbours."""


class Bench:
    """All parts of the bench over one client."""

    def __init__(
        self, http: aiohttp.ClientSession, stack: ExitStack, args: argparse.Namespace
    ) -> None:
        self._http = http
        self._stack = stack
        self._args = args

    async def stream(self) -> AsyncIterator[Measure]:
        """Short chats at the pace of the engine, streamed."""
        arms = engine_arms(self._stack, at_once=False)
        took = await self._rounds(arms.values(), sessions=4, turns=4, stream=True)
        yield _ratio("gateway_over_direct_stream", _seconds(took), "direct", "<= 1.03")
        yield _ratio("capture_cpu_over_passthrough", _cpu_ms(took), "passthrough", "<= 1.2")

    async def json(self) -> AsyncIterator[Measure]:
        """Short chats of eight turns, whole replies."""
        arms = engine_arms(self._stack, at_once=False)
        took = await self._rounds(arms.values(), sessions=4, turns=8)
        yield _ratio("gateway_over_direct_json", _seconds(took), "direct", "<= 1.03")
        cpu = _cpu_ms(took)
        added = [ours - bare for ours, bare in zip(cpu["gateway"], cpu["passthrough"], strict=True)]
        details = {"cpu_ms": cpu, "load": _load()}
        yield Measure("capture_ms_json", statistics.median(added), "ms", "<= 1.0", details)

    async def rate(self) -> AsyncIterator[Measure]:
        """As many requests as go through, of 256 chats."""
        arms = engine_arms(self._stack, at_once=False)
        through = (arms["passthrough"], arms["gateway"])
        took = await self._rounds(through, sessions=256, turns=4)
        rates = {
            arm: [round(len(each.each_s) / each.wall_s, 1) for each in rounds]
            for arm, rounds in took.items()
        }
        cpu_ms = _cpu_ms(took)
        yield _ratio("requests_over_passthrough_256", rates, "passthrough", ">= 0.8", cpu_ms=cpu_ms)

    async def growth(self) -> AsyncIterator[Measure]:
        """CPU of a turn as its history grows, over that of understanding its body."""
        arms = [engine_arms(self._stack, at_once=True)["gateway"], floor_arm(self._stack)]
        cpu = await self._turn_by_turn(arms)
        early, late = (
            sum(cpu["gateway"][turn - 2 : turn + 1]) - sum(cpu["floor"][turn - 2 : turn + 1])
            for turn in (EARLY, LATE)
        )
        details = {
            "ms_beyond_floor": {EARLY: round(early / 3, 3), LATE: round(late / 3, 3)},
            "cpu_ms": {arm: [round(each, 2) for each in turns] for arm, turns in cpu.items()},
            "load": _load(),
        }
        yield Measure("turn64_over_turn4", late / early, "ratio", "<= 1.5", details)

    async def _turn_by_turn(self, arms: Iterable[Arm]) -> dict[str, list[float]]:
        """Milliseconds of CPU a request at each turn, by arm; all chats are at the same one."""
        clients, count = Clients(self._http, growth=LONG), self._args.chats
        held = [(arm, clients.chats(count), await arm.open(count)) for arm in arms]
        cpu: dict[str, list[float]] = {arm.name: [] for arm, _, _ in held}
        for _ in range(LATE + 1):
            for arm, chats, doors in held:
                before = cpu_seconds(arm.pid)
                for chat, door in zip(chats, doors, strict=True):
                    await clients.turn(chat, door)
                cpu[arm.name].append(1e3 * (cpu_seconds(arm.pid) - before) / count)
        for arm, chats, doors in held:
            await arm.close(doors, chats)
        return cpu

    async def crowd(self) -> AsyncIterator[Measure]:
        """Chats that grow to 100 000 tokens, 512 at once."""
        arm = engine_arms(self._stack, at_once=False)["gateway"]
        probing, clients = prober(self._stack), Clients(self._http, growth=LONG)
        chats, doors = clients.chats(self._args.crowd), await arm.open(self._args.crowd)
        await asyncio.to_thread(probing.order, {"begin": arm.port})
        took = await clients.talk(arm, chats, doors, self._args.turns)
        late_ms = sorted(1e3 * each for each in await asyncio.to_thread(probing.order, {}))
        await arm.close(doors, chats)
        details = {
            "sessions": self._args.crowd,
            "turns": self._args.turns,
            "p50_ms": round(late_ms[len(late_ms) // 2], 1),
            "most_ms": round(late_ms[-1], 1),
            "probes": len(late_ms),
            "requests_per_s": round(len(took.each_s) / took.wall_s, 1),
            "cpu_share": round(took.cpu_s / took.wall_s, 2),
            "load": _load(),
        }
        p99_ms = late_ms[int(0.99 * len(late_ms))]
        yield Measure("loop_lag_p99_ms", p99_ms, "ms", "< 100", details)

    async def molt(self) -> AsyncIterator[Measure]:
        """Short chats of eight turns, beside the peer."""
        if not self._args.molt:
            sys.stderr.write(
                "LEFT OUT: capture_cpu_over_molt. It needs the peer: see peers/README.md, then name"
                " it with --molt WHEEL_FOLDER and --molt-python PYTHON.\n"
            )
            return
        arms = engine_arms(self._stack, at_once=False)
        model = arms["gateway"].model
        peer = molt_arm(
            self._stack, self._args.molt_python, self._args.molt, model, arms["direct"].url
        )
        took = await self._rounds((peer, arms["gateway"]), sessions=4, turns=8)
        yield _ratio("capture_cpu_over_molt", _cpu_ms(took), "molt", "< 0.5")

    async def litellm(self) -> AsyncIterator[Measure]:
        """The same beside LiteLLM's proxy."""
        async for measure in self._beside("litellm", self._args.litellm_python):
            yield measure

    async def lightning(self) -> AsyncIterator[Measure]:
        """The same beside Agent Lightning's server."""
        async for measure in self._beside("lightning", self._args.lightning_python):
            yield measure

    async def _beside(self, kind: str, python: str) -> AsyncIterator[Measure]:
        if not python:
            sys.stderr.write(
                f"LEFT OUT: {kind}. It needs the peer: see peers/README.md, then name it with"
                f" --{kind}-python PYTHON.\n"
            )
            return
        arms = engine_arms(self._stack, at_once=False)
        peer = proxy_arm(self._stack, kind, python, arms["direct"].url)
        took = await self._rounds((peer, arms["gateway"]), sessions=4, turns=8)
        yield _ratio(f"capture_cpu_over_{kind}", _cpu_ms(took), kind, "none")
        yield _ratio(f"seconds_over_{kind}", _seconds(took), kind, "none")

    async def _rounds(
        self, arms: Iterable[Arm], *, sessions: int, turns: int, stream: bool = False
    ) -> dict[str, list[Took]]:
        """All arms in turns, each round another first; the first round only warms."""
        clients, order = Clients(self._http, growth=SHORT), list(arms)
        took: dict[str, list[Took]] = {arm.name: [] for arm in order}
        for number in range(self._args.rounds + 1):
            for arm in order[number % len(order) :] + order[: number % len(order)]:
                each = await clients.hold(arm, sessions, turns, stream=stream)
                if number:
                    took[arm.name].append(each)
        return took


PARTS = ("stream", "json", "growth", "crowd", "rate", "molt", "litellm", "lightning")


def _seconds(took: dict[str, list[Took]]) -> dict[str, list[float]]:
    """Of a request, by arm and round."""
    return {
        arm: [round(statistics.fmean(each.each_s), 4) for each in rounds]
        for arm, rounds in took.items()
    }


def _cpu_ms(took: dict[str, list[Took]]) -> dict[str, list[float]]:
    """Of a request, by arm and round."""
    return {
        arm: [round(1e3 * each.cpu_s / len(each.each_s), 3) for each in rounds]
        for arm, rounds in took.items()
    }


def _ratio(
    name: str, values: dict[str, list[float]], of: str, goal: str, **details: Any
) -> Measure:
    """The gateway over another arm; the median of the rounds."""
    pairs = zip(values["gateway"], values[of], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return Measure(name, ratio, "ratio", goal, {"rounds": values, **details, "load": _load()})


def _load() -> float:
    return round(os.getloadavg()[0], 1)


async def measure(args: argparse.Namespace, part: str) -> Sequence[Measure]:
    """One part, with processes of its own."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    with ExitStack() as stack:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            told: Any = getattr(Bench(http, stack, args), part)
            return [each async for each in told()]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the gateway costs")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by comma")
    parser.add_argument("--rounds", type=int, default=5, help="of arms that take turns")
    parser.add_argument("--chats", type=int, default=8, help="of which CPU a turn is the mean")
    parser.add_argument("--crowd", type=int, default=512, help="chats at once")
    parser.add_argument("--turns", type=int, default=64, help="of each chat of the crowd")
    parser.add_argument("--molt", default="", help="folder of the peer's unpacked wheel")
    parser.add_argument("--molt-python", default=sys.executable, help="that has what it needs")
    parser.add_argument("--litellm-python", default="", help="of an environment that has it")
    parser.add_argument("--lightning-python", default="", help="likewise")
    args = parser.parse_args()
    parts = args.only.split(",")
    return report(each for part in parts for each in asyncio.run(measure(args, part)))


if __name__ == "__main__":
    sys.exit(main())
