"""Keeps what agents print, in a file of bounded size, as fast as a bounded rate."""

import asyncio
import errno
import os
from pathlib import Path

FILE_LIMIT = 8 * 1024 * 1024
"""Bytes after which a log is moved to `<name>.1`, which is replaced."""
RATE = 1024 * 1024
"""Bytes a second that are read of a flood; whoever prints more waits, and so reaches its deadline.
"""
_CHUNK = 64 * 1024
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class CappedLog:
    """Copies one pipe into one file, until the pipe's writers are gone."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    async def open(self) -> int:
        """Starts to copy; returns the descriptor to write to, which the caller closes."""
        reading, writing = os.pipe()
        reader = asyncio.StreamReader(limit=_CHUNK)
        loop = asyncio.get_running_loop()
        self._pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", buffering=0)
        )
        self._copying = asyncio.create_task(self._copy(reader))
        return writing

    async def close(self) -> None:
        """Stops to copy; call it when the writers are gone, whose last words are kept."""
        await asyncio.wait({self._copying}, timeout=1.0)
        self._copying.cancel()
        await asyncio.wait({self._copying})

    async def _copy(self, reader: asyncio.StreamReader) -> None:
        file = self._path.open("ab", buffering=0)
        try:
            while chunk := await reader.read(_CHUNK):
                try:
                    file.write(chunk)
                except OSError as error:  # agents go on; what they print on a full disk is lost
                    if error.errno not in _FULL:
                        raise
                if file.tell() > FILE_LIMIT:
                    file.close()
                    self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                    file = self._path.open("ab", buffering=0)
                await asyncio.sleep(len(chunk) / RATE)
        finally:
            file.close()
            self._pipe.close()
