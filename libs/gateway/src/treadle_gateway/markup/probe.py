"""What was measured of a chat template, and how to show it."""

from collections.abc import Set
from dataclasses import dataclass

from treadle_gateway.conversation import Role
from treadle_gateway.markup.form import Form
from treadle_gateway.markup.readers.block import CallFormat


@dataclass(frozen=True, slots=True)
class Follow:
    """A message of a role follows a turn of the policy, under these circumstances."""

    role: Role
    system: bool
    """A system message leads the conversation."""
    tools: bool
    """Tools are defined."""
    reasoning: bool
    """The policy may think."""
    thought: bool
    """It did, in that turn."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a template takes and does."""

    form: Form
    calls: CallFormat | None
    """How the policy calls tools; None: in no way that can be read."""
    thinks: bool
    """The prompt ends within a block of reasoning."""
    thinks_unasked: bool
    """Also where the client wants none."""
    rewrites: Set[Follow]
    """What makes the template write the turns before in another way than they were sampled."""
    image: str = ""
    """What stands for an image; empty where the model reads none."""

    def rows(self) -> list[tuple[str, str]]:
        """What was measured, and what was found."""
        form = self.form
        said = {"text": "a string", "parts": "a list of parts", "mapping": "a mapping"}
        return [
            ("content", said[form.content]),
            ("system message that leads", _or(form.system_first, "leads the first question")),
            ("system message further down", _or(form.system_later, "the user says it")),
            ("a role twice in a row", _or(form.neighbours, "both are one message")),
            ("end of a turn", form.end or "none is written; the sampled one stays"),
            ("tools", _or(form.tools, "told in a system message")),
            ("calls", self.calls.name if self.calls else "in no format that can be read"),
            ("arguments of a call", said[form.arguments] if form.tools else "JSON text"),
            ("words beside calls", _or(form.beside, "a message of their own before")),
            ("several calls in a message", _or(form.parallel, "each with its own result")),
            ("ids of calls", "nine letters or digits" if form.short_ids else "any"),
            ("results of tools", _or(form.results, "the user says them")),
            ("results without a call", _or(form.answers, "the user says them")),
            ("reasoning of a message", _THOUGHTS[form.thoughts]),
            ("reasoning is switched by", ", ".join(form.switches) or "nothing"),
            ("prompt opens reasoning", _opens(self.thinks, self.thinks_unasked)),
            ("images", self.image or "refused"),
            *((f"turns before {who} speaks", self._kept(role)) for role, who in _SPEAKERS),
        ]

    def _kept(self, role: Role) -> str:
        """When the tokens of turns stay."""
        rewritten = [each for each in self.rewrites if each.role == role]
        if not rewritten:
            return "stay"
        if len(rewritten) == _CIRCUMSTANCES:
            return "are written anew"
        flags = ("system", "tools", "reasoning", "thought")
        always = [
            f"{'' if value else 'no '}{_FLAGS[flag]}"
            for flag in flags
            for value in (True, False)
            if len([each for each in rewritten if getattr(each, flag) is value]) == len(rewritten)
        ]
        return f"are written anew in {len(rewritten)} of {_CIRCUMSTANCES} circumstances" + (
            f", always with {', '.join(always)}" if always else ""
        )


_THOUGHTS = {"field": "a field", "inline": "between tags", "none": "left out"}
_SPEAKERS: tuple[tuple[Role, str], ...] = (
    ("user", "a user"),
    ("tool", "a tool"),
    ("system", "a system message"),
    ("assistant", "an assistant"),
)
_FLAGS = {
    "system": "system message",
    "tools": "tools",
    "reasoning": "reasoning wanted",
    "thought": "reasoning in them",
}
_CIRCUMSTANCES = 2 ** len(_FLAGS)


def _or(taken: bool, instead: str) -> str:  # noqa: FBT001 - read as a sentence
    return "taken" if taken else instead


def _opens(thinks: bool, unasked: bool) -> str:  # noqa: FBT001
    return "always" if unasked else "where it is wanted" if thinks else "never"
