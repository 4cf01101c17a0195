"""Environments: one object per episode, asked for a prompt and then for an answer to every turn."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from treadle_core.tickets import Json


class PolicyError(Exception):
    """Raised by an Env when what the policy said cannot be acted on.

    The failure is the policy's: the recipe may give it a reward. Anything else that an Env raises
    is the environment's failure, is tried again, and never becomes a reward.
    """


class Observation(str):
    """Text with images in it, for a policy that reads them; may stand wherever text is shown.

    It has the placeholder that the policy's template writes for an image once for each, in order.
    """

    __slots__ = ("images",)
    images: tuple[bytes, ...]
    """Each as the bytes of a PNG, JPEG, WebP or GIF."""

    def __new__(cls, text: str, images: Sequence[bytes] = ()) -> Self:
        """Puts images into a text."""
        observation = super().__new__(cls, text)
        observation.images = tuple(images)
        return observation


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy was shown, and what it answered."""

    observation: str
    """The text shown last: the prompt at the first turn, then the previous `Result.observation`."""
    action: str
    """Everything that the policy sampled, special tokens and the stop token included."""
    task: Mapping[str, Json]
    """The task, as its source made it."""
    number: int
    """Counts from 1."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a turn led to."""

    observation: str = ""
    """Shown to the policy next, as it is: chat markup included, special tokens recognised."""
    reward: float | None = None
    """Reward of this turn, within ±1e6. The episode's is the sum; absent in all turns is absent."""
    terminated: bool = False
    """The episode is over."""
    truncated: bool = False
    """A limit of the environment ended the episode."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers by name, within ±1e6. A later turn overwrites an earlier one's."""


class Env:
    """One episode's environment; a fresh one is made for every attempt.

    Methods may be plain or `async`. Plain ones run in a thread of their own and may block; `async`
    ones share the event loop of their process with other episodes and must not.
    """

    def reset(self, task: Mapping[str, Json]) -> str | Awaitable[str]:
        """The prompt, as text with its chat markup; by default the task's `prompt`."""
        prompt = task.get("prompt")
        if not isinstance(prompt, str):
            raise TypeError(f"task.prompt: expected text, got {type(prompt).__name__}")
        return prompt

    def step(self, turn: Turn) -> Result | Awaitable[Result]:
        """Acts on what the policy said. Called once a turn, also when the turn was cut short."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode holds. Always called once; a failure here is only logged."""
