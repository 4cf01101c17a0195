"""Whether turns keep their tokens when a conversation goes on, by rendering them; pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from treadle_gateway.conversation import Message, Role
from treadle_gateway.markup.bench import (
    ARGUMENTS,
    ASKS,
    ASKS_MORE,
    OTHER_ARGUMENTS,
    SAYS,
    SAYS_MORE,
    SYSTEM,
    THOUGHT,
    TOOL,
    Bench,
    calling,
    reads,
    result,
    said,
)
from treadle_gateway.markup.probe import Follow, Probe
from treadle_gateway.markup.renderer import RefusedByTemplateError
from treadle_gateway.markup.spelling import Spelling


@dataclass(frozen=True, slots=True)
class Trial:
    """Whether prompt, turn and what follows are together what the template makes of them all."""

    bench: Bench
    spelling: Spelling
    probe: Probe
    """But for what is tried."""

    def rewrites(self) -> Iterator[Follow]:
        """What makes the template write an earlier turn in another way."""
        flags = (True, False)
        tried: dict[Follow, bool] = {}
        for role, system, tools, reasoning, thought in product(_ROLES, flags, flags, flags, flags):
            # Where nothing asks for thoughts, and none are known, they are words like others.
            reasons = reasoning or not self.probe.form.switches
            same = Follow(role, system, tools, reasons, thought and self._knows_thinking)
            if same not in tried:
                tried[same] = all(self._stands(each, same) for each in _cases(role, system=system))
            if not tried[same]:
                yield Follow(role, system, tools, reasoning, thought)

    def _stands(self, case: "_Case", follow: Follow) -> bool:
        form, whole = self.probe.form, self.bench.whole
        if (case.parallel and not form.parallel) or (case.unasked and not form.answers):
            return True  # it is put in the way of another case
        turn = replace(case.turn, reasoning=THOUGHT if follow.thought else "")
        # What was thought was asked for, whatever the client wants of the next turn.
        asked = follow.reasoning or follow.thought
        tools = [TOOL] if follow.tools else []
        prompt = whole(form, case.history, tools=tools, reasoning=asked)
        alone = whole(form, [*case.history, turn], tools=tools, reasoning=asked, opens=False)
        then = whole(
            form, [*case.history, turn, *case.new], tools=tools, reasoning=follow.reasoning
        )
        behind = self._behind([*case.history, turn], case.new, follow)
        if prompt is None or then is None or behind is None or not then.startswith(prompt):
            return False
        end, behind = behind
        spoken = then[len(prompt) :]
        if alone is not None and alone.startswith(prompt):
            first = alone[len(prompt) :]
            if not spoken.startswith(first.partition(end)[0] if end else first.rstrip()):
                return False
        tokens = self.spelling.encode(self.bench.guard.plain(spoken.removesuffix(behind)))
        thinks = self.probe.thinks if asked else self.probe.thinks_unasked
        return spoken.endswith(behind) and reads(
            self.spelling, form, self.probe.calls, tokens, turn, thinks=thinks
        )

    def _behind(
        self, before: Sequence[Message], new: Sequence[Message], follow: Follow
    ) -> tuple[str, str] | None:
        """The end of the turn, and all that follows the turn; None where it cannot be told."""
        renderer = self.bench.renderer(self.probe.form)
        try:
            delta = renderer.delta(before, new, tools=follow.tools, reasoning=follow.reasoning)
        except RefusedByTemplateError:
            return None
        return (delta.end, delta.end + delta.text) if delta else None

    @property
    def _knows_thinking(self) -> bool:
        form = self.probe.form
        written = self.probe.thinks or form.thoughts == "field" or bool(form.switches)
        return written or form.opens in self.spelling.markers


@dataclass(frozen=True, slots=True)
class _Case:
    """A turn of the policy behind some history, and what follows it."""

    history: Sequence[Message]
    turn: Message
    new: Sequence[Message]
    parallel: bool = False
    """The turn makes several calls."""
    unasked: bool = False
    """The turn makes none, and yet has a result."""


def _cases(role: Role, *, system: bool) -> Iterator[_Case]:
    """Conversations in which a role speaks behind a turn; `system`: a system message leads."""
    asked = [[ASKS], [ASKS, SAYS, ASKS_MORE]]
    asked.append([ASKS, calling(ARGUMENTS), result("Probe-result")])
    for each in asked:
        history = [SYSTEM, *each] if system else each
        match role:
            case "tool":
                one, two = result("Probe-first", at=1), result("Probe-second", at=1, n=1)
                yield _Case(history, calling(ARGUMENTS, at=1), [one])
                both = calling(ARGUMENTS, OTHER_ARGUMENTS, at=1)
                yield _Case(history, both, [one, two], parallel=True)
                yield _Case(history, SAYS_MORE, [said("tool", "Probe-last")], unasked=True)
            case "assistant":
                yield _Case(history, SAYS_MORE, [SAYS, said("user", "Probe-last")])
            case _:
                yield _Case(history, SAYS_MORE, [said(role, "Probe-last")])


_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
