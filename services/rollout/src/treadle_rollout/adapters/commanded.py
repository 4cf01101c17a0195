"""Agent `command`: a command line is the agent, in whatever language, unmodified."""

import json
import os
import string
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.env import Result
from treadle_agents.failures import EpisodeError
from treadle_agents.processes import Ended, run_tree
from treadle_core.episodes import FailureClass
from treadle_core.tickets import Json
from treadle_rollout.adapters.graded import grader_of

TASK_FILE, REWARD_FILE = "task.json", "reward.json"
"""In the folder beside that of the command, which finds them by TREADLE_TASK and TREADLE_REWARD."""
MAX_REWARD_FILE = 1024 * 1024
"""Most bytes of a reward file."""
SHARE = 0.95
"""Of the time of the episode that the command gets; the rest is for grading."""
TOLD = 400
"""Most characters of its output that a failure quotes."""


class Command(ChatAgent):
    """Agent plugin `command`: runs a command line in a folder of its own, and says its worth.

    The command finds the policy as any client does: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
    and the same with ANTHROPIC. Nothing of it outlives the episode.
    """

    def __init__(
        self,
        command: Sequence[str],
        reward: Literal["status", "file"] | None = None,
        grader: str | dict[str, Any] | None = None,
        answer: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Says what to run, and what it is worth.

        Args:
            command: the program and its words; `$name` in a word is the field of the task.
            reward: `status`: 1 where it exits with 0, else 0. `file`: the number in the JSON file
                that TREADLE_REWARD names, or its `reward`, with `metrics`; where there is no file
                there is no reward.
            grader: instead, a grader of the answer, as for the agent `grader`.
            answer: file of its folder that holds the answer; empty: what it prints.
            environment: more variables; it sees PATH, HOME, LANG, those of the policy, and these.

        A task may hold `files`, a mapping of names to text, which lie in the folder at the start.
        Raises ValueError where both or neither of `reward` and `grader` are given.
        """
        if (reward is None) == (grader is None):
            raise ValueError("command: expected either reward or grader, got both or neither")
        if not command:
            raise ValueError("command: expected a program and its words, got none")
        self._words = [string.Template(word) for word in command]
        self._reward = reward
        self._grade = None if grader is None else grader_of(grader)
        self._answer = _inside(answer) if answer else None
        self._environment = dict(environment or {})

    async def run(self, context: ChatContext) -> Result:
        with tempfile.TemporaryDirectory(prefix="treadle-command-") as name:
            aside, folder = Path(name), Path(name) / "work"
            folder.mkdir()
            (aside / TASK_FILE).write_text(json.dumps(dict(context.task)))
            _write(folder, context.task.get("files"))
            ended = await run_tree(
                [word.substitute(_texts(context.task)) for word in self._words],
                environment=self._seen(context, aside),
                folder=folder,
                deadline_s=SHARE * context.deadline_s,
            )
            if ended.cut is not None:
                raise _failed(f"it was ended: {ended.cut}", ended)
            return self._worth(ended, aside, folder, context.task)

    def _seen(self, context: ChatContext, aside: Path) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(aside),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": context.base_url,
            "OPENAI_API_KEY": context.api_key,
            "OPENAI_MODEL": context.model,
            "ANTHROPIC_BASE_URL": context.anthropic_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "ANTHROPIC_MODEL": context.model,
            "TREADLE_TASK": str(aside / TASK_FILE),
            "TREADLE_REWARD": str(aside / REWARD_FILE),
            **self._environment,
        }

    def _worth(self, ended: Ended, aside: Path, folder: Path, task: Mapping[str, Json]) -> Result:
        metrics = {"status": float(ended.status), "command_s": ended.seconds}
        if self._reward == "status":
            return Result(reward=float(ended.ok), metrics=metrics)
        if self._reward == "file":
            reward, more = _reported(aside / REWARD_FILE, ended)
            return Result(reward=reward, metrics={**metrics, **more})
        answer = ended.output.decode("utf-8", "replace")
        if self._answer is not None:
            answer = _text(folder / self._answer)
        grade = cast("Any", self._grade)
        return Result(reward=grade(answer, task), metrics=metrics)


def _texts(task: Mapping[str, Json]) -> dict[str, str]:
    """Fields as words: text as it is, and anything else as JSON."""
    return {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in task.items()
    }


def _write(folder: Path, files: Json) -> None:
    """Lays the task's files into the folder of the command."""
    if files is None:
        return
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise TypeError("task.files: expected a mapping of names to text")
    for name, text in files.items():
        path = folder / _inside(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(cast("str", text))


def _inside(name: str) -> PurePosixPath:
    """A path that stays within its folder. Raises ValueError for any other."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"a file: expected a path within the folder, got {name!r}")
    return path


def _text(path: Path) -> str:
    """The answer in a file of the command; empty where it left none, or only a link."""
    if path.is_symlink() or not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(MAX_REWARD_FILE).decode("utf-8", "replace")


def _reported(path: Path, ended: Ended) -> tuple[float | None, dict[str, float]]:
    """Reward and metrics of a reward file. Raises EpisodeError where it is none."""
    text = _text(path)
    if not text:
        return None, {}
    try:
        said: Any = json.loads(text)
        told = cast("dict[str, Any]", said if isinstance(said, dict) else {"reward": said})
        return told["reward"], told.get("metrics", {})
    except (ValueError, LookupError) as error:
        raise _failed(f"TREADLE_REWARD: expected a number or its object, got {error}", ended) from (
            error
        )


def _failed(what: str, ended: Ended) -> EpisodeError:
    said = (ended.errors or ended.output)[-TOLD:].decode("utf-8", "replace").strip()
    message = f"command: {what}; after {ended.seconds:.1f} s it had said: {said}"
    return EpisodeError(FailureClass.ENVIRONMENT, message)
