"""The markup of one model: tokens of messages, and events of what it samples."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat import Template
from treadle_core.errors import InvalidFieldError
from treadle_gateway.conversation import Message, Tool, ToolChoice
from treadle_gateway.errors import RefusedError
from treadle_gateway.markup.errors import UnsupportedTemplateError
from treadle_gateway.markup.measure import guarded_tokens, measure
from treadle_gateway.markup.probe import Probe
from treadle_gateway.markup.reader import Reader
from treadle_gateway.markup.renderer import RefusedByTemplateError, Renderer
from treadle_gateway.markup.standing import standing
from treadle_gateway.markup.words import Guard, Words, declared

_AUTO = ToolChoice()

_MOST_CHARACTERS = 128
"""Of one token: no known tokenizer has a longer one."""


class Markup:
    """Chat template and tokenizer of a Hugging Face folder."""

    probe: Probe
    """What was measured of them."""

    def __init__(self, folder: Path, *, max_context: int = 0) -> None:
        """`max_context` bounds the tokens of a prompt where it is not 0.

        Raises UnsupportedTemplateError.
        """
        self._max_context = max_context
        try:
            template = Template(folder)
        except InvalidFieldError as error:
            raise UnsupportedTemplateError(
                error.message, field=error.field, limit=error.limit, value=error.value
            ) from error
        tokenizer = declared(folder)
        kept = guarded_tokens(template, tokenizer)
        guard = Guard(kept)
        self._words = Words(tokenizer, guard, kept)
        self.probe = measure(template, guard, self._words)
        self._guard = guard
        self._renderer = Renderer(template, guard, self.probe.form)

    def stands(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: bool = True,
        reasoning: bool = True,
    ) -> int:
        """Leading messages of `before` whose tokens stay when `new` follows.

        They end with a turn of the policy, or are none. `tools` and `reasoning` are those of the
        request; tools are thought to be there, which never lets more stand.
        """
        return standing(before, new, self.probe, tools=tools, reasoning=reasoning)

    def render(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: Sequence[Tool],
        choice: ToolChoice = _AUTO,
        reasoning: bool = True,
        closed: bool = True,
    ) -> NDArray[np.int32]:
        """Tokens of `new` behind those of `before`, up to where the policy speaks, [T].

        `choice` changes none of them, so that turns stand whatever a client wants of the next.
        `before` is empty, or ends with a turn of the policy, and `stands`; `closed`: its last
        token ended the turn. A last assistant message without calls is gone on with, as is a turn
        that was not closed when nothing is new. Raises RefusedError.
        """
        del choice
        if tools and self.probe.calls is None:
            message = "tools: the model's chat template writes calls in a way that cannot be read"
            raise RefusedError("invalid", message, field="tools")
        try:
            if not before:
                return self._whole(new, tools, reasoning=reasoning)
            if not new and not closed:
                return np.zeros(0, np.int32)
            return self._behind(before, new, tools, reasoning=reasoning, closed=closed)
        except RefusedByTemplateError as error:
            raise RefusedError(
                "invalid",
                f"messages: the model's chat template refuses them: {error}",
                field="messages",
            ) from error

    def reader(
        self,
        *,
        tools: Sequence[Tool],
        reasoning: bool,
        stop: Sequence[str],
        new_id: Callable[[], str],
        choice: ToolChoice = _AUTO,
        goes_on: bool = False,
    ) -> Reader:
        """Reads one reply to a prompt that was rendered with the same `tools` and `reasoning`.

        Where the client wants no tool called, none is: what looks like a call is text. `goes_on`:
        the prompt ends with an assistant's words.
        """
        thinks = self.probe.thinks if reasoning else self.probe.thinks_unasked
        return Reader(
            self._words,
            self.probe.form,
            self.probe.calls,
            tools=() if choice.mode == "none" else tools,
            thinks=thinks and not goes_on,
            stop=stop,
            new_id=new_id,
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._words.decode(ids)

    def _whole(
        self, new: Sequence[Message], tools: Sequence[Tool], *, reasoning: bool
    ) -> NDArray[np.int32]:
        goes_on = bool(new) and new[-1].role == "assistant" and not new[-1].calls
        render = self._renderer.unfinished if goes_on else self._renderer.whole
        return self._encode(render(new, tools=tools, reasoning=reasoning))

    def _behind(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Tool],
        *,
        reasoning: bool,
        closed: bool,
    ) -> NDArray[np.int32]:
        delta = self._renderer.delta(before, new, tools=bool(tools), reasoning=reasoning)
        if delta is None:
            raise RefusedByTemplateError("the end of the turn before is not to be found")
        # Behind the token that ended the turn, as in a whole prompt; it was sampled already.
        anchor = delta.end or next(iter(self._renderer.template.ends), "")
        ids = self._encode(anchor + delta.text)
        return ids if delta.end and not closed else ids[1 if anchor else 0 :]

    def _encode(self, rendered: str) -> NDArray[np.int32]:
        text = self._guard.armed(rendered)
        if self._max_context and len(text) > self._max_context * _MOST_CHARACTERS:
            tokens = len(text) // _MOST_CHARACTERS
            raise RefusedError(
                "overflow",
                f"prompt is too long: {tokens} tokens > {self._max_context - 1} maximum",
                tokens=tokens,
                limit=self._max_context,
            )
        return self._words.encode(text)
