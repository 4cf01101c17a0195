"""Communicators over torch.distributed, backends gloo and nccl: the one module here with torch.

Groups stand beside the default group of the process, which may be a trainer's own: a refit that is
aborted aborts nothing of it. With nccl the bytes pass through two buffers on the device, so that
the copies there and back run while another bucket is on the wire.
"""

import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from treadle_core.errors import InvalidFieldError
from treadle_weights.groups import GroupLostError

_torch: Any = dist
"""Stores are exported, but not declared to be."""
_POLL_S = 0.0005
_DEVICE_BUFFERS = 2


class TorchCommunicators:
    """Communicators of one backend."""

    def __init__(self, backend: Literal["gloo", "nccl"], *, form_s: float, stall_s: float) -> None:
        """`form_s` bounds the forming of a group, `stall_s` the time of one launch.

        Raises InvalidFieldError where the backend cannot be had here.
        """
        available = dist.is_nccl_available() and torch.cuda.is_available()
        if backend == "nccl" and not available:
            raise InvalidFieldError("backend", limit="gloo: no NCCL or no GPU here", value="nccl")
        self._backend = backend
        self._form_s = form_s
        self._stall_s = stall_s

    def host(self, address: str) -> "TorchRendezvous":
        # The socket is bound before the store is given it: no other process can take the port.
        with socket.create_server((address, 0), backlog=256) as server:
            port: int = server.getsockname()[1]
            store = _torch.TCPStore(
                address,
                port,
                None,
                True,  # noqa: FBT003 - the signature is torch's
                timedelta(seconds=self._form_s),
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
        return self._rendezvous(store, address)

    def join(self, address: str, port: int, own: str) -> "TorchRendezvous":
        with _lost("finding the rendezvous"):
            store = _torch.TCPStore(
                address,
                port,
                None,
                False,  # noqa: FBT003 - the signature is torch's
                timedelta(seconds=self._form_s),
                wait_for_workers=False,
            )
        return self._rendezvous(store, own)

    def _rendezvous(self, store: Any, own: str) -> "TorchRendezvous":
        return TorchRendezvous(
            store, own, backend=self._backend, form_s=self._form_s, stall_s=self._stall_s
        )


class TorchRendezvous:
    """Rendezvous over a TCPStore; a group's keys in it begin with the group's name."""

    def __init__(
        self, store: Any, own: str, *, backend: str, form_s: float, stall_s: float
    ) -> None:
        self._store = store
        self._own = own
        self._backend = backend
        self._form_s = form_s
        self._stall_s = stall_s

    @property
    def port(self) -> int:
        return self._store.port

    def form(self, name: str, rank: int, size: int) -> "TorchGroup":
        store = _torch.PrefixStore(name, self._store)
        with _lost(f"forming group {name}"):
            make = self._nccl if self._backend == "nccl" else self._gloo
            return TorchGroup(make(store, rank, size), rank, self._backend, self._stall_s)

    def _gloo(self, store: Any, rank: int, size: int) -> Any:
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()  # noqa: SLF001 - the only way to name an address
        options._timeout = timedelta(seconds=self._form_s)  # noqa: SLF001
        options._devices = [gloo.create_device(hostname=self._own)]  # noqa: SLF001
        options._threads = 2  # noqa: SLF001
        return gloo(store, rank, size, options)

    def _nccl(self, store: Any, rank: int, size: int) -> Any:
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=self._form_s)  # noqa: SLF001
        group = nccl(store, rank, size, options)
        # A communicator is made by its first launch: here, so that a version does not pay for it.
        first = group.broadcast([torch.zeros(1, device="cuda")], _root())
        _await(first, self._form_s)
        return group


class TorchGroup:
    """Group over one process group."""

    def __init__(self, group: Any, rank: int, backend: str, stall_s: float) -> None:
        self._group = group
        self._rank = rank
        self._on_device = backend == "nccl"
        self._stall_s = stall_s
        self._buffers: list[Tensor] = []
        self._launched = 0

    def broadcast(self, data: NDArray[np.uint8]) -> "HostLaunch | DeviceLaunch":
        if self._group is None:
            raise _gone("broadcasting", "it is closed")
        host = torch.from_numpy(data)
        with _lost("broadcasting"):
            if not self._on_device:
                work = self._group.broadcast([host], _root())
                return HostLaunch(work, host, self._stall_s)
            device = self._device_buffer(host.numel())
            if not self._rank:
                device.copy_(host, non_blocking=True)
            work = self._group.broadcast([device], _root())
            return DeviceLaunch(work, device, host if self._rank else None, self._stall_s)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with _lost("leaving the group"):
                group.abort()

    def _device_buffer(self, size: int) -> Tensor:
        """The next of the buffers in turn; its launch before has ended."""
        index = self._launched % _DEVICE_BUFFERS
        self._launched += 1
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(0, dtype=torch.uint8, device="cuda"))
        if self._buffers[index].numel() < size:
            self._buffers[index] = torch.empty(size, dtype=torch.uint8, device="cuda")
        return self._buffers[index][:size]


class HostLaunch:
    """Launch on memory of the host."""

    def __init__(self, work: Any, data: Tensor, stall_s: float) -> None:
        self._work = work
        self._data = data  # lives as long as it is read or written
        self._stall_s = stall_s

    def wait(self) -> None:
        with _lost("waiting for a bucket"):
            self._work.wait(timedelta(seconds=self._stall_s))


class DeviceLaunch:
    """Launch on memory of the device; a receiver's bytes come back to the host."""

    def __init__(self, work: Any, device: Tensor, host: Tensor | None, stall_s: float) -> None:
        self._work = work
        self._device = device
        self._host = host
        self._stall_s = stall_s

    def wait(self) -> None:
        with _lost("waiting for a bucket"):
            _await(self._work, self._stall_s)
            if self._host is not None:
                self._host.copy_(self._device)


def _root() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _await(work: Any, timeout_s: float) -> None:
    """Until a launch on the device ends. Its own wait blocks no host, or one without a bound."""
    until = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > until:
            raise RuntimeError(f"no end within {timeout_s:g} s")
        time.sleep(_POLL_S)
    work.wait()


@contextmanager
def _lost(doing: str) -> Generator[None]:
    """What torch raises as GroupLostError; its messages are the only word on the cause."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise _gone(doing, str(error).partition("\n")[0].partition(" This is")[0][:300]) from error


def _gone(doing: str, why: str) -> GroupLostError:
    return GroupLostError(f"{doing}: {why}", field="group", limit="all members", value=why)


def communicators(backend: str, *, form_s: float, stall_s: float) -> TorchCommunicators:
    """The communicators of `backend`; raises InvalidFieldError."""
    if backend not in ("gloo", "nccl"):
        raise InvalidFieldError("backend", limit="gloo or nccl", value=backend)
    return TorchCommunicators(backend, form_s=form_s, stall_s=stall_s)
