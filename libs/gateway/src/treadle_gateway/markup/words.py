"""Text to token ids and back, with markup that only the template can write.

What a client says may contain the text of a special token, `<|im_end|>` for one, and must not
become that token. So the markup tokens are given spellings that nobody can guess: what is said is
*guarded* before it is rendered, the rendered text is *armed* (unguarded markup is spelt the secret
way), and the tokenizer, renamed alike, finds only these. All else of it stays, so the ids are its
own.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treadle_gateway.markup.errors import UnsupportedTemplateError

_GUARD = "\ufdd0"
"""A noncharacter: what stands behind it is text as it is."""

_MOST_HELD = 4
"""Tokens of a character: no more bytes make one."""


class Guard:
    """Keeps what is said apart from the markup around it, while a template renders both."""

    def __init__(self, markup: Collection[str]) -> None:
        """Takes the texts of the tokens that only the template may write."""
        self._secret = _GUARD + secrets.token_hex(8)
        longest = sorted(markup, key=len, reverse=True)
        either = "|".join(map(re.escape, longest))
        self._said = re.compile(f"{_GUARD}|{either}" if either else _GUARD)
        self._rendered = re.compile(f"{_GUARD}(.)|({either})" if either else f"{_GUARD}(.)()", re.S)

    def said(self, text: str) -> str:
        """Text that stays text, whatever it says."""
        return self._said.sub(lambda found: _guarded(found[0]), text)

    def armed(self, rendered: str) -> str:
        """Rendered text with what was said as it was, and markup in its secret spelling."""
        return self._rendered.sub(
            lambda found: self.spelling(found[2]) if found[2] else found[1], rendered
        )

    def plain(self, rendered: str) -> str:
        """Rendered text as a reader of it expects."""
        return self._rendered.sub(lambda found: found[2] or found[1], rendered)

    def spelling(self, token: str) -> str:
        """The secret spelling of a markup token."""
        return self._secret + token

    def unspelt(self, text: str) -> str:
        """Text whose markup is spelt the usual way."""
        return text.replace(self._secret, "")


def _guarded(found: str) -> str:
    return found[0] + _GUARD + found[1:] if len(found) > 1 else _GUARD + found


class Words:
    """The tokenizer of a Hugging Face folder."""

    added: Mapping[int, str]
    """Tokens that are not made of others, by id: text never adds up to one of them."""
    markers: frozenset[str]
    """Their texts."""
    hidden: frozenset[str]
    """Those of the texts that are markup alone: nobody is shown them."""

    def __init__(self, declared: Mapping[str, Any], guard: Guard, markup: Collection[str]) -> None:
        """Takes a tokenizer.json as read; `markup` are the tokens that `guard` keeps.

        Raises UnsupportedTemplateError when it cannot be used, or not with these spellings.
        """
        tokens: list[dict[str, Any]] = declared.get("added_tokens", [])
        self.added = {token["id"]: token["content"] for token in tokens}
        self.markers = frozenset(self.added.values())
        self.hidden = frozenset(markup)
        self._guard = guard
        self._tokenizer = _renamed(declared, {each: guard.spelling(each) for each in markup})
        for number, token in self.added.items():
            spelt = guard.spelling(token) if token in markup else token
            if self._tokenizer.token_to_id(spelt) != number:
                raise UnsupportedTemplateError(
                    f"tokenizer.json: token {token!r} has no id of its own", field="tokenizer.json"
                )

    def encode(self, armed: str) -> NDArray[np.int32]:
        """Token ids of armed text, [T]."""
        # As a batch of one: that lets other threads run meanwhile, which `encode` does not.
        encoding = self._tokenizer.encode_batch_fast([armed], add_special_tokens=False)[0]
        return np.asarray(encoding.ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._guard.unspelt(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def characters(self) -> "Characters":
        """The text of tokens that come one by one."""
        return Characters(self._tokenizer)


class Characters:
    """The text of tokens that come one by one: whole characters, each once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._told = 0  # so many of the ids have been told
        self._before: str | None = ""  # their text; None while nobody asked for it

    def push(self, *tokens: int) -> str:
        """What more tokens add; of a character that is not whole nothing."""
        if self._before is None:
            self._before = self._decode(self._ids)
        self._ids += tokens
        text = self._decode(self._ids)
        if text.endswith("\ufffd"):
            if len(tokens) > 1:
                del self._ids[-len(tokens) :]
                return "".join(map(self.push, tokens))
            if len(self._ids) - self._told < _MOST_HELD:
                return ""
        told = text[len(self._before) :]
        # The tokens told last stay: how a token is written may depend on the one before it.
        self._ids = self._ids[self._told :][-_MOST_HELD:]
        self._told, self._before = len(self._ids), None
        return told

    def flush(self) -> str:
        """What is held, but for half a character; what comes next begins anew."""
        held = ""
        if self._before is not None:  # else all is told
            held = self._decode(self._ids).rstrip("\ufffd")[len(self._before) :]
        self._ids, self._told, self._before = [], 0, ""
        return held

    def _decode(self, ids: Sequence[int]) -> str:
        # A client that says it back is understood: no request may hold a NUL.
        return self._tokenizer.decode(ids, skip_special_tokens=False).replace("\0", "␀")


def declared(folder: Path) -> Mapping[str, Any]:
    """The tokenizer.json of a folder, as JSON."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedTemplateError(
            f"tokenizer.json: expected one, found none in {folder}", field="tokenizer.json"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def _renamed(declared: Mapping[str, Any], spellings: Mapping[str, str]) -> Tokenizer:
    """The tokenizer with other spellings of some tokens; it neither cuts, nor pads, nor adds."""
    renamed = dict(declared) | {"truncation": None, "padding": None, "post_processor": None}
    renamed["added_tokens"] = [
        {**token, "content": spellings.get(token["content"], token["content"])}
        for token in declared.get("added_tokens", [])
    ]
    model = renamed["model"] = dict(declared["model"])
    vocabulary: Any = model["vocab"]
    if isinstance(vocabulary, dict):
        ids = cast("dict[str, int]", vocabulary)
        model["vocab"] = {spellings.get(text, text): token for text, token in ids.items()}
    else:  # of a unigram model: text and score, in the order of the ids
        scores = cast("list[tuple[str, float]]", vocabulary)
        model["vocab"] = [[spellings.get(text, text), score] for text, score in scores]
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        model["unk_token"] = spellings.get(unknown, unknown)
    try:
        return Tokenizer.from_str(json.dumps(renamed))
    except Exception as error:  # tokenizers raises no narrower class
        raise UnsupportedTemplateError(
            f"tokenizer.json: {error}", field="tokenizer.json"
        ) from error
