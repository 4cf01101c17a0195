"""From the rewards of segments to those of episodes, and what is made of them before advantages.

A missing reward is NaN, and stays one. The order is merge, shape, clip.
Shapes: S = segments, n = episodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """The episodes that segments belong to."""

    rewards: NDArray[np.floating]
    """Of each episode: that of its first segment, [n]."""
    groups: NDArray[np.int64]
    """Number of the group of each episode, ascending in order of appearance, [n]."""
    owners: NDArray[np.int64]
    """Number of the episode of each segment, [S]."""


def merge(
    rewards_S: NDArray[np.floating],
    episode_ids: Sequence[Hashable] | None,
    group_ids: Sequence[Hashable] | None,
) -> Merged:
    """Has an episode of several segments count once.

    Without ids every segment is an episode, or every episode a group, of its own. Raises
    InvalidFieldError where there are more or fewer ids than rewards.
    """
    size = len(rewards_S)
    for name, ids in (("episode_ids", episode_ids), ("group_ids", group_ids)):
        if ids is not None and len(ids) != size:
            raise InvalidFieldError(name, limit=f"{size}, as rewards", value=len(ids))
    owners = _numbers(range(size) if episode_ids is None else episode_ids)
    firsts = np.unique(owners, return_index=True)[1]
    groups = range(len(firsts)) if group_ids is None else [group_ids[first] for first in firsts]
    return Merged(rewards_S[firsts], _numbers(groups), owners)


def shape_overlong(
    rewards: NDArray[np.floating],
    lengths: NDArray[np.integer],
    *,
    max_tokens: int,
    buffer: int,
    factor: float = 1.0,
) -> NDArray[np.floating]:
    """R - factor * clip(length - (max_tokens - buffer), 0, buffer) / buffer, [n].

    "DAPO" (arXiv 2503.14476), 3.4, without its jump. `lengths`: tokens of each episode's longest
    segment, [n]. Raises InvalidFieldError where the buffer is not in 1 to max_tokens.
    """
    if not 0 < buffer <= max_tokens:
        raise InvalidFieldError("buffer", limit=f"in 1 to max_tokens {max_tokens}", value=buffer)
    over = np.clip(lengths - (max_tokens - buffer), 0, buffer).astype(rewards.dtype)
    return rewards - rewards.dtype.type(factor) * over / rewards.dtype.type(buffer)


def shape_stop_properly(
    rewards: NDArray[np.floating], truncated: NDArray[np.bool_], *, coefficient: float
) -> NDArray[np.floating]:
    """Of a truncated episode R * coefficient, or, where that is below 0, the coefficient, [n].

    "ProRL" (arXiv 2505.24864). Raises InvalidFieldError where the coefficient is above 1.
    """
    if not coefficient <= 1:
        raise InvalidFieldError("coefficient", limit="<= 1", value=coefficient)
    scalar = rewards.dtype.type(coefficient)
    # A missing reward stays missing, also where it would be replaced.
    shaped = rewards * scalar if coefficient >= 0 else np.where(np.isnan(rewards), rewards, scalar)
    return np.where(truncated, shaped, rewards)


def clip(rewards: NDArray[np.floating], low: float, high: float) -> NDArray[np.floating]:
    """Rewards within [low, high]. Raises InvalidFieldError where that is empty."""
    if not low <= high:
        raise InvalidFieldError("clip_range", limit="low <= high", value=(low, high))
    return np.clip(rewards, low, high)


def largest(values_S: NDArray[np.generic], owners: NDArray[np.int64]) -> NDArray[np.generic]:
    """Over the segments of each episode, [n]."""
    return np.array([values_S[owners == owner].max() for owner in range(owners.max() + 1)])


def group_std(rewards: NDArray[np.floating], groups: NDArray[np.int64]) -> NDArray[np.floating]:
    """Unbiased standard deviation of each episode's group, over the rewards there are, [n].

    0 where fewer than two are there.
    """
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        members = groups == group
        known = rewards[members & ~np.isnan(rewards)]
        found[members] = known.std(ddof=1) if known.size > 1 else 0.0
    return found


def drop_reason(
    episode_ids: Sequence[Hashable],
    scores: Sequence[float | None],
    *,
    group_size: int,
    low: float,
    high: float,
) -> str | None:
    """Why a group teaches nothing, or None: dynamic sampling as in "DAPO" (arXiv 2503.14476), 3.2.

    It is kept where low < mean score < high, each episode once; one with an episode that has no
    score is kept too. `incomplete_group`: fewer episodes than `group_size`.
    """
    by_episode: dict[Hashable, float | None] = {}
    for episode_id, score in zip(episode_ids, scores, strict=True):
        by_episode.setdefault(episode_id, score)
    if len(by_episode) < group_size:
        return "incomplete_group"
    known = [score for score in by_episode.values() if score is not None and not np.isnan(score)]
    if len(known) < len(by_episode) or low < sum(known) / len(known) < high:
        return None
    return "dynamic_filter"


def _numbers(ids: Sequence[Hashable]) -> NDArray[np.int64]:
    """Each id's place among the different ones, in order of appearance."""
    found: dict[Hashable, int] = {}
    return np.array([found.setdefault(id_, len(found)) for id_ in ids], np.int64)
