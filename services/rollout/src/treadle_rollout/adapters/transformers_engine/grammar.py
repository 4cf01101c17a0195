"""Which tokens may come next so that a turn obeys a JSON schema or a grammar.

Schemas come from clients, some within a grammar, and may take for ever to compile. So each is
compiled first in a process that can be ended (`treadle_rollout.schema_check`), and here only if
that went well.
"""

import asyncio
import importlib.util
import json
import sys
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

if TYPE_CHECKING:
    import llguidance

_KEPT = 64
"""Compiled grammars that are kept; the one used longest ago goes first."""
_ONCE = 2
"""Grammars that are checked at the same time."""
_CHECK_S = 20.0
"""Most wall-clock seconds of a check; its CPU seconds are bounded by the check itself."""


class Follower:
    """Follows one turn through a compiled grammar."""

    def __init__(self, field: str, matcher: "llguidance.LLMatcher", vocabulary: int) -> None:
        """`field`: of the sampling, that says what is followed."""
        self.field = field
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.broken = ""
        """Why nothing is allowed any more; empty while something is."""

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, [V]; those that end a turn once it is whole."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        found = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not found.any():
            self.broken = self._matcher.get_error() or "no token can go on"
        return found

    def take(self, token: int) -> None:
        """Goes on behind a token."""
        self._matcher.consume_token(token)


class Grammars:
    """Compiled grammars for one vocabulary; a schema is the grammar of its texts."""

    def __init__(self, folder: Path, stop_ids: frozenset[int], vocabulary: int) -> None:
        """`folder` holds the `tokenizer.json`, read when the first grammar comes."""
        self._file = folder / "tokenizer.json"
        self._stop_ids = sorted(stop_ids)
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._checks = asyncio.Semaphore(_ONCE)

    @property
    def available(self) -> bool:
        """Turns can be constrained: llguidance is installed, texts are known and turns can end."""
        found = importlib.util.find_spec("llguidance") is not None
        return found and self._file.is_file() and bool(self._stop_ids)

    async def follower(self, sampling: Sampling) -> Follower | None:
        """Follows a new turn; None where it may be any. Raises InvalidFieldError."""
        field, text = "grammar", sampling.grammar
        if sampling.schema is not None:
            if text:
                raise InvalidFieldError("schema", limit="none beside a grammar", value="both")
            schema = json.dumps(sampling.schema or {"type": "object"}, sort_keys=True)
            field, text = "schema", f"start: %json {schema}"
        if not text:
            return None
        if text not in self._compiled:
            async with self._checks:
                await _check(field, text)
                compiled = await asyncio.to_thread(self._compile, text)
                if compiled.is_error():
                    raise _unfollowed(field, compiled.get_error())
                self._compiled[text] = compiled
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return Follower(field, self._compiled[text].deep_copy(), self._vocabulary)

    def _compile(self, text: str) -> "llguidance.LLMatcher":
        from treadle_rollout.schema_check import matcher  # noqa: PLC0415

        return matcher(self._tokenizer, text)

    @cached_property
    def _tokenizer(self) -> "llguidance.LLTokenizer":
        import llguidance  # noqa: PLC0415

        text = self._file.read_text(encoding="utf-8")
        try:
            return llguidance.LLTokenizer(text, self._vocabulary, self._stop_ids)
        except ValueError:  # its pieces are characters: neither bytes nor with a fallback to them
            pieces = _Pieces(text, self._stop_ids, self._vocabulary)
            return llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(pieces), self._vocabulary, self._stop_ids
            )


class _Pieces:
    """A tokenizer whose tokens are texts, as llguidance wants one."""

    bos_token_id = None

    def __init__(self, text: str, stop_ids: list[int], vocabulary: int) -> None:
        self._tokenizer = Tokenizer.from_str(text)
        added = self._tokenizer.get_added_tokens_decoder()
        self.eos_token_id = stop_ids[0]
        # As llguidance does it for other tokenizers: no text has what looks like a marker.
        self.special_token_ids = [
            token for token, known in added.items() if known.special or _is_tag(known.content)
        ]
        self.tokens = [
            self._tokenizer.decode([token], skip_special_tokens=False).encode()
            for token in range(vocabulary)
        ]

    def __call__(self, text: bytes) -> list[int]:
        decoded = text.decode(errors="replace")
        return self._tokenizer.encode(decoded, add_special_tokens=False).ids


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


async def _check(field: str, text: str) -> None:
    """Raises InvalidFieldError unless another process compiled the grammar in time."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "treadle_rollout.schema_check"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(_CHECK_S):
            said, _ = await process.communicate(text.encode())
    except TimeoutError:
        said = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or said:
        why = said.decode() or "one that takes too long to compile"
        raise _unfollowed(field, why)


def _unfollowed(field: str, why: str) -> InvalidFieldError:
    return InvalidFieldError(field, limit="one that can be followed", value=why)
