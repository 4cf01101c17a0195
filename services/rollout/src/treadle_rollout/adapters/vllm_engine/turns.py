"""A turn while it is sampled. Shapes: N = tokens sampled."""

import math
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from treadle_agents.record import Generated
from treadle_rollout.core.errors import NonFiniteLogprobError


class Turn:
    """Tokens so far, each stamped with the version that was served when it was sampled."""

    def __init__(self, prompt: int, stops: frozenset[int]) -> None:
        """`prompt` is the size of the prompt."""
        self._prompt = prompt
        self._stops = stops
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Adds what was sampled. Raises NonFiniteLogprobError naming the first such token."""
        for index, (token, version) in enumerate(zip(token_ids, versions, strict=True)):
            value = logprobs[index] if index < len(logprobs) else math.nan
            if not math.isfinite(value):
                position = self._prompt + len(self)
                raise NonFiniteLogprobError(version=version, position=position, value=value)
            self._token_ids.append(token)
            self._logprobs.append(value)
            self._versions.append(version)

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

    def spans(self) -> list[tuple[int, int]]:
        """Versions and how many tokens each sampled, in order."""
        return [(version, len([*run])) for version, run in groupby(self._versions)]
