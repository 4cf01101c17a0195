"""Packing: token sequences laid end to end, so that no position is padding.

This is where log-probabilities and masks move from the token axis to the place that predicts the
token, once.

Shapes: T = tokens of one sequence, N = tokens of a micro-batch, M = predicted tokens of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One token sequence with what the loss needs beside it.

    Construction raises InvalidFieldError where a token would be trained that nothing predicts.
    """

    token_ids: NDArray[np.int32]
    """[T]."""
    trained: NDArray[np.bool_]
    """The token enters the loss, [T]; never the first."""
    logprobs: NDArray[np.float32]
    """Log-probability when the token was sampled, [T]."""
    advantage: float = 0.0
    """Of every token."""
    temperature: float = 1.0
    """Of the distribution that `logprobs` are of."""
    weight: float = 1.0
    """Of every token, by the aggregation."""

    def __post_init__(self) -> None:
        """Checks what the shift and the division by the temperature rely on."""
        if self.trained[0]:
            raise InvalidFieldError("trained[0]", limit="False: no token precedes", value=True)
        if not self.temperature > 0 and self.trained.any():
            raise InvalidFieldError(
                "temperature", limit="> 0 where a token is trained", value=self.temperature
            )

    @classmethod
    def of(cls, segment: Segment, advantage: float, weight: float = 1.0) -> "Example":
        """The example that a recorded segment is."""
        arrays = (segment.token_ids, segment.trained, segment.logprobs)
        return cls(*arrays, advantage, segment.temperature, weight)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.size)

    @property
    def num_trained(self) -> int:
        """Tokens that enter the loss."""
        return int(self.trained.sum())


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Sequences of one forward and backward pass, end to end.

    A place attends to places of its own segment only, up to itself.
    """

    token_ids: NDArray[np.int64]
    """[N]."""
    position_ids: NDArray[np.int64]
    """Place within the segment, [N]; 0 starts a segment."""
    segment_ids: NDArray[np.int64]
    """Number of the segment within the micro-batch, [N]; ascending from 0."""
    rows: NDArray[np.int64]
    """Places whose next token enters the loss, [M], ascending. All below stands on this axis."""
    targets: NDArray[np.int64]
    """That next token, [M]."""
    logprobs: NDArray[np.float32]
    """Its recorded log-probability, [M]."""
    advantages: NDArray[np.float32]
    """Its advantage, [M]."""
    temperatures: NDArray[np.float32]
    """Its temperature, [M]."""
    weights: NDArray[np.float32]
    """Its weight, [M]."""
    owners: NDArray[np.int64]
    """Number of its segment among those that train a token, [M]; ascending from 0."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.token_ids.size)


def pack(examples: Iterable[Example], *, max_tokens: int) -> tuple[MicroBatch, ...]:
    """Packs examples into micro-batches of at most `max_tokens`, longest first.

    The same examples in the same order give the same micro-batches. Neighbours are of similar
    length, which is what makes attention over them cheap. Examples that train no token are left
    out. Raises InvalidFieldError when one is longer than `max_tokens`.
    """
    left = sorted((e for e in examples if e.num_trained), key=lambda e: -e.num_tokens)
    if left and left[0].num_tokens > max_tokens:
        raise InvalidFieldError(
            "microbatch_tokens", limit=f">= {left[0].num_tokens}, a segment", value=max_tokens
        )
    bins: list[list[Example]] = []
    room = 0
    for example in left:
        if not bins or example.num_tokens > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(example)
        room -= example.num_tokens
    return tuple(lay_out(members) for members in bins)


def lay_out(examples: Sequence[Example]) -> MicroBatch:
    """Lays examples end to end, and shifts: place t predicts token t + 1."""
    lengths = np.array([example.num_tokens for example in examples])
    starts = np.cumsum(lengths) - lengths
    token_ids = np.concatenate([example.token_ids for example in examples]).astype(np.int64)
    predicted = np.flatnonzero(np.concatenate([example.trained for example in examples]))
    segment_ids = np.repeat(np.arange(len(examples)), lengths)
    owners = segment_ids[predicted]
    return MicroBatch(
        token_ids=token_ids,
        position_ids=np.arange(token_ids.size) - starts[segment_ids],
        segment_ids=segment_ids,
        rows=predicted - 1,
        targets=token_ids[predicted],
        logprobs=np.concatenate([example.logprobs for example in examples])[predicted],
        advantages=np.array([e.advantage for e in examples], np.float32)[owners],
        temperatures=np.array([e.temperature for e in examples], np.float32)[owners],
        weights=np.array([e.weight for e in examples], np.float32)[owners],
        owners=np.unique(owners, return_inverse=True)[1],
    )
