"""Which turns keep their tokens when a conversation goes on; pure."""

from collections.abc import Sequence, Set

from treadle_gateway.conversation import Message, Role
from treadle_gateway.markup.probe import Follow, Probe


def standing(
    before: Sequence[Message],
    new: Sequence[Message],
    probe: Probe,
    *,
    tools: bool,
    reasoning: bool,
) -> int:
    """Leading messages of `before` whose tokens stay when `new` follows.

    They end with an assistant's, or are none. A turn that something in `before` rewrote already is
    no turn there, but context.
    """
    turns = [place for place, each in enumerate(before) if each.role == "assistant"]
    if not turns or not probe.rewrites:
        return turns[-1] + 1 if turns else 0
    system = before[0].role == "system"

    def rewritten(turn: Message, roles: Set[Role]) -> bool:
        thought = bool(turn.reasoning)
        return any(
            Follow(role, system, tools, reasoning, thought) in probe.rewrites for role in roles
        )

    says = _others(new, probe)
    behind: set[Role] = set()
    stands = 0
    for place in range(len(before) - 1, -1, -1):
        turn = before[place]
        if turn.role != "assistant":
            behind |= _others([turn], probe)
            continue
        beside = before[place + 1 : place + 2]
        was = behind | _next(beside)
        added = says if beside else says | _next(new[:1])
        if rewritten(turn, added) and not rewritten(turn, was):
            stands = 0
        elif not stands:
            stands = place + 1
    return stands


def _others(messages: Sequence[Message], probe: Probe) -> set[Role]:
    """Who speaks for the template, but for assistants."""
    return {
        "user" if each.role == "tool" and not (each.call_id or probe.form.answers) else each.role
        for each in messages
        if each.role != "assistant"
    }


def _next(message: Sequence[Message]) -> set[Role]:
    """An assistant, where one speaks right behind a turn; further down it changes nothing."""
    return {each.role for each in message if each.role == "assistant"}
