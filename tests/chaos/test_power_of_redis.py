"""The power of Redis's host fails: what is left is what its ledger declared, or is refused."""

import contextlib
import subprocess

import pytest
from badinput_harness import until

from treadle_experience.adapters.redis_ledger import RedisLedger
from treadle_experience.core.errors import LedgerLostError
from treadle_experience.core.transitions import SourceExhausted
from treadle_runtime.testing import RedisProcess

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
]

ROWS = [SourceExhausted(number) for number in range(300)]


@contextlib.contextmanager
def redis_on(disk, sync, directory):
    """A Redis server on the disk; its socket is beside it."""
    socket = directory / "redis.sock"
    socket.unlink(missing_ok=True)
    settings = {"unixsocket": socket, "dir": disk.path, "logfile": directory / "log"}
    settings |= {"port": 0, "save": "", "appendonly": "yes", "appendfsync": sync}
    settings |= {"maxmemory-policy": "noeviction"}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    with subprocess.Popen([*disk.inside, "redis-server", *words]) as process:
        try:
            until(socket.exists)
            yield process, f"unix://{socket}"
        finally:
            process.kill()


def filled(tmp_path, make_powered, image, sync, **declared):
    """Appends all rows, cuts the power, and returns what is left of the disk."""
    with (
        make_powered(image) as made,
        redis_on(made, sync, tmp_path) as (process, url),
        contextlib.closing(RedisLedger(tmp_path / "run", url, **declared)) as ledger,
    ):
        epoch = ledger.acquire("run")
        for row in ROWS:
            ledger.append([row], epoch)
        return made.cut(process)


def test_with_durability_host_all_that_was_acknowledged_is_there(make_powered, tmp_path) -> None:
    left = filled(tmp_path, make_powered, tmp_path / "image", "always", durability="host")

    with (
        make_powered(left) as made,
        redis_on(made, "always", tmp_path) as (_, url),
        contextlib.closing(RedisLedger(tmp_path / "run", url)) as ledger,
    ):
        ledger.acquire("run")
        assert list(ledger.load()) == ROWS


def test_with_durability_process_less_than_was_acknowledged_is_never_taken_for_all(
    make_powered, tmp_path
) -> None:
    left = filled(tmp_path, make_powered, tmp_path / "image", "everysec", durability="process")

    with (
        make_powered(left) as made,
        redis_on(made, "everysec", tmp_path) as (_, url),
        contextlib.closing(RedisLedger(tmp_path / "run", url, durability="process")) as ledger,
        contextlib.suppress(LedgerLostError),
    ):
        ledger.acquire("run")
        assert list(ledger.load()) == ROWS  # its fsync of each second came just before the cut


def test_a_lost_disk_comes_back_from_the_archive_of_a_fleet(make_powered, tmp_path) -> None:
    fleet = {"durability": "fleet", "archive": str(tmp_path / "archive")}
    filled(tmp_path, make_powered, tmp_path / "image", "always", **fleet)

    with (
        make_powered(tmp_path / "another") as made,
        redis_on(made, "always", tmp_path) as (_, url),
        contextlib.closing(RedisLedger(tmp_path / "run", url, **fleet)) as ledger,
    ):
        with pytest.raises(LedgerLostError):
            ledger.acquire("run")
        assert ledger.restore() == len(ROWS)
        ledger.acquire("run")
        assert list(ledger.load()) == ROWS
