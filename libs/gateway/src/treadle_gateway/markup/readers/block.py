"""What a format of tool calls is: markers around a block, and what the block says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.rules import Tokens


@dataclass(frozen=True, slots=True)
class Named:
    """A call has begun."""

    name: str
    """As the policy says it."""
    id: str = ""
    """The policy's own, where its format has such."""


@dataclass(frozen=True, slots=True)
class Argued:
    """More of the arguments of the call that was named last, as JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The call that was named last is whole."""


Step: TypeAlias = Named | Argued | Ended


class Block(Protocol):
    """Reads what stands between the markers, as it comes."""

    def feed(self, text: str) -> list[Step]:
        """What one more text says."""
        ...

    def end(self) -> list[Step]:
        """What is left to say when the block is over, or cut off.

        A call that was named is ended. What names no call says nothing: then it was text.
        """
        ...


class CallFormat(Protocol):
    """One way of calling tools."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def opens(self) -> str:
        """Marker before a block."""
        ...

    @property
    def closes(self) -> str:
        """Marker behind a block; empty where only the end of the turn is one."""
        ...

    @property
    def bare(self) -> bool:
        """A reply that begins with a JSON object may be a block without markers."""
        ...

    @property
    def inner(self) -> frozenset[str]:
        """Special tokens that mean something within a block."""
        ...

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        """A reader of one block; `tools` by the name that the policy knows."""
        ...

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        """Rules for calls of `tools`, by name, as the format is read; they may use `SPACE`.

        `calls`: one call, or with `several` any number; with `bare` the rule `bare` too: the same
        without the marker.
        """
        ...
