"""Reads one object from another node's sidecar, over as many connections as it takes."""

import time
from typing import Any, cast

import grpc

from treadle.payload.v1 import payload_service_pb2 as pb
from treadle.payload.v1.payload_service_pb2_grpc import PayloadServiceStub
from treadle_core.errors import PayloadCorruptError, PayloadMissingError
from treadle_payloads.store import PayloadReference
from treadle_runtime.errors import PEER_AWAY, RemoteError, from_rpc_error

_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0
_AGAIN = (PEER_AWAY, "TOO_MANY_READERS")


def read_stream(
    stub: PayloadServiceStub, run_id: str, reference: PayloadReference, *, until: float
) -> memoryview:
    """The bytes, checked. A stream that breaks is taken up where it broke.

    That goes on until `until`, in monotonic seconds.

    Raises PayloadMissingError where the node does not hold them or is away, PayloadCorruptError.
    """
    data = bytearray(reference.size)
    at, delay_s = 0, _FIRST_DELAY_S
    while True:
        left_s = until - time.monotonic()
        request = pb.ReadRequest(run_id=run_id, sha256=reference.sha256, offset=at)
        try:
            for response in stub.Read(request, timeout=max(left_s, 0.01)):
                reference.check_size(response.size)
                chunk = response.chunk  # one read: each is a copy
                if at + len(chunk) > reference.size:
                    reference.check_size(at + len(chunk))
                data[at : at + len(chunk)] = chunk
                at += len(chunk)
                delay_s = _FIRST_DELAY_S
            break
        except grpc.RpcError as error:
            remote = from_rpc_error(cast("Any", error), "Read")
            if remote.reason not in _AGAIN or time.monotonic() + delay_s > until:
                raise _missing(reference, remote) from error
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
    if at < reference.size:
        raise PayloadCorruptError(
            f"payload {reference.sha256}: {reference.node} sent {at} of {reference.size} bytes",
            field="size",
            limit=reference.size,
            value=at,
        )
    view = memoryview(data).toreadonly()
    reference.check(view)
    return view


def _missing(reference: PayloadReference, remote: RemoteError) -> PayloadMissingError:
    return PayloadMissingError(
        f"payload {reference.sha256} is not to be had from {reference.node}: {remote.message}",
        field="sha256",
        value=reference.sha256,
    )
