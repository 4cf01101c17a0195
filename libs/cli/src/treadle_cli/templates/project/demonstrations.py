"""What the policy is shown before it plays: games of someone who often forgets the hints.

They teach the form of a game. That listening pays, and how to guess best, is left to RL.
"""

import random

from treadle_trainer.core.demonstrations import Demonstration

LISTENS = 0.6
"""Probability, at every guess, of choosing among the numbers that the hints have left."""


class Forgetful:
    """Demonstrations, by number: the same each time."""

    def read(self, index: int) -> Demonstration:
        """One game; only what the player says is learnt."""
        draw = random.Random(index)
        answer, left = draw.randint(1, 7), list(range(1, 8))
        pieces = [("<|user|>1-7?<|end|><|assistant|>", False)]
        for _ in range(3):
            guess = draw.choice(left if draw.random() < LISTENS else range(1, 8))
            pieces.append((f"{guess}<|end|>", True))
            if guess == answer:
                break
            hint = "more" if guess < answer else "less"
            left = [n for n in left if (n > guess) == (answer > guess) and n != guess]
            pieces.append((f"<|user|>{hint}<|end|><|assistant|>", False))
        return Demonstration(tuple(pieces))
