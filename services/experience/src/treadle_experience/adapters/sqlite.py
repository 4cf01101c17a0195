"""Ledger `sqlite`: one file, WAL, an fsync for each append."""

import contextlib
import errno
import json
import os
import sqlite3
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from treadle_core.errors import WrongRunError
from treadle_experience.core.errors import (
    LedgerFormatError,
    LedgerFullError,
    WriterFencedError,
)
from treadle_experience.core.transitions import (
    INLINED,
    PayloadsReleased,
    Transition,
    WithPayload,
    from_body,
    kind_of,
    to_body,
)
from treadle_experience.ports import Durability, Snapshot
from treadle_runtime.failpoints import failpoint

FILE_NAME = "ledger.sqlite"
"""Where it lies in a run's directory, unless the recipe says otherwise."""

FORMAT = 2
"""Written into the file; raised when a reader of the old format could not follow. One of format 1,
which was never condensed, is taken over."""

HISTORY_LIMIT = 1_000_000
"""Transitions that a reader has memory for, at half a KiB each. Of a longer journal it is told what
a start is: what the run remembers."""

_SCHEMA = """
CREATE TABLE run (
    run_id TEXT NOT NULL, writer_epoch INTEGER NOT NULL, position INTEGER NOT NULL
);
CREATE TABLE journal (
    position INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL
);
CREATE TABLE inline_payload (episode_id TEXT PRIMARY KEY, payload BLOB NOT NULL);
"""
_SCHEMA_2 = """
ALTER TABLE run ADD COLUMN condensed INTEGER NOT NULL DEFAULT 0;
CREATE TABLE head (place INTEGER PRIMARY KEY, kind TEXT NOT NULL, body TEXT NOT NULL);
"""
_HEAD = "SELECT place, kind, body FROM head ORDER BY place"
_JOURNAL = "SELECT position, kind, body FROM journal WHERE position > ? ORDER BY position"
_BUSY_S = 10.0
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE}
"""Codes of a write that found no room: of the file, and of the index of its write-ahead log."""
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PROBE_BYTES = 1 << 20


class SqliteLedger:
    """Ledger plugin `sqlite`. Durability is `host`: fsynced on one node."""

    durability = Durability.HOST

    def __init__(self, path: str | Path, *, history: bool = True) -> None:
        """Opens `path`; the file is created by the first `acquire`.

        `history`: keep what was condensed, for readers of the run. Else the file stays small.
        """
        self._path = Path(path)
        self._history = history
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The writer's thread is not the one that opens; the port promises one at a time.
        self._db = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        self._position = 0

    def acquire(self, run_id: str) -> int:
        with _room_on(self._path):
            return self._acquire(run_id)

    def _acquire(self, run_id: str) -> int:
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            # What a process wrote whose fsync failed can be read here, and may not be on the disk
            # although another fsync succeeds. This writes it again, into the file itself.
            self._db.execute("PRAGMA wal_checkpoint")
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode in _FULL or _is_io_error(error):
                raise
            raise LedgerFormatError(
                f"{self._path}: {error}", field="ledger", value=error
            ) from error
        with self._db:
            found = _format_of(self._db, self._path)
            if found == 0:
                self._create(_SCHEMA)
                self._db.execute("INSERT INTO run VALUES (?, 0, 0)", (run_id,))
            if found < FORMAT:
                self._create(_SCHEMA_2)
                self._db.execute(f"PRAGMA user_version = {FORMAT}")
            (bound,) = self._db.execute("SELECT run_id FROM run").fetchone()
            if bound != run_id:
                raise WrongRunError(
                    f"{self._path} belongs to run {bound}",
                    field="run.id",
                    limit=bound,
                    value=run_id,
                )
            self._db.execute("UPDATE run SET writer_epoch = writer_epoch + 1")
            epoch, self._position = self._db.execute(
                "SELECT writer_epoch, position FROM run"
            ).fetchone()
        return epoch

    def _create(self, schema: str) -> None:
        for statement in schema.split(";"):
            self._db.execute(statement)

    def load(self) -> Iterable[Transition]:
        (condensed,) = self._db.execute("SELECT condensed FROM run").fetchone()
        yield from _transitions(self._db, _HEAD)
        yield from _transitions(self._db, _JOURNAL, condensed)

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        rows = [
            (self._position + place, kind_of(transition), _dumps(to_body(transition)))
            for place, transition in enumerate(transitions, start=1)
        ]
        try:
            self._insert(rows, transitions, writer_epoch)
        except sqlite3.OperationalError as error:
            if not _is_io_error(error):
                raise
            # There is room by now, or the disk is broken: then it fails again.
            self._insert(rows, transitions, writer_epoch)
        self._position += len(rows)

    def _insert(
        self,
        rows: Sequence[tuple[int, str, str]],
        transitions: Sequence[Transition],
        writer_epoch: int,
    ) -> None:
        with _room_on(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                self._advance(self._position + len(rows), writer_epoch)
                self._db.executemany("INSERT INTO journal VALUES (?, ?, ?)", rows)
                for transition in transitions:
                    self._store_payloads(transition)
                failpoint("experience.ledger.before_commit")

    def condense(self, head: Sequence[Transition], position: int, writer_epoch: int) -> None:
        rows = [(kind_of(transition), _dumps(to_body(transition))) for transition in head]
        with _room_on(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                self._advance(self._position, writer_epoch)
                self._db.execute("UPDATE run SET condensed = ?", (position,))
                self._db.execute("DELETE FROM head")
                self._db.executemany("INSERT INTO head (kind, body) VALUES (?, ?)", rows)
                if not self._history:
                    self._db.execute("DELETE FROM journal WHERE position <= ?", (position,))
                failpoint("experience.ledger.before_condensed")

    def read(self) -> Snapshot:
        return read_journal(self._path)

    def close(self) -> None:
        self._db.close()

    def _advance(self, position: int, writer_epoch: int) -> None:
        moved = self._db.execute(
            "UPDATE run SET position = ? WHERE writer_epoch = ?", (position, writer_epoch)
        )
        if moved.rowcount == 0:
            (epoch,) = self._db.execute("SELECT writer_epoch FROM run").fetchone()
            raise WriterFencedError(
                f"writer epoch {writer_epoch} is fenced by epoch {epoch}",
                field="writer_epoch",
                limit=epoch,
                value=writer_epoch,
            )

    def _store_payloads(self, transition: Transition) -> None:
        if isinstance(transition, WithPayload) and transition.inline is not None:
            self._db.execute(
                "INSERT INTO inline_payload VALUES (?, ?)",
                (transition.episode_id, transition.inline),
            )
        elif isinstance(transition, PayloadsReleased):
            self._db.executemany(
                "DELETE FROM inline_payload WHERE episode_id = ?",
                [(episode_id,) for episode_id in transition.episode_ids],
            )


@contextlib.contextmanager
def _room_on(path: Path) -> Generator[None]:
    """Raises LedgerFullError where the disk has no room; the transaction was rolled back then.

    Also after an fsync that failed: only a connection that is opened anew would believe the pages
    whose state is unknown; this one writes all of them again with the next append.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode not in _FULL and not (
            _is_io_error(error) and _lacks_room(path.parent)
        ):
            raise
        raise LedgerFullError(
            f"ledger {path}: {error}", field="ledger", limit="room on its disk", value="none"
        ) from error


def _is_io_error(error: sqlite3.Error) -> bool:
    """All that SQLite says of an fsync without room, and of a quota, is that I/O failed."""
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_IOERR


def _lacks_room(directory: Path) -> bool:
    """Whether a file of some size finds no room, or none at its fsync."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fdatasync(file.fileno())
    except OSError as error:
        return error.errno in _FULL_DISK
    return False


def read_journal(path: Path) -> Snapshot:
    """One consistent snapshot of a ledger, read-only, while it is written or after.

    With what was condensed, where that is there and not beyond HISTORY_LIMIT.

    Raises LedgerFormatError where there is no ledger of this format, or a row says nothing.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            db.execute("BEGIN")
            if (found := _format_of(db, path)) == 0:
                raise LedgerFormatError(f"{path}: no ledger", field="ledger", value=path)
            (position,) = db.execute("SELECT position FROM run").fetchone()
            condensed = db.execute("SELECT condensed FROM run").fetchone()[0] if found > 1 else 0
            first = db.execute("SELECT 1 FROM journal WHERE position = 1").fetchone()
            if not condensed or (first and position <= HISTORY_LIMIT):
                return Snapshot(position, list(_transitions(db, _JOURNAL, 0)))
            tail = _transitions(db, _JOURNAL, condensed)
            return Snapshot(position, [*_transitions(db, _HEAD), *tail])
    except sqlite3.Error as error:
        raise LedgerFormatError(f"{path}: {error}", field="ledger", value=error) from error


def _format_of(db: sqlite3.Connection, path: Path) -> int:
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if not 0 <= found <= FORMAT:
        raise LedgerFormatError(
            f"{path} has format {found}", field="ledger", limit=FORMAT, value=found
        )
    return found


def _transitions(db: sqlite3.Connection, query: str, *values: int) -> Iterator[Transition]:
    for position, kind, text in db.execute(query, values):
        try:
            body = json.loads(text)
            inline = _inline(db, body["episode_id"]) if kind in INLINED else None
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerFormatError(
                f"journal position {position}: {error!r}", field=kind, value=position
            ) from error
        yield from_body(kind, body, inline)


def _inline(db: sqlite3.Connection, episode_id: str) -> bytes | None:
    row = db.execute(
        "SELECT payload FROM inline_payload WHERE episode_id = ?", (episode_id,)
    ).fetchone()
    return row[0] if row else None


def _dumps(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"), allow_nan=False)
