"""What a reply must be where a client wants a tool called, as a grammar for the engine; pure."""

from collections.abc import Mapping
from typing import Literal, TypeAlias

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.form import Form
from treadle_gateway.markup.readers.block import CallFormat
from treadle_gateway.markup.readers.rules import SHARED, Tokens, marker, quoted

Thought: TypeAlias = Literal["begun", "free", "none"]
"""Whether the policy thinks before it calls: the prompt began it; as it likes; it does not."""


def calls_grammar(
    form: Form,
    calls: CallFormat,
    tools: Mapping[str, Tool],
    tokens: Tokens,
    *,
    thought: Thought,
    several: bool,
) -> str:
    """A reply that calls one of `tools`, or `several`, and says nothing beside that.

    `tools` are by the names that the policy says.
    """
    opens, closes = marker(tokens, form.opens), marker(tokens, form.closes)
    begins = {"begun": "thought", "free": f"({opens} thought)?", "none": ""}[thought]
    # What follows a thought is never read as a call without a marker.
    start = "calls | bare" if calls.bare and thought == "none" else f"{begins} calls".lstrip()
    thinks = f"thought: /(?s:.*)/ {closes} SPACE?"
    if form.closes not in tokens:
        thinks = f"thought: thinks SPACE?\nthinks[lazy]: /(?s:.*)/ {quoted(form.closes)}"
    rules = [f"start: {start}", SHARED, calls.grammar(tools, tokens, several=several)]
    return "\n".join(rules if thought == "none" else [*rules, thinks])
