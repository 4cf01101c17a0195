"""Takes uploads on a unix socket, many at once, each in a thread: the bytes never meet Python."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.ids import checked_id
from treadle_payloads import upload_wire
from treadle_payloads.spool import Source, Spool
from treadle_payloads.store import PayloadReference
from treadle_payloads.upload_wire import Answer, BrokenUploadError
from treadle_runtime.fields import at_least, check_run

log = logging.getLogger(__name__)

UPLOADS = 32
"""Uploads that run at once; others wait to be let in."""

SILENCE_S = 10.0
"""Silence of a peer in the middle of its upload after which it is given up."""


@dataclass(frozen=True, slots=True)
class Uploads:
    """What a sidecar takes in for one run."""

    spool: Spool
    run_id: str
    path: Path
    """The unix socket."""

    async def serve(self) -> None:
        """Takes uploads, forever; cancelling it cuts those on their way."""
        loop = asyncio.get_running_loop()
        open_ones: set[socket.socket] = set()
        closing = threading.Event()
        with self._listening() as listener, ThreadPoolExecutor(UPLOADS, "upload") as threads:
            taking = [
                loop.run_in_executor(threads, self._take_each, listener, open_ones, closing)
                for _ in range(UPLOADS)
            ]
            try:
                await asyncio.gather(*taking)
            finally:
                closing.set()
                for each in (listener, *list(open_ones)):
                    with contextlib.suppress(OSError):  # it has ended by itself
                        each.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _listening(self) -> Generator[socket.socket]:
        self.path.unlink(missing_ok=True)  # of a life before; the address is ours
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self.path))
            listener.listen(1024)
            yield listener

    def _take_each(
        self, listener: socket.socket, open_ones: set[socket.socket], closing: threading.Event
    ) -> None:
        """One upload after the other, in a thread, until it is `closing` and all are shut down."""
        while not closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                if closing.is_set():
                    return
                raise
            with connection:
                open_ones.add(connection)
                if not closing.is_set():  # else nobody would cut it
                    self._take(connection)
                open_ones.discard(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_S)
        try:
            try:
                self._receive(connection)
            except TreadleError as error:
                connection.sendall(upload_wire.error_to_wire(error))
        except BrokenUploadError as error:
            log.warning("an upload broke off: %s", error)
        except TimeoutError:
            log.warning("an upload was silent for %.0f s", SILENCE_S)
        except ConnectionError as error:
            log.info("an upload broke off: %s", error)
        except Exception:
            log.exception("an upload failed")

    def _receive(self, connection: socket.socket) -> None:
        read = upload_wire.reader(connection)
        header = upload_wire.header_from_wire(upload_wire.read_message(read))
        check_run(self.run_id, header.run_id)
        reference = PayloadReference(header.sha256, at_least("size", header.size, 0))
        holder = checked_id("holder", header.holder)

        def wanted() -> Source:
            connection.sendall(upload_wire.answer_to_wire(Answer(self.spool.epoch, send=True)))
            return read

        self.spool.put(reference, holder, wanted)
        connection.sendall(upload_wire.answer_to_wire(Answer(self.spool.epoch)))


def checked_path(path: Path) -> Path:
    """Raises InvalidFieldError for a path that no unix socket can have."""
    if len(str(path)) > 107:
        raise InvalidFieldError("upload", limit="a path of at most 107 bytes", value=path)
    return path
