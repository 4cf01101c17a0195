"""The Group port: a communicator of a sender (rank 0) and its receivers (ranks 1 and on).

One group lives over many versions; a change of its members makes a new one, under a new epoch.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import Kind, TreadleError


class GroupLostError(TreadleError):
    """A member died, stood still or was cut off; the group is of no use any more."""

    kind = Kind.UNAVAILABLE
    reason = "GROUP_LOST"


class Launch(Protocol):
    """One broadcast under way."""

    def wait(self) -> None:
        """Until the bytes are there, or have been taken; raises GroupLostError in bounded time."""
        ...


class Group(Protocol):
    """A communicator. Calls come from one thread at a time."""

    def broadcast(self, data: NDArray[np.uint8]) -> Launch:
        """Starts to send `data` of rank 0 to `data` of the others, uint8 [N], N alike on all.

        Launches end in the order of their start; `data` is not touched until its launch has ended.
        """
        ...

    def close(self) -> None:
        """Leaves the group, whatever the others do; what is under way fails. Idempotent."""
        ...


class Rendezvous(Protocol):
    """Where a sender and its receivers find each other to form groups."""

    @property
    def port(self) -> int:
        """Where receivers reach it, on the sender's host."""
        ...

    def form(self, name: str, rank: int, size: int) -> Group:
        """Joins the group `name`; returns when all `size` members have.

        Raises GroupLostError when they have not in time.
        """
        ...


class Communicators(Protocol):
    """One kind of communicator."""

    def host(self, address: str) -> Rendezvous:
        """A new rendezvous at a free port of `address`, for the sender."""
        ...

    def join(self, address: str, port: int, own: str) -> Rendezvous:
        """The sender's rendezvous, for a receiver whose own address is `own`.

        Raises GroupLostError.
        """
        ...
