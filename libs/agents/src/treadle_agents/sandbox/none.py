"""Sandbox that isolates nothing, for code that is trusted like our own."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from treadle_agents.processes import Ended, run_tree
from treadle_agents.sandbox.asked import check_name, checked, content_of, in_memory, refused
from treadle_agents.sandbox.keeper import put, take
from treadle_agents.sandbox.ports import MAX_FILE, NOTHING, Limits
from treadle_core.errors import InvalidFieldError


@dataclass(frozen=True, slots=True)
class NoSandbox:
    """Sandbox plugin `none`: commands may do whatever this process may.

    Of the limits it knows time and output; processes that leave their session are killed as well.
    """

    trusted: bool = False
    """Has to be true: whoever sets it vouches for all code that will run."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where nobody vouches."""
        if not self.trusted:
            limit = "true, since nothing is isolated"
            raise InvalidFieldError("sandbox.trusted", limit=limit, value=self.trusted)

    @asynccontextmanager
    async def open(self, limits: Limits = Limits()) -> AsyncGenerator["OpenBox"]:  # noqa: B008
        """As Sandbox.open."""
        with tempfile.TemporaryDirectory(prefix="treadle") as folder:
            yield OpenBox(Path(folder), limits)


@dataclass(frozen=True, slots=True)
class OpenBox:
    """A folder, and no wall."""

    folder: Path
    limits: Limits
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] = NOTHING,
        given: bytes = b"",
        seconds: float | None = None,
    ) -> Ended:
        """As Box.run."""
        clean = {
            "PATH": f"{sys.base_prefix}/bin:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "TMPDIR": tempfile.gettempdir(),
        }
        checked(command, environment)
        async with self.turn:
            return await run_tree(
                command,
                environment=clean | dict(environment),
                folder=self.folder,
                deadline_s=seconds or self.limits.seconds,
                given=given,
                max_output=self.limits.output_bytes,
            )

    async def write(self, files: Mapping[str, bytes]) -> None:
        """As Box.write."""
        for name in files:
            check_name(name)
        for name, content in files.items():
            with in_memory(content) as source:
                try:
                    put(str(self.folder), name, source.fileno())
                except OSError as error:
                    raise refused(name, str(error.strerror)) from error

    async def read(self, name: str, *, most: int = MAX_FILE) -> bytes:
        """As Box.read."""
        check_name(name)
        with in_memory(b"") as target:
            try:
                take(str(self.folder), name, most, target.fileno())
            except OSError as error:
                raise refused(name, str(error.strerror)) from error
            return content_of(name, target, most)
