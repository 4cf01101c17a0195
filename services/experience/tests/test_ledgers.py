"""What every Ledger promises, and what only the SQLite one can break."""

import ctypes
import errno
import platform
import shutil
import sqlite3
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from treadle_core.errors import InvalidFieldError, WrongRunError
from treadle_core.faults import FaultReason
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.adapters.sqlite import FILE_NAME, SqliteLedger, read_journal
from treadle_experience.core import versions
from treadle_experience.core.errors import (
    LedgerFormatError,
    LedgerFullError,
    WriterFencedError,
)
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
