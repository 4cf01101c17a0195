"""What the warm start is taught: an expert who calls the calculator, or answers in the head.

The expert is always right. So small a policy cannot add in its head, though: of the answers it
learns to guess, of the calls it learns to copy. Which of the two pays is left to RL.
"""

import hashlib
import re
from dataclasses import dataclass

from tasks import CalculatorTasks

from treadle_trainer.core.demonstrations import Demonstration

TERM = re.compile(r"[+-]?\d+")


@dataclass(frozen=True, slots=True)
class CalculatorDemonstrations:
    """Demonstrations of training tasks. Its fields are its configuration."""

    seed: int = 0
    """Seed of the tasks and of the expert's moods."""
    in_the_head: float = 0.6
    """Probability, at every turn at which a call is due, of answering at once instead."""

    def read(self, index: int) -> Demonstration:
        """Demonstration `index`; only what the assistant says is to be learnt."""
        task = CalculatorTasks("train", self.seed).read(index)
        pieces = [(str(task["prompt"]), False)]
        value, *terms = TERM.findall(str(task["expression"]))
        moods = hashlib.sha256(f"{self.seed}/{index}/moods".encode()).digest()
        for mood, term in zip(moods, terms, strict=False):
            if mood / 256 < self.in_the_head:
                break
            result = int(value) + int(term)
            pieces += [
                (f"<call>{value}{term}<|end|>", True),
                (f"<|tool|>{result}<|end|><|assistant|>", False),
            ]
            value = str(result)
        pieces.append((f"<answer>{task['answer']}<|end|>", True))
        return Demonstration(tuple(pieces))
