import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_trainer.core import rewards
from treadle_trainer.core.advantages import whiten
from treadle_trainer.core.advantages.batch_mean import BatchMean
from treadle_trainer.core.advantages.dr_grpo import DrGrpo
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.advantages.reinforce import Reinforce
from treadle_trainer.core.advantages.reinforce_baseline import ReinforceBaseline
from treadle_trainer.core.advantages.rloo import Rloo
from treadle_trainer.core.weighing import weigh

REWARDS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_low_reward_among_seven_equal_ones_is_not_amplified(dtype):
    found = Grpo()(np.array([0.35] * 7 + [0.0], dtype))
    np.testing.assert_allclose(found.values[:7], 0.35355339, rtol=1e-5)
    np.testing.assert_allclose(found.values[7], -2.4748737, rtol=1e-5)
    assert found.enters.all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(reward=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 16))
@settings(max_examples=50)
def test_equal_rewards_are_exactly_zero_and_do_not_enter(dtype, reward, count):
    found = Grpo()(np.full(count, reward, dtype))
    assert not found.values.any()
    assert not found.enters.any()


@given(known=REWARDS)
@settings(max_examples=50)
def test_rewards_apart_by_rounding_alone_weigh_next_to_nothing(known):
    base = np.array(known[:1] * 8)
    nudged = base.copy()
    nudged[0] = np.nextafter(base[0], np.inf)
    spread = abs(nudged[0] - base[0])
    assert np.abs(Grpo()(nudged).values).max() <= spread / 1e-9


@given(known=REWARDS, missing=st.integers(1, 4))
@settings(max_examples=50)
def test_a_missing_reward_changes_nothing_for_the_others(known, missing):
    alone = Grpo()(np.array(known))
    found = Grpo()(np.array([math.nan] * missing + known))
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


SHAPED = {
    "overlong": lambda r: rewards.shape_overlong(r, np.full(3, 9), max_tokens=10, buffer=2),
    "stop-properly": lambda r: rewards.shape_stop_properly(r, np.full(3, True), coefficient=0.5),
    "replaced": lambda r: rewards.shape_stop_properly(r, np.full(3, True), coefficient=-0.5),
    "clip": lambda r: rewards.clip(r, -1, 0.5),
}


@pytest.mark.parametrize("shape", SHAPED.values(), ids=SHAPED)
def test_a_missing_reward_stays_missing_whatever_is_made_of_rewards(shape):
    found = shape(np.array([1.0, math.nan, 0.0]))
    assert np.isnan(found).tolist() == [False, True, False]


PLUGINS = [DrGrpo(), Rloo(), Reinforce(), ReinforceBaseline(), BatchMean()]


@pytest.mark.parametrize("plugin", PLUGINS, ids=repr)
@given(known=REWARDS)
@settings(max_examples=25)
def test_an_episode_without_a_reward_is_in_no_mean(plugin, known):
    alone = plugin(np.array(known))
    found = plugin(np.array([math.nan, *known]))
    assert found.values[0] == 0
    assert not found.enters[0]
    np.testing.assert_allclose(found.values[1:], alone.values, rtol=1e-12, atol=1e-12)
    assert found.enters[1:].all()


@pytest.mark.parametrize("plugin", [Grpo(), DrGrpo(), Rloo()], ids=repr)
def test_groups_are_told_by_number_wherever_their_episodes_are(plugin):
    values = np.array([0.0, 1.0, 1.0, 0.25, 0.5])
    groups = np.array([1, 0, 1, 1, 0])
    found = plugin(values, groups)
    for group in (0, 1):
        wanted = plugin(values[groups == group])
        np.testing.assert_array_equal(found.values[groups == group], wanted.values)


def test_a_mean_over_segments_counts_long_episodes_more():
    values, segments = np.array([1.0, 0.0]), np.array([3, 1])
    assert BatchMean()(values, segments=segments).values.tolist() == [0.5, -0.5]
    by_segment = BatchMean("segment")(values, segments=segments)
    assert by_segment.values.tolist() == [0.25, -0.75]


@pytest.mark.parametrize(
    ("spread", "wanted"),
    [
        pytest.param(1.0, 1.0, id="one"),
        pytest.param(1e-3, 1.0, id="small"),
        pytest.param(1e-5, 0.1, id="below-the-floor-of-the-variance"),
        pytest.param(0.0, 0.0, id="none"),
    ],
)
def test_whitening_divides_by_the_deviation_of_the_tokens_but_by_no_less_than_1e_4(spread, wanted):
    found = whiten(np.array([spread, -spread, 7.0]), np.array([3, 3, 0]))
    np.testing.assert_allclose(found, [wanted, -wanted, 0.0], rtol=1e-9)
