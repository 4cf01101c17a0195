"""Ranks over torch.distributed: gloo, and NCCL where every rank has a GPU of its own."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from treadle_trainer.ports import RanksLostError

_FIND_S = 60.0
"""How long a store may take to be reached, and to answer."""


class Store(Protocol):
    """What torch.distributed calls one: bytes by key, for all ranks."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def delete_key(self, key: str) -> bool: ...


class ProcessGroup:
    """The default group of this process; every rank forms it at the same time."""

    def __init__(self, store: Store, *, rank: int, size: int, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the others, as every method does."""
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        with self._lost("forming the group"):
            dist.init_process_group(
                _backend(),
                store=cast("Any", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )

    def gather(self, said: bytes) -> list[bytes]:
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(said)
        self.add_up(sizes)
        longest = int(sizes.max())
        if not longest:
            return [b""] * self.size
        mine = _tensor_of(said.ljust(longest, b"\0"))
        others = [torch.empty_like(mine) for _ in range(self.size)]
        with self._lost("gathering"):
            dist.all_gather(others, mine)
        return [
            bytes(each.numpy()[:size])
            for each, size in zip(others, cast("list[int]", sizes.tolist()), strict=True)
        ]

    def add_up(self, tensor: Tensor) -> None:
        with self._lost("adding up"):
            dist.all_reduce(tensor)

    def send(self, data: bytes, rank: int) -> None:
        """Sends bytes to a rank that receives as many."""
        with self._lost("sending"):
            dist.send(_tensor_of(data), rank)

    def receive(self, size: int) -> bytes:
        """So many bytes from rank 0."""
        found = torch.empty(size, dtype=torch.uint8)
        with self._lost("receiving"):
            dist.recv(found, 0)
        return bytes(found.numpy())

    @contextmanager
    def _lost(self, doing: str) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            raise lost(self.rank, doing, self._timeout_s, error) from error


def lost(rank: int, doing: str, timeout_s: float, error: object) -> RanksLostError:
    """The error of a rank whose peers are gone."""
    return RanksLostError(
        f"rank {rank}, {doing}: another rank is gone or hangs: {error}",
        field="rank_timeout_s",
        limit=timeout_s,
        value=doing,
    )


def use_gpu() -> None:
    """Makes this rank's GPU the one of the calling thread, where there are any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def _backend() -> str:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_own = torch.cuda.is_available() and torch.cuda.device_count() >= local
    return "cpu:gloo,cuda:nccl" if has_own else "gloo"


def _tensor_of(data: bytes) -> Tensor:
    # frombuffer wants something that it could write to.
    return cast("Callable[..., Tensor]", torch.frombuffer)(bytearray(data), dtype=torch.uint8)


def store_of(address: str, port: int, *, life: str, **options: Any) -> Store:
    """The store at an address, where the ranks find each other; of one life of theirs."""
    distributed = cast("Any", dist)
    timeout = timedelta(seconds=_FIND_S)
    store = distributed.TCPStore(address, port, timeout=timeout, wait_for_workers=False, **options)
    return distributed.PrefixStore(f"life-{life}", store)
