"""PayloadStore `sidecar`: uploads to the sidecar of this node, reads from that of any."""

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc

from treadle.payload.v1 import payload_service_pb2 as pb
from treadle.payload.v1.payload_service_pb2_grpc import PayloadServiceStub
from treadle_core.errors import InvalidFieldError, PayloadMissingError, TreadleError
from treadle_payloads import upload_wire
from treadle_payloads.files import FileStore
from treadle_payloads.ray_cache import RayCache
from treadle_payloads.ray_cluster import RayConfig
from treadle_payloads.store import (
    GET_S,
    Buffer,
    Hold,
    PayloadKeeperFencedError,
    PayloadReference,
    PayloadStoreAwayError,
    Stay,
)
from treadle_payloads.streams import read_stream
from treadle_payloads.upload_wire import BrokenUploadError, Header
from treadle_runtime.channel import OPTIONS
from treadle_runtime.errors import PEER_AWAY, RemoteError, from_rpc_error

UPLOAD_S = 60.0
"""Most seconds of one upload."""
CALL_S = 10.0
"""Most seconds of a confirmation or a release."""
RAY_S = 5.0
"""Most seconds that Ray gets before the streams are asked."""
_STREAMS = 8
"""Payloads that are read at once."""
_MOST_HOLDS = 4096
"""Holds that one call makes, or ends."""


class SidecarStore:
    """PayloadStore plugin `sidecar`: content-addressed objects, each on the node that made it.

    Durability is `host`: fsynced on that node before `put` returns; `fleet` where its sidecar has
    an archive.
    """

    def __init__(
        self,
        *,
        upload: str = "",
        node: str = "",
        directory: str | Path | None = None,
        archive: str | Path | None = None,
        ray: Mapping[str, Any] | None = None,
        budget_bytes: int | None = None,
        run_dir: str | Path = ".",
        run_id: str = "",
    ) -> None:
        """Connects when it is first used.

        `upload` is the unix socket of this node's sidecar, `node` its address as references name
        it, `directory` its spool, which is read as files. `archive` is read where a node is gone.
        `ray` is read first where another node has the bytes, as `RayConfig` says.
        `budget_bytes` is for the sidecar that `treadle train` starts where `upload` is not given.
        """
        del budget_bytes
        self._upload = upload
        self._node = node
        self._run_id = run_id
        self._spool = FileStore(directory or Path(run_dir) / "payloads")
        self._archive = FileStore(archive) if archive else None
        self._ray = RayCache(RayConfig.of(ray, run_id)) if ray else None
        self._lock = threading.Lock()
        self._stubs: dict[str, PayloadServiceStub] = {}

    def put(self, data: bytes, *, holder: str = "") -> PayloadReference:
        reference = PayloadReference.of(data)
        header = Header(self._run_id, reference.sha256, reference.size, holder or "none")
        try:
            epoch = self._send(header, data)
        except (OSError, BrokenUploadError) as error:
            raise PayloadStoreAwayError(
                f"payload sidecar at {self._upload}: {error or type(error).__name__}",
                field="upload",
                value=self._upload,
            ) from error
        return PayloadReference(reference.sha256, reference.size, self._node, epoch)

    def get(self, reference: PayloadReference) -> Buffer:
        found = self.fetch([reference])[reference.sha256]
        if isinstance(found, TreadleError):
            raise found
        return found

    def fetch(
        self, references: Iterable[PayloadReference], *, timeout_s: float = GET_S
    ) -> Mapping[str, Buffer | TreadleError]:
        """From this node's files, else Ray, else a stream from its node, else the archive."""
        until = time.monotonic() + timeout_s
        wanted = {reference.sha256: reference for reference in references}
        fetched = dict(self._spool.fetch(ref for ref in wanted.values() if self._is_here(ref)))
        left = [ref for key, ref in wanted.items() if not _is_found(fetched.get(key))]
        if left and self._ray:
            fetched |= self._ray.get_many(left, min(RAY_S, timeout_s / 3))
            left = [ref for ref in left if not _is_found(fetched.get(ref.sha256))]
        if left:
            with ThreadPoolExecutor(min(_STREAMS, len(left)), "payload") as threads:
                far = threads.map(partial(self._far, until=until), left)
                fetched |= zip((ref.sha256 for ref in left), far, strict=True)
        return fetched

    def has(self, reference: PayloadReference) -> bool:
        if self._is_here(reference) and self._spool.has(reference):
            return True
        request = pb.ReadRequest(
            run_id=self._run_id, sha256=reference.sha256, offset=reference.size
        )
        try:  # from its end on, so that nothing of it is sent
            for response in self._stub(reference.node or self._node).Read(request, timeout=CALL_S):
                return response.size == reference.size
        except grpc.RpcError:
            pass
        return self._archive is not None and self._archive.has(reference)

    def confirm(self, holds: Iterable[Hold], *, writer_epoch: int) -> list[Hold]:
        missing: list[Hold] = []
        for node, wanted in _by_node(holds).items():
            for at in range(0, len(wanted), _MOST_HOLDS):
                part = wanted[at : at + _MOST_HOLDS]
                request = pb.ConfirmAllRequest(
                    run_id=self._run_id, writer_epoch=writer_epoch, needs=map(_need, part)
                )
                answer: pb.ConfirmAllResponse = self._call(node, "ConfirmAll", request)
                missing += (part[place] for place in answer.missing)
        return missing

    def release(self, holds: Iterable[Hold], *, writer_epoch: int) -> None:
        failures: list[TreadleError] = []
        for node, unneeded in _by_node(holds).items():
            ended = [
                pb.Hold(sha256=each.reference.sha256, holder=each.holder, shared=each.shared)
                for each in unneeded
            ]
            try:  # one that is away keeps the others from nothing
                for at in range(0, len(ended), _MOST_HOLDS):
                    request = pb.ReleaseRequest(
                        run_id=self._run_id,
                        writer_epoch=writer_epoch,
                        holds=ended[at : at + _MOST_HOLDS],
                    )
                    self._call(node, "Release", request)
            except TreadleError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def idle(self) -> Iterable[Stay]:
        return ()  # a sidecar asks the ledger itself

    def drop(self, stay: Stay) -> bool:
        del stay
        return False

    def _is_here(self, reference: PayloadReference) -> bool:
        return reference.node in ("", self._node)

    def _far(self, reference: PayloadReference, *, until: float) -> Buffer | TreadleError:
        try:
            stub = self._stub(reference.node or self._node)
            return read_stream(stub, self._run_id, reference, until=until)
        except TreadleError as error:
            if self._archive is None:
                return error
        return self._archive.fetch([reference])[reference.sha256]

    def _send(self, header: Header, data: bytes) -> int:
        """The epoch of the sidecar that keeps the bytes."""
        until = time.monotonic() + UPLOAD_S
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(CALL_S)
            connection.connect(self._upload)
            read = upload_wire.reader(connection)
            connection.sendall(upload_wire.header_to_wire(header))
            answer = upload_wire.answer_from_wire(upload_wire.read_message(read))
            if answer.send:
                connection.settimeout(max(until - time.monotonic(), 0.1))
                with suppress(ConnectionError):  # it has answered: it does not want the rest
                    connection.sendall(data)
                answer = upload_wire.answer_from_wire(upload_wire.read_message(read))
            return answer.epoch

    def _call(self, node: str, method: str, request: Any) -> Any:
        address = node or self._node
        try:
            return getattr(self._stub(address), method)(request, timeout=CALL_S)
        except grpc.RpcError as error:
            remote = from_rpc_error(cast("Any", error), method)
            raise typed(remote, address) from error

    def _stub(self, address: str) -> PayloadServiceStub:
        if not address:
            raise InvalidFieldError("node", limit="the address of a sidecar", value="none")
        with self._lock:
            if address not in self._stubs:
                channel = grpc.insecure_channel(address, options=OPTIONS)
                self._stubs[address] = PayloadServiceStub(channel)
            return self._stubs[address]


def typed(remote: RemoteError, address: str) -> TreadleError:
    """The error of this package that a sidecar sent, or what it means that none came."""
    if remote.reason == PEER_AWAY:
        return PayloadStoreAwayError(f"payload sidecar at {address}: {remote.message}")
    for error in (PayloadMissingError, PayloadKeeperFencedError):
        if remote.reason == error.reason:
            return error(remote.message, field=remote.field, limit=remote.limit, value=remote.value)
    return remote


def _by_node(holds: Iterable[Hold]) -> dict[str, list[Hold]]:
    found: dict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        found[hold.reference.node].append(hold)
    return found


def _need(hold: Hold) -> pb.Need:
    reference = hold.reference
    return pb.Need(sha256=reference.sha256, size=reference.size, holder=hold.holder)


def _is_found(found: Buffer | TreadleError | None) -> bool:
    return isinstance(found, bytes | memoryview)
