import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from treadle_weights.layouts import whole
from treadle_weights.plan import plan
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import ArenaHeldError, ArenaMissingError, LoadOrder

LAYOUT = whole({"a": ("float32", (28,))})
TENSORS = {"a": np.arange(28, dtype=np.float32)}
PLAN = plan(LAYOUT, LAYOUT)


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_sender_keeps_what_is_committed_and_releases_the_rest(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    sender = transport.sender("run")
    for version in (1, 2, 3):
        arena = transport.arena("run", version, LAYOUT.size())
        sender.send(arena, LAYOUT, TENSORS.items())
    sender.keep(arena)
    assert arenas(tmp_path) == ["treadle.run.3"]

    sender.close()
    assert arenas(tmp_path) == []


def test_a_receiver_that_mapped_an_arena_reads_on_after_its_release(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    sender, receiver = transport.sender("run"), transport.receiver()
    arena = transport.arena("run", 1, LAYOUT.size())
    sender.send(arena, LAYOUT, TENSORS.items())
    mapped = receiver._bytes_of(arena)
    before = mapped.copy()

    sender.close()

    np.testing.assert_array_equal(mapped, before)
    with pytest.raises(ArenaMissingError):
        receiver.receive(LoadOrder(1, arena, LAYOUT, PLAN, {}), LAYOUT, np.zeros(112, np.uint8))


def test_an_arena_of_a_living_sender_is_not_taken(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, LAYOUT.size())
    first = transport.sender("run")
    digests = first.send(arena, LAYOUT, TENSORS.items())

    second = transport.sender("run")
    with pytest.raises(ArenaHeldError):
        second.send(arena, LAYOUT, TENSORS.items())

    second.close()
    order = LoadOrder(1, arena, LAYOUT, PLAN, digests)
    transport.receiver().receive(order, LAYOUT, np.zeros(112, np.uint8))


SEND_AND_WAIT = """
import sys
import numpy as np
from treadle_weights.layouts import whole
from treadle_weights.shared_memory import SharedMemory
layout = whole({"a": ("float32", (1000,))})
transport = SharedMemory(sys.argv[1])
sender = transport.sender("run")
for version in (1, 2):
    arena = transport.arena("run", version, layout.size())
    digests = sender.send(arena, layout, [("a", np.arange(1000, dtype=np.float32))])
print(digests["a"], flush=True)
sys.stdin.read()
"""


def test_what_a_killed_sender_left_can_be_read_until_its_successor_comes(tmp_path: Path) -> None:
    transport, layout = SharedMemory(tmp_path), whole({"a": ("float32", (1000,))})
    command = [sys.executable, "-c", SEND_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        digest = int(process.stdout.readline())
        transport.sender("run")
        assert arenas(tmp_path) == ["treadle.run.1", "treadle.run.2"]
        process.kill()

    buffer = np.zeros(layout.size(), np.uint8)
    arena = transport.arena("run", 2, layout.size())
    order = LoadOrder(2, arena, layout, plan(layout, layout), {"a": digest})
    transport.receiver().receive(order, layout, buffer)
    np.testing.assert_array_equal(buffer.view(np.float32), np.arange(1000, dtype=np.float32))

    transport.sender("run")
    assert arenas(tmp_path) == []


def test_only_long_dead_senders_of_other_runs_are_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemory(tmp_path)
    alive = transport.sender("alive")
    alive.send(transport.arena("alive", 1, LAYOUT.size()), LAYOUT, TENSORS.items())
    (tmp_path / "treadle.dead.1").write_bytes(b"left")
    (tmp_path / "other").write_bytes(b"not ours")

    transport.sender("run")
    assert arenas(tmp_path) == ["other", "treadle.alive.1", "treadle.dead.1"]

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 700)
    transport.sender("run")
    assert arenas(tmp_path) == ["other", "treadle.alive.1"]


def test_a_link_in_the_way_of_an_arena_is_neither_followed_nor_fatal(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    (tmp_path / "victim").write_bytes(b"x")
    (tmp_path / "treadle.run.1").symlink_to(tmp_path / "victim")
    sender = transport.sender("run")

    with pytest.raises(ArenaHeldError):
        sender.send(transport.arena("run", 1, LAYOUT.size()), LAYOUT, TENSORS.items())
    assert (tmp_path / "victim").read_bytes() == b"x"
