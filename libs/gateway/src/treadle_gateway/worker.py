"""Process that agents talk to: `python -m treadle_gateway.worker FD`, FD being a socket.

It speaks HTTP to clients and frames to the replica, whose engine samples. It ends when the replica
is gone, and what was said in its sessions with it.
"""

import asyncio
import gc
import logging
import os
import resource
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from tokenizers import Tokenizer

from treadle_gateway.app import Gateway
from treadle_gateway.frames import FRAMING, Say
from treadle_gateway.markup.template import Markup
from treadle_gateway.policy_line import PolicyLine
from treadle_gateway.records import outcome_to_map, segment_to_list, spec_from_map
from treadle_gateway.sampling import SamplingRule
from treadle_gateway.sessions import Sessions
from treadle_gateway.settings import GatewaySettings, settings_from_map
from treadle_gateway.takers import Takers
from treadle_gateway.turns import Turns
from treadle_runtime.workers import program
from treadle_runtime.workers.framing import FrameError

log = logging.getLogger(__name__)

KEEPALIVE_S = 75.0
"""Seconds after which a connection without a request is closed."""
STALLED_S = 60.0
"""A loop that does not turn for so long hangs; the process says where and ends."""
SWITCH_S = 0.0005
"""Most seconds for which a thread that renders lets the loop wait."""
BACKLOG = 1024
"""Connections that wait to be accepted."""
ACCEPTED_AT_ONCE = 16
"""Those that are accepted in one turn of the loop."""
GARBAGE = (10_000, 10, 100)
"""Objects between two collections of garbage, and how many of these look further back.

Those that look at all sessions hold the loop long, and find little: what is left of a session frees
itself, and what a request leaves is young.
"""
SEND_BYTES = 64 * 1024
"""Of a reply, that the kernel holds for a client that does not read; it takes up to twice that."""


class Worker(asyncio.Protocol):
    """The socket to the replica, and all that it is about."""

    def __init__(self) -> None:
        self._unpacker = FRAMING.unpacker()
        self._serving: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)  # noqa: S101, a socket's is one
        self._packer = FRAMING.packer(transport)

    def data_received(self, data: bytes) -> None:
        for say, fields in self._unpacker.feed(data):
            self._hear(say, fields)

    def connection_lost(self, exc: Exception | None) -> None:
        os._exit(0)

    def _hear(self, say: Say, fields: list[Any]) -> None:
        if self._serving is None:
            if say is not Say.START:
                raise FrameError(limit="START first", value=say.name)
            self._serving = asyncio.create_task(self._serve(*fields))
        elif say is Say.OPEN:
            session, digest, spec = fields
            self._sessions.open(session, digest, spec_from_map(spec))
            self._packer.send(Say.OPENED, session)
        elif say is Say.END:
            ending = asyncio.create_task(self._end(fields[0]))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        elif say is Say.TAKEN:
            self._takers.hear(*fields)
        elif say is Say.DRAIN:
            self._takers.draining = True
        else:
            self._policy.hear(say, fields)

    async def _serve(self, said: Mapping[str, Any], port: int) -> None:
        """Begins to listen, and says where."""
        try:
            settings, run_token_sha256 = settings_from_map(said)
            self._policy = PolicyLine(self._packer, settings.max_context)
            self._sessions = Sessions(
                lambda session, outcome: self._packer.send(
                    Say.OUTCOME, session, outcome_to_map(outcome)
                ),
                self._policy.show,
                settings.trained,
            )
            self._takers = Takers(self._packer, self._sessions)
            rule = SamplingRule(settings.other_sampling, settings.supported)
            gateway = Gateway(
                settings=settings,
                sessions=self._sessions,
                turns=Turns(self._policy, rule),
                takers=self._takers,
                markup=Markup(
                    settings.model_folder,
                    max_context=settings.max_context,
                    images=settings.images,
                ),
                vocabulary=_vocabulary(settings.model_folder),
                run_token_sha256=run_token_sha256,
            )
            port = await _listen(gateway.application(), settings, port)
            gc.collect()
            gc.freeze()
        except Exception as error:
            log.exception("the worker cannot serve")
            self._packer.send(Say.REFUSED, f"{type(error).__name__}: {error}")
        else:
            self._packer.send(Say.READY, port)

    async def _end(self, name: str) -> None:
        try:
            segments, counts, outcome = await self._sessions.end(name)
        except Exception:
            log.exception("session %s cannot be given up", name)
            self._packer.send(Say.LOST, name)
            return
        for segment in segments:
            self._packer.send(Say.SEGMENT, name, *segment_to_list(segment))
        self._packer.send(Say.ENDED, name, counts, outcome_to_map(outcome))


def _vocabulary(folder: Path) -> int:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


async def _listen(application: web.Application, settings: GatewaySettings, port: int) -> int:
    """Serves HTTP, or HTTPS with a certificate; returns the port."""
    logger = logging.getLogger(f"{__name__}.http")
    logger.addFilter(lambda record: not _is_clients_fault(record))
    runner = web.AppRunner(
        application,
        logger=logger,
        handler_cancellation=True,  # a client that left is not sampled for
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
    )
    await runner.setup()
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.create_server((settings.host, port), family=family, backlog=BACKLOG)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    site = web.SockSite(runner, listening, ssl_context=_tls(settings), backlog=ACCEPTED_AT_ONCE)
    await site.start()
    listening.listen(BACKLOG)  # the site has set it to what it accepts in one turn of the loop
    return listening.getsockname()[1]


def _is_clients_fault(record: logging.LogRecord) -> bool:
    """What is no HTTP is answered, and nothing that anybody here should look into."""
    return bool(record.exc_info) and isinstance(record.exc_info[1], HttpProcessingError)


def _tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    if settings.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.certificate, settings.private_key)
    return context


async def serve(line: socket.socket) -> None:
    """Serves the replica until it is gone."""
    await asyncio.get_running_loop().create_connection(Worker, sock=line)
    await program.stay(STALLED_S)


def main() -> None:
    """Takes the socket and serves."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a client is a descriptor
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*GARBAGE)
    program.run("gateway", serve)


if __name__ == "__main__":
    main()
