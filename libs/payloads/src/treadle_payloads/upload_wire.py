"""One upload over a unix socket: a header, an answer, the raw bytes, an answer.

A message is its length, four bytes big-endian, and that much JSON. The first answer says that the
bytes are to be sent, that they are there already, or why they are not wanted.
"""

import json
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

from treadle_core.errors import (
    InvalidFieldError,
    Kind,
    PayloadCorruptError,
    TreadleError,
    WrongRunError,
)
from treadle_payloads.store import PayloadStoreFullError
from treadle_runtime.errors import RemoteError

MESSAGE_LIMIT = 4096
"""Most bytes of a header or an answer."""

_LENGTH = struct.Struct(">I")
_TYPED: Mapping[str, type[TreadleError]] = {
    error.reason: error for error in (PayloadStoreFullError, PayloadCorruptError, WrongRunError)
}


@dataclass(frozen=True, slots=True)
class Header:
    """What is about to be uploaded."""

    run_id: str
    sha256: str
    size: int
    holder: str
    """The episode that needs it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it."""

    epoch: int
    """Of the sidecar."""
    send: bool = False
    """The bytes are to be sent; else they are durable."""


class BrokenUploadError(ConnectionError):
    """The peer does not keep to the protocol, or is gone."""


def header_to_wire(header: Header) -> bytes:
    return _message(asdict(header))


def header_from_wire(body: bytes) -> Header:
    """Raises InvalidFieldError."""
    values = _object(body)
    kinds = {"run_id": str, "sha256": str, "size": int, "holder": str}
    for name, kind in kinds.items():
        if type(values.get(name)) is not kind:
            limit = f"a {kind.__name__}"
            raise InvalidFieldError(name, limit=limit, value=repr(values.get(name))[:80])
    return Header(**{name: values[name] for name in kinds})


def answer_to_wire(answer: Answer) -> bytes:
    return _message(asdict(answer))


def error_to_wire(error: TreadleError) -> bytes:
    texts = {"message": error.message, "field": error.field, "limit": error.limit}
    values = {name: text[:500] for name, text in (texts | {"value": error.value}).items()}
    values |= {"kind": error.kind, "reason": error.reason}
    return _message({"error": {**values, "retry_after_s": error.retry_after_s}})


def answer_from_wire(body: bytes) -> Answer:
    """Raises the error that the peer answered with, or BrokenUploadError."""
    try:
        values = _object(body)
        error = values.get("error")
        if error is None:
            return Answer(int(values["epoch"]), bool(values["send"]))
        kind, reason, message = Kind(error["kind"]), str(error["reason"]), str(error["message"])
        details = {name: str(error[name]) for name in ("field", "limit", "value")}
        retry_after_s = error["retry_after_s"]
    except (InvalidFieldError, KeyError, TypeError, ValueError) as broken:
        raise BrokenUploadError(f"not an answer: {body[:80]!r}") from broken
    if reason in _TYPED:
        raise _TYPED[reason](message, **details, retry_after_s=retry_after_s)
    remote = RemoteError(kind, reason, message, retry_after_s=retry_after_s)
    remote.field, remote.limit, remote.value = details.values()
    raise remote


def read_message(read: Callable[[memoryview], int]) -> bytes:
    """The next message's JSON. Raises BrokenUploadError; a TimeoutError is the reader's."""
    (length,) = _LENGTH.unpack(_exactly(read, _LENGTH.size))
    if not 0 < length <= MESSAGE_LIMIT:
        raise BrokenUploadError(f"expected a message of 1 to {MESSAGE_LIMIT} bytes, got {length}")
    return _exactly(read, length)


def reader(connection: socket.socket) -> Callable[[memoryview], int]:
    """Reads what a connection has next into a buffer; 0 at its end."""
    return connection.recv_into


def _exactly(read: Callable[[memoryview], int], length: int) -> bytes:
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        got = read(view[at:])
        if not got:
            raise BrokenUploadError(f"expected {length} bytes, got {at}")
        at += got
    return bytes(data)


def _message(values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values).encode()
    return _LENGTH.pack(len(body)) + body


def _object(body: bytes) -> dict[str, Any]:
    try:
        values: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError("header", limit="JSON", value=repr(body[:80])) from error
    if not isinstance(values, dict):
        raise InvalidFieldError("header", limit="a JSON object", value=repr(body[:80]))
    return cast("dict[str, Any]", values)
