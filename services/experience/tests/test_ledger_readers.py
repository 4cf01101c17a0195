"""A run is read in the same words whichever ledger it has, and though its server has ended."""

import contextlib
import json

import pytest
import yaml

from treadle_experience import episodes, fsck
from treadle_experience.core.errors import LedgerAwayError
from treadle_experience.episodes_ledger import read_episodes
from treadle_experience.ledgers import build_ledger, has_ledger, read_ledger
from treadle_runtime.local_servers import known
from treadle_runtime.local_servers.redis import RedisServer
from treadle_runtime.plugins import PluginConfig
from treadle_runtime.testing import RedisProcess

REDIS = (
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
)


@pytest.fixture
def world(make_world):
    """A run with pending, trained and consumed tasks."""
    world = make_world(retries=0, max_lag=3).start()
    world.train(1)
    world.checkpoint(1)
    world.train(2)
    world.complete(world.lease(world.publish(2))[0], versions=[2])
    return world


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=REDIS)])
def directory(request, tmp_path, world):
    """A run that has ended, with its server."""
    ledger = {"name": request.param}
    server = None
    if request.param == "redis":
        server = RedisServer.of(tmp_path, durability="host")
        server.record()
        ledger["url"] = server.address
    (tmp_path / "config").mkdir()
    told = yaml.safe_dump({"ledger": ledger})
    (tmp_path / "config" / "experience.yaml").write_text(told, encoding="utf-8")
    with (
        known.running(tmp_path, server.address) if server else contextlib.nullcontext(),
        contextlib.closing(build_ledger(PluginConfig(**ledger), tmp_path)) as writer,
    ):
        writer.append(world.save(), writer.acquire("run"))
    assert server is None or not server.is_ready()
    return tmp_path


def test_a_run_is_read_and_adds_up(directory, world, capsys) -> None:
    status = fsck.main([str(directory)])
    rows = {row["measure"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    listed = read_episodes(directory)

    assert status == 0
    assert rows["position"]["value"] == world.state.position
    assert rows["consumed"]["value"] == 4
    assert read_ledger(directory).journal == world.journal
    assert {each.episode_id for each in listed} == set(world.state.episodes)
    assert has_ledger(directory)


def test_its_episodes_are_listed(directory, capsys) -> None:
    assert episodes.main([str(directory), "--state", "consumed"]) == 0

    assert len(capsys.readouterr().out.splitlines()) >= 4


@pytest.mark.processes
def test_a_server_that_is_not_there_is_said_to_be_away(tmp_path, capsys) -> None:
    url = f"unix://{tmp_path}/nowhere"
    ledger = {"name": "redis", "url": url, "timeout_s": 0.2, "patience_s": 0.2}
    (tmp_path / "config").mkdir()
    told = yaml.safe_dump({"ledger": ledger})
    (tmp_path / "config" / "experience.yaml").write_text(told, encoding="utf-8")
    (tmp_path / "ledger.json").write_text('{"run_id": "run", "run_epoch": "e"}', encoding="utf-8")

    with pytest.raises(LedgerAwayError):
        read_ledger(tmp_path)
    assert fsck.main([str(tmp_path)]) == fsck.UNREADABLE
