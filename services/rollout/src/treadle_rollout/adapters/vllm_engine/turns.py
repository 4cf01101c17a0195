"""A turn while it is sampled. Shapes: N = tokens sampled."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle_agents.record import Generated
from treadle_rollout.core.errors import NonFiniteLogprobError


class Served(NamedTuple):
    """What is served: a version, and the one that brought its weights (an alias brings none)."""

    version: int
    weights: int


class Turn:
    """Tokens so far, each stamped with what was served when it came."""

    def __init__(self, prompt: int, stops: frozenset[int]) -> None:
        """`prompt` is the size of the prompt."""
        self._prompt = prompt
        self._stops = stops
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._weights: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float], served: Served) -> None:
        """Adds what was sampled. Raises NonFiniteLogprobError naming the first such token."""
        for index, token in enumerate(token_ids):
            value = logprobs[index] if index < len(logprobs) else math.nan
            if not math.isfinite(value):
                position = self._prompt + len(self)
                raise NonFiniteLogprobError(version=served.version, position=position, value=value)
            self._token_ids.append(token)
            self._logprobs.append(value)
            self._versions.append(served.version)
            self._weights.append(served.weights)

    def piece(self, start: int, *, last: bool) -> Generated:
        """The tokens from `start` on; `last`: the turn has ended."""
        versions = np.array(self._versions[start:], np.int32)
        return Generated(
            token_ids=np.array(self._token_ids[start:], np.int32),
            logprobs=np.array(self._logprobs[start:], np.float32),
            policy_version=versions,
            context_version=versions,
            length=last and self._token_ids[-1] not in self._stops,
        )

    def stamped(self) -> list[tuple[str, int]]:
        """Names of weights and how many tokens they sampled, in order."""
        spans: list[tuple[str, int]] = []
        for weights in self._weights:
            name = str(weights)
            if spans and spans[-1][0] == name:
                spans[-1] = name, spans[-1][1] + 1
            else:
                spans.append((name, 1))
        return spans
