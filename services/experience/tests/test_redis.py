"""What only a ledger on a server can break: answers, servers, hosts and settings that are lost."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
from redis import Redis

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core.errors import (
    LedgerAwayError,
    LedgerFormatError,
    LedgerFullError,
    LedgerHeldError,
    LedgerLostError,
    WriterFencedError,
)
from treadle_experience.core.transitions import RunClosed, SourceExhausted
from treadle_runtime import failpoints
from treadle_runtime.testing import RedisProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
]

ROWS = [SourceExhausted(number) for number in range(40)]
QUICK = {"timeout_s": 0.3, "patience_s": 0.6}


def test_what_was_acknowledged_survives_a_kill_of_the_server_and_the_writer_goes_on(
    server, open_ledger
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)

    server.kill()
    server.start()
    ledger.append(ROWS[3:5], epoch)

    assert ledger.read().journal == ROWS[:5]


def test_an_append_that_was_not_answered_is_stored_once(server, open_ledger) -> None:
    server.start()
    ledger = open_ledger(timeout_s=0.2)
    epoch = ledger.acquire("run")
    server.process.send_signal(signal.SIGSTOP)

    # It gives up waiting and asks again; once it goes on, the server does what each try asked for.
    going_on = threading.Timer(0.7, server.process.send_signal, [signal.SIGCONT])
    going_on.start()
    ledger.append(ROWS[:3], epoch)
    ledger.append(ROWS[3:4], epoch)
    going_on.join()

    assert ledger.read().journal == ROWS[:4]
    assert ledger.read().position == 4


def test_an_append_that_is_tried_again_with_more_behind_it_stores_what_is_missing(
    server, open_ledger
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    ledger._position = 0  # as if nobody had answered

    ledger.append(ROWS[:5], epoch)

    assert ledger.read().journal == ROWS[:5]


def test_who_gets_no_answer_says_so_within_its_patience(open_ledger) -> None:
    with pytest.raises(LedgerAwayError, match="does not answer"):
        open_ledger(**QUICK).acquire("run")


@pytest.mark.parametrize("size", [10, 200], ids=["first-append", "later-append"])
def test_a_server_without_room_stores_nothing_and_the_append_may_be_tried_again(
    server, open_ledger, size
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    with Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 1)

        for _ in range(2):
            with pytest.raises(LedgerFullError, match="maxmemory"):
                ledger.append(ROWS[3:6] * size, epoch)
        ledger.beat()  # who has no room lives
        client.config_set("maxmemory", 0)

    ledger.append([*ROWS[3:6] * size, *ROWS[6:9]], epoch)

    assert ledger.read().journal == [*ROWS[:3], *ROWS[3:6] * size, *ROWS[6:9]]


@pytest.mark.parametrize(
    ("settings", "durability", "said"),
    [
        ({"appendonly": "no"}, "host", "appendonly no"),
        ({"appendfsync": "everysec"}, "host", "appendfsync everysec"),
        ({"maxmemory_policy": "allkeys-lru"}, "process", "maxmemory-policy allkeys-lru"),
    ],
    ids=["no-log", "lazy-log", "evicting"],
)
def test_a_server_that_keeps_less_than_is_declared_is_refused(
    open_ledger, server, settings, durability, said
) -> None:
    server.start(**settings)

    with pytest.raises(InvalidFieldError, match=said) as caught:
        open_ledger(durability=durability).acquire("run")

    assert caught.value.field == f"ledger.durability {durability}"


def test_a_server_that_came_back_with_other_settings_is_refused(server, open_ledger) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    server.kill()
    server.start(appendfsync="everysec")

    with pytest.raises(InvalidFieldError, match="appendfsync everysec"):
        ledger.append(ROWS[:1], epoch)


def test_a_server_that_was_emptied_is_refused_by_the_writer_and_by_its_successor(
    server, open_ledger
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    server.kill()
    server.forget()
    server.start()

    with pytest.raises(LedgerLostError, match="holds nothing"):
        ledger.append(ROWS[3:5], epoch)
    with pytest.raises(LedgerLostError, match="holds nothing"):
        open_ledger().acquire("run")
    with pytest.raises(LedgerLostError, match="holds nothing"):
        open_ledger().read()


def test_a_server_that_was_put_back_is_refused_by_the_writer_and_by_its_successor(
    tmp_path, server, open_ledger
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:3], epoch)
    server.kill()
    shutil.copytree(server.directory / "appendonlydir", tmp_path / "earlier")
    server.start()
    ledger.append(ROWS[3:5], epoch)
    server.kill()
    server.forget()
    shutil.copytree(tmp_path / "earlier", server.directory / "appendonlydir")
    server.start()

    with pytest.raises(LedgerLostError, match="holds 3 transitions, and 5"):
        ledger.append(ROWS[5:6], epoch)
    with pytest.raises(LedgerLostError, match="holds 3 transitions, and 5"):
        open_ledger().acquire("run")


def test_a_run_of_another_directory_with_the_same_name_is_left_alone(
    tmp_path, server, open_ledger
) -> None:
    server.start()
    open_ledger().acquire("run")

    with (
        contextlib.closing(RedisLedger(tmp_path / "other", server.url)) as other,
        pytest.raises(LedgerLostError, match="not the ledger"),
    ):
        other.acquire("run")


def test_a_directory_without_a_ledger_has_none_to_read(server, open_ledger) -> None:
    server.start()

    with pytest.raises(LedgerFormatError, match="no ledger"):
        open_ledger().read()


HOLDER = """
import sys
from treadle_experience.adapters.redis_ledger import RedisLedger
ledger = RedisLedger(sys.argv[1], sys.argv[2])
print(ledger.acquire("run"), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path, server):
    """Another process that writes to the ledger."""
    server.start()
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run"), server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        yield process
        process.kill()


def test_while_a_process_writes_another_does_not_and_once_it_is_dead_it_does(
    holder, open_ledger
) -> None:
    ledger = open_ledger()

    with pytest.raises(LedgerHeldError):
        ledger.acquire("run")
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # its parent has not looked yet

    assert ledger.acquire("run") == 2


def test_a_process_that_is_silent_is_followed_and_fenced(holder, server, open_ledger) -> None:
    ledger = open_ledger()
    holder.send_signal(signal.SIGSTOP)
    with Redis.from_url(server.url) as client:
        assert 0 < client.pttl("treadle:{run}:active") <= 6000
        client.delete("treadle:{run}:active")  # its time is over

    assert ledger.acquire("run") == 2
    ledger.append(ROWS[:2], 2)
    with pytest.raises(WriterFencedError):
        ledger.append(ROWS[2:3], 1)


def test_who_was_followed_learns_it_by_its_next_sign_of_life(server, open_ledger) -> None:
    server.start()
    first, second = open_ledger(), open_ledger()
    first.acquire("run")
    second.acquire("run")

    with pytest.raises(WriterFencedError):
        first.beat()
    with pytest.raises(WriterFencedError):
        first.resign()
    second.beat()


def test_a_head_that_was_sent_but_not_put_in_place_changes_nothing(
    server, open_ledger, failing
) -> None:
    server.start()
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append(ROWS[:30], epoch)
    failing("experience.redis.before_condensed")
    with pytest.raises(failpoints.FailpointError):
        ledger.condense([RunClosed(1)], 20, epoch)
    failpoints.arm({})
    before = ledger.read().journal

    successor = open_ledger()
    epoch = successor.acquire("run")
    successor.condense([RunClosed(2), RunClosed(3)], 25, epoch)

    assert before == ROWS[:30]
    assert list(successor.load()) == [RunClosed(2), RunClosed(3), *ROWS[25:30]]
    assert successor.read().position == 30


@pytest.mark.parametrize("condensed", [False, True], ids=["as-it-was", "condensed-meanwhile"])
def test_who_followed_loads_what_there_is(server, open_ledger, condensed) -> None:
    server.start()
    writer, standby = open_ledger(), open_ledger()
    epoch = writer.acquire("run")
    writer.append(ROWS[:30], epoch)
    writer.condense([RunClosed(1)], 10, epoch)
    standby.follow()
    writer.append(ROWS[30:35], epoch)
    standby.follow()
    writer.append(ROWS[35:], epoch)
    if condensed:
        writer.condense([RunClosed(2), RunClosed(3)], 37, epoch)

    standby.acquire("run")

    expected = [RunClosed(2), RunClosed(3), *ROWS[37:]] if condensed else [RunClosed(1), *ROWS[10:]]
    assert list(standby.load()) == expected
    assert list(standby.load()) == expected


def test_who_reads_sees_one_moment_while_another_writes(server, open_ledger) -> None:
    server.start()
    writer, reader = open_ledger(), open_ledger()
    epoch = writer.acquire("run")
    writer.append(ROWS, epoch)
    seen, stop = [], threading.Event()

    def look():
        while not stop.is_set() or not seen:
            seen.append(reader.read())

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(1, 200):
        writer.append([SourceExhausted(40 * number)], epoch)
        if number % 50 == 0:
            writer.condense([RunClosed(number)], 40 + number, epoch)
    stop.set()
    looking.join()

    for each in seen:
        first = each.journal[0]
        behind = 40 + first.last_step if isinstance(first, RunClosed) else 1
        assert len(each.journal) - 1 == each.position - behind


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"durability": "eternal"}, "ledger.durability"),
        ({"durability": "fleet"}, "ledger.archive"),
        ({"archive": "somewhere"}, "ledger.archive"),
        ({"url": "http://host"}, "ledger.url"),
    ],
    ids=["durability", "no-archive", "archive-unused", "url"],
)
def test_parameters_that_cannot_be_are_named(tmp_path, parameters, field) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        RedisLedger(**{"run_dir": tmp_path, "url": "unix:///nowhere"} | parameters)

    assert caught.value.field == field
