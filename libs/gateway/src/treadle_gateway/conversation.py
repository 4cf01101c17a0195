"""The vocabulary of a conversation, the same for every wire and every model; pure.

A wire makes an `Ask` of a request. Capture finds where it goes on from. Markup makes tokens of what
is new, and events of what the policy samples. The wire makes bytes of the events.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from treadle_agents.images.picture import Picture
from treadle_core.tickets import Json

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""A `developer` is `system`. A tool's result is a message of its own, on every wire."""


@dataclass(frozen=True, slots=True)
class Text:
    """Words."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture, named by its content; the bytes lie with the session's media."""

    sha256: str
    media_type: str
    """`image/png`, `image/jpeg`, `image/webp` or `image/gif`."""


Part: TypeAlias = Text | Image


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the policy asks a tool for."""

    id: str
    """Unique for ever; made by the gateway, echoed by the client."""
    name: str
    arguments: str
    """As it was said: JSON, or what should have been."""
    namespace: str = ""
    """Of the tool, where the wire has such."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    """What an assistant thought before it spoke; empty also where the client dropped it."""
    calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    call_id: str = ""
    """Of a tool's result: the call that it answers."""
    is_error: bool = False
    """Of a tool's result."""

    @property
    def text(self) -> str:
        """All words, joined as they stand."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of the arguments."""
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the client wants called."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    """The tools that it may be; empty: all that are offered."""
    parallel: bool = True
    """Several calls in one reply are welcome."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How the client wants the policy to sample; None and empty: as the recipe says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    stop: tuple[str, ...] = ()
    """Texts that end the turn; not shown to the client."""
    schema: Mapping[str, Json] | None = None
    """JSON schema that the text of the reply obeys; `{}` is any JSON object."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, whatever wire it came over."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    wanted: Wanted = Wanted()
    max_tokens: int | None = None
    """Most tokens of the reply; more than there is room for is no error."""
    reasoning: bool = True
    """The policy may think before it speaks, where its template can leave that out."""
    stream: bool = False
    usage_in_stream: bool = True
    logprobs: bool = False
    """The client wants the log-probability of each token."""
    identity: Mapping[str, str] = field(default_factory=dict[str, str])
    """What tells conversations of one session apart, by the client's own marks: `agent` (a
    sub-agent's id), `parent`, `thread`, `kind` (`compaction`, `title`, ...); and `untrained`, where
    the episode's reward is not for what is sampled."""
    ignored: tuple[str, ...] = ()
    """Names of fields that were tolerated and mean nothing here; counted."""
    media: Mapping[str, Picture] = field(default_factory=dict[str, Picture])
    """The images whose bytes came with this request, by sha256."""
    references: Mapping[str, str] = field(default_factory=dict[str, str])
    """By sha256 of each image that was referred to, the field that does so first."""


Finish: TypeAlias = Literal["stop", "length", "calls"]
"""Why a reply ended: the policy stopped (or a stop text came), no room was left, it calls tools."""


@dataclass(frozen=True, slots=True)
class Usage:
    """True counts of tokens."""

    prompt: int
    """All tokens before the reply."""
    cached: int
    """Those of them that the session had seen before."""
    sampled: int
    """Tokens of the reply, reasoning included."""
    reasoning: int = 0
    """Those of them that are reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the policy thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of what it says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """It calls a tool; the arguments follow."""

    id: str
    name: str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the arguments of the call that started last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of the call that started last are whole."""


Event: TypeAlias = ReasoningDelta | TextDelta | CallStarted | ArgumentsDelta | CallEnded
"""What a stream says, in the order in which it was sampled. Never an empty text."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply."""

    id: str
    """Random part of the ids that the wires show, hex; the wire puts its own prefix before it."""
    created: int
    """Seconds since 1970."""
    message: Message
    """What the policy said; role assistant."""
    finish: Finish
    usage: Usage
    stop: str = ""
    """The stop text that ended it; empty where none did."""
    token_ids: tuple[int, ...] = ()
    """As sampled."""
    logprobs: tuple[float, ...] = ()
    """Of each token."""
