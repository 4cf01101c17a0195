"""What a reader makes of a peer that does not keep to the contract, or breaks off."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from treadle.payload.v1 import payload_service_pb2 as pb
from treadle.payload.v1 import payload_service_pb2_grpc as rpc
from treadle_core.errors import PayloadCorruptError, PayloadMissingError, TreadleError
from treadle_payloads.store import PayloadReference
from treadle_payloads.streams import read_stream
from treadle_runtime.channel import OPTIONS

pytestmark = pytest.mark.processes

DATA = b"tokens of an episode"
REFERENCE = PayloadReference.of(DATA)
Parts = Iterator[pb.ReadResponse]


class Peer(rpc.PayloadServiceServicer):
    """Answers each read with the next of its answers."""

    def __init__(self) -> None:
        self.answers: list[Callable[[int, grpc.ServicerContext], Parts]] = []
        self.offsets: list[int] = []

    def Read(self, request: pb.ReadRequest, context: grpc.ServicerContext) -> Parts:
        self.offsets.append(request.offset)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        yield from answer(request.offset, context)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer()
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_PayloadServiceServicer_to_server(made, server)
    made.address = f"unix:{tmp_path}/node"
    server.add_insecure_port(made.address)
    server.start()
    yield made
    server.stop(None).wait()


def read(peer: Peer, *, timeout_s: float = 20.0) -> memoryview:
    with grpc.insecure_channel(peer.address, options=OPTIONS) as channel:
        stub = rpc.PayloadServiceStub(channel)
        return read_stream(stub, "run", REFERENCE, until=time.monotonic() + timeout_s)


def sends(*chunks: bytes, size: int = len(DATA)) -> Callable[..., Parts]:
    return lambda offset, context: (
        pb.ReadResponse(size=size, epoch=1, chunk=chunk) for chunk in chunks
    )


def breaks_after(*chunks: bytes) -> Callable[..., Parts]:
    def answer(offset: int, context: grpc.ServicerContext) -> Parts:
        yield from sends(*chunks)(offset, context)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(sends(DATA, b"more"), id="G2-more-than-declared"),
        pytest.param(sends(DATA + b"more", size=len(DATA) + 4), id="G2-declares-more"),
        pytest.param(sends(b"x" * 2**22), id="G2-much-more"),
        pytest.param(sends(DATA[:-1]), id="fewer"),
        pytest.param(sends(DATA, size=2**60), id="G12-huge"),
        pytest.param(sends(DATA, size=-1), id="G5-negative"),
        pytest.param(sends(b"T" + DATA[1:]), id="G25-flip"),
        pytest.param(sends(), id="nothing"),
    ],
)
def test_other_bytes_than_were_referred_to_are_corrupt(
    peer: Peer, answer: Callable[..., Parts]
) -> None:
    peer.answers = [answer]

    with pytest.raises(PayloadCorruptError) as raised:
        read(peer)

    assert raised.value.field in ("size", "sha256")


def test_a_stream_that_breaks_is_taken_up_where_it_broke(peer: Peer) -> None:
    peer.answers = [
        breaks_after(DATA[:5]),
        breaks_after(),
        breaks_after(DATA[5:9]),
        sends(DATA[9:]),
    ]

    assert read(peer) == DATA
    assert peer.offsets == [0, 5, 5, 9]


def hangs(offset: int, context: grpc.ServicerContext) -> Parts:
    while context.is_active():
        time.sleep(0.01)
    yield pb.ReadResponse()


@pytest.mark.parametrize("answer", [breaks_after(), hangs], ids=["breaks", "hangs"])
def test_a_peer_that_does_not_serve_is_given_up_in_time(
    peer: Peer, answer: Callable[..., Parts]
) -> None:
    peer.answers = [answer]
    began = time.monotonic()

    with pytest.raises(PayloadMissingError):
        read(peer, timeout_s=1.0)

    assert time.monotonic() - began < 10.0


def test_what_a_peer_refuses_is_missing(peer: Peer) -> None:
    def refuses(offset: int, context: grpc.ServicerContext) -> Parts:
        context.abort(grpc.StatusCode.INTERNAL, "a bug")
        yield pb.ReadResponse()

    peer.answers = [refuses]

    with pytest.raises(TreadleError) as raised:
        read(peer)

    assert raised.value.reason == "PAYLOAD_MISSING"
