"""Refit, engines and a trainer as processes."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import yaml
from google.protobuf.duration_pb2 import Duration

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_runtime.channel import call, connect
from treadle_runtime.plugins import PluginConfig, build
from treadle_weights.layouts import whole
from treadle_weights.wire import arena_from_wire, digests_to_wire, layout_to_wire

pytestmark = pytest.mark.processes

SHAPES = {f"layers.{i}.weight": ("float32", (160, 160)) for i in range(16)}
LAYOUT = whole(SHAPES)


@dataclass
class Run:
    """A run's directory, its refit and the trainer's end."""

    directory: Path
    stub: Any
    sender: Any
    stack: contextlib.AsyncExitStack
    processes: dict[str, asyncio.subprocess.Process]
    transport: str

    async def start(self, name: str, *command: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE
        )
        self.processes[name] = process
        return process

    async def start_refit(self) -> None:
        config = str(self.directory / "refit.yaml")
        await self.start("refit", "-m", "treadle_refit.main", "--config", config)

    async def start_engine(self, name: str) -> asyncio.subprocess.Process:
        script = str(Path(__file__).with_name("lone_engine.py"))
        address = f"unix:{self.directory}/refit.sock"
        return await self.start(
            name, script, address, str(self.directory / "shm"), name, self.transport
        )

    async def end(self, name: str, signum: int = signal.SIGKILL) -> int:
        process = self.processes.pop(name)
        process.send_signal(signum)
        await asyncio.wait_for(process.communicate(), 20)
        return process.returncode

    async def ask(self, method: str, **fields: Any) -> Any:
        request = getattr(pb, f"{method}Request")(run_id="run", **fields)
        return await call(getattr(self.stub, method), request, timeout_s=30, budget_s=20)

    async def publish(self, value: float) -> tuple[int, Any, float]:
        """Publishes parameters that all equal `value`: the version, the answer, its seconds."""
        begin = time.perf_counter()
        opened = await self.ask(
            "OpenVersion",
            trainer_epoch=1,
            request_id=f"r{value:.0f}",
            layout=layout_to_wire(LAYOUT),
        )
        arena = arena_from_wire(opened.arena)
        tensors = {name: np.full(shape, value, np.float32) for name, (_, shape) in SHAPES.items()}
        digests = self.sender.send(arena, LAYOUT, tensors.items())
        sent = await self.ask(
            "SendVersion",
            trainer_epoch=1,
            version=opened.version,
            digests=digests_to_wire(digests),
        )
        self.sender.keep(arena)
        return opened.version, sent, time.perf_counter() - begin


async def installed(engine: asyncio.subprocess.Process) -> str:
    """The next version that an engine says it serves, and its parameters' value."""
    line = await asyncio.wait_for(engine.stdout.readline(), 30)
    return line.decode().strip()


@pytest.fixture
async def run(tmp_path: Path, world: Any, request: pytest.FixtureRequest) -> AsyncGenerator[Run]:
    transport = getattr(request, "param", "shared_memory")
    (tmp_path / "shm").mkdir()
    settings = {
        "run": {"id": "run", "dir": str(tmp_path), "model": "none"},
        "listen": f"unix:{tmp_path}/refit.sock",
        "experience_address": f"unix:{tmp_path}/experience.sock",
        "dead_after_s": 3.0,
        "transport": {"name": transport, "directory": str(tmp_path / "shm")},
    }
    (tmp_path / "refit.yaml").write_text(yaml.safe_dump(settings))
    server = grpc.aio.server()
    world.register_experience(server)
    server.add_insecure_port(settings["experience_address"])
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(connect(settings["listen"]))
        plugin = PluginConfig.model_validate(settings["transport"])
        sender = build("treadle.weight_transports", plugin).sender("run")
        run = Run(tmp_path, rpc.RefitServiceStub(channel), sender, stack, {}, transport)
        await run.start_refit()
        yield run
        for name in list(run.processes):
            await run.end(name)
        sender.close()
        await server.stop(None)


async def test_versions_reach_engines_in_other_processes_through_every_death(run: Run) -> None:
    version, sent, _ = await run.publish(10)
    assert (version, sent.members) == (1, 0)
    one = await run.start_engine("e1")
    assert await installed(one) == "1 10.0"

    version, sent, seconds = await run.publish(20)
    assert (version, sent.members, sent.left_behind) == (2, 1, 0)
    assert await installed(one) == "2 20.0"
    assert seconds < 2.0

    await run.end("refit")
    await run.start_refit()
    two = await run.start_engine("e2")
    demand = await run.ask("AwaitDemand", published_version=2, wait=Duration(seconds=20))
    assert demand.wanted
    version, sent, _ = await run.publish(30)
    assert version == 3
    assert await installed(two) == "3 30.0"
    assert await installed(one) == "3 30.0"

    await run.end("e1")
    version, sent, seconds = await run.publish(40)
    assert (version, sent.members) == (4, 1)
    assert seconds < 2.0
    assert await installed(two) == "4 40.0"

    assert await run.end("refit", signal.SIGTERM) == 0
    lines = (run.directory / "metrics" / "refit.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["version"] for row in rows if row["name"] == "version"] == [1, 2, 3, 4]
    plans = [row for row in rows if row["name"] == "plan"]
    assert {row["engine"] for row in plans} == {"e1", "e2"}
    assert {(row["tensors"], row["copies"]) for row in plans} == {(16, 16)}


@pytest.mark.parametrize("run", ["files"], indirect=True)
async def test_an_engine_that_starts_while_refit_and_trainer_are_away_gets_the_newest_version(
    run: Run,
) -> None:
    one = await run.start_engine("e1")
    await run.publish(10)
    assert await installed(one) == "1 10.0"
    version, sent, _ = await run.publish(20)
    assert (version, sent.members) == (2, 1)
    assert await installed(one) == "2 20.0"

    # From here on nobody publishes.
    run.sender.close()
    await run.end("refit")
    await run.end("e1")
    again = await run.start_engine("e1")
    await run.start_refit()

    assert await installed(again) == "2 20.0"
