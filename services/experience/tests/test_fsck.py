"""`treadle fsck`: it adds up on a good ledger, and it fails on a damaged one."""

import json
import sqlite3
from dataclasses import replace

import pytest
import yaml

from treadle_core.media import Medium
from treadle_experience import fsck
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger
from treadle_experience.core import audit
from treadle_experience.core.state import TaskState
from treadle_experience.core.transitions import StepClaimed, TaskMoved
from treadle_payloads.files import FileStore
from treadle_payloads.store import PayloadReference


def build(world):
    """A run in which every place of the account holds something."""
    world.start()
    for ticket in world.lease(1):
        world.complete(ticket)
    world.train(1)
    version = world.publish(1)
    world.checkpoint(1)
    waste, sibling = world.lease(version, 2)
    world.complete(sibling, versions=[version])
    world.fail(waste)
    world.train(2)
    world.lease(world.publish(2), 1)
    return world


@pytest.fixture
def ledger(make_world, tools, tmp_path):
    world = build(make_world(retries=0, max_lag=2))
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    yield ledger
    ledger.close()


def measures(capsys) -> dict[str, dict]:
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(set(row) == {"measure", "value", "unit", "goal", "holds"} for row in rows)
    return {row["measure"]: row for row in rows}


def damage(path, statement: str) -> None:
    with sqlite3.connect(path / FILE_NAME) as db:
        assert db.execute(statement).rowcount > 0
    db.close()


def test_a_run_that_goes_on_adds_up(ledger, tmp_path, capsys) -> None:
    status = fsck.main([str(tmp_path)])

    found = measures(capsys)
    assert status == 0
    assert [found[name]["value"] for name in ("lost", "trained_twice", "double_counted")] == [0] * 3
    assert all(found[name]["holds"] for name in ("lost", "trained_twice", "double_counted"))
    places = {name: found[name]["value"] for name in ("consumed", "filtered", "pending")}
    assert places["consumed"] == 4
    assert places["filtered"] == 1
    assert found["acknowledged"]["value"] == sum(places.values())
    assert found["tasks_trained"]["value"] == 2
    assert found["episodes_issued"]["value"] == 1


def test_the_lines_for_people_go_to_stderr(ledger, tmp_path, capsys) -> None:
    fsck.main([str(tmp_path)])

    assert "acknowledged" in capsys.readouterr().err


def test_a_pending_payload_that_is_gone_is_lost(ledger, tmp_path, capsys) -> None:
    damage(
        tmp_path,
        "DELETE FROM inline_payload WHERE rowid = (SELECT MAX(rowid) FROM inline_payload)",
    )

    assert fsck.main([str(tmp_path)]) == 1
    assert measures(capsys)["lost"]["value"] == 1


def test_a_pending_payload_with_a_flipped_byte_is_lost(ledger, tmp_path, capsys) -> None:
    damage(
        tmp_path,
        "UPDATE inline_payload SET payload = x'00'"
        " WHERE rowid = (SELECT MAX(rowid) FROM inline_payload)",
    )

    assert fsck.main([str(tmp_path)]) == 1
    assert measures(capsys)["lost"]["value"] == 1


@pytest.mark.parametrize(
    "statement",
    [
        pytest.param("DELETE FROM journal WHERE kind = 'task_moved'", id="middle"),
        pytest.param("DELETE FROM journal WHERE position = 1", id="start"),
        pytest.param(
            "DELETE FROM journal WHERE position = (SELECT MAX(position) FROM journal)", id="end"
        ),
    ],
)
def test_a_hole_in_the_journal_is_seen(ledger, tmp_path, capsys, statement) -> None:
    damage(tmp_path, statement)

    status = fsck.main([str(tmp_path)])

    found = measures(capsys)
    assert status != 0
    assert found.get("lost", found.get("readable"))["holds"] is False


def test_a_result_that_vanished_is_seen(ledger, tmp_path, capsys) -> None:
    damage(tmp_path, "DELETE FROM journal WHERE kind = 'episode_done' AND position > 40")

    assert fsck.main([str(tmp_path)]) == 1
    assert measures(capsys)["lost"]["value"] > 0


def test_a_row_that_is_no_json_is_unreadable(ledger, tmp_path, capsys) -> None:
    damage(tmp_path, "UPDATE journal SET body = '{' WHERE position = 3")

    assert fsck.main([str(tmp_path)]) == fsck.UNREADABLE
    assert measures(capsys)["readable"]["holds"] is False


def test_a_directory_without_a_run_is_unreadable(tmp_path, capsys) -> None:
    assert fsck.main([str(tmp_path)]) == fsck.UNREADABLE


def test_a_stored_payload_is_looked_for_in_the_store(make_world, tmp_path, capsys) -> None:
    world = make_world().start()
    ticket = world.lease(1, 1)[0]
    reference = FileStore(tmp_path / "payloads").put(b"heavy")
    world.complete(
        ticket, payload=b"heavy", sha256=reference.sha256, size=reference.size, inlined=False
    )
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()

    there = fsck.main([str(tmp_path)])
    FileStore(tmp_path / "payloads").delete(reference.sha256)

    assert (there, fsck.main([str(tmp_path)])) == (0, 1)


@pytest.mark.parametrize("damage", [None, b"imago", b"im"], ids=["gone", "other", "cut"])
def test_an_episode_whose_medium_is_not_what_it_was_is_lost(
    make_world, tmp_path, capsys, damage
) -> None:
    world = make_world().start()
    store, medium = FileStore(tmp_path / "payloads"), Medium.of(b"image", "image/png")
    store.put(b"image")
    showing, other = world.lease(1, 2)
    world.complete(showing, media=(medium,))
    world.complete(other)
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()

    assert fsck.main([str(tmp_path)]) == 0
    assert measures(capsys)["media"]["value"] == 1
    store.delete(medium.sha256)
    if damage is not None:
        store.path(medium.sha256).write_bytes(damage)
    assert fsck.main([str(tmp_path)]) == 1
    assert measures(capsys)["lost"]["value"] == 1


def test_a_medium_on_another_node_is_not_looked_for(make_world, tmp_path, capsys) -> None:
    world = make_world().start()
    medium = replace(Medium.of(b"image", "image/png"), node="host:1")
    world.complete(world.lease(1, 1)[0], media=(medium,))
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()

    assert fsck.main([str(tmp_path)]) == 0
    assert measures(capsys)["payloads_elsewhere"]["value"] == 1


def test_a_payload_on_another_node_is_not_looked_for(make_world, tmp_path, capsys) -> None:
    world = make_world().start()
    here, there = world.lease(1, 2)
    for ticket, node in ((here, "unix:/here"), (there, "host:1")):
        data = node.encode()
        reference = PayloadReference.of(data)
        stored = {"sha256": reference.sha256, "size": reference.size, "inlined": False}
        world.complete(ticket, payload=data, node=node, **stored)
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(world.save(), ledger.acquire("run"))
    ledger.close()
    spool = tmp_path / "spool"
    plugin = {"name": "sidecar", "node": "unix:/here", "directory": str(spool)}
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "experience.yaml").write_text(
        yaml.safe_dump({"run": {"payloads": plugin}})
    )

    FileStore(spool).put(b"unix:/here")
    assert fsck.main([str(tmp_path)]) == 0
    assert measures(capsys)["payloads_elsewhere"]["value"] == 1
    FileStore(spool).delete(PayloadReference.of(b"unix:/here").sha256)
    assert fsck.main([str(tmp_path)]) == 1


def test_a_batch_that_repeats_a_task_is_trained_twice(make_world) -> None:
    world = build(make_world(retries=0, max_lag=2))
    world.checkpoint(2)
    journal = [
        StepClaimed(2, t.task_ids[:1] + world.state.steps[1].task_ids[:1], last=False)
        if isinstance(t, StepClaimed) and t.step == 2
        else t
        for t in world.save()
    ]

    account = audit.reconcile(journal, world.state)

    assert len(account.trained_twice()) == 2


def test_a_result_in_two_places_is_double_counted(make_world) -> None:
    world = build(make_world(retries=0, max_lag=2))
    consumed = world.state.steps[1].task_ids[0]
    journal = [*world.save(), TaskMoved(consumed, TaskState.EVICTED, "by mistake")]

    account = audit.reconcile(journal, world.state)

    assert len(account.double_counted()) == 2


def test_a_result_in_no_place_is_missing(make_world) -> None:
    world = build(make_world(retries=0, max_lag=2))
    journal = world.save()
    pending = next(t for t in world.state.tasks.values() if t.state is TaskState.TRAINED)
    pending.state = TaskState.CONSUMED  # the fold is wrong: no checkpoint covers the step

    account = audit.reconcile(journal, world.state)

    assert account.missing() == {episode.episode_id for episode in pending.episodes}
