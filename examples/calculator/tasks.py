"""Chained sums such as `47+38-62`, split by a hash so that held-out ones are never trained on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from treadle_core.tickets import Json

HELD_OUT_BYTES = 16
"""An expression is held out when the first byte of its hash is below this: one in sixteen."""


@dataclass(frozen=True, slots=True)
class CalculatorTasks:
    """Endless TaskSource. Its fields are its configuration; the same cursor gives the same task."""

    split: Literal["train", "heldout"]
    seed: int = 0
    min_terms: int = 2
    max_terms: int = 4

    def read(self, cursor: int) -> Mapping[str, Json]:
        """Returns task `cursor`, from 0: `prompt`, `expression` and its `answer`."""
        held_out, tries = self.split == "heldout", 0
        while True:
            key = f"{self.seed}/{self.split}/{cursor}/{tries}"
            expression, answer = _draw(key, self.min_terms, self.max_terms)
            if is_held_out(expression) == held_out:
                break
            tries += 1
        prompt = f"<|user|>{expression}<|end|><|assistant|>"
        return {"prompt": prompt, "expression": expression, "answer": answer}


def is_held_out(expression: str) -> bool:
    """Says, from the expression alone, whether only an evaluation may use it."""
    return hashlib.sha256(expression.encode()).digest()[0] < HELD_OUT_BYTES


def _draw(key: str, min_terms: int, max_terms: int) -> tuple[str, int]:
    """Returns an expression of two-digit terms, and its value, from the digits of a hash."""
    number = int.from_bytes(hashlib.sha256(key.encode()).digest())
    number, more = divmod(number, max_terms - min_terms + 1)
    number, first = divmod(number, 90)
    expression, answer = f"{first + 10}", first + 10
    for _ in range(min_terms + more - 1):
        number, minus = divmod(number, 2)
        number, term = divmod(number, 90)
        signed = -(term + 10) if minus else term + 10
        expression, answer = f"{expression}{signed:+d}", answer + signed
    return expression, answer
