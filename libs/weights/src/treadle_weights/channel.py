"""What both ends of a transport over communicators agree on: its terms, and names of transfers."""

import re
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_weights.buckets import Bucket, Piece, one_each, packed, pieces
from treadle_weights.layouts import ALIGNMENT, Layout
from treadle_weights.plan import Copy
from treadle_weights.transport import Arena

ENCODINGS = ("auto", "dense", "delta")
"""What a recipe may choose; `auto` takes what is expected to arrive first."""

DEPTH = 2
"""Launches under way at once on each side."""

_NAME = re.compile(r"(?P<run>[^/.]+)/(?P<version>[0-9]{1,10})")


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a transport over communicators; seconds and bytes.

    Construction raises InvalidFieldError.
    """

    host: str
    """Address that the sender listens at, and the receivers reach it by."""
    port: int
    backend: str
    encoding: str
    """One of ENCODINGS."""
    bucket_bytes: int
    """Most bytes of a launch."""
    is_packed: bool
    """Buckets are filled whatever tensors lie in them; else each tensor is a launch."""
    gather_s: float
    """How long a new group waits for more members."""
    join_s: float
    """How long a version waits for members of the group before."""
    form_s: float
    """Time to form a group."""
    stall_s: float
    """Time of a launch, after which a member stands still."""
    give_up_s: float
    """Time in which a receiver tries again."""
    most_bytes_per_s: float | None
    """The sender sends no faster; None: as fast as it goes."""
    is_insecure: bool
    """May listen beyond loopback: communicators know neither identity nor encryption."""

    def __post_init__(self) -> None:
        """Checks each field and their company."""
        if not 1 <= self.port <= 65535:
            raise InvalidFieldError("port", limit="1 to 65535", value=self.port)
        if self.encoding not in ENCODINGS:
            raise InvalidFieldError("encoding", limit=", ".join(ENCODINGS), value=self.encoding)
        if self.bucket_bytes < ALIGNMENT or self.bucket_bytes % ALIGNMENT:
            limit = f"a positive multiple of {ALIGNMENT}"
            raise InvalidFieldError("bucket_bytes", limit=limit, value=self.bucket_bytes)
        for name in ("gather_s", "join_s", "form_s", "stall_s", "give_up_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidFieldError(name, limit="> 0 s", value=getattr(self, name))
        if not _is_loopback(self.host) and not self.is_insecure:
            raise InvalidFieldError(
                "host", limit="a loopback address, or insecure_dev: true", value=self.host
            )
        if self.most_bytes_per_s is not None:
            least = DEPTH * self.bucket_bytes / self.stall_s
            if self.most_bytes_per_s <= least:
                limit = f"> {least:.0f}, so that {DEPTH} buckets take less than stall_s"
                raise InvalidFieldError(
                    "most_bytes_per_s", limit=limit, value=self.most_bytes_per_s
                )

    @property
    def answer_s(self) -> float:
        """Silence after which a sender is gone: it says `wait` more often."""
        return self.stall_s

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        """Raises InvalidFieldError."""
        return Arena(f"{self._prefix}{checked_id('run_id', run_id)}/{version}", size)

    def transfer(self, arena: Arena) -> tuple[str, int]:
        """A transfer's name and version.

        Raises InvalidFieldError for one elsewhere, whoever named it.
        """
        name = arena.path.removeprefix(self._prefix)
        found = _NAME.fullmatch(name)
        if not arena.path.startswith(self._prefix) or found is None:
            limit = f"{self._prefix}RUN/VERSION"
            raise InvalidFieldError("arena.path", limit=limit, value=arena.path[:200])
        return name, int(found["version"])

    @property
    def _prefix(self) -> str:
        return f"{self.backend}://{self.host}:{self.port}/"


def cut(layout: Layout, bucket_bytes: int, *, is_packed: bool) -> tuple[Bucket, ...]:
    """The launches of a dense version; the same on both ends."""
    return packed(layout.size(), bucket_bytes) if is_packed else one_each(layout)


@lru_cache(maxsize=8)
def placed(
    copies: tuple[Copy, ...], source: Layout, bucket_bytes: int, *, is_packed: bool
) -> tuple[tuple[Piece, ...], ...]:
    """What each launch brings. Layouts stay, versions come and go."""
    return pieces(copies, source, cut(source, bucket_bytes, is_packed=is_packed))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
