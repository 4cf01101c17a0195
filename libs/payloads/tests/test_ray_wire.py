import os
import socket
import struct
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from treadle_payloads import ray_wire
from treadle_payloads.ray_cluster import RayConfig, child_environment


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, its = socket.socketpair()
    with ours, its:
        ours.settimeout(5)
        its.settimeout(5)
        yield ours, its


def test_a_message_arrives_with_its_open_file(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, its = pair
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"bytes")

    ray_wire.send(its, {"objects": {"a": [0, 5]}}, descriptor)
    os.close(descriptor)
    message, (received,) = ray_wire.receive(ours)

    assert message == {"objects": {"a": [0, 5]}}
    assert os.pread(received, 9, 0) == b"bytes"
    os.close(received)


@pytest.mark.parametrize("sent", [b"", b"\x05", struct.pack("<I", 9) + b"{}"])
def test_a_message_that_was_cut_is_an_end(
    pair: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    ours, its = pair
    its.sendall(sent)
    its.close()

    with pytest.raises(EOFError):
        ray_wire.receive(ours)


def test_a_message_that_is_too_long_is_refused_before_it_is_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, its = pair
    its.sendall(struct.pack("<I", ray_wire.MOST_BYTES + 1))

    with pytest.raises(OSError, match=str(ray_wire.MOST_BYTES)):
        ray_wire.receive(ours)


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: NOT TESTED")
@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "address"),
        ({"address": "head"}, "address"),
        ({"address": "head:6379", "bytes": 0}, "bytes"),
        ({"address": "head:6379", "token": "secret"}, "token"),
    ],
)
def test_a_wrong_cluster_is_told_by_the_key(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        RayConfig.of(settings, "run")


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: NOT TESTED")
def test_actors_are_in_the_namespace_of_the_run_unless_told_otherwise() -> None:
    assert RayConfig.of({"address": "head:6379"}, "run").namespace == "run"
    assert RayConfig.of({"address": "head:6379", "namespace": "n"}, "run").namespace == "n"


def test_a_child_may_not_pickle_references_out_of_ray() -> None:
    name = "RAY_allow_out_of_band_object_ref_serialization"

    assert child_environment("head:6379")[name] == "0"
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in child_environment("head:6379")
    assert child_environment("127.0.0.1:6379")["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
