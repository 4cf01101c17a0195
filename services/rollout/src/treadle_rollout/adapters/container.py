"""Form `image`: a program in a container of its own, which reaches the gateway and nothing else.

The command line of the engine is what Docker and Podman have in common, so it is what we speak. The
engine runs on this host, since the program's folder is shared with it.
"""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from treadle_agents.failures import EpisodeError
from treadle_agents.processes import Ended, run_tree
from treadle_agents.processes.regardless import regardless
from treadle_core.episodes import FailureClass
from treadle_core.errors import InvalidFieldError
from treadle_rollout.adapters.forms import (
    REWARD_FILE,
    TASK_FILE,
    WORK,
    Folder,
    Given,
    Left,
    failed,
    laid_out,
)
from treadle_rollout.adapters.owners import OWNER, is_left_over, labels
from treadle_runtime.config import Config

PLACE = "/treadle"
"""Where the program finds its folder."""
ENGINE_S = 60.0
"""Most seconds that the engine may take for an order."""
PULL_S = 110.0
"""Most seconds for fetching an image; a worker has some more for all of its start."""
_NOBODY = 65534
"""Whom a program runs as where we are root."""


class ContainerTerms(Config):
    """Where containers run, and what one may use."""

    engine: tuple[str, ...] | str = "docker"
    """The engine's command, such as `podman` or `[docker, --host, "unix:///run/other.sock"]`."""
    network: str = "treadle-agents"
    """A network of the engine that leads nowhere (`--internal`) but to the gateway."""
    memory_mb: int = Field(default=2048, ge=16)
    """Most memory, `/tmp` included, in MiB; there is no swap."""
    pids: int = Field(default=256, ge=1)
    """Most processes and threads."""
    cpus: float = Field(default=1.0, gt=0)
    """Most CPU seconds a second."""
    tmp_mb: int = Field(default=256, ge=1)
    """Size of `/tmp`, in MiB."""
    options: tuple[str, ...] = ()
    """More words of `run`, such as `--userns=keep-id` for a Podman without root."""

    @property
    def command(self) -> tuple[str, ...]:
        """The engine's command, in words."""
        return (self.engine,) if isinstance(self.engine, str) else self.engine


class Container:
    """Runs programs of an image: read-only, without privileges, bounded, gone at the end."""

    def __init__(self, image: str, terms: ContainerTerms) -> None:
        """Looks for engine, network and image, and removes left-overs, once in a process.

        Raises InvalidFieldError with the key of the recipe where one of them is missing.
        """
        _prepared(terms.command, terms.network, image)
        self._image = image
        self._terms = terms

    async def run(self, given: Given) -> Left:
        """As Form.run."""
        name = f"treadle-{uuid.uuid4().hex}"
        with laid_out(given.task) as folder:
            user = _handed_over(folder)
            seen = self._environment(given)
            try:
                ended = await run_tree(
                    self._words(given, name, folder, user, seen),
                    environment={**seen, **os.environ},
                    folder=folder.work,
                    deadline_s=given.deadline_s,
                )
                if ended.cut is None:
                    await self._check(name, ended)
            finally:
                await regardless(self._remove(name))
            return folder.left(ended, given.answer)

    def _environment(self, given: Given) -> dict[str, str]:
        return {
            "HOME": PLACE,
            "LANG": "C.UTF-8",
            "TREADLE_TASK": f"{PLACE}/{TASK_FILE}",
            "TREADLE_REWARD": f"{PLACE}/{REWARD_FILE}",
            **given.environment,
        }

    def _words(
        self, given: Given, name: str, folder: Folder, user: str, seen: dict[str, str]
    ) -> list[str]:
        """The whole order. Values that may be secret are not in it, where anyone could read."""
        terms = self._terms
        words = [*terms.command, "run", "--name", name, "--pull=never", "--log-driver=none"]
        for key, value in labels(given.session, given.deadline_s).items():
            words += ["--label", f"{key}={value}"]
        for key, value in seen.items():
            words += ["--env", f"{key}={value}" if key in os.environ else key]
        words += ["--network", terms.network, "--user", user, "--workdir", f"{PLACE}/{WORK}"]
        room = f"/tmp:rw,exec,mode=1777,size={terms.tmp_mb}m"  # noqa: S108, of the container
        words += ["--read-only", "--tmpfs", room]
        words += ["--mount", f"type=bind,source={folder.aside},target={PLACE}"]
        words += ["--memory", f"{terms.memory_mb}m", "--memory-swap", f"{terms.memory_mb}m"]
        words += ["--pids-limit", str(terms.pids), "--cpus", str(terms.cpus)]
        words += ["--cap-drop=ALL", "--security-opt=no-new-privileges", *terms.options]
        return [*words, self._image, *given.words]

    async def _check(self, name: str, ended: Ended) -> None:
        """Raises EpisodeError where the container did not run, or ran out of memory."""
        asked = await self._order("inspect", "--format", "{{json .State}}", name)
        state: dict[str, Any] = json.loads(asked.output) if asked.ok else {}
        if state.get("Status") != "exited" or state.get("Error"):
            what = f"its container did not run: {state.get('Error') or state.get('Status')}"
            raise failed(what, ended, FailureClass.INFRASTRUCTURE)
        if state.get("OOMKilled"):
            raise failed(f"it used more than {self._terms.memory_mb} MiB of memory", ended)

    async def _remove(self, name: str) -> None:
        gone = await self._order("rm", "--force", "--volumes", name)
        if not gone.ok and b"no such container" not in gone.errors.lower():
            raise failed("its container was not removed", gone, FailureClass.INFRASTRUCTURE)

    async def _order(self, *words: str) -> Ended:
        try:
            return await run_tree(
                [*self._terms.command, *words],
                environment=os.environ,
                folder=Path("/"),
                deadline_s=ENGINE_S,
            )
        except InvalidFieldError as error:
            message = f"the container engine: {error.message}"
            raise EpisodeError(FailureClass.INFRASTRUCTURE, message) from error


def sweep(engine: Sequence[str]) -> int:
    """Removes containers whose worker was killed, or whose deadline passed; says how many.

    Raises InvalidFieldError where the engine does not answer.
    """
    found = _told(engine, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={OWNER}")
    count = 0
    for name in found.split():
        asked = _asked(engine, "inspect", "--format", "{{json .Config.Labels}}", name)
        # One that has gone meanwhile was removed by its owner.
        if asked.returncode == 0 and is_left_over(json.loads(asked.stdout)):
            count += _asked(engine, "rm", "--force", "--volumes", name).returncode == 0
    return count


@cache
def _prepared(engine: tuple[str, ...], network: str, image: str) -> None:
    """Checks what all episodes need; a failure is not remembered."""
    if not engine or shutil.which(engine[0]) is None:
        raise InvalidFieldError("agent.container.engine", limit="a command", value=engine)
    sweep(engine)
    internal = _asked(engine, "network", "inspect", "--format", "{{.Internal}}", network)
    if internal.stdout.strip() != b"true":
        limit = f"an internal network (`{engine[0]} network create --internal {network}`)"
        said = internal.stderr.decode("utf-8", "replace").strip() or "one that leads out"
        raise InvalidFieldError("agent.container.network", limit=limit, value=said)
    if _asked(engine, "image", "inspect", image).returncode:
        pulled = _asked(engine, "pull", "--quiet", image, timeout_s=PULL_S)
        if pulled.returncode:
            said = pulled.stderr.decode("utf-8", "replace").strip()
            raise InvalidFieldError("agent.image", limit="an image to be had", value=said)


def _told(engine: Sequence[str], *words: str) -> str:
    """What the engine answers. Raises InvalidFieldError where it does not."""
    asked = _asked(engine, *words)
    if asked.returncode:
        said = asked.stderr.decode("utf-8", "replace").strip()
        raise InvalidFieldError("agent.container.engine", limit="one that answers", value=said)
    return asked.stdout.decode()


def _asked(
    engine: Sequence[str], *words: str, timeout_s: float = ENGINE_S
) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(  # noqa: S603, the recipe's words
            [*engine, *words], capture_output=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        limit = f"an answer in {timeout_s:g} s"
        raise InvalidFieldError("agent.container.engine", limit=limit, value=words[0]) from error


def _handed_over(folder: Folder) -> str:
    """The user that a program runs as, who may write to its folder: never root."""
    if os.geteuid():
        return f"{os.geteuid()}:{os.getegid()}"
    for path in (folder.aside, *folder.aside.rglob("*")):
        os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
    return f"{_NOBODY}:{_NOBODY}"
