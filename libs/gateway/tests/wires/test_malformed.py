"""Requests of real clients, broken at random: each is read or refused, never anything else."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from treadle_gateway.conversation import Ask
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.body import parsed
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.generate import Generate, TokenAsk
from treadle_gateway.wires.messages import Messages
from treadle_gateway.wires.responses import Responses

FIXTURES = Path(__file__).parent / "fixtures"
FILES = ("openai_sdk", "codex_responses_parallel", "claude_code_tool_search", "qwen_code_chat")
WIRES: dict[str, Any] = {
    "/v1/chat/completions": Chat(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    "/inference/v1/generate": Generate(),
}
TOKENS = {"model": "m", "token_ids": [1, 2, 3], "sampling_params": {"logprobs": 1, "n": 1}}
JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, 10**30, "", "auto", "treadle:sha256:", "data:image/png;base64,AAAA"),
    *([], {}, [[]], [None], {"type": "function"}, {"type": ["text"]}, {"$ref": "#"}, [{}] * 3),
    {"role": "assistant", "content": [{"type": "text"}]},
    {"type": "tool_use", "id": 5, "input": []},
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every member of every object and array, with what it is in."""
    members = enumerate(value) if isinstance(value, list) else value.items()
    for name, member in list(members):
        yield value, name
        if isinstance(member, list | dict):
            yield from places(member)


def broken(body: Any, chance: random.Random) -> bytes:
    """The request with one to three of its members replaced, removed or said twice."""
    changed = json.loads(json.dumps(body))
    for _ in range(chance.randint(1, 3)):
        found = list(places(changed))
        if not found:
            break
        around, name = chance.choice(found)
        if chance.random() < 0.2:
            del around[name]
        elif chance.random() < 0.1 and isinstance(around, list):
            around.append(deepcopy(around[name]))
        else:
            around[name] = deepcopy(chance.choice(JUNK))
    data = json.dumps(changed).encode()
    if chance.random() < 0.05:
        cut = chance.randrange(len(data))
        data = data[:cut] + chance.choice([b"", b"\xff", b'"', b"\\u0000"]) + data[cut + 1 :]
    return data


def recorded() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("/inference/v1/generate", TOKENS)]
    for name in FILES:
        exchanges = json.loads((FIXTURES / f"{name}.json").read_text())
        found += [(e["path"], e["body"]) for e in exchanges if e["path"] in WIRES]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_broken_request_is_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311, the same every time
    requests = recorded()
    counts = {"read": 0, "refused": 0}
    for _ in range(75):
        path, body = chance.choice(requests)
        try:
            found = WIRES[path].ask(parsed(broken(body, chance)), {})
        except RefusedError as error:
            counts["refused"] += 1
            status, _, said = WIRES[path].refusal(error)
            json.dumps(said)
            found = None
            if status not in (400, 413):
                pytest.fail(f"{status} for {said}")
        if found is not None:
            counts["read"] += 1
            assert isinstance(found, Ask | TokenAsk)
    assert min(counts.values()) > 10
