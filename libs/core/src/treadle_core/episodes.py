"""What a policy did: segments of tokens, the episodes they belong to, and their groups.

Shapes: T = tokens of one segment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_core.media import Medium, MediumSpan, check_media, check_spans

MAX_REWARD = 1e6
"""Largest magnitude of a reward or metric that an agent may report."""

NO_VERSION = -1
"""`policy_version` and `context_version` of a token that the policy did not sample."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One token sequence that the policy really saw, as parallel arrays over its T tokens.

    Log-probabilities and masks stand on the token axis; the trainer shifts them, once.
    Construction checks shapes, dtypes and ranges and raises InvalidFieldError.
    """

    token_ids: NDArray[np.int32]
    """As sent to or sampled by the engine, [T]."""
    sampled: NDArray[np.bool_]
    """The policy sampled the token, [T]."""
    trained: NDArray[np.bool_]
    """The token enters the loss in this segment, [T]; a subset of `sampled`."""
    logprobs: NDArray[np.float32]
    """Natural-log probability under the sampling distribution, [T]; 0 where not sampled."""
    policy_version: NDArray[np.int32]
    """Version that sampled the token, [T]; NO_VERSION where not sampled."""
    context_version: NDArray[np.int32]
    """Oldest version whose cached keys the token attended to, [T]; NO_VERSION likewise."""
    temperature: float = 1.0
    """Temperature of the sampling distribution; 0 is greedy and never trained."""
    media: tuple[MediumSpan, ...] = ()
    """Where media are shown, ascending and not overlapping; no token of theirs is sampled."""

    def __post_init__(self) -> None:
        """Checks the arrays against each other."""
        size = self.token_ids.shape
        if len(size) != 1 or size[0] == 0:
            raise InvalidFieldError("token_ids", limit="shape [T], T >= 1", value=list(size))
        for name, dtype in _DTYPES.items():
            array: NDArray[np.generic] = getattr(self, name)
            if array.dtype != dtype or array.shape != size:
                raise InvalidFieldError(
                    name,
                    limit=f"{np.dtype(dtype).name} {list(size)} as token_ids",
                    value=f"{array.dtype.name} {list(array.shape)}",
                )
        if self.token_ids.min() < 0:
            raise InvalidFieldError("token_ids", limit=">= 0", value=self.token_ids.min())
        if np.any(self.trained & ~self.sampled):
            raise InvalidFieldError("trained", limit="a subset of sampled", value="more")
        bad = ~np.isfinite(self.logprobs) | (self.logprobs > MAX_LOGPROB)
        if np.any(bad):
            worst = self.logprobs[bad][0]
            raise InvalidFieldError("logprobs", limit="finite and <= 0", value=worst)
        if np.any(self.logprobs[~self.sampled] != 0):
            raise InvalidFieldError("logprobs", limit="0 where not sampled", value="other")
        for name in ("policy_version", "context_version"):
            versions: NDArray[np.int32] = getattr(self, name)
            if np.any((versions >= 0) != self.sampled) or versions.min() < NO_VERSION:
                raise InvalidFieldError(
                    name, limit=">= 0 where sampled, -1 elsewhere", value="other"
                )
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidFieldError("temperature", limit=">= 0", value=self.temperature)
        check_spans(self.media, self.sampled)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.size)

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return int(self.trained.sum())


MAX_LOGPROB = 1e-4
"""Rounding may lift a log-probability above 0 by this much."""

_DTYPES: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "sampled": np.bool_,
    "trained": np.bool_,
    "logprobs": np.float32,
    "policy_version": np.int32,
    "context_version": np.int32,
}


class Termination(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    """The agent ended it."""
    TRUNCATED = "truncated"
    """A limit of tokens, turns or context ended it."""
    FAILED = "failed"
    """It raised, hung or broke the contract; see FailureClass."""


class FailureClass(StrEnum):
    """Whose fault a failed episode is. Only a policy failure may carry a reward."""

    POLICY = "policy"
    ENVIRONMENT = "environment"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One agent run: the segments of its tokens, and what it was worth."""

    segments: tuple[Segment, ...]
    reward: float | None
    """Scalar return of the whole run. Absent is not zero."""
    termination: Termination
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers that the agent reports, by name."""
    turn_rewards: tuple[float, ...] = ()
    """Reward of each turn, where the agent gives one; their sum is `reward`."""
    media: tuple[Medium, ...] = ()
    """What the segments show, each content once; they show no other."""

    def __post_init__(self) -> None:
        """Checks the media, and the numbers that an agent reported."""
        check_media(self.media, [segment.media for segment in self.segments])
        numbers = {f"metrics.{name}": value for name, value in self.metrics.items()}
        numbers |= {f"turn_rewards[{i}]": value for i, value in enumerate(self.turn_rewards)}
        if self.reward is not None:
            numbers["reward"] = self.reward
        for name, value in numbers.items():
            if not abs(value) <= MAX_REWARD:
                raise InvalidFieldError(name, limit=f"a number within ±{MAX_REWARD:g}", value=value)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The episodes of one task, in the order of their index."""

    task_id: str
    episodes: tuple[Episode, ...]
