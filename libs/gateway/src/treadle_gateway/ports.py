"""What a gateway needs from the outside world: a policy that samples.

Shapes: P = tokens of a prompt, N = tokens sampled.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Tokens in."""

    session: str
    """Of the gateway; its requests may share cached keys until it is closed."""
    token_ids: NDArray[np.int32]
    """Whole prompt, [P], P >= 1."""
    sampling: Sampling
    """With `max_tokens` already bounded by the context."""


class Policy(Protocol):
    """An engine, as a gateway worker sees it."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and reply together."""
        ...

    def generate(self, prompt: Prompt) -> AsyncGenerator[Generated]:
        """Samples one turn and yields it in pieces, [N] each, as they come.

        Only the last piece says whether `length` ended the turn. Closing the generator early stops
        the sampling. Raises TreadleError: EXHAUSTED or UNAVAILABLE kinds may be tried again.
        """
        ...
