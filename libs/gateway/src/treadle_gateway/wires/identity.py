"""Marks by which clients tell the conversations of one session apart.

Only what a client states is read here; the shape of a conversation is looked at by capture.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

_HEADERS = {
    "x-claude-code-agent-id": "agent",
    "x-claude-code-parent-agent-id": "parent",
    "x-claude-code-session-id": "thread",
    "thread-id": "thread",
    "x-codex-parent-thread-id": "parent",
    "x-session-id": "thread",
    "x-parent-session-id": "parent",
    "x-treadle-untrained": "untrained",
}
_CODEX = "x-codex-turn-metadata"
MAX_MARK = 128
"""Characters."""
MAX_METADATA = 16 * 1024
"""Bytes of a header that is JSON."""


def identity(headers: Mapping[str, str]) -> dict[str, str]:
    """Marks of a request: `agent`, `parent`, `thread`, `kind`, `untrained`; absent where unstated.

    `agent` is a sub-agent's id; who has none is the main agent. `untrained` says that the episode's
    reward is not for what is sampled.
    """
    found = {mark: headers[name] for name, mark in _HEADERS.items() if headers.get(name)}
    metadata = _metadata(headers.get(_CODEX, ""))
    if "parent_thread_id" in metadata:
        found.setdefault("parent", metadata["parent_thread_id"])
    child = "x-openai-subagent" in headers or "x-parent-session-id" in headers
    if (child or metadata.get("thread_source") == "subagent") and "thread" in found:
        found.setdefault("agent", found["thread"])
    kind = metadata.get("request_kind", "turn")
    if kind != "turn":
        found["kind"] = kind
    return {mark: value[:MAX_MARK] for mark, value in found.items()}


def _metadata(header: str) -> dict[str, str]:
    """Texts of the JSON object in a header; whatever else comes says nothing."""
    if not 0 < len(header) <= MAX_METADATA:
        return {}
    try:
        value: Any = json.loads(header)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    stated = cast("dict[str, Any]", value)
    return {name: text for name, text in stated.items() if isinstance(text, str) and text}
