"""Agent `command`: a program is the agent, in whatever language, unmodified."""

import asyncio
import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.env import Result
from treadle_agents.graders import Grader
from treadle_agents.processes import Ended
from treadle_agents.processes.regardless import regardless
from treadle_core.tickets import Json
from treadle_rollout.adapters.command_line import CommandLine
from treadle_rollout.adapters.container import Container, ContainerTerms
from treadle_rollout.adapters.forms import Form, Given, Left, failed, inside
from treadle_rollout.adapters.graded import grader_of
from treadle_rollout.adapters.kubernetes_job import ClusterTerms, KubernetesJob

SHARE = 0.9
"""Of the time of the episode that the program gets; the rest is for its removal and for grading."""
_SESSION = re.compile(r"/s/([^/]+)")
"""In the base URL."""


class Command(ChatAgent):
    """Agent plugin `command`: runs a program somewhere, and says its worth (docs/commands.md).

    The program finds the policy as any client does: OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL,
    and the same with ANTHROPIC. Nothing of it outlives the episode.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        reward: Literal["status", "file"] | None = None,
        grader: str | dict[str, Any] | None = None,
        answer: str = "",
        environment: Mapping[str, str] | None = None,
        image: str = "",
        job: Path | None = None,
        container: ContainerTerms | None = None,
        cluster: ClusterTerms | None = None,
    ) -> None:
        """Says what to run, where, and what it is worth.

        Args:
            command: the program and its words, or what an image's own program is told; `$name` is
                the field of the task, `$here` the folder that the run was started in.
            reward: `status`: 1 where it exits with 0, else 0. `file`: the number in the JSON file
                that TREADLE_REWARD names, or its `reward`, with `metrics`; none without a file.
            grader: instead, a grader of the answer, as for the agent `grader`.
            answer: file of its folder that holds the answer; empty: what it prints.
            environment: more variables that it sees.
            image: runs in a container of this image, on this host; with `job`, in that Job.
            job: runs as a Kubernetes Job that this YAML file is a template of.
            container: engine, network and bounds of containers.
            cluster: where Jobs run.

        Files of a task (`files`: names and text) lie in the folder at the start. Raises ValueError
        for terms that do not go together, InvalidFieldError where what is to run it is not there.
        """
        if (reward is None) == (grader is None):
            raise ValueError("command: expected either reward or grader, got both or neither")
        if job and answer:
            raise ValueError("answer: expected none with a job, whose files nobody sees")
        self._words = [string.Template(word) for word in command]
        self._reward = reward
        self._grade = None if grader is None else grader_of(grader)
        self._answer = inside(answer) if answer else None
        self._environment = dict(environment or {})
        self._form = _form(command, image, job, container, cluster)

    async def run(self, context: ChatContext) -> Result:
        left = await self._form.run(
            Given(
                task=context.task,
                words=tuple(word.substitute(_fields(context.task)) for word in self._words),
                environment={**_policy(context), **self._environment},
                deadline_s=SHARE * context.deadline_s,
                session=found[1] if (found := _SESSION.search(context.base_url)) else "",
                answer=self._answer,
            )
        )
        if left.ended.cut is not None:
            raise failed(f"it was ended: {left.ended.cut}", left.ended)
        if self._grade is None:
            return self._worth(left)
        # A grader may block, and is brought to its end also when nobody waits for it any more.
        return await regardless(asyncio.to_thread(self._graded, left, context.task))

    def _graded(self, left: Left, task: Mapping[str, Json]) -> Result:
        answer = left.answer if self._answer else left.ended.output.decode("utf-8", "replace")
        grade = cast("Grader", self._grade)
        return Result(reward=grade(answer, task), metrics=_metrics(left.ended))

    def _worth(self, left: Left) -> Result:
        if self._reward == "status":
            return Result(reward=float(left.ended.ok), metrics=_metrics(left.ended))
        reward, more = _reported(left.reward, left.ended)
        return Result(reward=reward, metrics={**_metrics(left.ended), **more})


def _form(
    command: Sequence[str],
    image: str,
    job: Path | None,
    container: ContainerTerms | None,
    cluster: ClusterTerms | None,
) -> Form:
    """Raises ValueError for terms of a form that is not meant."""
    if container and (job or not image):
        raise ValueError("container: expected with image and without job")
    if cluster and not job:
        raise ValueError("cluster: expected with job")
    if job:
        return KubernetesJob(job, image, cluster or ClusterTerms())
    if image:
        return Container(image, container or ContainerTerms())
    if not command:
        raise ValueError("command: expected a program and its words, got none")
    return CommandLine()


def _metrics(ended: Ended) -> dict[str, float]:
    return {"status": float(ended.status), "command_s": ended.seconds}


def _policy(context: ChatContext) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": context.base_url,
        "OPENAI_API_KEY": context.api_key,
        "OPENAI_MODEL": context.model,
        "ANTHROPIC_BASE_URL": context.anthropic_url,
        "ANTHROPIC_API_KEY": context.api_key,
        "ANTHROPIC_MODEL": context.model,
    }


def _fields(task: Mapping[str, Json]) -> dict[str, str]:
    """What words may name: text as it is, and anything else as JSON."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in task.items()
    }
    return {"here": str(Path.cwd()), **texts}


def _reported(text: str, ended: Ended) -> tuple[float | None, dict[str, float]]:
    """Reward and metrics of a reward file. Raises EpisodeError where it is none."""
    if not text:
        return None, {}
    try:
        said: Any = json.loads(text)
        told = cast("dict[str, Any]", said if isinstance(said, dict) else {"reward": said})
        return told["reward"], told.get("metrics", {})
    except (ValueError, LookupError) as error:
        raise failed(f"TREADLE_REWARD: expected a number or its object, got {error}", ended) from (
            error
        )
