"""What the forms of a command have in common: what a program is given, and what it leaves.

A command line, a container image and a Kubernetes Job differ in where the program runs. All three
are given a task and the policy's address, and are worth what `commanded` makes of what they leave.
"""

import json
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

from treadle_agents.failures import EpisodeError
from treadle_agents.processes import Ended
from treadle_core.episodes import FailureClass
from treadle_core.tickets import Json

TASK_FILE, REWARD_FILE = "task.json", "reward.json"
"""In the folder around that of the program, which finds them by TREADLE_TASK and TREADLE_REWARD."""
WORK = "work"
"""The folder that a program starts in, beside those two."""
MAX_FILE = 1024 * 1024
"""Most bytes that are read of a file that a program left."""
_TOLD = 400
"""Most characters of its output that a failure quotes."""


@dataclass(frozen=True, slots=True)
class Given:
    """One episode, for a program."""

    task: Mapping[str, Json]
    words: tuple[str, ...]
    """The program and its words, or what an image's own program is told; may be empty."""
    environment: Mapping[str, str]
    """Where the policy is, and what the recipe adds."""
    deadline_s: float
    """Seconds after which the program is ended."""
    session: str
    """Of the gateway, for what bears its name."""
    answer: PurePosixPath | None
    """File of the program's folder that a grader wants; None where none does."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a program left, once nothing of it runs."""

    ended: Ended
    reward: str
    """Its reward file; empty where it wrote none."""
    answer: str
    """The file that was asked for; empty where there is none."""


class Form(Protocol):
    """Where programs run."""

    async def run(self, given: Given) -> Left:
        """Runs a program until it ends or its deadline passes; nothing of it is left.

        Raises EpisodeError where it could not be run. Cancelling the call ends the program.
        """
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """What a program on this host finds, until its episode ends."""

    aside: Path
    """The task's file, the reward's file, and `work`."""

    @property
    def work(self) -> Path:
        """Where the program starts, with the task's files."""
        return self.aside / WORK

    def left(self, ended: Ended, answer: PurePosixPath | None) -> Left:
        """Reads what the program wrote."""
        said = "" if answer is None else self._text(self.work / answer)
        return Left(ended, self._text(self.aside / REWARD_FILE), said)

    def _text(self, path: Path) -> str:
        """Text of a file; empty where there is none, or where a link leads out of the folder."""
        inside = path.resolve().is_relative_to(self.aside.resolve())
        if not inside or path.is_symlink() or not path.is_file():
            return ""
        with path.open("rb") as file:
            return file.read(MAX_FILE).decode("utf-8", "replace")


@contextmanager
def laid_out(task: Mapping[str, Json]) -> Generator[Folder]:
    """A folder with the task and its `files`, for one episode.

    Raises TypeError or ValueError where the files are not names with text.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-command-") as name:
        folder = Folder(Path(name))
        folder.work.mkdir()
        (folder.aside / TASK_FILE).write_text(json.dumps(dict(task)))
        for file, text in files_of(task).items():
            path = folder.work / inside(file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        yield folder


def files_of(task: Mapping[str, Json]) -> Mapping[str, str]:
    """The task's `files`. Raises TypeError where they are not names with text."""
    files = task.get("files")
    if files is None:
        return {}
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise TypeError("task.files: expected a mapping of names to text")
    return cast("Mapping[str, str]", files)


def inside(name: str) -> PurePosixPath:
    """A path that stays within its folder. Raises ValueError for any other."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a file: expected a path within the folder, got {name!r}")
    return path


def failed(
    what: str, ended: Ended, failure_class: FailureClass = FailureClass.ENVIRONMENT
) -> EpisodeError:
    """A failure that quotes the last words of the program."""
    said = (ended.errors or ended.output)[-_TOLD:].decode("utf-8", "replace").strip()
    message = f"command: {what}; after {ended.seconds:.1f} s it had said: {said}"
    return EpisodeError(failure_class, message)
