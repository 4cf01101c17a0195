"""Which rank reads and computes which episodes of a batch."""

from collections.abc import Sequence

from treadle_core.episodes import Episode, Group
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.claims import Claim, ClaimedEpisode
from treadle_trainer.core.weighing import rewards_of


def share_out(claim: Claim, advantage: Advantage, num_ranks: int) -> list[int]:
    """The rank of each episode, in recorded order: even in tokens to train, and in others."""
    enters: list[bool] = []
    for task in claim.tasks:
        group = Group(task.task_id, tuple(map(unread, task.episodes)))
        # By rewards as they are: who enters by their shaping changes no more than the balance.
        enters += [bool(advantage(rewards_of([group])).enters.any())] * len(task.episodes)
    ranks = [0] * len(enters)
    for which in (True, False):
        places = [place for place, each in enumerate(enters) if each is which]
        loads = [claim.episodes[place].num_tokens for place in places]
        for place, rank in zip(places, shares(loads, num_ranks), strict=True):
            ranks[place] = rank
    return ranks


def unread(claimed: ClaimedEpisode) -> Episode:
    """The episode as far as its record tells: without its segments."""
    return Episode((), claimed.reward, claimed.termination, claimed.metrics)


def shares(loads: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that takes each load, so that their sums differ little: the largest load first."""
    taken = [0] * num_ranks
    ranks = [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda index: -loads[index]):
        ranks[index] = min(range(num_ranks), key=taken.__getitem__)
        taken[ranks[index]] += loads[index]
    return ranks
