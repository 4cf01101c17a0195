"""Runs one service until its work is done or it is told to stop, then drains it."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.instrumentation import grpc as grpc_instrumentation
from opentelemetry.instrumentation.grpc import filters

from treadle_core.errors import InvalidFieldError
from treadle_runtime import address, failpoints, last_call, telemetry
from treadle_runtime.channel import MESSAGE_LIMIT
from treadle_runtime.config import BAD_CONFIGURATION, LOOPBACK, ServiceConfig
from treadle_runtime.drain_order import SUPERVISOR_FD
from treadle_runtime.interceptors import CallInterceptor
from treadle_runtime.plugins import PluginError

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 4096
"""Most calls that a service answers at once; what comes beyond is refused, RESOURCE_EXHAUSTED."""

_HEALTH_EVERY_S = 0.25


_claimed: dict[str, address.Address] = {}
"""What this process holds, by address; for as long as it lives."""


@dataclass(frozen=True, slots=True)
class Service:
    """What makes a service: its address, its servicers and the work that it does unasked."""

    name: str
    """`experience`, `rollout`, ...; the error domain is `treadle.<name>`."""
    listen: str
    register: Callable[[grpc.aio.Server], None]
    proto_services: tuple[str, ...]
    """Full names, for health and reflection."""
    background: tuple[Callable[[], Awaitable[None]], ...] = ()
    """Supervised: one that raises ends the process; when all have returned the work is done."""
    drain: Callable[[], Awaitable[None]] | None = None
    """Finishes or hands back what is running."""
    insecure_dev: bool = False
    """As `run.insecure_dev`: `listen` may be beyond loopback."""
    is_able: Callable[[], bool] = lambda: True
    """False while the service cannot do its work (its disk is full): health is NOT_SERVING then."""
    grace_s: float = 30.0
    """Most seconds that `drain` may take."""


class ServiceFailedError(RuntimeError):
    """A background task ended unexpectedly; its cause is the `__cause__`."""


async def serve(service: Service) -> None:
    """Serves until done, stopped or failed. Raises ServiceFailedError in the last case.

    Claims the address, unless that was done before.
    """
    stop = asyncio.Event()
    await claim(service.listen, insecure_dev=service.insecure_dev)
    server, healths = await _start(service)
    tasks = [asyncio.ensure_future(start()) for start in service.background]
    with _stop_signals(stop):
        telling = asyncio.ensure_future(_tell_health(service, healths))
        log.info("serving on %s", service.listen)
        try:
            await _until_done(tasks, stop)
        finally:
            telling.cancel()
            await healths.enter_graceful_shutdown()
            await _drain(service, tasks)
            await server.stop(grace=1.0)


async def claim(listen: str, *, insecure_dev: bool = False) -> None:
    """Stands by until no other process holds a unix socket's address; it is ours from then on.

    A service that takes something over when it starts claims its address before. Raises
    InvalidFieldError for an address that is open to others, unless `insecure_dev` allows that.
    """
    if not listen.startswith(LOOPBACK):
        if not insecure_dev:
            limit = "unix:/path or a loopback host:port"
            raise InvalidFieldError("listen", limit=limit, value=listen)
        log.warning("INSECURE: %s is open to all who reach it (run.insecure_dev)", listen)
    if listen.startswith("unix:") and listen not in _claimed:
        lock = Path(listen.removeprefix("unix:") + ".lock")
        _claimed[listen] = await address.hold(lock)


def run(config: ServiceConfig, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Entry of a service's process: logging, telemetry, the loop, and an honest exit status."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
    )
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    provider = telemetry.setup(name, config.run.id, config.run.otlp_endpoint)
    try:
        failpoints.arm(os.environ)
        last_call.begin(os.environ)
        asyncio.run(main())
    except (PluginError, InvalidFieldError) as error:
        sys.stderr.write(f"configuration: {error}\n")
        raise SystemExit(BAD_CONFIGURATION) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception:
        log.exception("%s failed", name)
        raise SystemExit(1) from None
    finally:
        provider.shutdown()
    log.info("%s is done", name)


_untraced = filters.any_of(
    filters.health_check(),
    filters.method_name("Read"),  # a stream whose caller leaves ends its span in another context
)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether gRPC says more than that the caller left in the middle of a stream."""
    return not record.getMessage().startswith("ExecuteBatchError")


OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.so_reuseport", 0),
    # Callers ask every few seconds whether the host of a call on its way is there (`channel`).
    ("grpc.http2.min_ping_interval_without_data_ms", 2000),
    ("grpc.http2.max_ping_strikes", 0),
)
"""Of every server."""


async def _start(service: Service) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    instrument = cast("Any", grpc_instrumentation)
    server = grpc.aio.server(
        interceptors=[
            instrument.aio_server_interceptor(filter_=filters.negate(_untraced)),
            CallInterceptor(f"treadle.{service.name}"),
        ],
        options=OPTIONS,
        maximum_concurrent_rpcs=CALLS_AT_ONCE,
    )
    service.register(server)
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    names = (*service.proto_services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        server.add_insecure_port(service.listen)
    except RuntimeError as error:  # all that gRPC says of an address that it cannot bind
        raise InvalidFieldError(
            "listen", limit="an address that is free", value=service.listen
        ) from error
    await server.start()
    return server, healths


async def _tell_health(service: Service, healths: health.aio.HealthServicer) -> None:
    """Follows `is_able`, forever."""
    told: bool | None = None
    while True:
        able = service.is_able()
        if able is not told:
            told = able
            states = health_pb2.HealthCheckResponse
            for name in ("", *service.proto_services):
                await healths.set(name, states.SERVING if able else states.NOT_SERVING)
        await asyncio.sleep(_HEALTH_EVERY_S)


async def _until_done(tasks: Sequence[asyncio.Future[None]], stop: asyncio.Event) -> None:
    stopped = asyncio.ensure_future(stop.wait())
    waiting: set[asyncio.Future[Any]] = {*tasks, stopped}
    try:
        while not stop.is_set() and (not tasks or waiting != {stopped}):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                if error := task.exception():
                    raise ServiceFailedError("a background task failed") from error
    finally:
        stopped.cancel()


async def _drain(service: Service, tasks: Sequence[asyncio.Future[None]]) -> None:
    failed = any(task.done() and not task.cancelled() and task.exception() for task in tasks)
    if service.drain is not None and not failed:
        try:
            await asyncio.wait_for(service.drain(), service.grace_s)
        except TimeoutError:
            log.warning("drain took longer than %.0f s; stopping as it is", service.grace_s)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not failed:
            log.error("a background task failed while draining", exc_info=result)


@contextlib.contextmanager
def _stop_signals(stop: asyncio.Event) -> Generator[None]:
    """Sets `stop` on SIGTERM, SIGINT and the supervisor's death; a second signal ends at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)
    descriptor = int(os.environ.get(SUPERVISOR_FD, "-1"))
    if descriptor >= 0:

        def on_supervisor_gone() -> None:
            loop.remove_reader(descriptor)
            log.warning("the supervisor is gone; draining")
            stop.set()

        loop.add_reader(descriptor, on_supervisor_gone)
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
        if descriptor >= 0:
            loop.remove_reader(descriptor)
