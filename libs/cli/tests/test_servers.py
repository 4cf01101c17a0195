"""Which servers a run starts for itself, and what its host must have for them."""

import socket
from pathlib import Path
from typing import Any

import pytest

from treadle_cli import preflight, servers
from treadle_runtime import sockets
from treadle_runtime.local_servers.redis import RedisServer


def told(doorbell: str = "poll", payloads: str = "files", **more: Any) -> dict[str, Any]:
    return {"doorbell": {"name": doorbell}, "payloads": {"name": payloads, **more}}


def test_what_needs_no_server_has_none(tmp_path: Path) -> None:
    run, experience = told(), {"ledger": {"name": "sqlite"}}

    assert servers.of_run(tmp_path, run) == servers.of_ledger(tmp_path, experience) == ()
    assert servers.of_ledger(tmp_path, {}) == ()
    assert (run, experience) == (told(), {"ledger": {"name": "sqlite"}})


def test_who_has_no_address_is_started_and_all_are_told_where(tmp_path: Path) -> None:
    run = told("nats", "sidecar", ray={"bytes": 5})
    experience: dict[str, Any] = {"ledger": {"name": "redis", "durability": "host"}}

    ray, nats = servers.of_run(tmp_path, run)
    (redis,) = servers.of_ledger(tmp_path, experience)

    assert [ray.name, nats.name, redis.name] == ["ray", "nats", "redis"]
    assert run["payloads"]["ray"] == {"bytes": 5, "address": ray.address}
    assert run["doorbell"] == {"name": "nats", "url": nats.address}
    assert experience["ledger"] == {
        "name": "redis",
        "durability": "host",
        "url": f"unix://{sockets.path(tmp_path, 'redis')}",
    }


def test_who_has_an_address_is_not_started(tmp_path: Path) -> None:
    run = told("nats", "sidecar", ray={"address": "head:6379"})
    run["doorbell"]["url"] = "nats://broker:4222"
    experience = {"ledger": {"name": "redis", "url": "redis://store:6379/0"}}

    assert servers.of_run(tmp_path, run) == servers.of_ledger(tmp_path, experience) == ()


@pytest.mark.parametrize(
    ("durability", "appendfsync"),
    [("host", "always"), ("fleet", "always"), (None, "always"), ("process", "everysec")],
)
def test_a_redis_fsyncs_as_the_ledger_declares(
    tmp_path: Path, durability: str | None, appendfsync: str
) -> None:
    (redis,) = servers.of_ledger(tmp_path, {"ledger": {"name": "redis", "durability": durability}})
    redis.record()
    redis.prepare()

    conf = (redis.directory / "redis.conf").read_text().splitlines()

    assert f"appendfsync {appendfsync}" in conf
    assert "appendonly yes" in conf
    assert "maxmemory-policy noeviction" in conf


def services(tmp_path: Path, **more: Any) -> dict[str, dict[str, Any]]:
    return {"experience": {"run": told(), "listen": f"unix:{tmp_path}/e.sock", **more}}


def test_a_host_with_everything_lacks_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as there:
        there.bind(f"{tmp_path}/redis.sock")
        there.listen()
        ledger = {"name": "redis", "url": f"unix://{tmp_path}/redis.sock"}

        assert preflight.surroundings(services(tmp_path, ledger=ledger), ()) == []


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock"])
def test_a_server_that_is_not_there_is_told_with_its_key(tmp_path: Path, url: str) -> None:
    told = services(tmp_path, ledger={"name": "redis", "url": url})

    (problem,) = preflight.surroundings(told, ())

    assert problem.startswith(f"experience.ledger.url: nothing answers at {url}: ")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = f"127.0.0.1:{other.getsockname()[1]}"

        (problem,) = preflight.surroundings(services(tmp_path, listen=listen), ())

    assert problem == f"experience.listen: {listen} cannot be listened on: Address already in use"


def test_a_server_that_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(RedisServer, "binary", lambda _: None)
    own = servers.of_ledger(tmp_path, {"ledger": {"name": "redis"}})

    (problem,) = preflight.surroundings(services(tmp_path), own)

    assert problem.startswith("redis: not installed; install redis-server")


def test_a_port_of_the_gateway_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = services(tmp_path) | {"rollout": services(tmp_path)["experience"]}
        told["rollout"] = told["rollout"] | {"gateway": {"port": port}}
        (problem,) = preflight.surroundings(told, ())
    assert problem.startswith(f"rollout.gateway.port: 127.0.0.1:{port} cannot be listened on")
