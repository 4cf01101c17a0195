"""The sender of a transport over communicators: keeps versions, and serves those who join.

A receiver that has an order joins the transfer of its version. The sender waits until the members
of the last group have joined too, or have failed to in time; the group is formed anew, under a new
epoch, only where its members changed. A launch that stands still ends the round: the group is left,
and whoever is alive joins again.
"""

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import TreadleError
from treadle_core.ids import checked_id
from treadle_weights import arenas
from treadle_weights.buckets import Bucket
from treadle_weights.channel import DEPTH, Terms
from treadle_weights.choosing import Chooser, Held
from treadle_weights.groups import Communicators, Group, GroupLostError, Launch
from treadle_weights.layouts import Layout
from treadle_weights.talk import Said, Talk, TalkEndedError, listener
from treadle_weights.transport import (
    Arena,
    ArenaFullError,
    ArenaMissingError,
    EpochMismatchError,
    TransferBusyError,
    VersionBackError,
)

log = logging.getLogger(__name__)

_BEAT_S = 1.0
"""How often those who wait are told to go on waiting."""


@dataclass(frozen=True, slots=True)
class _Join:
    """What a receiver said when it joined."""

    transfer: str
    epoch: int
    holds: str
    at: float


@dataclass(slots=True, eq=False)
class _Peer:
    """A receiver that is connected."""

    talk: Talk
    engine: str = ""
    join: _Join | None = None
    is_late: bool = False
    """It let a version go by; the next does not wait for it."""


@dataclass(frozen=True, slots=True)
class _Round:
    """One version, and who gets it now."""

    held: Held
    peers: Sequence[_Peer]
    joins: Sequence[_Join]


class Sender:
    """WeightSender that receivers come to; one per run at a time."""

    def __init__(self, run_id: str, terms: Terms, communicators: Communicators) -> None:
        """Listens; raises PortTakenError."""
        checked_id("run_id", run_id)
        self._terms = terms
        self._listener = listener(terms.host, terms.port)
        try:
            self._rendezvous = communicators.host(terms.host)
        except BaseException:
            self._listener.close()
            raise
        self._name = uuid.uuid4().hex
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._held: dict[str, Held] = {}
        self._kept = ""
        self._newest = 0
        self._peers: list[_Peer] = []
        self._group: Group | None = None
        self._members: Sequence[_Peer] = ()
        self.epoch = 0
        """Of the newest group."""
        self._chooser = Chooser(terms)
        self._is_closing = False
        self._listener.settimeout(_BEAT_S)
        self._threads = [
            threading.Thread(target=work, name=f"weights-{work.__name__.strip('_')}", daemon=True)
            for work in (self._accept, self._serve)
        ]
        for thread in self._threads:
            thread.start()

    def send(
        self, arena: Arena, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]
    ) -> dict[str, int]:
        transfer, version = self._terms.transfer(arena)
        arenas.check_sent(arena, layout)
        if not self._sending.acquire(blocking=False):
            raise TransferBusyError(
                f"{transfer}: another send is under way", field="arena.path", value=arena.path
            )
        try:
            if version < self._newest:
                raise VersionBackError(
                    f"version {version} comes after {self._newest}",
                    field="version",
                    limit=f">= {self._newest}",
                    value=version,
                )
            # Never over bytes that are on their way.
            data = _room(arena.size)
            digests = arenas.pack(layout, tensors, data)
            with self._changed:
                self._newest = version
                self._held[transfer] = Held(transfer, version, layout, data, digests)
                self._changed.notify_all()
            return digests
        finally:
            self._sending.release()

    def keep(self, arena: Arena) -> None:
        """Keeps it for late and new engines, and as the base of the delta after it."""
        transfer, version = self._terms.transfer(arena)
        with self._changed:
            if transfer in self._held:
                self._kept = transfer
            for other in [t for t, held in self._held.items() if held.version < version]:
                if other != self._kept:
                    del self._held[other]

    def discard(self, arena: Arena) -> None:
        transfer, _ = self._terms.transfer(arena)
        with self._changed:
            if transfer != self._kept:
                self._held.pop(transfer, None)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            peers = list(self._peers)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        for peer in peers:
            peer.talk.close()
        for thread in self._threads:
            thread.join(self._terms.stall_s + self._terms.form_s)
        self._held.clear()

    def _accept(self) -> None:
        """Takes connections, and tells who waits to go on waiting."""
        beat_at = time.monotonic()
        while not self._is_closing:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                pass
            except OSError:
                return  # closed
            else:
                peer = _Peer(Talk(connection))
                with self._changed:
                    self._peers.append(peer)
                name = f"weights-hear-{connection.fileno()}"
                threading.Thread(target=self._hear, args=(peer,), name=name, daemon=True).start()
            if time.monotonic() - beat_at >= _BEAT_S:
                beat_at = time.monotonic()
                self._beat()

    def _beat(self) -> None:
        with self._changed:
            waiting = [peer for peer in self._peers if peer.join]
        for peer in waiting:
            try:
                peer.talk.say(say="wait")
            except TalkEndedError:
                peer.talk.close()  # its reader takes it off the list

    def _hear(self, peer: _Peer) -> None:
        """Reads what a receiver says until it is gone."""
        try:
            while True:
                self._joined(peer, peer.talk.hear(None))
        except (TalkEndedError, KeyError, TypeError, ValueError) as error:
            log.info("engine %s is disconnected: %s", peer.engine or "unknown", error)
        finally:
            with self._changed:
                self._peers.remove(peer)
                self._changed.notify_all()
            peer.talk.close()

    def _joined(self, peer: _Peer, said: Said) -> None:
        join = _Join(
            str(said["transfer"]), int(said["epoch"]), str(said["holds"]), time.monotonic()
        )
        with self._changed:
            refusal = self._refusal(join)
            if refusal is None:
                peer.engine, peer.join, peer.is_late = str(said["engine"])[:100], join, False
                self._changed.notify_all()
        if refusal is not None:
            _refuse(peer, refusal)

    def _refusal(self, join: _Join) -> TreadleError | None:
        if join.epoch > self.epoch:
            return EpochMismatchError(
                f"epoch {join.epoch} was never formed",
                field="epoch",
                limit=self.epoch,
                value=join.epoch,
            )
        if join.transfer not in self._held:
            return ArenaMissingError(
                f"no transfer {join.transfer[:100]}",
                field="arena.path",
                limit=", ".join(self._held) or "none",
                value=join.transfer[:100],
            )
        return None

    def _serve(self) -> None:
        """One round after the other."""
        try:
            while (found := self._next()) is not None:
                try:
                    self._round(found)
                except (GroupLostError, TalkEndedError) as error:
                    log.warning("epoch %d ends: %s", self.epoch, error.message)
                    self._leave()
        finally:
            self._leave()
            if not self._is_closing:  # nobody may wait for a thread that is gone
                self._listener.close()
                for peer in list(self._peers):
                    peer.talk.close()

    def _next(self) -> _Round | None:
        """Waits until a version can go; None at the end."""
        with self._changed:
            while not self._is_closing:
                now = time.monotonic()
                moment = self._ready_at(now)
                if moment is not None and moment <= now:
                    found = self._begun()
                    if found is not None:
                        return found
                    continue
                self._changed.wait(None if moment is None else moment - now)
        return None

    def _ready_at(self, now: float) -> float | None:
        """When those who have joined are waited with no longer; None where nobody has."""
        joined = [peer for peer in self._peers if peer.join]
        first = min((peer.join.at for peer in joined if peer.join), default=None)
        if first is None:
            return None
        if any(not peer.join and not peer.is_late for peer in self._peers):
            return first + self._terms.join_s
        same = self._group is not None and set(joined) == set(self._members)
        return now if same else first + self._terms.gather_s

    def _begun(self) -> _Round | None:
        """The round of the newest version that somebody joined; who let it go by is late."""
        joins = {peer: peer.join for peer in self._peers if peer.join}
        for peer in self._peers:
            peer.is_late = peer not in joins
        wanted = max(
            (held for join in joins.values() if (held := self._held.get(join.transfer))),
            key=lambda held: held.version,
            default=None,
        )
        gone = [p for p, join in joins.items() if join.transfer not in self._held]
        chosen = {p: j for p, j in joins.items() if wanted and j.transfer == wanted.transfer}
        for peer in (*gone, *chosen):
            peer.join = None
        for peer in gone:
            _refuse(peer, ArenaMissingError("the version is over", field="arena.path"))
        if wanted is None or not chosen:
            return None
        peers = sorted(chosen, key=lambda peer: peer.engine)
        return _Round(wanted, peers, [chosen[peer] for peer in peers])

    def _round(self, found: _Round) -> None:
        group = self._group_of(found)
        encoding, data, buckets = self._chooser.payload(self._base(found), found.held)
        for peer in found.peers:
            peer.talk.say(
                say="go",
                transfer=found.held.transfer,
                epoch=self.epoch,
                encoding=encoding,
                bytes=data.size,
            )
        began_at = time.monotonic()
        self._transmit(group, data, buckets)
        took_s = time.monotonic() - began_at
        self._chooser.note_link(data.size, took_s)
        log.info(
            "%s went to %d engines of epoch %d: %s, %d bytes in %d launches, %.1f ms",
            found.held.transfer,
            len(found.peers),
            self.epoch,
            encoding,
            data.size,
            len(buckets),
            took_s * 1e3,
        )

    def _group_of(self, found: _Round) -> Group:
        """The group of the peers: the one that there is, or a new one."""
        is_held = all(join.epoch == self.epoch for join in found.joins)
        if self._group is not None and is_held and list(found.peers) == list(self._members):
            return self._group
        self._leave()
        with self._changed:
            self.epoch += 1
        name, size = f"{self._name}.{self.epoch}", len(found.peers) + 1
        for rank, peer in enumerate(found.peers, 1):
            peer.talk.say(
                say="form",
                name=name,
                epoch=self.epoch,
                rank=rank,
                size=size,
                port=self._rendezvous.port,
            )
        self._group = self._rendezvous.form(name, 0, size)
        self._members = tuple(found.peers)
        return self._group

    def _leave(self) -> None:
        group, self._group, self._members = self._group, None, ()
        if group is not None:
            group.close()

    def _base(self, found: _Round) -> Held | None:
        with self._changed:
            base = self._held.get(self._kept)
        if base is None or base.layout != found.held.layout or base is found.held:
            return None
        return base if all(join.holds == base.transfer for join in found.joins) else None

    def _transmit(self, group: Group, data: NDArray[np.uint8], buckets: Sequence[Bucket]) -> None:
        """All buckets in order, DEPTH of them under way."""
        began_at, sent = time.monotonic(), 0
        launches: deque[Launch] = deque()
        for bucket in buckets:
            if len(launches) == DEPTH:
                launches.popleft().wait()
            launches.append(group.broadcast(data[bucket.start : bucket.stop]))
            sent += bucket.size
            if self._terms.most_bytes_per_s is not None:
                due_at = began_at + sent / self._terms.most_bytes_per_s
                time.sleep(max(0.0, due_at - time.monotonic()))
        for launch in launches:
            launch.wait()


def _refuse(peer: _Peer, error: TreadleError) -> None:
    try:
        peer.talk.say(
            say="refused",
            reason=error.reason,
            message=error.message,
            field=error.field,
            limit=error.limit,
            value=error.value,
        )
    except TalkEndedError:
        peer.talk.close()


def _room(size: int) -> NDArray[np.uint8]:
    try:
        return np.empty(size, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ArenaFullError(
            f"no room for {size} bytes", field="arena.size", limit="free memory", value=size
        ) from error
