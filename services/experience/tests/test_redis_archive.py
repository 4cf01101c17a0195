"""A ledger on Redis with an archive: what it brings back, and what it refuses."""

import resource

import pytest

from treadle_experience.core.errors import LedgerFullError, LedgerLostError, WriterFencedError
from treadle_experience.core.transitions import RunClosed, SourceExhausted
from treadle_runtime import failpoints
from treadle_runtime.testing import RedisProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
]

ROWS = [SourceExhausted(number) for number in range(40)]


def test_a_fleets_archive_brings_back_what_a_server_lost(tmp_path, server, open_ledger) -> None:
    server.start()
    fleet = {"durability": "fleet", "archive": str(tmp_path / "archive")}
    ledger = open_ledger(**fleet)
    epoch = ledger.acquire("run")
    for start in range(0, 30, 4):
        ledger.append(ROWS[start : start + 4], epoch)
    ledger.condense([RunClosed(1)], 20, epoch)
    server.kill()
    server.forget()
    server.start()
    with pytest.raises(LedgerLostError):
        open_ledger(**fleet).acquire("run")

    restored = open_ledger(**fleet).restore()
    successor = open_ledger(**fleet)

    assert restored == 32
    assert successor.acquire("run") == epoch + 2
    assert list(successor.load()) == ROWS[:32]
    with pytest.raises(WriterFencedError):
        ledger.append(ROWS[32:33], epoch)


def test_what_a_writer_did_not_live_to_archive_its_successor_does(
    tmp_path, server, open_ledger, failing
) -> None:
    server.start()
    fleet = {"durability": "fleet", "archive": str(tmp_path / "archive")}
    ledger = open_ledger(**fleet)
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    failing("experience.archive.before_fsync")
    with pytest.raises(failpoints.FailpointError):
        ledger.append(ROWS[3:6], epoch)
    failpoints.arm({})

    successor = open_ledger(**fleet)
    successor.append(ROWS[6:7], successor.acquire("run"))
    archived = successor._archive

    assert archived.position == 7
    assert [row.position for row in archived.rows(0)] == [1, 2, 3, 4, 5, 6, 7]
    assert list(successor.load()) == ROWS[:7]


def test_an_archive_that_lacks_what_was_condensed_is_refused(tmp_path, server, open_ledger) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:30], epoch)
    ledger.condense([RunClosed(1)], 20, epoch)

    with pytest.raises(LedgerLostError, match="the archive ends at 0"):
        open_ledger(durability="fleet", archive=str(tmp_path / "archive")).acquire("run")


def test_a_ledger_that_gets_an_archive_archives_all_there_is(tmp_path, server, open_ledger) -> None:
    server.start()
    ledger = open_ledger()
    ledger.append(ROWS[:30], ledger.acquire("run"))

    successor = open_ledger(durability="fleet", archive=str(tmp_path / "archive"))
    successor.acquire("run")

    assert [row.position for row in successor._archive.rows(0)] == list(range(1, 31))


def test_an_archive_without_room_stops_time_and_loses_nothing(
    tmp_path, server, open_ledger
) -> None:
    server.start()
    fleet = {"durability": "fleet", "archive": str(tmp_path / "archive")}
    ledger = open_ledger(**fleet)
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for _ in range(2):
            with pytest.raises(LedgerFullError, match="archive"):
                ledger.append(ROWS[3:20], epoch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    ledger.append(ROWS[3:25], epoch)

    assert list(ledger.load()) == ROWS[:25]
    assert [row.position for row in ledger._archive.rows(0)] == list(range(1, 26))
