"""What a message means: two messages with one meaning are one place in the tree of a session.

What clients change without a change of meaning does not show here: the order of arguments, blocks
that become a string, white space around what the policy said, reasoning that is left out. A call
that the session issued is known by its id alone, whatever became of its arguments.
"""

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

from treadle_core.tickets import Json
from treadle_gateway.conversation import Ask, Image, Message, Part, Text, ToolCall

_THINK, _THOUGHT = "<think>", "</think>"


class Meaning(NamedTuple):
    """What tells a message from its siblings."""

    key: bytes
    """Siblings with different keys have different meanings."""
    words: bytes = b""
    """Of a message that is known by its calls, what it says beside them; empty for nothing."""
    reasoning: bytes = b""
    """What was thought before it was said; empty for nothing, or left out."""

    def fits(self, known: "Meaning") -> bool:
        """Whether this message, with an equal key, is the `known` one: equal, or less is told."""
        return self.words in (b"", known.words) and self.reasoning in (b"", known.reasoning)


def meaning_of(message: Message, issued: AbstractSet[str]) -> Meaning:
    """The meaning of `message`, where the ids in `issued` are those of calls of the session."""
    if message.role != "assistant":
        head = f"{message.role} {message.is_error:d} {len(message.call_id)}:{message.call_id}"
        return Meaning(_digest(head + _content(message.parts)))
    reasoning, said = _thought_and_said(message)
    thought = _digest(reasoning) if reasoning else b""
    ids = [call.id for call in message.calls]
    if not issued.isdisjoint(ids):
        return Meaning(_digest("calls " + "\0".join(ids)), _digest(said) if said else b"", thought)
    calls = "".join(map(_written, message.calls))
    return Meaning(_digest(f"assistant {len(said)}:{said}{calls}"), b"", thought)


def head_of(ask: Ask) -> bytes:
    """What stands before all messages; a turn goes on only from one with the same head."""
    if not ask.tools:
        return _BARE[ask.reasoning]
    tools: list[Json] = [
        [tool.namespace, tool.name, tool.description, dict(tool.parameters)] for tool in ask.tools
    ]
    return _digest(_canonical([tools, ask.reasoning]))


def wanted_of(ask: Ask) -> bytes:
    """How the reply is wanted, without what changes nothing of the sampling but its bound."""
    wanted, choice = ask.wanted, ask.choice
    told = (
        *(wanted.temperature, wanted.top_p, wanted.top_k, wanted.min_p, wanted.seed),
        *(wanted.presence_penalty, wanted.frequency_penalty, wanted.repetition_penalty),
        sorted(wanted.logit_bias.items()),
        wanted.stop,
        None if wanted.schema is None else _canonical(dict(wanted.schema)),
        *(choice.mode, choice.names, choice.parallel),
        bool(ask.identity.get("untrained")),
    )
    return _digest(repr(told))


def words_of(text: str) -> bytes:
    """A key for plain words."""
    return _digest(text)


def _thought_and_said(message: Message) -> tuple[str, str]:
    """Reasoning and words without outer white space; some clients return one inside the other."""
    said = _content(message.parts).strip()
    if not message.reasoning and said.startswith(_THINK):
        thought, closed, rest = said[len(_THINK) :].partition(_THOUGHT)
        if closed:
            return thought.strip(), rest.strip()
    return message.reasoning.strip(), said


def _content(parts: Sequence[Part]) -> str:
    """Parts as one text, however words are cut into blocks. No wire lets a NUL in."""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return "".join(f"\0{part.sha256}\0" if isinstance(part, Image) else part.text for part in parts)


def _written(call: ToolCall) -> str:
    """A call that the session did not issue: all of it."""
    arguments = call.arguments.strip()
    with suppress(ValueError, RecursionError):  # what is no JSON is compared as it stands
        arguments = _canonical(json.loads(arguments, parse_float=_number))
    told = (call.id, call.namespace, call.name, arguments)
    return "".join(f" {len(text)}:{text}" for text in told)


def _number(written: str) -> float:
    """A number as clients write it that know only one kind: `5000.0` is `5000`."""
    number = float(written)
    return int(number) if number.is_integer() else number


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Json) -> str:
    return _ENCODER.encode(value)


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


_BARE = {reasoning: _digest(_canonical([[], reasoning])) for reasoning in (False, True)}
"""What stands there without tools."""
