"""What a run's directory knows of its ledger elsewhere: which one it is, and how far it was."""

import contextlib
import json
import os
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

from treadle_core.errors import WrongRunError
from treadle_experience.core.errors import LedgerFormatError, LedgerFullError
from treadle_runtime.files import write_durably

FILE_NAME = "ledger.json"
"""Which ledger; beside it lies `ledger.position`."""

_RECORD = "%020d %020d\n"
"""Position and writer epoch: one write within a page."""
_SIZE = 42


class Anchor:
    """Binds a run's directory to one ledger on a server, which may be emptied or put back."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._position_path = self._path.with_suffix(".position")
        self._descriptor = -1
        self.run_epoch = ""
        """Random; made once in the life of a run."""

    def bind(self, run_id: str) -> None:
        """Reads, or makes, the run's epoch, and what is `known`.

        Raises WrongRunError where the directory is of another run's ledger.
        """
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            made = {"run_id": run_id, "run_epoch": uuid.uuid4().hex}
            with self._room():
                write_durably(self._path, json.dumps(made).encode())
        bound = self.read()
        if bound != run_id:
            raise WrongRunError(
                f"{self._path} is of run {bound}", field="run.id", limit=bound, value=run_id
            )
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._position_path, flags, 0o644)

    def known(self) -> tuple[int, int]:
        """The highest position known to be acknowledged, and the writer epoch that did."""
        words = os.pread(self._descriptor, _SIZE, 0).split()
        return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)

    def read(self) -> str:
        """Reads the run's epoch; returns its id. Raises LedgerFormatError where there is none."""
        try:
            found: Any = json.loads(self._path.read_text(encoding="utf-8"))
            run_id, self.run_epoch = str(found["run_id"]), str(found["run_epoch"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerFormatError(
                f"{self._path}: no ledger: {error!r}", field="ledger", value=self._path
            ) from error
        return run_id

    def advance(self, position: int, writer_epoch: int) -> None:
        """Keeps both over the end of this process; not fsynced, since they only accuse."""
        with self._room():
            os.pwrite(self._descriptor, (_RECORD % (position, writer_epoch)).encode(), 0)

    def close(self) -> None:
        """Lets the file go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @contextlib.contextmanager
    def _room(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise LedgerFullError(
                f"{self._path}: {error}", field="run.dir", limit="room on its disk", value="none"
            ) from error
