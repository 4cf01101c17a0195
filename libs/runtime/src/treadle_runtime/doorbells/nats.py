"""Bells over NATS JetStream: a stream a run, a subject a topic, the newest ring of each kept.

Everything on the broker is made again whenever a connection is: stream and consumer of a broker
that lost its state too. Whoever connects takes it that all of its topics were rung meanwhile.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig
from nats.js.errors import FetchTimeoutError

from treadle_runtime.doorbell import SWEEP_S, Doorbell, Topic
from treadle_runtime.doorbells.memory import MemoryDoorbell

log = logging.getLogger(__name__)

_GATHER_S = 0.01
"""Pause after a ring: those that come meanwhile are one."""
_AGAIN_S = 0.5
"""Pause before the next connection."""
_HEARTBEAT_S = 1.0
"""How often the broker says that there is nothing; silence over a whole fetch means it is gone."""
_CANCELS = 3
"""A client may miss a cancellation that comes together with an answer."""
_FORGET_S = 60.0
"""After so long without its process the broker forgets a consumer."""
_MOST_BYTES = 65536
_BROKEN = (NatsError, OSError, TimeoutError, ValueError)
"""What a broker that is away, stops or starts anew makes its client raise."""


class NatsDoorbell(Doorbell):
    """Doorbell `nats`. A broker that is away costs time, and never a call or a process."""

    def __init__(
        self, *, run_id: str, url: str, timeout_s: float = 2.0, hears: Sequence[Topic] = ()
    ) -> None:
        """`url` as `nats://host:port`; `timeout_s` bounds each request to the broker."""
        self._stream = f"treadle-{run_id}"
        self._subjects = {topic: f"treadle.{run_id}.{topic}" for topic in Topic}
        self._url = url
        self._timeout_s = timeout_s
        self._near = MemoryDoorbell(run_id=run_id, hears=hears)
        self._topics = {self._subjects[topic]: topic for topic in hears}
        self._due: set[Topic] = set()
        self._work = asyncio.Event()
        self._counts = {"rings_sent": 0, "rings_failed": 0, "rings_heard": 0}
        self._live = False
        self._trouble = ""
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "NatsDoorbell":
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        for _attempt in range(_CANCELS):
            if self._keeping is not None and not self._keeping.done():
                self._keeping.cancel()
                await asyncio.wait({self._keeping}, timeout=self._timeout_s)

    @property
    def is_live(self) -> bool:
        return self._live

    def ring(self, topic: Topic) -> None:
        self._due.add(topic)
        self._work.set()

    async def wait(self, topic: Topic, timeout_s: float) -> None:
        await self._near.wait(topic, timeout_s)

    def row(self) -> dict[str, float]:
        return dict(self._counts)

    async def _keep(self) -> None:
        """Connects, works until that fails, and connects again, until it is cancelled."""
        while True:
            try:
                async with self._connected() as stream, asyncio.TaskGroup() as group:
                    group.create_task(self._send(stream))
                    if self._topics:
                        group.create_task(self._hear(stream))
                    self._tell("")
            except* Exception as errors:  # noqa: BLE001, a client's surprise costs no process
                self._tell(repr(errors.exceptions[0]))
            finally:
                self._live = False
            await asyncio.sleep(_AGAIN_S)

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncGenerator[JetStreamContext]:
        """A connection with the run's stream behind it. It is not mended but made anew."""
        client = Client()
        try:
            async with asyncio.timeout(2 * self._timeout_s):
                await client.connect(
                    self._url,
                    allow_reconnect=False,
                    connect_timeout=max(1, int(self._timeout_s)),
                    reconnect_time_wait=1,
                    error_cb=_unheard,
                    name=self._stream,
                )
                stream = client.jetstream(timeout=self._timeout_s)
                await stream.add_stream(self._configuration())
            yield stream
        finally:
            with contextlib.suppress(*_BROKEN):
                async with asyncio.timeout(self._timeout_s):
                    await client.close()

    def _configuration(self) -> StreamConfig:
        """In the broker's memory: there is nothing in it that would be missed."""
        return StreamConfig(
            name=self._stream,
            subjects=list(self._subjects.values()),
            storage=StorageType.MEMORY,
            max_msgs_per_subject=1,
            max_bytes=_MOST_BYTES,
        )

    async def _send(self, stream: JetStreamContext) -> None:
        while True:
            if not self._due:  # what a connection left due goes over the next one
                self._work.clear()
                await self._work.wait()
            for topic in sorted(self._due):
                try:
                    await stream.publish(self._subjects[topic], timeout=self._timeout_s)
                except _BROKEN:
                    self._counts["rings_failed"] += 1
                    raise
                self._due.discard(topic)
                self._counts["rings_sent"] += 1
            await asyncio.sleep(_GATHER_S)

    async def _hear(self, stream: JetStreamContext) -> None:
        consumer = ConsumerConfig(
            filter_subjects=list(self._topics),
            deliver_policy=DeliverPolicy.NEW,
            ack_policy=AckPolicy.NONE,
            max_deliver=-1,
            inactive_threshold=_FORGET_S,
            mem_storage=True,
        )
        pulled = await stream.pull_subscribe("", stream=self._stream, config=consumer)
        for topic in self._topics.values():
            self._near.ring(topic)
        self._live = True
        while True:
            try:
                messages = await pulled.fetch(timeout=SWEEP_S, heartbeat=_HEARTBEAT_S)
            except FetchTimeoutError:  # silence, with signs of life
                continue
            self._counts["rings_heard"] += len(messages)
            for message in messages:
                self._near.ring(self._topics[message.subject])

    def _tell(self, trouble: str) -> None:
        """Logs what is news."""
        if trouble and not self._trouble:
            log.warning("the doorbell %s is silent: %s", self._url, trouble)
        elif self._trouble and not trouble:
            log.info("the doorbell %s is back", self._url)
        self._trouble = trouble


async def _unheard(_: Exception) -> None:
    """Every failure also ends what was asked, where it is told once."""
