"""One engine of the bench, as a process: a real member of a fleet that samples all the time.

    engine.py ADDRESS ENGINE_ID TRANSPORT VOCABULARY TOKEN_S FAIL

Its weights say their version: under version v the token after t is (t + v) modulo the vocabulary,
so that every sampled token shows which parameters sampled it. With FAIL 1 its group is lost in
each version, every time at another bucket. Says on stdout, a JSON object a line, when it serves a
version, and what it has seen so far.
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.tickets import Sampling
from treadle_rollout.adapters.grpc_refit import GrpcRefit
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.fleet import Fleet
from treadle_rollout.ports import GenerationRequest
from treadle_runtime.channel import connect
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.plugins import PluginConfig, build
from treadle_weights.groups import Group, GroupLostError, Launch, Rendezvous

RESPONSE_TOKENS = 8
BUCKETS = 16
"""Of a version, where groups are lost on purpose."""


def say(**said: Any) -> None:
    """One line for whoever started this."""
    sys.stdout.write(json.dumps({**said, "at": time.monotonic()}) + "\n")
    sys.stdout.flush()


class Rows:
    """Tracker that says what it is given."""

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        say(row=name, **values)


@dataclass
class Seen:
    """What the responses so far were sampled by."""

    responses: int = 0
    mixed: int = 0
    """Responses with a token that is not what its stated version samples."""
    versions: set[int] = field(default_factory=set[int])
    longest_gap_s: float = 0.0
    """Between two tokens, since it was last told."""


class LosesItsGroup:
    """A rendezvous whose groups bring one version and are lost in the next, each further in."""

    def __init__(self, inner: Rendezvous) -> None:
        self._inner = inner
        self._formed = 0

    @property
    def port(self) -> int:
        return self._inner.port

    def form(self, name: str, rank: int, size: int) -> Group:
        group = self._inner.form(name, rank, size)
        self._formed += 1
        return Losing(group, BUCKETS + self._formed % BUCKETS)


class Losing:
    """A group that is lost after so many launches."""

    def __init__(self, inner: Group, at: int) -> None:
        self._inner = inner
        self._left = at

    def broadcast(self, data: NDArray[np.uint8]) -> Launch:
        if self._left == 0:
            raise GroupLostError("lost on purpose")
        self._left -= 1
        return self._inner.broadcast(data)

    def close(self) -> None:
        self._inner.close()


class Loses:
    """Communicators that lose their groups."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def host(self, address: str) -> Rendezvous:
        return self._inner.host(address)

    def join(self, address: str, port: int, own: str) -> Rendezvous:
        return LosesItsGroup(self._inner.join(address, port, own))


async def sample(engine: ScriptedEngine, seen: Seen, lane: int) -> None:
    """Responses, one after the other, and whether each is what its versions say."""
    rng = np.random.default_rng(lane)
    size = engine.vocabulary
    last_at = time.monotonic()

    def heard(_: object) -> None:
        nonlocal last_at
        now = time.monotonic()
        seen.longest_gap_s = max(seen.longest_gap_s, now - last_at)
        last_at = now

    while True:
        prompt = np.array([rng.integers(size)], np.int32)
        request = GenerationRequest("s", prompt, Sampling(0.0, RESPONSE_TOKENS))
        said = await engine.generate(request, heard if engine.token_s else None)
        before = np.concatenate([prompt, said.token_ids[:-1]])
        expected = (before + said.policy_version) % size
        seen.responses += 1
        seen.mixed += not np.array_equal(said.token_ids, expected)
        seen.versions.update(int(version) for version in said.policy_version)


async def tell(seen: Seen) -> None:
    while True:
        await asyncio.sleep(0.1)
        say(
            responses=seen.responses,
            mixed=seen.mixed,
            versions=len(seen.versions),
            gap_s=seen.longest_gap_s,
        )
        seen.longest_gap_s = 0.0


async def main(address: str, name: str, transport: str, size: str, token_s: str, fail: str) -> None:
    engine = ScriptedEngine(vocabulary=int(size), token_s=float(token_s), stop_tokens=())
    config = PluginConfig.model_validate_json(transport)
    receiver: Any = build("treadle.weight_transports", config).receiver()
    if fail == "1":
        receiver._communicators = Loses(receiver._communicators)  # noqa: SLF001
    seen = Seen()
    async with (
        connect(address) as channel,
        PollDoorbell(run_id="run") as bell,
        asyncio.TaskGroup() as group,
    ):
        fleet = Fleet(
            engine,
            GrpcRefit(channel, "run", name, bell),
            receiver,
            leaving=asyncio.Event(),
            done=asyncio.Event(),
            tracker=Rows(),
        )
        group.create_task(fleet.run())
        group.create_task(tell(seen))
        group.create_task(sample(engine, seen, 1))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
