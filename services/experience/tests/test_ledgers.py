"""What every Ledger promises, and what only the SQLite one can break."""

import sqlite3

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger, read_journal
from treadle_experience.core import versions
from treadle_experience.core.errors import LedgerFormatError, WriterFencedError, WrongRunError
from treadle_experience.core.faults import FaultReason
from treadle_experience.core.run import Run
from treadle_experience.core.transitions import (
    KINDS,
    EpisodeDone,
    PayloadsReleased,
    TrainerStarved,
    from_body,
    kind_of,
)


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request, tmp_path):
    """Opens the same ledger again, as a successor of its process would."""
    kept = MemoryLedger()
    opened = []

    def open_() -> MemoryLedger | SqliteLedger:
        opened.append(kept if request.param == "memory" else SqliteLedger(tmp_path / FILE_NAME))
        return opened[-1]

    yield open_
    for ledger in opened:
        ledger.close()


@pytest.fixture
def journal(make_world, tools):
    """A journal with every kind of transition."""
    world = make_world(
        evaluation=tools.evaluation(limit=1), num_tasks=7, retries=0, max_lag=3, steps=3
    ).start()
    world.complete(world.lease(1)[0])
    world.fail(world.lease(1, 1)[0])
    world.train(1)
    world.train(2)
    world.acquire("second", world.state.head().digest)
    first, _ = world.claim(1).tasks
    world.hand_back(1, (first.episodes[0][0], FaultReason.PAYLOAD_LOST))
    world.complete(world.lease(1, 1)[0])
    world.hand_back(1, (first.episodes[1][0], FaultReason.QUARANTINED))
    world.claim(1)
    world.report(1)
    world.checkpoint(1)
    number = versions.announce(world.run, trainer_epoch=2, step=1, request_id="x", trace_id="")
    versions.abort(world.run, number=number, message="no")
    world.publish(1)
    world.claim(2)
    world.hand_back(2, (world.state.task_of(5).episodes[0], FaultReason.QUARANTINED))
    world.train(2)
    world.checkpoint(2)
    world.train(3)
    world.run.record(TrainerStarved(4))
    return world.save()


def test_the_journal_of_this_test_has_every_kind(journal) -> None:
    assert {kind_of(transition) for transition in journal} == set(KINDS)


def test_a_successor_loads_what_was_appended_less_released_payloads(reopen, journal, tools) -> None:
    ledger = reopen()
    epoch = ledger.acquire("run")
    for start in range(0, len(journal), 7):
        ledger.append(journal[start : start + 7], epoch)

    successor = reopen()
    successor.acquire("run")
    loaded = list(successor.load())

    released = {id_ for t in journal if isinstance(t, PayloadsReleased) for id_ in t.episode_ids}
    assert [kind_of(t) for t in loaded] == [kind_of(t) for t in journal]
    for before, after in zip(journal, loaded, strict=True):
        if isinstance(before, EpisodeDone) and before.episode_id in released:
            assert after.inline is None
        else:
            assert after == before


def test_each_acquisition_raises_the_writer_epoch_and_fences_the_writer_before(
    reopen, journal
) -> None:
    first, second = reopen(), reopen()
    old, new = first.acquire("run"), second.acquire("run")
    second.append(journal[:2], new)

    with pytest.raises(WriterFencedError, match=f"fenced by epoch {new}"):
        first.append(journal[2:4], old)

    assert new == old + 1
    assert len(list(second.load())) == 2


def test_a_ledger_serves_one_run(reopen) -> None:
    reopen().acquire("run")

    with pytest.raises(WrongRunError) as caught:
        reopen().acquire("other")

    assert (caught.value.field, caught.value.limit, caught.value.value) == (
        "run.id",
        "run",
        "other",
    )


def test_an_append_that_fails_stores_nothing(tmp_path, journal) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    epoch = ledger.acquire("run")
    ledger.append(journal[:3], epoch)
    ledger._position = 1  # the second row of the next append collides

    with pytest.raises(sqlite3.IntegrityError):
        ledger.append(journal[3:6], epoch)

    assert len(list(ledger.load())) == 3
    ledger.close()


def test_a_file_of_another_format_is_refused(tmp_path) -> None:
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    ledger = SqliteLedger(path)

    with pytest.raises(LedgerFormatError, match="format 7"):
        ledger.acquire("run")
    with pytest.raises(LedgerFormatError, match="format 7"):
        read_journal(path)
    ledger.close()


def test_a_file_that_is_no_database_is_refused(tmp_path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"not a database" * 1000)
    ledger = SqliteLedger(path)

    with pytest.raises(LedgerFormatError, match="not a database"):
        ledger.acquire("run")
    ledger.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        pytest.param("task_vanished", {}, id="unknown-kind"),
        pytest.param("step_claimed", {"step": 1}, id="missing-field"),
        pytest.param("task_moved", {"task_id": "t", "state": "gone", "reason": ""}, id="state"),
        pytest.param("run_closed", {"last_step": 1, "why": 2}, id="unknown-field"),
    ],
)
def test_a_row_that_says_nothing_is_damage(kind, body) -> None:
    with pytest.raises(LedgerFormatError):
        from_body(kind, body)


def test_a_journal_that_does_not_follow_is_damage(make_world, journal) -> None:
    without_tasks = [t for t in journal if kind_of(t) != "task_opened"]

    with pytest.raises(LedgerFormatError, match="does not follow"):
        make_world().fresh_run().load(without_tasks)


def test_a_run_keeps_the_rules_that_its_records_rely_on(make_world, journal) -> None:
    changed = make_world(max_lag=4)

    with pytest.raises(InvalidFieldError, match="max_lag: expected 3 as the run began with, got 4"):
        Run(changed.rules, changed.run.sources).load(journal)
