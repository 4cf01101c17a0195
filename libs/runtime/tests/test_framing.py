import asyncio
from enum import IntEnum
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_runtime.workers.framing import FrameError, Framing


class Say(IntEnum):
    HELLO = 0
    DATA = 1


FRAMING = Framing(Say, max_bytes=100)


@given(st.lists(st.tuples(st.sampled_from(Say), st.binary(max_size=40))), st.data())
def test_frames_survive_however_the_stream_is_cut(frames: list, data: st.DataObject) -> None:
    stream = b"".join(FRAMING.pack(say, raw) for say, raw in frames)
    unpacker, found = FRAMING.unpacker(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += unpacker.feed(stream[:size])
        stream = stream[size:]
    assert found == [(say, [raw]) for say, raw in frames]


@given(st.binary(max_size=60))
def test_whatever_a_peer_sends_is_frames_or_a_frame_error(data: bytes) -> None:
    framed = len(data).to_bytes(4, "little") + data
    for stream in (data, framed):
        try:
            for say, fields in FRAMING.unpacker().feed(stream):
                assert isinstance(say, Say)
                assert isinstance(fields, list)
        except FrameError:
            pass


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\xc1", id="no-msgpack"),
        pytest.param(b"\x90", id="no-say"),
        pytest.param(b"\x91\x7f", id="unknown-say"),
        pytest.param(b"\x01", id="no-list"),
        pytest.param(b"\xc4\x02\x00\x00", id="bytes"),
        pytest.param(msgpack.packb(["x" * 90]), id="long-say"),
    ],
)
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="expected a list that begins with a Say"):
        list(FRAMING.unpacker().feed(len(body).to_bytes(4, "little") + body))


def test_a_frame_that_is_too_long_is_refused_before_it_is_read_or_sent() -> None:
    with pytest.raises(FrameError, match="at most 100 bytes, got 101"):
        list(FRAMING.unpacker().feed((101).to_bytes(4, "little")))
    with pytest.raises(FrameError, match="at most 100 bytes, got 101") as refused:
        FRAMING.pack(Say.DATA, b"x" * 97)
    assert (refused.value.limit, refused.value.value) == ("at most 100 bytes", "101")
    assert list(FRAMING.unpacker().feed(FRAMING.pack(Say.DATA, b"x" * 96)))


def test_only_a_peer_that_is_ours_may_choose_the_keys_of_a_map() -> None:
    trusting = Framing(Say, max_bytes=100, any_keys=True)
    assert list(trusting.unpacker().feed(trusting.pack(Say.DATA, {7: 1.0})))
    with pytest.raises(FrameError, match="int"):
        list(FRAMING.unpacker().feed(FRAMING.pack(Say.DATA, {7: 1.0})))


class Kept(asyncio.WriteTransport):
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed


async def test_what_is_said_in_one_turn_of_the_loop_is_written_at_once_and_in_order() -> None:
    transport = Kept()
    packer = FRAMING.packer(transport)
    packer.send(Say.HELLO)
    packer.send(Say.DATA, 1)
    with pytest.raises(FrameError):
        packer.send(Say.DATA, b"x" * 101)
    assert transport.written == []
    await asyncio.sleep(0)
    packer.send(Say.DATA, 2)
    packer.flush()
    await asyncio.sleep(0)
    assert transport.written == [
        FRAMING.pack(Say.HELLO) + FRAMING.pack(Say.DATA, 1),
        FRAMING.pack(Say.DATA, 2),
    ]
    transport.closed = True
    packer.send(Say.DATA, 3)
    packer.flush()
    assert len(transport.written) == 2
