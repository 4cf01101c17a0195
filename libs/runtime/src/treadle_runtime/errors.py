"""Typed errors on the wire: one mapping to gRPC status and ErrorInfo, and back."""

import math

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from treadle_core.errors import Kind, TreadleError

STATUS_OF_KIND = {
    Kind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Kind.PRECONDITION: grpc.StatusCode.FAILED_PRECONDITION,
    Kind.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Kind.CONFLICT: grpc.StatusCode.ALREADY_EXISTS,
    Kind.EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Kind.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Kind.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Kind.BROKEN: grpc.StatusCode.INTERNAL,
}
_KIND_OF_STATUS = {status: kind for kind, status in STATUS_OF_KIND.items()}
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)
_DETAILS_KEY = "grpc-status-details-bin"

PEER_AWAY = "PEER_AWAY"
"""Reason of a RemoteError whose peer was not reached, or did not answer in time."""


class RemoteError(TreadleError):
    """What a peer answered, or that it did not; carries the peer's kind and reason."""

    def __init__(
        self, kind: Kind, reason: str, message: str, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.kind = kind
        self.reason = reason


async def abort(
    context: "grpc.aio.ServicerContext[object, object]", error: TreadleError, domain: str
) -> None:
    """Ends the call with the status, ErrorInfo and RetryInfo of `error`."""
    status = STATUS_OF_KIND[error.kind]
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=domain)
    for key in ("field", "limit", "value"):
        if text := getattr(error, key):
            info.metadata[key] = text[:512]
    details = status_pb2.Status(code=code_pb2.Code.Value(status.name), message=error.message[:2048])
    details.details.add().Pack(info)
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(math.ceil(error.retry_after_s * 1e9))
        details.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    metadata = ((_DETAILS_KEY, details.SerializeToString()),)
    await context.abort(status, error.message[:2048], trailing_metadata=metadata)


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> RemoteError:
    """Reads the typed error that a peer sent; PEER_AWAY where it sent none."""
    info, retry_after_s = _details(error)
    message = error.details() or error.code().name
    if info is not None:
        kind = _KIND_OF_STATUS.get(error.code(), Kind.BROKEN)
        remote = RemoteError(kind, info.reason, message, retry_after_s=retry_after_s)
        remote.field = info.metadata.get("field", "")
        remote.limit = info.metadata.get("limit", "")
        remote.value = info.metadata.get("value", "")
        return remote
    if error.code() in _AWAY:
        return RemoteError(Kind.UNAVAILABLE, PEER_AWAY, f"{peer}: {error.code().name}: {message}")
    return RemoteError(Kind.BROKEN, error.code().name, f"{peer}: {message}")


def _details(
    error: grpc.aio.AioRpcError,
) -> tuple[error_details_pb2.ErrorInfo | None, float | None]:
    info: error_details_pb2.ErrorInfo | None = None
    retry_after_s: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            found, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(found):
                info = found
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return info, retry_after_s
