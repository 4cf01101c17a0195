"""Reads payloads through Ray's object store, for who may do without.

Whatever is not there in time is simply absent, and the reader goes on to another source.
"""

import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from treadle_core.errors import PayloadCorruptError
from treadle_payloads import ray_wire
from treadle_payloads.ray_cluster import RayConfig, child_environment
from treadle_payloads.store import PayloadReference

PAUSE_S = 10.0
"""How long a node, or a cluster, that did not answer is not asked again."""

_JOIN_S = 30.0
_MARGIN_S = 0.2
"""What a child gets less than its parent has, to hand over what came in time."""

_log = logging.getLogger(__name__)


class RayCache:
    """What the owners of a run's nodes hold. Threads may call it; one asks at a time.

    A child joins Ray, and dies with it; nothing of Ray is in this process. Never raises for what
    Ray does, and never takes longer than it was given.
    """

    def __init__(self, config: RayConfig) -> None:
        """The first call joins the cluster; until that is done there is nothing."""
        self._config = config
        self._asking = threading.Lock()
        self._child: _Child | None = None
        self._paused: dict[str, float] = {}
        """Until when nodes are not asked, and the whole cluster, under the empty name."""

    def get_many(
        self, references: Iterable[PayloadReference], timeout_s: float
    ) -> dict[str, memoryview]:
        """The bytes that came in time, checked, by sha256: read-only views of shared memory.

        The memory of a batch is in use until the last of its views is dropped.
        """
        deadline = time.monotonic() + timeout_s
        wanted = {ref.sha256: ref for ref in references if ref.node and not self._rests(ref.node)}
        if not wanted or self._rests("") or not self._asking.acquire(timeout=timeout_s):
            return {}
        try:
            self._child = self._child or _Child(self._config)
            if not self._child.has_joined():
                return {}
            views, failed = self._child.ask(wanted.values(), deadline)
        except (OSError, EOFError) as error:
            self._end_child()
            failed, views = {"": str(error) or type(error).__name__}, {}
        finally:
            self._asking.release()
        for node, why in failed.items():
            self._paused[node] = time.monotonic() + PAUSE_S
            _log.warning("Ray, %s: not asked for %.0f s: %s", node or "any node", PAUSE_S, why)
        return {sha256: view for sha256, view in views.items() if _is_whole(wanted[sha256], view)}

    def close(self) -> None:
        """Ends the child; views stay."""
        with self._asking:
            self._end_child()

    def _end_child(self) -> None:
        if self._child:
            self._child.kill()
            self._child = None

    def _rests(self, name: str) -> bool:
        return time.monotonic() < self._paused.get(name, 0.0)


class _Child:
    """A process that is a driver of Ray."""

    def __init__(self, config: RayConfig) -> None:
        self._address = config.address
        self._joined = False
        self._give_up = time.monotonic() + _JOIN_S
        self._connection, its = socket.socketpair()
        command = [sys.executable, "-m", "treadle_payloads.ray_reader", *config.arguments()]
        with its:
            process = subprocess.Popen(  # noqa: S603, our own module
                [*command, "--socket", str(its.fileno())],
                env=dict(child_environment(config.address)),
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.kill = weakref.finalize(self, _end, process, self._connection)

    def has_joined(self) -> bool:
        """Does not wait. Raises OSError or EOFError if it never will."""
        if not self._joined and select.select([self._connection], [], [], 0)[0]:
            ray_wire.receive(self._connection)
            self._joined = True
        if not self._joined and time.monotonic() > self._give_up:
            raise TimeoutError(f"{self._address} was not joined in {_JOIN_S:.0f} s")
        return self._joined

    def ask(
        self, references: Iterable[PayloadReference], deadline: float
    ) -> tuple[dict[str, memoryview], Mapping[str, str]]:
        """What came, unchecked, and which nodes did not answer. Raises OSError or EOFError."""
        nodes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for reference in references:
            nodes[reference.node][reference.sha256] = reference.size
        left_s = max(0.001, deadline - time.monotonic())
        self._connection.settimeout(left_s)
        question = {"nodes": nodes, "timeout_s": max(left_s - _MARGIN_S, left_s / 2)}
        ray_wire.send(self._connection, question)
        answer, descriptors = ray_wire.receive(self._connection)
        return _views(answer["objects"], descriptors), answer["failed"]


def _end(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _views(
    objects: Mapping[str, tuple[int, int]], descriptors: Iterable[int]
) -> dict[str, memoryview]:
    """Slices of the file that came with an answer; closes it."""
    views: dict[str, memoryview] = {}
    for descriptor in descriptors:
        if objects:
            whole: Any = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            for sha256, (start, size) in objects.items():
                views[sha256] = memoryview(whole)[start : start + size]
        os.close(descriptor)
    return views


def _is_whole(reference: PayloadReference, view: memoryview) -> bool:
    try:
        reference.check(view)
    except PayloadCorruptError as error:
        _log.warning("Ray, %s: %s", reference.node, error)
        return False
    return True
