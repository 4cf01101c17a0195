"""How a transition lies in a Redis list: its kind, a space, its body as JSON."""

import json
from collections.abc import Iterable
from typing import Any

from treadle_experience.core.errors import LedgerFormatError
from treadle_experience.core.transitions import (
    INLINED,
    PayloadsReleased,
    Transition,
    WithPayload,
    from_body,
    kind_of,
    to_body,
)

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dump(transition: Transition) -> bytes:
    """The row of a transition, without its payload."""
    return f"{kind_of(transition)} {_ENCODER.encode(to_body(transition))}".encode()


def payload(transition: Transition) -> bytes | None:
    """The bytes that travel beside its row."""
    return transition.inline if isinstance(transition, WithPayload) else None


def changes(transitions: Iterable[Transition]) -> tuple[list[str], dict[str, bytes]]:
    """What they do to the stored payloads, in sum: those to delete first, then those to keep."""
    released: list[str] = []
    kept: dict[str, bytes] = {}
    for each in transitions:
        if isinstance(each, WithPayload) and each.inline is not None:
            kept[each.episode_id] = each.inline
        elif isinstance(each, PayloadsReleased):
            released += each.episode_ids
            for episode_id in each.episode_ids:
                kept.pop(episode_id, None)
    return released, kept


class Parsed:
    """A row that was read; its transition once its payload is known."""

    def __init__(self, row: bytes, where: str) -> None:
        """Raises LedgerFormatError, saying where, for what is no row."""
        self.row = row
        kind, _, text = row.partition(b" ")
        try:
            self._kind = kind.decode()
            self._body: dict[str, Any] = json.loads(text)
            self.episode_id = str(self._body["episode_id"]) if self._kind in INLINED else ""
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerFormatError(
                f"{where}: {error!r}", field="ledger", value=row[:80]
            ) from error

    def transition(self, inline: bytes | None) -> Transition:
        """Raises LedgerFormatError for a kind or a body that says nothing."""
        return from_body(self._kind, self._body, inline)
