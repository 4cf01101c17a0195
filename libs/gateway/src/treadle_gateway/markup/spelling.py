"""A tokenizer that can spell everything: markup is read in it before a model's own is asked."""

import re
from collections.abc import Collection


class Spelling:
    """Each token is one of the model's added tokens, a word, or a character between words."""

    def __init__(self, added: Collection[str], hidden: frozenset[str]) -> None:
        """Takes texts of the added tokens, and those of them that are markup alone."""
        self._texts = list(added)
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self.added = dict(enumerate(self._texts))
        self.markers = frozenset(self._texts)
        self.hidden = hidden
        longest = sorted(self._texts, key=len, reverse=True)
        self._tokens = re.compile("|".join([*map(re.escape, longest), r"\w+", "."]), re.S)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return [self._number(found[0]) for found in self._tokens.finditer(text)]

    def characters(self) -> "Spelling":
        """What tells the text of tokens that come one by one."""
        return self

    def push(self, *tokens: int) -> str:
        """What more tokens add."""
        return "".join(self._texts[token] for token in tokens)

    def flush(self) -> str:
        """What is held: nothing."""
        return ""

    def _number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self._texts)
            self._texts.append(text)
        return self._numbers[text]
