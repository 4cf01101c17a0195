"""The Redis ledger against a server in a container: what was acknowledged is there, or missed."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from container_members import DURABLE, RECOVERY_S, server, until
from redis import Redis
from redis.exceptions import RedisError

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core.errors import LedgerAwayError, LedgerLostError
from treadle_experience.core.transitions import TrainerStarved

pytestmark = pytest.mark.containers


@pytest.fixture
def redis(images, request):
    member = server("redis:7", getattr(request, "param", DURABLE), 6379)
    member.start()
    member.wait = lambda: until("an answer", lambda: answers(member.port))
    member.wait()
    yield member
    member.remove()


def answers(port: int) -> bool:
    try:
        with Redis(host="127.0.0.1", port=port, socket_timeout=1) as client:
            return client.ping()
    except RedisError:
        return False


@pytest.fixture
def open_ledger(redis, tmp_path):
    opened = []

    def open_(**parameters) -> RedisLedger:
        url = f"redis://127.0.0.1:{redis.port}/0"
        ledger = RedisLedger(tmp_path, url, timeout_s=1.0, **parameters)
        opened.append(ledger)
        return ledger

    yield open_
    for ledger in opened:
        ledger.close()


def numbers(ledger: RedisLedger) -> list[int]:
    return [each.step for each in ledger.read().journal]


def test_what_was_acknowledged_outlives_a_killed_server(redis, open_ledger) -> None:
    ledger = open_ledger()
    epoch = ledger.acquire("run")
    ledger.append([TrainerStarved(step) for step in range(100)], epoch)

    redis.kill()
    redis.start()
    redis.wait()
    ledger.append([TrainerStarved(100)], epoch)

    assert numbers(open_ledger()) == list(range(101))


def test_an_append_waits_for_a_server_that_stands_still_and_is_done_once(
    redis, open_ledger
) -> None:
    ledger = open_ledger(patience_s=RECOVERY_S)
    epoch = ledger.acquire("run")

    with ThreadPoolExecutor(1) as pool:
        with redis.paused():
            waiting = pool.submit(ledger.append, [TrainerStarved(1)], epoch)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=3.0)  # longer than one answer may take
        waiting.result(timeout=RECOVERY_S)

    assert numbers(open_ledger()) == [1]


def test_a_server_that_stays_away_is_named_within_the_patience(redis, open_ledger) -> None:
    ledger = open_ledger(patience_s=2.0)
    epoch = ledger.acquire("run")

    with redis.paused(), pytest.raises(LedgerAwayError):
        ledger.append([TrainerStarved(1)], epoch)


def test_a_server_that_lost_its_state_is_refused(redis, open_ledger) -> None:
    ledger = open_ledger()
    ledger.append([TrainerStarved(1)], ledger.acquire("run"))

    redis.remove()
    redis.start()
    redis.wait()

    with pytest.raises(LedgerLostError):
        open_ledger().acquire("run")


@pytest.mark.parametrize("redis", ["redis-server"], indirect=True)
def test_a_server_that_does_not_fsync_is_refused(redis, open_ledger) -> None:
    with pytest.raises(InvalidFieldError, match="appendonly"):
        open_ledger().acquire("run")
