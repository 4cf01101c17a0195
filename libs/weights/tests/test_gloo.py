"""The transport over communicators: real groups of torch.distributed, one thread for each end."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from treadle_core.errors import InvalidFieldError
from treadle_weights.gloo import Gloo
from treadle_weights.groups import GroupLostError
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import box_of, plan
from treadle_weights.receiving import Receiver
from treadle_weights.sending import Sender
from treadle_weights.talk import PortTakenError, Talk, connect
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    EpochMismatchError,
    LoadOrder,
    Receipt,
    TransferBusyError,
    TransferLostError,
    VersionBackError,
)

pytestmark = pytest.mark.component

SOURCE = whole({"a": ("float32", (40, 60)), "b": ("bfloat16", (5000,)), "c": ("float32", ())})
TARGET = Layout(
    (
        Rectangle("b", "bfloat16", (5000,), (0,), (5000,), 0),
        Rectangle("a", "float32", (40, 60), (0, 30), (40, 60), 10_000),
        Rectangle("a", "float32", (40, 60), (0, 0), (40, 30), 14_800),
        Rectangle("c", "float32", (), (), (), 19_600),
    )
)
QUICK: dict[str, Any] = {"gather_s": 0.1, "join_s": 0.5, "stall_s": 3.0, "form_s": 3.0}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def tensors(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """Few elements differ between versions that follow each other."""
    rng = np.random.default_rng(0)
    found = {
        "a": rng.random((40, 60), np.float32),
        "b": rng.integers(0, 2**16, 5000, np.uint16),
        "c": np.array(version, np.float32),
    }
    found["a"][:, version % 60] = version
    found["b"][version % 5000] ^= 1
    return found


class World:
    """One trainer's end, and engines that load when they are told to."""

    def __init__(self, **settings: Any) -> None:
        self.transport = Gloo(free_port(), bucket_bytes=4096, **(QUICK | settings))
        self.sender: Sender = self.transport.sender("run")
        self.pool = ThreadPoolExecutor(8)
        self.engines: list[Receiver] = []
        self.buffers: dict[int, np.ndarray[Any, Any]] = {}

    def engine(self) -> Receiver:
        self.engines.append(self.transport.receiver())
        return self.engines[-1]

    def send(self, version: int) -> LoadOrder:
        arena = self.transport.arena("run", version, SOURCE.size())
        digests = self.sender.send(arena, SOURCE, tensors(version).items())
        return LoadOrder(version, arena, SOURCE, plan(SOURCE, TARGET), digests)

    def loading(self, engine: Receiver, order: LoadOrder) -> Future[Receipt]:
        buffer = self.buffers.setdefault(id(engine), np.zeros(TARGET.size(), np.uint8))
        return self.pool.submit(engine.receive, order, TARGET, buffer)

    def load(self, order: LoadOrder, *engines: Receiver) -> list[Receipt]:
        receipts = [f.result(30) for f in [self.loading(e, order) for e in engines]]
        for engine in engines:
            self.holds(engine, order.version)
        return receipts

    def holds(self, engine: Receiver, version: int) -> None:
        b, right, left, c = (
            box_of(self.buffers[id(engine)], rectangle) for rectangle in TARGET.rectangles
        )
        expected = tensors(version)
        np.testing.assert_array_equal(b, expected["b"])
        a = np.hstack((left.view(np.float32), right.view(np.float32)))
        np.testing.assert_array_equal(a, expected["a"])
        assert c.view(np.float32) == version


@contextmanager
def world(**settings: Any) -> Iterator[World]:
    made = World(**settings)
    try:
        yield made
    finally:
        for engine in made.engines:
            engine.close()
        made.sender.close()
        made.pool.shutdown()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "per-tensor"])
def test_a_version_arrives_bit_for_bit_in_another_layout(*, packed: bool) -> None:
    with world(packed=packed) as w:
        (receipt,) = w.load(w.send(1), w.engine())

        assert receipt.launches == (-(-SOURCE.size() // 4096) if packed else 3)
        assert receipt.wire_bytes == SOURCE.size()
        assert (receipt.encoding, receipt.epoch) == ("dense", 1)


def test_a_group_lives_over_versions_and_is_formed_anew_when_its_members_change() -> None:
    with world() as w:
        one, other = w.engine(), w.engine()
        epochs = [{r.epoch for r in w.load(w.send(v), one, other)} for v in (1, 2, 3)]
        assert len(epochs[0]) == 1
        assert epochs == [epochs[0]] * 3

        third = w.engine()
        order = w.send(4)
        w.load(order, one, other)
        w.load(order, third)
        (grown,) = {r.epoch for r in w.load(w.send(5), one, other, third)}
        third.close()
        w.engines.remove(third)
        (shrunk,) = {r.epoch for r in w.load(w.send(6), one, other)}

        assert max(epochs[0]) < grown < shrunk


def test_a_late_engine_gets_the_committed_version_while_the_trainer_is_elsewhere() -> None:
    with world() as w:
        one, late = w.engine(), w.engine()
        order = w.send(1)
        w.load(order, one)
        w.sender.keep(order.arena)
        w.sender.keep(order.arena)

        w.load(order, late)

        newer = w.send(2)
        w.load(newer, one)
        w.sender.discard(newer.arena)
        w.load(order, late)
        with pytest.raises(ArenaMissingError):
            w.load(newer, late)


@pytest.mark.parametrize("changed", [1, 20])
def test_a_delta_travels_where_all_hold_its_base_and_is_verified_whole(changed: int) -> None:
    with world(encoding="delta") as w:
        one, other = w.engine(), w.engine()
        first = w.send(1)
        assert {r.encoding for r in w.load(first, one, other)} == {"dense"}
        w.sender.keep(first.arena)

        second = w.send(1 + changed)
        receipts = w.load(second, one, other)
        w.sender.keep(second.arena)

        assert {r.encoding for r in receipts} == {"delta"}
        assert all(r.wire_bytes * 10 < SOURCE.size() for r in receipts)
        joiner = w.engine()
        assert w.load(w.send(40), joiner)[0].encoding == "dense"


def test_a_base_that_is_not_what_it_was_is_found_and_the_next_version_is_dense() -> None:
    with world(encoding="delta") as w:
        engine = w.engine()
        first = w.send(1)
        w.load(first, engine)
        w.sender.keep(first.arena)
        w.buffers[id(engine)][0] ^= 1

        second = w.send(2)
        with pytest.raises(ArenaCorruptError) as raised:
            w.load(second, engine)
        assert raised.value.field == "b"
        assert w.load(second, engine)[0].encoding == "dense"


def test_another_buffer_or_layout_is_no_base() -> None:
    with world(encoding="delta") as w:
        engine = w.engine()
        first = w.send(1)
        w.load(first, engine)
        w.sender.keep(first.arena)
        w.buffers[id(engine)] = np.zeros(TARGET.size(), np.uint8)

        assert w.load(w.send(2), engine)[0].encoding == "dense"


def test_digests_that_differ_name_their_tensor() -> None:
    with world() as w:
        engine = w.engine()
        order = w.send(1)
        wrong = LoadOrder(1, order.arena, SOURCE, order.copies, {**order.digests, "b": 1})
        with pytest.raises(ArenaCorruptError, match="b has another digest"):
            w.load(wrong, engine)
        w.load(order, engine)


def test_no_version_goes_back() -> None:
    with world() as w:
        w.send(2)
        w.send(2)
        with pytest.raises(VersionBackError, match="version 1 comes after 2") as raised:
            w.send(1)
        assert (raised.value.limit, raised.value.value) == (">= 2", "1")
        w.load(w.send(2), w.engine())


def test_of_two_updates_at_once_one_is_refused() -> None:
    with world() as w:
        arena = w.transport.arena("run", 1, SOURCE.size())
        begun, go_on = threading.Event(), threading.Event()

        def slowly() -> Iterator[tuple[str, Any]]:
            begun.set()
            assert go_on.wait(10)
            yield from tensors(1).items()

        slow = w.pool.submit(w.sender.send, arena, SOURCE, slowly())
        assert begun.wait(10)
        with pytest.raises(TransferBusyError):
            w.send(2)
        go_on.set()
        slow.result(10)

        engine = w.engine()
        w.load(w.send(3), engine)
        with engine._busy, pytest.raises(TransferBusyError):
            w.load(w.send(4), engine)
        w.holds(engine, 3)


def test_a_port_that_is_taken_is_said() -> None:
    with world() as w, pytest.raises(PortTakenError, match="Address already in use") as raised:
        w.transport.sender("run")
    assert raised.value.field == "port"


@pytest.mark.parametrize("transfer", ["run/9", "other/1", "run/1x", ""])
def test_a_transfer_that_is_not_there_is_refused_and_hurts_nobody(transfer: str) -> None:
    with world() as w:
        engine = w.engine()
        order = w.send(1)
        talk = joined(w, transfer=transfer, epoch=0)
        assert answer(talk)["reason"] == "ARENA_MISSING"
        w.load(order, engine)
        talk.close()


def joined(w: World, **said: Any) -> Talk:
    talk = connect(w.transport._terms.host, w.transport._terms.port, 5.0)
    talk.say(**({"say": "join", "engine": "x", "holds": ""} | said))
    return talk


def answer(talk: Talk) -> dict[str, Any]:
    while (said := talk.hear(10.0))["say"] == "wait":
        pass
    return said


def test_an_epoch_that_was_never_formed_is_refused_on_both_ends() -> None:
    with world() as w:
        order = w.send(1)
        talk = joined(w, transfer="run/1", epoch=7)
        said = answer(talk)
        assert (said["reason"], said["value"], said["limit"]) == ("EPOCH_MISMATCH", "7", "0")
        talk.close()
        w.load(order, w.engine())

    server = socket.create_server(("127.0.0.1", 0))
    transport = Gloo(server.getsockname()[1], **QUICK)
    with ThreadPoolExecutor(1) as pool, server:
        receiver = transport.receiver()
        order = LoadOrder(
            1, transport.arena("run", 1, SOURCE.size()), SOURCE, plan(SOURCE, TARGET), {}
        )
        loading = pool.submit(receiver.receive, order, TARGET, np.zeros(TARGET.size(), np.uint8))
        peer = Talk(server.accept()[0])
        assert peer.hear(5.0)["transfer"] == "run/1"
        peer.say(say="go", epoch=3, transfer="run/1", encoding="dense", bytes=SOURCE.size())
        with pytest.raises(EpochMismatchError, match="epoch 3 was never formed"):
            loading.result(10)
        receiver.close()
        peer.close()


@pytest.mark.parametrize(
    "line", [b"\0\1\2\n", b"[]\n", b"{}\n", b'{"epoch": "x"}\n', b"x" * 200_000]
)
def test_who_speaks_something_else_is_cut_off_and_hurts_nobody(line: bytes) -> None:
    with world() as w:
        with socket.create_connection(("127.0.0.1", w.transport._terms.port), 5.0) as connection:
            connection.settimeout(10.0)
            try:
                connection.sendall(line)
                assert connection.recv(10) == b""
            except ConnectionError:
                pass
        w.load(w.send(1), w.engine())


def test_a_sender_that_is_gone_is_said_at_once() -> None:
    with world() as w:
        engine = w.engine()
        order = w.send(1)
        w.load(order, engine)
        w.sender.close()
        with pytest.raises(ArenaMissingError) as raised:
            w.loading(engine, order).result(10)
        assert raised.value.limit == "a sender that answers"


def test_a_member_that_joins_no_version_delays_it_once() -> None:
    with world(join_s=0.5) as w:
        one, other = w.engine(), w.engine()
        w.load(w.send(1), one, other)

        (first,) = w.load(w.send(2), one)
        (second,) = w.load(w.send(3), one)

        assert first.epoch == second.epoch
        assert first.wire_s > 0.4 > second.wire_s


def test_a_member_that_stands_still_in_the_middle_is_left_behind() -> None:
    with world(stall_s=1.0, form_s=1.0) as w:
        one = w.engine()
        order = w.send(1)
        # It joins and is told to form a group, and never does.
        talk = joined(w, transfer="run/1", epoch=0)
        (receipt,) = w.load(order, one)

        assert receipt.epoch > 1
        talk.close()


def test_a_receiver_gives_up_in_bounded_time() -> None:
    with world(stall_s=1.0, form_s=0.5, give_up_s=1.0) as w:
        order = w.send(1)
        engine = w.engine()
        w.sender._rendezvous = Refusing()
        with pytest.raises((TransferLostError, ArenaMissingError)):
            w.loading(engine, order).result(20)


class Refusing:
    """A rendezvous that nobody finds."""

    port = 1

    def form(self, name: str, rank: int, size: int) -> Any:
        raise GroupLostError("never")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        pytest.param({"port": 0}, "port", id="port"),
        pytest.param({"bucket_bytes": 100}, "bucket_bytes", id="bucket"),
        pytest.param({"stall_s": 0.0}, "stall_s", id="stall"),
        pytest.param({"host": "0.0.0.0"}, "host", id="beyond-loopback"),  # noqa: S104
        pytest.param({"most_bytes_per_s": 10.0}, "most_bytes_per_s", id="too-slow"),
        pytest.param({"encoding": "zip"}, "encoding", id="encoding"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        Gloo(**({"port": 4000} | settings))
    assert raised.value.field == field


def test_arenas_elsewhere_are_refused() -> None:
    with world() as w:
        order = w.send(1)
        for path in ("", "/etc/x", "gloo://127.0.0.1:1/run/1", order.arena.path + "/../2"):
            arena = Arena(path, SOURCE.size())
            with pytest.raises(InvalidFieldError, match=r"arena\.path"):
                w.sender.send(arena, SOURCE, tensors(1).items())
            wrong = LoadOrder(1, arena, SOURCE, order.copies, order.digests)
            with pytest.raises(InvalidFieldError, match=r"arena\.path"):
                w.load(wrong, w.engine())
        with pytest.raises(InvalidFieldError, match="of run other"):
            w.transport.alias("other", 2, order.arena)
        assert w.transport.alias("run", 2, order.arena) == order.arena
        assert w.transport.find("run", 1) is None
        arena = w.transport.arena("run", 5, 2**50)
        with pytest.raises(ArenaFullError):
            w.sender.send(arena, SOURCE, tensors(5).items())


def test_only_what_is_chosen_by_the_link_travels() -> None:
    """On a link so slow that the delta is sooner there, it is taken; else all bytes are."""
    with world(encoding="auto", most_bytes_per_s=100_000.0) as slow:
        engine = slow.engine()
        first = slow.send(1)
        slow.load(first, engine)
        slow.sender.keep(first.arena)
        assert slow.load(slow.send(2), engine)[0].encoding == "delta"
    with world(encoding="auto") as fast:
        engine = fast.engine()
        first = fast.send(1)
        fast.load(first, engine)
        fast.sender.keep(first.arena)
        fast.sender._chooser.link_rate = 1e12
        assert fast.load(fast.send(2), engine)[0].encoding == "dense"
