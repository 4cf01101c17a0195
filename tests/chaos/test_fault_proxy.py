"""The proxy does to a connection what it is told, and tells an answer from an error."""

import asyncio
import contextlib

import pytest
from fault_proxy import Answers, Link, listen

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
HEADERS = bytes.fromhex("000002010400000001") + b"hh"
TRAILERS = bytes.fromhex("000002010500000001") + b"tt"
DATA = bytes.fromhex("000005000000000001") + b"\0\0\0\0\0"
PATIENCE_S = 5


@contextlib.asynccontextmanager
async def carried(tmp_path):
    """A link to a server that answers each piece with itself, and a connection by it."""

    async def echo(reader, writer):
        while piece := await reader.read(1024):
            writer.write(piece)
        writer.close()

    link = Link("link", f"unix:{tmp_path}/in", f"unix:{tmp_path}/out")
    target = await asyncio.start_unix_server(echo, f"{tmp_path}/out")
    proxy = await listen(link)
    reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/in")
    try:
        writer.write(b"first")
        assert await soon(reader.readexactly(5)) == b"first"
        yield link, reader, writer
    finally:
        for server in (proxy, target):
            server.close()
        writer.transport.abort()
        # Connections end by themselves once the caller is gone.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await soon(asyncio.gather(*others, return_exceptions=True))


def soon(coming):
    return asyncio.wait_for(coming, PATIENCE_S)


async def is_silent(reader):
    try:
        await asyncio.wait_for(reader.read(1), 0.05)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("fault", ["hold", "mute"])
async def test_what_is_held_arrives_when_the_link_is_healed(tmp_path, fault):
    async with carried(tmp_path) as (link, reader, writer):
        link.set(fault)
        writer.write(b"second")
        assert await is_silent(reader)

        link.set("none")

        assert await soon(reader.readexactly(6)) == b"second"


async def test_a_hole_swallows_and_its_end_cuts(tmp_path):
    async with carried(tmp_path) as (link, reader, writer):
        link.set("hole")
        writer.write(b"second")
        assert await is_silent(reader)

        link.set("none")

        with contextlib.suppress(ConnectionError):
            assert await soon(reader.read(1)) == b""


async def test_a_half_closed_connection_still_answers(tmp_path):
    async with carried(tmp_path) as (link, reader, _):
        link.set("half")

        assert await soon(reader.read()) == b""


async def test_a_cut_comes_after_so_many_bytes(tmp_path):
    async with carried(tmp_path) as (link, reader, writer):
        link.set("cut", after=3)
        writer.write(b"second")

        with contextlib.suppress(ConnectionError):
            assert len(await soon(reader.read())) <= 6


async def test_one_bit_is_flipped_once(tmp_path):
    async with carried(tmp_path) as (link, reader, writer):
        link.set("flip")
        writer.write(b"\0second")
        assert await soon(reader.readexactly(7)) == b"\x80second"
        writer.write(b"\0third")
        assert await soon(reader.readexactly(6)) == b"\0third"


async def test_a_slow_link_is_late_and_whole(tmp_path):
    async with carried(tmp_path) as (link, reader, writer):
        link.set("delay", seconds=0.1, jitter=0.01)
        writer.write(b"second")
        assert await is_silent(reader)

        assert await soon(reader.readexactly(6)) == b"second"


def test_an_unknown_fault_is_refused():
    with pytest.raises(ValueError, match="fault: expected one of none"):
        Link("link", "", "").set("fire")


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_only_data_is_an_answer(size):
    def feed(sent):
        answers = Answers()
        answers.request(PREFACE)
        pieces = [sent[place : place + size] for place in range(0, len(sent), size)]
        return sum(map(answers.response, pieces)) == 1

    assert not feed(SETTINGS + TRAILERS)
    assert feed(SETTINGS + HEADERS + DATA + TRAILERS)


def test_an_error_of_redis_is_no_answer():
    answers = Answers()
    answers.request(b"*1\r\n$4\r\nPING\r\n")

    assert not answers.response(b"-LOADING\r\n")
    assert answers.response(b"+PONG\r\n")
