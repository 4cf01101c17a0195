"""PayloadService: hands out what lies in the spool, and says what is needed of it."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sized
from dataclasses import dataclass, field

import grpc.aio

from treadle.payload.v1 import payload_service_pb2 as pb
from treadle.payload.v1 import payload_service_pb2_grpc as rpc
from treadle_core.errors import InvalidFieldError, Kind, PayloadMissingError, TreadleError
from treadle_core.ids import checked_id, checked_sha256
from treadle_payloads.spool import Spool
from treadle_payloads.store import Hold, PayloadReference
from treadle_runtime.fields import at_least, check_run

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["PayloadService"].full_name
CHUNK_BYTES = 2 * 1024 * 1024
READERS = 64
"""Streams at once: each holds a descriptor and a few chunks."""
MAX_HOLDS = 65536
"""Entries of one request."""


class TooManyReadersError(TreadleError):
    """As many streams as are allowed run already."""

    kind = Kind.EXHAUSTED
    reason = "TOO_MANY_READERS"


@dataclass(slots=True)
class PayloadServicer(rpc.PayloadServiceServicer):
    """Serves one run."""

    spool: Spool
    run_id: str
    _readers: int = field(default=0, init=False)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server."""
        rpc.add_PayloadServiceServicer_to_server(self, server)

    async def Read(
        self, request: pb.ReadRequest, context: object
    ) -> AsyncGenerator[pb.ReadResponse]:
        check_run(self.run_id, request.run_id)
        sha256 = checked_sha256(request.sha256)
        offset = at_least("offset", request.offset, 0)
        if self._readers >= READERS:
            raise TooManyReadersError(
                f"{READERS} streams run", field="streams", limit=READERS, retry_after_s=0.5
            )
        self._readers += 1
        try:
            async with contextlib.aclosing(self._stream(sha256, offset)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._readers -= 1

    async def _stream(self, sha256: str, offset: int) -> AsyncGenerator[pb.ReadResponse]:
        try:
            descriptor = os.open(self.spool.files.path(sha256), os.O_RDONLY)
        except FileNotFoundError as error:
            message = f"payload {sha256} is not on this node"
            raise PayloadMissingError(message, field="sha256", value=sha256) from error
        try:
            size = os.fstat(descriptor).st_size
            if offset > size:
                raise InvalidFieldError("offset", limit=f"<= {size}", value=offset)
            while True:
                chunk = await asyncio.to_thread(os.pread, descriptor, CHUNK_BYTES, offset)
                yield pb.ReadResponse(size=size, epoch=self.spool.epoch, chunk=chunk)
                offset += len(chunk)
                if offset >= size or not chunk:
                    return
        finally:
            os.close(descriptor)

    async def Confirm(self, request: pb.ConfirmRequest, context: object) -> pb.ConfirmResponse:
        check_run(self.run_id, request.run_id)
        writer_epoch = at_least("writer_epoch", request.writer_epoch, 1)
        size = at_least("size", request.size, 0)
        holder = checked_id("holder", request.holder)
        hold = Hold(PayloadReference(request.sha256, size), holder)
        if await asyncio.to_thread(self.spool.confirm, [hold], writer_epoch=writer_epoch):
            message = f"{size} bytes of payload {request.sha256} are not on this node"
            raise PayloadMissingError(message, field="sha256", value=request.sha256)
        return pb.ConfirmResponse(epoch=self.spool.epoch)

    async def ConfirmAll(
        self, request: pb.ConfirmAllRequest, context: object
    ) -> pb.ConfirmAllResponse:
        check_run(self.run_id, request.run_id)
        writer_epoch = at_least("writer_epoch", request.writer_epoch, 1)
        _check_number("needs", request.needs)
        holds = [
            Hold(
                PayloadReference(need.sha256, at_least(f"needs[{i}].size", need.size, 0)),
                checked_id(f"needs[{i}].holder", need.holder),
            )
            for i, need in enumerate(request.needs)
        ]
        missing = set(await asyncio.to_thread(self.spool.confirm, holds, writer_epoch=writer_epoch))
        places = [place for place, hold in enumerate(holds) if hold in missing]
        return pb.ConfirmAllResponse(epoch=self.spool.epoch, missing=places)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
        check_run(self.run_id, request.run_id)
        writer_epoch = at_least("writer_epoch", request.writer_epoch, 1)
        _check_number("holds", request.holds)
        holds = [
            Hold(
                PayloadReference(hold.sha256, 0),
                checked_id(f"holds[{i}].holder", hold.holder),
                shared=hold.shared,
            )
            for i, hold in enumerate(request.holds)
        ]
        deleted = await asyncio.to_thread(self.spool.release, holds, writer_epoch=writer_epoch)
        return pb.ReleaseResponse(deleted=deleted)


def _check_number(field: str, entries: Sized) -> None:
    if len(entries) > MAX_HOLDS:
        raise InvalidFieldError(field, limit=f"at most {MAX_HOLDS} entries", value=len(entries))
