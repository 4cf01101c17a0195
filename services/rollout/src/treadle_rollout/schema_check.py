"""Compiles one grammar, to see whether it can be: `python -m treadle_rollout.schema_check`.

It reads the grammar and writes what is wrong with it, or nothing. A schema from outside, which a
grammar may hold, may need hours and memory without end; this process ends by itself when it has
used what it may.
"""

import re
import resource
import sys

import llguidance

MAX_BYTES = 256 * 1024
"""Of a grammar as text."""
MAX_DEPTH = 64
"""Of brackets in each other."""
CPU_S = 1
"""Most seconds of processor time."""
MEMORY = 2 * 1024**3
"""Most bytes of address space."""
_MESSAGE = 300
_TOKEN = re.compile(r"<\[\d+\]>")
"""A token of the policy's, by its id."""


def matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Compiles a grammar; its `get_error` says where that failed."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    return llguidance.LLMatcher(tokenizer, lark, log_level=0, limits=limits)


def wrong_with(grammar: str) -> str:
    """What is wrong with a grammar; empty where nothing is. May not return in any time."""
    if len(grammar) > MAX_BYTES:
        return f"{len(grammar)} bytes, of at most {MAX_BYTES}"
    if (depth := _depth(grammar)) > MAX_DEPTH:
        return f"{depth} brackets in each other, of at most {MAX_DEPTH}"
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    compiled = matcher(tokenizer, _TOKEN.sub(f"<[{_Bytes.marker}]>", grammar))
    if not compiled.is_error() and not any(compiled.compute_bitmask()):
        return "one that no text obeys"
    return compiled.get_error()[:_MESSAGE]


class _Bytes:
    """The smallest vocabulary: one token a byte, one that ends a turn, and one for all markers."""

    marker = 257
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256, 257)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", b"<marker>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _depth(grammar: str) -> int:
    """Brackets in each other; those in texts count too, which errs on the safe side."""
    depth = deepest = 0
    for character in grammar:
        depth += (character in "[{") - (character in "]}")
        deepest = max(deepest, depth)
    return deepest


def main() -> None:
    """Ends by a signal where the limits are reached."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdout.write(wrong_with(sys.stdin.read()))


if __name__ == "__main__":
    main()
