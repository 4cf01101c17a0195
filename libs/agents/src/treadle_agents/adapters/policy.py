"""The policy of an episode, asked over HTTP as any model behind an API.

Needs aiohttp, which the extras of the agents that use it bring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from treadle_agents.adapters.libraries import library
from treadle_agents.chat_agent import ChatContext
from treadle_core.errors import Kind, TreadleError

_TOLD = 400
"""Most characters of a refusal that are quoted."""


class RefusedError(TreadleError):
    """The gateway did not answer a request of this agent."""

    kind = Kind.PRECONDITION
    reason = "POLICY_REFUSED"


class NoRoomError(RefusedError):
    """The conversation has no room left for a reply."""

    reason = "POLICY_NO_ROOM"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy said."""

    message: dict[str, Any]
    """As it goes back into the conversation, in OpenAI's form."""

    @property
    def content(self) -> str:
        """Its words; empty where it only called."""
        return self.message.get("content") or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Its calls of tools, in OpenAI's form."""
        return self.message.get("tool_calls") or []


class Policy:
    """Asks within `async with`."""

    def __init__(self, context: ChatContext, *, extra: str) -> None:
        """`extra` brings aiohttp. Raises InvalidFieldError where it is missing."""
        self._http = library("aiohttp", extra=extra)
        self._context = context

    async def __aenter__(self) -> Self:
        # The episode has a deadline; a reply has none of its own.
        self._client: Any = self._http.ClientSession(
            headers={"Authorization": f"Bearer {self._context.api_key}"},
            timeout=self._http.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._client.close()

    async def ask(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        trained: bool = True,
    ) -> Reply:
        """The next message of a conversation. Not `trained`: the reward is not for it.

        Raises NoRoomError, and RefusedError for any other refusal.
        """
        body: dict[str, Any] = {"model": self._context.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        headers = {} if trained else {"X-Treadle-Untrained": "1"}
        url = f"{self._context.base_url}/chat/completions"
        async with self._client.post(url, json=body, headers=headers) as answer:
            said: Any = await answer.json(content_type=None)
            if answer.status != 200:
                error = said.get("error", {})
                raised = (
                    NoRoomError if error.get("code") == "context_length_exceeded" else RefusedError
                )
                raise raised(f"status {answer.status}: {str(error.get('message'))[:_TOLD]}")
        return Reply(said["choices"][0]["message"])
