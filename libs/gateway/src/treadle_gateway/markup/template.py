"""The markup of one model: tokens of messages, and events of what it samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat import Template
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import ImageRule, Shown, placeholder_of
from treadle_core.errors import InvalidFieldError
from treadle_gateway.conversation import Image, Message, Tool, ToolChoice
from treadle_gateway.errors import RefusedError
from treadle_gateway.markup.errors import UnsupportedTemplateError
from treadle_gateway.markup.form import conformed, said_name
from treadle_gateway.markup.grammar import Thought, calls_grammar
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

    def __init__(
        self, folder: Path, *, max_context: int = 0, images: ImageRule | None = None
    ) -> None:
        """`max_context` bounds the tokens of a prompt where it is not 0.

        `images`: how many tokens the engine makes of an image; None: it reads none.
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
        self._images = images
        self._placeholder = placeholder_of(folder, images or ImageRule())
        kept = guarded_tokens(template, tokenizer)
        if self._placeholder is not None:
            kept |= {self._placeholder.text}
        guard = Guard(kept)
        self._words = Words(tokenizer, guard, kept)
        self.probe = measure(template, guard, self._words)
        if self._placeholder is None or self.probe.image.count(self._placeholder.text) != 1:
            form = replace(self.probe.form, images=False)
            self.probe = replace(self.probe, form=form, image="")
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

    @property
    def placeholder(self) -> int | None:
        """The token that stands for an image; None where the policy reads none."""
        reads = bool(self.probe.image) and self._images is not None
        return self._placeholder.id if reads and self._placeholder is not None else None

    def check_images(self) -> None:
        """Raises RefusedError where the model, or the engine of this run, reads no images."""
        if not self.probe.image or self._images is None:
            who = "engine of this run" if self.probe.image else "model"
            message = f"messages: the {who} reads no images"
            raise RefusedError("invalid", message, field="messages", code="unsupported_image")

    def shown(
        self,
        ids: NDArray[np.int32],
        new: Sequence[Message],
        pictures: Mapping[str, Picture],
    ) -> Shown:
        """The tokens that `new` was rendered to, with each image as long as the engine has it.

        To be asked once of what was rendered: what stands is never expanded again. `pictures` has
        the images of `new` by sha256. Raises RefusedError.
        """
        if not any(isinstance(part, Image) for each in new for part in each.parts):
            return Shown(ids)
        self.check_images()
        assert self._placeholder is not None  # noqa: S101, else there would be no images
        images = [
            pictures[part.sha256]
            for each in conformed(new, self.probe.form)
            for part in each.parts
            if isinstance(part, Image)
        ]
        try:
            return self._placeholder.shown(ids, images)
        except InvalidFieldError as error:
            message = f"messages: the model's chat template does not show them: {error.message}"
            raise RefusedError("invalid", message, field="messages") from error

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

    def grammar(
        self,
        *,
        tools: Sequence[Tool],
        choice: ToolChoice,
        reasoning: bool,
        goes_on: bool = False,
    ) -> str:
        """What the reply is to be, as in `Sampling.grammar`; empty where it may be any.

        Arguments are as in `reader`, which reads every such reply as calls.
        """
        form, calls = self.probe.form, self.probe.calls
        if choice.mode != "required" or calls is None:
            return ""
        wanted = {
            said_name(tool.name, tool.namespace): tool
            for tool in tools
            if tool.name in choice.names or not choice.names
        }
        begun = self.probe.thinks if reasoning else self.probe.thinks_unasked
        free = reasoning and form.opens in self._words.markers
        thought: Thought = "none" if goes_on else "begun" if begun else "free" if free else "none"
        tokens = {text: token for token, text in self._words.added.items()}
        return calls_grammar(form, calls, wanted, tokens, thought=thought, several=choice.parallel)

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
