"""Several ranks take the step of one: the same gradient, the same faults, the same end."""

import copy
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.episodes import Episode, Group, Termination
from treadle_core.errors import PayloadMissingError
from treadle_core.faults import FaultReason
from treadle_trainer import training, wire
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.ranks import ALONE
from treadle_trainer.core.shares import share_out, shares
from treadle_trainer.core.step import StepSettings, train_step
from treadle_trainer.training import BatchFaultyError

pytestmark = pytest.mark.component


class Thread:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def gather(self, said):
        return self._exchange(said)

    def add_up(self, tensor):
        tensor.copy_(torch.stack(self._exchange(tensor.clone())).sum(0))

    def _exchange(self, what):
        self._board[self.rank] = what
        self._barrier.wait(20)
        found = list(self._board)
        self._barrier.wait(20)
        return found


def together(size, work):
    """What `work` returns, or raises, on each of so many ranks."""
    board, barrier = [None] * size, threading.Barrier(size)

    def one(rank):
        try:
            return work(Thread(rank, size, board, barrier))
        except BatchFaultyError as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


class Kept(SingleBackend):
    """Backend that keeps the gradient of its last update."""

    def update(self, learning_rate):
        self.gradient = {name: p.grad.clone() for name, p in self._parameters.items()}
        super().update(learning_rate)


def part_of(groups, rank, size):
    """The groups with every `size`-th episode's segments, from the `rank`-th on."""
    number, found = 0, []
    for group in groups:
        episodes = []
        for episode in group.episodes:
            mine = number % size == rank
            episodes.append(episode if mine else replace(episode, segments=()))
            number += 1
        found.append(Group(group.task_id, tuple(episodes)))
    return found


LOADING = threading.Lock()
"""transformers loads one model at a time."""


@functools.cache
def loaded(policy):
    """Never trained itself."""
    return Kept(policy, device="cpu")


def stepped(policy, groups, ranks, microbatch_tokens):
    with LOADING:
        backend = copy.deepcopy(loaded(policy))
    result = train_step(
        backend,
        part_of(groups, ranks.rank, ranks.size),
        advantage=Grpo(),
        loss=PpoClip(),
        settings=StepSettings(microbatch_tokens, max_grad_norm=1.0),
        learning_rate=1e-3,
        ranks=ranks,
    )
    return backend, result


@pytest.mark.parametrize(
    ("size", "microbatch_tokens"),
    [
        pytest.param(2, 20, id="unpacked"),
        pytest.param(2, 1000, id="packed"),
        pytest.param(3, 64, id="uneven"),
        pytest.param(12, 64, id="more-ranks-than-episodes"),
    ],
)
def test_the_gradient_of_ranks_is_that_of_one_rank_however_episodes_and_segments_fall(
    policy, make_group, size, microbatch_tokens
):
    rng = np.random.default_rng(36)
    groups = [make_group(rng, [1.0, 0.0, 1.0, 0.0, None]), make_group(rng, [1.0] * 3),
              make_group(rng, [0.5, 0.25, 1.0])]  # fmt: skip
    alone, wanted = stepped(policy, groups, ALONE, 1000)
    for backend, found in together(size, lambda r: stepped(policy, groups, r, microbatch_tokens)):
        torch.testing.assert_close(backend.gradient, alone.gradient, rtol=0, atol=1e-6)
        assert found.num_trained == wanted.num_trained
        assert found.num_silent == wanted.num_silent == 1
        for name in ("loss", "grad_norm"):
            assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-6)
        assert found.sums == pytest.approx(wanted.sums, abs=1e-4)
        assert found.spreads == pytest.approx(wanted.spreads, abs=1e-4)


@pytest.mark.parametrize("size", [2, 5])
def test_ragged_episodes_need_not_be_divisible_by_anything(policy, make_segment, size):
    rng = np.random.default_rng(89)
    counts = [1, 7, 3, 0, 11]
    episodes = [
        Episode(
            tuple(make_segment(rng, int(rng.integers(6, 24))) for _ in range(count + 1)),
            float(index % 2),
            Termination.FINISHED,
        )
        for index, count in enumerate(counts)
    ]
    groups = [Group("ragged", tuple(episodes))]
    alone, _ = stepped(policy, groups, ALONE, 1000)
    for backend, _ in together(size, lambda ranks: stepped(policy, groups, ranks, 32)):
        torch.testing.assert_close(backend.gradient, alone.gradient, rtol=0, atol=1e-6)


def test_all_ranks_hold_the_same_bits_after_a_step(policy, make_group):
    groups = [make_group(np.random.default_rng(5), [1.0, 0.0, 1.0])]
    (first, one), (second, two) = together(2, lambda r: stepped(policy, groups, r, 64))
    assert one == two
    torch.testing.assert_close(dict(first.parameters()), dict(second.parameters()), rtol=0, atol=0)


class Fetching:
    """Payloads that note what was read, and lack some."""

    def __init__(self, payloads, lacking=()):
        self._payloads, self._lacking = payloads, lacking
        self.read_ids = []

    def read(self, episodes):
        self.read_ids += [episode.episode_id for episode in episodes]
        gone = PayloadMissingError("gone", field="sha256")
        found = self._payloads.read(episodes)
        pairs = zip(episodes, found, strict=True)
        return [gone if e.episode_id in self._lacking else read for e, read in pairs]


def trained(run, claim, ranks, lacking=(), **changes):
    recipe = replace(run.trainer()._recipe, **changes)
    payloads = Fetching(run.payloads, lacking)
    backend = recipe.build_backend(run.policy)
    result = training.train(
        claim, step=1, recipe=recipe, backend=backend, payloads=payloads, ranks=ranks
    )
    return result, payloads.read_ids


def test_each_episode_is_read_by_one_rank_only(make_run):
    run = make_run(1, rewards=((1.0, 0.0, 1.0), (0.0, 1.0)))
    claim = Claim(run.experience.batches[0])
    (_, first), (_, second) = together(2, lambda ranks: trained(run, claim, ranks))
    assert sorted(first + second) == sorted(e.episode_id for e in claim.episodes)
    assert first
    assert second


def test_ranks_agree_on_the_faults_of_all_before_anything_is_computed(make_run, backend_class):
    class Untouched(backend_class):
        def logprobs(self, microbatch):
            raise AssertionError("a forward pass")

    run = make_run(1, rewards=((1.0, 0.0, 1.0), (0.0, 1.0)))
    claim = Claim(run.experience.batches[0])
    turns = share_out(claim, Grpo(), 2)
    bad = [claim.episodes[turns.index(rank)].episode_id for rank in (0, 1)]
    found = together(2, lambda r: trained(run, claim, r, bad, build_backend=Untouched))
    assert [sorted(fault.episode_id for fault in error.faults) for error in found] == [bad, bad]
    assert {f.reason for error in found for f in error.faults} == {FaultReason.PAYLOAD_LOST}


def test_ranks_come_to_the_same_culprits(make_run, backend_class):
    class Poisoned(backend_class):
        def logprobs(self, microbatch):
            logprobs, entropy = super().logprobs(microbatch)
            poison = float("nan") if (microbatch.advantages > 1.1).any() else 1.0
            return logprobs * poison, entropy

    run = make_run(1, rewards=((1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0)))  # 1.155 in the second
    claim = Claim(run.experience.batches[0])
    found = together(2, lambda ranks: trained(run, claim, ranks, build_backend=Poisoned))
    named = [[fault.episode_id for fault in error.faults] for error in found]
    assert named == [["1-1-0", "1-1-1", "1-1-2"]] * 2


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_no_rank_has_more_than_another_by_more_than_one_load(loads, num_ranks):
    turns = shares(loads, num_ranks)
    taken = [
        sum(load for load, turn in zip(loads, turns, strict=True) if turn == rank)
        for rank in range(num_ranks)
    ]
    assert max(taken) - min(taken) <= max(loads, default=0)


def test_a_claim_is_the_same_after_a_journey(make_run):
    claim = Claim(make_run(1).experience.batches[0], last=True)
    assert wire.claim_from_wire(wire.claim_to_wire(claim)) == claim
