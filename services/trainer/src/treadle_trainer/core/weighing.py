"""What each token of a step weighs: the advantage of its episode, and its share in the mean.

Shapes: n = episodes of a step, S = segments of all ranks.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from treadle_core.episodes import Group, Termination
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.aggregations import Aggregation, Shares, Window
from treadle_trainer.core.aggregations.token_mean import TokenMean
from treadle_trainer.core.objective import Denominators
from treadle_trainer.core.packing import Example
from treadle_trainer.core.ranks import ALONE, Ranks
from treadle_trainer.core.shaping import Shaping


@dataclass(frozen=True, slots=True)
class Weighed:
    """What a rank is to compute of a step."""

    examples: tuple[Example, ...]
    """Segments that enter the loss, in order of groups, episodes and segments."""
    denominators: Denominators
    """Of all ranks."""
    num_media: int = 0
    """Segments of all ranks that would have entered, and show media."""
    spreads: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the advantages, as `StepResult.spreads`."""
    silent: tuple[bool, ...] = ()
    """Of each group: no episode of it enters the loss."""
    reward_shaped: float | None = None
    """Mean of the rewards that advantages were made of; None where there is none."""


def weigh_step(
    groups: Sequence[Group],
    advantage: Advantage,
    aggregation: Aggregation,
    ranks: Ranks = ALONE,
    *,
    shaping: Shaping = Shaping(),  # noqa: B008, frozen
) -> Weighed:
    """Weighs the segments of this rank's episodes, counted over the episodes of all ranks.

    A segment that shows media does not enter: without them its tokens have other log-probabilities.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    numbers = np.repeat(np.arange(len(groups)), [len(group.episodes) for group in groups])
    own = [(place, s) for place, episode in enumerate(episodes) for s in episode.segments]
    seen = [(place, segment) for place, segment in own if not segment.media]
    shown = [(place, segment) for place, segment in own if segment.media]
    said = [[(place, s.num_trained, s.num_tokens) for place, s in part] for part in (seen, shown)]
    told = [json.loads(each) for each in ranks.gather(json.dumps(said).encode())]
    owners, tokens, _ = _columns(chain.from_iterable(rows for rows, _ in told))
    size = len(episodes)
    rewards = shaping(
        rewards_of(groups),
        _longest(_columns(chain.from_iterable(chain.from_iterable(told))), size),
        np.array([e.termination is Termination.TRUNCATED for e in episodes], np.bool_),
    )
    found = advantage(
        rewards,
        numbers,
        np.bincount(owners, tokens, size).astype(np.int64),
        np.bincount(owners, minlength=size),
    )
    enters = found.enters
    window, shares = _count(tokens, owners, numbers, enters)
    first = sum(len(rows) for rows, _ in told[: ranks.rank])
    weights = aggregation.weights(shares)[first : first + len(seen)]
    examples = tuple(
        Example.of(segment, float(found.values[place]), float(weight))
        for (place, segment), weight in zip(seen, weights, strict=True)
        if enters[place]
    )
    media = chain.from_iterable(rows for _, rows in told)
    return Weighed(
        examples,
        Denominators(aggregation.normaliser(window), window.num_tokens),
        sum(bool(enters[place]) and count > 0 for place, count, _ in media),
        _spreads(found.values[enters]),
        tuple(not enters[numbers == group].any() for group in range(len(groups))),
        float(np.nanmean(rewards)) if not np.isnan(rewards).all() else None,
    )


def _count(
    tokens: NDArray[np.int64],
    owners: NDArray[np.int64],
    groups: NDArray[np.int64],
    enters: NDArray[np.bool_],
) -> tuple[Window, Shares]:
    """What enters, counted: of trained tokens and episodes of segments, [S]; of episodes, [n]."""
    tokens = np.where(enters[owners], tokens, 0)
    of_episode = np.bincount(owners, tokens, enters.size).astype(np.int64)
    of_prompt = np.bincount(groups, of_episode).astype(np.int64)
    num_segments, num_prompts = int(enters[owners].sum()), int((of_prompt > 0).sum())
    window = Window(int(tokens.sum()), int(enters.sum()), num_segments, num_prompts)
    return window, Shares(tokens, of_episode[owners], of_prompt[groups[owners]])


def weigh(group: Group, advantage: Advantage) -> list[Example]:
    """The segments of a group that enter the loss, each with the advantage of its episode."""
    return list(weigh_step([group], advantage, TokenMean()).examples)


def rewards_of(groups: Sequence[Group]) -> NDArray[np.float64]:
    """Rewards of the members, NaN where there is none, [n]."""
    episodes = chain.from_iterable(group.episodes for group in groups)
    return np.array([math.nan if e.reward is None else e.reward for e in episodes], np.float64)


def _columns(rows: Iterable[tuple[int, int, int]]) -> NDArray[np.int64]:
    """Places, trained tokens and tokens of segments, [3, S]."""
    return np.array([*rows], np.int64).reshape(-1, 3).T


def _longest(columns: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Tokens of the longest segment of each episode, [n]."""
    places, _, tokens = columns
    longest = np.zeros(size, np.int64)
    np.maximum.at(longest, places, tokens)
    return longest


def _spreads(values: NDArray[np.floating]) -> dict[str, float]:
    if not values.size:
        return {}
    return {"advantage_std": float(values.std()), "advantage_max": float(np.abs(values).max())}
