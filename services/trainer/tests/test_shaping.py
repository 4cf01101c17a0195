"""What a recipe has made of rewards: once an episode, before advantages."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from treadle_core.episodes import Group, Termination
from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.shaping import Overlong, Shaping
from treadle_trainer.core.step import StepSettings, silent, train_step

RAMP = Overlong(max_tokens=20, buffer=10)


def shaped(shaping, rewards, lengths, truncated):
    arrays = (np.array(rewards, np.float64), np.array(lengths), np.array(truncated, np.bool_))
    return shaping(*arrays).tolist()


def step(backend, groups, shaping):
    return train_step(
        backend,
        groups,
        advantage=Grpo(),
        loss=PpoClip(),
        settings=StepSettings(128, 1.0, shaping=shaping),
        learning_rate=1e-2,
    )


def ended(group, *terminations):
    """The group, its episodes ended so."""
    pairs = zip(group.episodes, terminations, strict=True)
    return Group(group.task_id, tuple(replace(e, termination=t) for e, t in pairs))


@pytest.mark.parametrize(
    ("shaping", "told"),
    [
        pytest.param(Shaping(), [1.0, 1.0, 1.0, -1.0], id="nothing"),
        pytest.param(Shaping(RAMP), [1.0, 0.5, 0.0, -2.0], id="ramp"),
        pytest.param(Shaping(replace(RAMP, factor=0.5)), [1.0, 0.75, 0.5, -1.5], id="half-a-ramp"),
        pytest.param(Shaping(stop_properly=0.5), [1.0, 0.5, 1.0, -0.5], id="keeps-half"),
        pytest.param(Shaping(stop_properly=-0.25), [1.0, -0.25, 1.0, -0.25], id="gets-instead"),
        pytest.param(Shaping(RAMP, clip=(-1.0, 0.25)), [0.25, 0.25, 0.0, -1.0], id="then-clips"),
    ],
)
def test_rewards_are_shaped_and_then_clipped(shaping, told):
    found = shaped(
        shaping,
        [1.0, 1.0, 1.0, -1.0, math.nan],
        [10, 15, 20, 30, 30],
        [False, True, False, True, True],
    )

    assert found[:4] == told
    assert math.isnan(found[4])


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        pytest.param({"overlong": RAMP, "stop_properly": 0.5}, "shaping", id="both"),
        pytest.param({"overlong": Overlong(10, 20)}, "buffer", id="long-ramp"),
        pytest.param({"stop_properly": 1.5}, "coefficient", id="reward-for-truncation"),
        pytest.param({"clip": (1.0, -1.0)}, "clip_range", id="empty-range"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong, field):
    with pytest.raises(InvalidFieldError) as caught:
        Shaping(**wrong)

    assert caught.value.field == field


def test_equal_rewards_that_shaping_parts_are_trained_on(backend_class, table, make_group):
    group = make_group(np.random.default_rng(1), [1.0, 1.0])
    told = ended(group, Termination.FINISHED, Termination.TRUNCATED)
    backend, other = backend_class(table), backend_class(table)
    halves = Shaping(stop_properly=0.5)

    plain, found = step(other, [told], Shaping()), step(backend, [told], halves)

    assert (plain.num_silent, plain.num_trained, plain.reward_shaped) == (1, 0, None)
    assert (found.num_silent, found.reward_shaped) == (0, 0.75)
    assert found.num_trained == sum(s.num_trained for e in group.episodes for s in e.segments)
    # It is the step of the same episodes, had the agent rewarded them so.
    rewarded = Group("t", (told.episodes[0], replace(told.episodes[1], reward=0.5)))
    step(other, [rewarded], Shaping())
    torch.testing.assert_close(backend.table, other.table, rtol=0, atol=0)
    settings = StepSettings(128, 1.0, shaping=halves)
    assert silent([told], advantage=Grpo(), settings=settings) == (False,)


def test_an_episode_is_as_long_as_its_longest_segment(
    backend_class, table, make_segment, make_group
):
    rng = np.random.default_rng(2)
    group = make_group(rng, [1.0, 1.0])
    first, second = group.episodes
    longest = max(s.num_tokens for e in group.episodes for s in e.segments)
    long = make_segment(rng, longest + 10)
    longer = Group("t", (replace(first, segments=(*first.segments, long)), second))
    ramp = Shaping(Overlong(max_tokens=longest + 10, buffer=10))

    assert step(backend_class(table), [longer], ramp).reward_shaped == 0.5
    assert step(backend_class(table), [group], ramp).reward_shaped == 1.0
