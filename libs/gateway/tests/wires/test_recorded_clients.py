"""What real clients sent, recorded in their runs; words are replaced by their lengths."""

import json
from pathlib import Path
from typing import Any

import pytest

from treadle_gateway.conversation import Ask
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.body import parsed
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.messages import Messages
from treadle_gateway.wires.responses import Responses
from treadle_gateway.wires.wire import Wire

FIXTURES = Path(__file__).parent / "fixtures"
WIRES: dict[str, Wire] = {
    "/chat/completions": Chat(),
    "/responses": Responses(),
    "/messages": Messages(),
    "/messages/count_tokens": Messages(),
}
REFUSED = {
    "chat_template_kwargs": "an extra of one SDK run, on the list of what is denied",
    "previous_response_id": "no state is kept",
    "thread": "no state is kept",
    "compaction_trigger": "nothing is compacted here",
}


def recorded(name: str) -> list[Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def ask(exchange: Any) -> Ask:
    body = parsed(json.dumps(exchange["body"]).encode())
    return WIRES[exchange["path"].removeprefix("/v1")].ask(body, exchange["headers"])


def is_refused(body: Any) -> bool:
    items = body.get("input")
    compacts = isinstance(items, list) and {"type": "compaction_trigger"} in items
    return compacts or any(name in body for name in REFUSED)


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_every_recorded_request_is_read_or_refused_for_a_stated_reason(name: str) -> None:
    spoken = [e for e in recorded(name) if e["path"].removeprefix("/v1") in WIRES]
    for exchange in spoken:
        if is_refused(exchange["body"]):
            with pytest.raises(RefusedError, match="|".join(REFUSED)):
                ask(exchange)
            continue
        found = ask(exchange)
        assert found.messages
        assert found.model == exchange["body"]["model"]
        assert found.stream == bool(exchange["body"].get("stream"))


def test_a_history_grows_by_what_was_said_since() -> None:
    first, second, third = (ask(e).messages for e in recorded("claude_code_messages_two_turns"))
    assert second[: len(first)] == first
    assert third[: len(second)] == second


def test_sub_agents_are_told_apart() -> None:
    marks = [ask(e).identity for e in recorded("claude_code_subagent")]
    assert all("agent" in mark for mark in marks)
    child = ask(recorded("codex_subagent")[1]).identity
    assert child["agent"] == child["thread"]
    assert "parent" in child
    parents = [ask(e).identity.get("parent") for e in recorded("opencode_subagent")]
    assert parents == [None, "ses_<id>", None]


def test_a_compaction_that_says_so_is_labelled() -> None:
    kinds = [ask(e).identity.get("kind") for e in recorded("codex_compaction_local")]
    assert kinds == ["compaction", None]


def test_tools_in_a_namespace_and_hosted_ones() -> None:
    found = ask(recorded("codex_responses_parallel")[0])
    assert {tool.namespace for tool in found.tools} == {"", "multi_agent_v1"}
    assert "tools.web_search" in found.ignored


def test_parallel_calls_are_answered_in_order() -> None:
    for name in ("claude_code_parallel_calls", "codex_responses_parallel", "qwen_code_chat"):
        messages = ask(recorded(name)[-1]).messages
        callers = [m for m in messages if len(m.calls) == 2]
        assert callers, name
        results = [m for m in messages if m.role == "tool"]
        assert len(results) >= 2, name


def test_a_note_in_the_middle_stays_where_it_is() -> None:
    roles = [
        message.role for message in ask(recorded("claude_code_background_task_note")[0]).messages
    ]
    assert "system" in roles[2:]


def test_a_trailing_assistant_message_stays_the_last() -> None:
    asks = [ask(e) for e in recorded("codex_partial_stream_kept")]
    assert len(asks[1].messages) > len(asks[0].messages)
