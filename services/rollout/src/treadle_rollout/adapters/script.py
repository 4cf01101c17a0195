"""What engine `scripted` says where chance does not decide: a function from a prompt to a reply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treadle_agents.failures import describe
from treadle_agents.images.picture import Picture
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_rollout.core.errors import ScriptError
from treadle_rollout.ports import GenerationRequest
from treadle_runtime import plugins

GROUP = "treadle.scripts"


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What a script answers. P = tokens of the prompt."""

    session: str
    episode: str
    """Empty for none."""
    token_ids: NDArray[np.int32]
    """The whole prompt, [P]."""
    text: str
    """The same as text, special tokens included; empty where the policy has no tokenizer."""
    images: tuple[tuple[MediumSpan, Picture], ...] = ()
    """The images in the prompt, in order, each with where it is."""


Script: TypeAlias = Callable[[Asked], str | Sequence[int]]
"""Answers with text, special tokens included, or with ids. The stop token is part of the answer;
an answer without one is cut short as by `max_tokens`."""


class Speaker:
    """Asks a script, in the words of the policy's tokenizer."""

    def __init__(
        self, script: Script | str, tokenizer: Tokenizer | None, *, vocabulary: int
    ) -> None:
        """Takes the script itself, or `package.module:function`, or `path/file.py:function`.

        Without a tokenizer it speaks in ids, which are below `vocabulary`.
        """
        loaded: Any = plugins.load(GROUP, script) if isinstance(script, str) else script
        if not callable(loaded):
            raise InvalidFieldError("engine.script", limit="a function", value=script)
        self._script = cast("Script", loaded)
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def answer(self, request: GenerationRequest) -> list[int]:
        """At least one id. Raises ScriptError where the script does not answer."""
        ids, tokenizer = request.token_ids, self._tokenizer
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False) if tokenizer else ""
        try:
            images = tuple((span, request.pictures[span.sha256]) for span in request.media)
            answer = self._script(Asked(request.session, request.episode, ids, text, images))
        except Exception as error:
            raise ScriptError(describe(error)) from error
        if isinstance(answer, str):
            if tokenizer is None:
                raise ScriptError("it answered with text, and the policy has no tokenizer")
            answer = tokenizer.encode(answer, add_special_tokens=False).ids
        if not answer:
            raise ScriptError("it answered with nothing")
        said = [int(token) for token in answer]
        if wrong := [token for token in said if not 0 <= token < self._vocabulary]:
            raise ScriptError(f"expected ids of 0 to {self._vocabulary - 1}, got {wrong[0]}")
        return said
