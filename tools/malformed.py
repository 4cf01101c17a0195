"""Requests that are not what they should be: bodies of real clients, broken at random."""

import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from random import Random
from typing import Any, cast

from conversation_clients import Client
from conversation_wires import WireClient

_DEEP: Any = json.loads("[" * 70 + "]" * 70)
_ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 0.5, 1e308, -1e-9, 10**40, 2**31, "", "x", " ", "user", "tool"),
    *("\ud800", "\0", "\ufeff", "é" * 3000, "data:image/png;base64,!!!!", "http://127.0.0.1/"),
    *([], {}, [None], [[]], [{}], {"type": "text"}, {"type": None}, {"": {}}, _DEEP, ["a", 1]),
    {"$ref": "#", "properties": {"a": {"pattern": "(a+)+$"}}},
)
_NAMES = (
    *(
        "n",
        "stop",
        "top_k",
        "seed",
        "logit_bias",
        "response_format",
        "text",
        "reasoning",
        "thinking",
    ),
    *("messages", "input", "model", "tools", "tool_choice", "stream", "stream_options", "metadata"),
    *("chat_template", "prompt_embeds", "previous_response_id", "thread", "system", "instructions"),
    *("max_tokens", "sampling_params", "token_ids", "role", "content", "type", "id", "\ud800", ""),
)
_BYTES = (
    b"NaN",
    b"Infinity",
    b"\xff\xfe",
    b'"model":1,',
    b"{",
    b"]",
    b'"',
    b"\\",
    b"\0",
    b"\\ud800",
)
_HEADERS = ("x-codex-turn-metadata", "x-claude-code-agent-id", "thread-id", "x-session-id")
_MARKS = ("", "{", "[]", '{"request_kind": 7}', '{"parent_thread_id": {}}', "a" * 5000, "[" * 5000)


def body(random: Random, wire: WireClient) -> bytes:
    """A request of a real client, changed in one to four places."""
    stated: Any = json.loads(wire.request(Client(random, pictures=True).ask()))
    for _ in range(random.randint(1, 4)):
        stated = _changed(random, stated)
    written = json.dumps(stated, ensure_ascii=random.random() < 0.9)
    return _garbled(random, written.encode("utf-8", "surrogatepass"))


def tokens(random: Random) -> bytes:
    """A request in tokens, changed likewise."""
    params = {"max_tokens": 9, "temperature": 1.0, "logprobs": 1}
    stated: Any = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": params}
    for _ in range(random.randint(1, 4)):
        stated = _changed(random, stated)
    return _garbled(random, json.dumps(stated).encode())


def headers(random: Random) -> dict[str, str]:
    """Marks that say nothing sensible."""
    return {random.choice(_HEADERS): random.choice(_MARKS)} if random.random() < 0.3 else {}


def _changed(random: Random, stated: Any) -> Any:
    """One value is another one, is gone, is there twice, or has another name."""
    if random.random() < 0.02:
        return _odd(random)
    places = list(_places(stated))
    if not places:
        return stated
    around, key = random.choice(places)
    roll = random.random()
    if roll < 0.5:
        around[key] = _odd(random)
    elif roll < 0.65:
        del around[key]
    elif roll < 0.8:
        other, place = random.choice(places)
        around[key] = json.loads(json.dumps(other[place]))
    elif isinstance(key, str):
        around[random.choice(_NAMES)] = around.pop(key) if roll < 0.9 else _odd(random)
    else:
        around.insert(key, around[key])
    return stated


def _odd(random: Random) -> Any:
    """A value of its own: it may be changed in its turn."""
    return deepcopy(random.choice(_ODD))


def _places(stated: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of objects and arrays, as what holds it and where."""
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(stated, dict):
        members = cast("dict[str, Any]", stated).items()
    elif isinstance(stated, list):
        members = enumerate(cast("list[Any]", stated))
    for key, member in members:
        yield stated, key
        yield from _places(member)


def _garbled(random: Random, written: bytes) -> bytes:
    """Bytes are changed, in some."""
    if random.random() < 0.75:
        return written
    place = random.randint(0, len(written))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: written[:place],
        lambda: written[:place] + random.choice(_BYTES) + written[place:],
        lambda: written[:place] + random.randbytes(2) + written[place + 2 :],
        lambda: b"[" * 100_000 + written,
        lambda: b'{"a":' * 5000 + written + b"}" * 5000,
        lambda: written[:1] + b'"model":"policy",' + written[1:],
    )
    return random.choice(changes)()
