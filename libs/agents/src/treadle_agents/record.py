"""The record of one session: the ids that the policy saw and sampled, each exactly once.

Nothing is ever tokenised again: every turn continues the recorded ids, and what is trained on is
what was recorded.

Shapes: P = tokens of a whole prompt, N = tokens sampled in one turn, T = tokens of the record.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Shown
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_core.tickets import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """What the policy sampled in one turn."""

    token_ids: NDArray[np.int32]
    """[N], N >= 1."""
    logprobs: NDArray[np.float32]
    """Natural-log probability under the sampling distribution, [N]."""
    policy_version: NDArray[np.int32]
    """Version that sampled each token, [N]."""
    context_version: NDArray[np.int32]
    """Oldest version whose cached keys each token attended to, [N]."""
    length: bool
    """`max_tokens` or the context ended the turn. Else a stop token did, which is the last one."""


Generate = Callable[[Shown, Sampling], Awaitable[Generated]]
"""Samples one turn after a whole prompt, of [P] tokens."""


class Recorder:
    """Extends one session turn by turn and keeps what was seen and sampled."""

    def __init__(self, generate: Generate, sampling: Sampling, max_context: int) -> None:
        """`max_context` is the most tokens of the whole session."""
        self._generate = generate
        self._sampling = sampling
        self._max_context = max_context
        self._observed: list[NDArray[np.int32]] = []
        self._generated: list[Generated] = []
        self._ids = np.zeros(0, np.int32)
        self._media: tuple[MediumSpan, ...] = ()
        self._pictures: dict[str, Picture] = {}

    async def extend(self, observed: Shown) -> Generated:
        """Shows the policy what is `observed` after all that it saw, and samples one turn.

        Raises InvalidFieldError when no room is left for a token; otherwise whatever `generate`
        raises. Then nothing is recorded.
        """
        seen = observed.token_ids
        prompt = np.concatenate([self._ids, seen])
        room = self._max_context - prompt.size
        if room < 1 or not prompt.size:
            limit = f"1 to {self._max_context - 1} tokens"
            raise InvalidFieldError("prompt", limit=limit, value=prompt.size)
        max_tokens = min(self._sampling.max_tokens, room)
        before = self._ids.size
        media = *self._media, *(replace(each, start=each.start + before) for each in observed.media)
        pictures = {**self._pictures, **observed.pictures}
        sampled = await self._generate(
            Shown(prompt, media, pictures), replace(self._sampling, max_tokens=max_tokens)
        )
        if not 1 <= sampled.token_ids.size <= max_tokens:
            limit = f"1 to {max_tokens} sampled tokens"
            raise InvalidFieldError("generated", limit=limit, value=sampled.token_ids.size)
        self._observed.append(seen)
        self._generated.append(sampled)
        self._ids = np.concatenate([prompt, sampled.token_ids])
        self._media, self._pictures = media, pictures
        return sampled

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The images that were shown, each once, in the order in which they first were."""
        return tuple(self._pictures.values())

    def segments(self, *, trainable: bool) -> tuple[Segment, ...]:
        """The session as one segment; none before the first turn.

        Sampled tokens are trained where `trainable` and the temperature is not 0. Raises
        InvalidFieldError where the engine broke its contract (a log-probability that is not
        finite, arrays of different lengths).
        """
        if not self._generated:
            return ()
        sampled = self._spread(lambda turn: np.ones(turn.token_ids.size, np.bool_), fill=False)
        return (
            Segment(
                token_ids=self._ids,
                sampled=sampled,
                trained=sampled & (trainable and self._sampling.temperature > 0),
                logprobs=self._spread(lambda turn: turn.logprobs, fill=np.float32(0)),
                policy_version=self._spread(lambda turn: turn.policy_version, fill=_NO_VERSION),
                context_version=self._spread(lambda turn: turn.context_version, fill=_NO_VERSION),
                temperature=self._sampling.temperature,
                media=self._media,
            ),
        )

    def _spread(self, values: Callable[[Generated], NDArray[Any]], *, fill: Any) -> NDArray[Any]:
        """Values of sampled tokens laid over the record, [T]; `fill` where observed."""
        parts: list[NDArray[Any]] = []
        for seen, turn in zip(self._observed, self._generated, strict=True):
            own = values(turn)
            parts += [np.full(seen.size, fill, own.dtype), own]
        return np.concatenate(parts)


_NO_VERSION = np.int32(NO_VERSION)
