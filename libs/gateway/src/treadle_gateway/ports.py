"""What a gateway needs from the outside world: a policy that samples.

Shapes: P = tokens of a prompt, N = tokens sampled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.images.picture import Picture
from treadle_agents.record import Generated
from treadle_core.errors import TreadleError
from treadle_core.media import MediumSpan
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
    media: tuple[MediumSpan, ...] = ()
    """Where images are in it, ascending."""
    pictures: Mapping[str, Picture] = field(default_factory=dict[str, Picture])
    """Images of the session by sha256, those among them."""


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A prompt as a worker asks with it: what its session's prompt before began with is left out.

    Shape: R = tokens of the prompt but for those that stand.
    """

    session: str
    stands: int
    """Leading tokens that are those of the session's prompt before."""
    token_ids: NDArray[np.int32]
    """The tokens behind them, [R]; those of both are P >= 1."""
    sampling: Sampling
    """With `max_tokens` already bounded by the context."""
    apart_s: float
    """Least seconds from the beginning to the first piece, and from each to the next."""
    media: tuple[MediumSpan, ...] = ()
    """Where images are in the whole prompt, ascending; `show` told of each before."""


class Listener(Protocol):
    """Who waits for what the policy samples. Is called in the loop, and does not raise."""

    def heard(self, piece: Generated) -> None:
        """More was sampled. Only the last piece says whether `length` ended the turn."""
        ...

    def ended(self, error: TreadleError | None) -> None:
        """Nothing more comes; `error`: why, where that is not the end of the turn.

        Those of kind EXHAUSTED or UNAVAILABLE may be tried again.
        """
        ...


class Policy(Protocol):
    """An engine, as a gateway worker sees it."""

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and reply together."""
        ...

    def show(self, session: str, picture: Picture) -> None:
        """Lets prompts of a session have an image, until it is closed."""
        ...

    def begin(self, asked: Asked, listener: Listener) -> Callable[[], None]:
        """Has one turn sampled; returns what stops that: the listener hears soon that it ended.

        Prompts of one session reach the engine in the order in which they are asked.
        """
        ...
