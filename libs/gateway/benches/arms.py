"""Clients of the arms: they hold chats with them, check every reply, and say what it took."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from processes import AT_ONCE, MODEL, digest_of
from script import TOKENS, Chat

_END_S = 20.0


class Process:
    """One of the processes, by its kind."""

    def __init__(self, kind: str, *told: str, python: str = sys.executable, file: str = "") -> None:
        program = file or str(Path(__file__).with_name("processes.py"))
        self._process = subprocess.Popen(  # noqa: S603, ours, or what the caller names
            [python, program, kind, *told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: dict[str, Any] = self._line()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def order(self, order: dict[str, Any]) -> Any:
        """Its answer. Raises RuntimeError where it ended."""
        assert self._process.stdin  # noqa: S101, it was asked for
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._line()

    def end(self) -> None:
        """Ends it."""
        assert self._process.stdin  # noqa: S101, it was asked for
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _line(self) -> Any:
        assert self._process.stdout  # noqa: S101, it was asked for
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the bench ended with {self._process.wait()}")
        return json.loads(line)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3)


@dataclass(frozen=True, slots=True)
class Door:
    """Where one chat is held."""

    url: str
    token: str = ""
    session: str = ""
    counts: bool = False
    """Its replies say how many tokens of a prompt stood before."""


@dataclass(slots=True)
class Arm:
    """A way for a client to an engine."""

    name: str
    pid: int
    """Of the process whose CPU is counted: what stands between client and engine."""
    url: str = ""
    """Where every chat is held; empty: each in a session of `replica`."""
    replica: Process | None = None
    counts: bool = False
    """As its doors."""
    captures: bool = True
    """The replica says what it captured, token by token."""

    @property
    def port(self) -> int:
        """Of the gateway's worker."""
        return self.replica.said["port"] if self.replica else 0

    @property
    def model(self) -> str:
        """Folder of the gateway's model."""
        return self.replica.said["model"] if self.replica else ""

    async def open(self, chats: int) -> list[Door]:
        """Doors for so many chats."""
        if self.replica is None:
            return [Door(self.url)] * chats
        opened = await asyncio.to_thread(self.replica.order, {"open": chats})
        return [Door(url, token, session, self.counts) for session, token, url in opened]

    async def close(self, doors: Sequence[Door], chats: Sequence[Chat]) -> None:
        """Ends the sessions. Raises ValueError where a capture is not what was said."""
        if self.replica is None or not self.captures:
            return
        order = {"end": [door.session for door in doors]}
        captures = await asyncio.to_thread(self.replica.order, order)
        for chat, captured in zip(chats, captures, strict=True):
            each = sum(-0.01 * (number + 1) for number in range(TOKENS))
            expected = {
                "text": digest_of(chat.transcript),
                "sampled": digest_of(chat.sampled),
                "trained": TOKENS * chat.turns,
                "logprobs": round(each * chat.turns, 2),
            }
            if captured != [expected]:
                raise ValueError(f"{chat.name}: captured {captured}, expected {[expected]}")


@dataclass(slots=True)
class Took:
    """What some requests took."""

    wall_s: float
    """From the first to the last."""
    cpu_s: float
    """Of what stands between client and engine."""
    each_s: list[float] = field(default_factory=list[float])
    """From each request to the last byte of its reply."""


class Clients:
    """Holds chats over any arm."""

    def __init__(self, http: aiohttp.ClientSession, *, growth: int) -> None:
        """`growth`: characters of what a user says."""
        self._http = http
        self._growth = growth
        self._rounds = 0

    def chats(self, count: int) -> list[Chat]:
        """New ones."""
        self._rounds += 1
        return [Chat(f"r{self._rounds}c{number}", self._growth) for number in range(count)]

    async def hold(self, arm: Arm, sessions: int, turns: int, *, stream: bool = False) -> Took:
        """So many chats at once, of so many turns. Raises ValueError where one is not right."""
        chats, doors = self.chats(sessions), await arm.open(sessions)
        took = await self.talk(arm, chats, doors, turns, stream=stream)
        await arm.close(doors, chats)
        return took

    async def talk(
        self,
        arm: Arm,
        chats: Sequence[Chat],
        doors: Sequence[Door],
        turns: int,
        *,
        stream: bool = False,
    ) -> Took:
        """As `hold`, behind doors that are open."""
        took = Took(0.0, 0.0)

        async def one(chat: Chat, door: Door) -> None:
            for _ in range(turns):
                took.each_s.append(await self.turn(chat, door, stream=stream))

        start, before = time.perf_counter(), cpu_seconds(arm.pid)
        async with asyncio.TaskGroup() as group:
            for chat, door in zip(chats, doors, strict=True):
                group.create_task(one(chat, door))
        took.wall_s, took.cpu_s = time.perf_counter() - start, cpu_seconds(arm.pid) - before
        return took

    async def turn(self, chat: Chat, door: Door, *, stream: bool = False) -> float:
        """One turn; returns its seconds. Raises ValueError where its reply is not right."""
        chat.ask()
        body: dict[str, Any] = {"model": MODEL, "messages": chat.messages, "max_tokens": 64}
        data = json.dumps(body | {"stream": True} if stream else body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {door.token}"}
        start = time.perf_counter()
        async with self._http.post(
            f"{door.url}/chat/completions", data=data, headers=headers
        ) as answer:
            raw = await answer.read()
            seconds = time.perf_counter() - start
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {raw[:200]!r}")
        if stream:
            chat.hear(_streamed(raw))
            return seconds
        reply = json.loads(raw)
        chat.hear(reply["choices"][0]["message"]["content"])
        _check_new(chat, door, reply.get("usage", {}))
        return seconds


def _check_new(chat: Chat, door: Door, usage: dict[str, Any]) -> None:
    """Raises ValueError where a gateway made other tokens than those of what is new."""
    if door.counts:
        made = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        if made != chat.new_tokens:
            raise ValueError(f"{chat.name}: {made} new tokens, expected {chat.new_tokens}")


def _streamed(raw: bytes) -> str:
    """The words of a stream of chunks."""
    chunks = (json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {"))
    deltas = (choice["delta"] for chunk in chunks for choice in chunk["choices"])
    return "".join(delta.get("content") or "" for delta in deltas)


def engine_arms(stack: ExitStack, *, at_once: bool) -> dict[str, Arm]:
    """An engine behind nothing, behind a pass-through, and behind a gateway."""
    told = [AT_ONCE] if at_once else []
    engine = _started(stack, Process("engine", *told))
    url = f"http://127.0.0.1:{engine.said['port']}/v1"
    passing = _started(stack, Process("passthrough", f"{url}/chat/completions"))
    replica = _started(stack, Process("replica", *told))
    return {
        "direct": Arm("direct", engine.pid, url),
        "passthrough": Arm(
            "passthrough", passing.pid, f"http://127.0.0.1:{passing.said['port']}/v1"
        ),
        "gateway": Arm("gateway", replica.said["worker"], replica=replica, counts=True),
    }


def floor_arm(stack: ExitStack) -> Arm:
    """What understands bodies, and does nothing else."""
    floor = _started(stack, Process("floor"))
    return Arm("floor", floor.pid, f"http://127.0.0.1:{floor.said['port']}/v1")


def molt_arm(stack: ExitStack, python: str, wheel: str, model: str, engine: str) -> Arm:
    """The peer's chat server before an engine, whose `/v1` is given."""
    file, root = Path(__file__).parent / "peers" / "molt.py", engine.removesuffix("v1")
    peer = _started(stack, Process(root, wheel, model, python=python, file=str(file)))
    return Arm("molt", peer.pid, replica=peer)


def proxy_arm(stack: ExitStack, kind: str, python: str, engine: str) -> Arm:
    """A public proxy before an engine, whose `/v1` is given; it captures no tokens."""
    file = Path(__file__).parent / "peers" / "proxies.py"
    peer = _started(stack, Process(kind, engine, python=python, file=str(file)))
    return Arm(kind, peer.said["worker"], replica=peer, captures=False)


def prober(stack: ExitStack) -> Process:
    """What asks for health."""
    return _started(stack, Process("prober"))


def _started(stack: ExitStack, process: Process) -> Process:
    stack.callback(process.end)
    return process
