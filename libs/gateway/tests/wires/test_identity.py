"""Marks by which clients tell their conversations apart."""

import json

import pytest

from treadle_gateway.wires.identity import identity

TURN = {"thread_id": "t", "request_kind": "turn", "thread_source": "user", "window": 1}
CHILD = TURN | {"thread_source": "subagent", "parent_thread_id": "p"}


@pytest.mark.parametrize(
    ("headers", "marks"),
    [
        pytest.param({}, {}, id="none"),
        pytest.param({"x-claude-code-session-id": "s"}, {"thread": "s"}, id="claude-code"),
        pytest.param(
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "a",
                "x-claude-code-parent-agent-id": "b",
            },
            {"thread": "s", "agent": "a", "parent": "b"},
            id="nested-agent-of-claude-code",
        ),
        pytest.param(
            {"thread-id": "t", "x-codex-turn-metadata": json.dumps(TURN)},
            {"thread": "t"},
            id="codex",
        ),
        pytest.param(
            {"thread-id": "t", "x-codex-turn-metadata": json.dumps(CHILD)},
            {"thread": "t", "agent": "t", "parent": "p"},
            id="child-of-codex",
        ),
        pytest.param(
            {
                "thread-id": "t",
                "x-codex-parent-thread-id": "p",
                "x-openai-subagent": "collab_spawn",
            },
            {"thread": "t", "agent": "t", "parent": "p"},
            id="child-of-codex-by-headers",
        ),
        pytest.param(
            {
                "thread-id": "t",
                "x-codex-turn-metadata": json.dumps(TURN | {"request_kind": "compaction"}),
            },
            {"thread": "t", "kind": "compaction"},
            id="compaction-of-codex",
        ),
        pytest.param(
            {"x-session-id": "c", "x-parent-session-id": "p"},
            {"thread": "c", "parent": "p", "agent": "c"},
            id="child-of-opencode",
        ),
        pytest.param({"x-treadle-untrained": "1"}, {"untrained": "1"}, id="not-trained"),
    ],
)
def test_a_client_is_known_by_its_own_marks(headers: dict[str, str], marks: dict[str, str]) -> None:
    assert identity(headers) == marks


@pytest.mark.parametrize("metadata", ["", "{", "[]", "5", '{"request_kind": 5}', "[" * 10_000])
def test_metadata_that_is_none_says_nothing(metadata: str) -> None:
    assert identity({"x-codex-turn-metadata": metadata}) == {}


def test_a_mark_is_bounded() -> None:
    assert identity({"x-session-id": "x" * 10_000}) == {"thread": "x" * 128}
