"""Ledger `redis`: a list of transitions on a Redis server, one script an append.

Keys of a run are `treadle:{RUN}:*`, so that they lie on one node: `meta` (format, epochs,
position), `head` and `journal` (rows; the head stands for all up to `meta.condensed`), `inline`
(payloads by episode), `active` (who writes, as long as it lives), `staged` (a head that is being
written).
"""

import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters import redis_rows
from treadle_experience.adapters import redis_scripts as scripts
from treadle_experience.adapters.archive import Archive, Row
from treadle_experience.adapters.holder import is_dead, this_process
from treadle_experience.adapters.redis_anchor import Anchor
from treadle_experience.adapters.redis_server import RedisServer
from treadle_experience.core.errors import (
    LedgerAwayError,
    LedgerFormatError,
    LedgerHeldError,
    LedgerLostError,
    WriterFencedError,
)
from treadle_experience.core.transitions import Transition
from treadle_experience.ports import Durability, Snapshot
from treadle_runtime.failpoints import failpoint

FORMAT = "1"
"""Raised when a reader of the old format could not follow."""

LIFE_S = 6.0
"""A writer that has not been heard of for so long may be followed by another."""

_AT_ONCE = 500
"""Rows that one command reads or writes, but for an append."""
_LOOKS = 20
_KEYS = ("meta", "journal", "inline", "head", "staged", "active")


@dataclass(slots=True)
class _Ahead:
    """What a standby has read, for a load that is short."""

    condensed: int
    """Position that its head stands for."""
    head: list[Transition]
    tail: list[Transition]


class RedisLedger:
    """Ledger plugin `redis`. `durability` is what is declared, and demanded of the server."""

    def __init__(
        self,
        run_dir: str | Path,
        url: str,
        durability: str = "host",
        archive: str | None = None,
        timeout_s: float = 4.0,
        patience_s: float = 20.0,
    ) -> None:
        """Takes the server's URL (`redis://`, `rediss://`, `unix://`); connects on the first call.

        `archive` is a directory on another disk or host, for durability `fleet`. `timeout_s` bounds
        each answer of the server, `patience_s` how long an operation is tried again. Raises
        InvalidFieldError for what these cannot be.
        """
        if durability not in list(Durability):
            raise InvalidFieldError(
                "ledger.durability", limit="process, host or fleet", value=durability
            )
        if (durability == Durability.FLEET) != (archive is not None):
            raise InvalidFieldError(
                "ledger.archive",
                limit="a directory with durability fleet, else none",
                value=archive,
            )
        self.durability = Durability(durability)
        self._server = RedisServer(url, self.durability, timeout_s, patience_s)
        self._anchor = Anchor(Path(run_dir))
        self._archive = Archive(Path(archive)) if archive else None
        self._keys: dict[str, str] = {}
        self._writer_epoch = 0
        self._position = 0
        self._ahead: _Ahead | None = None

    def acquire(self, run_id: str) -> int:
        self._bind(run_id)
        known = self._known()
        epoch, position, condensed = self._take_over(known)
        if position < known:
            raise _put_back(position, known)
        self._writer_epoch, self._position = epoch, position
        if self._archive:
            self._archive.open(epoch)
            self._archive_from(condensed)
        self._anchor.advance(position, epoch)
        return epoch

    def load(self) -> Iterable[Transition]:
        ahead, self._ahead, meta = self._ahead, None, self._meta()
        condensed, position = int(meta["condensed"]), int(meta["position"])
        if ahead is None or ahead.condensed != condensed or len(ahead.tail) > position - condensed:
            ahead = _Ahead(condensed, list(self._transitions("head")), [])
        yield from ahead.head
        yield from ahead.tail
        yield from self._transitions("journal", len(ahead.tail))

    def follow(self) -> None:
        self._name_keys(self._anchor.read())
        condensed, ahead = int(self._meta()["condensed"]), self._ahead
        if ahead is None or ahead.condensed != condensed:
            ahead = _Ahead(condensed, list(self._transitions("head")), [])
        ahead.tail += self._transitions("journal", len(ahead.tail))
        # What was condensed meanwhile moved the rows that were read.
        self._ahead = ahead if int(self._meta()["condensed"]) == condensed else None

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        rows = [redis_rows.dump(each) for each in transitions]
        failpoint("experience.redis.before_append")
        self._push(rows, transitions, writer_epoch)
        if self._archive and rows:
            # Rows that a try before had archived are not archived again.
            known = self._archive.position - self._position
            numbered = enumerate(zip(rows, transitions, strict=True), start=self._position + 1)
            self._archive.append(
                [Row(at, row, redis_rows.payload(each)) for at, (row, each) in numbered][known:]
            )
        self._position += len(rows)
        self._anchor.advance(self._position, writer_epoch)

    def condense(self, head: Sequence[Transition], position: int, writer_epoch: int) -> None:
        rows = [redis_rows.dump(each) for each in head]
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            self._run(scripts.STAGE, ("meta", "staged"), writer_epoch, (start, *part))
        failpoint("experience.redis.before_condensed")
        keys = ("meta", "journal", "head", "staged")
        self._run(scripts.CONDENSE, keys, writer_epoch, (position, len(rows)))

    def read(self) -> Snapshot:
        self._name_keys(self._anchor.read())
        for _ in range(_LOOKS):
            before = self._meta()
            position, condensed = int(before["position"]), int(before["condensed"])
            tail = itertools.islice(self._transitions("journal"), position - condensed)
            journal = [*self._transitions("head"), *tail]
            if self._meta()["removals"] == before["removals"]:
                return Snapshot(position, journal)
        raise LedgerAwayError("the ledger changes faster than it can be read", field="ledger")

    def restore(self) -> int:
        """Brings a server that was emptied, or put back, to what the archive has.

        Returns how many rows were missing. Raises as `acquire`, and InvalidFieldError without an
        archive.
        """
        if self._archive is None:
            raise InvalidFieldError("ledger.archive", limit="a directory", value="none")
        self._bind(self._anchor.read())
        epoch, position, _ = self._take_over(known=0)
        self._writer_epoch = epoch
        missing = 0
        rows = self._archive.rows(position)
        while part := list(itertools.islice(rows, _AT_ONCE)):
            self._position = part[0].position - 1
            where = "ledger.archive"
            found = [redis_rows.Parsed(each.row, where).transition(each.inline) for each in part]
            self._push([each.row for each in part], found, epoch)
            missing += len(part)
        self.resign()
        return missing

    def beat(self) -> None:
        if not self._writer_epoch:
            return
        arguments = (this_process(), int(LIFE_S * 1000))
        self._run(scripts.BEAT, ("meta", "active"), self._writer_epoch, arguments, patience_s=0.0)

    def resign(self) -> None:
        self._run(scripts.RESIGN, ("meta", "active"), self._writer_epoch, (), patience_s=0.0)

    def close(self) -> None:
        self._server.close()
        self._anchor.close()
        if self._archive:
            self._archive.close()

    def _bind(self, run_id: str) -> None:
        self._anchor.bind(run_id)
        self._name_keys(run_id)

    def _name_keys(self, run_id: str) -> None:
        self._keys = {name: f"treadle:{{{run_id}}}:{name}" for name in _KEYS}

    def _known(self) -> int:
        """The highest position that was acknowledged, as far as anybody beside the server knows."""
        archived = self._archive.find_position() if self._archive else 0
        return max(self._anchor.known()[0], archived)

    def _take_over(self, known: int) -> tuple[int, int, int]:
        """The new writer epoch, the stored position, and how far of it is condensed."""
        meta, active = self._keys["meta"], self._keys["active"]
        other: Any = self._server.ask(lambda client: client.get(active))
        gone = other.decode() if other and is_dead(other.decode()) else ""
        said, *values = self._server.run(
            scripts.ACQUIRE,
            (meta, active),
            (
                *(FORMAT, self._anchor.run_epoch, this_process(), int(LIFE_S * 1000), gone),
                *(int(known == 0), self._anchor.known()[1], uuid.uuid4().hex),
            ),
        )
        if said == "format":
            raise LedgerFormatError(
                f"the ledger has format {values[0]}", field="ledger", limit=FORMAT, value=values[0]
            )
        if said == "held":
            raise LedgerHeldError(
                f"process {values[0]} writes", field="ledger", limit="one writer", value=values[0]
            )
        if said == "lost":
            raise self._lost(values[0])
        return int(values[0]), int(values[1]), int(values[2])

    def _archive_from(self, condensed: int) -> None:
        """Archives what a writer before stored, and did not live to archive."""
        archive = self._archive
        if archive and archive.position < condensed:
            raise LedgerLostError(
                f"the archive ends at {archive.position}, and the server has no history up to "
                f"{condensed} any more: it is not this run's archive, or not whole",
                field="ledger.archive",
                limit=condensed,
                value=archive.position,
            )
        while archive and archive.position < self._position:
            found = self._read("journal", archive.position - condensed)
            numbered = enumerate(found, start=archive.position + 1)
            archive.append([Row(at, parsed.row, payload) for at, (parsed, payload) in numbered])

    def _push(
        self, rows: Sequence[bytes], transitions: Sequence[Transition], writer_epoch: int
    ) -> None:
        released, kept = redis_rows.changes(transitions)
        sizes = (self._position, len(rows), len(released), len(kept))
        payloads = itertools.chain.from_iterable(kept.items())
        keys = ("meta", "journal", "inline")
        self._run(scripts.APPEND, keys, writer_epoch, (*sizes, *rows, *released, *payloads))

    def _run(
        self,
        script: str,
        keys: Sequence[str],
        writer_epoch: int,
        arguments: Sequence[Any],
        patience_s: float | None = None,
    ) -> None:
        """Runs a script of who writes; raises what it says."""
        said, *values = self._server.run(
            script,
            [self._keys[name] for name in keys],
            (self._anchor.run_epoch, writer_epoch, *arguments),
            patience_s,
        )
        if said == "fenced":
            raise WriterFencedError(
                f"writer epoch {writer_epoch} is fenced by epoch {values[0]}",
                field="writer_epoch",
                limit=values[0],
                value=writer_epoch,
            )
        if said == "lost":
            raise self._lost(values[0])
        if said == "moved":
            raise _put_back(int(values[0]), self._position)

    def _lost(self, found: str) -> LedgerLostError:
        return LedgerLostError(
            f"the server holds {found}, and not the ledger {self._anchor.run_epoch} of this run",
            field="ledger",
            limit=self._anchor.run_epoch,
            value=found,
        )

    def _meta(self) -> dict[str, str]:
        key = self._keys["meta"]
        found: Any = self._server.ask(lambda client: client.hgetall(key))
        values = {name.decode(): value.decode() for name, value in found.items()}
        if values.get("run_epoch") != self._anchor.run_epoch:
            raise self._lost(values.get("run_epoch", "nothing"))
        return values

    def _transitions(self, name: str, first: int = 0) -> Iterator[Transition]:
        for start in itertools.count(first, _AT_ONCE):
            found = self._read(name, start)
            for parsed, payload in found:
                yield parsed.transition(payload)
            if len(found) < _AT_ONCE:
                return

    def _read(self, name: str, start: int) -> list[tuple[redis_rows.Parsed, bytes | None]]:
        """The next rows of a list, and the payloads that are stored for them."""
        key, inline = self._keys[name], self._keys["inline"]
        rows: Any = self._server.ask(lambda client: client.lrange(key, start, start + _AT_ONCE - 1))
        parsed = [redis_rows.Parsed(row, f"{name} from row {start}") for row in rows]
        asked = [each.episode_id for each in parsed if each.episode_id]
        found: Any = self._server.ask(lambda client: client.hmget(inline, asked)) if asked else []
        payloads = dict(zip(asked, found, strict=True))
        return [(each, payloads.get(each.episode_id)) for each in parsed]


def _put_back(position: int, known: int) -> LedgerLostError:
    return LedgerLostError(
        f"the server holds {position} transitions, and {known} were acknowledged: it was put back "
        "to an earlier state",
        field="ledger",
        limit=known,
        value=position,
    )
