"""Work as it travels from the ledger to a replica."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What a task may hold: JSON, never code."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy samples. Nothing is taken from a checkpoint's generation config.

    An engine honours `temperature` and `max_tokens`, and of the other fields those that it names;
    the default of each of these is: off. They act in the order bias, penalties, schema or grammar,
    temperature, min_p, top_k, top_p, and what is left is the distribution that is sampled from.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    max_tokens: int = 256
    """Most tokens that one turn may sample."""
    top_p: float = 1.0
    """Keeps the fewest likeliest tokens whose probabilities sum to at least this, in (0, 1]."""
    top_k: int = 0
    """Keeps the so many likeliest tokens, and what is as likely as the last; 0 keeps all."""
    min_p: float = 0.0
    """Keeps tokens at least this share as likely as the likeliest, in [0, 1]."""
    seed: int | None = None
    """Chance of its own for each call; None takes the engine's."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the turn has sampled, within ±2."""
    frequency_penalty: float = 0.0
    """Taken off for each time that the turn has sampled the token, within ±2."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and turn, multiplies negative ones; > 0."""
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float], hash=False)
    """Added to the logits of tokens, by id, each within ±100."""
    schema: Mapping[str, Json] | None = field(default=None, hash=False)
    """JSON schema that the turn's text obeys; `{}` is any JSON."""
    grammar: str = ""
    """Grammar that the turn obeys, in the dialect of Lark that llguidance reads: `<[7]>` is the
    token 7. Empty: none. Not beside a schema."""

    @property
    def shaped(self) -> frozenset[str]:
        """Fields other than `temperature` and `max_tokens` that are not off."""
        return frozenset(
            name
            for name, off in _OFF.items()
            if (value := getattr(self, name)) is not off and value != off
        )


_OFF: Mapping[str, Json] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "schema": None,
    "grammar": "",
}
SHAPES = frozenset(_OFF)
"""Names of the optional fields of Sampling."""
CONSTRAINTS = frozenset({"schema", "grammar"})
"""Those of them that say what a turn must be."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to run one episode, once; fenced by its attempt."""

    episode_id: str
    attempt: int
    """Counts from 1; a late result of an older attempt is refused."""
    task_id: str
    index: int
    """Place of the episode in its group, from 0."""
    spec: Mapping[str, Json]
    """The task, as its source made it."""
    sampling: Sampling
    deadline_s: float
    """Wall-clock seconds from the lease after which the episode has failed."""
    evaluation: str = ""
    """Name of the evaluation that the episode is scored in; empty for training."""
