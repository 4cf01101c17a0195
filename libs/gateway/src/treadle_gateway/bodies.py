"""Reads bodies of requests within bounds of size and time."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.settings import Limits


@dataclass(slots=True)
class BodyReader:
    """Reads whole bodies, and bounds what all that are on their way hold."""

    limits: Limits
    _held: int = field(default=0, init=False)

    async def read(self, request: web.Request) -> bytes:
        """A whole body, decompressed.

        Raises RefusedError: wrong type, too large, slow, broken, or busy with other bodies.
        """
        if request.content_type != "application/json" and "Content-Type" in request.headers:
            message = f"content-type: expected application/json, got {request.content_type[:80]}"
            raise RefusedError("wrong_type", message, field="content-type")
        if (request.content_length or 0) > self.limits.body_bytes:
            raise _too_large(self.limits)
        data = bytearray()
        try:
            if request.content.is_eof():  # it came with the head: there is nothing to wait for
                whole = request.content.read_nowait()
                self._check(len(whole), self._held + len(whole))
                return whole
            async with asyncio.timeout(self.limits.body_s):
                async for chunk in request.content.iter_any():
                    self._held += len(chunk)
                    data += chunk
                    self._check(len(data), self._held)
        except TimeoutError as error:
            message = f"the body did not arrive within {self.limits.body_s:g} s"
            raise RefusedError("slow", message) from error
        except (ClientPayloadError, HttpProcessingError, web.RequestPayloadError) as error:
            raise RefusedError("invalid", "the body cannot be read as its headers say") from error
        finally:
            self._held -= len(data)
        return bytes(data)

    def _check(self, size: int, held: int) -> None:
        if size > self.limits.body_bytes:
            raise _too_large(self.limits)
        if held > self.limits.bodies_bytes:
            message = f"bodies_bytes: bodies of {self.limits.bodies_bytes} bytes are on their way"
            raise RefusedError("busy", message, code="bodies_bytes", retry_after_s=RETRY_S)


def _too_large(limits: Limits) -> RefusedError:
    message = f"the body is larger than {limits.body_bytes} bytes"
    return RefusedError("too_large", message, limit=limits.body_bytes)
