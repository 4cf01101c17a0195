"""A ledger's second home: rows in files that are fsynced, in a directory on another disk or host.

A writer appends to files of its own (`EPOCH-NUMBER.rows`), so that one who was fenced cannot tear
another's. A line is a checksum, a position, a row and, after a tab, its payload in base64; lines of
one position say the same, in whichever file. A line that was torn was never acknowledged.
"""

import binascii
import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from treadle_experience.core.errors import LedgerFormatError, LedgerFullError
from treadle_runtime.failpoints import failpoint
from treadle_runtime.files import sync_directory

_TAIL = 1 << 16


class Row(NamedTuple):
    """One position of a journal, as it is stored."""

    position: int
    row: bytes
    inline: bytes | None


class Archive:
    """Append-only; durable when `append` returns."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = -1
        self._epoch = 0
        self._number = 0
        self.position = 0
        """The last one that is archived."""

    def open(self, writer_epoch: int) -> None:
        """Finds what is archived, and gets ready to append. Raises LedgerFullError."""
        self.close()
        self._epoch, self._number = writer_epoch, 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self.position = self.find_position()
        except OSError as error:
            raise self._refusal(error) from error

    def find_position(self) -> int:
        """The highest position in any file; 0 where there is none."""
        return max(map(_last_position, self._directory.glob("*.rows")), default=0)

    def append(self, rows: Sequence[Row]) -> None:
        """Stores rows that follow `position`; raises LedgerFullError, and may be tried again."""
        data = b"".join(map(_line, rows))
        try:
            if self._file < 0:
                self._begin_file()
            failpoint("experience.archive.before_fsync")
            _write(self._file, data)
            os.fdatasync(self._file)
        except OSError as error:
            # What a failed fsync left is unknown: the next try is another file.
            self.close()
            raise self._refusal(error) from error
        self.position = rows[-1].position

    def rows(self, after: int) -> Iterator[Row]:
        """All rows past a position, in order; raises LedgerFormatError where one is missing."""
        files = [_read(path) for path in sorted(self._directory.glob("*.rows"))]
        for row in heapq.merge(*files, key=attrgetter("position")):
            if row.position <= after:
                continue
            if row.position > after + 1:
                raise LedgerFormatError(
                    f"{self._directory}: no row {after + 1}",
                    field="ledger.archive",
                    value=after + 1,
                )
            after = row.position
            yield row

    def close(self) -> None:
        """Lets the file go."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _begin_file(self) -> None:
        while self._file < 0:
            self._number += 1
            path = self._directory / f"{self._epoch:010d}-{self._number:04d}.rows"
            try:
                self._file = os.open(
                    path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
                )
            except FileExistsError:
                continue
        sync_directory(self._directory)

    def _refusal(self, error: OSError) -> LedgerFullError:
        return LedgerFullError(
            f"archive {self._directory}: {error}",
            field="ledger.archive",
            limit="room in a directory that can be written",
            value=error.strerror,
        )


def _line(row: Row) -> bytes:
    body = b"%d %s" % (row.position, row.row)
    if row.inline is not None:
        body += b"\t" + binascii.b2a_base64(row.inline, newline=False)
    return b"%08x %s\n" % (binascii.crc32(body), body)


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _parse(line: bytes) -> Row | None:
    """None for a line that is torn."""
    checksum, _, body = line.rstrip(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % binascii.crc32(body):
        return None
    position, _, rest = body.partition(b" ")
    row, tab, inline = rest.partition(b"\t")
    return Row(int(position), row, binascii.a2b_base64(inline) if tab else None)


def _read(path: Path) -> Iterable[Row]:
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if row is None:
                return
            yield row


def _last_position(path: Path) -> int:
    """Of the last whole line, sought from the end."""
    with path.open("rb") as file:
        size, span = file.seek(0, os.SEEK_END), _TAIL
        while True:
            file.seek(max(0, size - span))
            lines = file.read().splitlines(keepends=True)[0 if span >= size else 1 :]
            for line in reversed(lines):
                row = _parse(line)
                if row is not None:
                    return row.position
            if span >= size:
                return 0
            span *= 4
