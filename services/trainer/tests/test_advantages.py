import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.step import weigh

REWARDS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_low_reward_among_seven_equal_ones_is_not_amplified(dtype):
    found = Grpo()(np.array([0.35] * 7 + [0.0], dtype))
    np.testing.assert_allclose(found.values[:7], 0.35355339, rtol=1e-5)
    np.testing.assert_allclose(found.values[7], -2.4748737, rtol=1e-5)
    assert found.enters.all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(reward=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 16))
def test_equal_rewards_are_exactly_zero_and_do_not_enter(dtype, reward, count):
    found = Grpo()(np.full(count, reward, dtype))
    assert not found.values.any()
    assert not found.enters.any()


@given(rewards=REWARDS)
def test_rewards_apart_by_rounding_alone_weigh_next_to_nothing(rewards):
    base = np.array(rewards[:1] * 8)
    nudged = base.copy()
    nudged[0] = np.nextafter(base[0], np.inf)
    spread = abs(nudged[0] - base[0])
    assert np.abs(Grpo()(nudged).values).max() <= spread / 1e-9


@given(rewards=REWARDS, missing=st.integers(1, 4))
def test_a_missing_reward_changes_nothing_for_the_others(rewards, missing):
    alone = Grpo()(np.array(rewards))
    found = Grpo()(np.array([math.nan] * missing + rewards))
    np.testing.assert_array_equal(found.values[missing:], alone.values)
    np.testing.assert_array_equal(found.enters[missing:], alone.enters)
    assert not found.values[:missing].any()
    assert not found.enters[:missing].any()


def test_a_group_that_has_one_reward_says_nothing():
    found = Grpo()(np.array([math.nan, 1.0, math.nan]))
    assert not found.values.any()
    assert not found.enters.any()


def test_an_episode_gives_all_its_segments_the_same_advantage(make_group):
    group = make_group(np.random.default_rng(0), [1.0, 0.0, None, 1.0])
    examples = weigh(group, Grpo())
    assert [len(episode.segments) for episode in group.episodes] == [1, 2, 1, 2]
    values = [example.advantage for example in examples]
    assert values == pytest.approx([0.57735, -1.1547, -1.1547, 0.57735, 0.57735], rel=1e-4)
