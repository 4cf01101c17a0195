"""The receiver of a transport over communicators: joins, takes buckets, places and verifies them.

While one bucket is on the wire the one before is placed by a thread of its own. A group that is
lost is left, and the transfer joined again, until it is whole or the time is up.
"""

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import TreadleError
from treadle_weights import arenas, delta
from treadle_weights.buckets import Bucket, packed, place
from treadle_weights.channel import DEPTH, Terms, cut, placed
from treadle_weights.groups import Communicators, Group, GroupLostError, Launch, Rendezvous
from treadle_weights.layouts import Layout
from treadle_weights.talk import Said, Talk, TalkEndedError, connect
from treadle_weights.transport import (
    ArenaCorruptError,
    ArenaMissingError,
    EpochMismatchError,
    LoadOrder,
    Receipt,
    TransferBusyError,
    TransferLostError,
)

log = logging.getLogger(__name__)

_REFUSALS: Mapping[str, type[TreadleError]] = {
    each.reason: each for each in (ArenaMissingError, EpochMismatchError)
}

Take = Callable[[int, NDArray[np.uint8]], None]
"""Does with the bucket of an index what is to be done with its bytes."""


@dataclass(frozen=True, slots=True)
class _Holding:
    """What lies in the arrival buffer, verified."""

    transfer: str
    digests: Mapping[str, int]
    target: Layout
    address: int
    """Of the buffer."""


class Receiver:
    """WeightReceiver of one engine."""

    def __init__(self, terms: Terms, communicators: Communicators) -> None:
        self._terms = terms
        self._communicators = communicators
        self._engine = uuid.uuid4().hex
        self._busy = threading.Lock()
        self._placing = ThreadPoolExecutor(1, thread_name_prefix="weights-place")
        self._talk: Talk | None = None
        self._rendezvous: Rendezvous | None = None
        self._group: Group | None = None
        self._epoch = 0
        """Of the group; 0 for none."""
        self._told = 0
        """The newest epoch that the sender named."""
        self._holding: _Holding | None = None
        self._buffers: list[NDArray[np.uint8]] = []

    def receive(self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> Receipt:
        arenas.check_received(order, target, buffer)
        transfer, _ = self._terms.transfer(order.arena)
        if not self._busy.acquire(blocking=False):
            raise TransferBusyError(
                f"version {order.version}: another is being received",
                field="version",
                value=order.version,
            )
        try:
            return self._receive(transfer, order, target, buffer)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Leaves the group and the sender."""
        self._disconnect()
        self._placing.shutdown()

    def _receive(
        self, transfer: str, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]
    ) -> Receipt:
        until = time.monotonic() + self._terms.give_up_s
        while True:
            try:
                return self._attempt(transfer, order, target, buffer)
            except GroupLostError as error:
                self._leave()
                log.warning("version %d: %s", order.version, error.message)
                if time.monotonic() >= until:
                    raise TransferLostError(
                        f"version {order.version}: {error.message}",
                        field="version",
                        limit=f"whole within {self._terms.give_up_s:g} s",
                        value=order.version,
                    ) from error
            except TalkEndedError as error:
                self._disconnect()
                raise ArenaMissingError(
                    f"{order.arena.path}: {error.message}",
                    field="arena.path",
                    limit="a sender that answers",
                    value=order.arena.path,
                ) from error

    def _attempt(
        self, transfer: str, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]
    ) -> Receipt:
        """Joins and follows what the sender says; raises GroupLostError and TalkEndedError."""
        talk = self._connected()
        began_at = time.monotonic()
        talk.say(
            say="join",
            transfer=transfer,
            engine=self._engine,
            epoch=self._epoch,
            holds=self._base(target, buffer),
        )
        while True:
            said = talk.hear(self._terms.answer_s)
            match said.get("say"):
                case "form":
                    self._form(talk, said)
                case "go" if self._is_ours(said, transfer):
                    return self._take(said, transfer, order, target, buffer, began_at)
                case "refused":
                    raise _refusal(said)
                case _:
                    pass  # `wait`, or said to a group that is gone

    def _connected(self) -> Talk:
        if self._talk is None:
            terms = self._terms
            self._talk = connect(terms.host, terms.port, terms.form_s)
            self._told = 0
        return self._talk

    def _form(self, talk: Talk, said: Said) -> None:
        epoch, port, name, rank, size = (
            _of(said, int, "epoch"),
            _of(said, int, "port"),
            *(_of(said, kind, key) for kind, key in ((str, "name"), (int, "rank"), (int, "size"))),
        )
        if epoch <= self._told:
            return
        self._leave()
        self._told = epoch
        if self._rendezvous is None:
            self._rendezvous = self._communicators.join(self._terms.host, port, talk.own)
        self._group = self._rendezvous.form(name, rank, size)
        self._epoch = epoch

    def _is_ours(self, said: Said, transfer: str) -> bool:
        """Whether a `go` is for the group that we are in; one for a group that is gone is not."""
        epoch = _of(said, int, "epoch")
        if epoch > self._told:
            raise EpochMismatchError(
                f"epoch {epoch} was never formed", field="epoch", limit=self._told, value=epoch
            )
        if epoch != self._epoch:
            return False
        if said.get("transfer") != transfer:
            self._leave()
            raise ArenaMissingError(
                "the group carries another version",
                field="transfer",
                limit=transfer,
                value=said.get("transfer"),
            )
        return True

    def _take(
        self,
        said: Said,
        transfer: str,
        order: LoadOrder,
        target: Layout,
        buffer: NDArray[np.uint8],
        began_at: float,
    ) -> Receipt:
        """The version, whole and verified, in `buffer`."""
        base, self._holding = self._holding, None
        size, encoding = _of(said, int, "bytes"), str(said.get("encoding"))
        if encoding == "dense" and size != order.source.size():
            self._leave()
            raise ArenaCorruptError(
                f"version {order.version}: {size} bytes are announced",
                field="bytes",
                limit=order.source.size(),
                value=size,
            )
        try:
            if encoding == "dense":
                launches, arrived_at = self._dense(order, target, buffer)
            else:
                launches, arrived_at = self._changes(size, order, target, buffer, base)
        except BaseException:
            self._leave()
            raise
        loaded_at = time.monotonic()
        arenas.verify(order, target, buffer)
        self._holding = _Holding(transfer, order.digests, target, buffer.ctypes.data)
        return Receipt(
            arrived_at - began_at,
            loaded_at - arrived_at,
            time.monotonic() - loaded_at,
            size,
            launches,
            encoding,
            self._epoch,
        )

    def _dense(
        self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]
    ) -> tuple[int, float]:
        """Takes and places all; returns the number of launches and when the last had ended."""
        how = (self._terms.bucket_bytes, self._terms.is_packed)
        found = placed(order.copies, order.source, how[0], is_packed=how[1])
        buckets = cut(order.source, how[0], is_packed=how[1])

        def take(index: int, data: NDArray[np.uint8]) -> None:
            place(found[index], data, target, buffer)

        return len(buckets), self._buckets(buckets, take)

    def _changes(
        self,
        size: int,
        order: LoadOrder,
        target: Layout,
        buffer: NDArray[np.uint8],
        base: _Holding | None,
    ) -> tuple[int, float]:
        """Takes a delta and writes it over its base."""
        if base is None:
            raise _other_base(order.version, "none")
        data = np.empty(size, np.uint8)
        buckets = packed(size, self._terms.bucket_bytes)

        def take(index: int, part: NDArray[np.uint8]) -> None:
            data[buckets[index].start : buckets[index].stop] = part

        arrived_at = self._buckets(buckets, take)
        changes = delta.decode(data, order.source.tensors)
        for name, change in changes.items():
            if name in target.by_tensor and base.digests.get(name) != change.base:
                raise _other_base(order.version, name)
        delta.apply(changes, target, buffer)
        return len(buckets), arrived_at

    def _buckets(self, buckets: Sequence[Bucket], take: Take) -> float:
        """Takes all buckets: DEPTH on the wire while another is placed. Says when the last came."""
        group = self._group
        if group is None:
            raise GroupLostError("no group", field="group")
        rooms = self._rooms(max((bucket.size for bucket in buckets), default=0))
        under_way: deque[tuple[int, Launch, NDArray[np.uint8]]] = deque()
        used: list[Future[None] | None] = [None] * len(rooms)

        def land() -> None:
            index, launch, data = under_way.popleft()
            launch.wait()
            used[index % len(rooms)] = self._placing.submit(partial(take, index, data))

        try:
            for index, bucket in enumerate(buckets):
                if len(under_way) == DEPTH:
                    land()
                before = used[index % len(rooms)]
                if before is not None:
                    before.result()
                data = rooms[index % len(rooms)][: bucket.size]
                under_way.append((index, group.broadcast(data), data))
            while under_way:
                land()
            return time.monotonic()
        finally:
            for placing in used:
                if placing is not None:
                    placing.result()

    def _rooms(self, size: int) -> list[NDArray[np.uint8]]:
        """One for each launch under way, and one that is placed."""
        if not self._buffers or self._buffers[0].size < size:
            self._buffers = [np.empty(size, np.uint8) for _ in range(DEPTH + 1)]
        return self._buffers

    def _base(self, target: Layout, buffer: NDArray[np.uint8]) -> str:
        """The transfer of what lies in `buffer`; empty where that is not known."""
        held = self._holding
        if held is None or (held.target, held.address) != (target, buffer.ctypes.data):
            return ""
        return held.transfer

    def _leave(self) -> None:
        """Rooms are left behind too: a launch that was given up may still write to them."""
        group, self._group, self._epoch = self._group, None, 0
        if group is not None:
            self._buffers = []
            group.close()

    def _disconnect(self) -> None:
        self._leave()
        self._rendezvous = None
        talk, self._talk = self._talk, None
        if talk is not None:
            talk.close()


def _of(said: Said, kind: type, key: str) -> Any:
    value = said.get(key)
    if type(value) is not kind:
        raise TalkEndedError(f"{key}: expected {kind.__name__}, got {str(value)[:40]}", field=key)
    return value


def _refusal(said: Said) -> TreadleError:
    error = _REFUSALS.get(str(said.get("reason")), ArenaMissingError)
    return error(
        str(said.get("message")),
        field=str(said.get("field")),
        limit=said.get("limit"),
        value=said.get("value"),
    )


def _other_base(version: int, name: str) -> ArenaCorruptError:
    return ArenaCorruptError(
        f"version {version}: the delta is of another base than lies here ({name})",
        field=name,
        limit="the digest of what lies here",
        value="another",
    )
