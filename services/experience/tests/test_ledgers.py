"""What every Ledger promises, and what only the SQLite one can break."""

import ctypes
import errno
import json
import platform
import shutil
import sqlite3
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest

from treadle_core.errors import InvalidFieldError, WrongRunError
from treadle_core.faults import FaultReason
from treadle_core.media import Medium
from treadle_experience.adapters import sqlite
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger, read_journal
from treadle_experience.core import versions
from treadle_experience.core.apply import apply
from treadle_experience.core.condensation import condense, size
from treadle_experience.core.errors import (
    LedgerFormatError,
    LedgerFullError,
    WriterFencedError,
)
from treadle_experience.core.run import Run
from treadle_experience.core.state import Episode, RunState, Task
from treadle_experience.core.transitions import (
    CONDENSED,
    INLINED,
    KINDS,
    EpisodeDone,
    EpisodeKept,
    HistoryForgotten,
    PayloadsReleased,
    TrainerStarved,
    from_body,
    kind_of,
    to_body,
)
from treadle_experience.ports import Ledger


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.processes)])
def reopen(request, tmp_path):
    """Opens the same ledger again, as a successor of its process would."""
    kept = MemoryLedger()
    opened = []
    if request.param == "redis":
        redis = request.getfixturevalue("redis")

    def open_() -> Ledger:
        if request.param == "memory":
            ledger = kept
        elif request.param == "sqlite":
            ledger = SqliteLedger(tmp_path / FILE_NAME)
        else:
            ledger = RedisLedger(tmp_path, redis.url)
        opened.append(ledger)
        return ledger

    yield open_
    for ledger in opened:
        ledger.close()


@pytest.fixture
def journal(make_world, tools):
    """A journal with every kind of transition."""
    world = make_world(
        evaluation=tools.evaluation(limit=1), num_tasks=7, retries=0, max_lag=3, steps=3
    ).start()
    world.complete(world.lease(1)[0], media=(Medium.of(b"image", "image/png"),))
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
    world.run.record(HistoryForgotten(("t000001",), 1, 0, ()))
    return world.save()


def test_the_journal_of_this_test_has_every_kind(journal) -> None:
    assert {kind_of(transition) for transition in journal} == set(KINDS) - CONDENSED


@pytest.fixture
def condensed(journal):
    """What stands for the first 60 transitions of it, with an inline payload that is needed."""
    head = condense(fold(journal[:60]))
    assert {kind_of(transition) for transition in head} == CONDENSED
    assert any(isinstance(each, EpisodeKept) and each.inline for each in head)
    return head


def fold(journal) -> RunState:
    state = RunState()
    for transition in journal:
        apply(state, transition)
    return state


def test_each_state_on_the_way_is_what_its_condensed_journal_folds_into(journal) -> None:
    state = RunState()
    for transition in journal:
        apply(state, transition)
        if size(state) > state.position:
            continue
        head = condense(state)
        stored = [(kind_of(each), json.dumps(to_body(each)), each) for each in head]
        read = [
            from_body(kind, json.loads(body), each.inline if kind in INLINED else None)
            for kind, body, each in stored
        ]
        assert len(head) == size(state)
        assert fold(read) == fold(head) == state


def test_a_condensed_journal_has_every_field_of_a_state(condensed) -> None:
    def names(record, *apart: str) -> set[str]:
        return {field.name for field in fields(record)} - set(apart)

    first, task, episode = (
        next(each for each in condensed if kind_of(each) == kind)
        for kind in ("state_condensed", "task_kept", "episode_kept")
    )
    assert first.values.keys() == names(RunState, "position", "tasks", "episodes")
    assert names(task, "evaluated_step") == names(Task, "episodes")
    assert names(episode, "episode_state") == names(Episode, "state")


def test_a_field_that_is_younger_than_a_condensed_journal_is_empty(journal, condensed) -> None:
    first = condensed[0]
    older = {name: value for name, value in first.values.items() if name != "reasons"}
    state = fold([replace(first, values=older), *condensed[1:]])

    assert not state.reasons
    state.reasons = fold(journal[:60]).reasons
    assert state == fold(journal[:60])


def test_a_condensed_journal_stands_first_or_nowhere(journal, condensed) -> None:
    with pytest.raises(LedgerFormatError, match="state_condensed does not follow"):
        fold([*journal[:3], *condensed])


def test_a_condensed_ledger_folds_into_what_it_was(reopen, journal, condensed) -> None:
    ledger = reopen()
    epoch = ledger.acquire("run")
    ledger.append(journal[:70], epoch)
    ledger.condense(condensed, 60, epoch)
    ledger.append(journal[70:], epoch)

    successor = reopen()
    successor.acquire("run")
    loaded = list(successor.load())
    snapshot = successor.read()

    assert len(loaded) == len(condensed) + len(journal) - 60
    assert fold(loaded) == fold(journal) == fold(snapshot.journal)
    assert snapshot.position == len(journal)


def test_a_ledger_is_condensed_again_and_again(reopen, journal) -> None:
    ledger = reopen()
    epoch = ledger.acquire("run")
    for start in range(0, len(journal), 20):
        ledger.append(journal[start : start + 20], epoch)
        state = fold(ledger.load())
        if size(state) < state.position:
            ledger.condense(condense(state), state.position, epoch)
            ledger = reopen()
            epoch = ledger.acquire("run")

    state = fold(ledger.load())
    assert state == fold(journal)
    assert len(list(ledger.load())) == size(state)


def test_only_the_writer_condenses(reopen, journal, condensed) -> None:
    first, second = reopen(), reopen()
    old = first.acquire("run")
    first.append(journal[:70], old)
    second.acquire("run")

    with pytest.raises(WriterFencedError):
        first.condense(condensed, 60, old)

    assert len(list(second.load())) == 70


def test_what_is_released_after_a_condensation_is_gone(reopen, journal, condensed) -> None:
    ledger = reopen()
    epoch = ledger.acquire("run")
    ledger.append(journal[:60], epoch)
    ledger.condense(condensed, 60, epoch)
    needed = {e.episode_id for e in condensed if isinstance(e, EpisodeKept) and e.inline}
    before = {e.episode_id for e in ledger.load() if isinstance(e, EpisodeKept) and e.inline}
    ledger.append([PayloadsReleased(tuple(needed), ())], epoch)
    after = {e.episode_id for e in ledger.load() if isinstance(e, EpisodeKept) and e.inline}

    assert needed <= before
    assert after == before - needed


def test_a_reader_sees_a_ledger_that_another_writes(reopen, journal) -> None:
    ledger, reader = reopen(), reopen()
    epoch = ledger.acquire("run")
    ledger.append(journal[:3], epoch)

    first = reader.read()
    ledger.append(journal[3:5], epoch)

    assert (first.position, list(first.journal)) == (3, journal[:3])
    assert reader.read().position == 5


def test_a_sqlite_ledger_keeps_its_history_unless_told_otherwise(
    tmp_path, journal, condensed
) -> None:
    kept = []
    for history in (True, False):
        ledger = SqliteLedger(tmp_path / f"{history}.sqlite", history=history)
        epoch = ledger.acquire("run")
        ledger.append(journal[:70], epoch)
        ledger.condense(condensed, 60, epoch)
        kept.append(len(ledger.read().journal))
        ledger.close()

    assert kept == [70, len(condensed) + 10]


def test_readers_of_a_history_without_end_are_told_what_a_start_is(
    tmp_path, journal, condensed, monkeypatch
) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    epoch = ledger.acquire("run")
    ledger.append(journal[:70], epoch)
    ledger.condense(condensed, 60, epoch)
    monkeypatch.setattr(sqlite, "HISTORY_LIMIT", 69)

    assert list(ledger.read().journal) == list(ledger.load())
    ledger.close()


def test_a_sqlite_ledger_of_the_first_format_is_taken_over(tmp_path, journal) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    ledger.append(journal, ledger.acquire("run"))
    ledger._db.executescript(
        "DROP TABLE head; ALTER TABLE run DROP COLUMN condensed; PRAGMA user_version = 1"
    )
    assert read_journal(tmp_path / FILE_NAME).position == len(journal)

    ledger.acquire("run")

    assert fold(ledger.load()) == fold(journal)
    ledger.close()


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


FSYNCS = {"x86_64": (74, 75), "aarch64": (82, 83)}
"""Numbers of fsync and fdatasync."""


def without_fsync(number: int, call, *arguments):
    """Calls in a thread whose fsyncs the kernel answers with the error `number`."""
    fsyncs = FSYNCS.get(platform.machine())
    if fsyncs is None:
        pytest.skip("unknown numbers of system calls")
    load, equal, answer = 0x20, 0x15, 0x06  # seccomp's instructions: code, jumps if and else, value
    rules = [(load, 0, 0, 0), (equal, 2, 0, fsyncs[0]), (equal, 1, 0, fsyncs[1])]
    rules += [(answer, 0, 0, 0x7FFF0000), (answer, 0, 0, 0x00050000 | number)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(code)))

    def run():
        libc = ctypes.CDLL(None)
        assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert libc.prctl(22, 2, program) == 0  # PR_SET_SECCOMP, by a filter
        return call(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_only_at_the_fsync_stores_nothing_and_may_be_tried_again(
    tmp_path, journal, number
) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    epoch = ledger.acquire("run")
    ledger.append(journal[:3], epoch)

    for _ in range(2):
        with pytest.raises(LedgerFullError, match="disk I/O error"):
            without_fsync(number, ledger.append, journal[3:6], epoch)
    while_full = len(list(ledger.load()))
    ledger.append(journal[3:9], epoch)  # what was decided meanwhile goes with it

    assert while_full == read_journal(tmp_path / FILE_NAME).position - 6 == 3
    assert list(ledger.load()) == journal[:9]
    ledger.close()


def test_a_disk_that_is_full_only_at_the_fsync_cannot_be_acquired(tmp_path) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)

    with pytest.raises(LedgerFullError):
        without_fsync(errno.ENOSPC, ledger.acquire, "run")

    assert ledger.acquire("run") == 1
    ledger.close()


def test_a_broken_disk_is_no_full_one(tmp_path, journal) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    epoch = ledger.acquire("run")

    with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
        without_fsync(errno.EIO, ledger.append, journal[:3], epoch)
    ledger.close()


def test_what_was_written_but_never_synced_is_written_again_by_who_reads_it(
    tmp_path, journal
) -> None:
    ledger = SqliteLedger(tmp_path / FILE_NAME)
    epoch = ledger.acquire("run")
    ledger.append(journal[:3], epoch)
    with pytest.raises(LedgerFullError):
        without_fsync(errno.ENOSPC, ledger.append, journal[3:6], epoch)
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{tmp_path / FILE_NAME}{suffix}", f"{crashed / FILE_NAME}{suffix}")
    ledger.close()
    successor = SqliteLedger(crashed / FILE_NAME)
    successor.acquire("run")
    shutil.copy(crashed / FILE_NAME, tmp_path / "alone")

    assert len(list(successor.load())) == 6
    assert read_journal(tmp_path / "alone").position == 6  # without its write-ahead log
    successor.close()


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
