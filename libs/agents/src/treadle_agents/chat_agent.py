"""Agents that own their loop: they talk to the policy over HTTP, as to any model behind an API."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from treadle_agents.env import Result
from treadle_agents.images.inlined import inlined
from treadle_core.tickets import Json, Sampling


@dataclass(frozen=True, slots=True)
class ChatContext:
    """What an agent is given for one episode."""

    task: Mapping[str, Json]
    """The task, as its source made it."""
    base_url: str
    """For OpenAI clients; ends with `/v1`. Good for this episode alone."""
    anthropic_url: str
    """For Anthropic clients."""
    api_key: str
    """For both; good until the episode ends."""
    model: str
    """The name that the policy answers to."""
    sampling: Sampling
    """How the policy samples; a client need not repeat it."""
    max_context: int
    """Most tokens of prompt and reply together."""
    deadline_s: float
    """Wall-clock seconds after which the episode has failed."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The task's `messages` in OpenAI's form, or its `prompt` as a message of the user.

        What users say has the task's images in place of the markers `<image>`, in order; a marker
        for which none is left stays. Raises ValueError naming an image that is none.
        """
        messages = self.task.get("messages")
        if isinstance(messages, list):
            return inlined(cast("list[dict[str, Any]]", messages), self.images)
        return inlined([{"role": "user", "content": self.prompt}], self.images)

    @property
    def prompt(self) -> str:
        """The task's `prompt`, or the text of the last message of the user."""
        if isinstance(prompt := self.task.get("prompt"), str):
            return prompt
        messages = self.task.get("messages")
        for message in reversed(messages if isinstance(messages, list) else []):
            if isinstance(message, dict) and message.get("role") == "user":
                return _text(message.get("content"))
        raise TypeError("task: expected prompt as text, or messages with one of the user")

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The task's `tools`, in OpenAI's form; none where it has none."""
        tools = self.task.get("tools")
        return cast("list[dict[str, Any]]", list(tools)) if isinstance(tools, list) else []

    @property
    def label(self) -> Json:
        """The task's `label`: what a grader compares with."""
        return self.task.get("label")

    @property
    def images(self) -> list[Json]:
        """The task's `images`: data URIs, content references, base64, or paths of files."""
        images = self.task.get("images")
        return list(images) if isinstance(images, list) else []


class ChatAgent:
    """One episode's agent; a fresh one is made for every attempt.

    Methods may be plain or `async`. Plain ones run in a thread of their own and may block; `async`
    ones share the event loop of their process with other episodes and must not.
    """

    def run(self, context: ChatContext) -> Result | Awaitable[Result]:
        """Plays the whole episode; the result says what it was worth, and whether it was cut short.

        Raises PolicyError where what the policy said cannot be acted on.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode holds. Always called once; a failure here is only logged."""


class External:
    """Agent plugin `external`: nobody plays it here.

    A client anywhere takes the episode by `POST /sessions` with the run's token, or by
    `RolloutService.OpenSession`, plays it, and reports what it was worth when it ends the session.
    """


def _text(content: Json) -> str:
    """The words of a message's content, which is text or a list of parts."""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        return "".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""
