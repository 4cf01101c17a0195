"""For tests of servicers: a real server on a unix socket, in this process."""

import contextlib
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc.aio

from treadle_runtime.channel import connect
from treadle_runtime.interceptors import CallInterceptor


@contextlib.asynccontextmanager
async def running(
    register: Callable[[grpc.aio.Server], None], domain: str
) -> AsyncGenerator[grpc.aio.Channel]:
    """Serves what `register` adds, with the house's interceptor; yields a channel to it."""
    with tempfile.TemporaryDirectory(prefix="treadle") as directory:
        address = f"unix:{Path(directory) / 'socket'}"
        server = grpc.aio.server(interceptors=[CallInterceptor(domain)])
        register(server)
        server.add_insecure_port(address)
        await server.start()
        async with connect(address) as channel:
            try:
                yield channel
            finally:
                await server.stop(None)
