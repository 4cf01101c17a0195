"""What runs code that nobody vouches for: a sandbox makes boxes, a box runs commands."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Protocol

from treadle_agents.processes import Ended
from treadle_core.errors import InvalidFieldError, Kind, TreadleError

NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_FILE = 1024 * 1024
"""Most bytes of a file that is read, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one box may use, over all its commands."""

    processes: int = 64
    """Processes and threads at a time."""
    memory_mb: int = 512
    """Memory of all processes together, MiB, files not counted."""
    scratch_mb: int = 64
    """Files in its writable folders together, MiB."""
    files: int = 10_000
    """Files and folders there."""
    output_bytes: int = 1024 * 1024
    """Output and errors of one command together; with one byte more it is killed."""
    seconds: float = 30.0
    """Wall-clock time of one command, unless it is told otherwise."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where a limit is not positive."""
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                value = getattr(self, each.name)
                raise InvalidFieldError(f"limits.{each.name}", limit="more than 0", value=value)


class SandboxMissingError(TreadleError):
    """This machine cannot isolate code as asked; nothing was run."""

    kind = Kind.PRECONDITION
    reason = "SANDBOX_MISSING"


class BoxLostError(TreadleError):
    """A box ended before it was closed; what a command did there is not known."""

    kind = Kind.UNAVAILABLE
    reason = "BOX_LOST"


class Box(Protocol):
    """A folder of its own, in which commands run one after another.

    Nothing of a command outlives it but what it wrote to the folder, and that only until the box
    is closed. Names are relative to the folder.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] = NOTHING,
        given: bytes = b"",
        seconds: float | None = None,
    ) -> Ended:
        """Runs a command in the folder, with `given` as its standard input.

        It sees PATH, where `python3` is this Python, HOME, LANG, TMPDIR and `environment`.
        `seconds` replaces the limit. One that cannot be started raises InvalidFieldError, or ends
        with a status and says why. Raises BoxLostError.
        """
        ...

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Puts files into the folder, over those that are there; makes the folders above.

        Raises InvalidFieldError where a name leads out of the folder or there is no room.
        """
        ...

    async def read(self, name: str, *, most: int = MAX_FILE) -> bytes:
        """One regular file of the folder; links are not followed.

        Raises InvalidFieldError where there is none, or one of more than `most` bytes.
        """
        ...


class Sandbox(Protocol):
    """Makes boxes; a plugin of `treadle.sandboxes`."""

    def open(self, limits: Limits = ...) -> AbstractAsyncContextManager[Box]:
        """A fresh box; it and all that runs in it are gone at the end.

        Raises SandboxMissingError where it cannot be made as promised.
        """
        ...


async def run_once(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    limits: Limits = Limits(),
    files: Mapping[str, bytes] = MappingProxyType({}),
    take: Sequence[str] = (),
    environment: Mapping[str, str] = NOTHING,
    given: bytes = b"",
) -> tuple[Ended, dict[str, bytes]]:
    """Runs one command in a box of its own, with `files`; returns what it left of `take`.

    A file that is not there, or no regular one, is left out.
    """
    async with sandbox.open(limits) as box:
        await box.write(files)
        ended = await box.run(command, environment=environment, given=given)
        taken: dict[str, bytes] = {}
        for name in take:
            try:
                taken[name] = await box.read(name)
            except InvalidFieldError:
                continue
        return ended, taken
