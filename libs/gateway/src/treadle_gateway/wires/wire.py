"""What every wire can do; pure functions over JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from treadle_core.tickets import Json
from treadle_gateway.conversation import Ask, Event, Reply
from treadle_gateway.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known of a reply before it is said; as it will be in the reply."""

    id: str
    created: int
    """Seconds since 1970."""
    prompt_tokens: int
    cached_tokens: int
    """Those of them that the session had seen before."""


class Stream(Protocol):
    """One reply as server-sent events. The same events and reply give the same bytes.

    `start`, any number of `event` and `ping`, then `end` or `failed`: what `failed` says is never a
    clean end, and the connection is closed behind it.
    """

    def start(self) -> bytes:
        """What is said before the policy says anything."""
        ...

    def event(self, event: Event) -> bytes:
        """What the policy said; may be empty."""
        ...

    def end(self, reply: Reply) -> bytes:
        """What is said behind the last event."""
        ...

    def failed(self, error: RefusedError) -> bytes:
        """The reply does not come to an end."""
        ...

    def ping(self) -> bytes:
        """Says that the stream is alive; means nothing else to the client."""
        ...


class Wire(Protocol):
    """One protocol that clients speak."""

    @property
    def name(self) -> str:
        """For records and counts."""
        ...

    @property
    def call_prefix(self) -> str:
        """What the id of a tool call begins with; whoever makes one puts random hex behind it."""
        ...

    def ask(self, body: Mapping[str, Json], headers: Mapping[str, str]) -> Ask:
        """What a request asks; names of `headers` are lower-case. Raises RefusedError."""
        ...

    def reply(self, ask: Ask, reply: Reply) -> dict[str, Json]:
        """A whole reply."""
        ...

    def stream(self, ask: Ask, begun: Begun) -> Stream:
        """A stream for one reply."""
        ...

    def refusal(self, error: RefusedError) -> tuple[int, dict[str, str], dict[str, Json]]:
        """Status, headers and body."""
        ...
